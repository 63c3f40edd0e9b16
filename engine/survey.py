"""What a plan costs before anything runs: nodes, bytes, segments, and the floors that no run can get under."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine import kernels
from engine.banks import ALL_FIT, why_whole
from engine.capture import CapturePlan, cut
from engine.capture_rules import ALL, parse_rules
from engine.config import parse_share
from engine.counters import Tally
from engine.device.base import Profile
from engine.device.plan_only import PlanDevice
from engine.duplicates import duplicates
from engine.graph import Weight
from engine.paging.arena import fits, minimum_budget, pack
from engine.paging.experts import WHOLE, BankPlan, decide, split
from engine.paging.ledger import Ledger, Pool
from engine.paging.residency import make_pager
from engine.plan import Plan, Step
from engine.routing import routed


@dataclass(frozen=True, slots=True)
class Setting:
    """Under what a plan is looked at: weight budget (bytes, a share of W, None), policy, granule, capture rules."""

    weight_budget: int | str | None = None
    policy: str = "stable"
    granule_bytes: int | None = None
    capture_rules: str = ALL
    experts: str = "routed"


def survey(plan: Plan, setting: Setting) -> dict[str, Any]:
    """All of it as plain data, as engine/schemas/plan.json says.

    The pager is the real one, on a device that computes nothing, so that what fits and what a graph may hold are its
    own words. Raises Refused for a budget below the widest step.
    """
    device = PlanDevice(granule_bytes=setting.granule_bytes)
    budget = setting.weight_budget
    budget = int(parse_share(budget) * plan.weight_bytes) if isinstance(budget, str) else budget
    why = why_whole(setting.policy, setting.experts, knows_routing=True)
    banks = decide(plan, ALL_FIT if fits(plan, budget, device.granule_bytes) else why)
    paged = split({1: plan}, banks)
    tally = Tally()
    ledger = Ledger(device.granule_bytes, None, tally)
    pager = make_pager(device, paged[1], setting.policy, budget, ledger, Pool(device, ledger), tally)
    streamed = 0 if pager.fits else max(0, paged[1].least_read_bytes - pager.capacity_bytes)
    capture = cut(paged[1], pager.steady, parse_rules(setting.capture_rules)) if plan.rows == 1 else None
    return {
        "rows": plan.rows,
        "nodes": {"steps": len(plan.steps), "by_op": _count(s.op for s in plan.steps)},
        "kernels": _count(s.kernel for s in plan.steps),
        "buffers": {
            "count": len(plan.buffers),
            "nbytes": sum(b.nbytes for b in plan.buffers),
            "workspace_bytes": plan.workspace_bytes,
        },
        "keys": _keys(plan, minimum_budget(paged[1], device.granule_bytes)),
        "constants": _tables(plan.constants),
        "hosts": _tables(plan.hosts),
        "states": {"count": len(plan.states), "nbytes": sum(s.nbytes for s in plan.states)},
        "kv": {
            "layers": plan.kv.layers,
            "kv_heads": plan.kv.kv_heads,
            "head_size": plan.kv.head_size,
            "dtype": plan.kv.dtype,
            "bytes_per_token": plan.kv.bytes_per_token,
        },
        "pass": {
            "touches": plan.touches,
            "touched_bytes": plan.touched_bytes,
            "read_bytes": sum(_read_bytes(plan, s) for s in plan.steps),
            "gather_bytes": plan.gather_bytes,
            "kv_written_bytes": plan.rows * plan.kv.bytes_per_token,
        },
        "residency": {
            "policy": setting.policy,
            "budget_bytes": budget,
            "granule_bytes": device.granule_bytes,
            "capacity_bytes": pager.capacity_bytes,
            "fits": pager.fits,
            "ring": dict(pager.facts) or None,
        },
        "experts": _experts(paged[1], banks, device.granule_bytes),
        "capture": None if capture is None else _capture(capture),
        "floors": _floors(plan, streamed, device.profile),
    }


def _floors(plan: Plan, streamed_bytes: int, profile: Profile) -> dict[str, Any]:
    """Times of one pass on the profile: what is read at the memory's rate, what is copied at the link's, and nodes."""
    read = sum(_read_bytes(plan, s) for s in plan.steps)
    launches = sum(kernels.get(s.kernel).launches for s in plan.steps)
    return {
        "profile": profile.name,
        "resident_bytes": read,
        "resident_ms": read / profile.memory_bytes_per_s * 1e3,
        "streamed_bytes": streamed_bytes,
        "streamed_ms": streamed_bytes / profile.link_bytes_per_s * 1e3,
        "nodes_ms": launches * profile.node_ns / 1e6,
        "launches_ms": launches * profile.launch_ns / 1e6,
    }


def _read_bytes(plan: Plan, step: Step) -> int:
    """Key bytes that the arithmetic of a step needs: of a bank of experts, the chosen ones' share alone."""
    total = sum(plan.keys[k].nbytes for k in step.keys)
    if step.kernel not in WHOLE:
        return total
    router = next(o.ref.shape for o in step.operands if o.name == "router")
    experts = router[-1]
    chosen = min(experts, step.params["k"] * math.prod(router[:-1]))
    return int(total * chosen // experts)


def _experts(plan: Plan, decided: Sequence[BankPlan], granule_bytes: int) -> list[dict[str, Any]]:
    """A row a bank: why it is read whole, or what an expert of it takes and with how many it may share a granule."""
    views = pack(plan.keys, granule_bytes)
    rows = []
    for bank, step in zip(decided, (s for s in plan.steps if routed(s) is not None), strict=True):
        row: dict[str, Any] = {"node": bank.node, "experts": bank.experts, "whole": bank.whole or None}
        if step.experts is not None:
            own = [views[k] for k in step.experts.keys]
            row["expert_bytes"] = own[0].nbytes
            row["expert_granules"] = max(v.last - v.first + 1 for v in own)
            row["sharing"] = max(Counter(g for v in own for g in range(v.first, v.last + 1)).values())
        rows.append(row)
    return rows


def _keys(plan: Plan, minimum_budget_bytes: int) -> dict[str, Any]:
    largest = max(plan.keys, key=lambda k: k.nbytes)
    widest = max(plan.steps, key=lambda s: sum(plan.keys[k].nbytes for k in s.keys))
    return {
        "count": len(plan.keys),
        "weight_bytes": plan.weight_bytes,
        "largest": {"name": largest.name, "nbytes": largest.nbytes},
        "widest_step": {"node": widest.node, "nbytes": sum(plan.keys[k].nbytes for k in widest.keys)},
        "minimum_budget_bytes": minimum_budget_bytes,
        "duplicates": [asdict(d) for d in duplicates(plan)],
    }


def _tables(weights: Iterable[Weight]) -> dict[str, int]:
    sizes = [w.nbytes for w in weights]
    return {"count": len(sizes), "nbytes": sum(sizes)}


def _capture(capture: CapturePlan) -> dict[str, Any]:
    reasons: dict[tuple[str, str], Counter[str]] = {}
    for seam in capture.seams:
        reasons.setdefault((seam.reason, seam.path), Counter())[seam.step.op] += 1
    return {
        "segments": capture.captured,
        "seams": capture.seam_runs,
        "seam_nodes": len(capture.seams),
        "by_reason": [
            {"reason": reason, "path": path, "nodes": sum(ops.values()), "by_op": dict(ops.most_common())}
            for (reason, path), ops in reasons.items()
        ],
    }


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())
