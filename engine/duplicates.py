"""A tied table that an exporter wrote twice: the same numbers under two names, on disk, in memory and on the link."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.graph import Weight
from engine.plan import Plan

_SAMPLE_BYTES = 1 << 12
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A key whose bytes are those of an embedding table, as they lie or transposed."""

    key: str
    table: str
    nbytes: int


def duplicates(plan: Plan) -> tuple[Duplicate, ...]:
    """Keys that hold a table again under another name; a folder without weights yet, all zeros, has none."""
    return tuple(
        Duplicate(key.name, table.name, key.nbytes)
        for key in plan.keys
        for table in plan.hosts
        if key.name != table.name and _same(key.weight, table)
    )


def _same(left: Weight, right: Weight) -> bool:
    if (left.nbytes, left.dtype) != (right.nbytes, right.dtype) or not left.data[:_SAMPLE_BYTES].any():
        return False
    if np.array_equal(left.data[:_SAMPLE_BYTES], right.data[:_SAMPLE_BYTES]):
        starts = range(0, left.nbytes, _CHUNK_BYTES)
        return all(np.array_equal(left.data[i : i + _CHUNK_BYTES], right.data[i : i + _CHUNK_BYTES]) for i in starts)
    if len(left.shape) != 2 or left.shape != right.shape[::-1]:
        return False
    rows = left.array()  # of one's rows, the other's columns: bytes alike, whatever they stand for
    columns = right.array().T
    return np.array_equal(rows[:1], columns[:1]) and all(
        np.array_equal(row, column) for row, column in zip(rows, columns, strict=True)
    )
