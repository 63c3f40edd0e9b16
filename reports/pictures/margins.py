"""Margins along two lists of ids: how far each id stood above the second choice, and where the lists part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from reports.blocks import Bar, Bars, Block, Slice
from reports.format import integer, number

MOST_POINTS: Final = 256
_MARK: Final = 4  # thousandths


def build(sides: Sequence[tuple[str, Sequence[float]]], length: int, first_difference: int | None) -> list[Block]:
    """A line for each side on one scale; nothing where no side has margins, or there is but one position."""
    top = max((gap for _, gaps in sides for gap in gaps), default=0.0)
    if top <= 0 or length < 2:
        return []
    bars = tuple(Bar(side, (), _told(gaps), _line(gaps, length, top)) for side, gaps in sides)
    mark: tuple[Slice, ...] = ()
    said = ""
    if first_difference is not None:
        start = min(round(1000 * first_difference / (length - 1)), 1000 - _MARK)
        mark = (Slice("mark", "first difference", integer(first_difference), start, _MARK),)
        said = f" The mark is the first difference, at {integer(first_difference)}."
    ends = ("position 0", f"position {integer(length - 1)}")
    hint = f"Lines rise from 0.{said}"
    return [Bars("Top-2 gap by position, in logits", (("", bars),), (), bands=mark, ends=ends, hint=hint)]


def _told(gaps: Sequence[float]) -> str:
    if not gaps:
        return "not recorded"
    least = min(gaps)
    return f"smallest {number(least)} at position {integer(gaps.index(least))}, largest {number(max(gaps))}"


def _line(gaps: Sequence[float], length: int, top: float) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Points in order; of several positions in a row the smallest gap stays, which is the one that matters."""
    stride = -(-length // MOST_POINTS)
    points = []
    for start in range(0, len(gaps), stride):
        part = gaps[start : start + stride]
        place = start + min(range(len(part)), key=part.__getitem__)
        points.append((round(1000 * place / (length - 1)), 950 - round(900 * gaps[place] / top)))
    return (tuple(points),) if points else ()
