"""Is the step one captured graph: segments, seams by cause, and what replayed."""

from __future__ import annotations

from collections import Counter
from typing import Final

from jobs.model import Missing
from reports.blocks import Block, CellRef, Column, Details, Heading, Inlines, Name, Section, State, Table, words
from reports.format import Value, change, integer, plural, show
from reports.pictures import capture as pictures
from reports.traffic import reading
from reports.view import CellView, Scope, SweepView

_ROWS: Final = (
    ("segments", "Captured segments of a decode step"),
    ("seams", "Seams between them"),
    ("seam_nodes", "Plan steps inside seams"),
    ("graph_nodes", "Nodes of the live graphs"),
    ("step_kernels", "Kernels of a one-token step"),
    ("captures", "Steps that recorded"),
    ("replays", "Steps that replayed"),
    ("fallbacks", "Steps that fell back to eager"),
    ("invalidations", "Graphs thrown away"),
)
_MUST_NOT_RISE: Final = ("segments", "seams", "fallbacks")


_SAME: Final = State("unchanged", "good")
_UNKNOWN: Final = State("unknown", "warn")


def build(view: SweepView, scope: Scope) -> Section:
    """The counters by arm where they differ, fell back or are unknown; seams by cause; otherwise one line."""
    states = {cell.name: _state(cell) for cell in scope.cells}
    shown: list[Block] = []
    folded: list[Details] = []
    for cell in scope.cells:
        tables = _tables(cell, scope) if cell.source.arms else []
        if states[cell.name] != _SAME:
            shown += [Heading(words(CellRef(cell.name)))] if not scope.is_single and tables else []
            shown += tables
        else:
            prefix = () if scope.is_single else (CellRef(cell.name), *words(": "))
            folded.append(Details(words(*prefix, "capture counters and seams by cause"), tuple(tables)))
    return Section("capture", "Capture", _summary(scope, list(states.values())), tuple(shown), tuple(folded))


def _summary(scope: Scope, states: list[State]) -> Inlines:
    if len(scope.cells) == 1:
        sides = "; ".join(
            f"{arm.arm} {_count(reading(arm, 'segments'), 'segment')}, {_count(reading(arm, 'seams'), 'seam')}, "
            f"{_count(reading(arm, 'fallbacks'), 'fallback')}"
            for arm in scope.cells[0].source.arms
            if arm.role != "null"
        )
        return words(states[0], f": {sides or 'no arm was measured'}.")
    if not states:
        return words(_UNKNOWN, ": no cell was measured.")
    tally = Counter(states)
    pieces = [(state, f" in {plural(number, 'cell')}") for state, number in tally.most_common() if state != _SAME]
    if not pieces:
        return words(_SAME, ": segments, seams and fallbacks of head are those of base in every cell shown.")
    return tuple(piece for state, text in pieces for piece in words(state, f"{text}. "))


def _state(cell: CellView) -> State:
    """How capture of head stands to that of base; a gauge that is missing leaves it unknown, never steady."""
    if cell.base is None or cell.head is None:
        return _UNKNOWN
    before = [reading(cell.base, name) for name in _MUST_NOT_RISE]
    after = [reading(cell.head, name) for name in _MUST_NOT_RISE]
    rises, falls = 0, 0
    for left, right in zip(before, after, strict=True):
        if isinstance(left, Missing) or isinstance(right, Missing):
            return _UNKNOWN
        rises += right > left
        falls += right < left
    if after[0] and not before[0]:
        return State("falls back", "warn") if after[-1] else State("captured", "good")
    if before[0] and not after[0]:  # no fewer segments: none at all
        lost = any(row.metric == "segments" and row.klass == "regressed" for row in cell.source.exact)
        return State("lost", "bad") if lost else State("not captured", "quiet")
    if rises:
        return State("worse", "bad") if not falls else State("changed", "warn")
    if falls:
        return State("better", "good")
    fallbacks = reading(cell.head, "fallbacks")
    return State("falls back", "warn") if fallbacks else _SAME


def _tables(cell: CellView, scope: Scope) -> list[Block]:
    arms = cell.source.arms
    compare = () if cell.head is None else (Column(f"{cell.under_test} against base", "right"),)
    columns = (Column("Capture"), *(Column(arm.arm, "right") for arm in arms), *compare)
    rows = tuple(
        (
            words(label),
            *(words(show(reading(arm, name), "count")) for arm in arms),
            *(words(_compare(cell, name)) for _ in compare),
        )
        for name, label in _ROWS
    )
    blocks: list[Block] = [Table("Capture by arm", columns, rows), *pictures.build(arms)]
    if cell.causes:
        blocks.append(_causes(cell, scope))
    return blocks


def _causes(cell: CellView, scope: Scope) -> Table:
    shown = cell.causes[: scope.deep or scope.rows]
    arms = [arm.arm for arm in cell.source.arms]
    where = (Column("Path"), Column("Place, a layer's number left out"))  # last: they are long, and a comment narrow
    columns = (Column("Reason"), Column("Operator"), *(Column(arm, "right") for arm in arms), *where)
    rows = tuple(
        (
            words(Name(cause.reason)),
            words(Name(cause.operator)),
            *(words(integer(count)) for _, count in cause.counts),
            words(Name(cause.path)),
            words(Name(cause.place)),
        )
        for cause in shown
    )
    return Table("Seams by cause, plan steps", columns, rows, more=len(cell.causes) - len(shown))


def _compare(cell: CellView, name: str) -> str:
    if cell.base is None or cell.head is None:
        return "no comparison"
    return change(reading(cell.base, name), reading(cell.head, name), "count")


def _count(value: Value, noun: str) -> str:
    if isinstance(value, Missing):
        return f"{noun}s {value.missing}"
    return plural(int(value), noun)
