"""The blocks that seats hold under leases: kept alive, seen to be gone, given back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from jobs.errors import Conflict, IllegalMove, StoreError
from jobs.store import BlockClaim, Store
from orchestrator.place import Placer
from orchestrator.seat import Happening, Seat

LEASE_S = 60.0
BEAT_S = LEASE_S / 4
CHECK_S = 2.0
"""How often it is asked whether a lease is gone: a cancel takes it away at any time."""


class Leases:
    """Of the blocks that `seats` hold, now and later. A beat goes out each `beat_s` of `clock`."""

    def __init__(
        self,
        store: Store,
        placer: Placer,
        seats: Sequence[Seat],
        tell: Callable[[Happening], None],
        clock: Callable[[], float],
        beat_s: float,
    ) -> None:
        self._store = store
        self._placer = placer
        self._seats = seats
        self._tell = tell
        self._clock = clock
        self._beat_s = beat_s
        self._beat_at_s = self._check_at_s = 0.0

    def keep(self) -> None:
        """Keep every lease alive, well before its end, and forfeit the blocks of those that are gone."""
        now_s = self._clock()
        if now_s >= self._check_at_s:
            self._check_at_s = now_s + CHECK_S
            gone = set(self._store.forfeited([(one.block_id, one.fence) for one in self._held()]))
            for seat in self._seats:
                if seat.claim is not None and seat.claim.block_id in gone:
                    self._forfeit(seat, "its lease is gone")
        if now_s >= self._beat_at_s:
            self._beat_at_s = now_s + self._beat_s
            for seat in self._seats:
                with self.forfeiting(seat):
                    if seat.claim is not None:
                        self._store.heartbeat(seat.claim.block_id, seat.claim.fence, LEASE_S)

    def meanwhile(self) -> contextlib.AbstractContextManager[None]:
        """Keep them alive while this thread waits for something that may take longer than they last."""
        return beating(self._store, self._held(), self._beat_s)

    @contextlib.contextmanager
    def forfeiting(self, seat: Seat) -> Iterator[None]:
        """A guard that fails says that the seat's block is another's by now: that costs the block, not the rest."""
        try:
            yield
        except (Conflict, IllegalMove) as gone:
            self._forfeit(seat, str(gone))

    def give_back(self, seat: Seat) -> None:
        """Give a seat's block to others; what ran in it becomes lost."""
        if seat.claim is not None:
            with contextlib.suppress(Conflict):  # somebody else has it already
                self._store.release_block(seat.claim.block_id, seat.claim.fence)

    def _held(self) -> list[BlockClaim]:
        return [seat.claim for seat in self._seats if seat.claim is not None]

    def _forfeit(self, seat: Seat, reason: str) -> None:
        """Have what runs for a block that is no longer ours ended; what it brings is not ours to store."""
        claim = seat.claim
        seat.drop()
        if seat.ticket is not None:
            self._placer.cancel(seat.worker)
        if claim is not None:
            about = f"the block is no longer held from here: {reason}"
            self._store.log_event(claim.sweep_id, "forfeited", about, subject=claim.block_id, worker=seat.worker)
            self._tell(Happening("gone", claim.cell, "all", about))


@contextlib.contextmanager
def beating(store: Store, held: Sequence[BlockClaim], beat_s: float = BEAT_S) -> Iterator[None]:
    """Keep leases alive on a thread, while this one waits for something that may take longer than they last.

    A beat that fails says nothing here: the next guarded change finds the lease gone.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(beat_s):
            for claim in held:
                with contextlib.suppress(StoreError):
                    store.heartbeat(claim.block_id, claim.fence, LEASE_S)

    thread = threading.Thread(target=beat, name="leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
