"""Layouts and growth change no bit of any logit, with capture or without, under a budget, in chunks, in generations."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine.graph import Graph
from engine.kv_layout import LAYOUTS
from engine.onnx_load import load
from engine.paging.arena import minimum_budget
from tests.unit.engine_rig import Bench, build_tiny

SAMPLES = ("tiny", "qwen3-int4-cuda", "gemma2-int4-cpu", "qwen35-int4-cuda")
"""Float32, float16 and (gemma) a sliding window; the last one has states beside its caches."""
PROMPT_TOKENS, STEPS = 9, 14
CHUNKS = (PROMPT_TOKENS, 4, 1)
ROWS = (PROMPT_TOKENS, 4)
Trace = list[tuple[int, float, bytes]]


@pytest.fixture(scope="module", params=SAMPLES)
def graph(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """The seeded model and exported ones, loaded once."""
    if request.param == "tiny":
        return load(build_tiny(tmp_path_factory.mktemp("kv-identity")))
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return load(folder / request.param)


@pytest.fixture(scope="module")
def prompt(graph: Graph) -> list[int]:
    """Ids that repeat none, from all over the vocabulary."""
    drawn = np.random.default_rng(11).choice(graph.info.vocabulary, PROMPT_TOKENS, replace=False)
    return [int(i) for i in drawn]


def trace(bench: Bench, prompt: list[int], chunk: int) -> Trace:
    """Id, gap and the bytes of the logits of every token of one generation."""
    emitted = bench.prefill(prompt, chunk)
    one = [(emitted.token, emitted.gap, bench.prompt_logits(len(prompt) % chunk or chunk).tobytes())]
    for _ in range(STEPS):
        emitted = bench.step()
        one.append((emitted.token, emitted.gap, bench.logits().tobytes()))
    return one


@pytest.fixture(scope="module")
def resident(graph: Graph, prompt: list[int]) -> Trace:
    """What everything is held against: positions first, one bucket, all weights in, no capture, the prompt whole."""
    return trace(Bench(graph, capture=False, rows=ROWS), prompt, PROMPT_TOKENS)


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_growth_capture_budget_chunks_and_generations(
    graph: Graph, prompt: list[int], resident: Trace, layout: str, half: bool, capture: bool
) -> None:
    """Two generations that grow through 9 to 23 positions: buckets of 1 (up to 32) and of 16, and no growth."""
    for granule, (least, most) in product((4096, 65536) if half else (4096,), ((1, 32), (16, 27), (64, 64))):
        budget = None
        if half:
            plan = Bench(graph).plan
            budget = max(plan.weight_bytes // 2, minimum_budget(plan, granule))
        bench = Bench(
            graph, budget=budget, capture=capture, granule=granule, rows=ROWS, layout=layout, least=least, capacity=most
        )
        for chunk in (CHUNKS[least % 3], CHUNKS[(least + 1) % 3]):
            assert trace(bench, prompt, chunk) == resident, (granule, least, chunk)
        read = bench.tally.read()
        assert read["kv_growths"] == 2 * {1: 1, 16: 1, 64: 0}[least]
        assert bool(read["kv_growth_dtod_bytes" if layout == "head-major" else "kv_growths"]) == (least < 64)
        assert (read.get("page_ins", 0) > 0) is half
        bench.close()
        assert bench.device.mapped_bytes == 0
