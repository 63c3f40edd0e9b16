"""The rows of all cells that moved, worst first: the one order that every form shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from jobs.model import Missing, Reading
from jobs.verdict import (
    CellVerdict,
    IdentityRow,
    InvariantRow,
    MetricRow,
    TimeRow,
    Verdict,
    WitnessRow,
    about,
    tested_arms,
)
from reports import divergence
from reports.blocks import State
from reports.escape import anchor_of
from reports.format import change, number, show
from reports.traffic import shown_unit
from reports.wording import IDENTITIES, METRICS, TIMES

_METRIC_RANK: Final = {
    "regressed": 1,
    "varies": 3,
    "vanished": 3,
    "not_recorded": 3,
    "declared": 6,
    "new": 7,
    "improved": 8,
}
_TIME_RANK: Final = {"WORSE": 4, "BETTER": 9}
_NEUTRAL: Final = 10
_METRIC_STATES: Final = {klass: State(word, tone) for klass, (word, tone) in METRICS.items()}


@dataclass(frozen=True, slots=True)
class Ranked:
    """One row that moved. `rank` then `size` (relative change) then place give the order.

    Its figures are put into words when asked for: of the rows of a large sweep a report shows few.
    """

    rank: int
    size: float
    cell: str
    subject: str
    state: State
    left: Reading | str
    right: Reading | str
    unit: str = ""  # of both, where they are readings
    told: str = ""  # of the change, where it is not their difference
    run_ids: tuple[str, ...] = ()
    metric: str = ""  # which is read on its cell's page

    @property
    def base(self) -> str:
        """Base's side in words."""
        return self.left if isinstance(self.left, str) else show(self.left, self.unit)

    @property
    def head(self) -> str:
        """The side of what is under test, in words."""
        return self.right if isinstance(self.right, str) else show(self.right, self.unit)

    @property
    def change(self) -> str:
        """What moved, in words."""
        if self.told or isinstance(self.left, str) or isinstance(self.right, str):
            return self.told
        return change(self.left, self.right, self.unit)

    @property
    def anchor(self) -> str:
        """Of what stands behind it, on its cell's page; empty where nothing does."""
        return anchor_of(self.metric) if self.metric else "tokens" if self.rank == 0 else ""

    @property
    def is_worse(self) -> bool:
        """Whether it is bad, or leaves something unknown."""
        return not self.is_usual and self.state.tone in ("bad", "warn")

    @property
    def is_usual(self) -> bool:
        """Whether it is only a neutral counter that moved."""
        return self.rank >= _NEUTRAL


def rank(verdict: Verdict, *, usual: bool = True) -> tuple[Ranked, ...]:
    """Every moved row of the verdict, worst first; equal rows keep the verdict's order.

    Without `usual` those are left out that are only a neutral counter that moved, which are most.
    """
    moved = _moved if usual else _tells
    rows: list[Ranked] = []
    waived = {(finding.cell, finding.metric) for finding in verdict.findings if finding.was}
    for cell in verdict.cells:
        rows += [_identity(cell, row) for row in cell.identity if row.klass != "IDENTICAL"]
        rows += [_witness(cell, row) for row in cell.witnesses if not row.holds]
        rows += [_invariant(cell, row) for row in cell.invariants if not row.holds]
        rows += [_metric(cell, row, (cell.cell, row.metric) in waived) for row in cell.exact if moved(row)]
        rows += [_time(cell, row) for row in cell.time if row.klass in _TIME_RANK]
    return tuple(sorted(rows, key=lambda row: (row.rank, -row.size)))


def is_of_variants(cell: CellVerdict) -> bool:
    """Whether variants stand where a head would: what one of them lacks or moves is what it costs, as was asked."""
    return any(arm.role == "variant" for arm in tested_arms(cell.arms))


def whose(cell: CellVerdict, row: MetricRow | TimeRow) -> str:
    """The arm under test that a row is of; empty where none can be told."""
    tested = [arm.arm for arm in tested_arms(cell.arms)]
    if len(tested) == 1:
        return tested[0]
    named = [arm for arm in tested if row.note == about(arm) or row.note.startswith(f"{about(arm)}; ")]
    return max(named, key=len, default="")


def _subject(cell: CellVerdict, row: MetricRow | TimeRow) -> str:
    """The metric; of several arms under test, whose it is too."""
    arm = whose(cell, row) if len(tested_arms(cell.arms)) > 1 else ""
    return f"{row.metric} of {arm}" if arm else row.metric


def _moved(row: MetricRow) -> bool:
    return row.klass != "same" and not (row.klass == "neutral" and row.base == row.head)


def _tells(row: MetricRow) -> bool:
    return row.klass not in ("same", "neutral") and (row.gating or row.klass != "not_recorded")


def _identity(cell: CellVerdict, row: IdentityRow) -> Ranked:
    word, tone = IDENTITIES[row.klass]
    shown = divergence.build(row)
    where = "" if row.first_difference is None else f"from index {row.first_difference}"
    left = f"{row.left}: {row.left_length} ids, {row.left_stop or 'cut off'}"
    right = f"{row.right}: {row.right_length} ids, {row.right_stop or 'cut off'}"
    told = where or shown.sentence
    return Ranked(0, 0.0, cell.cell, "tokens", State(word, tone), left, right, told=told, run_ids=row.run_ids)


def _witness(cell: CellVerdict, row: WitnessRow) -> Ranked:
    values = ", ".join(f"{name}={_reading(value)}" for name, value in row.values.items())
    sides = ("—", values) if row.arm != "base" else (values, "—")
    return Ranked(2, 0.0, cell.cell, f"witness {row.expr}", State("not met", "warn"), *sides, told=f"arm {row.arm}")


def _invariant(cell: CellVerdict, row: InvariantRow) -> Ranked:
    worst = row.worst
    values = "" if worst is None else f"{number(worst.lhs)} {worst.relation} {number(worst.rhs)} is false"
    sides = ("—", values) if row.arm != "base" else (values, "—")
    return Ranked(2, 0.0, cell.cell, f"invariant {row.name}", State("broken", "bad"), *sides, told=f"arm {row.arm}")


def _metric(cell: CellVerdict, row: MetricRow, waived: bool) -> Ranked:
    state = State(f"{METRICS[row.klass][0]}, waived", "warn") if waived else _METRIC_STATES[row.klass]
    rank_ = _METRIC_RANK.get(row.klass, _NEUTRAL)
    if row.klass == "regressed" and not row.gating:
        rank_ += 1
    if not row.gating and (row.klass == "not_recorded" or (row.klass == "vanished" and is_of_variants(cell))):
        rank_ = _NEUTRAL
    return Ranked(
        rank_,
        _size(row.base, row.head),
        cell.cell,
        _subject(cell, row),
        state,
        row.base,
        row.head,
        shown_unit(row.metric, row.unit),
        run_ids=row.run_ids,
        metric=row.metric,
    )


def _time(cell: CellVerdict, row: TimeRow) -> Ranked:
    word, tone = TIMES[row.klass]
    return Ranked(
        _TIME_RANK[row.klass],
        _size(row.base_median, row.head_median),
        cell.cell,
        _subject(cell, row),
        State(word, tone),
        row.base_median,
        row.head_median,
        row.unit,
        f"{show(row.ratio, 'x')}, mean of blocks",
        row.run_ids,
        row.metric,
    )


def _size(base: Reading, head: Reading) -> float:
    if isinstance(base, Missing) or isinstance(head, Missing):
        return 0.0
    return abs(head - base) / abs(base) if base else float("inf") if head else 0.0


def _reading(value: Reading) -> str:
    return f"n/a ({value.missing})" if isinstance(value, Missing) else number(value)
