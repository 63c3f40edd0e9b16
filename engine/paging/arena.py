"""Where keys lie: packed at aligned offsets in the order of the plan, and the least room that a pass needs."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import Refused
from engine.paging.policy import KeyView, aligned
from engine.plan import Key, Plan


def offsets(keys: Sequence[Key]) -> list[int]:
    """Where each key starts when all are packed at aligned offsets, in bytes."""
    offsets, at = [], 0
    for key in keys:
        offsets.append(at)
        at += aligned(key.nbytes)
    return offsets


def pack(keys: Sequence[Key], granule: int) -> tuple[KeyView, ...]:
    """The same as policies see it: the granules that each key spans."""
    return tuple(
        KeyView(key.index, key.nbytes, at // granule, (at + max(key.nbytes, 1) - 1) // granule)
        for key, at in zip(keys, offsets(keys), strict=True)
    )


def refuse_small(plan: Plan, views: Sequence[KeyView], capacity: int, budget: int | None, granule: int) -> None:
    """Raise Refused for a budget that the widest step does not fit into; `capacity` is its whole granules."""
    if budget is None:
        return
    largest = max(plan.keys, key=lambda k: k.nbytes)
    if budget < largest.nbytes:
        raise Refused(
            f"weight budget {budget} bytes is below the largest key {largest.name}: {largest.nbytes} bytes",
            f"give at least {minimum_budget(plan, granule)} bytes",
        )
    needed = _widest_step(views, [s.keys for s in plan.steps])
    if capacity < needed:
        raise Refused(
            f"weight budget {budget} bytes holds {capacity} granules of {granule} bytes, "
            f"below the {needed} granules ({needed * granule} bytes) of the widest step",
            f"give at least {minimum_budget(plan, granule)} bytes",
        )


def minimum_budget(plan: Plan, granule: int) -> int:
    """The smallest weight budget, in bytes, that this plan runs under with any policy that copies."""
    views = pack(plan.keys, granule)
    return _widest_step(views, [s.keys for s in plan.steps]) * granule


def _widest_step(views: Sequence[KeyView], steps: Sequence[Sequence[int]]) -> int:
    """Granules of the step whose keys span the most, as the arena packs them."""
    return max((len({g for k in s for g in range(views[k].first, views[k].last + 1)}) for s in steps), default=0)
