"""A run's banks of experts: read whole or expert by expert, why, and what each expert was asked for and cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.config import RunRequest
from engine.equations import ExpertSums
from engine.onnx_load import graph_digests
from engine.paging.experts import BankPlan
from engine.paging.traffic import KeyTraffic
from engine.plan import Plan, Step
from engine.routed import Routing
from engine.routing import banks, read_counts, routed

ALL_FIT = "all weights fit"


def why_whole(policy: str, experts: str, *, knows_routing: bool) -> str:
    """What stands against reading experts alone, in any bank; empty for nothing."""
    if experts == "whole":
        return "experts is whole"
    if policy == "staging":
        return "the schedule of staging is fixed before routing is known"
    if policy == "zero_copy":
        return "zero_copy has each step read in place what it chose"
    return "" if knows_routing else "no routing is given to a run without arithmetic"


def heat(request: RunRequest, plan: Plan) -> dict[int, int]:
    """How often a recorded run read each expert that is a key of its own, by key. Raises BadRequest as `read` does."""
    path = request.config.hot_experts
    if path is None:
        return {}
    counts = read_counts(path, *graph_digests(request.model), banks(plan))
    return {
        key: int(times)
        for step, of in zip(_bank_steps(plan), counts, strict=True)
        if step.experts is not None
        for key, times in zip(step.experts.keys, of, strict=True)
    }


def expert_sums(plan: Plan, traffic: Sequence[KeyTraffic], routing: Routing) -> ExpertSums | None:
    """What equations hold expert touches against; None where no expert is a key of its own."""
    split_banks = [
        (step.experts, bank, int(asked.sum()))
        for step, bank, asked in zip(_bank_steps(plan), routing.banks, routing.asked, strict=True)
        if step.experts is not None
    ]
    if not split_banks:
        return None
    touches = {key: _touches(traffic[key]) for experts, _, _ in split_banks for key in experts.keys}
    return ExpertSums(
        touches=sum(touches.values()),
        touch_bytes=sum(plan.keys[key].nbytes * times for key, times in touches.items()),
        asked=sum(asked for _, _, asked in split_banks),
        asked_bytes=sum(asked * bank.expert_bytes for _, bank, asked in split_banks),
    )


def bank_rows(
    plan: Plan, decided: Sequence[BankPlan], traffic: Sequence[KeyTraffic], routing: Routing
) -> list[dict[str, Any]]:
    """A row a bank for the result line; counts are lists by expert, of `expert_bytes` each."""
    rows = []
    by_bank = zip(decided, _bank_steps(plan), routing.banks, routing.asked, strict=True)
    for one, step, bank, asked in by_bank:
        row = {
            "node": bank.node,
            "experts": bank.experts,
            "chosen": bank.chosen,
            "expert_bytes": bank.expert_bytes,
            "whole": one.whole or None,
        }
        if routing.is_known:
            row["asked"] = asked.tolist()
        if step.experts is not None:
            own = [traffic[key] for key in step.experts.keys]
            for name in ("hits", "retained", "bypassed", "evicted"):
                row[name] = [getattr(t, name) for t in own]
        rows.append(row)
    return rows


def _bank_steps(plan: Plan) -> list[Step]:
    return [step for step in plan.steps if routed(step) is not None]


def _touches(traffic: KeyTraffic) -> int:
    return traffic.hits + traffic.retained + traffic.bypassed + traffic.staged
