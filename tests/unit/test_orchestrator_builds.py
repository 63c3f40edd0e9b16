"""Arms with a build on this host: resolved, looked at without building, verified by the child's parent, passed over."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.native import NativeAdapter
from jobs.errors import RefError, SpecError
from jobs.judge import judge
from jobs.model import ArmPlan, BuildFailure, BuildPlan, CellPlan, Limits, Manifest, RunRecord, RunSettings
from jobs.provenance import ArmSource, tree_digest
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.cards import CardName
from orchestrator.choose import simulated_cards
from orchestrator.dispatch import Dispatcher
from orchestrator.place import InProcessPlacer
from orchestrator.resolve import DryResolver, LocalResolver
from orchestrator.resume import changes
from orchestrator.scripted import ScriptedProbe
from orchestrator.seat import Happening
from orchestrator.settings import Settings, settings
from orchestrator.worker import GpuWorker, WorkerSettings

FAKE = Path(__file__).parents[1] / "fakes" / "engine_main.py"
BUILD = BuildPlan(command="cp version lib", outputs=("lib",), timeout_s=30)
BREAKS = BuildPlan(command="echo key: api_key=abcdefgh; exit 2", outputs=("lib",), timeout_s=30)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    root = tmp_path / "checkout"
    (root / "engine").mkdir(parents=True)
    (root / "engine/__init__.py").write_text("")
    (root / "version").write_text("one")
    return settings({"PATH": "/usr/local/bin:/usr/bin:/bin", "GITHUB_TOKEN": "t"}, cwd=root)


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def committed(root: Path, version: str) -> str:
    (root / "version").write_text(version)
    if not (root / ".git").exists():
        git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", version)
    return git(root, "rev-parse", "HEAD")


# ---- resolving ---------------------------------------------------------------------------------------------------


def test_each_source_is_built_from_its_whole_tree(given: Settings) -> None:
    commit = committed(given.cwd, "one")
    (given.cwd / "version").write_text("two")
    resolver = LocalResolver(given)
    arms = {
        kind: resolver.arm("head", source)
        for kind, source in {
            "git": ArmSource("git", "main", BUILD),
            "checkout": ArmSource("checkout", build=BUILD),
            "path": ArmSource("path", str(given.cwd), BUILD),
        }.items()
    }
    made = {kind: arm.python_path and (arm.python_path / "lib").read_text() for kind, arm in arms.items()}
    assert made == {"git": "one", "checkout": "two", "path": "two"}
    assert {kind: arm.commit for kind, arm in arms.items()} == {
        "git": commit,
        "checkout": f"{commit}-dirty",
        "path": None,
    }
    for arm in arms.values():
        assert arm.python_path is not None
        assert arm.python_path.is_relative_to(given.trees)
        assert arm.tree_digest == tree_digest(arm.python_path, ("lib",))
    assert arms["git"].tree_digest != arms["path"].tree_digest == arms["checkout"].tree_digest


def test_what_is_not_there_is_an_error_and_no_failed_build(given: Settings, tmp_path: Path) -> None:
    committed(given.cwd, "one")
    with pytest.raises(RefError, match="no such git ref"):
        LocalResolver(given).arm("head", ArmSource("git", "nope", BUILD))
    (tmp_path / "empty").mkdir()
    with pytest.raises(SpecError, match="no engine in"):
        LocalResolver(given).arm("head", ArmSource("path", str(tmp_path / "empty"), BUILD))


def test_a_failure_is_told_once_a_resolver_without_secrets(given: Settings, tmp_path: Path) -> None:
    """A null arm is base again: trying the same once more would only fail as slowly."""
    count = tmp_path / "count"
    breaks = BREAKS.model_copy(update={"command": f"echo ran >>{count}; {BREAKS.command}"})
    heard: list[str] = []
    resolver = LocalResolver(given, heard.append)
    source = ArmSource("path", str(given.cwd), breaks)
    base, null = resolver.arm("base", source), resolver.arm("null", source)
    assert base == null
    assert base.failure == BuildFailure(reason="exit 2: key: api_key=[redacted]", log_tail="key: api_key=[redacted]")
    assert (base.python_path, base.tree_digest) == (None, "")
    assert count.read_text() == "ran\n"
    assert [line.partition(" with ")[0].partition(" (log")[0] for line in heard] == [
        "arm base: building",
        "arm base: build failed: exit 2: key: api_key=[redacted]",
        "arm null: build failed: exit 2: key: api_key=[redacted]",
    ]
    assert Path(heard[-1].partition("(log in ")[2].rstrip(")")).read_text() == "key: api_key=abcdefgh\n"
    LocalResolver(given).arm("base", source)
    assert count.read_text() == "ran\nran\n", "the next run must try again"


def test_a_dry_look_builds_nothing_and_says_what_it_would(given: Settings) -> None:
    source = ArmSource("path", str(given.cwd), BUILD)
    dry = DryResolver(LocalResolver(given), [])
    arm = dry.arm("head", source)
    assert (arm.python_path, arm.tree_digest, dry.unbuilt) == (None, "", {"head": "cp version lib"})
    assert not given.trees.exists()
    with pytest.raises(SpecError, match="git"):
        dry.arm("head", ArmSource("git", "nope", BUILD))
    built = LocalResolver(given).arm("head", source)
    again = DryResolver(LocalResolver(given), [])
    assert again.arm("head", source) == built
    assert again.unbuilt == {}


def test_a_resume_names_a_build_that_went_otherwise() -> None:
    def manifest(build: BuildPlan) -> Manifest:
        return Manifest(name="m", arms=(ArmPlan(name="head", role="head", source="checkout", build=build),), cells=())

    failed = BREAKS.model_copy(update={"failure": BuildFailure(reason="exit 2: x")})
    assert changes(manifest(failed), manifest(BREAKS)) == ["the build of arm head"]
    assert changes(manifest(BREAKS), manifest(BREAKS)) == []


# ---- running -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A built tree whose `engine` is the stand-in."""
    root = tmp_path / "arm"
    (root / "engine").mkdir(parents=True)
    (root / "engine/__init__.py").write_text("")
    shutil.copyfile(FAKE, root / "engine/__main__.py")
    (root / "lib").write_text("one")
    return root


def arm_of(tree: Path, name: str = "base", build: BuildPlan | None = BUILD) -> ArmPlan:
    if build is not None and build.failure is not None:
        return ArmPlan(name=name, role="head", source="path", build=build)
    return ArmPlan(
        name=name,
        role="base" if name == "base" else "head",
        source="path",
        tree_digest=tree_digest(tree, build.outputs if build else ()),
        python_path=str(tree),
        env={"FAKE_ENGINE": json.dumps({})},
        build=build,
    )


def cell_of(tree: Path, *arms: str) -> CellPlan:
    return CellPlan(
        cell="m/p",
        model="m",
        model_path=str(tree),
        model_digest="",
        prompt="p",
        prompt_ids=(1,),
        settings=RunSettings(tokens=3, generations=1),
        arms=arms,
    )


def attempt(tmp_path: Path, tree: Path, arm: ArmPlan) -> RunResult:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    order = RunOrder("run_1", "att_1", 1, cell_of(tree, arm.name), arm, "SIM-test-0", 20.0)
    adapter = NativeAdapter()
    return adapter.run(order, RunPlace(scratch, {"PATH": "/usr/bin:/bin"}, lambda: "2026-01-01T00:00:00Z"))


def test_a_library_that_was_exchanged_after_the_build_is_refused(tmp_path: Path, tree: Path) -> None:
    arm = arm_of(tree)
    (tree / "lib").write_text("two")
    done = attempt(tmp_path, tree, arm)
    assert (done.end, done.record) == ("failed", None)
    assert done.reason.startswith("provenance: engine of arm base")
    (tree / "lib").unlink()
    assert attempt(tmp_path, tree, arm).reason.startswith("engine tree: output lib is missing")


def test_an_arm_that_was_not_built_never_runs_the_installed_engine(tmp_path: Path, tree: Path) -> None:
    failed = BREAKS.model_copy(update={"failure": BuildFailure(reason="exit 2: x")})
    done = attempt(tmp_path, tree, arm_of(tree, "head", failed))
    assert (done.end, done.record, done.reason, done.retry) == ("failed", None, "build failed: exit 2: x", False)


class Answering:
    """An adapter whose every run measures something, and which refuses to be asked for an arm without a build."""

    def run(self, order: RunOrder, place: RunPlace) -> RunResult:
        assert not order.arm.unbuilt, order
        record = RunRecord(
            run_id=order.run_id, attempt_id=order.attempt_id, attempt_number=order.attempt_number, exit_code=0
        )
        return RunResult("measured", record)


def test_runs_of_an_arm_that_was_not_built_end_without_an_attempt_and_the_others_run(
    tmp_path: Path, tree: Path
) -> None:
    failed = BREAKS.model_copy(update={"failure": BuildFailure(reason="exit 2: x", log_tail="x")})
    arms = (arm_of(tree), arm_of(tree, "head", failed))
    cell = cell_of(tree, "base", "head").model_copy(update={"blocks": 2})
    manifest = Manifest(name="fake", arms=arms, cells=(cell,), limits=Limits(queue_timeout_s=20))
    store = Store.open(f"sqlite:///{tmp_path / 'store.db'}", lambda: datetime.now(UTC))
    sweep_id = store.submit(manifest, "h" * 64, "test")
    works = WorkerSettings(tmp_path / "spool", tmp_path / "scratch", tmp_path / "locks")

    def make(worker: str, card: CardName, stopped: Callable[[], bool]) -> GpuWorker:
        probe = ScriptedProbe([card.uuid], time.monotonic, [])
        return GpuWorker(worker, card, works, probe, {"PATH": "/usr/bin:/bin"}, stopped, {"native": Answering()})

    placer = InProcessPlacer(simulated_cards("test", 1), make)
    heard: list[Happening] = []
    hellos = placer.open()
    try:
        dispatcher = Dispatcher(store, placer, "driver", sweep_id, tell=heard.append)
        dispatcher.seat(hellos)
        done = dispatcher.work()
    finally:
        placer.close()
    assert (done.pending, done.exhausted, done.complete, done.leased_blocks) == (0, 4, 4, 0)
    doc = store.judge_input(sweep_id)
    runs = {run.run_id: run for run in doc.cells[0].runs}
    assert all(not run.attempts for run in runs.values() if run.arm == "head")
    assert sum(h.text == "build failed: exit 2: x" for h in heard) == 4
    reasons = [event.message for event in store.events(sweep_id) if event.target == "exhausted"]
    assert reasons == ["build failed: exit 2: x"] * 4
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    (found,) = [finding for finding in verdict.findings if finding.outcome == "BUILD_FAILED"]
    assert (found.arm, found.log, len(found.run_ids)) == ("head", "x", 4)
    store.close()
