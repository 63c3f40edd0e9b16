"""One list of numbers: residency, policy, capture, chunks, cache size and generation change no bit of any logit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

import engine
from engine.config import POLICIES
from engine.graph import Graph
from engine.onnx_load import load
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny, over_the_link, run

STEPS = 10
SHARES = (75, 50, 35)
Trace = list[tuple[int, float, bytes]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """The seeded model, loaded once."""
    return load(build_tiny(tmp_path_factory.mktemp("identity")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a folder."""
    return build_tiny(tmp_path_factory.mktemp("identity-folder"))


def trace(bench: Bench, generations: int = 1, chunk: int = 512, prompt: tuple[int, ...] = TINY_PROMPT) -> list[Trace]:
    """Id, gap and the bytes of the logits of every token, generation by generation."""
    found = []
    for _ in range(generations):
        emitted = bench.prefill(prompt, chunk)
        rows = len(prompt) % chunk or min(chunk, len(prompt))
        one = [(emitted.token, emitted.gap, bench.prompt_logits(rows).tobytes())]
        for _ in range(STEPS):
            emitted = bench.step()
            one.append((emitted.token, emitted.gap, bench.logits().tobytes()))
        found.append(one)
    return found


@pytest.fixture(scope="module")
def resident(tiny: Graph) -> Trace:
    """The run that everything is held against: all weights in, no capture, the prompt in one call."""
    return trace(Bench(tiny, capture=False, rows=(len(TINY_PROMPT),)))[0]


def budgets(graph: Graph) -> Iterator[int]:
    """The shares of W, in bytes."""
    whole = Bench(graph).plan.weight_bytes
    return (whole * share // 100 for share in SHARES)


@pytest.mark.parametrize("granule", [4096, 8192, 16384])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_and_budget_gives_the_same_bits_in_every_generation(
    tiny: Graph, resident: Trace, policy: str, granule: int
) -> None:
    for budget, capture in product(budgets(tiny), (True, False)):
        bench = Bench(tiny, budget=budget, policy=policy, granule=granule, capture=capture, rows=(len(TINY_PROMPT),))
        assert trace(bench, generations=3) == [resident] * 3, (budget, capture)
        assert over_the_link(bench.tally.read()) > 0, "a run that pages nothing in proves nothing"
        bench.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_large_granules_over_small_weights(tiny: Graph, resident: Trace, policy: str) -> None:
    """Four granules of 64 KiB hold all; two are the least that holds the widest step where it straddles."""
    for granules in (2, 3):
        bench = Bench(tiny, budget=granules * 65536, policy=policy, granule=65536, rows=(len(TINY_PROMPT),))
        assert trace(bench, generations=2) == [resident] * 2
        assert over_the_link(bench.tally.read()) > 0


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 512])
@pytest.mark.parametrize("capture", [True, False])
def test_chunks_of_the_prompt(tiny: Graph, resident: Trace, chunk: int, capture: bool) -> None:
    for budget in (None, *budgets(tiny)):
        bench = Bench(tiny, budget=budget, capture=capture, rows=(1, 2, 3, 4))
        assert trace(bench, generations=2, chunk=chunk) == [resident] * 2


@pytest.mark.parametrize("capacity", [14, 15, 64, 100, 256, 5000])
def test_the_size_of_the_cache(tiny: Graph, resident: Trace, capacity: int) -> None:
    assert trace(Bench(tiny, capacity=capacity, rows=(len(TINY_PROMPT),)))[0] == resident


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_blas_threads(tiny: Graph, resident: Trace, threads: int) -> None:
    with threadpool_limits(threads):
        assert trace(Bench(tiny, rows=(len(TINY_PROMPT),)))[0] == resident


@pytest.mark.parametrize("module", ["engine.__main__", "orchestrator.commands.engine"])
def test_the_command_computes_on_one_thread_whatever_the_environment_says(module: str) -> None:
    """Beyond the sizes above, how a product is cut over threads changes last bits."""
    script = f"import {module}, threadpoolctl; print([p['num_threads'] for p in threadpoolctl.threadpool_info()])"
    told = {**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}
    path = {"PYTHONPATH": str(Path(engine.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], env=told | path, capture_output=True, check=True, text=True
    )
    pools = json.loads(done.stdout)
    assert pools and set(pools) == {1}


def test_a_prompt_after_a_longer_one_that_begins_with_it(tiny: Graph, resident: Trace) -> None:
    """Nothing of an earlier sequence is felt: fresh, after itself, a longer one, one that shares only a token."""
    bench = Bench(tiny, rows=range(1, 9))
    for before in ((), TINY_PROMPT, (*TINY_PROMPT, 5, 6, 7), (TINY_PROMPT[0], 400)):
        if before:
            trace(bench, prompt=before)
        assert trace(bench)[0] == resident


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    policy=st.sampled_from(POLICIES),
    share=st.integers(25, 99),
    granule=st.sampled_from([4096, 8192, 16384]),
    capture=st.booleans(),
    chunk=st.integers(1, 4),
    capacity=st.integers(14, 300),
)
def test_any_combination(
    tiny: Graph, resident: Trace, policy: str, share: int, granule: int, capture: bool, chunk: int, capacity: int
) -> None:
    budget = max(Bench(tiny).plan.weight_bytes * share // 100, 57344)
    bench = Bench(
        tiny,
        budget=budget,
        policy=policy,
        granule=granule,
        capture=capture,
        capacity=capacity,
        rows=range(1, 5),
    )
    assert trace(bench, generations=2, chunk=chunk) == [resident] * 2


@pytest.mark.parametrize("config", [{}, {"weight_budget": "50%", "granule": 4096, "policy": "lru"}])
def test_warmups_change_no_token(folder: Path, config: dict[str, object]) -> None:
    expected = run(folder).streams[0]
    for warmups in (0, 1, 2):
        streams = run(folder, config=config, warmups=warmups, generations=3).streams
        assert streams == [expected] * (warmups + 3)
