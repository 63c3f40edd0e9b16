"""One cell, judged: its runs by themselves, then each arm against base."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from jobs import (
    compare,
    controls,
    creep,
    gates,
    goldens,
    judge_pair,
    judge_runs,
    lock_margin,
    losses,
    more_runs,
    outcomes,
    stats,
)
from jobs.calibration import with_noise
from jobs.docket import Docket
from jobs.inquiry import Inquiry
from jobs.judge_arm import ArmEvidence, set_aside, view, weigh
from jobs.metrics import METRICS
from jobs.model import CellInput, CellPlan, Manifest, RunFact, RunRecord
from jobs.more_runs import BaseAgain, FreshBlocks
from jobs.near_tie import Adjudication, FollowUp
from jobs.noise import Calibration
from jobs.over_batches import find_over_batches
from jobs.reviewed import Golden, Waiver
from jobs.verdict import CellVerdict, Finding, IdentityRow, MetricRow, Outcome, SetAside, TimeRow, about, tested_arms

DIFFERS = frozenset({"VIOLATION", "SHORT", "LONG", "UNADJUDICATED", "NONDETERMINISTIC"})
"""Identity classes after which two arms no longer did the same work."""


@dataclass(frozen=True, slots=True)
class JudgedCell:
    """A cell's verdict with what the sweep's verdict collects from it. `compared`: base and head met token by token.

    `open_questions`: what an oracle could still say, or which runs must be made first.
    """

    verdict: CellVerdict
    findings: tuple[Finding, ...]
    set_aside: tuple[SetAside, ...]
    compared: bool
    open_questions: tuple[FollowUp | BaseAgain | FreshBlocks, ...]


def judge_cell(
    manifest: Manifest,
    plan: CellPlan,
    runs: Sequence[RunFact],
    answers: Sequence[Adjudication] = (),
    *,
    room: int,
    time_rows: int,
    runs_more: bool = False,
    smaller: CellInput | None = None,
    waivers: Sequence[Waiver] = (),
    golden: Golden | None = None,
    noise: Sequence[Calibration] = (),
) -> JudgedCell:
    """Judge one cell of the manifest; `runs` in block order, without duplicates; `answers` of the oracle about it.

    `room`: how many questions the sweep may still ask; `runs_more`: further runs among them. `time_rows`: how many rows
    of time it compares in all. `smaller`: the cell of a smaller batch whose tokens this one's must be, without
    duplicates. `waivers`: those in force. `golden`: the cell's blessed ids. `noise`: what is known
    of its times' noise.
    """
    inquiry = Inquiry(plan, manifest.identity, answers, room, runs_more=runs_more)
    docket = Docket(plan.cell, manifest.gate, waivers)
    judged = _Cell(manifest, plan, runs, inquiry, docket, time_rows, smaller, golden).judge()
    return replace(judged, verdict=with_noise(judged.verdict, noise)) if noise else judged


class _Cell:
    """The steps of one cell's judgement, in order, over one docket."""

    def __init__(
        self,
        manifest: Manifest,
        plan: CellPlan,
        runs: Sequence[RunFact],
        inquiry: Inquiry,
        docket: Docket,
        time_rows: int,
        smaller: CellInput | None,
        golden: Golden | None,
    ) -> None:
        self.manifest = manifest
        self.plan = plan
        self.contract = manifest.identity.for_cell(plan.prompt, plan.settings.tokens)
        self.docket = docket
        self.inquiry = inquiry
        self.given = frozenset(more_runs.given(plan, runs))
        awaits = plan.fresh_blocks > 0 and "blocks" not in self.given
        self.time_plan = compare.TimePlan(plan.blocks, time_rows, plan.fresh_blocks, awaits)
        self.smaller = smaller
        self.golden = golden
        known = self._weighed(plan, runs)
        self.arms = [arm for arm in known if arm.plan.role != "anchor"]
        self.anchors = [arm for arm in known if arm.plan.role == "anchor"]
        self.base = next((arm for arm in self.arms if arm.plan.role == "base"), None)
        self.nulls = [arm for arm in self.arms if arm.plan.role == "null"]
        self.others = [arm for arm in self.arms if arm.plan.role in ("head", "variant")]
        tested = tested_arms([arm.plan for arm in self.arms])
        self.tested = [arm for arm in self.arms if arm.plan in tested]
        self.strangers = sorted({run.arm for run in runs} - {arm.name for arm in known})
        self.notes: list[str] = []
        self.self_rows: dict[str, tuple[IdentityRow, ...]] = {}
        self.pair_rows: dict[str, tuple[IdentityRow, ...]] = {}
        self.golden_rows: tuple[IdentityRow, ...] = ()
        self.planned: set[str] = set()
        """Arms whose plans met base's, where nothing was computed."""
        self.exact: list[MetricRow] = []
        self.time: list[TimeRow] = []

    def judge(self) -> JudgedCell:
        """Run all steps and put the cell's verdict together."""
        self._cast()
        judge_runs.find_endings(self.docket, self.base, self.arms)
        for arm in self.arms:
            judge_runs.find_faults(self.docket, self.plan, arm, is_base=arm is self.base)
        vacuous = judge_runs.find_vacuous(self.docket, self.arms)
        strays = {arm.name for arm in self.arms if judge_runs.find_own_mismatches(self.docket, self.plan, arm)}
        for arm in self.arms:
            self._alone(arm)
        if self.smaller is not None and not self.plan.settings.plan_only and self.manifest.gate.identity != "off":
            others = self._weighed(self.smaller.plan, self.smaller.runs)
            find_over_batches(self.docket, self.plan, self.arms, self.smaller.plan, others, self.contract)
        self._against_golden(strays)
        self._lock_margins()
        if self.base is not None:
            for arm in (*self.nulls, *self.others):
                self._against_base(self.base, arm, vacuous, strays)
        self._own_lengths_and_corruption()
        for anchor in self.anchors:
            for arm in self.tested:
                self.notes += creep.notes(self.plan, anchor, arm, self._varies(arm), self.contract)
        self._ask_for_runs()
        return self._conclude()

    def _weighed(self, plan: CellPlan, runs: Sequence[RunFact]) -> list[ArmEvidence]:
        known = {arm.name: arm for arm in self.manifest.arms}
        return [weigh(plan, known[name], runs, self.contract.scope) for name in plan.arms if name in known]

    def _cast(self) -> None:
        """Whether the cell has arms to compare at all."""
        if self.base is None:
            self.docket.add("MISSING", "identity", "the cell has no base arm")
        if not self.tested:
            self.docket.add("MISSING", "identity", "the cell has no arm under test")
        for name in self.strangers:
            self.docket.add("INFRASTRUCTURE", "infrastructure", f"runs of an arm {name!r} that the cell does not have")

    def _alone(self, arm: ArmEvidence) -> None:
        if arm.records():
            judge_pair.find_varying(self.docket, arm)
        if arm.records() and not self.plan.settings.plan_only:
            self.self_rows[arm.name] = judge_pair.judge_self(self.docket, self.plan, arm)
            self.notes += judge_pair.find_locks(self.docket, self.plan, arm)
        if unsteady := losses.unsteady(arm):
            self.notes.append(unsteady)
        throttled = sum(end.word == "throttled" for _, end in arm.ended("measured"))
        if throttled:
            self.notes.append(f"{throttled} runs of {arm.name} ran on a throttled card: their times do not count")

    def _against_golden(self, strays: set[str]) -> None:
        """Every arm that is what the plan asked for, against the ids that were blessed for the cell."""
        arms = [arm for arm in self.arms if arm.name not in strays]
        cards = {record.card_name for arm in arms for record in arm.records()}
        if self.golden is None or self.plan.settings.plan_only:
            return
        if not goldens.unfit(self.golden, self.plan, cards, self.contract.scope):
            self.golden_rows = goldens.judge_golden(self.docket, self.golden, arms, self.contract)

    def _against_base(self, base: ArmEvidence, arm: ArmEvidence, vacuous: Sequence[str], strays: set[str]) -> None:
        both = bool(base.records() and arm.records())
        comparable = not strays & {base.name, arm.name}
        if both and judge_pair.find_mismatches(self.docket, base, arm, self._varies(arm), self.contract.scope):
            comparable = False
        unsteady = [n for n, rows in self.self_rows.items() if any(r.klass == "NONDETERMINISTIC" for r in rows)]
        unmet = [name for name in vacuous if name in (base.name, arm.name)]
        if self.plan.settings.plan_only:
            rows: tuple[IdentityRow, ...] = ()
            self.planned |= {arm.name} if both and comparable else set()
        else:
            rows = judge_pair.judge_identity(
                base,
                arm,
                self.contract,
                unsteady=unsteady,
                vacuous=unmet,
                comparable=comparable,
                inquiry=self.inquiry,
            )
        if why := base.plan.unbuilt or arm.plan.unbuilt or arm.unloaded:
            rows = tuple(row.model_copy(update={"note": why}) if row.klass == "MISSING" else row for row in rows)
        self.pair_rows[arm.name] = rows
        told = both and self.manifest.gate.identity != "off"
        judge_pair.find_differences(self.docket, arm, rows, self.contract, both=told)
        judge_pair.find_waived_unproven(self.docket, base, arm, rows, self.contract)
        if not both:
            return
        self.notes += controls.changed_defaults(base, arm)
        if arm.plan.role == "null":
            if comparable:
                judge_pair.find_null_differences(self.docket, base, arm)
        elif arm in self.tested:
            self._figures(base, arm, rows, unmet, comparable)
        else:
            judged = "it is planned alone" if self.plan.settings.plan_only else "its tokens are judged"
            self.notes.append(f"{arm.name} is a variant: {judged}, its counters are shown")

    def _figures(
        self, base: ArmEvidence, arm: ArmEvidence, rows: Sequence[IdentityRow], unmet: Sequence[str], comparable: bool
    ) -> None:
        lengths = judge_pair.other_lengths(base, arm)
        reason = compare.NOT_COMPARABLE if not comparable else compare.NOT_ENGAGED if unmet else ""
        standing = compare.Standing(
            different_work=lengths is not None or any(row.klass in DIFFERS for row in rows),
            near_tie=any(row.klass == "NEAR_TIE" for row in rows),
            unjudged=reason,
            prefix=about(arm.name) if len(self.tested) > 1 else "",
            capture_varies="capture" in self.manifest.varies and self._capture(base) != self._capture(arm),
        )
        settled = judge_pair.is_settled(self.manifest, self.contract, rows)
        settled = settled and not self.docket.waives(DIFFERS | {"NEAR_TIE"}, arm.name)
        if lengths is not None and not reason and not settled and self.manifest.gate.exact != "off":
            judge_pair.find_other_lengths(self.docket, self.manifest, arm, lengths)
        null = self.nulls[0] if self.nulls else None
        if self._varies(arm) == () and (gone := judge_pair.unstated(base, arm)):
            self.notes.append(f"{arm.name} no longer states equations that base does: {', '.join(gone)}")
        exact = judge_pair.judge_exact(self.docket, self.manifest, self.plan, base, arm, standing)
        self.notes += [f"{row.metric} of {arm.name}: {gates.NO_STEP}" for row in exact if gates.NO_STEP in row.note]
        self.notes += controls.notes(base, arm, exact)
        self.exact += exact
        self.time += judge_pair.judge_time(
            self.docket, self.manifest, base, arm, null, self.time_plan, standing, settled=settled
        )

    def _capture(self, arm: ArmEvidence) -> bool:
        """Whether an arm was asked to capture; the engine captures unless told otherwise."""
        return bool({**self.plan.config, **arm.plan.config}.get("capture", True))

    def _varies(self, arm: ArmEvidence) -> tuple[str, ...]:
        """A null arm is base again: nothing may differ on purpose."""
        return () if arm.plan.role == "null" else self.manifest.varies

    def _own_lengths_and_corruption(self) -> None:
        """What an arm does against itself or against the request, where the pair's finding does not say it already."""
        base_rows = self.self_rows.get(self.base.name, ()) if self.base else ()
        base_corrupt = any(row.klass in DIFFERS for row in base_rows)
        for arm in () if self.plan.settings.plan_only else self.arms:
            is_base = arm is self.base
            pair = {row.klass for row in self.pair_rows.get(arm.name, ())}
            if is_base or not pair & {"SHORT", "LONG"}:
                judge_runs.find_lengths(self.docket, self.plan, arm, itself=is_base)
            shared = base_corrupt and pair <= {"IDENTICAL", "VACUOUS"}
            if is_base or not (pair & DIFFERS or shared):
                rows = self.self_rows.get(arm.name, ())
                judge_pair.find_self_corruption(self.docket, arm, rows, is_base=is_base)

    def _lock_margins(self) -> None:
        """Locks with a margin band, against the oracle. A tripwire only warns; what is not known cannot pass."""
        if self.base is None or not self.base.records() or self.plan.settings.plan_only:
            return
        if self.manifest.gate.identity == "off":
            return  # nobody asks the oracle then, and what is not asked cannot be missed
        for fault in lock_margin.faults(self.plan, self.base, self.inquiry):
            if fault.lock.tripwire:
                self.notes.append(f"tripwire: {fault.message}")
            else:
                outcome: Outcome = "MISSING" if fault.is_open else "VIOLATION"
                run_ids = [self.base.records()[0].run_id]
                self.docket.add(outcome, "identity", fault.message, arm=self.base.name, run_ids=run_ids)

    def _ask_for_runs(self) -> None:
        """What must be run before this can be answered: base again, or the blocks that decide on time."""
        if again := self._base_again():
            if why := self.inquiry.ask_for(again):
                ran = f"{again.arm} ran {len(self._of_base())} times and was not run again"
                self.notes.append(f"{ran}, which could tell whether it repeats itself: {why}")
        elif (fresh := self._fresh_blocks()) and (why := self.inquiry.ask_for(fresh)):
            self.notes.append(f"{fresh.count} fresh blocks that decide on time were not run: {why}")

    def _of_base(self) -> list[RunRecord]:
        """Runs of base's build and config that count, those of its null arms among them."""
        return [record for arm in self.arms if arm is self.base or arm in self.nulls for record in arm.records()]

    def _base_again(self) -> BaseAgain | None:
        """Where ids differ from base's, or base's own, and base has run so few times that chance may have hidden it."""
        if self.base is None or not self.base.records() or self.manifest.gate.identity == "off":
            return None
        rows = [row for arm in self.others for row in self.pair_rows.get(arm.name, ())]
        wavers = any(row.klass == "NONDETERMINISTIC" for row in self.self_rows.get(self.base.name, ()))
        differs = wavers or any(row.klass in DIFFERS - {"NONDETERMINISTIC"} for row in rows)
        if not differs or "base" in self.given or len(self._of_base()) >= more_runs.BASE_AGAIN:
            return None
        card = str(self.base.records()[0].device.get("uuid") or "")
        return BaseAgain(cell=self.plan.cell, arm=self.base.name, card=card, block=self.base.counted()[0].block)

    def _fresh_blocks(self) -> FreshBlocks | None:
        """Where the blocks that screen moved in a time that gates."""
        moved = any(METRICS[row.metric].gating and stats.AWAITS in row.note for row in self.time)
        if not moved or self.manifest.gate.time == "off":
            return None
        return FreshBlocks(cell=self.plan.cell, first=self.plan.blocks, count=self.plan.fresh_blocks)

    def _conclude(self) -> JudgedCell:
        findings = self.docket.findings()
        names = {arm.name for arm in self.tested}
        compared = bool(names & self.planned) or any(
            row.klass not in ("MISSING", "NOT_COMPARABLE") for name in names for row in self.pair_rows.get(name, ())
        )
        verdict = CellVerdict.made(
            cell=self.plan.cell,
            outcome=self._outcome(findings),
            exit_code=outcomes.fold(finding.exit_code for finding in findings),
            model=self.plan.model,
            prompt=self.plan.prompt,
            arms=tuple(view(arm, self.plan.config) for arm in (*self.arms, *self.anchors)),
            identity=tuple(
                row for rows in (*self.pair_rows.values(), self.golden_rows, *self.self_rows.values()) for row in rows
            ),
            witnesses=tuple(row for arm in self.arms for row in arm.witnesses),
            invariants=tuple(row for arm in self.arms for row in arm.invariants),
            exact=_marked(self.exact, findings),
            time=tuple(self.time),
            losses=losses.rows(self.arms),
            notes=tuple(self.notes),
        )
        aside = tuple(row for arm in (*self.arms, *self.anchors) for row in set_aside(self.plan.cell, arm))
        asked = () if self.manifest.gate.identity == "off" else tuple(self.inquiry.open_questions)
        return JudgedCell(verdict, findings, aside, compared, asked)

    def _outcome(self, findings: Sequence[Finding]) -> Outcome:
        leading = outcomes.leading(findings)
        if leading is not None:
            return leading.outcome
        return "IMPROVED" if any(row.klass == "improved" for row in self.exact) else "PASS"


def _marked(rows: Iterable[MetricRow], findings: Sequence[Finding]) -> tuple[MetricRow, ...]:
    """Rows, with a word in those of which what was found is waived."""
    waived = {finding.metric for finding in findings if finding.was}
    return tuple(
        row.model_copy(update={"note": "; ".join(part for part in (row.note, "waived") if part)})
        if row.metric in waived and row.klass != "same"
        else row
        for row in rows
    )
