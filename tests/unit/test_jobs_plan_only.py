"""Sweeps without arithmetic: what their files must say, what their requests ask, and how tokens are counted."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from jobs.checks import generation_faults
from jobs.errors import SpecError
from jobs.metrics import PLANNED, derive, given_tokens, is_planned
from jobs.model import Generation, RunSettings, SequenceTokens
from jobs.provenance import ModelSource
from jobs.spec import load
from orchestrator.resolve import built_folder
from orchestrator.settings import settings

SOUND = """\
sweep: planned
models:
  big: {build: 35b-a3b, hollow: true, layers: 4}
prompts:
  short: {ids: [1, 2]}
arms:
  base: {source: checkout, config: {capture_rules: none}}
  head: {source: checkout, config: {capture_rules: all}}
varies: [capture_rules]
run: {arithmetic: none, device: sim, tokens: 8}
gate: {identity: off, time: off}
"""
PLANNED_ALONE = Generation(
    index=0, warmup=False, ids=(), stop_reason=None, counters={"decode": {"hits": 1}}, prefill_ns=5, step_ns=(7, 7, 7)
)


def written(folder: Path, text: str) -> Path:
    """The text as a sweep file."""
    path = folder / "s.yaml"
    path.write_text(text)
    return path


def test_a_plan_only_sweep_loads(tmp_path: Path) -> None:
    form = load(written(tmp_path, SOUND)).form
    assert (form.run.arithmetic, form.models["big"].layers, form.models["big"].hollow) == ("none", 4, True)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("identity: off, ", "", "gives no tokens to judge"),
        (", time: off", "", "has no time to judge"),
        ("device: sim, ", "", "uses no card"),
        ("varies", "locks: [{prompt: short, index: 0, expected: 1}]\nvaries", "gives no ids to lock"),
        ("arithmetic: none, ", "", "is hollow: it can be planned alone"),
        ("build: 35b-a3b, hollow: true, layers: 4", "path: x, layers: 4", "layers goes with build"),
        ("build: 35b-a3b, hollow: true, layers: 4", "path: x, hollow: true", "hollow goes with build"),
        ("capture_rules: none", "capture_rules: some", "capture_rules names 'some'"),
    ],
)
def test_what_a_run_without_arithmetic_cannot_give_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(SpecError) as refused:
        load(written(tmp_path, SOUND.replace(old, new, 1)))
    told = [refused.value, *refused.value.others]
    assert any(said in fault.message for fault in told), told


def test_tokens_of_a_plan_are_one_a_step_and_one_of_the_prompt_for_each_sequence() -> None:
    assert is_planned(PLANNED_ALONE) and given_tokens(PLANNED_ALONE) == 4
    two = PLANNED_ALONE.model_copy(update={"further": (SequenceTokens(ids=(), stop_reason=None),)})
    assert given_tokens(two) == 8


@pytest.mark.parametrize("changes", [{"ids": (3,)}, {"stop_reason": "length"}, {"counters": {}}])
def test_a_generation_that_says_more_or_counted_nothing_is_no_plan(changes: dict[str, object]) -> None:
    generation = PLANNED_ALONE.model_copy(update=changes)
    assert not is_planned(generation)
    assert given_tokens(generation) == len(generation.ids)


@pytest.mark.parametrize(("tokens", "said"), [(4, []), (8, ["generation 1 has 4 of 8 tokens planned"])])
def test_a_plan_that_stops_early_is_no_whole_one(documents: Any, tokens: int, said: list[str]) -> None:
    """It has no ids whose length could be judged, and its fewer bytes would read as an improvement."""
    document = documents.sweep()
    cell, plan = document.cells[0], document.manifest.cells[0]
    settings = RunSettings(tokens=tokens, generations=1, warmups=0, arithmetic="none")
    plan = plan.model_copy(update={"settings": settings})
    record = cell.runs[0].record.model_copy(update={"generations": (PLANNED_ALONE,)})
    assert generation_faults(plan, document.manifest.arms[0], record) == said


def test_a_plan_has_bytes_a_token_and_no_time() -> None:
    found = derive({"htod_bytes": 400}, {}, [PLANNED_ALONE])
    assert found["htod_bytes_per_token"] == 100
    assert found["decode_ms_per_token"] == found["prefill_ms"] == found["tokens_per_s"] == PLANNED


def test_settings_in_full_are_written_as_before_there_was_a_choice() -> None:
    assert "arithmetic" not in RunSettings(tokens=1).model_dump()
    assert RunSettings(tokens=1, arithmetic="none").model_dump()["arithmetic"] == "none"


def test_models_of_other_sizes_have_folders_of_their_own(tmp_path: Path) -> None:
    here = settings({"HOME": str(tmp_path)})
    sizes = itertools.product((None, 1), (None, 1), (False, True))
    names = [built_folder(here, ModelSource(None, "x", seed, layers, hollow)).name for seed, layers, hollow in sizes]
    assert len(set(names)) == 8 and {"x", "x-seed1", "x-seed1-layers1-hollow"} <= set(names)
