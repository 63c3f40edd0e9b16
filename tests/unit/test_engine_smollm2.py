"""The real model on the simulated device: the agreed ids under every way of holding its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.config import POLICIES
from engine.errors import NonFiniteLogits
from engine.onnx_load import load
from tests.unit.engine_child import parent
from tests.unit.engine_rig import COPYING, FRANCE_GREEDY, FRANCE_IDS, Bench, Outcome, over_the_link, run, smollm2

W = 111_617_280
LARGEST = 28_311_552
GRANULE = 2 << 20
PEAK_BYTES = 1_200_000_000
PAIRWISE = [
    {},
    {"capture": False},
    *(
        {"weight_budget": share, "policy": policy, "capture": (row + column) % 2 == 0}
        for row, share in enumerate(("75%", "50%", "35%"))
        for column, policy in enumerate(POLICIES)
    ),
]
"""Every budget with every policy, each budget and each policy with capture on and off."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as the zoo builds it."""
    return smollm2(tmp_path_factory.mktemp("smollm2"))


def capital(model: Path, **changes: Any) -> Outcome:
    """A run of "The capital of France is", the end id ignored unless asked otherwise."""
    return run(model, **{"prompt_ids": list(FRANCE_IDS), "ignore_eos": True, **changes})


@pytest.mark.parametrize("config", PAIRWISE, ids=lambda c: "-".join(map(str, c.values())) or "resident")
def test_eight_ids(model: Path, config: dict[str, Any]) -> None:
    outcome = capital(model, tokens=8, config=config)
    assert outcome.streams[0][0] == list(FRANCE_GREEDY[:8])
    assert outcome.broken_equations() == []
    assert (over_the_link(outcome.counters) > 0) == ("weight_budget" in config), "what streams must have streamed"
    if config.get("capture", True):
        assert outcome.counters["captures"] == 1 and outcome.counters["replays"] == 5


def test_staging_at_half_is_one_segment_and_streams_less_than_stable(model: Path) -> None:
    stable, staging = (
        capital(model, tokens=4, config={"weight_budget": "50%", "policy": p}) for p in ("stable", "staging")
    )
    assert staging.streams == stable.streams
    assert staging.counters["segments"] == 1 < stable.counters["segments"]
    assert staging.counters["htod_bytes"] < stable.counters["htod_bytes"]
    assert staging.counters["vmm_calls_steady"] == 0 < stable.counters["vmm_calls_steady"]
    f = staging.facts
    assert f["staged_bytes_per_step"] <= W - f["capacity_bytes"] + f["ring_bytes"]


def test_facts_of_the_real_model(model: Path) -> None:
    facts = capital(model, tokens=1).facts
    assert (facts["weight_bytes"], facts["largest_key_bytes"]) == (W, LARGEST)
    assert facts["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    assert facts["largest_key"] == "lm_head.MatMul.weight_Q8"


@pytest.mark.parametrize("policy", COPYING)
def test_a_quarter_is_below_the_largest_key_and_refused_with_both_numbers(model: Path, policy: str) -> None:
    outcome = capital(model, config={"weight_budget": "25%", "policy": policy})
    assert outcome.code == 13
    message = outcome.error["message"]
    assert str(W // 4) in message and str(LARGEST) in message and "lm_head.MatMul.weight_Q8" in message
    assert str(16 * GRANULE) in outcome.error["remedy"], "the head's codes and scales, as they lie in whole granules"


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"weight_budget": "50%", "policy": "stable"}], ids=["resident", "half"])
def test_32_ids_with_the_end_id_ignored(model: Path, config: dict[str, Any]) -> None:
    outcome = capital(model, tokens=32, generations=2, config=config)
    for ids, gaps in outcome.streams:
        assert ids == list(FRANCE_GREEDY)
        assert min(gaps) == pytest.approx(0.051, abs=0.002) and gaps.index(min(gaps)) == 24, "the 25th token"
    assert [g["stop_reason"] for g in outcome.lines.of("generation")] == ["length", "length"]


@pytest.mark.slow
def test_the_end_id_honoured_ends_after_30(model: Path) -> None:
    outcome = capital(model, tokens=32, ignore_eos=False, generations=2)
    for generation in outcome.lines.of("generation"):
        assert generation["ids"] == list(FRANCE_GREEDY[:30])
        assert generation["stop_reason"] == "eos" and len(generation["step_ns"]) == 29
    assert outcome.facts["measured_tokens"] == 60


@pytest.mark.slow
def test_c1_256_tokens_after_a_prompt_of_one(model: Path) -> None:
    counters = capital(model, prompt_ids=[504], tokens=256).counters
    parts = [counters[n] for n in ("warm_steps", "captures", "replays", "fallbacks", "decode_steps")]
    assert parts == [1, 1, 254, 0, 256]


@pytest.mark.slow
def test_logits_are_the_same_bits_at_half_the_weights(model: Path) -> None:
    graph = load(model)
    rows = (len(FRANCE_IDS),)
    whole = Bench(graph, rows=rows, granule=GRANULE)
    half = [Bench(graph, rows=rows, granule=GRANULE, budget=W // 2, policy=p) for p in ("lru", "stable_slot")]
    for bench in (whole, *half):
        bench.prefill(FRANCE_IDS)
    for _ in range(6):
        expected = (whole.step(), whole.logits().tobytes())
        for bench in half:
            assert (bench.step(), bench.logits().tobytes()) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.layers.7.mlp.gate_proj", "model.layers.20.attn.q_proj"])
def test_poison_behind_a_decoded_key_changes_the_tokens(model: Path, name: str) -> None:
    """Codes alone, so that the numbers stay finite; or the run ends for numbers that are not."""
    bench = Bench(model, rows=(len(FRANCE_IDS),), granule=GRANULE)
    bench.prefill(FRANCE_IDS)
    bench.step()
    before = bench.logits()
    key = f"{name}.MatMul.weight_Q4"
    bench.device.fill(bench.key_address(key), bench.plan.keys[bench.key(key)].nbytes, 0xFF)
    try:
        ids = [bench.step().token for _ in range(6)]
    except NonFiniteLogits:
        return
    assert ids != list(FRANCE_GREEDY[2:8])
    assert not np.array_equal(bench.logits(), before)


@pytest.mark.slow
@pytest.mark.parametrize("config", [{}, {"weight_budget": "50%", "policy": "stable"}], ids=["resident", "half"])
def test_a_child_stays_below_its_memory(model: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    document = {"protocol": 1, "model": str(model), "prompt_ids": list(FRANCE_IDS), "tokens": 8, "config": config}
    ended = parent(tmp_path, {**document, "ignore_eos": True})
    assert ended.code == 0
    assert ended.last()["peak_rss_bytes"] < PEAK_BYTES
