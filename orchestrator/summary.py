"""The short account of a verdict for a terminal: one row an arm, and no arithmetic of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jobs.model import Missing, Reading
from jobs.verdict import CellVerdict, Finding, Verdict

OfIds = Mapping[tuple[str, str], Sequence[Finding]]

COLUMNS: tuple[tuple[str, str], ...] = (
    ("htod bytes/token", "htod_bytes_per_token"),
    ("floor bytes/token", "floor_bytes_per_token"),
    ("byte hit rate", "byte_hit_rate"),
    ("bypassed, bytes", "bypassed_byte_share"),
    ("bypassed, count", "bypassed_count_share"),
    ("ms/token", "decode_ms_per_token"),
)
"""Heading and metric of each column after arm, runs and ids."""

_SHARES = frozenset({"byte_hit_rate", "bypassed_byte_share", "bypassed_count_share"})


@dataclass(frozen=True, slots=True)
class CellTable:
    """One cell's rows as texts, in the order of its arms."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    worse: tuple[str, ...]
    """Gating counters that are worse in head or unsteady, a line each."""


def tables(verdict: Verdict) -> tuple[CellTable, ...]:
    """A table for each cell of a verdict."""
    headings = ("arm", "runs", "ids", *(heading for heading, _ in COLUMNS))
    of_ids = verdict.of_ids()
    return tuple(
        CellTable(f"{cell.cell}: {cell.outcome}", headings, _rows(of_ids, cell), _worse(cell)) for cell in verdict.cells
    )


def _worse(cell: CellVerdict) -> tuple[str, ...]:
    words = {"regressed": "worse", "varies": "varies"}
    rows = [row for row in cell.exact if row.gating and row.klass in words]
    return tuple(f"{words[r.klass]}: {r.metric} {shown(r.metric, r.base)} -> {shown(r.metric, r.head)}" for r in rows)


def _rows(of_ids: OfIds, cell: CellVerdict) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            arm.arm,
            f"{arm.runs_complete}/{arm.runs_expected}",
            _identity(cell, arm.arm, of_ids.get((cell.cell, arm.arm), ())),
            *(shown(metric, arm.values.get(metric, Missing(missing="not recorded"))) for _, metric in COLUMNS),
        )
        for arm in cell.arms
    )


def _identity(cell: CellVerdict, arm: str, found: Sequence[Finding]) -> str:
    """How an arm's ids compare, with base for the others and with itself for base; else what was found of them."""
    pairs = [row for row in cell.identity if row.what != "self" and arm in (row.left, row.right)]
    own = [row for row in cell.identity if row.what == "self" and row.left.split(" ")[0] == arm]
    mine = [row for row in pairs if row.right == arm] or own
    unequal: set[str] = {row.klass for row in mine if row.klass != "IDENTICAL"}
    faults: set[str] = {finding.outcome for finding in found}
    absent = unequal == {"MISSING"} and "CANNOT_LOAD" in faults
    return ", ".join(sorted({"CANNOT_LOAD"} if absent else unequal or faults)) or ("ok" if mine else "-")


def shown(metric: str, value: Reading) -> str:
    """A reading as text; what is missing is a word, never a zero."""
    if isinstance(value, Missing):
        return "n/a"
    if metric in _SHARES:
        return f"{100 * value:.2f} %"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
