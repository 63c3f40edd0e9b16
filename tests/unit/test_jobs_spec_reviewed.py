"""Expected changes are read at base's commit: a head cannot excuse itself by a file of its own tree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.model import Manifest
from jobs.provenance import ArmSource, ResolvedArm
from jobs.spec import load, plan
from tests.unit import reviewed_repository
from tests.unit.reviewed_repository import OneCommit, committed, git

SWEEP = (
    reviewed_repository.SWEEP
    + """\
expectations: changes.yaml
"""
)
ROW = "expectations:\n  - {{metric: {}, reason: meant}}\n"


@dataclass(frozen=True)
class TwoCommits(OneCommit):
    """Base is one commit, head another."""

    head: str = ""

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        return ResolvedArm(Path("/trees"), "tree", self.head if name == "head" else self.commit)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose one commit holds a sweep below sweeps/, without its expectations."""
    folder = tmp_path / "repository"
    (folder / "sweeps").mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "sweeps/gate.yaml").write_text(SWEEP.format(base='"git:main"'))
    committed(folder)
    return folder


def test_the_file_of_bases_commit_is_in_force_and_not_heads(repository: Path) -> None:
    reviewed = repository / "sweeps/changes.yaml"
    reviewed.write_text(ROW.format("step_kernels"))
    commit = committed(repository)
    reviewed.write_text(ROW.format("htod_bytes"))  # head's own word, not committed
    (row,) = _planned(repository, commit).expectations
    assert (row.metric, row.self_declared) == ("step_kernels", False)
    assert [row.metric for row in _planned(repository, commit).proposed] == ["htod_bytes"]
    committed(repository)  # nor does a later commit count
    assert _planned(repository, commit).expectations == (row,)


def test_a_file_that_base_lacks_declares_nothing(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
    (repository / "sweeps/changes.yaml").write_text(ROW.format("htod_bytes"))
    manifest = _planned(repository, commit)
    assert manifest.expectations == ()
    assert [row.metric for row in manifest.proposed] == ["htod_bytes"]
    assert Manifest.model_validate_json(manifest.canonical()) == manifest


@pytest.mark.parametrize("base", ["checkout", "installed"])
def test_without_a_ref_as_base_the_row_is_self_declared(repository: Path, base: str) -> None:
    (repository / "sweeps/gate.yaml").write_text(SWEEP.format(base=base))
    (repository / "sweeps/changes.yaml").write_text(ROW.format("htod_bytes"))
    manifest = _planned(repository, git(repository, "rev-parse", "HEAD").strip())
    assert [(row.metric, row.self_declared) for row in manifest.expectations] == [("htod_bytes", True)]
    assert Manifest.model_validate_json(manifest.canonical()) == manifest


def test_a_sweep_outside_bases_repository_is_self_declared(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD").strip()
    (tmp_path / "gate.yaml").write_text(SWEEP.format(base='"git:main"'))
    (tmp_path / "changes.yaml").write_text(ROW.format("htod_bytes"))
    manifest = plan(load(tmp_path / "gate.yaml"), OneCommit(commit))
    assert [row.self_declared for row in manifest.expectations] == [True]


@pytest.mark.parametrize("bound", ["change: higher", "at_most: 3"])
def test_what_the_change_adds_and_bounds_is_in_force_before_bases_rows(repository: Path, bound: str) -> None:
    reviewed = repository / "sweeps/changes.yaml"
    reviewed.write_text(ROW.format("step_kernels"))
    commit = committed(repository)
    reviewed.write_text(ROW.format("step_kernels") + f"  - {{metric: segments, {bound}, reason: mine}}\n")
    manifest = _planned(repository, commit)
    told = [(row.metric, row.self_declared, row.added) for row in manifest.expectations]
    assert told == [("segments", True, True), ("step_kernels", False, False)]
    assert manifest.proposed == ()
    assert Manifest.model_validate_json(manifest.canonical()) == manifest


@pytest.mark.parametrize("branch", ["main", "topic"])
def test_an_earlier_push_of_the_change_s_own_branch_declares_as_the_change_does(repository: Path, branch: str) -> None:
    git(repository, "branch", "-q", "-M", "main")
    git(repository, "checkout", "-q", "-B", branch)
    (repository / "sweeps/changes.yaml").write_text(
        ROW.format("step_kernels") + "  - {metric: segments, change: higher, reason: mine}\n"
    )
    push = committed(repository)
    (repository / "change").write_text("more")
    committed(repository)
    (repository / "sweeps/gate.yaml").write_text(SWEEP.format(base=f'"git:{push}"'))
    manifest = _planned(repository, push)
    in_force = [(row.metric, row.added) for row in manifest.expectations]
    if branch == "main":
        assert (in_force, manifest.proposed) == ([("step_kernels", False), ("segments", False)], ())
    else:
        assert (in_force, [row.metric for row in manifest.proposed]) == ([("segments", True)], ["step_kernels"])


def test_of_a_head_that_is_a_ref_the_file_of_its_commit_counts(repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD").strip()
    text = SWEEP.format(base='"git:main"').replace("{source: checkout}", '{source: "git:topic"}')
    (repository / "sweeps/gate.yaml").write_text(text)
    reviewed = repository / "sweeps/changes.yaml"
    reviewed.write_text("expectations: [{metric: segments, change: higher, reason: mine}]\n")
    head = committed(repository)
    reviewed.write_text("expectations: [{metric: fallbacks, change: higher, reason: not committed}]\n")
    manifest = plan(load(repository / "sweeps/gate.yaml"), TwoCommits(base, head))
    assert [row.metric for row in manifest.expectations] == ["segments"]


def test_a_broken_file_at_base_is_said_with_its_commit(repository: Path) -> None:
    reviewed = repository / "sweeps/changes.yaml"
    reviewed.write_text("expectations: 3\n")
    commit = committed(repository)
    reviewed.write_text(ROW.format("htod_bytes"))
    with pytest.raises(SpecError, match=f"changes.yaml at {commit[:12]}"):
        _planned(repository, commit)


def test_digests_of_manifests_without_the_new_fields_stay(repository: Path) -> None:
    """Stored manifests are held against their digests."""
    reviewed = repository / "sweeps/changes.yaml"
    reviewed.write_text(ROW.format("htod_bytes"))
    text = _planned(repository, committed(repository)).canonical()
    assert "self_declared" not in text
    assert "min_tokens" not in text
    assert "proposed" not in text


def _planned(repository: Path, commit: str) -> Manifest:
    return plan(load(repository / "sweeps/gate.yaml"), OneCommit(commit))
