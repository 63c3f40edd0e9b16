"""Is the step one captured graph: segments, seams by cause, and what replayed."""

from __future__ import annotations

from jobs.model import Missing
from reports.blocks import Block, CellRef, Column, Details, Heading, Inlines, Name, Section, State, Table, words
from reports.format import Value, change, integer, plural, show
from reports.traffic import reading
from reports.view import CellView, Scope, SweepView

_ROWS = (
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
_MUST_NOT_RISE = ("segments", "seams", "fallbacks")


def build(view: SweepView, scope: Scope) -> Section:
    """The counters by arm where they differ or a step fell back; seams by cause; otherwise one line."""
    unusual = [cell for cell in scope.cells if _is_unusual(cell)]
    shown: list[Block] = []
    folded: list[Details] = []
    for cell in scope.cells:
        tables = _tables(cell, scope)
        if cell in unusual:
            shown += [Heading(words(CellRef(cell.name)))] if not scope.is_single else []
            shown += tables
        else:
            prefix = () if scope.is_single else (CellRef(cell.name), *words(": "))
            folded.append(Details(words(*prefix, "capture counters and seams by cause"), tuple(tables)))
    summary = _summary(scope, len(unusual))
    return Section("capture", "Capture", summary, tuple(shown), tuple(folded))


def _summary(scope: Scope, unusual: int) -> Inlines:
    if len(scope.cells) == 1:
        cell = scope.cells[0]
        sides = "; ".join(
            f"{arm.arm} {_count(reading(arm, 'segments'), 'segment')}, {_count(reading(arm, 'seams'), 'seam')}, "
            f"{_count(reading(arm, 'fallbacks'), 'fallback')}"
            for arm in cell.source.arms
            if arm.role != "null"
        )
        return words(State("changed", "warn") if unusual else State("steady", "good"), f": {sides}.")
    if unusual:
        return words(State("changed", "warn"), f": capture moved, or fell back, in {plural(unusual, 'cell')}.")
    return words(State("steady", "good"), ": segments, seams and fallbacks are equal in every cell shown.")


def _tables(cell: CellView, scope: Scope) -> list[Block]:
    arms = cell.source.arms
    columns = (Column("Capture"), *(Column(arm.arm, "right") for arm in arms), Column("head against base", "right"))
    rows = tuple(
        (
            words(label),
            *(words(show(reading(arm, name), "count")) for arm in arms),
            words(_compare(cell, name)),
        )
        for name, label in _ROWS
    )
    blocks: list[Block] = [Table("Capture by arm", columns, rows)]
    if cell.causes:
        blocks.append(_causes(cell, scope))
    return blocks


def _causes(cell: CellView, scope: Scope) -> Table:
    shown = cell.causes[: scope.deep or scope.rows]
    arms = [arm.arm for arm in cell.source.arms]
    columns = (Column("Reason"), Column("Path"), Column("Operators"), *(Column(arm, "right") for arm in arms))
    rows = tuple(
        (
            words(Name(cause.reason)),
            words(Name(cause.path)),
            words(cause.operators),
            *(words(integer(count)) for _, count in cause.counts),
        )
        for cause in shown
    )
    return Table("Seams by cause, plan steps", columns, rows, more=len(cell.causes) - len(shown))


def _is_unusual(cell: CellView) -> bool:
    for arm in cell.source.arms:
        fallbacks = reading(arm, "fallbacks")
        if not isinstance(fallbacks, Missing) and fallbacks > 0:
            return True
    if cell.base is None or cell.head is None:
        return True
    return any(reading(cell.base, name) != reading(cell.head, name) for name in _MUST_NOT_RISE)


def _compare(cell: CellView, name: str) -> str:
    if cell.base is None or cell.head is None:
        return "no comparison"
    return change(reading(cell.base, name), reading(cell.head, name), "count")


def _count(value: Value, noun: str) -> str:
    if isinstance(value, Missing):
        return f"{noun}s {value.missing}"
    return plural(int(value), noun)
