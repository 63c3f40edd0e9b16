"""Seven reasons in their order, each able to stand alone; and the capture rules, which a sweep can leave out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from engine.__main__ import main
from engine.bind import lower
from engine.capture import cut
from engine.capture_rules import RULES, parse_rules
from engine.config import check
from engine.errors import BadRequest
from engine.onnx_load import load
from engine.plan import Access, Operand, Plan, Ref, SeamReason, Step
from engine.zoo import build
from engine.zoo.geometries import build_geometry
from tests.unit.engine_rig import build_tiny, run
from tests.unit.test_engine_zoo_geometries import small

LADDER = ("none", "split_sizes", "split_sizes+growing_symbols", "all")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 35b-a3b, three of them gated delta, hollow."""
    folder = tmp_path_factory.mktemp("hybrid") / "35b-a3b-4"
    build("35b-a3b", folder, layers=4, hollow=True, cache_dir=folder.parent)
    return folder


@pytest.fixture(scope="module")
def hybrid_plan(hybrid: Path) -> Plan:
    """Its decode step."""
    return lower(load(hybrid, hollow=True), 1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def of_one(step: Step, plan: Plan, **more: Any) -> str | None:
    """The reason that stands against one step of a plan."""
    seams = cut(dataclasses.replace(plan, steps=(step,)), **{"steady": lambda _: True, **more}).seams
    return seams[0].reason if seams else None


def test_each_of_the_seven_reasons_can_stand_and_the_earlier_one_is_told(hybrid_plan: Plan) -> None:
    """Reasons are piled up from the last to the first: each newcomer must win over all before it."""
    step = next(s for s in hybrid_plan.steps if s.op == "ai.onnx::Split")
    facts: dict[str, Any] = {"rules": parse_rules("growing_symbols+stream_order")}
    found = [of_one(step, hybrid_plan, **facts)]
    facts["warmed"] = lambda _: False
    found.append(of_one(step, hybrid_plan, **facts))
    step = dataclasses.replace(step, grows="x has the extent total")
    found.append(of_one(step, hybrid_plan, **facts))
    for access in get_args(Access)[:2]:
        open_ = Operand("n", Ref("buffer", 0, "float32", (-1, 4), "n"), access)
        step = dataclasses.replace(step, operands=(*step.operands, open_))
        found.append(of_one(step, hybrid_plan, **facts))
    step = dataclasses.replace(step, op="ai.onnx::Loop")
    found.append(of_one(step, hybrid_plan, **facts))
    reader = next(s for s in hybrid_plan.steps if s.keys)
    step = dataclasses.replace(step, operands=(*step.operands, *(o for o in reader.operands if o.ref.kind == "key")))
    found.append(of_one(step, hybrid_plan, **facts, steady=lambda _: False))
    assert found == list(reversed(get_args(SeamReason)))


@pytest.mark.parametrize("op", ["If", "Loop", "Scan", "SequenceInsert", "SplitToSequence"])
def test_what_the_host_carries_out_is_a_host_seam(hybrid_plan: Plan, op: str) -> None:
    step = dataclasses.replace(hybrid_plan.steps[5], op=f"ai.onnx::{op}")
    [seam] = cut(dataclasses.replace(hybrid_plan, steps=(step,)), lambda _: True).seams
    assert (seam.reason, seam.path) == ("HostControlFlowOrSequence", "host-seam")


def test_nothing_to_record_is_declined_for_the_graph_and_not_for_a_step(hybrid_plan: Plan) -> None:
    assert cut(hybrid_plan, lambda _: True).decline == ""
    nothing = cut(hybrid_plan, lambda _: True, warmed=lambda _: False)
    assert nothing.decline == f"nothing can be recorded: all {len(hybrid_plan.steps)} steps are seams"


def test_each_rule_takes_its_seams_away_and_no_others(hybrid_plan: Plan) -> None:
    """Of four layers three are gated delta: a Split each, two unit norms, one recurrence; attention has two Splits."""
    counts = []
    for rules in LADDER:
        seams = cut(hybrid_plan, lambda _: True, parse_rules(rules)).seams
        counts.append(dict(Counter(s.step.op.rpartition("::")[2] for s in seams)))
    whole = {"Split": 3 + 2, "LpNormalization": 6, "LinearAttention": 3}
    assert counts == [whole, {k: whole[k] for k in ("LpNormalization", "LinearAttention")}, {"LinearAttention": 3}, {}]
    places = Counter(s.step.node for s in cut(hybrid_plan, lambda _: True, parse_rules("none")).seams)
    assert sum("linear_attn/split_qkv/Split" in place for place in places) == 3


def test_the_reasons_are_those_that_stood_before(hybrid_plan: Plan) -> None:
    seams = cut(hybrid_plan, lambda _: True, parse_rules("none")).seams
    assert {(s.step.op.rpartition("::")[2], s.reason) for s in seams} == {
        ("Split", "KernelCaptureUnsupported"),
        ("LpNormalization", "KernelCaptureUnsupported"),
        ("LinearAttention", "CaptureRecordingFailed"),
    }
    assert any("shape [1, 1, 16, 128]" in s.detail for s in seams)


def test_flat_pointwise_steps_were_recorded_before_as_well(hybrid_plan: Plan) -> None:
    """Sigmoid and Mul at [1, 1, n] passed the older test: leaving the rule out touches head-major shapes alone."""
    seams = {s.step.index for s in cut(hybrid_plan, lambda _: True, parse_rules("none")).seams}
    flat = [s for s in hybrid_plan.steps if s.op in ("ai.onnx::Mul", "ai.onnx::Sigmoid")]
    assert flat and not seams.intersection(s.index for s in flat)


@pytest.mark.parametrize("op", ["Sqrt", "Div", "Mul", "Sigmoid"])
@pytest.mark.parametrize(
    ("shape", "was_recorded"), [((1, 1, 4096), True), ((1, 1, 16, 128), False), ((32, 128), False)]
)
def test_the_older_test_turned_away_pointwise_steps_of_heads(
    hybrid_plan: Plan, op: str, shape: tuple[int, ...], was_recorded: bool
) -> None:
    """The four operators and both shapes that the report names; with the classifier all of them are recorded."""
    x, y = (Operand(n, Ref("buffer", 0, "float32", shape, n), a) for n, a in (("a", "r"), ("y", "w")))  # type: ignore[arg-type]
    step = dataclasses.replace(hybrid_plan.steps[5], op=f"ai.onnx::{op}", kernel="pointwise", operands=(x, y))
    before = of_one(step, hybrid_plan, rules=parse_rules("split_sizes+stream_order"))
    assert before == (None if was_recorded else "KernelCaptureUnsupported")
    assert of_one(step, hybrid_plan) is None
    assert of_one(dataclasses.replace(step, grows="x has the extent total"), hybrid_plan) == "ClassifierDisqualified"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", set(RULES)),
        ("none", set()),
        ("split_sizes", {"split_sizes"}),
        ("stream_order+split_sizes", {"stream_order", "split_sizes"}),
    ],
)
def test_rules_are_read_by_name(text: str, names: set[str]) -> None:
    assert parse_rules(text) == names


@pytest.mark.parametrize(
    "text", ["", "split", "all+none", "split_sizes+split_sizes", "split_sizes+", None, True, 3, ["all"]]
)
def test_what_is_no_rule_is_refused(text: object) -> None:
    with pytest.raises(BadRequest):
        check({"capture_rules": text})


def test_a_misspelt_rule_is_told_the_nearest() -> None:
    with pytest.raises(BadRequest) as refused:
        parse_rules("split_size")
    assert "did you mean 'split_sizes'?" in str(refused.value)


def test_a_run_cut_by_older_rules_gives_the_same_tokens_from_more_graphs(tmp_path: Path) -> None:
    """In full, on a narrow hybrid of two layers: seams run between graphs, and C1 closes."""
    folder = build_geometry("35b-a3b", small("35b-a3b"), 5, tmp_path / "narrow").folder
    outcomes = {rules: run(folder, prompt_ids=[1, 2, 3], tokens=6, config={"capture_rules": rules}) for rules in LADDER}
    assert all(o.streams == outcomes["all"].streams for o in outcomes.values())
    segments = [o.counters["segments"] for o in outcomes.values()]
    assert segments[-1] == 1 and segments == sorted(segments, reverse=True) and segments[0] > segments[2] > 1
    for outcome in outcomes.values():
        assert outcome.broken_equations() == []
        assert len(outcome.result["seams"]) == outcome.counters["seam_nodes"]


def test_log_capture_prints_each_decision(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--model", str(tiny), "--prompt-ids", "1 17", "--tokens", "40", "--ignore-eos", "--device", "sim"]
    more = ["--granule", "4096", "--kv-layout", "head-major", "--kv-min-bucket", "8", "--log-capture"]
    assert main([*words, *more]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "capture: segments=1 seams=0 seam_nodes=0"
    assert any("symbol total_sequence_length grows" in line for line in told)
    assert any("symbol sequence_length is pinned: query length" in line for line in told)
    assert any("[capture-region]: steps 0 to" in line for line in told)
    acts = [line.split()[1] for line in told if " at length " in line]
    assert acts[:3] == ["warm", "recorded", "invalidated"] and acts.count("invalidated") == acts.count("recorded") - 1
    assert main([*words, *more, "--weight-budget", "50%", "--policy", "lru"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert any("CaptureRecordingFailed: may page in" in line and "[eager-device-seam]" in line for line in told)
    assert main([*words, "--capture", "off", "--log-capture"]) == 0
    assert capsys.readouterr().err.splitlines() == ["capture: declined: capture is off"]


def test_nothing_is_told_that_nobody_asked_for(tiny: Path) -> None:
    assert run(tiny, tokens=3).lines.of("capture") == []
