"""The story of examples/ci: its workflow, step by step, on each push of a pull request, against a GitHub of this host.

Commands of the steps are called as the shell would, with the variables that the workflow gives them; a scheduler's
part, measuring what was submitted, is played by this process once the check stands open.
"""

from __future__ import annotations

import json
import re
import shutil
import string
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.store import Store
from orchestrator.choose import simulated_cards
from orchestrator.cli import call
from orchestrator.commands import check as checks
from orchestrator.conclude import judge_sweep
from orchestrator.dispatch import Dispatcher
from orchestrator.place import InProcessPlacer
from orchestrator.scripted import ScriptedProbe
from orchestrator.worker import GpuWorker, WorkerSettings
from reports.publish import comment as posting
from tests.unit.fake_github import BOT, JOB_TOKEN, REPOSITORY, FakeGitHub
from tests.unit.reviewed_repository import committed, git
from tests.unit.test_ci_workflows import commands

LAYERS = "range(len(self.layers))"
DECLARED = """\
expectations:
  - metric: htod_bytes
    change: higher
    at_most: 10_944
    reason: A layer's place is needed for a longer context.
"""


class Story:
    """A repository with a remote, a pull request's branch, a store, and the workflow of the example."""

    def __init__(self, root: Path, example: Path, github: FakeGitHub, patch: pytest.MonkeyPatch) -> None:
        self.root, self.github, self.patch = root, github, patch
        self.here, self.store = root / "clone", f"sqlite:///{root / 'store.db'}"
        origin = root / "origin.git"
        git(root, "init", "-q", "--bare", "-b", "main", str(origin))
        shutil.copytree(example, self.here)
        git(self.here, "init", "-q", "-b", "main")
        committed(self.here)
        git(self.here, "remote", "add", "origin", str(origin))
        git(self.here, "push", "-q", "-u", "origin", "main")
        git(self.here, "checkout", "-q", "-b", "faster")
        workflow = yaml.safe_load((self.here / ".github/workflows/gate.yml").read_text())
        self.steps = [step for step in workflow["jobs"]["gate"]["steps"] if "run" in step]
        patch.chdir(self.here)
        assert call(["db", "upgrade", "--store", self.store]) == 0

    def change(self, name: str, *pairs: tuple[str, str]) -> None:
        text = (self.here / name).read_text()
        for old, new in pairs:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (self.here / name).write_text(text)

    def push(self, capsys: pytest.CaptureFixture[str]) -> tuple[str, int]:
        """Commit and push what there is, and run the workflow on it: the sweep, and the exit code of its last step."""
        head = committed(self.here)
        git(self.here, "push", "-q", "origin", "faster")
        self.github.head = head
        given = {"STORE": self.store, "PR": "7", "HEAD": head}
        scheduler = threading.Thread(target=self._serve, args=(len(self.github.checks) + 1,))
        scheduler.start()
        code = 0
        try:
            for step in self.steps:
                token = JOB_TOKEN if "GITHUB_TOKEN" in step["env"] else ""
                self.patch.setenv("GITHUB_TOKEN", token)
                for words in commands(step["run"]):
                    told = [string.Template(word).substitute(given) for word in words]
                    capsys.readouterr()
                    code = call(told)
                    out = capsys.readouterr().out
                    if words[0] == "submit":
                        given["ID"] = json.loads(out[out.index("{") :])["sweep"]
        finally:
            scheduler.join()
        return given["ID"], code

    def comment(self) -> str:
        """The one comment of the pull request."""
        (only,) = self.github.of(BOT)
        return only

    def headline(self) -> str:
        """The comment's heading."""
        return next(line for line in self.comment().splitlines() if line.startswith("## "))

    def _serve(self, opened: int) -> None:
        """Measure and judge what is pending, once so many checks are open: what `assay scheduler` does."""
        until_s = time.monotonic() + 60
        while len(self.github.checks) < opened and time.monotonic() < until_s:
            time.sleep(0.02)
        assert self.github.checks[-1]["status"] == "in_progress"
        with Store.open(self.store, lambda: datetime.now(UTC)) as store:
            sweep_id = store.sweeps()[0].id
            placer = InProcessPlacer(simulated_cards("test", 1), self._worker)
            dispatcher = Dispatcher(store, placer, "test", sweep_id)
            try:
                dispatcher.seat(placer.open())
                dispatcher.work()
            finally:
                placer.close()
            judge_sweep(store, sweep_id, final=True)

    def _worker(self, name: str, card: Any, stopped: Any) -> GpuWorker:
        spool, scratch, locks, packs = (self.root / one for one in ("spool", "scratch", "locks", "packs"))
        places = WorkerSettings(spool, scratch, locks, packs=packs)
        probe = ScriptedProbe([card.uuid], time.monotonic, [])
        return GpuWorker(name, card, places, probe, {"PATH": "/usr/local/bin:/usr/bin:/bin"}, stopped)


@pytest.fixture
def story(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    for name in ("CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setattr(posting, "SETTLE_S", 0.0)
    monkeypatch.setattr(checks, "WAIT_S", 0.05)
    monkeypatch.delenv("GH_TOKEN", raising=False)
    with FakeGitHub() as github:
        job = {"GITHUB_API_URL": github.url, "GITHUB_REPOSITORY": REPOSITORY, "GITHUB_ACTIONS": "true"}
        for name, value in {**job, "GITHUB_STEP_SUMMARY": str(tmp_path / "step.md")}.items():
            monkeypatch.setenv(name, value)
        yield Story(tmp_path, checkout / "examples/ci", github, monkeypatch)


def test_the_example_s_pull_request_from_red_to_declared(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.change("engine.py", (LAYERS, "range(len(self.layers) - 1)"))
    _, code = story.push(capsys)
    assert code == 1
    assert "VIOLATION" in story.headline()
    assert [check["conclusion"] for check in story.github.checks] == ["failure"]

    story.change("engine.py", ("range(len(self.layers) - 1)", "range(6)"))
    _, code = story.push(capsys)
    assert code == 0
    assert "PASS" in story.headline()

    story.change("engine.py", ("RESIDENT = 4", "RESIDENT = 3"))
    _, code = story.push(capsys)
    assert code == 1
    assert "REGRESSED" in story.headline() and "htod_bytes" in story.comment()

    (story.here / "expected-changes.yaml").write_text(DECLARED)
    sweep, code = story.push(capsys)
    assert code == 0
    assert "DECLARED" in story.headline()
    assert "declared by this change" in story.comment()
    assert [check["conclusion"] for check in story.github.checks] == ["failure", "success", "failure", "success"]
    assert len({check["head_sha"] for check in story.github.checks}) == 4

    capsys.readouterr()
    assert call(["history", "htod_bytes", "--arm", "head", "--store", story.store, "--json"]) == 0
    (series,) = json.loads(capsys.readouterr().out)
    assert len(series["points"]) == 4
    assert call(["report", sweep, "--format", "html", "--out", str(story.root / "site"), "--store", story.store]) == 0
    index = (story.root / "site/index.html").read_text()
    assert sweep in index
    (page,) = (story.root / "site/scenarios").glob("*.html")
    assert "htod_bytes" in page.read_text()


def test_its_readme_tells_the_same_story(checkout: Path) -> None:
    rows = re.findall(
        r"^\| (\d) \| .*? \| (\w+) \| .*? \| (\d) \|$", (checkout / "examples/ci/README.md").read_text(), re.M
    )
    assert rows == [("1", "failure", "1"), ("2", "success", "0"), ("3", "failure", "1"), ("4", "success", "0")]
