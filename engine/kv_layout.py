"""Where a cached position lies, in each layout, and what follows from that alone: granules, floors, growth copies.

Both layouts keep a layer's keys (and its values) of one sequence in one contiguous range of `capacity` positions:
seq-major as [capacity, kv_heads, head_size], head-major as [kv_heads, capacity, head_size]. onnx-genai section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.graph import DTYPES
from engine.plan import KvGeometry

LAYOUTS = ("seq-major", "head-major")
LEAST_BUCKET_TOKENS = 256
MASK_BYTES = 8
"""Of one position in an attention mask, which exporters make int64."""


@dataclass(frozen=True)
class Placement:
    """One range of the cache: where head h of position p starts, and which bytes the first positions touch."""

    geometry: KvGeometry
    layout: str
    capacity: int
    """Positions that the range has addresses for."""

    @cached_property
    def vector_bytes(self) -> int:
        """Bytes of one head of one position."""
        return self.geometry.token_bytes // self.geometry.kv_heads

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.geometry.token_bytes * self.capacity

    @property
    def shape(self) -> tuple[int, int, int]:
        """Positions, heads, elements: what a kernel indexes, whatever the layout."""
        return self.capacity, self.geometry.kv_heads, self.geometry.head_size

    @cached_property
    def strides(self) -> tuple[int, int, int]:
        """Bytes from one position, head and element to the next."""
        element = DTYPES[self.geometry.dtype].itemsize
        if self.layout == "seq-major":
            return self.geometry.token_bytes, self.vector_bytes, element
        return self.vector_bytes, self.vector_bytes * self.capacity, element

    def windows(self, first: int, end: int) -> tuple[tuple[int, int], ...]:
        """Stretches of bytes, as (start, end), that positions `first` to `end` (not included) take."""
        at, head, _ = self.strides
        heads = 1 if self.layout == "seq-major" else self.geometry.kv_heads
        return tuple((h * head + first * at, h * head + end * at) for h in range(heads))

    def granules(self, tokens: int, granule_bytes: int) -> tuple[int, ...]:
        """Numbers, from 0, of the granules that the first `tokens` positions touch."""
        touched: dict[int, None] = {}
        for start, end in self.windows(0, tokens):
            touched.update(dict.fromkeys(range(start // granule_bytes, -(-end // granule_bytes))))
        return tuple(touched)

    def committed_bytes(self, tokens: int, granule_bytes: int) -> int:
        """Granule bytes that `tokens` positions commit over all layers, keys and values."""
        return self.geometry.layers * 2 * len(self.granules(tokens, granule_bytes)) * granule_bytes


@dataclass(frozen=True, slots=True)
class Buckets:
    """Capacities that a sequence grows through: powers of two from `least`, at most `most`; in tokens."""

    most: int
    least: int = LEAST_BUCKET_TOKENS

    def of(self, tokens: int) -> int:
        """Capacity for `tokens` positions."""
        return min(self.most, max(self.least, 1 << (tokens - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the cache will have done when the last position is in."""

    committed_bytes: int
    peak_bytes: int
    """Most that is committed at once: while a head-major cache is copied, the old and the new ranges."""
    growths: int
    copied_positions: int


def forecast(
    geometry: KvGeometry,
    layout: str,
    buckets: Buckets,
    lengths: Sequence[int],
    granule_bytes: int,
    behind: Sequence[int] = (0,),
) -> Forecast:
    """Of a sequence whose cache is asked for `lengths` positions, in that order, none fewer than before.

    Of a batch that is the longest sequence, and `behind` says how many positions fewer each one has.
    """

    def committed(placement: Placement, tokens: int) -> int:
        return sum(placement.committed_bytes(tokens - less, granule_bytes) for less in behind)

    here = Placement(geometry, layout, buckets.of(lengths[0]))
    length = growths = copied = peak = 0
    for wanted in lengths:
        if buckets.of(wanted) != here.capacity:
            before, here = here, Placement(geometry, layout, buckets.of(wanted))
            growths += 1
            if layout == "head-major":
                copied += sum(length - less for less in behind)
                peak = max(peak, committed(before, length) + committed(here, wanted))
        length = wanted
    left = committed(here, length)
    return Forecast(left, max(peak, left), growths, copied)


@dataclass(frozen=True, slots=True)
class LayoutFloors:
    """What a layout cannot cost less than, for one sequence; and what it costs to fill the model's context."""

    layout: str
    floor_bytes: int
    """Of one position in the smallest bucket."""
    fixed_floor_bytes: int
    """Of one position where the whole context has addresses at once: heads a context apart."""
    crossover_tokens: int
    context_bytes: int
    growth_copy_bytes: int
    """Copied on the way from one position to the whole context."""


def layout_floors(geometry: KvGeometry, context_tokens: int, granule_bytes: int) -> tuple[LayoutFloors, ...]:
    """Both layouts beside each other."""
    buckets = Buckets(context_tokens)
    ends = [1]  # the last position of each bucket, and the first of the next
    while ends[-1] < context_tokens:
        ends += [buckets.of(ends[-1]), min(buckets.of(ends[-1]) + 1, context_tokens)]
    made = []
    for layout in LAYOUTS:
        whole = forecast(geometry, layout, buckets, ends, granule_bytes)
        made.append(
            LayoutFloors(
                layout,
                floor_bytes(geometry, layout, buckets.of(1), granule_bytes),
                floor_bytes(geometry, layout, context_tokens, granule_bytes),
                crossover_tokens(geometry, layout, granule_bytes),
                whole.committed_bytes,
                growth_copy_bytes(geometry, whole.copied_positions),
            )
        )
    return tuple(made)


def floor_bytes(geometry: KvGeometry, layout: str, capacity: int, granule_bytes: int) -> int:
    """Least that a sequence commits: one position in ranges of `capacity` positions."""
    return Placement(geometry, layout, capacity).committed_bytes(1, granule_bytes)


def crossover_tokens(geometry: KvGeometry, layout: str, granule_bytes: int) -> int:
    """Capacity from which rounding to granules stops to matter: where what lies in one piece fills a granule."""
    of_one = Placement(geometry, layout, 1)
    return -(-granule_bytes // (geometry.token_bytes if layout == "seq-major" else of_one.vector_bytes))


@dataclass(frozen=True, slots=True)
class GrowthCopy:
    """What the growth of one sequence's full bucket copies, term by term."""

    layout: str
    from_tokens: int
    to_tokens: int
    kv_bytes: int
    mask_bytes: int
    """Of the model's attention mask, which an engine that keeps one beside the cache copies too: int64, one a position.

    This engine has a length in its place and copies none."""
    sum_bytes: int


def growth_copies(geometry: KvGeometry, context_tokens: int, *, masked: bool) -> tuple[GrowthCopy, ...]:
    """Every growth on the way to the whole context, in both layouts; `masked`: the model takes an attention mask.

    onnx-genai section 5: qwen2.5-14b from 512 to 1024 copies 100,663,296 + 4,096 bytes head-major, and 0 seq-major.
    """
    buckets = Buckets(context_tokens)
    made = []
    for layout in LAYOUTS:
        here = buckets.of(1)
        while here < context_tokens:
            moved = here if layout == "head-major" else 0
            kv, mask = growth_copy_bytes(geometry, moved), MASK_BYTES * moved * masked
            made.append(GrowthCopy(layout, here, buckets.of(here + 1), kv, mask, kv + mask))
            here = buckets.of(here + 1)
    return tuple(made)


def growth_copy_bytes(geometry: KvGeometry, positions: int) -> int:
    """Bytes that a head-major cache copies when it grows with `positions` positions in; seq-major copies none."""
    return geometry.bytes_per_token * positions
