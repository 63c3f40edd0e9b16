"""Findings of runs by themselves: how they ended, whether they are complete, finite, closed and engaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.errors import CannotLoad
from jobs import checks, matching, plausible
from jobs.docket import Docket
from jobs.judge_arm import ArmEvidence
from jobs.metrics import NOT_RECORDED
from jobs.model import CellPlan, Missing, RunFact
from jobs.verdict import Outcome

EndedRun = tuple[RunFact, checks.Ending]

NOT_MADE_AGAIN = "Run the sweep anew: a run that was retracted is not made again."


def find_endings(docket: Docket, base: ArmEvidence | None, arms: Sequence[ArmEvidence]) -> None:
    """Runs that gave nothing. What the engine did in head alone is a finding; done in base too, nothing is proven."""
    base_fails = base is not None and bool(base.ended("engine"))
    base_counts = base is not None and bool(base.counted())
    base_unbuilt = base is not None and bool(base.plan.unbuilt)
    for arm in arms:
        if arm.plan.unbuilt:
            _build_failure(docket, arm, of_base=base_unbuilt)
            continue
        for kind, outcome in (("contaminated", "CONTAMINATED"), ("infrastructure", "INFRASTRUCTURE")):
            for ended in _by_detail(arm.ended(kind)):  # type: ignore[arg-type]
                docket.add(
                    outcome,  # type: ignore[arg-type]
                    "infrastructure",
                    f"{_runs(ended, arm)} of {arm.name} without a clean measurement: {ended[0][1].detail}",
                    arm=arm.name,
                    run_ids=_ids(ended),
                )
        absent = arm.ended("absent")
        short_by = arm.expected - len(arm.runs)
        if absent or short_by > 0:
            reasons = list(dict.fromkeys(end.detail for _, end in absent)) or ["the manifest asks for more runs"]
            message = f"{len(absent) + max(0, short_by)} of {arm.expected} runs of {arm.name} are missing: {reasons[0]}"
            is_all_told = short_by <= 0 and all(end.word == "retracted" for _, end in absent)
            remedy = NOT_MADE_AGAIN if is_all_told else ""
            docket.add("MISSING", "identity", message, arm=arm.name, remedy=remedy, run_ids=_ids(absent))
        for ended in _by_word(arm.ended("engine")):
            elsewhere = base is None or arm.plan.adapter != base.plan.adapter
            _engine_failure(docket, arm, ended, base_fails=base_fails, base_counts=base_counts, elsewhere=elsewhere)


def find_faults(docket: Docket, plan: CellPlan, arm: ArmEvidence, *, is_base: bool) -> None:
    """What a run that counts says against itself: generations, figures, equations."""
    for record in arm.records():
        for fault in checks.generation_faults(plan, arm.plan, record):
            docket.add("MISSING", "identity", f"a run of {arm.name}: {fault}", arm=arm.name, run_ids=[record.run_id])
        where = checks.non_finite_logits(record)
        if where:
            message = f"{arm.name}'s logits are not finite ({where})"
            docket.add("VIOLATION", "identity", message, arm=arm.name, run_ids=[record.run_id])
    _find_untold(docket, arm)
    invalid: dict[str, str] = {}
    of_counters: list[str] = []
    for run in arm.measured.runs:
        if not run.repeats:
            of_counters = plausible.counted(run.record)
        faults = (*checks.invalid_figures(run.record), *plausible.impossible(run.record, of_counters))
        invalid.update(dict.fromkeys(faults, run.run_id))
    if invalid:
        first = next(iter(invalid))
        more = f" and {len(invalid) - 1} more" if len(invalid) > 1 else ""
        message = f"{arm.name} reports figures that cannot be: {first}{more}"
        docket.add("BROKEN_INVARIANT", "exact", message, arm=arm.name, run_ids=invalid.values())
    _find_broken_invariants(docket, arm, is_base=is_base)


def _find_untold(docket: Docket, arm: ArmEvidence) -> None:
    """Counters that an arm's program is said to tell and did not: what they would have shown is not known."""
    absent = {
        name: value.missing
        for record in arm.records()
        for name in arm.plan.counters
        if type(value := record.counters.get(name, NOT_RECORDED)) is Missing
    }
    if absent:
        name, why = next(iter(absent.items()))
        more = f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""
        message = f"{arm.name} did not give {name}{more}: {why}"
        remedy = "Mend the program, or take the counter out of the sweep file for both arms."
        run_ids = [record.run_id for record in arm.records()]
        docket.add("MISSING", "exact", message, arm=arm.name, remedy=remedy, run_ids=run_ids)


def find_lengths(docket: Docket, plan: CellPlan, arm: ArmEvidence, *, itself: bool) -> None:
    """Generations that are shorter or longer than asked for without a declared stop."""
    for outcome, is_long in (("SHORT", False), ("LONG", True)):
        faults = [
            (
                f"generation {generation.number}" + (f", sequence {sequence}" if generation.further else ""),
                fault,
                record,
            )
            for record in arm.records()
            for generation in record.generations
            for sequence, tokens in enumerate(generation.sequences, start=1)
            if (fault := checks.length_fault(plan, tokens)) and (len(tokens.ids) > plan.settings.tokens) is is_long
        ]
        if faults:
            where, fault, _ = faults[0]
            name = f"{arm.name} itself" if itself else arm.name
            message = f"{name} gives {fault} ({where}, {len(faults)} in all)"
            docket.add(outcome, "identity", message, arm=arm.name, run_ids=[r.run_id for _, _, r in faults])  # type: ignore[arg-type]


def find_vacuous(docket: Docket, arms: Iterable[ArmEvidence]) -> list[str]:
    """Witnesses that are unmet in an arm that ran; the names of those arms."""
    vacuous = []
    for arm in arms:
        for row in arm.witnesses:
            if row.holds or not arm.records():
                continue
            seen = ", ".join(f"{name} is {_shown(value)}" for name, value in row.values.items())
            message = f"{arm.name} does not meet the witness {row.expr} ({seen}): its tokens prove nothing"
            docket.add("VACUOUS", "identity", message, arm=arm.name, run_ids=[r.run_id for r in arm.records()])
            vacuous.append(arm.name)
    return list(dict.fromkeys(vacuous))


def find_own_mismatches(docket: Docket, plan: CellPlan, arm: ArmEvidence) -> bool:
    """Whether an arm's runs are what the plan asked for; True when one is not."""
    found: dict[tuple[Outcome, str, str], list[str]] = {}
    for run in arm.counted():
        for mismatch in matching.own_mismatches(plan, arm.plan, run):
            key = (mismatch.outcome, mismatch.message, mismatch.remedy)
            found.setdefault(key, []).extend(mismatch.run_ids)
    for (outcome, message, remedy), run_ids in found.items():
        gate = "infrastructure" if outcome == "INFRASTRUCTURE" else "identity"
        docket.add(outcome, gate, f"{arm.name}: {message}", arm=arm.name, remedy=remedy, run_ids=run_ids)  # type: ignore[arg-type]
    return bool(found)


def _build_failure(docket: Docket, arm: ArmEvidence, *, of_base: bool) -> None:
    """An arm that could not be built, so that none of its runs can be. Head's own fault only when base can be built."""
    assert arm.plan.build is not None and arm.plan.build.failure is not None, arm.name
    failure, whose = arm.plan.build.failure, "; base could not be built either" if of_base else ""
    message = f"{arm.name} could not be built, so all {arm.expected} of its runs are missing: {failure.reason}"
    docket.add(
        "BUILD_FAILED",
        "identity",
        message if arm.plan.role in ("base", "null") else message + whose,
        arm=arm.name,
        run_ids=[run.run_id for run in arm.runs],
        of_base=of_base,
        log=failure.log_tail,
    )


def _engine_failure(
    docket: Docket, arm: ArmEvidence, ended: Sequence[EndedRun], *, base_fails: bool, base_counts: bool, elsewhere: bool
) -> None:
    """`elsewhere`: another kind of engine than base's, which a host may lack without anybody's doing."""
    end = ended[0][1]
    told = end.detail if end.detail.startswith(end.word) else f"{end.word}: {end.detail}"
    said = f"{_runs(ended, arm)} of {arm.name} ended, {told}"
    run_ids = _ids(ended)
    if end.word == CannotLoad.kind and (elsewhere or not base_counts):
        docket.add("CANNOT_LOAD", "identity", said, arm=arm.name, run_ids=run_ids)
    elif arm.plan.role in ("base", "null"):
        remedy = "Mend base first, or choose a scenario that base can run; without it there is nothing to compare with."
        docket.add("MISSING", "identity", said, arm=arm.name, remedy=remedy, run_ids=run_ids)
    elif base_fails:
        remedy = "Choose a scenario that both arms can run."
        docket.add("MISSING", "identity", f"{said}; base fails too", arm=arm.name, remedy=remedy, run_ids=run_ids)
    elif not base_counts:
        message = f"{said}; base gave nothing to compare with"
        docket.add("MISSING", "identity", message, arm=arm.name, run_ids=run_ids)
    elif end.word == "non_finite":
        docket.add("VIOLATION", "identity", f"{said}; base is fine", arm=arm.name, run_ids=run_ids)
    else:
        remedy = "Make head run what base runs, or take the scenario out of the sweep with a reason."
        docket.add("REGRESSED", "exact", f"{said}; base is fine", arm=arm.name, remedy=remedy, run_ids=run_ids)


def _find_broken_invariants(docket: Docket, arm: ArmEvidence, *, is_base: bool) -> None:
    run_ids = [record.run_id for record in arm.records()]
    name = f"{arm.name} itself" if is_base else arm.name
    for row in arm.invariants:
        if row.holds:
            continue
        if row.worst is None:
            message = f"{name}: the equation {row.name} could not be evaluated: {row.note}"
            docket.add("MISSING", "exact", message, arm=arm.name, run_ids=run_ids)
            continue
        sides = f"{row.worst.text}: {row.worst.lhs} against {row.worst.rhs}"
        note = f"; {row.note}" if row.note else ""
        docket.add("BROKEN_INVARIANT", "exact", f"{name} breaks {sides}{note}", arm=arm.name, run_ids=run_ids)


def _by_word(ended: Sequence[EndedRun]) -> list[list[EndedRun]]:
    groups: dict[str, list[EndedRun]] = {}
    for run, end in ended:
        groups.setdefault(end.word, []).append((run, end))
    return list(groups.values())


def _by_detail(ended: Sequence[EndedRun]) -> list[list[EndedRun]]:
    groups: dict[tuple[str, str], list[EndedRun]] = {}
    for run, end in ended:
        groups.setdefault((end.word, end.detail), []).append((run, end))
    return list(groups.values())


def _runs(ended: Sequence[EndedRun], arm: ArmEvidence) -> str:
    return f"{len(ended)} of {arm.expected} runs"


def _ids(ended: Sequence[EndedRun]) -> list[str]:
    return [run.run_id for run, _ in ended]


def _shown(value: object) -> str:
    return str(value) if isinstance(value, int | float) else str(getattr(value, "missing", value))
