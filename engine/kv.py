"""The KV cache of a batch: for each sequence addresses for a bucket of positions, granules as its positions come in.

The sequences share one bucket, the longest one's, and lie a fixed stride apart. They start in the bucket of that length
and grow through them. Seq-major reserves the largest bucket at once, so growth maps granules behind the last one:
nothing moves, captured graphs stay good. Head-major has heads a capacity apart, so growth means new ranges, a copy on
the device, and graphs that no longer hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from engine.counters import Tally
from engine.device.base import Device
from engine.errors import EngineError, Refused
from engine.kv_layout import Buckets, Placement, growth_copy_bytes
from engine.paging.grants import Grants
from engine.paging.ledger import Ledger, Pool
from engine.plan import KvGeometry

Growth = Literal["none", "kept", "moved"]
"""What `ensure` did to addresses: same bucket; larger bucket at the same addresses; everything lies elsewhere now."""

_Granules = tuple[tuple[int, ...], ...]
"""Numbers of granules, sequence by sequence, each from the start of its own part."""


class KvCache:
    """Keys and values of every layer and sequence, in one layout."""

    def __init__(
        self,
        device: Device,
        geometry: KvGeometry,
        layout: str,
        buckets: Buckets,
        ledger: Ledger,
        pool: Pool,
        tally: Tally,
        sequences: int = 1,
        grants: Grants | None = None,
    ) -> None:
        self.grants = grants or Grants(ledger, tally)
        self._device = device
        self._ledger = ledger
        self._pool = pool
        self._tally = tally
        self._moves = layout == "head-major"
        self.geometry = geometry
        self.sequences = sequences
        self.buckets = buckets
        self.capacity = 0  # of the bucket: none before the first position
        self._new = True  # no position is in: the next one decides the bucket
        self.placement = Placement(geometry, layout, 0 if self._moves else buckets.most)
        self._ranges: tuple[int, ...] = () if self._moves else self._reserve(self.placement)
        self._committed: _Granules = ((),) * sequences

    @property
    def stride(self) -> int:
        """Bytes from a sequence's part of a range to the next one's: whole granules."""
        return self._apart(self.placement)

    def address(self, layer: int, what: str) -> int:
        """Where a layer's keys ("key") or values ("value") of sequence 0 start."""
        return self._ranges[2 * layer + (what == "value")]

    def restart(self) -> None:
        """Begin new sequences: they start in the bucket of their own length. Nothing is given back before that."""
        self._new = True

    def ensure(self, tokens: Sequence[int], kept: Sequence[int]) -> Growth:
        """Have `tokens` positions of each sequence mapped, the first `kept` of them with what they hold now.

        A sequence never shrinks. Raises Refused where the limit has no room, OutOfMemory where the device has none;
        whatever was to be kept is then as it was.
        """
        longest = max(tokens)
        if longest > self.buckets.most:
            raise Refused(
                f"the KV cache has addresses for {self.buckets.most} positions, {longest} are needed",
                "raise kv_capacity",
            )
        bucket = self.buckets.of(longest)
        wanted = bucket if self._new else max(bucket, self.capacity)
        grows = wanted != self.capacity
        if grows and self._moves:
            self._move(Placement(self.geometry, self.placement.layout, wanted), tokens, kept)
        else:
            self._extend(tokens, wanted)
        self.capacity, self._new = wanted, False
        if not grows:
            return "none"
        self._tally.add("kv_growths", 1 if any(kept) else 0)
        return "moved" if self._moves else "kept"

    def holds(self, tokens: Sequence[int]) -> bool:
        """Whether so many positions of each sequence have a place already, so that `ensure` would do nothing."""
        if self._new or max(tokens) > self.capacity:
            return False
        wanted = self._granules(self.placement, tokens)
        return all(set(own) <= set(held) for own, held in zip(wanted, self._committed, strict=True))

    def forget(self, sequence: int, first: int, end: int) -> None:
        """Positions `first` to `end` (not included) of a sequence are dead: whoever still reads them is found out."""
        for start in self._ranges:
            for low, high in self.placement.windows(first, end):
                self._device.poison(start + sequence * self.stride + low, high - low)

    def close(self) -> None:
        """Unmap everything and give the addresses back."""
        self._drop(self._ranges, self.stride, self._committed)
        self._ranges, self._committed, self.capacity = (), ((),) * self.sequences, 0

    def _extend(self, tokens: Sequence[int], bucket: int) -> None:
        """Map what `tokens` positions of each sequence touch and is not mapped yet."""
        fresh: list[tuple[int, ...]] = []
        for committed, wanted in zip(self._committed, self._granules(self.placement, tokens), strict=True):
            known = set(committed)
            fresh.append(tuple(g for g in wanted if g not in known))
        needed = self._nbytes(tuple(fresh))
        filled = self._nbytes(self._granules(self.placement, [bucket] * self.sequences))
        with self.grants.room(needed, filled - self._nbytes(self._committed), _told(tokens, bucket)):
            self._map(self._ranges, self.stride, tuple(fresh))
        self._committed = tuple(old + new for old, new in zip(self._committed, fresh, strict=True))

    def _move(self, to: Placement, tokens: Sequence[int], kept: Sequence[int]) -> None:
        """Take new ranges, copy what is kept, give the old ones back; in between both are mapped, and charged."""
        granules = self._granules(to, tokens)
        filled = self._nbytes(self._granules(to, [to.capacity] * self.sequences))
        freed = 0 if any(kept) else self._nbytes(self._committed)
        with self.grants.room(self._nbytes(granules) - freed, filled - freed, _told(tokens, to.capacity)):
            self._move_to(to, granules, kept)

    def _move_to(self, to: Placement, granules: _Granules, kept: Sequence[int]) -> None:
        if not any(kept):  # nothing to copy, so old and new need not stand side by side
            self.close()
        ranges, apart = self._reserve(to), self._apart(to)
        mapped: _Granules = ()
        try:
            self._map(ranges, apart, granules)
            mapped = granules
            self._copy(ranges, apart, to, kept)
        except EngineError:
            self._drop(ranges, apart, mapped)
            raise
        self._tally.add("kv_growth_dtod_bytes", growth_copy_bytes(self.geometry, sum(kept)))
        self._drop(self._ranges, self.stride, self._committed)
        self.placement, self._ranges, self._committed = to, ranges, granules

    def _copy(self, ranges: Sequence[int], apart: int, to: Placement, kept: Sequence[int]) -> None:
        """What is kept goes to ranges that are laid out as `to` says."""
        for source, target in zip(self._ranges, ranges, strict=False):  # a new sequence has none to copy from
            for sequence, cached in enumerate(kept):
                old, new = source + sequence * self.stride, target + sequence * apart
                for here, there in zip(self.placement.windows(0, cached), to.windows(0, cached), strict=True):
                    self._device.copy_within(new + there[0], old + here[0], here[1] - here[0])

    def _granules(self, placement: Placement, tokens: Sequence[int]) -> _Granules:
        """What `tokens` positions of each sequence touch."""
        return tuple(placement.granules(n, self._device.granule_bytes) for n in tokens)

    def _apart(self, placement: Placement) -> int:
        granule = self._device.granule_bytes
        return -(-placement.nbytes // granule) * granule

    def _reserve(self, placement: Placement) -> tuple[int, ...]:
        """Addresses for every layer's keys and values, in turns, of all sequences."""
        nbytes = self._apart(placement) * (self.sequences - 1) + placement.nbytes
        ranges: list[int] = []
        try:
            ranges.extend(self._device.reserve(nbytes) for _ in range(2 * self.geometry.layers))
        except EngineError:
            self._drop(ranges, 0, ())
            raise
        return tuple(ranges)

    def _nbytes(self, granules: _Granules) -> int:
        """Of these granules in every range."""
        return 2 * self.geometry.layers * sum(map(len, granules)) * self._device.granule_bytes

    def _addresses(self, start: int, apart: int, granules: _Granules) -> Iterator[int]:
        """Where granules of each sequence lie, in a range that starts there."""
        for sequence, numbers in enumerate(granules):
            yield from (start + sequence * apart + number * self._device.granule_bytes for number in numbers)

    def _map(self, ranges: Sequence[int], apart: int, granules: _Granules) -> None:
        """Map these granules of each range, or none of them."""
        mapped: list[int] = []
        try:
            for start in ranges:
                for address in self._addresses(start, apart, granules):
                    self._pool.map(address, "kv")
                    mapped.append(address)
        except EngineError:
            self._unmap(mapped)
            raise

    def _unmap(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self._pool.unmap(address, "kv")

    def _drop(self, ranges: Sequence[int], apart: int, granules: _Granules) -> None:
        for start in ranges:
            self._unmap(self._addresses(start, apart, granules))
            self._device.unreserve(start)


def _told(tokens: Sequence[int], bucket: int) -> str:
    return f"{' + '.join(map(str, tokens))} positions in a bucket of {bucket}"
