"""Whole trees of git refs and folders: equal hashes hold equal files, and a copy is what was hashed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.errors import RefError, SpecError
from jobs.git_trees import checkout_state
from jobs.whole_trees import WholeTree, whole_folder, whole_ref


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def files_at(root: Path) -> Path:
    texts = {
        "engine/__init__.py": "x = 1\n",
        "native/fast.c": "int fast;\n",
        "native/Makefile": "all:\n",
        "configure": "#!/bin/sh\n",
        ".gitignore": "*.o\n/out/\n",
        "native/fast.o": "ignored",
        "out/big": "ignored",
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "configure").chmod(0o755)
    (root / "native/link").symlink_to("fast.c")
    return root


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = files_at(tmp_path / "repository")
    git(root, "init", "-q")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "one")
    return root


def names_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink() or path.is_file()}


def filled(tree: WholeTree, folder: Path) -> Path:
    folder.mkdir(parents=True)
    tree.fill(folder)
    return folder


TRACKED = {".gitignore", "configure", "engine/__init__.py", "native/Makefile", "native/fast.c", "native/link"}


def test_a_ref_gives_all_that_its_commit_holds(repository: Path, tmp_path: Path) -> None:
    tree, commit = whole_ref(repository, "main")
    assert commit == git(repository, "rev-parse", "HEAD")
    assert tree.hash == f"git-{git(repository, 'rev-parse', 'HEAD^{tree}')}"
    (repository / "native/fast.c").write_text("edited since")
    folder = filled(tree, tmp_path / "a" / "copy")
    assert names_of(folder) == TRACKED
    assert (folder / "native/fast.c").read_text() == "int fast;\n"
    assert (folder / "configure").stat().st_mode & 0o100
    assert (folder / "native/link").readlink() == Path("fast.c")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["copy"], "the archive was left behind"


def test_a_ref_that_is_not_there_or_holds_no_engine_is_refused(repository: Path) -> None:
    with pytest.raises(RefError, match="no such git ref"):
        whole_ref(repository, "nope")
    git(repository, "rm", "-q", "-r", "engine")
    git(repository, "commit", "-q", "-m", "none")
    with pytest.raises(RefError, match="holds no engine/"):
        whole_ref(repository, "main")


def test_a_link_that_leads_out_of_a_commit_is_refused_with_its_commit(repository: Path, tmp_path: Path) -> None:
    (repository / "away").symlink_to("/etc/hostname")
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", "away")
    tree, commit = whole_ref(repository, "main")
    with pytest.raises(RefError, match=f"commit {commit[:12]} cannot be exported"):
        filled(tree, tmp_path / "copy")


def test_a_checkout_gives_tracked_and_new_files_and_no_ignored_ones(repository: Path, tmp_path: Path) -> None:
    (repository / "new.c").write_text("new")
    (repository / "native/Makefile").unlink()
    (repository / ".assay").mkdir()
    (repository / ".assay/store.db").write_text("written while a sweep runs")
    folder = filled(whole_folder(repository), tmp_path / "copy")
    assert names_of(folder) == TRACKED - {"native/Makefile"} | {"new.c"}
    stamp = (repository / "native/fast.c").stat().st_mtime_ns
    assert (folder / "native/fast.c").stat().st_mtime_ns == stamp, "make would take the copy for newer than its source"
    assert (folder / "native/link").is_symlink()


def test_a_folder_without_git_gives_all_but_caches(tmp_path: Path) -> None:
    root = files_at(tmp_path / "plain")
    (root / "engine/__pycache__").mkdir()
    (root / "engine/__pycache__/x.pyc").write_text("x")
    (root / "linked").symlink_to("native")
    folder = filled(whole_folder(root), tmp_path / "copy")
    assert names_of(folder) == TRACKED | {"native/fast.o", "out/big", "linked"}
    assert (folder / "linked").is_symlink()


def test_a_folder_that_the_repository_around_it_ignores_is_taken_whole(repository: Path, tmp_path: Path) -> None:
    inner = files_at(repository / "out" / "head")
    assert names_of(filled(whole_folder(inner), tmp_path / "copy")) >= TRACKED


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        (lambda root: (root / "native/fast.c").write_text("int slow;\n"), True),
        (lambda root: (root / "native/fast.c").rename(root / "native/slow.c"), True),
        (lambda root: (root / "configure").chmod(0o644), True),
        (lambda root: (root / "new").write_text(""), True),
        (lambda root: ((root / "native/link").unlink(), (root / "native/link").symlink_to("Makefile")), True),
        (lambda root: ((root / "native/link").unlink(), (root / "native/link").write_text("int fast;\n")), True),
        (lambda root: (root / "native/fast.o").write_text("other"), False),
        (lambda root: (root / "native/fast.c").touch(), False),
    ],
)
def test_the_hash_sees_what_a_build_would_see(
    repository: Path, change: Callable[[Path], object], is_seen: bool
) -> None:
    before = whole_folder(repository).hash
    change(repository)
    assert (whole_folder(repository).hash != before) is is_seen


def test_a_folder_that_changes_before_it_is_copied_is_refused(repository: Path, tmp_path: Path) -> None:
    tree = whole_folder(repository)
    (repository / "native/fast.c").write_text("edited meanwhile")
    with pytest.raises(SpecError, match="changed while it was being copied"):
        filled(tree, tmp_path / "copy")


def test_a_folder_without_an_engine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no engine in"):
        whole_folder(tmp_path)


def test_the_state_of_a_whole_checkout(repository: Path) -> None:
    everything = (".", ":(exclude).assay")
    (repository / ".assay").mkdir()
    (repository / ".assay/store.db").write_text("ours")
    assert not checkout_state(repository, everything).is_dirty
    (repository / "native/fast.c").write_text("edited")
    assert checkout_state(repository, everything).is_dirty
    assert not checkout_state(repository).is_dirty, "the engine is as committed"
