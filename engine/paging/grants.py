"""Growth grants: room that weights give to the KV cache under a limit on both, all of it or none.

What weights may map is set aside from the limit, mapped or not; the KV cache has the rest. Until the cache has grown,
weights are lent what it will need. A growth that finds no room takes it back: weights give way as their policy says,
and never come below what their widest step needs. Either the growth is mapped and both ledgers balance, or it is
refused before anything changed. What was given is not lent again: the next generation grows as far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from engine.counters import Tally
from engine.errors import EngineError, Refused
from engine.paging.ledger import Ledger
from engine.paging.residency import Residency


@dataclass(frozen=True, slots=True)
class Grant:
    """One growth that weights gave way to. All in bytes; what is given is in whole granules."""

    what: str
    needed_bytes: int
    room_bytes: int
    given_bytes: int
    capacity_bytes: int
    """What weights may map from here on."""
    evicted_keys: int
    evicted_bytes: int
    replanned: bool
    """Whether the resident set was chosen anew, and so lies elsewhere."""

    def line(self) -> dict[str, Any]:
        """As an output line."""
        return {"type": "grant", **asdict(self)}


class Grants:
    """Room for one KV cache beside the weights of one pager (None: nobody gives way).

    `most_bytes` is what the cache will ever have mapped (None: not known); `announce` hears of each grant.
    """

    def __init__(
        self,
        ledger: Ledger,
        tally: Tally,
        pager: Residency | None = None,
        most_bytes: int | None = None,
        announce: Callable[[Grant], None] = lambda grant: None,
    ) -> None:
        self._ledger = ledger
        self._tally = tally
        self._pager = pager
        self._most_bytes = most_bytes
        self._announce = announce
        self.made = 0
        """Grants so far."""

    @contextmanager
    def room(self, needed_bytes: int, wanted_bytes: int, what: str) -> Iterator[None]:
        """Have room for `needed_bytes` more, and where weights give way at all, for `wanted_bytes` if they can.

        What is done in it is mapped or undone by whoever does it; where it fails, the room goes back to the weights.
        Raises Refused with both numbers where there is none to be had; then nothing has changed.
        """
        room = self._ledger.room_bytes
        if room is None or needed_bytes <= room:
            yield
            return
        pager, granule = self._pager, self._ledger.granule_bytes
        spare = 0 if pager is None else max(0, pager.capacity_bytes - pager.least_bytes)
        if pager is None or needed_bytes - room > spare:
            self._tally.add("grant_refusals")
            raise Refused(
                f"the KV cache needs {needed_bytes} bytes more for {what}, {room} bytes are left under the vram limit "
                f"and weights can give {spare}",
                f"raise the limit by at least {needed_bytes - room - spare} bytes",
            )
        most = wanted_bytes
        if self._most_bytes is not None:
            most = min(most, self._most_bytes - self._ledger.mapped_bytes("kv"))
        given = min(spare, -(-(max(needed_bytes, most) - room) // granule) * granule)
        before, epoch, evicted = pager.capacity_bytes, pager.epoch, self._evicted()
        try:
            pager.resize(before - given)
            yield
        except EngineError:
            self._tally.add("grant_rollbacks")
            with suppress(EngineError):  # what failed is what is told
                pager.resize(before)
            raise
        self.made += 1
        self._tally.add("growth_grants")
        self._tally.add("granted_bytes", given)
        keys, nbytes = (now - then for now, then in zip(self._evicted(), evicted, strict=True))
        replanned = pager.epoch != epoch
        self._announce(Grant(what, needed_bytes, room, given, pager.capacity_bytes, keys, nbytes, replanned))

    def _evicted(self) -> tuple[int, int]:
        read = self._tally.read()
        return int(read.get("evictions", 0)), int(read.get("evicted_bytes", 0))
