"""A sweep over batches, from file to verdict, with a model that no config names: the same ids in each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.zoo import build
from jobs.model import RunRecord
from jobs.store import Store

SWEEP = """\
sweep: side-by-side
models:
  nameless: {path: ./model}
prompts:
  short: {ids: [1, 2, 3, 4]}
  long: {ids: [1, 9, 40, 77, 301, 12, 5, 64, 200]}
arms:
  base: {source: installed, config: {policy: lru}}
  head: {source: installed, config: {policy: stable}}
matrix:
  model: [nameless]
  prompt: [short, long]
  batch: [1, 3]
  weight_budget: ["50%"]
  granule: [4096]
varies: [policy]
blocks: {order: sequential}
run: {device: sim, tokens: 8, generations: 2, ignore_eos: true}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep's file beside the seeded model, whose config and record of the build are taken away."""
    made = tmp_path_factory.mktemp("batch")
    build("tiny", made / "model", seed=7, cache_dir=made)
    for name in ("genai_config.json", "zoo.json"):
        (made / "model" / name).unlink()
    (made / "sweep.yaml").write_text(SWEEP)
    return made


@pytest.mark.slow
def test_a_sweep_over_batches_passes_and_each_sequence_equals_itself_alone(folder: Path) -> None:
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "orchestrator.cli", "run", "sweep.yaml", "--json"]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    store = Store.open(document["store"], lambda: datetime.now(UTC), migrate=False)
    given = store.judge_input(document["sweep"])
    assert [(c.plan.prompt, c.plan.config["batch"]) for c in given.cells] == [
        ("short", 1), ("short", 3), ("long", 1), ("long", 3)]  # fmt: skip
    alone: dict[str, set[tuple[int, ...]]] = {}
    for cell in given.cells:
        for record in records(cell.runs):
            assert "caches, logits, ids, mask, heads, vocabulary by structure" in str(record.facts["bound_by"])
            for generation in record.generations:
                ids = [sequence.ids for sequence in generation.sequences]
                assert len(ids) == cell.plan.config["batch"] and {len(i) for i in ids} == {8}
                other = "long" if cell.plan.prompt == "short" else "short"
                for prompt, given_ids in zip((cell.plan.prompt, other, cell.plan.prompt), ids, strict=False):
                    alone.setdefault(prompt, set()).add(given_ids)
    assert {prompt: len(ids) for prompt, ids in alone.items()} == {"short": 1, "long": 1}
    assert alone["short"] != alone["long"], "two prompts that tell the sequences apart"
    streamed = {c.plan.config["batch"]: sorted(streamed_bytes(r) for r in records(c.runs)) for c in given.cells}
    for one, three in zip(streamed[1], streamed[3], strict=True):  # 8 passes, and 9 with prompts of two lengths
        assert one < three <= one * 9 / 8, "weights are read once a pass, however many sequences there are"
    store.close()


def records(runs: object) -> list[RunRecord]:
    """What the runs of a cell gave."""
    found = [run.record for run in runs]  # type: ignore[attr-defined]
    assert found and all(found)
    return found


def streamed_bytes(record: RunRecord) -> int:
    """Weight bytes that went to the card."""
    found = record.counters["htod_bytes"]
    assert isinstance(found, int)
    return found
