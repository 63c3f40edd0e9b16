"""Digests of engine trees and of the harness; copies that edits cannot reach; trees by git ref."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import git_trees, provenance
from jobs.errors import RefError, SpecError


def engine_tree(root: Path, answer: int = 1) -> Path:
    files = {
        "engine/__init__.py": f"ANSWER = {answer}\n",
        "engine/kernels/add.cu": "// add\n",
        "engine/schemas/line.json": "{}\n",
        "README.md": "not part of the engine\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


# ---- digests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "engine/__init__.py").write_text("ANSWER = 2\n"),
        lambda tree: (tree / "engine/kernels/add.cu").write_text("// sub\n"),
        lambda tree: (tree / "engine/schemas/line.json").write_text("[]\n"),
        lambda tree: (tree / "engine/kernels/add.cu").rename(tree / "engine/kernels/sub.cu"),
        lambda tree: (tree / "engine/extra.py").write_text(""),
        lambda tree: (tree / "engine/schemas/line.json").unlink(),
    ],
)
def test_the_digest_sees_every_change_of_the_engine(tmp_path: Path, change: Callable[[Path], object]) -> None:
    tree = engine_tree(tmp_path)
    before = provenance.tree_digest(tree)
    change(tree)
    assert provenance.tree_digest(tree) != before


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "README.md").write_text("other words"),
        lambda tree: (tree / "engine/__pycache__").mkdir() or (tree / "engine/__pycache__/x.py").write_text("x"),
        lambda tree: (tree / "engine/.cache").mkdir() or (tree / "engine/.cache/x.py").write_text("x"),
        lambda tree: (tree / "engine/.x.py").write_text("x"),
        lambda tree: (tree / "engine/notes.md").write_text("x"),
        lambda tree: os.utime(tree / "engine/__init__.py", (1, 1)),
        lambda tree: (tree / "engine/empty").mkdir(),
    ],
)
def test_the_digest_does_not_see_caches_and_notes(tmp_path: Path, change: Callable[[Path], object]) -> None:
    tree = engine_tree(tmp_path)
    before = provenance.tree_digest(tree)
    change(tree)
    assert provenance.tree_digest(tree) == before


def test_the_digest_does_not_depend_on_the_place(tmp_path: Path) -> None:
    assert provenance.tree_digest(engine_tree(tmp_path / "a")) == provenance.tree_digest(engine_tree(tmp_path / "b/c"))


def test_contents_cannot_move_between_files_unseen(tmp_path: Path) -> None:
    """Path and length are in the digest, so that two trees never concatenate to the same bytes."""
    one, two = engine_tree(tmp_path / "a"), engine_tree(tmp_path / "b")
    (one / "engine/a.py").write_text("xy")
    (one / "engine/b.py").write_text("z")
    (two / "engine/a.py").write_text("x")
    (two / "engine/b.py").write_text("yz")
    assert provenance.tree_digest(one) != provenance.tree_digest(two)


def test_a_folder_without_an_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no engine in"):
        provenance.tree_digest(tmp_path)


def test_a_broken_link_in_the_engine_is_named(tmp_path: Path) -> None:
    tree = engine_tree(tmp_path)
    (tree / "engine/lost.py").symlink_to("nowhere.py")
    with pytest.raises(SpecError, match=r"cannot read .*lost\.py: No such file"):
        provenance.tree_digest(tree)


def test_this_checkout_has_both_digests(checkout: Path) -> None:
    assert len(provenance.tree_digest(checkout)) == 64
    assert provenance.harness_digest(checkout) == provenance.harness_digest(provenance.own_root())


def harness(root: Path) -> Path:
    for name in ("jobs/store.py", "reports/templates/page.html.j2", "orchestrator/cli.py"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    return root


def test_the_harness_digest_is_the_same_for_a_wheel(tmp_path: Path) -> None:
    """A wheel carries the migrations and sweeps inside `jobs`; the checkout carries them beside it."""
    tree, wheel = harness(tmp_path / "tree"), harness(tmp_path / "wheel")
    for name in ("jobs/migrations/env.py", "jobs/sweeps/tiny.yaml", "jobs/__pycache__/store.py"):
        (wheel / name).parent.mkdir(parents=True, exist_ok=True)
        (wheel / name).write_text("x")
    assert provenance.harness_digest(tree) == provenance.harness_digest(wheel)


@pytest.mark.parametrize("name", ["jobs/store.py", "reports/templates/page.html.j2", "orchestrator/cli.py"])
def test_the_harness_digest_sees_each_package(tmp_path: Path, name: str) -> None:
    root = harness(tmp_path)
    before = provenance.harness_digest(root)
    (root / name).write_text("changed")
    assert provenance.harness_digest(root) != before


def test_the_harness_digest_leaves_the_engine_out(tmp_path: Path) -> None:
    root = harness(engine_tree(tmp_path))
    before = provenance.harness_digest(root)
    (root / "engine/__init__.py").write_text("changed")
    assert provenance.harness_digest(root) == before


def test_the_nearest_checkout_above_is_found(tmp_path: Path) -> None:
    tree = engine_tree(tmp_path / "tree")
    assert provenance.find_checkout(tree / "engine/kernels") == tree
    assert provenance.find_checkout(tmp_path) is None


# ---- snapshots ---------------------------------------------------------------------------------------------------


def test_a_snapshot_is_out_of_reach_of_later_edits(tmp_path: Path) -> None:
    tree = engine_tree(tmp_path / "tree")
    place, digest = provenance.snapshot(tree, tmp_path / "cache")
    (tree / "engine/__init__.py").write_text("ANSWER = 2\n")
    assert provenance.tree_digest(place) == digest != provenance.tree_digest(tree)
    assert provenance.snapshot(tree, tmp_path / "cache")[0] != place
    assert not (place / "README.md").exists()


def test_a_snapshot_is_reused_and_mended(tmp_path: Path) -> None:
    tree = engine_tree(tmp_path / "tree")
    place, digest = provenance.snapshot(tree, tmp_path / "cache")
    stamp = (place / "engine/__init__.py").stat().st_ino
    assert provenance.snapshot(tree, tmp_path / "cache") == (place, digest)
    assert (place / "engine/__init__.py").stat().st_ino == stamp
    (place / "engine/__init__.py").write_text("ANSWER = 3\n")
    assert provenance.snapshot(tree, tmp_path / "cache") == (place, digest)
    assert provenance.tree_digest(place) == digest
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [place.name]


# ---- git ---------------------------------------------------------------------------------------------------------


def git(repository: Path, *words: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *words], cwd=repository, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits whose engines differ, the older one tagged, and a branch that holds no engine."""
    root = engine_tree(tmp_path / "repository", answer=1)
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    git(root, "tag", "v1")
    git(root, "checkout", "-q", "-b", "bare")
    git(root, "rm", "-q", "-r", "engine")
    git(root, "commit", "-q", "-m", "no engine")
    git(root, "checkout", "-q", "main")
    engine_tree(root, answer=2)
    git(root, "commit", "-q", "-a", "-m", "two")
    return root


def answer_of(tree: Path) -> str:
    command = [sys.executable, "-P", "-c", "import engine; print(engine.ANSWER)"]
    environment = {"PYTHONPATH": str(tree), "PATH": os.environ["PATH"]}
    return subprocess.run(command, cwd="/", env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_each_ref_gives_its_own_engine(repository: Path, tmp_path: Path) -> None:
    old = git_trees.export_engine(repository, "v1", tmp_path / "cache")
    new = git_trees.export_engine(repository, "main", tmp_path / "cache")
    assert old.python_path is not None
    assert new.python_path is not None
    assert (answer_of(old.python_path), answer_of(new.python_path)) == ("1", "2")
    assert old.commit == git(repository, "rev-parse", "v1")
    assert old.tree_digest != new.tree_digest == provenance.tree_digest(repository)


def test_an_export_leaves_the_repository_alone(repository: Path, tmp_path: Path) -> None:
    before = sorted(path for path in repository.rglob("*"))
    git_trees.export_engine(repository, "v1", tmp_path / "cache")
    assert sorted(path for path in repository.rglob("*")) == before


def test_commits_with_one_engine_share_an_export(repository: Path, tmp_path: Path) -> None:
    first = git_trees.export_engine(repository, "main", tmp_path / "cache")
    (repository / "README.md").write_text("more words")
    git(repository, "commit", "-q", "-a", "-m", "words")
    second = git_trees.export_engine(repository, "main", tmp_path / "cache")
    assert first.python_path == second.python_path
    assert first.commit != second.commit


def test_an_export_that_was_touched_is_made_anew(repository: Path, tmp_path: Path) -> None:
    found = git_trees.export_engine(repository, "v1", tmp_path / "cache")
    assert found.python_path is not None
    (found.python_path / "engine/__init__.py").write_text("ANSWER = 99\n")
    assert git_trees.export_engine(repository, "v1", tmp_path / "cache") == found
    assert answer_of(found.python_path) == "1"
    shutil.rmtree(found.python_path / "engine/kernels")
    assert git_trees.export_engine(repository, "v1", tmp_path / "cache") == found


def test_running_from_an_export_does_not_change_its_digest(repository: Path, tmp_path: Path) -> None:
    found = git_trees.export_engine(repository, "v1", tmp_path / "cache")
    assert found.python_path is not None
    answer_of(found.python_path)
    assert any(found.python_path.rglob("*.pyc")), "the run was to leave its cache"
    assert provenance.tree_digest(found.python_path) == found.tree_digest


def test_several_at_once_make_one_export(repository: Path, tmp_path: Path) -> None:
    found: list[object] = []

    def export() -> None:
        try:
            found.append(git_trees.export_engine(repository, "v1", tmp_path / "cache"))
        except SpecError as error:
            found.append(error)

    threads = [threading.Thread(target=export) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(one == found[0] for one in found), found
    assert len(list((tmp_path / "cache").iterdir())) == 1, "drafts were left behind"


@pytest.mark.parametrize("ref", ["nope", "", "v1^{tree}", "--all", "HEAD:README.md", "0" * 40, "main\nx"])
def test_no_such_ref_is_one_clear_error(repository: Path, tmp_path: Path, ref: str) -> None:
    with pytest.raises(RefError, match="no such git ref") as caught:
        git_trees.export_engine(repository, ref, tmp_path / "cache")
    assert caught.value.exit_code == 2
    assert caught.value.remedy
    assert not (tmp_path / "cache").exists()


def test_a_near_miss_is_named(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(RefError, match=r"no such git ref: 'mian'.*did you mean 'main'\?"):
        git_trees.export_engine(repository, "mian", tmp_path / "cache")


def test_a_name_that_a_branch_and_a_tag_share_is_refused_where_it_matters(repository: Path, tmp_path: Path) -> None:
    git(repository, "branch", "both")
    git(repository, "tag", "-a", "-m", "noted", "both", "main")
    git(repository, "branch", "both-and-more", "v1")
    assert git_trees.resolve_ref(repository, "both") == git(repository, "rev-parse", "main")
    git(repository, "tag", "-f", "both", "v1")  # git takes the tag, and its warning is on stderr
    with pytest.raises(RefError, match=r"'both' is ambiguous.*\(write refs/heads/both or refs/tags/both\)"):
        git_trees.export_engine(repository, "both", tmp_path / "cache")
    assert git_trees.resolve_ref(repository, "refs/heads/both") == git(repository, "rev-parse", "main")


def test_a_commit_without_an_engine_is_refused(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(RefError, match=r"git ref 'bare' \([0-9a-f]{12}\) holds no engine/"):
        git_trees.export_engine(repository, "bare", tmp_path / "cache")


def test_no_repository_and_no_git_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match="is not a git repository"):
        git_trees.resolve_ref(tmp_path, "main")
    with pytest.raises(SpecError, match="no such folder"):
        git_trees.resolve_ref(tmp_path / "nowhere", "main")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SpecError, match="git is not installed"):
        git_trees.resolve_ref(tmp_path, "main")


def test_a_hook_s_variables_do_not_lead_elsewhere(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert git_trees.resolve_ref(repository, "v1")


def test_the_state_of_a_checkout(repository: Path, tmp_path: Path) -> None:
    head = git(repository, "rev-parse", "HEAD")
    assert git_trees.checkout_state(repository) == git_trees.CheckoutState(head, is_dirty=False)
    (repository / "README.md").write_text("words alone do not change what is measured")
    assert git_trees.checkout_state(repository) == git_trees.CheckoutState(head, is_dirty=False)
    (repository / "engine/new.py").write_text("")
    assert git_trees.checkout_state(repository) == git_trees.CheckoutState(head, is_dirty=True)
    assert git_trees.checkout_state(engine_tree(tmp_path / "plain")) == git_trees.CheckoutState(None, is_dirty=False)


def test_a_checkout_without_a_commit(tmp_path: Path) -> None:
    root = engine_tree(tmp_path)
    git(root, "init", "-q")
    assert git_trees.checkout_state(root) == git_trees.CheckoutState(None, is_dirty=True)
