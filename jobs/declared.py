"""Declared changes: which of them a sweep used, and what to say of those that had no effect.

Expectations are in force as base's commit holds them, and before those what the change itself adds to the file, where
that says which way a counter goes or how far. Such a claim must come true. What the file on disk adds without saying so
is proposed: it excuses nothing, and whoever wrote it must be told so, for the verdict would otherwise ask for what was
just done.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from jobs import gates
from jobs.docket import Docket
from jobs.model import ArmPlan, Manifest, Missing
from jobs.reviewed import Expectation
from jobs.verdict import CellVerdict, Finding, MetricRow, ReviewedRow

NOT_IN_FORCE = (
    "the expectations file declares this without saying which way or how far, and base's commit does not hold that "
    "yet, so it is not in force"
)
MERGE_FIRST = (
    "Say in the expectations file which way it goes (change: lower or higher) or how far (at_most), or merge the "
    "declaration into base before the change. Or mend the regression."
)
UNMERGED = "base's commit does not hold it yet"
COVERED_BEFORE = "another expectation before it covers the metric there"
IN_BASE = "it stands in base: take it out once the change is merged, or it excuses the next one too"
DECLARE_IT = (
    "Mend the regression, or declare it in the expectations file with a reason and which way it goes or how far."
)


def noted(manifest: Manifest, cell: str, row: MetricRow) -> MetricRow:
    """A regressed row that only a proposal would excuse, with a note that says so."""
    if row.klass != "regressed" or not _is_proposed(manifest, cell, row):
        return row
    return row.model_copy(update={"note": "; ".join(part for part in (row.note, NOT_IN_FORCE) if part)})


def remedy(manifest: Manifest, base: ArmPlan, cell: str, row: MetricRow) -> str:
    """What to do about a regressed row; empty where the outcome's own remedy says it."""
    if _is_proposed(manifest, cell, row):
        return MERGE_FIRST
    if base.source.startswith("git:") and not any(row.self_declared for row in manifest.expectations):
        return DECLARE_IT
    return ""


def notes(manifest: Manifest, cells: Sequence[CellVerdict]) -> tuple[str, ...]:
    """One sentence for each declaration that excused nothing, and why."""
    used = _used(manifest, cells)
    idle = [f"{_words(row)} was not used: {_why(row, cells)}" for row in manifest.expectations if row not in used]
    unmerged = [f"{_words(row)} is not in force: {UNMERGED}" for row in manifest.proposed]
    return tuple(dict.fromkeys((*idle, *unmerged)))


def findings(manifest: Manifest, cells: Sequence[CellVerdict]) -> tuple[Finding, ...]:
    """A finding for each claim of the change itself that did not come true where its metric was compared."""
    docket, used = Docket("", manifest.gate), _used(manifest, cells)
    for row in manifest.expectations:
        covered = list(_covered(row, cells))
        compared = bool(covered) and not any(isinstance(found.delta, Missing) for found in covered)
        if row.added and row not in used and compared and _why(row, cells) != COVERED_BEFORE:
            moves = ", ".join(dict.fromkeys(_moved(found) for found in covered))
            message = f"{_words(row)} did not come true ({row.reason}): {_why(row, cells)} ({row.metric} {moves})"
            docket.add("NOT_AS_DECLARED", "exact", message, metric=row.metric)
    return docket.findings()


def reviewed_rows(manifest: Manifest, cells: Sequence[CellVerdict]) -> Iterator[ReviewedRow]:
    """A row for each expectation: in which cells it was used, or why it was not."""
    used = _used(manifest, cells)
    for row in manifest.expectations:
        here = sorted(used.get(row, ()))
        whose = IN_BASE if here and not row.self_declared else "" if here else _why(row, cells)
        yield _reviewed(row, "used" if here else "unused", cells=tuple(here), why=whose)
    for row in manifest.proposed:
        yield _reviewed(row, "not in force", why=UNMERGED)


def _reviewed(row: Expectation, state: str, **fields: object) -> ReviewedRow:
    words = _words(row).removeprefix("The expectation of ")
    return ReviewedRow.model_validate(
        {"kind": "expectation", "state": state, "scope": words, "reason": row.reason, **fields}
    )


def _used(manifest: Manifest, cells: Sequence[CellVerdict]) -> dict[Expectation | None, set[str]]:
    """The expectations that excused something, with the cells."""
    used: dict[Expectation | None, set[str]] = {}
    for cell in cells if manifest.expectations else ():
        for row in cell.exact:
            if row.klass == "declared":
                used.setdefault(gates.matching(manifest.expectations, row.metric, cell.cell), set()).add(cell.cell)
    return used


def _moved(row: MetricRow) -> str:
    return "did not move" if row.delta == 0 else f"went from {row.base} to {row.head}"


def _is_proposed(manifest: Manifest, cell: str, row: MetricRow) -> bool:
    found = gates.matching(manifest.proposed, row.metric, cell)
    return found is not None and _allows(found, row)


def _allows(expected: Expectation, row: MetricRow) -> bool:
    known = not isinstance(row.base, Missing) and not isinstance(row.head, Missing)
    return known and gates.allows(expected, row.base, row.head)  # type: ignore[arg-type]


def _words(row: Expectation) -> str:
    change = {"any": "any change", "lower": "lower", "higher": "higher"}[row.change]
    bound = "" if row.at_most is None else f", by {row.at_most:,} at most"
    return f"The expectation of {row.metric} ({change}{bound}) in cell {row.cell}"


def _why(expected: Expectation, cells: Sequence[CellVerdict]) -> str:
    """Why a declaration excused nothing: no cell, no such metric, one that never gates, no change, or another way."""
    if not any(fnmatch.fnmatchcase(cell.cell, expected.cell) for cell in cells):
        return "no cell of this sweep has a name that it matches"
    rows = list(_covered(expected, cells))
    if not rows:
        return "no run of those cells has the metric"
    if expected.metric not in gates.DECLARABLE:
        return f"it {gates.NEVER_GATES}"
    if not any(row.base != row.head for row in rows):
        return "the metric did not move there"
    if any(_allows(expected, row) for row in rows):
        return COVERED_BEFORE
    return "the metric did not move as declared there"


def _covered(expected: Expectation, cells: Sequence[CellVerdict]) -> Iterator[MetricRow]:
    for cell in cells:
        if fnmatch.fnmatchcase(cell.cell, expected.cell):
            yield from (row for row in cell.exact if row.metric == expected.metric)
