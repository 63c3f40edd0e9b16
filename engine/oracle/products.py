"""Matrix products with weights as they are stored: one slab of the weight at a time is widened to float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.graph import PACKED, Weight
from engine.oracle.inputs import MICROSOFT, Array, Coded, Computed, Inputs, Unserved, rule

SLAB_ELEMENTS = 1 << 25
"""Elements of a weight that are float32 at one time: 128 MiB."""


def product(x: Array, n: int, slab: Callable[[int, int], Array]) -> Array:
    """x [..., K] @ W [K, n], where slab(from, to) gives those columns of W in float32."""
    k = x.shape[-1]
    flat = np.ascontiguousarray(x.reshape(-1, k), np.float32)
    step = max(1, SLAB_ELEMENTS // max(k, 1))
    parts = [np.matmul(flat, slab(start, min(start + step, n))) for start in range(0, n, step)]
    return np.concatenate(parts, axis=1).reshape(*x.shape[:-1], n)


def codes(packed: Array, bits: int) -> Array:
    """Unsigned codes out of bytes, low bits first: the last axis grows 8 / bits times."""
    if bits not in (2, 4, 8):
        raise Unserved(f"{bits} bits")
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    split = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return split.reshape(*packed.shape[:-1], packed.shape[-1] * (8 // bits))


def dequantised(q: Array, scales: Array, points: Array, width: int) -> Array:
    """(code - zero point) * scale in blocks along the last axis; q [..., blocks * block], the others [..., blocks]."""
    blocks = scales.shape[-1]
    values = q.reshape(*q.shape[:-1], blocks, -1).astype(np.float32)
    values -= points[..., None]
    values *= scales[..., None]
    return values.reshape(q.shape)[..., :width]


@rule("MatMul")
def _matmul(i: Inputs) -> Computed:
    x, w = i.floats(0), i.value(1)
    if isinstance(w, np.ndarray | Weight) and len(w.shape) == 2:
        stored = i.stored(1)
        return product(x, stored.shape[1], lambda a, b: np.asarray(stored[:, a:b], np.float32))
    return np.asarray(np.matmul(x, i.floats(1)))


@rule("Gemm")
def _gemm(i: Inputs) -> Computed:
    x, w = (i.floats(n).T if i.whole(name, 0) else i.floats(n) for n, name in ((0, "transA"), (1, "transB")))
    made = np.float32(i.number("alpha", 1.0)) * np.matmul(x, w)
    return np.asarray(made + np.float32(i.number("beta", 1.0)) * i.floats(2) if i.has(2) else made)


@rule("MatMulNBits", MICROSOFT)
def _matmul_nbits(i: Inputs) -> Computed:
    i.only("weight_prepacked", 0)
    k, n, bits, block = i.whole("K", 0), i.whole("N", 0), i.whole("bits", 4), i.whole("block_size", 0)
    blocks = -(-k // block)
    packed = i.stored(1).reshape(n, -1)
    scales = i.stored(2).reshape(n, blocks)
    points = _points(i, 3, (n, blocks), bits)
    groups = None if not i.has(4) else i.stored(4).astype(np.int64)

    def slab(a: int, b: int) -> Array:
        q, s, z = codes(packed[a:b], bits), np.asarray(scales[a:b], np.float32), points(a, b)
        if groups is None:
            return dequantised(q, s, z, k).T
        return ((q[:, :k].astype(np.float32) - z[:, groups]) * s[:, groups]).T

    made = product(i.floats(0), n, slab)
    return np.asarray(made + i.floats(5) if i.has(5) else made)


def _points(i: Inputs, index: int, shape: tuple[int, int], bits: int) -> Callable[[int, int], Array]:
    """Zero points of rows [from, to) in float32: packed as the codes are, or floats, or the middle code."""
    rows, blocks = shape
    if not i.has(index):
        return lambda a, b: np.full((b - a, blocks), 1 << (bits - 1), np.float32)
    stored = i.stored(index).reshape(rows, -1)
    if stored.dtype == np.uint8:
        return lambda a, b: codes(stored[a:b], bits)[:, :blocks].astype(np.float32)
    return lambda a, b: np.asarray(stored[a:b], np.float32)


@rule("GatherBlockQuantized", MICROSOFT)
def _gather_block_quantized(i: Inputs) -> Computed:
    i.only("gather_axis", 0)
    table, ids, scales = i.stored(0), i.stored(1), i.stored(2)
    bits, block = i.whole("bits", 4), i.whole("block_size", 128)
    if table.ndim != 2 or i.whole("quantize_axis", 1) not in (1, -1):
        raise Unserved(f"a table {list(table.shape)} quantised along axis {i.whole('quantize_axis', 1)}")
    value = i.value(0)
    typed = isinstance(value, Weight) and value.dtype in PACKED
    rows = table[ids] if typed else codes(table[ids], bits)
    width = rows.shape[-1]
    blocks = -(-width // block)
    s = np.asarray(scales.reshape(table.shape[0], blocks)[ids], np.float32)
    if not i.has(3):
        z = np.full(s.shape, 0 if typed else 1 << (bits - 1), np.float32)
    else:
        stored = i.stored(3).reshape(table.shape[0], -1)[ids]
        z = (stored if typed else codes(stored, bits))[..., :blocks].astype(np.float32)
    spare = [(0, 0)] * (rows.ndim - 1) + [(0, blocks * block - width)]
    return dequantised(np.pad(rows, spare), s, z, width)


@rule("DequantizeLinear")
def _dequantize(i: Inputs) -> Computed:
    def floats() -> Array:
        x = i.stored(0)
        axis, block = i.whole("axis", 1), i.whole("block_size", 0)
        made = x.astype(np.float32)
        if i.has(2):
            made -= _spread(i.stored(2), x.shape, axis, block)
        made *= _spread(i.stored(1), x.shape, axis, block)
        return made

    value = i.value(0)
    return Coded(value, floats) if isinstance(value, Weight) else floats()


def _spread(small: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    """Scales or zero points repeated to the codes' shape, or to one that broadcasts with it."""
    wide = np.asarray(small, np.float32)
    if block:
        spread = np.repeat(wide, block, axis)
        return np.take(spread, np.arange(shape[axis]), axis)
    if math.prod(wide.shape) == 1:
        return wide.reshape(())
    extents = [1] * len(shape)
    extents[axis] = -1
    return wide.reshape(extents)
