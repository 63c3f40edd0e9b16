"""Two arms of one cell, in this order: match keys, self-consistency, identity, then counters, bytes, time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from jobs import compare, declared, gates, identity, matching, wording
from jobs.contract import IdentityContract
from jobs.docket import Docket
from jobs.identity import ArmStreams, Stream
from jobs.inquiry import Inquiry
from jobs.judge_arm import ArmEvidence
from jobs.metrics import METRICS
from jobs.model import CellPlan, Manifest, Missing
from jobs.verdict import IdentityRow, MetricRow, TimeRow, tested_arms

ABSENT = frozenset({"new", "vanished", "not_recorded"})
"""Classes of a metric that an arm or both did not measure."""


def find_mismatches(
    docket: Docket, base: ArmEvidence, other: ArmEvidence, varies: Sequence[str], scope: Collection[str]
) -> bool:
    """Match keys of a pair; True when the two cannot be compared."""
    found = matching.pair_mismatches(base.plan, other.plan, base.counted(), other.counted(), varies, scope)
    for mismatch in found:
        docket.add(
            mismatch.outcome,
            "identity",
            mismatch.message,
            arm=mismatch.arm,
            remedy=mismatch.remedy,
            run_ids=mismatch.run_ids,
        )
    return bool(found)


def judge_self(docket: Docket, plan: CellPlan, arm: ArmEvidence) -> tuple[IdentityRow, ...]:
    """An arm against itself, card by card; nondeterminism becomes a finding here."""
    prompts = plan.prompts(arm.plan)
    rows = tuple(identity.self_row(streams, prompts) for streams in arm.streams.values())
    for row in rows:
        if row.klass == "NONDETERMINISTIC":
            docket.add(
                "NONDETERMINISTIC",
                "identity",
                f"{arm.name} does not repeat itself: {wording.difference(row)}{_places(arm, row)}",
                arm=arm.name,
                run_ids=row.run_ids,
                of_base=arm.plan.role in ("base", "null"),
            )
    return rows


def find_self_corruption(docket: Docket, arm: ArmEvidence, rows: Sequence[IdentityRow], *, is_base: bool) -> None:
    """Generations of one arm that differ in the same way in every run."""
    for row in rows:
        if row.klass in ("VIOLATION", "SHORT", "LONG"):
            whose = f"{arm.name} itself is corrupted" if is_base else f"{arm.name} is corrupted"
            docket.add(
                row.klass,
                "identity",
                f"{whose}: {wording.difference(row)}",
                arm=arm.name,
                run_ids=row.run_ids,
            )


def judge_identity(
    base: ArmEvidence,
    other: ArmEvidence,
    contract: IdentityContract,
    *,
    unsteady: Collection[str],
    vacuous: Collection[str],
    comparable: bool,
    inquiry: Inquiry,
) -> tuple[IdentityRow, ...]:
    """Base against another arm on each card. Where nothing may be claimed, IDENTICAL turns into the reason.

    What may be a near tie is put to `inquiry`, but not for a null arm: base must equal base.
    """
    what: identity.What = "null" if other.plan.role == "null" else "pair"
    mine, theirs = base.streams, other.streams
    cards = [card for card in mine if card in theirs]
    if not cards:  # an arm gave nothing, or the two never shared a card: `comparable` is then False
        row = identity.pair_row(_all_streams(base), _all_streams(other), contract, what, unsteady)
        return (_claimed(row, vacuous=vacuous, comparable=comparable),)
    rows = []
    asks = inquiry.of(base, other) if comparable and what == "pair" else identity.no_oracle
    for card in cards:
        row = identity.pair_row(mine[card], theirs[card], contract, what, unsteady, asks)
        if len(cards) > 1:
            row = row.model_copy(update={"note": f"card {' '.join(card)}; {row.note}"})
        rows.append(_claimed(row, vacuous=vacuous, comparable=comparable))
    return tuple(rows)


def find_differences(
    docket: Docket, other: ArmEvidence, rows: Sequence[IdentityRow], contract: IdentityContract, *, both: bool
) -> None:
    """Tokens that differ from base's. A null arm that differs shows that base itself is not steady.

    `both`: both arms have runs that count. That nothing of them could be compared is then a finding of its own.
    """
    for row in rows:
        if row.klass == "MISSING" and both:
            message = f"no token of {other.name} could be compared with base: {row.note}"
            remedy = "Make both arms give ids for the same generations."
            docket.add(
                "MISSING",
                "identity",
                message,
                arm=other.name,
                remedy=remedy,
                run_ids=[run.run_id for run in other.counted()],
            )
        if row.klass not in ("VIOLATION", "SHORT", "LONG", "UNADJUDICATED", "NEAR_TIE"):
            continue
        if row.what == "null":
            message = f"{other.name} is base again and gives other tokens: {wording.difference(row)}"
            docket.add("NONDETERMINISTIC", "identity", message, arm=other.name, run_ids=row.run_ids, of_base=True)
        else:
            docket.add(
                row.klass,
                "identity",
                wording.difference(row),
                arm=other.name,
                run_ids=row.run_ids,
                note=row.klass == "NEAR_TIE" and _takes(contract, row),
            )


def find_waived_unproven(
    docket: Docket, base: ArmEvidence, other: ArmEvidence, rows: Sequence[IdentityRow], contract: IdentityContract
) -> None:
    """What a waiver leaves open: that runs ended is accepted, not that none is left to compare; and that ids waver, not
    that no run gives base's.
    """
    if not other.records() and docket.waives({"REGRESSED", "VIOLATION"}, other.name):
        message = f"that runs of {other.name} ended is waived, and none is left to compare with base"
        docket.add("MISSING", "identity", message, arm=other.name, run_ids=[run.run_id for run in other.runs])
    if not docket.waives({"NONDETERMINISTIC"}, other.name):
        return
    if any(row.klass == "NONDETERMINISTIC" and row.what == "pair" for row in rows):
        mine, theirs = base.streams, other.streams
        unmet = (identity.never_met(mine[card], theirs[card], contract) for card in mine if card in theirs)
        find_differences(docket, other, [row for row in unmet if row is not None], contract, both=False)


def find_locks(docket: Docket, plan: CellPlan, arm: ArmEvidence) -> list[str]:
    """Broken locks; notes for tripwires, which only warn."""
    notes = []
    for streams in arm.streams.values():
        for lock, fault in identity.broken_locks(plan.locks, plan.prompt, streams):
            if lock.tripwire:
                notes.append(f"tripwire: {arm.name} gives {fault}")
            else:
                docket.add(
                    "VIOLATION", "identity", f"{arm.name} gives {fault}", arm=arm.name, run_ids=streams.run_ids()
                )
    return notes


def judge_exact(
    docket: Docket, manifest: Manifest, plan: CellPlan, base: ArmEvidence, head: ArmEvidence, standing: compare.Standing
) -> tuple[MetricRow, ...]:
    """Exact metrics of the pair, with a finding for each gating row that is worse, gone, unsteady or declared."""
    if manifest.gate.exact == "off":
        standing = replace(standing, unjudged=standing.unjudged or compare.GATE_OFF)
    rows = compare.exact_rows(base.measured, head.measured, plan.cell, manifest.expectations, standing)
    rows = tuple(declared.noted(manifest, plan.cell, row) for row in rows)
    if standing.unjudged:
        return rows
    unread = ABSENT | ({"varies"} if manifest.gate.exact == "advise" else set())  # where it blocks, varying has its own
    absent = [row for row in rows if row.gating and row.klass in unread]
    if absent and not any(row.gating and row.klass not in unread for row in rows):
        message = f"no gating metric could be compared: {_absence(absent[0], base, head)}"
        docket.add("MISSING", "exact", message, arm=head.name, run_ids=absent[0].run_ids)
        return rows
    if not any(row.gating for row in rows):
        message = f"no gating metric is counted by {base.name} or {head.name}: nothing of the work can be compared"
        remedy = "Name those that both programs tell under counters, or set gate.exact to off."
        docket.add(
            "MISSING", "exact", message, arm=head.name, remedy=remedy, run_ids=[r.run_id for r in head.records()]
        )
    for row in rows:
        if row.klass in ("regressed", "declared"):
            docket.add(
                "REGRESSED" if row.klass == "regressed" else "DECLARED",
                "exact",
                wording.change(row),
                arm=head.name,
                remedy=declared.remedy(manifest, base.plan, plan.cell, row) if row.klass == "regressed" else "",
                run_ids=row.run_ids,
                share=wording.share(row),
                metric=row.metric,
            )
        elif row in absent:
            message = f"{row.metric} gates and could not be compared: {_absence(row, base, head)}"
            remedy = "Record it in both arms: what was not measured cannot pass."
            docket.add("MISSING", "exact", message, arm=head.name, remedy=remedy, run_ids=row.run_ids)
    return rows


def other_lengths(base: ArmEvidence, head: ArmEvidence) -> tuple[Stream, Stream] | None:
    """The first generation and sequence, on any card, in which two arms gave another number of ids; None if none."""
    mine, theirs = base.streams, head.streams
    found = (identity.other_lengths(mine[card], theirs[card]) for card in mine if card in theirs)
    return next((pair for pair in found if pair is not None), None)


def is_settled(manifest: Manifest, contract: IdentityContract, rows: Sequence[IdentityRow]) -> bool:
    """Whether the tokens alone already cost an exit code, so that figures of other tokens need no finding of theirs."""
    free = [row.klass == "IDENTICAL" or (row.klass == "NEAR_TIE" and _takes(contract, row)) for row in rows]
    return manifest.gate.identity == "block" and not all(free)


def find_other_lengths(docket: Docket, manifest: Manifest, head: ArmEvidence, lengths: tuple[Stream, Stream]) -> None:
    """Lengths that differ and cost nothing by themselves: counters of more or fewer steps are of different work."""
    mine, theirs = lengths
    why = "the contract allows" if manifest.gate.identity == "block" else "the identity gate does not block"
    message = (
        f"{head.name} gives {len(theirs.ids)} ids where base gives {len(mine.ids)} ({theirs.words}): {why} that, "
        "but counters of different work cannot be compared"
    )
    remedy = "Make both arms give as many ids, or set gate.exact to off and compare the tokens alone."
    docket.add("MISSING", "exact", message, arm=head.name, remedy=remedy, run_ids=(mine.run_id, theirs.run_id))


def unstated(base: ArmEvidence, head: ArmEvidence) -> list[str]:
    """Equations that base's engine evaluates on itself and head's does not: what they would have said is not known."""
    stated = [{equation.name for record in arm.records() for equation in record.equations} for arm in (base, head)]
    return sorted(stated[0] - stated[1])


def find_varying(docket: Docket, arm: ArmEvidence) -> None:
    """Exact metrics that do not repeat inside one arm: a finding; those that do not gate are a note."""
    for name, value in compare.varying(arm.measured).items():
        docket.add(
            "NONDETERMINISTIC",
            "exact",
            f"{name} should be exact and does not repeat in {arm.name}: {value.missing}",
            arm=arm.name,
            run_ids=[record.run_id for record in arm.records()],
            of_base=arm.plan.role in ("base", "null"),
            note=name not in gates.GATING,
            metric=name,
        )


def find_null_differences(docket: Docket, base: ArmEvidence, null: ArmEvidence) -> None:
    """Gating metrics in which base differs from base run again: they cannot judge head."""
    for name, (mine, theirs) in compare.differing(base.measured, null.measured).items():
        docket.add(
            "NONDETERMINISTIC",
            "exact",
            f"{null.name} is base again, yet {name} is {wording.number(theirs)} against {wording.number(mine)}",
            arm=null.name,
            run_ids=[record.run_id for record in (*base.records(), *null.records())],
            of_base=True,
            metric=name,
        )


def judge_time(
    docket: Docket,
    manifest: Manifest,
    base: ArmEvidence,
    head: ArmEvidence,
    null: ArmEvidence | None,
    plan: compare.TimePlan,
    standing: compare.Standing,
    *,
    settled: bool,
) -> tuple[TimeRow, ...]:
    """Time metrics of the pair. Where time blocks, open questions do too, and work that differs unless `settled`."""
    control = null.measured if null is not None and null.records() else None
    rows = compare.time_rows(base.measured, head.measured, control, plan, standing)
    open_ = {"UNDECIDED", "THROTTLED_OUT", "NO_VALID_SAMPLE", "NOT_MEASURED"}
    open_ |= {"DIFFERENT_WORK"} if standing.different_work and not settled else set()
    for row in rows if not standing.unjudged else ():
        if not METRICS[row.metric].gating:
            continue
        if row.klass == "WORSE":
            message = f"{row.metric} is {wording.number(row.ratio)} times base's over {row.blocks} blocks"
            share = None if isinstance(row.ratio, Missing) else row.ratio - 1
            docket.add(
                "TIME_WORSE", "time", message, arm=head.name, run_ids=row.run_ids, share=share, metric=row.metric
            )
        elif row.klass in open_ and manifest.gate.time == "block":
            remedy = "Give the sweep more blocks, a null arm and a quiet card, or let time advise."
            message = f"time gates and {row.metric} is not decided: {row.note}"
            docket.add("MISSING", "time", message, arm=head.name, remedy=remedy, run_ids=row.run_ids)
    return rows


def rows_of_time(manifest: Manifest) -> int:
    """How many time rows the sweep as planned compares: what its rate of false alarms is shared out over."""
    known = {arm.name: arm for arm in manifest.arms}
    tested = (tested_arms([known[name] for name in cell.arms if name in known]) for cell in manifest.cells)
    return max(1, sum(map(len, tested)) * len(compare.TIME_METRICS))


def _places(arm: ArmEvidence, row: IdentityRow) -> str:
    """Cards and drivers of the runs that disagree, where a contract holds over several; empty where they share one."""
    records = [record for record in arm.records() if record.run_id in row.run_ids]
    places = [f"{record.device.get('uuid')}, driver {record.device.get('driver')}" for record in records]
    return f" (on {' and on '.join(places)})" if len(set(places)) > 1 else ""


def _takes(contract: IdentityContract, row: IdentityRow) -> bool:
    """Whether the contract takes a near tie as its row shows it."""
    assert row.first_difference is not None, row
    return contract.takes(row.sequence, row.first_difference, row.left_id, row.right_id)


def _absence(row: MetricRow, base: ArmEvidence, head: ArmEvidence) -> str:
    """Which arm lacks a metric, and why."""
    absent = [(arm, value) for arm, value in ((base, row.base), (head, row.head)) if isinstance(value, Missing)]
    reasons = dict.fromkeys(value.missing for _, value in absent)
    return f"{' and '.join(arm.name for arm, _ in absent)}: {'; '.join(reasons)}"


def _all_streams(arm: ArmEvidence) -> ArmStreams:
    return identity.streams_of(arm.name, arm.records())


def _claimed(row: IdentityRow, *, vacuous: Collection[str], comparable: bool) -> IdentityRow:
    if not comparable and row.klass != "MISSING":
        return row.model_copy(update={"klass": "NOT_COMPARABLE", "note": "match keys differ; " + row.note})
    unmet = [name for name in vacuous if name]
    if unmet and row.klass == "IDENTICAL":
        note = f"not claimed, a witness is unmet in {' and '.join(unmet)}; {row.note}"
        return row.model_copy(update={"klass": "VACUOUS", "note": note})
    return row
