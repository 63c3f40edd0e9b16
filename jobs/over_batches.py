"""Tokens over batches: where the contract's scope leaves the batch out, cells that differ in it alone must agree.

Compared is the first sequence, whose prompt is the cell's, of each arm with itself in the cell of the smallest batch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from jobs import identity
from jobs.contract import IdentityContract
from jobs.docket import Docket
from jobs.identity import Stream
from jobs.judge_arm import ArmEvidence
from jobs.model import CellPlan, Manifest


def references(manifest: Manifest) -> Mapping[str, CellPlan]:
    """For the cell of each larger batch the cell that it is held against; none where the scope names the batch."""
    if "batch" in manifest.identity.scope:
        return {}
    groups: dict[str, list[CellPlan]] = {}
    for plan in manifest.cells:
        rest = sorted((name, value) for name, value in plan.config.items() if name != "batch")
        groups.setdefault(
            json.dumps([plan.model, plan.prompt, plan.card_class, plan.settings.warmups, rest]), []
        ).append(plan)
    found = {}
    for plans in groups.values():
        smallest = min(plans, key=_batch)
        found.update({plan.cell: smallest for plan in plans if plan is not smallest})
    return found


def find_over_batches(
    docket: Docket,
    plan: CellPlan,
    arms: Sequence[ArmEvidence],
    smaller: CellPlan,
    others: Sequence[ArmEvidence],
    contract: IdentityContract,
) -> None:
    """Arms that give other tokens than in the cell of the `smaller` batch. What base does too leaves it open."""
    there = {arm.name: arm for arm in others}
    pairs = [(arm, there[arm.name]) for arm in arms if arm.name in there]
    differing = {mine.name: _difference(mine, theirs, contract) for mine, theirs in pairs if mine.records()}
    of_base = {arm.name for arm in arms if arm.plan.role in ("base", "null")}
    shared = any(differing.get(name) for name in of_base)
    batches = f"at batch {_batch(plan)} than at batch {_batch(smaller)}"
    for mine, theirs in pairs:
        if not (mine.records() and theirs.records()):
            continue  # an arm that gave nothing has a finding of its own
        if not set(mine.streams) & set(theirs.streams):
            message = f"no tokens of {mine.name} could be compared over batches: {smaller.cell} ran on other cards"
            docket.add("MISSING", "identity", message, arm=mine.name, remedy="Leave card out of identity.scope too.")
        elif found := differing[mine.name]:
            left, right = found
            docket.add(
                "NONDETERMINISTIC",
                "identity",
                f"{mine.name} gives other tokens {batches}: {_words(left, right)}",
                arm=mine.name,
                run_ids=(left.run_id, right.run_id),
                of_base=shared or mine.name in of_base,
            )


def _difference(mine: ArmEvidence, theirs: ArmEvidence, contract: IdentityContract) -> tuple[Stream, Stream] | None:
    here, there = mine.streams, theirs.streams
    found = (identity.first_sequences_differ(there[card], here[card], contract) for card in here if card in there)
    return next((pair for pair in found if pair), None)


def _words(left: Stream, right: Stream) -> str:
    at = identity.common_prefix(left.ids, right.ids)
    if at < min(len(left.ids), len(right.ids)):
        return f"id {right.ids[at]} instead of {left.ids[at]} at index {at} of generation {right.number}"
    ends = f"{len(right.ids)} ids, stop {right.stop}, instead of {len(left.ids)}, stop {left.stop}"
    return f"{ends}, in generation {right.number}"


def _batch(plan: CellPlan) -> int:
    asked = plan.config.get("batch")
    return asked if isinstance(asked, int) else 1
