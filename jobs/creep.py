"""A change against a pinned anchor far back: what grew a little with each change shows here, and only here.

Each of many changes may pass against its own base. An anchor, such as the last release, runs beside them and is held
against head alone, in figures that gate; it accuses nobody, since what differs may be anybody's.
"""

from __future__ import annotations

from collections.abc import Sequence

from jobs import compare, identity, matching, wording
from jobs.contract import IdentityContract
from jobs.judge_arm import ArmEvidence
from jobs.model import CellPlan, Missing
from jobs.verdict import MetricRow


def notes(
    plan: CellPlan, anchor: ArmEvidence, head: ArmEvidence, varies: Sequence[str], contract: IdentityContract
) -> list[str]:
    """What head is worse and better in than the anchor, or why nothing can be said."""
    since = f"since {anchor.name} ({anchor.plan.source})"
    if not anchor.records() or not head.records():
        silent = head if anchor.records() else anchor
        details = [end.detail for _, end in silent.endings if end.detail] or ["no run of it counts"]
        return [f"{since}: nothing to compare, {silent.name} gave nothing: {details[0]}"]
    apart = matching.pair_mismatches(anchor.plan, head.plan, anchor.counted(), head.counted(), varies, contract.scope)
    apart = [*(fault for run in anchor.counted() for fault in matching.own_mismatches(plan, anchor.plan, run)), *apart]
    if apart:
        return [f"{since}: nothing to compare, {apart[0].message}"]
    rows = compare.exact_rows(anchor.measured, head.measured, "", (), compare.Standing())
    moved = [row for row in rows if row.gating and row.klass in ("regressed", "improved")]
    told = [f"{since}: {_ids(anchor, head, contract)}"]
    told += [f"{since}: {_moved(row)}" for row in sorted(moved, key=lambda row: (row.klass != "regressed", row.metric))]
    return told if moved else [f"{told[0]}, and no gating counter moved"]


def _moved(row: MetricRow) -> str:
    word = "worse" if row.klass == "regressed" else "better"
    share = wording.share(row)
    by = "" if share is None else f", {share:+.1%}"
    assert not isinstance(row.base, Missing) and not isinstance(row.head, Missing), row
    return f"{row.metric} is {word}, {row.base:,} -> {row.head:,} {row.unit}{by}"


def _ids(anchor: ArmEvidence, head: ArmEvidence, contract: IdentityContract) -> str:
    cards = [card for card in anchor.streams if card in head.streams]
    rows = [identity.pair_row(anchor.streams[card], head.streams[card], contract) for card in cards]
    if not rows:
        return "no card gave tokens of both"
    differs = next((row for row in rows if row.klass != "IDENTICAL"), None)
    return "the same tokens" if differs is None else f"other tokens, {wording.difference(differs)}"
