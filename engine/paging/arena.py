"""Where keys lie: packed at aligned offsets in the order of the plan, and the least room that a pass needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.config import GRANULES_BYTES
from engine.errors import Refused
from engine.paging.policy import KeyView, aligned
from engine.plan import Key, Plan, Step


def offsets(keys: Sequence[Key], granule: int = 1) -> list[int]:
    """Where each key starts when all are packed at aligned offsets, in bytes.

    An expert touches no more granules than its bytes need: it is read and evicted without its neighbours, so it starts
    a granule of its own where it would else lie across one more. Smaller ones share a granule, as many as fit whole.
    """
    offsets, at = [], 0
    for key in keys:
        span = key.span_bytes
        if key.further and at // granule + -(-span // granule) <= (at + span - 1) // granule:
            at = -(-at // granule) * granule
        offsets.append(at)
        at += aligned(span)
    return offsets


def pack(keys: Sequence[Key], granule: int) -> tuple[KeyView, ...]:
    """The same as policies see it: the granules that each key spans."""
    return tuple(
        KeyView(key.index, key.nbytes, at // granule, (at + max(span, 1) - 1) // granule, aligned(span))
        for key, at, span in zip(keys, offsets(keys, granule), (k.span_bytes for k in keys), strict=True)
    )


def fits(plan: Plan, budget: int | None, granule: int) -> bool:
    """Whether all keys of a plan stand in a weight budget, in bytes, at once."""
    views = pack(plan.keys, granule)
    return budget is None or max((v.last for v in views), default=-1) + 1 <= budget // granule


def refuse_small(plan: Plan, views: Sequence[KeyView], capacity: int, budget: int | None, granule: int) -> None:
    """Raise Refused for a budget that the widest step does not fit into; `capacity` is its whole granules."""
    if budget is None:
        return
    largest = max(plan.keys, key=lambda k: k.nbytes)
    remedy = enough(budget, plan.weight_bytes, granule, lambda size: minimum_budget(plan, size))
    if budget < largest.nbytes:
        raise Refused(
            f"weight budget {budget} bytes is below the largest key {largest.name}: {largest.nbytes} bytes", remedy
        )
    needed = _widest_step(views, plan.steps)
    if capacity < needed:
        raise Refused(
            f"weight budget {budget} bytes holds {capacity} granules of {granule} bytes, "
            f"and the widest step takes {needed} ({needed * granule} bytes)",
            remedy,
        )


def enough(asked: int, most: int, granule: int, least: Callable[[int], int]) -> str:
    """What to give where `asked` bytes are less than the `least` that granules of a size allow.

    Where that is `most`, in which all weights stand, nothing would stream: smaller granules are the only remedy, which
    a simulated card can be given. They are also named where they alone make the bytes that were asked for enough.
    """
    needed, finer = least(granule), [size for size in reversed(GRANULES_BYTES) if size < granule]
    if (size := next((size for size in finer if least(size) <= asked), None)) is not None:
        smaller = f"a granule of {size} bytes on a simulated card"
        return f"give {smaller}" if needed >= most else f"give at least {needed} bytes, or {smaller}"
    if needed >= most and (size := next((size for size in finer if least(size) < most), None)) is not None:
        return f"give at least {least(size)} bytes and a granule of {size} bytes on a simulated card"
    return f"give at least {needed} bytes"


def minimum_budget(plan: Plan, granule: int) -> int:
    """The smallest weight budget, in bytes, that this plan runs under with any policy that copies."""
    return _widest_step(pack(plan.keys, granule), plan.steps) * granule


def granules(views: Sequence[KeyView], keys: Sequence[int]) -> int:
    """How many granules these keys span together."""
    return len({g for k in keys for g in range(views[k].first, views[k].last + 1)})


def _widest_step(views: Sequence[KeyView], steps: Sequence[Step]) -> int:
    """Granules of the step whose keys span the most, as the arena packs them; of experts, any that a token chooses."""
    return max((granules(views, step.keys) + _most_chosen(views, step) for step in steps), default=0)


def _most_chosen(views: Sequence[KeyView], step: Step) -> int:
    """The most granules that one token's experts may span, or a slot for them take."""
    if step.experts is None:
        return 0
    spans = sorted((views[k].last - views[k].first + 1 for k in step.experts.keys), reverse=True)
    return sum(spans[: step.experts.chosen])
