"""Planning for 100,000 keys stays under two seconds of one core, before anything is mapped."""

from __future__ import annotations

import random
import time
from collections.abc import Collection

import numpy as np
import pytest

from engine.capture import cut
from engine.config import POLICIES
from engine.graph import Weight
from engine.paging.arena import pack
from engine.paging.policy import Setting, make
from engine.paging.stream import divide, fullest, schedule
from engine.plan import Key, KvGeometry, Operand, Plan, Ref, Step

KEYS, GRANULE, MOST_S = 100_000, 2 << 20, 2.0
SIZES = (2_560, 8_192, 36_864, 262_144, 1_048_576, 3_538_944)
"""From a norm to a projection of a decoder."""


@pytest.fixture(scope="module")
def large() -> Plan:
    """A plan of so many keys, a step each; contents are one shared stretch of zeros."""
    chosen, zeros = random.Random(3), np.zeros(max(SIZES), np.uint8)
    sizes = [chosen.choice(SIZES) for _ in range(KEYS)]
    keys = tuple(Key(i, Weight(f"k{i}", "uint8", (n,), zeros[:n]), i) for i, n in enumerate(sizes))
    steps = tuple(
        Step(i, f"s{i}", "op", "kernel", (Operand("k", Ref("key", i, "uint8", (n,), f"k{i}")),), {})
        for i, n in enumerate(sizes)
    )
    kv, logits = KvGeometry(1, 1, 8, "float32", 32), Ref("buffer", 0, "float32", (1,))
    return Plan(1, steps, keys, (), (), (), 0, kv, (), logits)


def steady_keys(plan: Plan, policy: str) -> Collection[int]:
    """What a policy decides before anything is mapped: the keys whose steps may be recorded."""
    capacity = plan.weight_bytes // 2 // GRANULE
    if policy == "staging":
        ring = divide(plan, capacity * GRANULE, GRANULE)
        assert schedule(plan, ring).nbytes > 0 < len(ring.resident)
        return range(KEYS)
    if policy == "zero_copy":
        assert fullest(plan, capacity * GRANULE)
        return range(KEYS)
    views = pack(plan.keys, GRANULE)
    return make(policy, Setting(views, [s.keys for s in plan.steps], capacity, GRANULE)).steady()


def seconds(plan: Plan, policy: str) -> float:
    """Processor time of planning once."""
    start = time.process_time()
    steady = steady_keys(plan, policy)
    capture = cut(plan, steady.__contains__)
    taken = time.process_time() - start
    assert sum(len(s.steps) for s in capture.segments) == KEYS
    return taken


@pytest.mark.parametrize("policy", POLICIES)
def test_planning_for_100_000_keys_takes_under_two_seconds(large: Plan, policy: str) -> None:
    """What stays, what streams when, and what a graph can hold. The best of three: others may work beside it."""
    taken: list[float] = []
    while not taken or (taken[-1] >= MOST_S and len(taken) < 3):
        taken.append(seconds(large, policy))
    assert min(taken) < MOST_S
