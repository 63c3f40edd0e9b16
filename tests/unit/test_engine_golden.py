"""Graphs as the exporter writes them: logits against its own numbers, and what is not served refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import UnsupportedModel
from engine.lower import lower
from engine.onnx_load import load
from tests.unit.engine_rig import Bench

# Largest difference that onnxruntime itself has in the graph's own precision; None: its float32 numbers are the graph's
# meaning (the -cpu int4 graph lets a runtime round activations to int8, which this engine does not do), or it has none.
OWN: dict[str, float | None] = {
    "llama-fp32-cpu": None,
    "llama-int4-cpu": None,
    "llama-bf16-cuda": None,
    "llama-int4-cuda": 0.0065,
    "llama-int4-asym-cuda": 0.0072,
    "llama-tied-int4-cuda": 0.0189,
    "qwen2-int4-cuda": 0.0064,
    "phi3-int4-cuda": 0.0069,
}
REFUSED = {
    "qwen3-int4-cuda": {"ai.onnx::Split"},
    "qwen3-int4-nofuseqk-cuda": {"ai.onnx::Split"},
    "phi-int4-cpu": {"ai.onnx::LayerNormalization", "ai.onnx::Gelu", "com.microsoft::SkipLayerNormalization"},
    "gemma2-int4-cpu": {"ai.onnx::Gelu", "ai.onnx::Div", "ai.onnx::Tanh"},
    "qwen35-int4-cuda": {
        *(f"ai.onnx::{n}" for n in ("Transpose", "Split", "LpNormalization")),
        *(f"com.microsoft::{n}" for n in ("CausalConvWithState", "LinearAttentionGate", "LinearAttention")),
        *(f"com.microsoft::{n}" for n in ("GatedRMSNorm", "MRotaryEmbedding")),
    },
}
REFUSED["qwen35moe-int4raw-cuda"] = REFUSED["qwen35-int4-cuda"] | {"com.microsoft::QMoE", "com.microsoft::GatedAdd"}
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def samples(checkout: Path) -> Path:
    """The folder of exporter-written models beside the checkout."""
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return folder


def tolerance(name: str, golden: Logits) -> float:
    """How far a logit may be off: in float32 2e-4 of the largest, in the graph's precision about twice a runtime's."""
    scale = float(np.abs(golden).max())
    own = OWN[name]
    if name.endswith("bf16-cuda"):
        return 0.02 * scale
    return 2e-4 * scale if own is None else max(2 * own, 2e-4 * scale)


def forced(bench: Bench, prompt: list[int], following: list[int], chunk: int) -> Logits:
    """Logits after the prompt, then after each forced id."""
    bench.prefill(prompt, chunk)
    last = len(prompt) % chunk or min(chunk, len(prompt))
    rows = [bench.prompt_logits(last)]
    for token in following:
        bench.force(token)
        rows.append(bench.logits())
    return np.stack(rows)


def test_the_samples_are_all_listed(samples: Path) -> None:
    assert {p.name for p in samples.iterdir() if p.is_dir()} == OWN.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", OWN)
def test_forced_logits_after_a_prompt_in_one_call(samples: Path, name: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt, following = golden["prompt_ids"].tolist(), golden["forced_ids"].tolist()
    bench = Bench(samples / name, rows=(len(prompt),), budget=None)
    found = forced(bench, prompt, following, len(prompt))
    expected = golden["logits"][len(prompt) - 1 :]
    assert np.abs(found - expected).max() <= tolerance(name, golden["logits"])


@pytest.mark.parametrize("name", OWN)
def test_logits_of_every_prompt_row_come_one_at_a_time(samples: Path, name: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt = golden["prompt_ids"].tolist()
    bench = Bench(samples / name)
    found = forced(bench, prompt[:1], prompt[1:], 1)
    assert np.abs(found - golden["logits"][: len(prompt)]).max() <= tolerance(name, golden["logits"])


@pytest.mark.parametrize("name", OWN)
def test_a_prompt_longer_than_every_window(samples: Path, name: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt, following = golden["long_prompt_ids"].tolist(), golden["long_forced_ids"].tolist()
    bench = Bench(samples / name, rows=(len(prompt),))
    found = forced(bench, prompt, following, len(prompt))
    assert np.abs(found - golden["long_logits"]).max() <= tolerance(name, golden["long_logits"])


@pytest.mark.parametrize("name", OWN)
def test_free_running_ids_up_to_the_first_small_gap(samples: Path, name: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt, limit = golden["prompt_ids"].tolist(), 3 * tolerance(name, golden["logits"])
    small = np.flatnonzero(golden["greedy_gap"] < limit)
    clear = int(small[0]) if small.size else len(golden["greedy_ids"])
    bench = Bench(samples / name, rows=(len(prompt),))
    emitted = [bench.prefill(prompt)] + [bench.decoder.step() for _ in range(clear - 1)]
    assert [e.token for e in emitted][:clear] == golden["greedy_ids"][:clear].tolist()
    gaps = np.array([e.gap for e in emitted][:clear])
    assert np.abs(gaps - golden["greedy_gap"][:clear]).max(initial=0) <= 2 * tolerance(name, golden["logits"])


@pytest.mark.parametrize("name", OWN)
def test_one_call_and_many_give_the_same_bits(samples: Path, name: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt, following = golden["prompt_ids"].tolist(), golden["forced_ids"].tolist()[:4]
    whole = forced(Bench(samples / name, rows=(20,)), prompt, following, 20)
    for chunk, rows in ((7, (7, 6)), (1, (1,))):
        parts = forced(Bench(samples / name, rows=rows), prompt, following, chunk)
        assert parts.tobytes() == whole.tobytes(), f"chunks of {chunk}"


def test_tied_weights_are_one_key_and_the_gather_reads_them_in_place(samples: Path) -> None:
    plan = lower(load(samples / "llama-tied-int4-cuda"), 1)
    head = next(s for s in plan.steps if s.kernel == "matmul_nbits" and s.index > len(plan.steps) - 5)
    gathered = next(s for s in plan.steps if s.kernel == "gather_block_quantized")
    table = next(o.ref for o in gathered.operands if o.name == "table")
    assert table.kind == "host"
    assert table.name in {plan.keys[k].name for k in head.keys}, "one initialiser, two readers"
    assert sum(k.name == table.name for k in plan.keys) == 1
    row_bytes = 128 // 2 + 128 // 32 * 2
    assert gathered.gather_bytes == plan.gather_bytes == row_bytes
    assert lower(load(samples / "llama-tied-int4-cuda"), 7).gather_bytes == 7 * row_bytes


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name_all_at_once(samples: Path, name: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        lower(load(samples / name), 1)
    named = {match[1] for r in caught.value.reasons if (match := re.search(r"\(([\w.]+::\w+)\): operator is not", r))}
    assert named == REFUSED[name]
    assert len(caught.value.reasons) >= len(named)
    assert sorted(named)[0].split("::")[0] in caught.value.message and caught.value.remedy
