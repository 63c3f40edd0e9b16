"""Which ids may be blessed: those of an arm that is whole, steady, finite and engaged, so that nothing broken becomes
what later changes are held against.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from jobs import checks, identity
from jobs.errors import SpecError
from jobs.goldens import digest_of_prompts
from jobs.judge_arm import ArmEvidence, weigh
from jobs.model import CellInput, JudgeInput, RunRecord
from jobs.reviewed import Golden, GoldenStream
from jobs.verdict import Verdict

GAP_DIGITS = 6


def golden_of(
    doc: JudgeInput,
    verdict: Verdict,
    cell: CellInput,
    arm: str | None,
    *,
    golden_id: str,
    reason: str,
    by: str,
    now: datetime,
    supersedes: str = "",
) -> Golden:
    """The golden that an arm's ids make; of head where none is named, else of base.

    Raises SpecError that says why an arm cannot be blessed.
    """
    if verdict.struck is not None:
        raise SpecError(f"sweep {doc.stamp.sweep_id} is retracted: {verdict.struck.why[0].words}", "run it anew")
    plan, evidence = cell.plan, _arm(doc, cell, arm)
    if why := _unfit(cell, evidence):
        remedy = "only an arm that is whole, steady, finite and engaged can be blessed"
        raise SpecError(f"{evidence.name} of {plan.cell} cannot be blessed: {why}", remedy)
    records = evidence.records()
    first = min(records[0].generations, key=lambda one: one.index)
    streams = tuple(
        GoldenStream(ids=one.ids, stop=_stop(one.stop_reason), gaps=_rounded(one.gaps)) for one in first.sequences
    )
    return Golden(
        id=golden_id,
        cell=plan.cell,
        model_digest=plan.model_digest,
        prompt_digest=digest_of_prompts(plan),
        tokens=plan.settings.tokens,
        ignore_eos=plan.settings.ignore_eos,
        card=_card(records[0]),
        streams=streams,
        reason=reason,
        by=by,
        at=now.isoformat(timespec="seconds"),
        sweep=doc.stamp.sweep_id,
        arm=evidence.name,
        runs=tuple(record.run_id for record in records),
        engine_digest=records[0].engine_digest,
        supersedes=supersedes,
    )


def _arm(doc: JudgeInput, cell: CellInput, name: str | None) -> ArmEvidence:
    arms = [arm for arm in doc.manifest.arms if arm.name in cell.plan.arms]
    wanted = [arm for arm in arms if (arm.name == name if name else arm.role == "head")]
    wanted = wanted or [arm for arm in arms if not name and arm.role == "base"]
    if not wanted:
        raise SpecError(f"cell {cell.plan.cell} has no arm {name!r}", f"name one of: {', '.join(cell.plan.arms)}")
    return weigh(cell.plan, wanted[0], cell.runs, doc.manifest.identity.scope)


def _unfit(cell: CellInput, arm: ArmEvidence) -> str:
    """Why an arm cannot be blessed; empty when it can."""
    plan, records = cell.plan, arm.records()
    if plan.settings.plan_only:
        return "it is planned alone and has no ids"
    if len(records) < arm.expected:
        why = next((end.detail for _, end in arm.endings if end.kind != "measured"), "they are not there")
        return f"{arm.expected - len(records)} of its {arm.expected} runs do not count: {why}"
    faults = [fault for record in records for fault in checks.generation_faults(plan, arm.plan, record)]
    faults += [f"logits are not finite ({where})" for record in records if (where := checks.non_finite_logits(record))]
    faults += [
        fault
        for record in records
        for generation in record.generations
        for tokens in generation.sequences
        if (fault := checks.length_fault(plan, tokens))
    ]
    faults += [f"the witness {row.expr} is unmet" for row in arm.witnesses if not row.holds]
    faults += [f"the equation {row.name} does not hold" for row in arm.invariants if not row.holds]
    own = identity.self_row(identity.streams_of(arm.name, records), plan.prompts(arm.plan))
    faults += [own.note] if own.klass != "IDENTICAL" else []
    faults += ["its runs are on several card models"] if len({_card(record) for record in records}) > 1 else []
    return faults[0] if faults else ""


def _card(record: RunRecord) -> str:
    return record.card_name or "unnamed"


def _rounded(gaps: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(f"{gap:.{GAP_DIGITS}g}") for gap in gaps)


def _stop(word: str | None) -> Literal["length", "eos"]:
    assert word is not None, "a stream that was cut off has no length and is refused before"
    return "eos" if word == "eos" else "length"
