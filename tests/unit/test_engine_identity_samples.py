"""A dense, a hybrid and an experts' decoder of the exporter: no bit of a logit feels how weights or prompt come in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

from engine.config import POLICIES
from engine.graph import Graph
from engine.onnx_load import load
from engine.paging.arena import minimum_budget
from tests.unit.engine_rig import Bench, over_the_link

SAMPLES = {"dense": "qwen3-int4-cuda", "hybrid": "qwen35-int4-cuda", "experts": "qwen35moe-int4raw-cuda"}
PROMPT_TOKENS, STEPS = 11, 5
CHUNKS = (PROMPT_TOKENS, 4, 1)
ROWS = (PROMPT_TOKENS, 4, 3)
GRANULES = (4096, 65536)
Trace = list[tuple[int, float, bytes]]


@pytest.fixture(scope="module", params=SAMPLES)
def graph(request: pytest.FixtureRequest, checkout: Path) -> Graph:
    """One of the sample models, loaded once."""
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return load(folder / SAMPLES[request.param])


@pytest.fixture(scope="module")
def prompt(graph: Graph) -> list[int]:
    """Ids that repeat none, from all over the vocabulary."""
    drawn = np.random.default_rng(7).choice(graph.info.vocabulary, PROMPT_TOKENS, replace=False)
    return [int(i) for i in drawn]


def traces(bench: Bench, prompt: list[int], chunks: Sequence[int]) -> list[Trace]:
    """One generation a chunk size: id, gap and the bytes of the logits of every token."""
    found = []
    for chunk in chunks:
        emitted = bench.prefill(prompt, chunk)
        one = [(emitted.token, emitted.gap, bench.prompt_logits(len(prompt) % chunk or chunk).tobytes())]
        for _ in range(STEPS):
            emitted = bench.step()
            one.append((emitted.token, emitted.gap, bench.logits().tobytes()))
        found.append(one)
    return found


@pytest.fixture(scope="module")
def resident(graph: Graph, prompt: list[int]) -> Trace:
    """What everything is held against: all weights in, no capture, the prompt in one call, one generation."""
    return traces(Bench(graph, capture=False, rows=ROWS), prompt, CHUNKS[:1])[0]


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("granule", GRANULES)
def test_a_resident_model_in_every_generation_and_chunk(
    graph: Graph, prompt: list[int], resident: Trace, granule: int, capture: bool
) -> None:
    bench = Bench(graph, capture=capture, granule=granule, rows=ROWS)
    assert traces(bench, prompt, [*CHUNKS[:1] * 3, *CHUNKS]) == [resident] * 6


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("granule", GRANULES)
@pytest.mark.parametrize("policy", POLICIES)
def test_half_the_weights_under_every_policy(
    graph: Graph, prompt: list[int], resident: Trace, policy: str, granule: int, capture: bool
) -> None:
    """Three generations; which one takes the prompt whole, in fours or one by one turns with the policy."""
    plan = Bench(graph).plan
    budget = max(plan.weight_bytes // 2, minimum_budget(plan, granule))
    bench = Bench(graph, budget=budget, policy=policy, capture=capture, granule=granule, rows=ROWS)
    turns = cycle(CHUNKS)
    for _ in range(POLICIES.index(policy)):
        next(turns)
    assert traces(bench, prompt, [next(turns) for _ in range(3)]) == [resident] * 3
    assert over_the_link(bench.tally.read()) > 0, "a run that pages nothing in proves nothing"
    bench.close()


def test_a_state_that_outlives_its_sequence_would_show(graph: Graph, prompt: list[int], resident: Trace) -> None:
    """What a reset must clear: with one state left as the first generation left it, the second one differs."""
    first = Bench(graph, rows=ROWS)
    assert traces(first, prompt, CHUNKS[:1])[0] == resident
    assert bool(first.plan.states) == bool(graph.info.states)
    for index, spec in enumerate(first.plan.states):
        bench = Bench(graph, rows=ROWS)
        traces(bench, prompt, CHUNKS[:1])
        left = bench.device.copy_out(bench.decoder.memory.states[index], spec.nbytes)
        assert any(left), f"{spec.name} was never written"
        bench.decoder.reset()
        assert not any(bench.device.copy_out(bench.decoder.memory.states[index], spec.nbytes)), (
            f"{spec.name} is not cleared"
        )
        bench.device.copy_in(bench.decoder.memory.states[index], np.frombuffer(left, np.uint8).copy())
        bench.decoder.prefill([prompt], PROMPT_TOKENS)
        assert bench.prompt_logits(PROMPT_TOKENS).tobytes() != resident[0][2], f"{spec.name} is not felt"
