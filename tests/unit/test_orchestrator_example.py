"""The annotated example of docs/sweep-file.md is a sweep that runs: its arms build, and each of its runs holds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.config import parse_request
from engine.journal import Collected
from engine.run import execute
from jobs import expressions
from jobs.adapters.native import request_document
from jobs.model import ArmPlan, CellPlan, Manifest
from jobs.spec import load, plan
from orchestrator.resolve import LocalResolver
from orchestrator.settings import settings
from tests.unit.engine_rig import Outcome
from tests.unit.test_jobs_spec import yaml_blocks

PATH = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture
def manifest(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """The example as planned in a repository that has an engine on its branch main."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    here = tmp_path / "clone"
    for name, text in zip(("sweep.yaml", "expected-changes.yaml"), yaml_blocks(checkout), strict=True):
        (here / "sweeps").mkdir(parents=True, exist_ok=True)
        (here / "sweeps" / name).write_text(text, encoding="utf-8")
    for name in ("waivers", "goldens"):
        (here / "sweeps" / f"{name}.yaml").write_text(f"{name}: []", encoding="utf-8")
    (here / "engine").mkdir()
    (here / "engine/__init__.py").write_text("")
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "one")):
        subprocess.run(["git", *who, *words], cwd=here, check=True)
    return plan(load(here / "sweeps/sweep.yaml"), LocalResolver(settings({"PATH": PATH}, cwd=here)))


def run(cell: CellPlan, arm: ArmPlan) -> Outcome:
    lines = Collected()
    now = iter(range(0, 1 << 62, 1000))
    return Outcome(execute(parse_request(request_document(cell, arm, None)), lines, lambda: next(now)), lines)


def test_the_documented_example_runs(manifest: Manifest) -> None:
    assert [arm.unbuilt for arm in manifest.arms] == [""] * 4
    base, _, head, calm = manifest.arms
    assert len(manifest.cells) == 4
    for cell in manifest.cells:
        outcomes = {arm.name: run(cell, arm) for arm in (base, head, calm)}
        for name, outcome in outcomes.items():
            told = {**outcome.facts, **outcome.counters}
            due = [row.expr for row in cell.witnesses if not row.arms or name in row.arms]
            for expr in (*due, *(row.expr for row in cell.invariants)):
                assert expressions.holds(expr, told), (cell.cell, name, expr)
            assert outcome.streams == outcomes["base"].streams
            for lock in cell.locks:
                assert outcome.streams[0][0][lock.index] == lock.expected
        assert outcomes["head"].counters["htod_bytes"] < outcomes["base"].counters["htod_bytes"], "as is declared"
