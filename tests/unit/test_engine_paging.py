"""The pager driven by made-up plans: keys read as their own bytes, budgets hold, and scans hit as theory says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.config import POLICIES
from engine.counters import Tally
from engine.device.sim import SimDevice
from engine.errors import Refused
from engine.graph import Weight
from engine.paging.arena import minimum_budget
from engine.paging.ledger import Ledger, Pool
from engine.paging.residency import make_pager
from engine.plan import Key, KvGeometry, Operand, Plan, Ref, Step
from tests.unit.engine_rig import COPYING

G = 4096
STREAMING = ("stable", "lru", "stable_slot", "size_first")


def plan_of(sizes: Sequence[int], steps: Sequence[Sequence[int]]) -> Plan:
    """A plan whose keys have these sizes and contents of their own, and whose steps read these keys."""
    keys = tuple(
        Key(i, Weight(f"k{i}", "uint8", (n,), np.random.default_rng(i).integers(0, 255, n, np.uint8)), i)
        for i, n in enumerate(sizes)
    )
    made = tuple(
        Step(
            i,
            f"s{i}",
            "op",
            "kernel",
            tuple(Operand(str(k), Ref("key", k, "uint8", (sizes[k],), f"k{k}")) for k in read),
            {},
        )
        for i, read in enumerate(steps)
    )
    kv, logits = KvGeometry(1, 1, 8, "float32", 32), Ref("buffer", 0, "float32", (1,))
    return Plan(1, made, keys, (), (), (), 0, kv, (), logits)


class Rig:
    """A pager over a plan, walked pass by pass."""

    def __init__(self, plan: Plan, policy: str, budget: int | None, granule: int = G) -> None:
        self.plan = plan
        self.tally = Tally()
        self.device = SimDevice(granule_bytes=granule)
        self.ledger = Ledger(granule, None, self.tally)
        self.pool = Pool(self.device, self.ledger)
        self.pager: Any = make_pager(self.device, plan, policy, budget, self.ledger, self.pool, self.tally)
        self.pager.preload()

    def walk(self, *, check: bool = True) -> dict[str, int]:
        """One pass over all steps; every key of a step must hold its own bytes at once. What the pass counted."""
        before = self.read()
        for step in self.plan.steps:
            places = list(zip(step.keys, self.pager.touch(self.plan, step), strict=True))
            self.pager.issue(self.plan, step)
            assert self.ledger.mapped_bytes("weights") <= self.pager.capacity_bytes
            for key, address in places if check else ():
                assert address % 256 == 0
                wanted = self.plan.keys[key].weight.data.tobytes()
                assert self.device.copy_out(address, len(wanted)) == wanted, (step.index, key)
            self.pager.release()
        after = self.read()
        return {name: after[name] - before.get(name, 0) for name in after}

    def read(self) -> dict[str, int]:
        """Counters so far."""
        return {name: int(value) for name, value in {**self.tally.read(), **self.device.tally.read()}.items()}

    def close(self) -> None:
        """Give everything back; both accounts must stand at zero."""
        self.pager.close()
        assert self.ledger.mapped_bytes("weights") == 0
        assert self.read()["resident_keys"] == 0 and not any(self.pager.resident(k.index) for k in self.plan.keys)
        self.pool.close()
        assert self.ledger.owned_bytes == 0
        assert self.tally.read().get("ref_underflows", 0) == 0


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Keys of a few bytes to three granules, read by steps of one to three keys, some twice, in any order."""
    sizes = draw(st.lists(st.integers(1, 3 * G), min_size=2, max_size=14))
    index = st.integers(0, len(sizes) - 1)
    steps = draw(st.lists(st.lists(index, min_size=1, max_size=3), min_size=1, max_size=14))
    unread = [[k] for k in range(len(sizes)) if not any(k in s for s in steps)]
    return plan_of(sizes, [*steps, *unread])  # a key exists because a step reads it


@settings(max_examples=120, deadline=None)
@given(plan=plans(), policy=st.sampled_from(POLICIES), extra=st.integers(0, 20), passes=st.integers(1, 4))
def test_what_is_read_is_what_the_file_holds(plan: Plan, policy: str, extra: int, passes: int) -> None:
    """Any plan from its least budget upwards: right bytes, the budget kept, counters that close, nothing left over."""
    rig = Rig(plan, policy, minimum_budget(plan, G) + extra * G)
    for _ in range(passes):
        one = rig.walk()
        assert sum(one.get(n, 0) for n in ("hits", "page_ins", "zero_copy_reads")) == plan.touches
        assert sum(one.get(n, 0) for n in ("hit_bytes", "htod_bytes", "zero_copy_bytes")) == plan.touched_bytes
        parts = ("retained_page_ins", "bypassed_page_ins", "staged_page_ins")
        assert sum(one.get(p, 0) for p in parts) == one.get("page_ins", 0)
    total, traffic = rig.read(), rig.pager.traffic
    assert sum(t.hits for t in traffic) == total.get("hits", 0)
    assert sum(t.evicted for t in traffic) == total.get("evictions", 0)
    moved = list(zip(plan.keys, traffic, strict=True))
    twins = {
        "hit_bytes": sum(k.nbytes * t.hits for k, t in moved),
        "retained_bytes": sum(k.nbytes * t.retained for k, t in moved),
        "bypassed_page_in_bytes": sum(k.nbytes * t.bypassed for k, t in moved),
        "staged_bytes": sum(k.nbytes * t.staged for k, t in moved),
        "zero_copy_bytes": sum(k.nbytes * t.in_place for k, t in moved),
        "evicted_bytes": sum(k.nbytes * t.evicted for k, t in moved),
    }
    assert {name: total.get(name, 0) for name in twins} == twins, "every event has its bytes"
    resident = [k for k in plan.keys if rig.pager.resident(k.index)]
    assert total["resident_keys"] == len(resident)
    assert total["content_resident_bytes"] == sum(k.nbytes for k in resident)
    assert total.get("loaded_keys", 0) + total.get("retained_page_ins", 0) - total.get("evictions", 0) == len(resident)
    copied = sum(total.get(n, 0) for n in ("loaded_bytes", "htod_bytes"))
    assert total.get("device_htod_bytes", 0) == copied
    assert total["peak_resident_bytes"] >= total["content_resident_bytes"]
    rig.close()


@settings(max_examples=60, deadline=None)
@given(plan=plans(), policy=st.sampled_from(POLICIES), extra=st.integers(0, 20))
def test_a_bad_end_midway_through_a_step_still_balances(plan: Plan, policy: str, extra: int) -> None:
    """A run that stops inside a step, its keys pinned or passing through, gives everything back."""
    rig = Rig(plan, policy, minimum_budget(plan, G) + extra * G)
    rig.walk(check=False)
    rig.pager.touch(plan, plan.steps[0])
    rig.close()


@settings(max_examples=100, deadline=None)
@given(plan=plans(), extra=st.integers(0, 12))
def test_stable_evicts_in_the_first_pass_only(plan: Plan, extra: int) -> None:
    rig = Rig(plan, "stable", minimum_budget(plan, G) + extra * G)
    rig.walk(check=False)
    later = [rig.walk(check=False) for _ in range(3)]
    assert all(one.get("evictions", 0) == 0 and one.get("retained_page_ins", 0) == 0 for one in later)
    counted = ("hits", "hit_bytes", "page_ins", "htod_bytes", "bypassed_page_ins", "bypassed_page_in_bytes")
    assert all(one.get(n, 0) == later[0].get(n, 0) for one in later for n in counted), "the set stands still"


@settings(max_examples=60, deadline=None)
@given(plan=plans(), extra=st.integers(0, 12))
def test_stable_slot_never_evicts_and_needs_no_mapping_once_it_stands(plan: Plan, extra: int) -> None:
    rig = Rig(plan, "stable_slot", minimum_budget(plan, G) + extra * G)
    rig.walk(check=False)
    for _ in range(2):
        one = rig.walk(check=False)
        assert one.get("evictions", 0) == one.get("retained_page_ins", 0) == one.get("vmm_calls", 0) == 0


@settings(max_examples=60, deadline=None)
@given(n=st.integers(3, 40), data=st.data(), passes=st.integers(1, 4))
def test_a_cyclic_scan_of_equal_keys(n: int, data: st.DataObject, passes: int) -> None:
    """n keys of one granule, room for c < n. lru hits nothing, ever; stable_slot, its slot taken out of the budget,
    hits what is left of n in every pass after the first; stable hits what it keeps and evicts nothing any more."""
    c = data.draw(st.integers(2, n - 1))
    scan = plan_of([G] * n, [[k] for k in range(n)])
    lru, slot, stable = (Rig(scan, policy, c * G) for policy in ("lru", "stable_slot", "stable"))
    slot.walk(check=False)
    stable.walk(check=False)
    for _ in range(passes):
        assert lru.walk(check=False).get("hits", 0) == 0
        assert slot.walk(check=False)["hits"] == c - 1
        kept = stable.walk(check=False)
        assert kept["hits"] == c - 1 and kept.get("evictions", 0) == 0
    assert lru.read()["page_ins"] == n * passes
    assert lru.read()["evictions"] == n * passes - c


@pytest.mark.parametrize("policy", STREAMING)
def test_all_that_fits_is_loaded_before_the_first_step(policy: str) -> None:
    plan = plan_of([100, G, 3 * G], [[0, 1], [2], [1]])
    rig = Rig(plan, policy, 5 * G)
    loaded = rig.read()
    assert (loaded["loaded_keys"], loaded["loaded_bytes"]) == (3, 100 + 4 * G)
    one = rig.walk()
    assert one["hits"] == plan.touches and one.get("page_ins", 0) == one.get("vmm_calls", 0) == 0
    assert all(rig.pager.steady(k.index) for k in plan.keys)


def test_a_step_that_reads_a_key_twice_needs_its_slot_once() -> None:
    """Counted twice, the slot alone was larger than the budget."""
    plan = plan_of([6657, 1281], [[0, 0], [1]])
    rig = Rig(plan, "stable_slot", 2 * G)
    one = rig.walk()
    assert (one["page_ins"], one["hits"]) == (2, 1)
    rig.close()


# -- neighbours in one granule


def neighbours() -> Plan:
    """a ends in the middle of granule 0, b begins there and ends in granule 1, c begins in granule 1."""
    return plan_of([2048, G, 2048, G, G], [[0], [1], [2], [3], [4]])


@pytest.mark.parametrize("policy", STREAMING)
def test_field_60_a_neighbour_that_goes_takes_nothing_with_it(policy: str) -> None:
    """Whoever is evicted, what shares a granule with it and stays is whole; every order of visits, many passes."""
    plan = neighbours()
    for budget in range(minimum_budget(plan, G), 6 * G, G):
        rig = Rig(plan, policy, budget)
        for _ in range(5):
            rig.walk()
            for key in plan.keys:
                if rig.pager.resident(key.index):
                    wanted = key.weight.data.tobytes()
                    address = rig.pager._base + rig.pager._offsets[key.index]
                    assert rig.device.copy_out(address, key.nbytes) == wanted
        rig.close()


@pytest.mark.parametrize("policy", ["lru", "stable"])
def test_an_evicted_key_leaves_poison_where_its_granule_stays(policy: str) -> None:
    """Whoever still reads an evicted key finds out, though a neighbour keeps the granule that its tail lies in."""
    plan = plan_of([G + 2048, 2048, G], [[0], [1], [2]])
    rig = Rig(plan, policy, 2 * G)
    rig.walk()
    assert [rig.pager.resident(k) for k in (0, 1)] == [False, True]
    tail = rig.device.copy_out(rig.pager._base + G, G)
    assert tail == bytes([0xFF]) * 2048 + plan.keys[1].weight.data.tobytes()


def test_a_key_that_passed_through_leaves_poison() -> None:
    """A bypass is over when its step is: its bytes are dead though its granule stays mapped for the next one."""
    plan = plan_of([G, 2048, 1024], [[0], [1], [2]])
    rig = Rig(plan, "stable", G)
    rig.walk()
    left = rig.device.copy_out(rig.pager._base + G, 2048 + 1024)
    assert left == bytes([0xFF]) * 3072


def test_neighbours_that_pass_through_one_after_another_share_a_mapping() -> None:
    plan = plan_of([G, G, 1024, 1024, 1024, 1024], [[k] for k in range(6)])
    rig = Rig(plan, "stable", 2 * G)
    rig.walk()
    one = rig.walk()
    assert one["bypassed_page_ins"] == 5, "a bypass had to evict the second key for its room"
    assert rig.device.tally.read()["pool_creates"] == 2
    assert one["vmm_calls"] <= 2 * 3, "two granules take turns: unmap, map and set access each"


def test_an_eviction_that_frees_no_granule_is_counted() -> None:
    """a and b share granule 0; evicting a for room frees nothing until b goes too."""
    plan = plan_of([1024, 1024, 2048, G, G], [[0], [1], [2], [3], [4]])
    rig = Rig(plan, "lru", 2 * G)
    rig.walk()
    rig.walk()
    assert rig.read()["admission_no_progress"] > 0


def test_size_first_never_gives_up_a_larger_key_for_a_smaller_one() -> None:
    """Residents of 1 and 4 granules, room for 5; a newcomer of 3 may not push out the 4 once the 1 is not enough."""
    plan = plan_of([4 * G, G, 3 * G], [[0], [1], [2]])
    rig = Rig(plan, "size_first", 5 * G)
    for _ in range(3):
        rig.walk()
    traffic = rig.pager.traffic
    assert traffic[0].evicted == 0 or traffic[2].retained == 0


# -- budgets


@pytest.mark.parametrize("policy", STREAMING)
def test_field_63_budgets_around_the_largest_key(policy: str) -> None:
    """One byte below the largest key: refused with both numbers. From there to the widest step: refused with its."""
    plan = plan_of([3 * G + 1, 100, G], [[0, 1], [2]])
    least = minimum_budget(plan, G)
    assert least == 4 * G
    with pytest.raises(Refused) as caught:
        Rig(plan, policy, 3 * G)
    assert str(3 * G) in caught.value.message and str(3 * G + 1) in caught.value.message
    assert "k0" in caught.value.message and str(least) in caught.value.remedy
    for budget in (3 * G + 1, 4 * G - 1):
        with pytest.raises(Refused) as caught:
            Rig(plan, policy, budget)
        assert str(budget) in caught.value.message and str(4 * G) in caught.value.message
        assert str(least) in caught.value.remedy
    for budget in (4 * G, 4 * G + 1):
        rig = Rig(plan, policy, budget)
        assert rig.pager.capacity_bytes == 4 * G, "whole granules"
        rig.walk()
        rig.walk()
        rig.close()


@settings(max_examples=80, deadline=None)
@given(plan=plans(), policy=st.sampled_from(COPYING))
def test_field_63_the_least_budget_works_and_a_granule_less_does_not(plan: Plan, policy: str) -> None:
    least = minimum_budget(plan, G)
    for _ in range(2):
        rig = Rig(plan, policy, least)
        rig.walk()
        rig.walk()
        rig.close()
    assume(least > G)
    for short in (1, G):
        with pytest.raises(Refused):
            Rig(plan, policy, least - short)


def test_a_budget_of_all_weights_that_rounding_does_not_fit_says_so() -> None:
    """W bytes are a granule short of the packed arena: the run streams, and its capacity shows it."""
    plan = plan_of([G - 10, 100, G], [[0], [1], [2]])
    rig = Rig(plan, "stable", plan.weight_bytes)
    assert plan.weight_bytes < rig.pager.capacity_bytes + G < 4 * G
    assert not rig.pager.fits
    rig.walk()
    rig.close()


def test_a_smaller_budget_that_needs_a_wider_slot_maps_it_anew() -> None:
    """Of four granules the wide key keeps three and the slot is one; of three it streams, through a slot of three."""
    rig = Rig(plan_of([3 * G, G, G], [[0], [1], [2]]), "stable_slot", 4 * G)
    rig.walk()
    rig.pager.resize(3 * G)
    rig.walk()
    assert rig.ledger.mapped_bytes("weights") == 3 * G == rig.device.mapped_bytes
    rig.close()


def test_a_policy_that_gives_nobody_up_is_refused_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(plan_of([G, G], [[0], [1]]), "lru", G)
    monkeypatch.setattr(type(rig.pager._policy), "victims", lambda *_: iter(()))
    with pytest.raises(Refused, match="no room for key k1: 4096 bytes needed, 0 free and nothing left to evict"):
        rig.walk()
