"""Policy staging: what stays, the ring, its static schedule, and passes that map nothing and compute the same bits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.bind import lower
from engine.capture import cut
from engine.device.plan_only import PlanDevice
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure, NonFiniteLogits
from engine.onnx_load import load
from engine.paging.arena import minimum_budget, pack
from engine.paging.policy import aligned
from engine.paging.stream import PIECE_BYTES, divide, piece_bytes, schedule
from engine.plan import Plan
from engine.show import show
from engine.zoo import build
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny, run
from tests.unit.test_engine_paging import Rig, plan_of, plans

G = 4096
LIMIT, HEADROOM, KV_FLOOR, RING = 7_726_753_178, 536_870_912, 50_331_648, 128 << 20
"""The reference's W8: what a card may hold, what is kept free, the cache's least; and the most that a ring may take."""
HALF: dict[str, Any] = {"weight_budget": "50%", "granule": G, "policy": "staging"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("staging"))


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    """Its decode step."""
    return lower(load(tiny), 1)


def arena_granules(plan: Plan) -> int:
    """Granules of all keys, packed."""
    return max(view.last for view in pack(plan.keys, G)) + 1


# -- the division of the budget, and the schedule


@settings(max_examples=150, deadline=None)
@given(plan=plans(), data=st.data())
def test_the_schedule_of_any_plan_keeps_the_rules_of_a_ring(plan: Plan, data: st.DataObject) -> None:
    """No copy lands on bytes that are still to be read, every step finds its keys whole, and all fits the budget."""
    least, most = minimum_budget(plan, G) // G, arena_granules(plan) - 1
    assume(least <= most)
    capacity = data.draw(st.integers(least, most)) * G
    ring = divide(plan, capacity, G)
    stream = schedule(plan, ring)
    resident = sum(aligned(plan.keys[k].nbytes) for k in ring.resident)
    assert resident + ring.nbytes + ring.unfilled_bytes == capacity and ring.unfilled_bytes >= 0
    assert ring.slots in (1, 2) and stream.slots == ring.slots
    assert [c for step in plan.steps for c in stream.by_step.get(step.index, ())] == list(stream.copies)
    slots: list[dict[int, tuple[int, int]]] = [{} for _ in range(ring.slots)]  # offset -> end, key
    for step in plan.steps:
        for copy in stream.by_step.get(step.index, ()):
            assert copy.key not in ring.resident and copy.nbytes == plan.keys[copy.key].nbytes
            assert copy.record == plan.keys[copy.key].record
            assert copy.issue_after < step.index <= copy.needed_by
            assert copy.slot_offset % 256 == 0 and copy.slot_offset + copy.nbytes <= ring.slot_bytes
            if copy.slot_offset == 0:
                slots[copy.slot].clear()
            held = slots[copy.slot]
            assert all(copy.slot_offset >= end for end, _ in held.values()), "keys of a slot lie side by side"
            held[copy.slot_offset] = copy.slot_offset + copy.nbytes, copy.key
        for key in step.keys:
            if key in ring.resident:
                assert (step.index, key) not in stream.places
                continue
            copy = stream.places[step.index, key]
            assert slots[copy.slot].get(copy.slot_offset) == (copy.slot_offset + copy.nbytes, key)
    assert stream.waits == sum(c.issue_after >= 0 for c in stream.copies)
    of_record: dict[int, set[bool]] = {}
    for one in plan.keys:
        of_record.setdefault(one.record, set()).add(one.index in ring.resident)
    assert all(len(kinds) == 1 for kinds in of_record.values()), "the keys of a record stay or go together"


def fullest(sizes: list[int], capacity: int, slots: int) -> int:
    """The most bytes that can stay beside so many slots, each as wide as the widest that does not, by trying all."""
    sets = [set(some) for n in range(len(sizes)) for some in itertools.combinations(range(len(sizes)), n)]
    widest = {frozenset(s): max(n for k, n in enumerate(sizes) if k not in s) for s in sets}
    totals = {s: sum(sizes[k] for k in s) for s in widest}
    return max(total for s, total in totals.items() if total + slots * widest[s] <= capacity)


@settings(max_examples=150, deadline=None)
@given(sizes=st.lists(st.integers(17, 60), min_size=4, max_size=8), data=st.data())
def test_no_other_resident_set_is_fuller_beside_the_slots_that_it_needs(sizes: list[int], data: st.DataObject) -> None:
    """Each step reads one record of its own; against all sets there are."""
    nbytes = [256 * n for n in sizes]
    plan = plan_of(nbytes, [[k] for k in range(len(sizes))])
    least, most = minimum_budget(plan, G) // G, arena_granules(plan) - 1
    assume(least <= most)
    ring = divide(plan, data.draw(st.integers(least, most)) * G, G)
    capacity = sum(nbytes[k] for k in ring.resident) + ring.nbytes + ring.unfilled_bytes
    assert sum(nbytes[k] for k in ring.resident) == fullest(nbytes, capacity, ring.slots)


def test_what_is_wider_than_a_slot_stays_and_small_records_stay_together() -> None:
    """A head of 8 granules, records of 2, and a norm before each: the head and all norms stay, under any order."""
    sizes = [2048, 2 * G] * 6 + [8 * G]
    plan = plan_of(sizes, [[k] for k in range(len(sizes))])
    ring = divide(plan, 16 * G, G)
    assert {12, *range(0, 12, 2)} <= ring.resident
    assert ring.slots == 2 and 2 * G <= ring.slot_bytes < 4 * G
    tight = divide(plan, 8 * G, G)
    assert 12 not in tight.resident and tight.slots == 1 and tight.slot_bytes >= 8 * G, "a slot of the largest record"


@pytest.mark.parametrize(
    ("budget", "granule", "piece"),
    [
        (64 * G, G, G),
        (64 * G + 1, G, 2 * G),
        (65 * G, G, 2 * G),
        (G, G, G),
        (7_139_550_618, 2 << 20, PIECE_BYTES),
        (140_000_000, 2 << 20, 4 << 20),
        (1 << 30, 1 << 30, 1 << 30),
    ],
)
def test_a_piece_is_a_sixty_fourth_in_whole_granules_within_its_bounds(budget: int, granule: int, piece: int) -> None:
    assert piece_bytes(budget, granule) == piece


def test_room_that_nothing_fits_into_goes_to_the_ring_up_to_a_piece() -> None:
    """Equal records of ten granules: what is left of the budget widens the slots, a granule each, and no further."""
    plan = plan_of([10 * G] * 8, [[k] for k in range(8)])
    exact = divide(plan, 40 * G, G)
    assert (len(exact.resident), exact.slot_bytes, exact.unfilled_bytes) == (2, 10 * G, 0)
    more = divide(plan, 45 * G, G)
    assert (len(more.resident), more.slot_bytes, more.unfilled_bytes) == (2, 10 * G, 5 * G), "a piece is smaller"
    small = plan_of([G + 256] * 600, [[k] for k in range(600)])
    wide = divide(small, 256 * G, G)
    assert G + 256 < wide.slot_bytes <= wide.piece_bytes == 4 * G


def test_two_slots_where_there_is_room_for_two_and_one_where_there_is_not() -> None:
    plan = plan_of([4 * G] * 4, [[k] for k in range(4)])
    assert divide(plan, 4 * G, G).slots == divide(plan, 7 * G, G).slots == 1
    assert divide(plan, 8 * G, G).slots == 2
    one, two = (schedule(plan, divide(plan, n * G, G)) for n in (7, 8))
    assert (one.waits, two.waits) == (3, 2), "with one slot, each copy but the first waits for a reader"


# -- runs


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("share", ["95%", "75%", "50%", "35%", "25%"])
def test_ids_and_gaps_are_those_of_everything_resident(tiny: Path, share: str, capture: bool) -> None:
    config = {**HALF, "weight_budget": share, "capture": capture, "prefill_chunk": 3}
    outcome = run(tiny, config=config, tokens=12, generations=3)
    assert outcome.streams == run(tiny, tokens=12, generations=3).streams
    assert outcome.broken_equations() == []
    names = {e["name"] for e in outcome.result["equations"]}
    assert names >= {"S1", "S2", "S3", "S4", "W2s", "W7s"}
    c = outcome.counters
    assert c["staged_page_ins"] == c["page_ins"] > 0 and c["staged_bytes"] == c["htod_bytes"] > 0
    assert c["ring_waits"] > 0 and c["evictions"] == c["retained_page_ins"] == c["bypassed_page_ins"] == 0


def test_a_captured_pass_is_one_segment_that_maps_and_allocates_nothing(tiny: Path) -> None:
    c = run(tiny, config=HALF, tokens=12, generations=2).counters
    assert (c["segments"], c["seams"], c["seam_nodes"], c["fallbacks"]) == (1, 0, 0, 0)
    assert c["vmm_calls_steady"] == c["alloc_calls_steady"] == c["evictions"] == 0
    stable = run(tiny, config={**HALF, "policy": "stable"}, tokens=12, generations=2).counters
    assert stable["segments"] > 1 and stable["vmm_calls_steady"] > 0
    assert c["htod_bytes"] < stable["htod_bytes"]


@pytest.mark.parametrize("capture", [True, False])
def test_logits_are_the_same_bits_in_every_pass(tiny: Path, capture: bool) -> None:
    rows = (len(TINY_PROMPT),)
    whole = Bench(tiny, rows=rows)
    half = Bench(tiny, rows=rows, budget=whole.plan.weight_bytes // 2, policy="staging", capture=capture)
    for _ in range(3):
        for bench in (whole, half):
            bench.prefill(TINY_PROMPT)
        for _ in range(6):
            assert (whole.step(), whole.logits().tobytes()) == (half.step(), half.logits().tobytes())


def test_where_the_bytes_went_adds_up(tiny: Path) -> None:
    """Distance to the floor: the ring, what alignment and rounding cost, and room that nothing fitted into."""
    facts = run(tiny, config=HALF).facts
    streamed = facts["weight_bytes"] - facts["resident_set_bytes"]
    assert facts["staged_bytes_per_step"] == streamed
    gaps = facts["capacity_bytes"] - facts["resident_set_bytes"] - facts["ring_bytes"] - facts["unfilled_bytes"]
    assert 0 <= gaps < 256 * facts["keys"]
    over = streamed - facts["floor_bytes_per_token"]
    assert over == facts["ring_bytes"] + facts["unfilled_bytes"] + gaps
    assert facts["peak_weight_mapped_bytes"] <= facts["capacity_bytes"]


def test_all_that_fits_is_resident_and_has_no_ring(tiny: Path) -> None:
    outcome = run(tiny, config={"policy": "staging", "granule": G})
    assert outcome.facts["ring_slots"] == outcome.facts["ring_bytes"] == outcome.counters["page_ins"] == 0
    assert outcome.facts["resident"] == 1 and outcome.broken_equations() == []


GEOMETRIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2.5-0.5b", {"weight_budget": "50%"}),
    ("qwen2.5-7b", {"weight_budget": "50%"}),
    ("qwen2.5-14b-zp", {"vram_limit": LIMIT, "weight_budget": LIMIT - HEADROOM - KV_FLOOR}),
]


@pytest.mark.parametrize(("name", "config"), GEOMETRIES, ids=[name for name, _ in GEOMETRIES])
def test_w8_the_ring_is_all_that_a_token_pays_above_the_floor(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    """Models of real size: W less the budget, and no more than the ring beside it; of a few records none is cut."""
    model = build(name, tmp_path / name, cache_dir=tmp_path, hollow=True).folder
    outcome = run(model, config={**config, "policy": "staging"}, arithmetic="none", tokens=6)
    assert outcome.broken_equations() == []
    f, c = outcome.facts, outcome.counters
    streamed = c["htod_bytes"] / f["measured_tokens"]
    text = show(outcome.lines.lines, lambda _: None)
    for term in (
        "weight_bytes",
        "budget_bytes",
        "capacity_bytes",
        "resident_set_bytes",
        "ring_bytes",
        "unfilled_bytes",
    ):
        assert f" {term}={f[term]}" in text, "each term is printed"
    assert streamed == f["staged_bytes_per_step"] > f["floor_bytes_per_token"] > 0
    assert streamed <= f["weight_bytes"] - f["capacity_bytes"] + f["ring_bytes"]
    assert 0 <= f["budget_bytes"] - f["capacity_bytes"] < 2 << 20, "whole granules"
    assert streamed <= f["weight_bytes"] - f["budget_bytes"] + RING and f["ring_bytes"] <= RING
    assert (c["segments"], c["vmm_calls_steady"], c["alloc_calls_steady"], c["evictions"]) == (1, 0, 0, 0)
    lost = f["capacity_bytes"] - f["resident_set_bytes"] - f["ring_bytes"] - f["unfilled_bytes"]
    assert streamed - (f["weight_bytes"] - f["capacity_bytes"]) == f["ring_bytes"] + f["unfilled_bytes"] + lost
    parted = f["budget_bytes"] - f["capacity_bytes"]
    assert streamed - (f["weight_bytes"] - f["budget_bytes"] + f["ring_bytes"]) == parted + f["unfilled_bytes"] + lost
    if "vram_limit" in config:
        assert (f["unfilled_bytes"], lost, parted) == (0, 0, 845_210), "all that it misses is a part of a granule"
        assert c["mapped_physical_bytes"] + HEADROOM + KV_FLOOR <= LIMIT
        assert f["kv_bytes_per_token"] * 256 == KV_FLOOR, "the cache's least: its smallest bucket"
        assert c["peak_committed_bytes"] + f["workspace_bytes"] <= LIMIT and c["oversubscribed_bytes"] == 0


def test_a_pass_in_pieces_joins_its_copies_at_every_seam(tiny: Path) -> None:
    """Where steps may not be recorded, copies under way are joined before a graph begins and before it ends."""
    seamed = lower(load(tiny), 1)
    odd = [s.index for s in seamed.steps if s.keys][1::3]
    steps = tuple(replace(s, reason="KernelNotWarmed" if s.index in odd else None) for s in seamed.steps)
    bench = Bench(tiny, rows=(4,), budget=load_bytes(tiny) // 2, policy="staging")
    bench.plans[1] = replace(bench.plan, steps=steps)
    bench.decoder.capture_plan = cut(bench.plans[1], bench.pager.steady)
    assert bench.decoder.capture_plan.captured > 2
    bench.prefill(TINY_PROMPT)
    assert not differs(tiny, bench, 6)


def test_plan_only_counts_what_a_run_in_full_counts(tiny: Path) -> None:
    full, dry = (run(tiny, config=HALF, arithmetic=a, tokens=9, generations=2) for a in ("full", "none"))
    for name in ("staged_page_ins", "staged_bytes", "ring_waits", "htod_bytes", "device_htod_bytes", "graph_nodes"):
        assert full.counters[name] == dry.counters[name] > 0, name
    assert dry.broken_equations() == []


# -- defects that must show


def streaming(tiny: Path) -> Bench:
    """The model at half its weights, after its prompt."""
    bench = Bench(tiny, rows=(4,), budget=load_bytes(tiny) // 2, policy="staging")
    bench.prefill(TINY_PROMPT)
    return bench


def load_bytes(tiny: Path) -> int:
    """W."""
    return lower(load(tiny), 1).weight_bytes


def truth(tiny: Path, steps: int) -> list[bytes]:
    """Logits of each step with everything resident."""
    bench = Bench(tiny, rows=(4,))
    bench.prefill(TINY_PROMPT)
    return [(bench.step(), bench.logits().tobytes())[1] for _ in range(steps)]


def differs(tiny: Path, bench: Bench, steps: int = 4) -> bool:
    """Whether any step's logits are other than they should be, or not finite."""
    try:
        return [(bench.step(), bench.logits().tobytes())[1] for _ in range(steps)] != truth(tiny, steps)
    except NonFiniteLogits:
        return True


def test_the_comparison_passes_where_nothing_is_wrong(tiny: Path) -> None:
    assert not differs(tiny, streaming(tiny))


def test_a_copy_that_is_dropped_shows(tiny: Path) -> None:
    """Every single one: behind each reader lies poison, so nothing is left over from the pass before."""
    count = len(streaming(tiny).pager.stream.copies)
    for dropped in range(count):
        bench = streaming(tiny)
        stream = bench.pager.stream
        gone = stream.copies[dropped]
        kept = {s: tuple(c for c in copies if c is not gone) for s, copies in stream.by_step.items()}
        bench.pager._streams[1] = replace(stream, by_step=kept)
        if gone.slot_offset == 0:  # whose turn also says that the slot is dead
            bench.device.poison(bench.pager._slot(gone.slot), bench.pager.ring.slot_bytes)
            continue
        assert differs(tiny, bench), gone


def test_what_a_slot_held_is_dead_from_its_next_turn_on(tiny: Path) -> None:
    bench = Bench(tiny, rows=(4,), budget=load_bytes(tiny) // 2, policy="staging", capture=False)
    bench.prefill(TINY_PROMPT)
    poison, dead = bench.device.poison, []

    def poisoned(address: int, nbytes: int) -> None:
        dead.append((address, nbytes))
        poison(address, nbytes)

    bench.device.poison = poisoned  # type: ignore[method-assign]
    bench.step()
    turns = [copy.slot for copy in bench.pager.stream.copies if copy.slot_offset == 0]
    assert dead == [(bench.pager._slot(slot), bench.pager.ring.slot_bytes) for slot in turns] and len(turns) > 2


def test_a_copy_that_comes_too_early_shows(tiny: Path) -> None:
    """A slot that is refilled while a step has yet to read it."""
    bench = streaming(tiny)
    stream = bench.pager.stream
    late = next(c for c in stream.copies if c.issue_after >= 0)
    before = dict(stream.by_step)
    [step] = [s for s, copies in before.items() if late in copies]
    before[0] = (*before.get(0, ()), *(c for c in before[step] if c.slot == late.slot))
    before[step] = tuple(c for c in before[step] if c.slot != late.slot)
    bench.pager._streams[1] = replace(stream, by_step=before)
    assert differs(tiny, bench)


def test_a_slot_read_without_its_copy_is_a_failure_without_arithmetic(tiny: Path) -> None:
    device = PlanDevice(granule_bytes=G)
    bench = Bench(tiny, rows=(4,), budget=load_bytes(tiny) // 2, policy="staging", device=device)
    bench.prefill(TINY_PROMPT)
    bench.pager._streams[1] = replace(bench.pager.stream, by_step={})
    bench.device.poison(bench.pager._slot(0), bench.pager.ring.nbytes)
    with pytest.raises(DeviceFailure, match="is read where there is nothing whole"):
        bench.step()


def test_poison_in_a_recording_comes_with_each_replay_and_is_no_node() -> None:
    device = SimDevice(granule_bytes=G)
    address = device.alloc(64, "target")
    device.fill(address, 64, 1)
    device.begin_capture()
    device.poison(address, 64)
    graph = device.end_capture()
    assert graph.nodes == 0 and device.copy_out(address, 64) == bytes([1]) * 64
    for _ in range(2):
        device.replay(graph)
        assert device.copy_out(address, 64) == bytes([0xFF]) * 64
        device.fill(address, 64, 1)


def test_a_pager_that_streams_gives_everything_back_in_the_middle_of_a_pass() -> None:
    plan = plan_of([G, G, 2 * G, G], [[0], [1], [2], [3]])
    rig = Rig(plan, "staging", 4 * G)
    rig.walk()
    rig.pager.issue(plan, plan.steps[0])
    rig.pager.touch(plan, plan.steps[0])
    rig.close()


def test_a_plan_of_ten_thousand_records_is_divided_and_scheduled_at_once() -> None:
    """Linear in keys but for sorting: no search runs away on sizes that are all different."""
    sizes = [256 * (20 + n % 977) for n in range(10_000)]
    plan = plan_of([1] * len(sizes), [[k] for k in range(len(sizes))])
    weight = plan.keys[0].weight
    keys = tuple(
        replace(k, weight=replace(weight, name=k.name, data=np.broadcast_to(weight.data, (n,))))
        for k, n in zip(plan.keys, sizes, strict=True)
    )
    plan = replace(plan, keys=keys)
    ring = divide(plan, sum(sizes) // 2 // G * G, G)
    assert len(schedule(plan, ring).copies) + len(ring.resident) == len(sizes)
