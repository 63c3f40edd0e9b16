"""Two arms side by side: exact metrics row by row, time metrics block by block."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.counters import COUNTERS
from jobs import gates, stats
from jobs.metrics import CLOCKED, METRICS, NOT_RECORDED, TIMED
from jobs.model import Missing, Reading, RunRecord, as_read
from jobs.reviewed import Expectation
from jobs.verdict import MetricClass, MetricRow, TimeClass, TimeRow

DIFFERENT_WORK = "different work: the tokens differ"
NOT_ENGAGED = "not judged: a witness is unmet"
NOT_COMPARABLE = "not judged: the arms are not comparable"
NEAR_TIE = "no gain is claimed: a near tie, the tokens differ"
GATE_OFF = "not judged: the exact gate is off"

THROTTLED = Missing(missing="the card was throttled")
"""What stands in the place of a time that was taken on a slowed card."""

AGAIN = Missing(missing="base again, behind the balanced order of its block")
"""What stands in the place of a time of a run that was made to see whether base repeats itself."""

NO_NULL = Missing(missing="no null arm")

ABSOLUTE_FLOOR_MS = 0.001
"""A time difference below a microsecond is no change that anybody should act on."""

TIME_METRICS = tuple(metric.name for metric in TIMED)
"""Metrics that a clock gives, in the order of their rows."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run that counts, with all its readings derived anew from the record.

    `repeats`: it did the work of the arm's run before it, so that exact readings and equations are the same.
    """

    run_id: str
    block: int
    record: RunRecord
    readings: Mapping[str, Reading]
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredArm:
    """The runs of one arm that count, and each metric's one value over them (see `measured_arm`)."""

    name: str
    runs: tuple[MeasuredRun, ...]
    values: Mapping[str, Reading]

    def value(self, name: str) -> Reading:
        """The arm's value, or Missing("not recorded")."""
        return self.values.get(name, NOT_RECORDED)


@dataclass(frozen=True, slots=True)
class Standing:
    """What the earlier steps left to be said of a pair: its tokens differ, or it cannot be judged and why.

    `near_tie`: it did the same work with other tokens, so that what is worse counts and what is better does not.
    """

    different_work: bool = False
    near_tie: bool = False
    unjudged: str = ""
    prefix: str = ""  # put before every note where a cell has several arms under test
    capture_varies: bool = False  # the arms were asked for another capture setting on purpose


_PLAIN = Standing()


def measured_arm(name: str, runs: Sequence[MeasuredRun]) -> MeasuredArm:
    """An arm's values: the one value of all its runs, a median for times, or Missing with the range."""
    first = runs[0].readings if runs else {}
    if all(run.repeats for run in runs[1:]):
        values = {name: first[name] for name in sorted(first)}
        names: Iterable[str] = CLOCKED & first.keys()
    else:
        names = sorted({name for run in runs for name in run.readings})
        values = dict.fromkeys(names, NOT_RECORDED)
    values.update((name, _arm_value(name, runs)) for name in names)
    return MeasuredArm(name, tuple(runs), values)


def exact_rows(
    base: MeasuredArm, head: MeasuredArm, cell: str, expectations: Iterable[Expectation], standing: Standing
) -> tuple[MetricRow, ...]:
    """One row for each exact metric that either arm records, gating ones first, then by name."""
    declared, is_plain = tuple(expectations), standing == _PLAIN
    names = _exact_names(base) | _exact_names(head) | gates.GATING
    stepped = any(len(g.ids) > 1 for arm in (base, head) for run in arm.runs for g in run.record.generations)
    rows = []
    run_ids = _run_ids(base, head)
    for name in (*sorted(names & gates.GATING), *sorted(names - gates.GATING)):
        metric = gates.exact_metric(name)
        mine, theirs = base.values.get(name, NOT_RECORDED), head.values.get(name, NOT_RECORDED)
        counted = not (_is_undeclared(mine) and _is_undeclared(theirs))
        asked = counted and (stepped or name not in gates.STEP_METRICS or {mine, theirs} != {NOT_RECORDED})
        expected = gates.matching(declared, name, cell) if declared else None
        ruling = gates.rule(metric, mine, theirs, expected, capture_varies=standing.capture_varies)
        note = ruling.note if asked or not counted else gates.NO_STEP
        rows.append(
            MetricRow.made(
                metric=name,
                unit=metric.unit,
                direction=metric.direction,
                gating=asked and (metric.gating or ruling.klass in ("regressed", "declared")) and not standing.unjudged,
                base=as_read(mine),
                head=as_read(theirs),
                delta=as_read(ruling.delta),
                klass=ruling.klass if is_plain else _standing_class(ruling.klass, standing),
                run_ids=run_ids,
                note=note if is_plain else _note(note, standing, gain=ruling.klass == "improved"),
            )
        )
    return tuple(rows)


def varying(arm: MeasuredArm) -> dict[str, Missing]:
    """Exact metrics that did not repeat inside an arm, with the range of their values."""
    odd = {n: v for n, v in arm.values.items() if type(v) is Missing and v.missing.startswith("varies")}
    exact = _exact_names(arm) if odd else ()
    return {name: value for name, value in odd.items() if name in exact}


def differing(base: MeasuredArm, null: MeasuredArm) -> dict[str, tuple[Reading, Reading]]:
    """Gating metrics in which two arms of one build and config differ."""
    pairs = {name: (base.value(name), null.value(name)) for name in sorted(gates.GATING)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True)
class TimePlan:
    """What was planned before anything was measured: a cell's blocks, and how many time rows the sweep compares.

    `fresh`: blocks that are run behind the others, to decide, where those moved; `awaits`: none of them has been.
    """

    blocks: int
    rows: int = 1
    fresh: int = 0
    awaits: bool = False

    @property
    def screening(self) -> range:
        """Numbers of the blocks that screen."""
        return range(self.blocks if self.fresh else stats.screening_blocks(self.blocks))

    @property
    def deciding(self) -> range:
        """Numbers of the blocks that decide."""
        return range(len(self.screening), self.blocks + self.fresh)


def time_rows(
    base: MeasuredArm, head: MeasuredArm, null: MeasuredArm | None, plan: TimePlan, standing: Standing
) -> tuple[TimeRow, ...]:
    """One row for each time metric: the ratio head / base inside blocks, with its noise."""
    screening, deciding = (_shared(base, head, blocks) for blocks in (plan.screening, plan.deciding))
    again = _shared(base, null, plan.deciding) if null else ()
    rows, run_ids = [], _run_ids(base, head)
    for name in TIME_METRICS:
        evidence = stats.TimeEvidence(
            _in_blocks(name, base, head, screening),
            _in_blocks(name, base, head, deciding),
            _in_blocks(name, base, null, again) if null else None,
            plan.rows,
            floor_of(METRICS[name].unit, base.value(name)),
        )
        rows.append(_time_row(name, base, head, evidence, plan, standing, run_ids))
    return tuple(rows)


# ---- exact -------------------------------------------------------------------------------------------------------


_EXACT = frozenset(gates.EXACT)
_KNOWN = frozenset(METRICS) | frozenset(COUNTERS)


def _exact_names(arm: MeasuredArm) -> set[str]:
    """Registered exact metrics, and counters that no registry knows: those are shown and never gate."""
    recorded = {name for run in arm.runs if not run.repeats for name in run.record.counters}
    return {name for name in arm.values if name in _EXACT} | (recorded - _KNOWN)


def _is_undeclared(value: Reading) -> bool:
    """Whether an arm's program neither names nor tells a counter, so that nothing is asked of it."""
    return type(value) is Missing and value.missing.startswith(gates.UNDECLARED)


def _arm_value(name: str, runs: Sequence[MeasuredRun]) -> Reading:
    values = [run.readings.get(name, NOT_RECORDED) for run in runs]
    absent = next((value for value in values if type(value) is Missing), None)
    numbers = [value for value in values if type(value) is not Missing]
    if absent is not None and not numbers:
        return absent
    if name in CLOCKED:
        return _median_time(name, numbers)
    if absent is not None:
        return Missing(missing=f"varies: {min(numbers)} in some runs, {absent.missing} in others")
    low, high = min(numbers), max(numbers)
    return numbers[0] if low == high else Missing(missing=f"varies: {low}..{high}")


def _median_time(name: str, values: Sequence[int | float]) -> Reading:
    """Median over runs; a rate's is the reciprocal of its time's, so that ms/token and tokens/s are one figure."""
    if name in METRICS and METRICS[name].direction == "higher":
        return 1 / statistics.median(1 / value for value in values)
    return statistics.median(values)


def _standing_class(klass: MetricClass, standing: Standing) -> MetricClass:
    """Nothing has improved where the tokens differ, and nothing is judged where the pair cannot be."""
    if klass == "improved" and (standing.different_work or standing.near_tie or standing.unjudged):
        return "neutral"
    return "neutral" if klass == "regressed" and standing.unjudged else klass


def _note(own: str, standing: Standing, *, gain: bool) -> str:
    """`gain`: the figures alone would be one."""
    if standing == _PLAIN:
        return own
    mark = DIFFERENT_WORK if standing.different_work else NEAR_TIE if gain and standing.near_tie else ""
    return "; ".join(part for part in (standing.prefix, standing.unjudged, mark, own) if part)


def _run_ids(*arms: MeasuredArm) -> tuple[str, ...]:
    return tuple(run.run_id for arm in arms for run in arm.runs)


# ---- time --------------------------------------------------------------------------------------------------------


def _time_row(
    name: str,
    base: MeasuredArm,
    head: MeasuredArm,
    evidence: stats.TimeEvidence,
    plan: TimePlan,
    standing: Standing,
    run_ids: tuple[str, ...],
) -> TimeRow:
    metric = METRICS[name]
    decides = stats.screen if plan.awaits else stats.decide
    decision = decides(evidence, lower_is_better=metric.direction == "lower")
    klass, why, pair, control = decision.klass, decision.why, decision.pair, decision.null
    gain = klass == "BETTER"
    if klass in ("WORSE", "BETTER") and (effect := _clock_effect(name, base, head, plan.deciding, evidence.floor)):
        klass, why = "UNDECIDED", effect
    if klass in ("SAME", "BETTER") and (untold := _told_in_part(name, base) or _told_in_part(name, head)):
        klass, why = "NO_VALID_SAMPLE", untold
    if klass == "NOT_MEASURED":
        klass = _why_no_time(name, base, head)
    elif standing.different_work or (gain and standing.near_tie):
        klass, why = "DIFFERENT_WORK", ""
    elif standing.unjudged:
        klass, why = "UNDECIDED", ""
    why = "; ".join(part for part in (why, *(_kept(name, arm) for arm in (base, head))) if part)
    return TimeRow.made(
        metric=name,
        unit=metric.unit,
        base_median=as_read(base.value(name)),
        head_median=as_read(head.value(name)),
        ratio=as_read(pair.ratio),
        low=as_read(pair.low),
        high=as_read(pair.high),
        null_ratio=as_read(control.ratio) if control else NO_NULL,
        blocks=pair.blocks,
        smallest_detectable=as_read(pair.smallest_detectable),
        klass=klass,
        run_ids=run_ids,
        note=_note(why, standing, gain=gain),
        calibrated=None,
    )


def _clock_effect(name: str, base: MeasuredArm, head: MeasuredArm, blocks: range, floor: float) -> str:
    """Whether the card's clock alone moved a metric; nothing is said where a run's clock is not known."""
    shared = _shared(base, head, blocks)
    pairs = [[_clocked(name, arm, block) for arm in (base, head)] for block in shared]
    if any(clocked is None for pair in pairs for clocked in pair):
        return ""
    made = [
        tuple(stats.BlockTimes(*(tuple(run[part] for run in clocked or ()) for clocked in pair)) for pair in pairs)
        for part in range(3)
    ]
    return stats.clock_effect(stats.ClockedBlocks(*made), floor)


def clock_mhz(record: RunRecord) -> float | None:
    """The card's SM clock in a run, the median of what its watch saw; None where that is not known."""
    seen = record.certificate.during.get("sm_clock_mhz") if record.certificate else None
    clock = seen.get("median") if isinstance(seen, dict) else None
    is_number = isinstance(clock, int | float) and not isinstance(clock, bool) and clock > 0
    return float(clock) if is_number and clock is not None else None


def _clocked(name: str, arm: MeasuredArm, block: int) -> list[tuple[float, float, float]] | None:
    """Time, cycles and clock of an arm's runs in a block that gave a time; None where a clock is not known.

    The clock is the median of what the watch saw. Of a rate, the time is its reciprocal.
    """
    found = []
    for run in arm.runs:
        value = run.readings.get(name, NOT_RECORDED)
        if run.block != block or type(value) is Missing or not (math.isfinite(value) and value > 0):
            continue
        clock = clock_mhz(run.record)
        if clock is None:
            return None
        time = float(value) if METRICS[name].direction == "lower" else 1 / value
        found.append((time, time * clock, clock))
    return found


def _why_no_time(name: str, base: MeasuredArm, head: MeasuredArm) -> TimeClass:
    """What kind of nothing it is where no block holds times of both arms: never a zero, and never a pass."""
    readings = [[run.readings.get(name, NOT_RECORDED) for run in arm.runs] for arm in (base, head)]
    if any(THROTTLED in arm for arm in readings):
        return "THROTTLED_OUT"
    timed = any(type(reading) is not Missing and reading != 0 for arm in readings for reading in arm)
    return "NO_VALID_SAMPLE" if timed else "NOT_MEASURED"


def _told_in_part(name: str, arm: MeasuredArm) -> str:
    """How many runs of an arm gave no time where others did, the card apart: whoever picks runs picks the fast ones."""
    readings = [run.readings.get(name, NOT_RECORDED) for run in arm.runs]
    silent = [one for one in readings if isinstance(one, Missing) and one not in (THROTTLED, AGAIN)]
    if not silent or all(isinstance(one, Missing) for one in readings):
        return ""
    return f"{len(silent)} of {len(readings)} runs of {arm.name} gave no time: {silent[0].missing}"


def _kept(name: str, arm: MeasuredArm) -> str:
    """How many runs of an arm gave a time, where a slowed card took some; empty where it took none."""
    times = (run.readings.get(name, NOT_RECORDED) for run in arm.runs)
    throttled = sum(type(time) is Missing and time == THROTTLED for time in times)
    if not throttled:
        return ""
    kept = sum(len(_times(name, arm, block)) for block in sorted({run.block for run in arm.runs}))
    return f"{kept} of {len(arm.runs)} runs of {arm.name} kept: {throttled} on a throttled card"


def block_times(name: str, base: MeasuredArm, head: MeasuredArm, blocks: range) -> tuple[stats.BlockTimes, ...]:
    """The times of two arms in each of some blocks that both ran in."""
    return _in_blocks(name, base, head, _shared(base, head, blocks))


def _shared(base: MeasuredArm, head: MeasuredArm, blocks: range) -> list[int]:
    """Those of some blocks that both arms ran in."""
    return sorted({run.block for run in base.runs} & {run.block for run in head.runs if run.block in blocks})


def _in_blocks(name: str, base: MeasuredArm, head: MeasuredArm, shared: Iterable[int]) -> tuple[stats.BlockTimes, ...]:
    return tuple(stats.BlockTimes(_times(name, base, block), _times(name, head, block)) for block in shared)


def _times(name: str, arm: MeasuredArm, block: int) -> tuple[float, ...]:
    values = (run.readings.get(name, NOT_RECORDED) for run in arm.runs if run.block == block)
    return tuple(float(v) for v in values if type(v) is not Missing and math.isfinite(v) and v > 0)


def floor_of(unit: str, base: Reading) -> float:
    """The relative floor, or the absolute one as a share of base where that is wider."""
    if not unit.startswith("ms") or type(base) is Missing or not base > 0:
        return stats.RELATIVE_FLOOR
    return max(stats.RELATIVE_FLOOR, ABSOLUTE_FLOOR_MS / base)
