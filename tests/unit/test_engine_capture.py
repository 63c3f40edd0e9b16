"""Segments and seams of the one-token step, and how its steps divide into warm, recorded and replayed ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_args

import pytest

from engine import decode
from engine.bind import lower
from engine.capture import CapturePlan, Seam, Segment, cut
from engine.config import POLICIES
from engine.onnx_load import load
from engine.plan import Plan, SeamReason
from tests.unit.engine_rig import Bench, build_tiny, run

G = 4096
HALF = {"weight_budget": "50%", "granule": G}
STEP_COUNTERS = ("warm_steps", "captures", "replays", "fallbacks", "decode_steps")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("capture"))


@pytest.fixture(scope="module")
def plan(tiny: Path) -> Plan:
    """Its decode step."""
    return lower(load(tiny), 1)


def parts(counters: dict[str, Any]) -> tuple[int, ...]:
    """Warm, captures, replays, fallbacks, one-token steps."""
    return tuple(counters[name] for name in STEP_COUNTERS)


def test_a_resident_model_is_one_segment_without_seams(tiny: Path, plan: Plan) -> None:
    outcome = run(tiny, tokens=4)
    assert (outcome.counters["segments"], outcome.counters["seams"], outcome.counters["seam_nodes"]) == (1, 0, 0)
    assert outcome.counters["graph_nodes"] == len(plan.steps) == outcome.facts["plan_steps"]
    assert outcome.result["seams"] == []


def test_c1_48_tokens_after_a_prompt_of_5(tiny: Path) -> None:
    outcome = run(tiny, prompt_ids=[1, 17, 42, 99, 7], tokens=48, ignore_eos=True, generations=3)
    first, second, third = outcome.lines.of("generation")
    warm = first["counters"]["warm"]
    assert (warm["warm_steps"], warm["captures"]) == (1, 1)
    assert first["counters"]["decode"]["replays"] == 45
    for later in (second, third):
        assert later["counters"]["decode"]["replays"] == 47, "a graph stays good: addresses do not move"
        assert later["counters"]["warm"] == {}
    assert parts(outcome.counters) == (1, 1, 45 + 47 + 47, 0, 3 * 47)


def test_c1_256_tokens_after_a_prompt_of_one(tiny: Path) -> None:
    """The prompt's own step is a one-token step, and the first: 256 = 1 warm + 1 captured + 254 replays."""
    outcome = run(tiny, prompt_ids=[1], tokens=255, ignore_eos=True)
    assert parts(outcome.counters) == (1, 1, 253, 0, 255), "the context holds 256 positions"
    for generations in (2, 6):
        outcome = run(tiny, prompt_ids=[1], tokens=20, ignore_eos=True, generations=generations)
        assert parts(outcome.counters) == (1, 1, 20 * generations - 2, 0, 20 * generations)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_runs_too_short_to_record_or_replay(tiny: Path, tokens: int) -> None:
    outcome = run(tiny, tokens=tokens)
    assert parts(outcome.counters) == ((0, 0, 0, 0, 0), (1, 0, 0, 0, 1), (1, 1, 0, 0, 2))[tokens - 1]
    assert outcome.broken_equations() == []


def test_chunks_of_one_are_one_token_steps_too(tiny: Path) -> None:
    outcome = run(tiny, config={"prefill_chunk": 1}, tokens=5)
    assert parts(outcome.counters) == (1, 1, 6, 0, 8)
    odd = run(tiny, config={"prefill_chunk": 3}, tokens=5)
    assert parts(odd.counters) == (1, 1, 3, 0, 5), "4 = 3 + 1: the last chunk is the warm step"


@pytest.mark.parametrize("policy", POLICIES)
def test_seams_are_the_steps_outside_segments_each_with_one_of_seven_reasons(
    tiny: Path, plan: Plan, policy: str
) -> None:
    outcome = run(tiny, config={**HALF, "policy": policy})
    bench = Bench(tiny, budget=outcome.facts["budget_bytes"], policy=policy)
    cutting = bench.decoder.capture_plan
    assert cutting is not None
    assert [s for segment in cutting.segments for s in segment.steps] == list(bench.plan.steps), "each step once"
    for one, after in zip(cutting.segments, cutting.segments[1:], strict=False):
        assert one.captured != after.captured, "runs are maximal"
    outside = [s.index for segment in cutting.segments if not segment.captured for s in segment.steps]
    seams = outcome.result["seams"]
    assert [s["step"] for s in seams] == outside
    assert outcome.counters["seam_nodes"] == len(outside)
    assert outcome.counters["seams"] == sum(not s.captured for s in cutting.segments)
    assert outcome.counters["segments"] == sum(s.captured for s in cutting.segments)
    copies = len(bench.pager.stream.copies) if policy == "staging" else 0
    assert outcome.counters["graph_nodes"] == len(plan.steps) - len(outside) + copies
    assert outcome.counters["seam_nodes"] >= outcome.counters["seams"]
    assert (outcome.counters["seams"] == 0) is (policy in ("staging", "zero_copy")), (
        "every other policy pages in between steps"
    )
    for seam in seams:
        assert seam["reason"] in get_args(SeamReason) and seam["path"] == "eager-device-seam"
        step = plan.steps[seam["step"]]
        assert (seam["node"], seam["op"]) == (step.node, step.op)
        assert any(plan.keys[k].name in seam["detail"] for k in step.keys)


def test_stable_slot_seams_stand_around_streamed_steps_only(tiny: Path) -> None:
    bench = Bench(tiny, budget=half(tiny), policy="stable_slot")
    cutting = bench.decoder.capture_plan
    assert cutting is not None
    for _ in range(2):
        bench.prefill([1, 17], 1)
    streamed = {k.index for k in bench.plan.keys if bench.pager.traffic[k.index].bypassed}
    assert streamed, "something must stream"
    for step in bench.plan.steps:
        is_seam = any(s.step.index == step.index for s in cutting.seams)
        assert is_seam == bool(streamed.intersection(step.keys)), step.node


def half(tiny: Path) -> int:
    """Half of W."""
    return lower(load(tiny), 1).weight_bytes // 2


@pytest.mark.parametrize("policy", ["lru", "stable", "size_first"])
def test_policies_that_evict_capture_no_step_that_reads_a_key(tiny: Path, policy: str) -> None:
    bench = Bench(tiny, budget=half(tiny), policy=policy)
    cutting = bench.decoder.capture_plan
    assert cutting is not None
    assert {s.step.index for s in cutting.seams} == {s.index for s in bench.plan.steps if s.keys}


@pytest.mark.parametrize("config", [{}, *({**HALF, "policy": p} for p in POLICIES)])
def test_capture_changes_no_other_counter(tiny: Path, config: dict[str, Any]) -> None:
    on, off = (run(tiny, config={**config, "capture": c}, generations=2) for c in (True, False))
    assert on.streams == off.streams
    of_capture = {*STEP_COUNTERS, "segments", "seams", "seam_nodes", "graph_nodes", "eager_launches"}
    of_time = {"prefill_ns", "decode_ns", "modelled_ns"}
    of_replays = {"vmm_calls_steady", "alloc_calls_steady"}
    for name in on.counters.keys() - of_capture - of_time - of_replays:
        assert on.counters[name] == off.counters[name], name
    assert on.counters["eager_launches"] < off.counters["eager_launches"]
    assert on.counters["decode_steps"] == off.counters["decode_steps"] == 14
    assert parts(off.counters)[:4] == (0, 0, 0, 0) and off.counters["segments"] == 0
    assert off.facts["capture_declined"] == "capture is off" and "capture_declined" not in on.facts
    assert off.result["seams"] == []
    assert on.counters["modelled_ns"] < off.counters["modelled_ns"], "a node costs less than a launch"


def test_launches_and_nodes_add_up(tiny: Path, plan: Plan) -> None:
    """Every step of every pass is launched eagerly or replayed as a node."""
    for config in ({}, {**HALF, "policy": "stable_slot"}, {**HALF, "policy": "lru"}):
        counters = run(tiny, config=config, generations=2).counters
        eager = (counters["forward_steps"] - counters["captures"] - counters["replays"]) * len(plan.steps)
        eager += (counters["captures"] + counters["replays"]) * counters["seam_nodes"]
        assert counters["eager_launches"] == eager


def test_stable_slot_makes_no_call_to_map_once_it_stands(tiny: Path) -> None:
    steady = run(tiny, config={**HALF, "policy": "stable_slot"}, tokens=16).counters
    assert steady["vmm_calls_steady"] == steady["alloc_calls_steady"] == 0 and steady["replays"] > 0
    assert run(tiny, config={**HALF, "policy": "lru"}, tokens=16).counters["vmm_calls_steady"] > 0


def test_a_reason_written_into_a_step_is_kept(plan: Plan) -> None:
    """A step that says why it cannot be recorded is a seam with that reason, whatever its keys do."""
    steps = list(plan.steps)
    steps[3] = dataclasses.replace(steps[3], reason="HostControlFlowOrSequence", detail="a loop")
    cutting = cut(dataclasses.replace(plan, steps=tuple(steps)), lambda _: True)
    [seam] = cutting.seams
    assert (seam.reason, seam.detail, seam.path) == ("HostControlFlowOrSequence", "a loop", "host-seam")
    assert (cutting.captured, cutting.seam_runs) == (2, 1)


@pytest.mark.parametrize("where", [0, -1])
def test_a_seam_at_either_end(plan: Plan, where: int) -> None:
    steps = list(plan.steps)
    steps[where] = dataclasses.replace(steps[where], reason="KernelCaptureUnsupported")
    cutting = cut(dataclasses.replace(plan, steps=tuple(steps)), lambda _: True)
    assert (cutting.captured, cutting.seam_runs) == (1, 1)
    assert sum(len(s.steps) for s in cutting.segments) == len(steps)


def test_nothing_to_capture_is_a_fallback_each_time(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step a seam: wanted a graph, ran eagerly, and C1 still closes."""

    def nothing(plan: Plan, *_: Any) -> CapturePlan:
        seams = tuple(Seam(s, "KernelNotWarmed", "planted") for s in plan.steps)
        return CapturePlan((Segment(False, plan.steps),), seams)

    expected = run(tiny).streams
    assert "capture_declined" not in run(tiny, config={**HALF, "policy": "lru"}).facts, "a seam declines no graph"
    monkeypatch.setattr(decode, "cut", nothing)
    outcome = run(tiny)
    assert outcome.streams == expected
    assert parts(outcome.counters) == (0, 0, 0, 7, 7)
    assert outcome.facts["capture_declined"].startswith("nothing can be recorded: all")
    assert outcome.broken_equations() == []
