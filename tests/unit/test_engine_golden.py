"""Graphs as the exporter writes them: logits against its own numbers, in the graph's precision and in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.bind import lower
from engine.graph import Graph
from engine.onnx_load import load
from tests.unit.engine_rig import Bench

# Largest difference that onnxruntime itself has in the graph's own precision; None: it has no kernel for it. The -cpu
# graphs let a runtime round activations to int8 or are float32: this engine rounds nothing there.
OWN: dict[str, float | None] = {
    "llama-fp32-cpu": 0.0,
    "llama-int4-cpu": 0.1079,
    "llama-bf16-cuda": None,
    "llama-int4-cuda": 0.0065,
    "llama-int4-asym-cuda": 0.0072,
    "llama-tied-int4-cuda": 0.0189,
    "qwen2-int4-cuda": 0.0064,
    "qwen3-int4-cuda": None,
    "qwen3-int4-nofuseqk-cuda": 0.0238,
    "phi3-int4-cuda": 0.0069,
    "phi-int4-cpu": 0.0610,
    "gemma2-int4-cpu": 0.1328,
    "qwen35-int4-cuda": 0.0345,
    "qwen35moe-int4raw-cuda": 0.0438,
}
EXPERTS = ("qwen35moe-int4raw-cuda",)
FORMS = ("own", "float32")
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def samples(checkout: Path) -> Path:
    """The folder of exporter-written models beside the checkout."""
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return folder


def tolerance(name: str, form: str, golden: Logits) -> float:
    """How far a logit may be off: in float32 2e-4 of the largest, in the graph's precision twice a runtime's."""
    scale, own = float(np.abs(golden).max()), OWN[name]
    if form == "float32" or name.endswith("-cpu"):
        return 2e-4 * scale
    return 0.02 * scale if own is None else max(2 * own, 2e-4 * scale)


def check(name: str, form: str, found: Logits, golden: Logits) -> None:
    """Every row within the tolerance; with experts three rows in four, as a near tie between two moves a whole row."""
    assert found.shape == golden.shape
    off = np.abs(found - golden).max(axis=1)
    near = float((off <= tolerance(name, form, golden)).mean())  # not a number is not near
    assert near >= (0.75 if name in EXPERTS else 1.0), off


def sample(samples: Path, name: str, form: str) -> Graph:
    """A model in its own precision, or with its cache in float32, where no half type is left to round to."""
    graph = load(samples / name)
    if form == "own":
        return graph
    past = {n: v for n, v in graph.inputs.items() if n.startswith("past") and v.dtype in ("float16", "bfloat16")}
    wide = {n: dataclasses.replace(v, dtype="float32") for n, v in past.items()}
    return dataclasses.replace(graph, inputs={**graph.inputs, **wide})


def forced(bench: Bench, prompt: list[int], following: list[int], chunk: int) -> Logits:
    """Logits of every row of the last chunk that the bench keeps, then after each forced id."""
    bench.prefill(prompt, chunk)
    last = len(prompt) % chunk or min(chunk, len(prompt))
    rows = [bench.all_logits(last)]
    for token in following:
        bench.force(token)
        rows.append(bench.logits()[None])
    return np.concatenate(rows)


def test_the_samples_are_all_listed(samples: Path) -> None:
    assert {p.name for p in samples.iterdir() if p.is_dir()} == OWN.keys()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OWN)
def test_every_row_of_a_prompt_in_one_call_and_of_forced_ids(samples: Path, name: str, form: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt, following = golden["prompt_ids"].tolist(), golden["forced_ids"].tolist()
    bench = Bench(sample(samples, name, form), rows=(len(prompt),), all_logits=True)
    check(name, form, forced(bench, prompt, following, len(prompt)), golden["logits"])


@pytest.mark.parametrize("name", OWN)
def test_every_row_of_a_prompt_one_at_a_time(samples: Path, name: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt = golden["prompt_ids"].tolist()
    found = forced(Bench(samples / name), prompt[:1], prompt[1:], 1)
    check(name, "own", found, golden["logits"][: len(prompt)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OWN)
def test_a_prompt_longer_than_every_window(samples: Path, name: str, form: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt, following = golden["long_prompt_ids"].tolist(), golden["long_forced_ids"].tolist()
    bench = Bench(sample(samples, name, form), rows=(len(prompt),))
    check(name, form, forced(bench, prompt, following, len(prompt)), golden["long_logits"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OWN)
def test_free_running_ids_up_to_the_first_small_gap(samples: Path, name: str, form: str) -> None:
    golden = np.load(samples / name / "golden.npz")
    prompt, limit = golden["prompt_ids"].tolist(), tolerance(name, form, golden["logits"])
    small = np.flatnonzero(golden["greedy_gap"] < limit)
    clear = int(small[0]) if small.size else len(golden["greedy_ids"])
    assert clear > 0, "a first gap below the tolerance would leave nothing to compare"
    bench = Bench(sample(samples, name, form), rows=(len(prompt),))
    emitted = [bench.prefill(prompt)] + [bench.step() for _ in range(clear - 1)]
    assert [e.token for e in emitted] == golden["greedy_ids"][:clear].tolist()
    gaps = np.array([e.gap for e in emitted])
    assert np.abs(gaps - golden["greedy_gap"][:clear]).max() <= 2 * limit


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
