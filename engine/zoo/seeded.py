"""Weights made from a seed: any row of any tensor at any time, without the rows before it, the same on every machine.

A word is a hash of (seed, tensor, position), so nothing has to be drawn in order and nothing has to be kept: files of
tens of gigabytes are made a chunk at a time, and a forward pass over a few layers reads rows straight from the seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.zoo.quant import BLOCK, F32, U8, PackedLinear

Ids = NDArray[np.int64]

CHUNK_BYTES = 4 << 20
_CACHED_ELEMENTS = 1 << 16
"""Of a part that is widened to float64 and read once: it should not leave the cache in between."""
SYMMETRIC_DEVIATION = math.sqrt(17.5)
"""Of a code less 8: -7 to 7 as likely as each other, 0 twice."""
ASYMMETRIC_DEVIATION = math.sqrt(22.5)
"""Of a code, 0 to 15, less a zero point, 6 to 9."""
_JITTER = 0.25
_POOL_BYTES, _POOL_SHARES = 4_194_301, 65_521
"""Elements of a pool: a prime, so that few rows of a tensor begin at one place of it; small enough for a cache."""
_GOLDEN, _FIRST, _SECOND = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)


@dataclass(frozen=True, slots=True)
class Seeded:
    """A tensor by its rows: `make` gives rows [n, row] for their numbers [n]; leading axes of `shape` count as one."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row: int
    """Elements of a row; the last axis or axes of `shape`."""
    make: Callable[[Ids], NDArray[Any]]

    def rows(self, ids: Ids) -> NDArray[Any]:
        """Rows by number, [n, row]."""
        made = self.make(ids)
        assert made.shape == (ids.size, self.row) and made.dtype == self.dtype, (made.shape, made.dtype)
        return made

    def chunks(self) -> Iterator[NDArray[Any]]:
        """All rows in order, a few MB at a time."""
        count = math.prod(self.shape) // self.row
        each = max(1, CHUNK_BYTES // (self.row * self.dtype.itemsize))
        for start in range(0, count, each):
            yield self.rows(np.arange(start, min(start + each, count)))


@dataclass(frozen=True, slots=True)
class SeededLinear:
    """A 4-bit weight of `rows` rows and `columns` columns as MatMulNBits reads it, each part by its rows."""

    rows: int
    columns: int
    codes: Seeded
    scales: Seeded
    zero_points: Seeded | None = None
    bits: int = 4

    def packed(self, ids: Ids) -> PackedLinear:
        """Some rows, packed."""
        points = None if self.zero_points is None else self.zero_points.rows(ids)
        codes = self.codes.rows(ids).reshape(ids.size, -1, BLOCK // 2)
        return PackedLinear(4, codes, self.scales.rows(ids).astype(np.float32), points)

    def values(self, ids: Ids) -> F32:
        """Some rows, [n, columns]: float32 holds a 4-bit difference times a float16 scale exactly."""
        codes = self.codes.rows(ids)
        out = np.empty((ids.size, self.columns), np.float32)
        out[:, 0::2] = codes & 15
        out[:, 1::2] = codes >> 4
        blocks = out.reshape(ids.size, -1, BLOCK)
        blocks -= 8 if self.zero_points is None else unpack_zero_points(self.zero_points.rows(ids), blocks.shape[1])
        blocks *= self.scales.rows(ids).astype(np.float32)[:, :, None]
        return out

    def parts(self, elements: int) -> Iterator[F32]:
        """The rows in order, about so many elements at a time."""
        each = max(1, elements // self.columns)
        for start in range(0, self.rows, each):
            yield self.values(np.arange(start, min(start + each, self.rows)))

    def product(self, x: NDArray[Any]) -> NDArray[Any]:
        """x [T, columns] times the weight, [T, rows], in the type of x, without ever holding all of it."""
        return _product(x, self.parts(CHUNK_BYTES), self.rows)


class Held:
    """A weight kept in memory as float32, for products with one row at a time and many times."""

    def __init__(self, weight: SeededLinear) -> None:
        self._parts = list(weight.parts(_CACHED_ELEMENTS))
        self._rows = weight.rows

    def product(self, x: NDArray[Any]) -> NDArray[Any]:
        """As the weight's own."""
        return _product(x, self._parts, self._rows)


def _product(x: NDArray[Any], parts: Iterable[F32], rows: int) -> NDArray[Any]:
    out = np.empty((x.shape[0], rows), x.dtype)
    start = 0
    for part in parts:
        np.matmul(x, part.astype(x.dtype, copy=False).T, out=out[:, start : start + len(part)])
        start += len(part)
    return out


class Source:
    """Makes tensors of one seed; a tensor's name is part of its seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def linear(self, name: str, rows: int, columns: int, deviation: float, *, asymmetric: bool = False) -> SeededLinear:
        """A weight whose values have that standard deviation, scales in float16 and a quarter apart either way."""
        blocks = columns // BLOCK
        return SeededLinear(
            rows,
            columns,
            self.codes(name, (rows, blocks, BLOCK // 2), blocks * BLOCK // 2, symmetric=not asymmetric),
            self.scales(name, (rows, blocks), deviation, asymmetric=asymmetric),
            self.zero_points(name, rows, blocks) if asymmetric else None,
        )

    def codes(self, name: str, shape: tuple[int, ...], row: int, *, symmetric: bool) -> Seeded:
        """4-bit codes, two a byte, in rows of `row` bytes; symmetric ones have no 0, whose value would be alone."""
        key, words = self._key(f"{name} codes"), -(-row // 8)

        def make(ids: Ids) -> U8:
            drawn: U8 = _words(key, ids, words).view(np.uint8)[:, :row]
            return _NO_ZERO[drawn] if symmetric else np.ascontiguousarray(drawn)

        return Seeded(np.dtype(np.uint8), shape, row, make)

    def scales(self, name: str, shape: tuple[int, ...], deviation: float, *, asymmetric: bool = False) -> Seeded:
        """Scales for codes of these kinds."""
        middle = deviation / (ASYMMETRIC_DEVIATION if asymmetric else SYMMETRIC_DEVIATION)
        return self.uniform(f"{name} scales", shape, (1 - _JITTER) * middle, (1 + _JITTER) * middle, np.float16)

    def zero_points(self, name: str, rows: int, blocks: int) -> Seeded:
        """4-bit zero points 6 to 9, low half first, rows padded with 0 to whole bytes."""
        key, row = self._key(f"{name} zero points"), -(-blocks // 2)
        words = -(-row // 8)

        def make(ids: Ids) -> U8:
            made: U8 = (_words(key, ids, words).view(np.uint8)[:, :row] & np.uint8(0x33)) + np.uint8(0x66)
            if blocks % 2:
                made[:, -1] &= np.uint8(0x0F)
            return made

        return Seeded(np.dtype(np.uint8), (rows, row), row, make)

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float, dtype: Any) -> Seeded:
        """Numbers spread evenly from `low` to `high`; rows along the last axis."""
        key, row = self._key(name), shape[-1]

        def make(ids: Ids) -> NDArray[Any]:
            share = (_words(key, ids, row) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            return np.asarray((low + (high - low) * share).astype(dtype))

        return Seeded(np.dtype(dtype), shape, row, make)

    def _key(self, name: str) -> np.uint64:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        return np.uint64(int.from_bytes(digest[:8], "little"))


class Poured(Source):
    """The same kinds of tensors, poured: each is one pool of numbers over and over, from a place of its own on.

    Made as fast as it is written, so that models of any size stand in seconds; what they answer means nothing.
    """

    def codes(self, name: str, shape: tuple[int, ...], row: int, *, symmetric: bool) -> Seeded:
        """As a `Source`'s."""
        pool = self._no_zero if symmetric else self._bytes
        return Seeded(np.dtype(np.uint8), shape, row, self._over(pool, f"{name} codes", row))

    def zero_points(self, name: str, rows: int, blocks: int) -> Seeded:
        """As a `Source`'s."""
        row = -(-blocks // 2)
        make = self._over((self._bytes & np.uint8(0x33)) + np.uint8(0x66), f"{name} zero points", row)

        def padded(ids: Ids) -> U8:
            made: U8 = make(ids)
            if blocks % 2:
                made[:, -1] &= np.uint8(0x0F)
            return made

        return Seeded(np.dtype(np.uint8), (rows, row), row, padded)

    def uniform(self, name: str, shape: tuple[int, ...], low: float, high: float, dtype: Any) -> Seeded:
        """As a `Source`'s."""
        pool = (low + (high - low) * self._shares).astype(dtype)
        return Seeded(np.dtype(dtype), shape, shape[-1], self._over(pool, name, shape[-1]))

    def _over(self, pool: NDArray[Any], name: str, row: int) -> Callable[[Ids], NDArray[Any]]:
        start = int(self._key(name)) % pool.size

        def make(ids: Ids) -> NDArray[Any]:
            first, last = (int(ids[0]), int(ids[-1])) if ids.size else (0, -1)
            if last - first + 1 != ids.size or (np.diff(ids) != 1).any():
                return np.asarray(pool[(start + ids[:, None] * row + np.arange(row)) % pool.size])
            out = np.empty(ids.size * row, pool.dtype)
            at, done = (start + first * row) % pool.size, 0
            while done < out.size:
                piece = pool[at : at + out.size - done]
                out[done : done + piece.size] = piece
                at, done = 0, done + piece.size
            return out.reshape(ids.size, row)

        return make

    @cached_property
    def _bytes(self) -> U8:
        drawn: U8 = _words(self._key("pool"), np.arange(-(-_POOL_BYTES // 8)), 1).view(np.uint8).reshape(-1)
        return drawn[:_POOL_BYTES]

    @cached_property
    def _no_zero(self) -> U8:
        return _NO_ZERO[self._bytes]

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        drawn = _words(self._key("pool of shares"), np.arange(_POOL_SHARES), 1).reshape(-1)
        return (drawn >> np.uint64(11)).astype(np.float64) * 2.0**-53


def filled(shape: tuple[int, ...], value: float, dtype: Any) -> Seeded:
    """A tensor of one value."""
    row = shape[-1]
    return Seeded(np.dtype(dtype), shape, row, lambda ids: np.full((ids.size, row), value, dtype))


def mapped(of: Seeded, dtype: Any, change: Callable[[NDArray[Any]], NDArray[Any]], row: int) -> Seeded:
    """A tensor whose rows are another's, changed one by one; of the row length given."""
    rows = math.prod(of.shape) // of.row
    return Seeded(np.dtype(dtype), (rows, row), row, lambda ids: np.asarray(change(of.rows(ids)), dtype))


def unpack_zero_points(packed: U8, blocks: int) -> F32:
    """Zero points of rows [n, bytes] as [n, blocks, 1]."""
    pairs = np.stack((packed & 15, packed >> 4), axis=-1).reshape(packed.shape[0], -1)
    return pairs[:, :blocks, None].astype(np.float32)


def _words(key: np.uint64, ids: Ids, each: int) -> NDArray[np.uint64]:
    """Words [n, each] of the rows given: SplitMix64's output at row * each + column, from the tensor's own start."""
    at: NDArray[np.uint64] = np.empty((ids.size, each), np.uint64)
    at[...] = ids.astype(np.uint64)[:, None] * np.uint64(each) + np.arange(each, dtype=np.uint64)
    at *= _GOLDEN
    at += key
    at ^= at >> np.uint64(30)
    at *= _FIRST
    at ^= at >> np.uint64(27)
    at *= _SECOND
    at ^= at >> np.uint64(31)
    return at


def _without_zero() -> U8:
    pairs = ((byte & 15 or 8) | (byte >> 4 or 8) << 4 for byte in range(256))
    return np.fromiter(pairs, np.uint8, 256)


_NO_ZERO = _without_zero()
"""A byte of two codes, with 8 in place of 0."""
