"""The real card at its ends: long decodes, every budget, a full card, and a process that is killed while it records."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from engine.onnx_load import load
from engine.oracle import logits as oracle_logits
from engine.zoo.tiny import TINY, build_tiny
from tests.unit.engine_rig import TINY_PROMPT, Bench, run
from tests.unit.test_engine_cuda_card import new_device, of_plan

pytestmark = pytest.mark.gpu

LONG = 10_000
WATCHED = (50, 1_000, 5_000, LONG - 1)
BUDGETS = ("100%", "90%", "75%", "60%", "50%", "35%", "20%", "1%")


@pytest.fixture(scope="module")
def long_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model with a context of more than LONG positions, of weights that span many granules."""
    folder = tmp_path_factory.mktemp("ends") / "tiny"
    build_tiny(1234, folder, geometry=replace(TINY, context=LONG + 64))
    return folder


@pytest.fixture(scope="module")
def wide_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model with weights of many granules of a card."""
    folder = tmp_path_factory.mktemp("wide") / "tiny"
    build_tiny(1234, folder, geometry=replace(TINY, hidden=1024, head_size=256, ffn=8192))
    return folder


def test_ten_thousand_tokens_take_no_memory_and_stay_with_the_oracle(long_tiny: Path) -> None:
    """Every logit that is looked at within 1e-3 of the float32 oracle, which was fed the same ids."""
    graph = load(long_tiny)
    bench = Bench(graph, device=new_device(), rows=(len(TINY_PROMPT),), positions=LONG + 64, target="fused")
    process = psutil.Process()
    ids, seen = [bench.prefill(TINY_PROMPT).token], {}
    allocated = resident = 0
    for n in range(1, LONG):
        ids.append(bench.step().token)
        if n in WATCHED:
            seen[n] = bench.logits()
        if n == WATCHED[0]:
            allocated, resident = int(bench.device.tally.read()["alloc_calls"]), process.memory_info().rss
    counted = bench.device.tally.read()
    assert counted["alloc_calls"] == allocated
    assert process.memory_info().rss - resident < 64 << 20, "the host keeps a few numbers a token"
    assert bench.tally.read().get("invalidations", 0) == 0 and bench.tally.read()["replays"] >= LONG - 3
    del bench
    expected = oracle_logits(graph, TINY_PROMPT, ids[:-1])[len(TINY_PROMPT) - 1 :]
    for n, found in seen.items():
        assert np.abs(found - expected[n]).max() < 1e-3, n
    best = expected.argmax(axis=1)
    assert best.tolist() == ids


@pytest.mark.parametrize("policy", ["stable", "staging", "zero_copy"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_does_on_a_card_what_it_does_on_the_simulator(wide_tiny: Path, budget: str, policy: str) -> None:
    """From all weights to less than the largest key: the same ids, counters and refusals."""
    config = {"weight_budget": budget, "policy": policy, "target": "fused"}
    card = run(wide_tiny, device="cuda", tokens=12, generations=2, config=config)
    simulated = run(wide_tiny, device="sim", tokens=12, generations=2, config={**config, "granule": 2 << 20})
    assert card.code == simulated.code
    if card.code:
        assert card.code == 13 and card.error["message"] == simulated.error["message"]
        return
    assert [ids for ids, _ in card.streams] == [ids for ids, _ in simulated.streams]
    assert of_plan(card) == of_plan(simulated)
    assert card.broken_equations() == []
    assert (card.facts["mapped_after_close_bytes"], card.facts["owned_after_close_bytes"]) == (0, 0)


RECORDS_AND_DIES = """
import os, signal, sys
from engine.__main__ import main
from engine.device.cuda import CudaDevice

ended = CudaDevice.end_capture

def killed(device):
    print("recording", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return ended(device)

CudaDevice.end_capture = killed
main(sys.argv[1:])
"""


def test_a_kill_while_it_records_leaves_whole_lines_and_a_card_that_works(wide_tiny: Path, checkout: Path) -> None:
    command = ("run", "--model", str(wide_tiny), "--prompt-ids", "1 17 42 99", "--tokens", "8", "--device", "cuda")
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    child = [sys.executable, "-P", "-c", RECORDS_AND_DIES, *command]
    made = subprocess.run(child, check=False, env=environment, capture_output=True, text=True)
    assert made.returncode == -signal.SIGKILL and "recording" in made.stdout, made.stderr
    after = run(wide_tiny, device="cuda", tokens=8)
    assert after.code == 0 and after.streams == run(wide_tiny, device="cuda", tokens=8).streams


def test_a_full_card_is_said_with_a_record_and_the_next_run_is_well(wide_tiny: Path) -> None:
    """Another takes all memory but 16 MiB, which the context and the weights of this run do not fit into."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.skip("the card is not this test's alone: run it without -n")
    from engine.device.cuda_driver import call

    hog: Any = new_device()
    free = int(call(hog._driver.cuMemGetInfo)[0])
    address = hog.alloc(free - (16 << 20), "all but 16 MiB")
    full = run(wide_tiny, device="cuda", tokens=8)
    assert full.code == 14 and "memory" in full.error["message"] and full.error["remedy"]
    assert full.lines.of("hello"), "who ran is said"
    hog.free(address)
    assert run(wide_tiny, device="cuda", tokens=8).code == 0
