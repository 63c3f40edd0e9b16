"""Routing recorded and given: which experts were asked for is counted alike with and without arithmetic."""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from numpy.typing import NDArray

import engine
from engine.bind import lower
from engine.counters import COUNTERS
from engine.kernels import moe
from engine.onnx_load import load
from engine.survey import Setting, survey
from tests.unit.engine_mixture import BANKS, CHOSEN, EXPERTS, PROMPT, TOKENS, asked, built, choices, planned
from tests.unit.engine_rig import Outcome, build_tiny, run

SCHEMA = json.loads((Path(engine.__file__).parent / "schemas" / "routing.json").read_text())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of four layers, each with a bank of eight experts."""
    return built(tmp_path_factory.mktemp("routing") / "m")


@pytest.fixture(scope="module")
def trace(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run in full."""
    path = tmp_path_factory.mktemp("trace") / "routing.json"
    assert asked(mixture, routing_out=str(path)).code == 0
    return path


def booked(outcome: Outcome) -> dict[str, Any]:
    """All that was counted but for times and margins."""
    return {n: v for n, v in outcome.counters.items() if COUNTERS[n].scope in ("plan", "device")}


def distinct(path: Path, passes: list[slice]) -> int:
    """Experts that passes over these positions ask for."""
    found = choices(path)
    return sum(len({int(e) for e in found[positions, bank].flat}) for positions in passes for bank in range(BANKS))


@pytest.mark.parametrize(
    "config", [{}, {"weight_budget": "60%", "policy": "lru"}, {"capture": False}, {"prefill_chunk": 3}]
)
def test_a_run_replayed_from_its_own_trace_has_the_same_books(
    mixture: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    path = tmp_path / "t.json"
    full = asked(mixture, routing_out=str(path), config=config, generations=2, warmups=1)
    bare = planned(mixture, path, config=config, generations=2, warmups=1)
    assert booked(bare) == booked(full) and bare.facts == full.facts
    assert bare.result["equations"] == full.result["equations"] and not bare.broken_equations()
    assert {"M1", "M2", "M3"} <= {e["name"] for e in bare.result["equations"]}
    passes = TOKENS - 1 + -(-len(PROMPT) // config.get("prefill_chunk", 512))
    seams = BANKS * ("weight_budget" in config)  # a bank read by experts is waited for; else one copy brings all
    assert full.counters["routed_bytes"] > 0 and full.counters["host_syncs"] == 2 * passes * (1 + seams)


def test_a_trace_is_what_the_schema_says_and_what_was_routed(
    mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    route = moe.route

    def watched(*given: Any) -> Any:
        chosen, weights = route(*given)
        seen.append(chosen.tolist())
        return chosen, weights

    monkeypatch.setattr(moe, "route", watched)
    path = tmp_path / "t.json"
    assert asked(mixture, routing_out=str(path), config={"prefill_chunk": 1, "capture": False}).code == 0
    Draft202012Validator(SCHEMA).validate(json.loads(path.read_text()))
    positions = len(PROMPT) + TOKENS - 1
    assert choices(path).reshape(-1, CHOSEN).tolist() == seen and len(seen) == positions * BANKS
    assert np.unique(choices(path)).size > 4


def test_experts_are_counted_once_a_pass_however_many_tokens_choose_them(mixture: Path, trace: Path) -> None:
    steps = [slice(p, p + 1) for p in range(len(PROMPT), len(PROMPT) + TOKENS - 1)]
    for chunk, cut in ((512, [slice(0, 7)]), (3, [slice(0, 3), slice(3, 6), slice(6, 7)])):
        outcome = planned(mixture, trace, config={"prefill_chunk": chunk})
        assert outcome.counters["routed_experts"] == distinct(trace, [*cut, *steps])
    line = outcome.lines.of("generation")[0]
    by_phase = [line["counters"][p] for p in ("warm", "decode")]
    assert sum(c["routed_experts"] for c in by_phase) == (TOKENS - 1) * BANKS * CHOSEN
    assert sum(c["routed_bytes"] for c in by_phase) == (TOKENS - 1) * outcome.facts["routed_bytes_per_token"]


def test_one_tokens_experts_are_what_a_plan_says_that_arithmetic_needs(mixture: Path, trace: Path) -> None:
    facts = planned(mixture, trace).facts
    d = survey(lower(load(mixture), 1), Setting())["pass"]
    assert d["read_bytes"] == d["touched_bytes"] - facts["bank_bytes_per_step"] + facts["routed_bytes_per_token"]
    assert facts["bank_bytes_per_step"] == EXPERTS // CHOSEN * facts["routed_bytes_per_token"] > 0


def test_a_batch_asks_for_what_any_of_its_sequences_chose(mixture: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    words: dict[str, Any] = {"further_prompts": [[3, 5, 8]], "generations": 2}
    full = asked(mixture, routing_out=str(path), **words)
    bare = planned(mixture, path, **words)
    assert booked(bare) == booked(full) and not full.broken_equations()
    both = [choices(path, s)[n:] for s, n in ((0, len(PROMPT)), (1, 3))]
    steps = sum(
        len({int(e) for part in both for e in part[step, bank]}) for step in range(TOKENS - 1) for bank in range(BANKS)
    )
    line = full.lines.of("generation")[0]
    assert sum(line["counters"][p].get("routed_experts", 0) for p in ("warm", "decode")) == steps
    alone = tmp_path / "alone.json"
    assert asked(mixture, routing_out=str(alone)).code == 0
    np.testing.assert_array_equal(choices(path), choices(alone))


def test_a_seed_stands_in_for_a_trace(mixture: Path) -> None:
    one, again, other = (planned(mixture, f"seed:{n}") for n in (1, 1, 2))
    assert booked(one) == booked(again) and not one.broken_equations()
    assert one.counters["routed_experts"] != other.counters["routed_experts"]
    assert one.counters["routed_experts"] > TOKENS * BANKS * CHOSEN


def test_what_nobody_knows_is_missing_and_not_zero(mixture: Path, tmp_path: Path) -> None:
    bare = planned(mixture, None)
    assert not {"routed_experts", "routed_bytes"} & bare.counters.keys()
    assert not {"M1", "M2", "M3"} & {e["name"] for e in bare.result["equations"]}
    dense = run(build_tiny(tmp_path), arithmetic="none")
    assert dense.counters["routed_bytes"] == 0  # a model without experts asked for none


def test_a_hollow_folder_is_planned_with_a_whole_builds_trace(mixture: Path, trace: Path, tmp_path: Path) -> None:
    hollow = planned(built(tmp_path / "h", hollow=True), trace)
    assert booked(hollow) == booked(planned(mixture, trace))


def test_a_step_that_leaves_no_choice_ends_the_run(mixture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "route", lambda *_: (np.array([-1, -1]), np.ones(2)))
    failed = asked(mixture)
    assert failed.code == 16 and "no choice of experts" in failed.error["message"]


# -- refusals


def repacked(entry: dict[str, Any], change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    raw = np.frombuffer(zlib.decompress(base64.b64decode(entry["experts"])), "<u2").copy()
    entry["experts"] = base64.b64encode(zlib.compress(change(raw).astype("<u2").tobytes())).decode()


def out_of_range(d: dict[str, Any]) -> None:
    repacked(d["sequences"][0], lambda x: np.concatenate(([EXPERTS], x[1:])))


def chosen_twice(d: dict[str, Any]) -> None:
    repacked(d["sequences"][0], lambda x: np.concatenate((x[1:2], x[1:])))


def too_short(d: dict[str, Any]) -> None:
    repacked(d["sequences"][0], lambda x: x[:-1])


def too_long(d: dict[str, Any]) -> None:
    repacked(d["sequences"][0], lambda x: np.concatenate((x, x)))


def fewer_positions(d: dict[str, Any]) -> None:
    d["sequences"][0]["positions"] -= 1
    repacked(d["sequences"][0], lambda x: x[: -BANKS * CHOSEN])


DEFECTS: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.update(format="other"), "'other' version 1"),
    (lambda d: d.update(version=2), "version 2"),
    (lambda d: d.update(graph_sha256="0" * 64), "another model"),
    (lambda d: d.update(model_digest="0" * 64), "another model"),
    (lambda d: d["banks"][1].update(experts=9), "other steps, experts or choices"),
    (lambda d: d["banks"].pop(), "other steps, experts or choices"),
    (lambda d: d["sequences"].append(d["sequences"][0]), "has 2 sequences, the run has 1"),
    (lambda d: d["sequences"][0].update(prompt_sha256="0" * 64), "another prompt"),
    (lambda d: d["sequences"][0].update(experts="!"), "cannot be read"),
    *(
        (lambda d, n=n: d["sequences"][0].update(positions=n), f"has {n!r} positions of sequence 0")
        for n in (0, -1, 6.5, True, "6", None, 10**20, float("inf"))
    ),
    (lambda d: d["sequences"][0].update(experts=base64.b64encode(b"no zlib").decode()), "cannot be read"),
    (lambda d: d.pop("banks"), "cannot be read"),
    (fewer_positions, "has 11 positions of sequence 0, the run needs 12"),
    (too_short, "does not hold 12 positions of 8 experts"),
    (too_long, "does not hold 12 positions of 8 experts"),
    (out_of_range, "expert 8 of .* is not among its 8"),
    (chosen_twice, "chose an expert of .* twice"),
]


@pytest.mark.parametrize(("spoil", "says"), DEFECTS)
def test_a_trace_that_is_not_this_runs_is_refused(
    mixture: Path, trace: Path, tmp_path: Path, spoil: Callable[[dict[str, Any]], object], says: str
) -> None:
    document = json.loads(trace.read_text())
    spoil(document)
    path = tmp_path / "spoilt.json"
    path.write_text(json.dumps(document))
    refused = planned(mixture, path)
    assert refused.code == 10 and refused.error["remedy"]
    assert re.search(says, refused.error["message"]), refused.error


def test_more_tokens_or_another_prompt_than_were_recorded_are_refused(mixture: Path, trace: Path) -> None:
    assert planned(mixture, trace, tokens=TOKENS - 2).code == 0
    assert "the run needs 13" in planned(mixture, trace, tokens=TOKENS + 1).error["message"]
    assert "another prompt" in planned(mixture, trace, prompt_ids=[*PROMPT[:-1], 10]).error["message"]


def test_another_seeds_weights_are_another_model(trace: Path, tmp_path: Path) -> None:
    assert "another model" in planned(built(tmp_path / "other", seed=6), trace).error["message"]


@pytest.mark.parametrize("text", ["{", "[]", "null", "", "\udcff"])
def test_what_is_no_trace_is_refused(mixture: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    refused = planned(mixture, path)
    assert refused.code == 10 and "cannot be read" in refused.error["message"]


def test_what_cannot_be_asked(mixture: Path, trace: Path, tmp_path: Path) -> None:
    dense = build_tiny(tmp_path)
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (mixture, {"arithmetic": "none", "routing": "seed:x"}, "nine digits"),
        (mixture, {"arithmetic": "none", "routing": str(tmp_path / "gone.json")}, "cannot be read"),
        (mixture, {"routing_out": str(tmp_path / "no" / "t.json")}, "does not exist"),
        (mixture, {"routing_out": str(tmp_path)}, "cannot be written"),
        (dense, {"arithmetic": "none", "routing": "seed:1"}, "no mixture of experts"),
        (dense, {"routing_out": str(tmp_path / "t.json")}, "no mixture of experts"),
    ]
    for model, words, says in cases:
        refused = asked(model, **words)
        assert refused.code == 10
        assert says in refused.error["message"] + refused.error["remedy"], refused.error
    assert not (tmp_path / "t.json").exists()
