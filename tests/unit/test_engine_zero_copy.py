"""Policy zero_copy: what does not stay is read in place, over the link; counted apart, checked, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.device.base import H200
from engine.device.plan_only import PlanDevice
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure
from engine.paging.zero_copy import ZeroCopyPager
from engine.plan import Plan
from engine.show import show
from jobs.metrics import derive
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny, run
from tests.unit.engine_scheduled import Undrained, kinds, scheduled
from tests.unit.test_engine_paging import Rig, plan_of, plans

G = 4096
HALF: dict[str, Any] = {"weight_budget": "50%", "granule": G, "policy": "zero_copy"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("zero_copy"))


# -- what stays, and where the rest is read


@settings(max_examples=60, deadline=None)
@given(plan=plans(), granules=st.integers(0, 30))
def test_any_budget_keeps_what_fits_and_maps_no_granule_for_the_rest(plan: Plan, granules: int) -> None:
    rig = Rig(plan, "zero_copy", granules * G)
    assert rig.device.mapped_bytes <= granules * G
    mapped = rig.device.mapped_bytes
    one, two = rig.walk(), rig.walk()
    assert rig.device.mapped_bytes == mapped
    assert all(one.get(name, 0) == two.get(name, 0) == 0 for name in ("vmm_calls", "device_htod_bytes"))
    cold = [k for k in plan.keys if not rig.pager.resident(k.index)]
    assert rig.read()["zero_copy_binds"] == len(cold)
    assert one.get("zero_copy_bytes", 0) == rig.pager.facts["zero_copy_bytes_per_step"]
    rig.close()
    assert rig.read()["zero_copy_binds"] == 0


def test_the_resident_set_is_the_fullest_of_whole_records() -> None:
    """Records of 5, 4 and 3 granules under 8: 5 + 3 stay. Staging would need slots beside them."""
    plan = plan_of([5 * G, 4 * G, 3 * G], [[0], [1], [2]])
    rig = Rig(plan, "zero_copy", 8 * G)
    assert [rig.pager.resident(k) for k in range(3)] == [True, False, True]


def test_a_budget_of_less_than_a_granule_keeps_nothing_and_works(tiny: Path) -> None:
    outcome = run(tiny, config={**HALF, "weight_budget": 1}, tokens=4)
    assert outcome.broken_equations() == [] and outcome.streams == run(tiny, tokens=4).streams
    assert outcome.counters["hits"] == outcome.counters["mapped_physical_bytes"] == 0
    assert outcome.counters["zero_copy_bytes"] == 4 * outcome.facts["requested_bytes_per_step"]


# -- runs


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("share", ["95%", "50%", "10%"])
def test_ids_and_gaps_are_those_of_everything_resident(tiny: Path, share: str, capture: bool) -> None:
    config = {**HALF, "weight_budget": share, "capture": capture, "prefill_chunk": 3}
    outcome = run(tiny, config=config, tokens=12, generations=3)
    assert outcome.streams == run(tiny, tokens=12, generations=3).streams
    assert outcome.broken_equations() == []
    assert {e["name"] for e in outcome.result["equations"]} >= {"W1", "W2z", "W4", "W7z", "W10z", "Z1", "Z2"}
    c = outcome.counters
    assert c["zero_copy_reads"] > 0 and c["page_ins"] == c["htod_bytes"] == c["evictions"] == 0
    assert c["zero_copy_bytes"] == c["device_zero_copy_bytes"]


def test_a_captured_pass_is_one_segment_that_copies_maps_and_allocates_nothing(tiny: Path) -> None:
    c = run(tiny, config=HALF, tokens=12, generations=2).counters
    assert (c["segments"], c["seams"], c["fallbacks"]) == (1, 0, 0)
    assert c["vmm_calls_steady"] == c["alloc_calls_steady"] == c["device_htod_bytes"] == 0


def test_less_comes_over_the_link_than_with_a_ring_and_all_of_it_is_above_no_floor(tiny: Path) -> None:
    """Without a ring the budget holds more; the distance to the floor counts what is read in place."""
    mine, ring = (run(tiny, config={**HALF, "policy": policy}) for policy in ("zero_copy", "staging"))
    assert 0 < mine.counters["zero_copy_bytes"] < ring.counters["htod_bytes"]
    per_token = mine.counters["zero_copy_bytes"] / mine.facts["measured_tokens"]
    assert per_token >= mine.facts["floor_bytes_per_token"] > 0
    text = show(mine.lines.lines, lambda _: None)
    assert f"link_bytes_per_token={per_token:.1f} " in text and "htod_bytes_per_token=0.0 " in text
    assert f"over_floor_bytes={per_token - mine.facts['floor_bytes_per_token']:.1f} " in text
    hit = mine.counters["hit_bytes"] / (mine.counters["hit_bytes"] + mine.counters["zero_copy_bytes"])
    assert f"byte_hit_rate={hit:.2%}" in text


def test_verdicts_take_floor_and_hit_rate_from_bytes_over_the_link(tiny: Path) -> None:
    outcome = run(tiny, config=HALF)
    hits, reads = outcome.counters["hits"], outcome.counters["zero_copy_reads"]
    derived = derive({**outcome.counters}, outcome.facts, ())
    assert derived["count_hit_rate"] == hits / (hits + reads)
    older = {k: v for k, v in outcome.counters.items() if not k.startswith("zero_copy")}
    assert derive(older, outcome.facts, ())["count_hit_rate"] == 1.0, "an engine without the counter"


def test_the_modelled_clock_reads_in_place_at_its_own_rate(tiny: Path) -> None:
    whole, none = (run(tiny, config={**HALF, "weight_budget": b, "capture": False}) for b in (None, 1))
    extra = none.counters["modelled_ns"] - whole.counters["modelled_ns"]
    moved = none.counters["zero_copy_bytes"]
    assert extra == pytest.approx(moved / 51e9 * 1e9 - moved / H200.memory_bytes_per_s * 1e9, rel=0.01)


# -- the device


def test_host_memory_is_read_only_known_and_given_back() -> None:
    own = np.arange(300, dtype=np.uint8)
    for device in (SimDevice(granule_bytes=G), PlanDevice(granule_bytes=G)):
        with pytest.raises(DeviceFailure, match="only a key's whole host bytes"):
            device.map_host(own)
        device.host_range(7, own)
        address = device.map_host(own)
        for verb, *arguments in (("fill", 1, 0), ("copy_in", own[:10]), ("copy_within", address, 10)):
            with pytest.raises(DeviceFailure, match="would write to host bytes of key 7"):
                getattr(device, str(verb))(address, *arguments)
        with pytest.raises(DeviceFailure, match="no plain memory"):
            device.free(address)
        device.unmap_host(address)
        for _ in range(2):
            with pytest.raises(DeviceFailure, match="no host memory is mapped"):
                device.unmap_host(address)
    assert device.mapped_bytes == 0


def test_a_launch_that_reads_in_place_and_is_not_counted_breaks_w10z(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device counts at its own verb: a touch that the engine counts and no launch makes, shows."""
    touch = ZeroCopyPager.touch
    first = next(step.index for step in Bench(tiny).plan.steps if step.keys)

    def twice(self: ZeroCopyPager, plan: Plan, step: Any) -> tuple[int, ...]:
        if step.index == first:
            touch(self, plan, step)
        return touch(self, plan, step)

    monkeypatch.setattr(ZeroCopyPager, "touch", twice)
    outcome = run(tiny, config={**HALF, "weight_budget": 1})
    assert {e["name"] for e in outcome.broken_equations()} >= {"W1", "W4", "W10z", "Z1"}


# -- the checker


@pytest.mark.parametrize("order", ["early", "late", "random"])
def test_decodes_in_place_are_ordered_under_every_schedule(tiny: Path, order: Any) -> None:
    device = scheduled(order)
    bench = Bench(tiny, device=device, rows=(4,), budget=Bench(tiny).plan.weight_bytes // 2, policy="zero_copy")
    whole = Bench(tiny, rows=(4,))
    for _ in range(2):
        assert bench.prefill(TINY_PROMPT) == whole.prefill(TINY_PROMPT)
        assert [bench.step() for _ in range(5)] == [whole.step() for _ in range(5)]
    assert device.hazards.total == 0 and device.hazards.accesses > 1000
    bench.close()
    assert device.hazards.total == 0


def test_a_mapping_taken_away_under_a_reader_is_found(tiny: Path) -> None:
    device = scheduled("late", kind=Undrained)
    bench = Bench(tiny, device=device, rows=(4,), budget=1, policy="zero_copy")
    bench.prefill(TINY_PROMPT)
    bench.step()
    device.launch(next(launch for launch in bench.decoder._launches.values() if launch.step.keys))
    bench.pager.close()
    assert "memory taken away under use" in kinds(device)


def test_a_replay_after_the_mapping_is_gone_is_found(tiny: Path) -> None:
    device = scheduled("late")
    bench = Bench(tiny, device=device, rows=(4,), budget=1, policy="zero_copy")
    bench.prefill(TINY_PROMPT)
    for _ in range(3):
        bench.step()
    [graph] = bench.decoder._recorded or []
    assert graph is not None
    bench.pager.close()
    device.replay(graph)
    assert "replay against moved or freed addresses" in kinds(device)
