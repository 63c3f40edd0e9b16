"""Goldens: ids that people blessed, as a third beside base and head, for the two may agree and both be wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jobs import identity, wording
from jobs.contract import IdentityContract
from jobs.docket import Docket
from jobs.judge_arm import ArmEvidence
from jobs.model import CellPlan, Manifest
from jobs.reviewed import Golden, prompts_digest
from jobs.verdict import CellVerdict, IdentityRow, ReviewedRow

DIFFERS = frozenset({"VIOLATION", "SHORT", "LONG", "UNADJUDICATED"})


def newest(goldens: Iterable[Golden]) -> dict[str, Golden]:
    """The golden of each cell: the last one, which supersedes those before it."""
    return {golden.cell: golden for golden in goldens}


def in_force(manifest: Manifest, retracted: Mapping[str, str]) -> dict[str, Golden]:
    """Those of the newest goldens that stand. One that is retracted leaves its cell without: what it superseded was
    wrong too.
    """
    return {cell: one for cell, one in newest(manifest.reviewed.goldens).items() if one.id not in retracted}


def unfit(golden: Golden, plan: CellPlan, cards: Iterable[str], scope: Sequence[str]) -> str:
    """Why a golden says nothing of a cell as it was run; empty when it does."""
    asked = {
        "another model": (golden.model_digest, plan.model_digest),
        "other prompts": (golden.prompt_digest, digest_of_prompts(plan)),
        "another number of tokens": (golden.tokens, plan.settings.tokens),
        "another rule for end ids": (golden.ignore_eos, plan.settings.ignore_eos),
    }
    others = [word for word, (blessed, run) in asked.items() if blessed != run]
    if "card" in scope and (strange := sorted(set(cards) - {golden.card, ""})):
        others.append(f"another card ({golden.card}; this one ran on {', '.join(strange)})")
    return f"it was blessed for {' and '.join(others)}" if others else ""


def digest_of_prompts(plan: CellPlan) -> str:
    """The digest by which a golden knows the prompts of a cell."""
    return prompts_digest((plan.prompt_ids, *plan.further_prompts))


def judge_golden(
    docket: Docket, golden: Golden, arms: Sequence[ArmEvidence], contract: IdentityContract
) -> tuple[IdentityRow, ...]:
    """Each arm that gave ids against the golden; a finding for each that differs.

    No oracle is asked: where the golden's own gap leaves a near tie possible, it is UNADJUDICATED.
    """
    rows = []
    for arm in arms:
        row = _least_like(golden, identity.streams_of(arm.name, arm.records()), contract)
        if row is None:
            continue
        rows.append(row)
        if row.klass in DIFFERS:
            message = f"{wording.difference(row)} (golden {golden.id}: {golden.reason})"
            remedy = f"Mend {arm.name}, or bless its ids with a reason where the golden is what is wrong."
            docket.add(row.klass, "identity", message, arm=arm.name, remedy=remedy, run_ids=row.run_ids)  # type: ignore[arg-type]
    return tuple(rows)


def _least_like(golden: Golden, streams: identity.ArmStreams, contract: IdentityContract) -> IdentityRow | None:
    """An arm against the golden; one whose runs disagree run by run, each with all that it gave, and the worst shows.

    None where it gave nothing.
    """
    first, *others = ([(one.place, one.ids, one.stop) for one in run] for run in streams.runs) if streams.runs else [[]]
    alike = all(other == first for other in others)
    parts = [streams] if alike else [identity.arm_streams(streams.arm, (run,)) for run in streams.runs]
    rows = [identity.pair_row(_as_run(golden, one), one, contract, "golden") for one in parts if one.at]
    return min(rows, key=lambda row: (row.klass not in DIFFERS, row.klass == "UNADJUDICATED"), default=None)


def reviewed_rows(
    manifest: Manifest, cells: Sequence[CellVerdict], retracted: Mapping[str, str]
) -> Iterable[ReviewedRow]:
    """A row for each golden: in which cell it was used, or why it was not."""
    met, last = {cell.cell: cell for cell in cells}, newest(manifest.reviewed.goldens)
    plans = {plan.cell: plan for plan in manifest.cells}
    for golden in manifest.reviewed.goldens:
        cell = met.get(golden.cell)
        if golden.id in retracted:
            yield _row(golden, "retracted", why=retracted[golden.id])
        elif last[golden.cell] is not golden:
            yield _row(golden, "unused", why="a later golden supersedes it")
        elif cell is None:
            yield _row(golden, "unused", why="no cell of this sweep has its name")
        elif any(row.what == "golden" for row in cell.identity):
            yield _row(golden, "used", cells=(cell.cell,))
        else:
            why = unfit(golden, plans[golden.cell], [arm.card for arm in cell.arms], manifest.identity.scope)
            yield _row(golden, "unused", why=why or "no arm gave ids to hold against it")
    for golden in manifest.reviewed.proposed_goldens:
        yield _row(golden, "not in force", why="base's commit does not hold it yet")


def _row(golden: Golden, state: str, **fields: object) -> ReviewedRow:
    return ReviewedRow.model_validate(
        {"kind": "golden", "state": state, "scope": f"ids of cell {golden.cell}", "reason": golden.reason,
         "id": golden.id, "by": golden.by, **fields}
    )  # fmt: skip


def _as_run(golden: Golden, of: identity.ArmStreams) -> identity.ArmStreams:
    """The golden as one run that gave its ids in every generation and sequence that an arm has, as far as it goes."""
    is_batch = len(golden.streams) > 1
    run = tuple(
        identity.Stream("golden", "", 1, generation, one.ids, one.stop, one.gaps, sequence if is_batch else None)
        for generation, sequence in of.at
        if sequence < len(golden.streams)
        for one in (golden.streams[sequence],)
    )
    return identity.arm_streams("golden", (run,))
