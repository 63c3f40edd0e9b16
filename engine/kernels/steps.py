"""How elements lie: steps from one index to the next, which let one body serve every broadcast, slice and transpose."""

from __future__ import annotations

import math

Shape = tuple[int, ...]


def rows_first(shape: Shape) -> Shape:
    """Steps of an array whose last index moves fastest, in elements."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def broadcast(shape: Shape, to: Shape) -> Shape:
    """Steps over the indices of `to`, 0 where `shape` repeats."""
    return (0,) * (len(to) - len(shape)) + tuple(
        0 if extent == 1 else step for extent, step in zip(shape, rows_first(shape), strict=True)
    )


def merged(shape: Shape, *steps: Shape) -> tuple[Shape, ...]:
    """The same elements in the fewest dimensions, at least one: the shape, then each operand's steps."""
    kept: list[list[int]] = []  # extent, then one step an operand
    for extent, *of in zip(shape, *steps, strict=True):
        if extent == 1:
            continue
        if kept and all(before == step * extent for before, step in zip(kept[-1][1:], of, strict=True)):
            kept[-1] = [kept[-1][0] * extent, *of]
        else:
            kept.append([extent, *of])
    if not kept:
        kept = [[1, *(0 for _ in steps)]]
    return tuple(zip(*kept, strict=True))


def around(shape: Shape, axis: int) -> tuple[int, int, int]:
    """Elements before, along and behind an axis."""
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
