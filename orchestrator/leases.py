"""Keeping leases alive while their holder waits for something else."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from jobs.errors import StoreError
from jobs.store import BlockClaim, Store

LEASE_S = 60.0
BEAT_S = LEASE_S / 4


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
