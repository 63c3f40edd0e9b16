"""The whole tree of an arm's source, as a build needs it: what it is, by a hash, and how it gets into a folder.

A git ref is exported by `git archive`, so submodules and what `export-ignore` names stay out. A folder gives its
tracked and untracked files, without those that git ignores; a folder that no repository holds gives all it has.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import RefError, SpecError
from jobs.git_trees import engine_of, last_line, run_git

OURS = ".assay"  # store and reports: written while a sweep runs, and no part of what is measured
APART = frozenset({".git", "__pycache__", OURS})
HAS_ENGINE = "engine/__init__.py"


@dataclass(frozen=True, slots=True)
class WholeTree:
    """A source tree: equal hashes hold equal files. `fill` puts its files into an empty folder, or raises SpecError."""

    hash: str
    fill: Callable[[Path], None]


def whole_ref(repository: Path, ref: str) -> tuple[WholeTree, str]:
    """The tree of a git ref, and its commit. Raises RefError when the ref is unknown or its commit holds no engine."""
    commit, _ = engine_of(repository, ref)
    tree = run_git(repository, "rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}").stdout.decode().strip()
    return WholeTree(f"git-{tree}", lambda folder: _export(repository, commit, folder)), commit


def whole_folder(folder: Path) -> WholeTree:
    """The tree of a folder as it is now; filling from it later fails when it has changed since.

    Raises SpecError when it holds no engine, or a file cannot be read.
    """
    if not (folder / HAS_ENGINE).is_file():
        raise SpecError(f"no engine in {folder}", f"give the folder that holds {HAS_ENGINE}")
    found = _hash(folder, _files(folder))

    def fill(target: Path) -> None:
        names = list(_files(folder))
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            # With times and modes: make compares the ones, a configure script needs the others.
            shutil.copy2(folder / name, target / name, follow_symlinks=False)
        if _hash(target, names) != found:
            raise SpecError(f"{folder} changed while it was being copied", "run again once it is at rest")

    return WholeTree(f"files-{found}", fill)


def _export(repository: Path, commit: str, folder: Path) -> None:
    """Through a file, since a whole repository may be larger than what memory should hold."""
    with tempfile.TemporaryDirectory(prefix=".export-", dir=folder.parent) as scratch:
        packed = Path(scratch, "tree.tar")
        done = run_git(repository, "archive", "--format=tar", f"--output={packed}", commit)
        if done.returncode:
            raise RefError(f"git archive of {commit[:12]} failed: {last_line(done.stderr)}", "check the repository")
        try:
            with tarfile.open(packed) as archive:
                archive.extractall(folder, filter="data")
        except tarfile.TarError as error:
            raise RefError(f"commit {commit[:12]} cannot be exported: {error}", "give the arm as path:DIR") from error


def _files(folder: Path) -> Iterator[str]:
    """Relative names of the files and links of a folder, in no order."""
    listed = _listed(folder)
    for name in _walked(folder) if listed is None else listed:
        path = folder / name
        if path.is_symlink() or path.is_file():
            yield name


def _listed(folder: Path) -> list[str] | None:
    """What git tracks or would add; None without git, and when the repository around the folder ignores its engine."""
    if shutil.which("git") is None:
        return None
    done = run_git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    if done.returncode or HAS_ENGINE not in names:
        return None
    return [name for name in names if not APART & set(Path(name).parts)]


def _walked(folder: Path) -> Iterator[str]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in APART]
        links = [name for name in folders if Path(where, name).is_symlink()]
        yield from (str(Path(where, name).relative_to(folder)) for name in (*names, *links))


def _hash(root: Path, names: Iterable[str]) -> str:
    """sha256 over names, kinds, the bit to execute, and contents; times do not count."""
    total = hashlib.sha256()
    for name in sorted(set(names)):
        path = root / name
        try:
            if path.is_symlink():
                kind, content = b"link", hashlib.sha256(os.fsencode(path.readlink()))
            else:
                kind = b"program" if path.stat().st_mode & stat.S_IXUSR else b"file"
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256")
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}", "mend or remove the file") from error
        total.update(os.fsencode(name) + b"\0" + kind + b"\0" + content.digest())
    return total.hexdigest()
