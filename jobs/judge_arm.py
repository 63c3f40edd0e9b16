"""One arm of one cell: which of its runs count, what they say by themselves, and how the arm is shown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.errors import CannotLoad
from jobs import checks, expressions, more_runs
from jobs.compare import AGAIN, THROTTLED, MeasuredArm, MeasuredRun, clock_mhz, measured_arm
from jobs.identity import ArmStreams, streams_of
from jobs.metrics import CLOCKED, NOT_RECORDED, is_finite, readings, same_work
from jobs.model import ArmPlan, CellPlan, Equation, KeyBytes, Reading, RunFact, RunRecord, as_read
from jobs.natural import natural
from jobs.redact import redact
from jobs.verdict import ArmView, InvariantRow, SetAside, WitnessRow

Card = tuple[str, ...]

TOP_KEYS = 10
"""Keys shown of an arm, those with the most streamed bytes first."""


@dataclass(frozen=True, slots=True)
class ArmEvidence:
    """What is known of an arm before it is compared with another."""

    plan: ArmPlan
    expected: int  # runs that the manifest asks for
    runs: tuple[RunFact, ...]  # in block order
    endings: tuple[tuple[RunFact, checks.Ending], ...]
    measured: MeasuredArm
    streams: Mapping[Card, ArmStreams]
    """Ids apart for each card and driver, where the contract's scope says that identity ends there."""
    witnesses: tuple[WitnessRow, ...]
    invariants: tuple[InvariantRow, ...]

    @property
    def name(self) -> str:
        return self.plan.name

    def records(self) -> list[RunRecord]:
        """Records of the runs that count."""
        return [run.record for run in self.measured.runs]

    def counted(self) -> list[RunFact]:
        """Runs that count."""
        return [run for run, end in self.endings if end.kind == "measured"]

    @property
    def unloaded(self) -> str:
        """Why the arm's engine could not be loaded in any run, in one line; empty where it was."""
        told = [end.detail for _, end in self.ended("engine") if end.word == CannotLoad.kind]
        return told[0] if told and not self.counted() else ""

    def ended(self, kind: checks.EndKind) -> list[tuple[RunFact, checks.Ending]]:
        """Runs that ended in one way."""
        return [(run, end) for run, end in self.endings if end.kind == kind]


def weigh(plan: CellPlan, arm: ArmPlan, runs: Sequence[RunFact], scope: Collection[str]) -> ArmEvidence:
    """Sort an arm's runs by how they ended, and evaluate witnesses and equations on those that count.

    `runs`: all of its cell, which tell how many of each arm there must be; `scope`: of the identity contract.
    """
    further = tuple(more_runs.given(plan, runs))
    runs = [run for run in runs if run.arm == arm.name]
    endings = tuple((run, checks.ending(run)) for run in runs)
    counted: list[MeasuredRun] = []
    for run, end in endings:
        if end.kind == "measured":
            assert run.record is not None, run.run_id
            before = counted[-1] if counted and same_work(counted[-1].record, run.record) else None
            values = readings(run.record, plan.settings.decode_skip, before.readings if before else None)
            if end.word == "throttled" or more_runs.is_again(plan, run):
                no_time = THROTTLED if end.word == "throttled" else AGAIN
                values = {name: no_time if name in CLOCKED else value for name, value in values.items()}
            counted.append(MeasuredRun(run.run_id, run.block, run.record, values, repeats=before is not None))
    expected = max(more_runs.expected(plan, further, is_base=arm.role == "base"), len(runs))
    measured = measured_arm(arm.name, counted)
    return ArmEvidence(
        plan=arm,
        expected=expected,
        runs=tuple(runs),
        endings=endings,
        measured=measured,
        streams=_by_card(measured, scope),
        witnesses=_witnesses(plan, measured),
        invariants=_invariants(plan, arm, measured),
    )


def view(evidence: ArmEvidence, config: Mapping[str, str | int | float | bool | None]) -> ArmView:
    """The arm as a reader sees it. Facts, seams and keys are those of its first run that counts."""
    records = evidence.records()
    first = records[0] if records else None
    plan = evidence.plan
    return ArmView.made(
        arm=plan.name,
        role=plan.role,
        source=plan.source,
        commit=plan.commit,
        engine_digest=first.engine_digest if first else "",
        config={**config, **plan.config},
        runs_expected=evidence.expected,
        runs_complete=len(records),
        values={n: as_read(v) if type(v) is float else v for n, v in evidence.measured.values.items()},
        facts={k: v for k, v in first.facts.items() if isinstance(v, str) or is_finite(v)} if first else {},
        seams=first.seams if first else (),
        top_keys=_top_keys(first) if first else (),
        crossings=_crossings(first) if first else (0, 0),
        card=first.card_name if first else "",
        uuid=", ".join(sorted({str(record.device.get("uuid", "")) for record in records})),
        certificates=_tally(record.certificate.verdict for record in records if record.certificate),
        sm_clock_mhz=_clocks(records),
        stop_reasons=_tally(
            s.stop_reason or "none" for record in records for g in record.generations for s in g.sequences
        ),
    )


def _clocks(records: Sequence[RunRecord]) -> tuple[float, float] | None:
    """The slowest and the fastest run's; None unless each run's is known."""
    known = [clock for record in records if (clock := clock_mhz(record)) is not None]
    return (min(known), max(known)) if known and len(known) == len(records) else None


def set_aside(cell: str, evidence: ArmEvidence) -> list[SetAside]:
    """Attempts that do not count, runs whose card was not clear, and retracted runs; each with its reason."""
    rows = []
    for run, end in evidence.endings:
        for attempt in sorted(run.attempts, key=lambda attempt: attempt.number):
            if attempt.state in ("refused", "contaminated", "failed", "lost", "cancelled"):
                rows.append((run.run_id, attempt.attempt_id, str(attempt.state), attempt.reason))
        if run.record is not None and run.state == "complete" and end.kind != "measured":
            rows.append((run.run_id, run.record.attempt_id, end.word, end.detail))
    return [
        SetAside(cell=cell, arm=evidence.name, run_id=run, attempt_id=attempt, state=state, reason=redact(reason))
        for run, attempt, state, reason in dict.fromkeys(rows)
    ]


def _by_card(arm: MeasuredArm, scope: Collection[str]) -> dict[Card, ArmStreams]:
    keys = [key for key, named in (("uuid", "card"), ("driver", "driver")) if named in scope]
    groups: dict[Card, list[RunRecord]] = {}
    for run in arm.runs:
        groups.setdefault(tuple(_fact(run.record, key) for key in keys), []).append(run.record)
    return {card: streams_of(arm.name, groups[card]) for card in sorted(groups)}


def _fact(record: RunRecord, key: str) -> str:
    """A fact of the card as the engine says it; the driver also as the certificate does, where the engine does not."""
    told = record.device.get(key)
    if told is None and key == "driver" and record.certificate is not None:
        return record.certificate.driver
    return "" if told is None else str(told)


def _witnesses(plan: CellPlan, arm: MeasuredArm) -> tuple[WitnessRow, ...]:
    """Each witness that asks this arm: it holds when it holds on every run that counts, and on one at least."""
    rows = []
    for witness in plan.witnesses:
        if witness.arms and arm.name not in witness.arms:
            continue
        unmet = [run for run in arm.runs if not _holds(witness.expr, run.readings)]
        shown = (unmet or list(arm.runs))[:1]
        values = {name: _reading(name, run) for run in shown for name in _names(witness.expr)}
        holds = bool(arm.runs) and not unmet
        rows.append(WitnessRow.made(expr=witness.expr, arm=arm.name, holds=holds, values=values))
    return tuple(rows)


def _holds(expr: str, values: Mapping[str, Reading]) -> bool:
    try:
        return expressions.holds(expr, values)
    except expressions.ExpressionError:
        return False


def _names(expr: str) -> list[str]:
    try:
        return sorted(expressions.names_in(expr))
    except expressions.ExpressionError:
        return []


def _reading(name: str, run: MeasuredRun) -> Reading:
    return as_read(run.readings.get(name, NOT_RECORDED))


def _invariants(plan: CellPlan, asked: ArmPlan, arm: MeasuredArm) -> tuple[InvariantRow, ...]:
    """One row for each equation: it holds when it holds on every run; the worst run's numbers are shown."""
    by_name: dict[str, list[checks.Evaluated]] = {}
    keeps_all = asked.adapter == "native"
    of_times = any(name in CLOCKED for invariant in plan.invariants for name in _names(invariant.expr))
    evaluated: list[checks.Evaluated] = []
    for run in arm.runs:
        if of_times or not run.repeats:
            evaluated = checks.evaluate_equations(plan, run.record, run.readings, keeps_all=keeps_all)
        for result in evaluated:
            by_name.setdefault(result.name, []).append(result)
    return tuple(_invariant_row(name, arm.name, results) for name, results in by_name.items())


def _invariant_row(name: str, arm: str, results: Sequence[checks.Evaluated]) -> InvariantRow:
    first = results[0]
    if first.holds and all(result is first for result in results):  # as of all runs of a healthy arm
        seen = first.equation
        return InvariantRow.made(name=name, arm=arm, holds=True, checked=len(results), worst=seen, note="")
    broken = [result for result in results if not result.holds]
    unread = [result for result in broken if result.equation is None]
    told = {id(result): result.equation for result in broken or results if result.equation}
    worst = max(told.values(), key=_distance, default=None)
    notes = dict.fromkeys(result.note for result in broken if result.note)
    return InvariantRow.made(
        name=name,
        arm=arm,
        holds=not broken,
        checked=len(results) - len(unread),
        worst=worst,
        note="; ".join(notes),
    )


def _distance(equation: Equation) -> float:
    return abs(equation.lhs - equation.rhs)


def _top_keys(record: RunRecord) -> tuple[KeyBytes, ...]:
    """The keys of the most bytes over the link, largest first."""
    moving = [key for key in record.keys if key.streamed_bytes > 0]
    return tuple(sorted(moving, key=lambda key: (-key.streamed_bytes, natural(key.key)))[:TOP_KEYS])


def _crossings(record: RunRecord) -> tuple[int, int]:
    return sum(key.streamed for key in record.keys), sum(key.streamed_bytes for key in record.keys)


def _tally(words: Iterable[str]) -> dict[str, int]:
    told = sorted(words)
    return {word: told.count(word) for word in dict.fromkeys(told)}
