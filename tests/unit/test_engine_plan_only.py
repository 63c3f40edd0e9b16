"""Runs without arithmetic: the books are those of a full run, and nothing in them can pass for tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

import engine
from engine.__main__ import main
from engine.config import POLICIES, parse_request
from engine.counters import COUNTERS
from engine.device.plan_only import PlanDevice
from engine.errors import BadRequest, DeviceFailure
from engine.onnx_load import load
from tests.unit.engine_rig import TINY_PROMPT, Bench, Outcome, build_tiny, over_the_link, request, run

G = 4096
EXPORTED = Path(__file__).parents[3] / "shared" / "models"
SAMPLES = ("qwen2-int4-cuda", "llama-tied-int4-cuda", "qwen35moe-int4raw-cuda", "gemma2-int4-cpu")
LINES = Draft202012Validator(json.loads((Path(engine.__file__).parent / "schemas" / "lines.json").read_text()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("plan-only"))


def both(model: Path, **changes: Any) -> tuple[Outcome, Outcome]:
    """A request in full, and without arithmetic."""
    return tuple(run(model, ignore_eos=True, arithmetic=how, **changes) for how in ("full", "none"))  # type: ignore[return-value]


def booked(outcome: Outcome) -> dict[str, Any]:
    """All that a run counted, but for times of its own and margins."""
    kept = {name: value for name, value in outcome.counters.items() if COUNTERS[name].scope in ("plan", "device")}
    assert {"touches", "hits", "page_ins", "modelled_ns", "kernel_runs", "vmm_calls"} <= kept.keys()
    return kept


def phases(outcome: Outcome) -> list[dict[str, Any]]:
    """The same by generation and phase."""
    return [
        {
            phase: {n: v for n, v in counters.items() if COUNTERS[n].scope in ("plan", "device")}
            for phase, counters in line["counters"].items()
        }
        for line in outcome.lines.of("generation")
    ]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("budget", [None, "60%"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_books_are_a_full_runs(tiny: Path, policy: str, budget: str | None, capture: bool) -> None:
    config = {"policy": policy, "weight_budget": budget, "capture": capture, "granule": G}
    full, bare = both(tiny, config=config, generations=2, warmups=1)
    assert booked(bare) == booked(full)
    assert phases(bare) == phases(full)
    assert bare.facts == full.facts
    for part in ("keys", "seams", "equations"):
        assert bare.result[part] == full.result[part]
    assert not bare.broken_equations()
    assert bool(over_the_link(bare.counters)) == (budget is not None)


@pytest.mark.parametrize("budget", [None, "60%"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_books_are_a_full_runs_for_other_families(sample: str, budget: str | None, tmp_path: Path) -> None:
    if not (EXPORTED / sample).is_dir():
        pytest.skip("skipped: no ../shared/models")
    words = {"prompt_ids": [3, 5, 8, 13, 21], "tokens": 6, "ignore_eos": True}
    words["config"] = {"policy": "lru", "weight_budget": budget, "granule": 16384}
    trace = str(tmp_path / "routing.json") if "moe" in sample else None
    full = run(EXPORTED / sample, routing_out=trace, **words)
    bare = run(EXPORTED / sample, arithmetic="none", routing=trace, **words)
    assert booked(bare) == booked(full)
    assert phases(bare) == phases(full)
    assert not bare.broken_equations()


def test_there_is_nothing_to_compare(tiny: Path) -> None:
    _, bare = both(tiny, generations=2)
    for line in bare.lines.lines:
        LINES.validate(line)
    for line in bare.lines.of("generation"):
        assert (line["ids"], line["gaps"], line["stop_reason"]) == ([], [], None)
        assert len(line["step_ns"]) == 7
    assert "min_logit_margin" not in bare.counters
    assert bare.counters["emitted_tokens"] == 2 * 8
    assert bare.lines.of("hello")[0]["device"]["kind"] == "plan"


def test_a_stop_id_stops_nothing(tiny: Path) -> None:
    eos = load(tiny).info.eos_ids
    bare = run(tiny, prompt_ids=[*eos, *eos], arithmetic="none", tokens=5)
    assert len(bare.lines.of("generation")[0]["step_ns"]) == 4


def test_the_text_says_so(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "--plan-only", "--model", str(tiny), "--prompt-ids", "1 17", "--tokens", "3"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "plan only: nothing was computed" in printed and "generated_token_ids" not in printed


def test_an_error_has_no_tokens_either(tiny: Path) -> None:
    refused = run(tiny, arithmetic="none", config={"weight_budget": 1000})
    assert refused.code == 13 and refused.error["ids"] == []


@pytest.mark.parametrize(
    "change", [{"arithmetic": "some"}, {"arithmetic": None}, {"arithmetic": "none", "device": "cuda"}]
)
def test_what_cannot_be_asked(tiny: Path, change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        parse_request(request(tiny, **change))


# -- the device


def bench(model: Path, **more: Any) -> Bench:
    """A run's parts on the device without bytes."""
    return Bench(model, device=PlanDevice(granule_bytes=G), rows=(1, len(TINY_PROMPT)), **more)


@pytest.mark.parametrize("capture", [True, False])
def test_a_key_that_is_not_there_whole_ends_the_run(tiny: Path, capture: bool) -> None:
    b = bench(tiny, capture=capture)
    b.prefill(TINY_PROMPT)
    for _ in range(3):
        b.step()
    name = "model.layers.1.mlp.up_proj.MatMul.weight_Q4"
    b.device.poison(b.key_address(name) + 5, 1)
    with pytest.raises(DeviceFailure, match=r"layers\.1/mlp/up_proj.*nothing whole"):
        b.step()


def test_another_keys_bytes_are_not_that_key(tiny: Path) -> None:
    b = bench(tiny)
    b.prefill(TINY_PROMPT)
    up, gate = (f"model.layers.0.mlp.{n}_proj.MatMul.weight_Q4" for n in ("up", "gate"))
    b.device.copy_in(b.key_address(up), b.plan.keys[b.key(gate)].weight.data)
    with pytest.raises(DeviceFailure, match=f"key {b.key(up)} is read where there is key {b.key(gate)}"):
        b.step()


def test_the_cache_must_be_committed_as_far_as_it_is_read(tiny: Path) -> None:
    b = bench(tiny)
    b.prefill(TINY_PROMPT)
    b.device.copy_in(b.decoder.memory.control, np.asarray([100], np.int64))  # as if so many positions had been cached
    with pytest.raises(DeviceFailure, match=r"cache of .* unmapped"):
        b.step()


def test_lengths_are_kept_and_bytes_are_not(tiny: Path) -> None:
    b = bench(tiny)
    b.prefill(TINY_PROMPT)
    assert (b.step().token, b.length()) == (0, len(TINY_PROMPT) + 1)
    with pytest.raises(DeviceFailure, match="has no bytes"):
        b.logits()
