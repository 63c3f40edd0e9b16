"""What reviewed files say: declared changes, waivers and goldens, each with what came of it."""

from __future__ import annotations

from collections import Counter
from typing import Final

from jobs.verdict import ReviewedRow
from reports.blocks import Block, CellRef, Column, Details, Inlines, Name, Section, State, Table, joined, words
from reports.format import plural
from reports.view import Scope, SweepView

_STATES: Final = {
    "used": State("used", "warn"),
    "unused": State("unused", "quiet"),
    "expired": State("expired", "warn"),
    "not in force": State("not in force", "warn"),
    "retracted": State("retracted", "bad"),
}
_MET: Final = State("used", "good")
"""Of a golden: a use of it excuses nothing."""


def build(view: SweepView, scope: Scope) -> Section:
    """Waivers first, for they hide what they cover unless they are shown."""
    rows = sorted(view.verdict.reviewed, key=lambda row: (row.kind != "waiver", row.state != "used"))
    told = [row for row in rows if row.kind == "waiver" or row.state != "unused"]
    rest = [row for row in rows if row not in told]
    shown: tuple[Block, ...] = (_table("Reviewed files", told, scope.rows),) if told else ()
    title = words(plural(len(rest), "entry without effect", "entries without effect"))
    folded = (Details(title, (_table("Entries without effect", rest, scope.deep or scope.rows),)),) if rest else ()
    return Section("reviewed", "Waivers, goldens and declared changes", _summary(rows), shown, folded)


def _summary(rows: list[ReviewedRow]) -> Inlines:
    tally = Counter((row.kind, row.state) for row in rows)
    said = ", ".join(f"{plural(count, kind)} {state}" for (kind, state), count in tally.items())
    return words(f"{said}.")


def _table(caption: str, rows: list[ReviewedRow], limit: int) -> Table:
    columns = (
        Column("State"),
        Column("What"),
        Column("Of", prose=True),
        Column("Why it stands there", prose=True),
        Column("By, until"),
        Column("Cells, or why it had no effect", prose=True),
    )
    return Table(caption, columns, tuple(map(_row, rows[:limit])), more=max(0, len(rows) - limit))


def _row(row: ReviewedRow) -> tuple[Inlines, ...]:
    evidence = f" (evidence: {row.evidence})" if row.evidence else ""
    return (
        words(_MET if row.kind == "golden" and row.state == "used" else _STATES[row.state]),
        words(row.kind, *((" ", Name(row.id)) if row.id else ())),
        words(row.scope),
        words(f"{row.reason}{evidence}"),
        words(", ".join(part for part in (row.by, row.until) if part) or "—"),
        words(*joined([CellRef(cell) for cell in row.cells]), *((f" {row.why}" if row.cells else row.why,))),
    )
