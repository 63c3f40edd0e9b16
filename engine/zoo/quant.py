"""Block-quantised weights: what MatMulNBits reads, and how GGUF's Q4_1 and Q8_0 blocks become it.

Block size is 32 throughout. A GGUF row of K weights is K/32 blocks, each a header and its codes, so that moving
whole rows (the rotary un-permutation) moves whole blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import UnsupportedModel

BLOCK = 32
Q4_1_BLOCK_BYTES = 2 + 2 + BLOCK // 2
Q8_0_BLOCK_BYTES = 2 + BLOCK

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """One weight of N rows and K columns as MatMulNBits reads it; a weight is (code - zero point) * scale.

    `codes` [N, K/32, 4*bits] uint8, element 0 in the low bits of byte 0; `scales` [N, K/32] fp32; `zero_points`
    absent (2**(bits-1)), fp32 [N, K/32], or uint8 packed [N, ceil(K/32 * bits / 8)].
    """

    bits: int
    codes: U8
    scales: F32
    zero_points: F32 | U8 | None = None

    @property
    def rows(self) -> int:
        return int(self.codes.shape[0])

    @property
    def columns(self) -> int:
        return int(self.codes.shape[1]) * BLOCK


def repack_q4_1(rows: U8) -> PackedLinear:
    """Q4_1 rows [N, K/32*20] -> 4-bit codes with fp32 scales d and fp32 zero points -m/d.

    A block is fp16 d, fp16 m, 16 bytes; element j is the low nibble of byte j, j+16 its high nibble; a weight is
    d*q + m. Raises UnsupportedModel for a block with d = 0, which no zero point can express.
    """
    blocks = rows.reshape(rows.shape[0], -1, Q4_1_BLOCK_BYTES)
    d = _fp16(blocks[:, :, 0:2])
    m = _fp16(blocks[:, :, 2:4])
    if not d.all():
        raise UnsupportedModel(
            "a Q4_1 block has scale 0 and a constant value: it has no (code - zero point) * scale form",
            "use a GGUF whose blocks all have a scale",
        )
    nibbles = blocks[:, :, 4:]
    low_half, high_half = nibbles & np.uint8(0x0F), nibbles >> np.uint8(4)
    codes = np.empty_like(nibbles)
    half = BLOCK // 4
    codes[:, :, :half] = _pack_nibbles(low_half)
    codes[:, :, half:] = _pack_nibbles(high_half)
    return PackedLinear(4, codes, d, -m / d)


def repack_q8_0(rows: U8) -> PackedLinear:
    """Q8_0 rows [N, K/32*34] -> 8-bit codes q + 128 with fp32 scales; exact, zero point 128 by default."""
    blocks = rows.reshape(rows.shape[0], -1, Q8_0_BLOCK_BYTES)
    # Flipping the top bit of a two's complement byte is adding 128.
    return PackedLinear(8, blocks[:, :, 2:] ^ np.uint8(0x80), _fp16(blocks[:, :, 0:2]))


def unpermute_rotary_rows(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Undo GGUF's row order for interleaved rotary: [N, ...] -> [N, ...] with halves apart, head by head.

    GGUF stores row pairs (i, i + D/2) of a head side by side; GroupQueryAttention with rotary_interleaved = 0 wants
    the first half of the head, then the second.
    """
    count = rows.shape[0]
    paired = rows.reshape(heads, count // heads // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def quantise_int4(weight: F64, *, asymmetric: bool) -> PackedLinear:
    """Round a weight [N, K] to 4 bits in blocks of 32: symmetric about 8, or with packed uint8 zero points."""
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    if asymmetric:
        low = np.minimum(blocks.min(axis=2), 0.0)
        scales = _scales((np.maximum(blocks.max(axis=2), 0.0) - low) / 15)
        zero_points = np.clip(np.rint(-low / scales), 0, 15)
    else:
        scales = _scales(np.abs(blocks).max(axis=2) / 7)
        zero_points = np.full(scales.shape, 8.0)
    values = np.clip(np.rint(blocks / scales[:, :, None]) + zero_points[:, :, None], 0, 15).astype(np.uint8)
    packed = pack_zero_points(zero_points.astype(np.uint8)) if asymmetric else None
    return PackedLinear(4, _pack_nibbles(values), scales, packed)


def pack_zero_points(zero_points: U8) -> U8:
    """4-bit zero points [N, blocks] -> [N, ceil(blocks/2)] bytes, low nibble first, rows padded to a whole byte."""
    return _pack_nibbles(np.pad(zero_points, ((0, 0), (0, zero_points.shape[1] % 2))))


def dequantise(linear: PackedLinear) -> F64:
    """The exact weights [N, K] in float64, by MatMulNBits' own rule."""
    blocks = linear.codes.shape[1]
    if linear.bits == 8:
        codes = linear.codes
    else:
        codes = np.stack((linear.codes & 0x0F, linear.codes >> 4), axis=-1).reshape(linear.rows, blocks, BLOCK)
    weight: F64 = (codes - _zero_points(linear)[:, :, None]) * linear.scales[:, :, None].astype(np.float64)
    return weight.reshape(linear.rows, linear.columns)


def _zero_points(linear: PackedLinear) -> F64:
    """[N, blocks], whichever of the three forms the weight carries."""
    stored = linear.zero_points
    if stored is None:
        return np.full(linear.scales.shape, 2.0 ** (linear.bits - 1))
    if linear.bits == 4 and stored.dtype == np.uint8:
        packed = stored.astype(np.uint8)
        pairs = np.stack((packed & 0x0F, packed >> 4), axis=-1).reshape(linear.rows, -1)
        return pairs[:, : linear.codes.shape[1]].astype(np.float64)
    return stored.astype(np.float64)


def _pack_nibbles(values: U8) -> U8:
    """4-bit values [..., n] -> bytes [..., n/2], the even one in the low nibble."""
    packed: U8 = values[..., 0::2] | (values[..., 1::2] << np.uint8(4))
    return packed


def _fp16(header: U8) -> F32:
    values: F32 = np.ascontiguousarray(header).view("<f2")[:, :, 0].astype(np.float32)
    return values


def _scales(wanted: F64) -> F32:
    """Scales rounded to what an fp16 graph could hold too; a block of zeros gets 1."""
    scales: F32 = np.where(wanted > 0, wanted, 1.0).astype(np.float16).astype(np.float32)
    return scales
