"""Declared changes: which of them a sweep used, and what to say of those that had no effect.

Expectations are in force as base's commit holds them. What only the file on disk declares is proposed: it excuses
nothing, and whoever wrote it must be told so, for the verdict would otherwise ask for what was just done.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from jobs import gates
from jobs.model import ArmPlan, Expectation, Manifest, Missing
from jobs.verdict import CellVerdict, MetricRow

NOT_IN_FORCE = "the expectations file declares this, but base's commit does not hold that yet, so it is not in force"
MERGE_FIRST = (
    "Merge the declaration into base before the change: the expectations file is read at base's commit. "
    "Or mend the regression."
)
DECLARE_IN_BASE = (
    "Mend the regression, or declare it with a reason in the expectations file and merge that into base first."
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
        return DECLARE_IN_BASE
    return ""


def notes(manifest: Manifest, cells: Sequence[CellVerdict]) -> tuple[str, ...]:
    """One sentence for each declaration that excused nothing, and why."""
    used = {
        gates.matching(manifest.expectations, row.metric, cell.cell)
        for cell in cells
        for row in cell.exact
        if row.klass == "declared"
    }
    idle = [f"{_words(row)} was not used: {_why(row, cells)}" for row in manifest.expectations if row not in used]
    unmerged = [f"{_words(row)} is not in force: base's commit does not hold it yet" for row in manifest.proposed]
    return tuple(dict.fromkeys((*idle, *unmerged)))


def _is_proposed(manifest: Manifest, cell: str, row: MetricRow) -> bool:
    found = gates.matching(manifest.proposed, row.metric, cell)
    return found is not None and not isinstance(row.delta, Missing) and gates.allows(found, row.delta)


def _words(row: Expectation) -> str:
    change = {"any": "any change", "lower": "lower", "higher": "higher"}[row.change]
    return f"The expectation of {row.metric} ({change}) in cell {row.cell}"


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
    if any(not isinstance(row.delta, Missing) and gates.allows(expected, row.delta) for row in rows):
        return "another expectation before it covers the metric there"
    return "the metric did not move as declared there"


def _covered(expected: Expectation, cells: Sequence[CellVerdict]) -> Iterator[MetricRow]:
    for cell in cells:
        if fnmatch.fnmatchcase(cell.cell, expected.cell):
            yield from (row for row in cell.exact if row.metric == expected.metric)
