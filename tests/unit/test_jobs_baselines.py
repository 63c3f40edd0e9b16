"""Which commit a change is held against: the merge base, the nearest one that can serve, never its own earlier push."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from jobs.baselines import earlier_push, merge_base
from jobs.errors import RefError
from jobs.provenance import ArmSource
from jobs.spec import load, plan
from orchestrator.resolve import DryResolver, LocalResolver
from orchestrator.settings import settings

ENGINE = "engine/__init__.py"


def git(repository: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *words], cwd=repository, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(root: Path, engine: str | None) -> str:
    """A commit with this engine; None: it holds none."""
    place = root / ENGINE
    if engine is None:
        place.unlink(missing_ok=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"ANSWER = {engine!r}\n")
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", str(engine))
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Main has two commits, a branch left it at the second and was pushed twice, and main went on by two."""
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    for name in ("one", "two"):
        commit(root, name)
    git(root, "checkout", "-q", "-b", "feature")
    for name in ("pushed", "pushed again"):
        commit(root, name)
    git(root, "checkout", "-q", "main")
    for name in ("three", "four"):
        commit(root, name)
    git(root, "checkout", "-q", "feature")
    monkeypatch.chdir(root)
    for name in ("CACHE", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    return root


def test_the_base_is_where_the_branch_left_main_and_how_far_main_went_on_is_said(root: Path) -> None:
    found = merge_base(root, "main")
    assert found.commit == git(root, "rev-parse", "main~2")
    assert found.note == "the merge base of main and HEAD, which main is 2 commits ahead of"


def test_a_branch_on_top_of_main_has_mains_tip_and_no_lag(root: Path) -> None:
    git(root, "checkout", "-q", "-b", "fresh", "main")
    commit(root, "new")
    found = merge_base(root, "main")
    assert (found.commit, found.note) == (git(root, "rev-parse", "main"), "the merge base of main and HEAD")


def test_where_the_merge_base_cannot_serve_the_nearest_commit_before_it_does_and_the_lag_is_said(root: Path) -> None:
    git(root, "checkout", "-q", "main")
    served = git(root, "rev-parse", "HEAD")
    for _ in range(3):
        left = commit(root, None)
    git(root, "checkout", "-q", "-b", "late")
    commit(root, "back")
    found = merge_base(root, "main")
    assert found.commit == served != left
    assert found.note.endswith("; it holds no engine, so the nearest one before it serves, 3 commits back")
    assert merge_base(root, "main", program=True).commit == left, "a program needs no engine"


def test_what_has_no_base_is_refused_with_what_to_do(root: Path) -> None:
    with pytest.raises(RefError, match="no such git ref"):
        merge_base(root, "nowhere")
    git(root, "checkout", "-q", "--orphan", "other")
    commit(root, "alone")
    with pytest.raises(RefError, match="have no commit in common") as raised:
        merge_base(root, "main")
    assert "--unshallow" in raised.value.remedy
    git(root, "checkout", "-q", "--orphan", "empty")
    commit(root, None)
    git(root, "checkout", "-q", "-b", "above")
    commit(root, "late")
    with pytest.raises(RefError, match="nor the 0 before it hold an engine"):
        merge_base(root, "empty")


@pytest.mark.parametrize(
    ("ref", "is_own"),
    [("HEAD~1", True), ("HEAD", False), ("main~2", False), ("main", False), ("HEAD~2", False)],
)
def test_a_base_that_only_the_branch_itself_holds_is_warned_of(root: Path, ref: str, is_own: bool) -> None:
    told = earlier_push(root, git(root, "rev-parse", ref))
    assert bool(told) is is_own
    assert ("such as an earlier push of it" in told and "merge-base:main" in told) is is_own


def test_an_own_commit_that_was_released_or_that_others_build_on_is_no_earlier_push(root: Path) -> None:
    own = git(root, "rev-parse", "HEAD~1")
    git(root, "update-ref", "refs/remotes/origin/feature", own)
    assert earlier_push(root, own), "where it was pushed to is not another's"
    git(root, "branch", "elsewhere", own)
    git(root, "checkout", "-q", "elsewhere")
    commit(root, "another's")
    git(root, "checkout", "-q", "feature")
    assert earlier_push(root, own) == "", "somebody else's branch holds it"
    git(root, "branch", "-q", "-D", "elsewhere")
    assert earlier_push(root, own)
    git(root, "tag", "v1", own)
    assert earlier_push(root, own) == "", "it is a release"


SWEEP = """\
sweep: small
models: {tiny: {build: tiny, seed: 7}}
prompts: {short: {ids: [1, 2, 3, 4]}}
arms:
  base: {source: SOURCE}
  head: {source: installed}
run: {tokens: 4, generations: 1}
"""


@pytest.mark.parametrize("dry", [False, True], ids=["for a run", "for a look"])
def test_a_sweep_is_planned_against_that_commit_and_says_so(root: Path, dry: bool) -> None:
    (root / "s.yaml").write_text(SWEEP.replace("SOURCE", "merge-base:main"))
    local = LocalResolver(settings({"XDG_CACHE_HOME": str(root.parent / "CACHE")}, cwd=root))
    manifest = plan(load(root / "s.yaml"), DryResolver(local, []) if dry else local)
    base, head = manifest.arms
    left = git(root, "rev-parse", "main~2")
    assert (base.commit, base.source) == (left, f"git:{left}"), "reviewed files are read there too"
    assert base.note == "the merge base of main and HEAD, which main is 2 commits ahead of"
    assert head.note == "" and "note" not in head.model_dump(mode="json")
    if not dry:
        assert base.python_path is not None
        assert (Path(base.python_path) / ENGINE).read_text() == "ANSWER = 'two'\n"


def test_a_base_that_is_an_own_earlier_push_is_planned_with_a_warning(root: Path) -> None:
    local = LocalResolver(settings({"XDG_CACHE_HOME": str(root.parent / "CACHE")}, cwd=root))
    own = git(root, "rev-parse", "HEAD~1")
    assert "earlier push" in local.arm("base", ArmSource("git", own)).note
    assert local.arm("base", ArmSource("git", "main")).note == ""
