"""The KV cache of one sequence: addresses for a bucket of positions, granules committed as positions come in.

A sequence starts in the bucket of its length and grows through them. Seq-major reserves the largest bucket at once, so
growth maps granules behind the last one: nothing moves, captured graphs stay good. Head-major has heads a capacity
apart, so growth means new ranges, a copy on the device, and graphs that no longer hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from engine.counters import Tally
from engine.device.base import Device
from engine.errors import EngineError, Refused
from engine.kv_layout import Buckets, Placement, growth_copy_bytes
from engine.paging.ledger import Ledger, Pool
from engine.plan import KvGeometry

Growth = Literal["none", "kept", "moved"]
"""What `ensure` did to addresses: same bucket; larger bucket at the same addresses; everything lies elsewhere now."""


class KvCache:
    """Keys and values of every layer, in one layout."""

    def __init__(
        self,
        device: Device,
        geometry: KvGeometry,
        layout: str,
        buckets: Buckets,
        ledger: Ledger,
        pool: Pool,
        tally: Tally,
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._pool = pool
        self._tally = tally
        self._moves = layout == "head-major"
        self.geometry = geometry
        self.buckets = buckets
        self.capacity = 0  # of the bucket: none before the first position
        self._new = True  # no position is in: the next one decides the bucket
        self.placement = Placement(geometry, layout, 0 if self._moves else buckets.most)
        self._ranges: tuple[int, ...] = () if self._moves else self._reserve(self.placement)
        self._committed: tuple[int, ...] = ()  # granules of each range

    def address(self, layer: int, what: str) -> int:
        """Where a layer's keys ("key") or values ("value") start."""
        return self._ranges[2 * layer + (what == "value")]

    def restart(self) -> None:
        """Begin a new sequence: it starts in the bucket of its own length. Nothing is given back before that."""
        self._new = True

    def ensure(self, tokens: int, kept: int) -> Growth:
        """Have `tokens` positions mapped, the first `kept` of them with what they hold now.

        A sequence never shrinks. Raises Refused where the limit has no room, OutOfMemory where the device has none;
        whatever was to be kept is then as it was.
        """
        if tokens > self.buckets.most:
            raise Refused(
                f"the KV cache has addresses for {self.buckets.most} positions, {tokens} are needed",
                "raise kv_capacity",
            )
        bucket = self.buckets.of(tokens)
        wanted = bucket if self._new else max(bucket, self.capacity)
        grows = wanted != self.capacity
        if grows and self._moves:
            self._move(Placement(self.geometry, self.placement.layout, wanted), tokens, kept)
        else:
            self._extend(tokens)
        self.capacity, self._new = wanted, False
        if not grows:
            return "none"
        self._tally.add("kv_growths", 1 if kept else 0)
        return "moved" if self._moves else "kept"

    def forget(self, first: int, end: int) -> None:
        """Positions `first` to `end` (not included) are dead: whoever still reads them is found out."""
        for start in self._ranges:
            for low, high in self.placement.windows(first, end):
                self._device.poison(start + low, high - low)

    def close(self) -> None:
        """Unmap everything and give the addresses back."""
        self._drop(self._ranges, self._committed)
        self._ranges, self._committed, self.capacity = (), (), 0

    def _extend(self, tokens: int) -> None:
        """Map what `tokens` positions touch and is not mapped yet."""
        known = set(self._committed)
        fresh = [g for g in self.placement.granules(tokens, self._device.granule_bytes) if g not in known]
        self._check_room(len(self._ranges) * len(fresh), 0, tokens, self.placement.capacity)
        self._map(self._ranges, fresh)
        self._committed += tuple(fresh)

    def _move(self, to: Placement, tokens: int, kept: int) -> None:
        """Take new ranges, copy what is kept, give the old ones back; in between both are mapped, and charged."""
        granules = to.granules(tokens, self._device.granule_bytes)
        freed = 0 if kept else len(self._ranges) * len(self._committed)
        self._check_room(2 * self.geometry.layers * len(granules), freed, tokens, to.capacity)
        if not kept:  # nothing to copy, so old and new need not stand side by side
            self.close()
        ranges = self._reserve(to)
        try:
            self._map(ranges, granules)
        except EngineError:
            self._drop(ranges, ())
            raise
        for source, target in zip(self._ranges, ranges, strict=False):  # a new sequence has none to copy from
            for here, there in zip(self.placement.windows(0, kept), to.windows(0, kept), strict=True):
                self._device.copy_within(target + there[0], source + here[0], here[1] - here[0])
        self._tally.add("kv_growth_dtod_bytes", growth_copy_bytes(self.geometry, kept))
        self._drop(self._ranges, self._committed)
        self.placement, self._ranges, self._committed = to, ranges, granules

    def _reserve(self, placement: Placement) -> tuple[int, ...]:
        """Addresses for every layer's keys and values, in turns."""
        return tuple(self._device.reserve(placement.nbytes) for _ in range(2 * self.geometry.layers))

    def _check_room(self, granules: int, freed: int, tokens: int, capacity: int) -> None:
        needed = (granules - freed) * self._device.granule_bytes
        room = self._ledger.room_bytes
        if room is not None and needed > room:
            raise Refused(
                f"the KV cache needs {needed} bytes more for {tokens} positions in a bucket of {capacity}, "
                f"{room} bytes are left under the vram limit",
                f"raise the limit by at least {needed - room} bytes",
            )

    def _map(self, ranges: Sequence[int], granules: Sequence[int]) -> None:
        """Map these granules of each range, or none of them."""
        mapped: list[int] = []
        try:
            for start in ranges:
                for number in granules:
                    address = start + number * self._device.granule_bytes
                    self._device.map(address, self._pool.take())
                    self._ledger.charge("kv")
                    mapped.append(address)
        except EngineError:
            self._unmap(mapped)
            raise

    def _unmap(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._pool.give(self._device.unmap(address))
            self._ledger.refund("kv")

    def _drop(self, ranges: Sequence[int], granules: Sequence[int]) -> None:
        for start in ranges:
            self._unmap(start + number * self._device.granule_bytes for number in granules)
            self._device.unreserve(start)
