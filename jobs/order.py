"""In which order a block runs its arms.

Every order but `once` gives each arm as many runs, so that only the order differs between sweeps that try them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from jobs.model import CellPlan, Order

RUNS_PER_REPEAT = 2
"""Runs of each arm per repeat: once on the way out, once on the way back."""


def runs_of_arm(order: Order, repeats: int) -> int:
    """How often a block runs each arm."""
    return repeats if order == "once" else RUNS_PER_REPEAT * repeats


def run_order(plan: CellPlan, block: int) -> tuple[str, ...]:
    """Arm names of one block's runs, in order; `block` counts from 0."""
    return arm_order(plan.arms, plan.order, plan.repeats, seed=f"{plan.cell}#{block}", block=block)


def arm_order(arms: Sequence[str], order: Order, repeats: int, seed: str, block: int = 0) -> tuple[str, ...]:
    """`len(arms) * runs_of_arm` names.

    ABBA is the balanced palindrome (arms, then arms reversed), which cancels a linear drift within the block; each
    block begins one arm further on, so that what a place in the block costs falls to each arm in turn.
    `random` is a shuffle fixed by `seed`, so a resumed or repeated sweep has the same plan. `sequential` runs all of
    an arm before the next: kept to show what drift does, never the default. `once` runs each arm once a repeat, as
    written: for what repeats exactly, where a second run would only cost.
    """
    if order == "once":
        return tuple(arms) * repeats
    if order == "ABBA":
        lead = block % len(arms) if arms else 0
        turned = (*arms[lead:], *arms[:lead])
        return (*turned, *reversed(turned)) * repeats
    if order == "sequential":
        return tuple(arm for arm in arms for _ in range(runs_of_arm(order, repeats)))
    slots = [(arm, number) for arm in arms for number in range(runs_of_arm(order, repeats))]
    return tuple(arm for arm, _ in sorted(slots, key=lambda slot: _rank(seed, *slot)))


def _rank(seed: str, arm: str, number: int) -> bytes:
    return hashlib.sha256(f"{seed}/{arm}/{number}".encode()).digest()
