"""Every exported sample, in ragged batches: no bit of a logit feels layout, capture, residency, chunk or turn."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from engine.batch import chunk_rows
from engine.config import POLICIES
from engine.graph import Graph
from engine.kv_layout import LAYOUTS
from engine.onnx_load import load
from engine.paging.arena import minimum_budget
from tests.unit.engine_rig import Bench, over_the_link, traces
from tests.unit.test_engine_golden import OWN

LENGTHS = (1, 5, 20, 12)
"""Prompts of a batch: the longest passes the window of 16 that some of the models have."""
STEPS, GENERATIONS = 5, 3
GRANULES = (4096, 16384, 65536)
CHUNKS = (max(LENGTHS), 8, 1)
LEAST_BUCKETS = (8, 64)
"""The first grows in the prompt and while it decodes, the second never."""


@pytest.fixture(scope="module", params=OWN)
def graph(request: pytest.FixtureRequest, checkout: Path) -> Graph:
    """One of the sample models, loaded once."""
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return load(folder / request.param)


def ragged(vocabulary: int) -> list[list[int]]:
    """Prompts of these lengths, from all over the vocabulary."""
    drawn = np.random.default_rng(3)
    return [[int(i) for i in drawn.integers(0, vocabulary, n)] for n in LENGTHS]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_bit_feels_layout_capture_residency_policy_granule_growth_chunk_batch_or_generation(graph: Graph) -> None:
    """Each layout, capture and residency (all in, or half under each policy); the other factors take turns."""
    prompts = ragged(graph.info.vocabulary)
    whole = {n for p in prompts for n in chunk_rows([p], max(LENGTHS))}
    single = Bench(graph, capture=False, rows=sorted(whole))
    expected = [traces(single, [prompt], max(LENGTHS), STEPS)[0] for prompt in prompts]
    cases = product(LAYOUTS, (True, False), (None, *POLICIES))
    for turn, (layout, capture, policy) in enumerate(cases):
        granule, chunk = GRANULES[turn % len(GRANULES)], CHUNKS[turn // 2 % len(CHUNKS)]
        least = LEAST_BUCKETS[turn // 3 % len(LEAST_BUCKETS)]
        budget = max(single.plan.weight_bytes // 2, minimum_budget(single.plan, granule)) if policy else None
        bench = Bench(
            graph,
            budget=budget,
            policy=policy or "stable",
            capture=capture,
            rows=sorted(chunk_rows(prompts, chunk)),
            granule=granule,
            layout=layout,
            least=least,
            sequences=len(prompts),
        )
        for generation in range(GENERATIONS):
            found = traces(bench, prompts, chunk, STEPS)
            assert found == expected, (layout, capture, policy, granule, chunk, least, generation)
        assert bool(over_the_link(bench.tally.read())) == (policy is not None)
        bench.close()
