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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.errors import RefError, SpecError
from jobs.git_trees import engine_of, last_line, resolve_ref, run_git
from jobs.provenance import output_files, publish, tree_digest

OURS = ".assay"  # store and reports: written while a sweep runs, and no part of what is measured
APART = frozenset({".git", "__pycache__", OURS})
HAS_ENGINE = "engine/__init__.py"


@dataclass(frozen=True, slots=True)
class WholeTree:
    """A source tree: equal hashes hold equal files. `fill` puts its files into an empty folder, or raises SpecError.

    `program`: what runs is a command in the tree, so that each file counts, and not an engine that is imported.
    """

    hash: str
    fill: Callable[[Path], None]
    program: bool = False

    def digest(self, folder: Path, outputs: Sequence[str]) -> str:
        """The digest of the tree in a folder, with the outputs of its build. Raises SpecError when one is missing."""
        if not self.program:
            return tree_digest(folder, outputs)
        for output in outputs:
            output_files(folder, output)
        return program_digest(folder)


def program_digest(folder: Path) -> str:
    """sha256 over every file of a program's tree, links and the bit to execute included; caches of Python apart."""
    return _hash(folder, walked(folder))


def place_program(tree: WholeTree, cache: Path) -> tuple[Path, str]:
    """Copy a program's tree into `cache`, unless it is there; the folder, and its digest."""
    place = cache / f"program-{hashlib.sha256(tree.hash.encode()).hexdigest()[:40]}"
    mark = place / "tree.sha256"

    def intact(folder: Path) -> bool:
        try:
            return (folder / mark.name).read_text(encoding="ascii") == program_digest(folder / "tree")
        except (OSError, SpecError):
            return False

    def fill(folder: Path) -> None:
        (folder / "tree").mkdir()
        tree.fill(folder / "tree")
        (folder / mark.name).write_text(program_digest(folder / "tree"), encoding="ascii")

    if not intact(place):
        publish(place, fill, intact)
    return place / "tree", mark.read_text(encoding="ascii")


def whole_ref(repository: Path, ref: str, *, program: bool = False) -> tuple[WholeTree, str]:
    """The tree of a git ref, and its commit. Raises RefError when the ref is unknown or its commit holds no engine,
    which a `program` needs not."""
    commit = resolve_ref(repository, ref) if program else engine_of(repository, ref)[0]
    tree = run_git(repository, "rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}").stdout.decode().strip()
    return WholeTree(
        f"{'program-' * program}git-{tree}", lambda folder: _export(repository, commit, folder), program
    ), commit


def whole_folder(folder: Path, *, program: bool = False) -> WholeTree:
    """The tree of a folder as it is now; filling from it later fails when it has changed since.

    Raises SpecError when it holds no engine, which a `program` needs not, or no file, or one that cannot be read.
    """
    if not program and not (folder / HAS_ENGINE).is_file():
        raise SpecError(f"no engine in {folder}", f"give the folder that holds {HAS_ENGINE}")
    kept = "" if program else HAS_ENGINE
    if not any(True for _ in _files(folder, kept)):
        raise SpecError(f"no file in {folder}", "give the folder that holds the program")
    found = _hash(folder, _files(folder, kept))

    def fill(target: Path) -> None:
        names = list(_files(folder, kept))
        for name in names:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            # With times and modes: make compares the ones, a configure script needs the others.
            shutil.copy2(folder / name, target / name, follow_symlinks=False)
        if _hash(target, names) != found:
            raise SpecError(f"{folder} changed while it was being copied", "run again once it is at rest")

    return WholeTree(f"{'program-' * program}files-{found}", fill, program)


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


def _files(folder: Path, kept: str) -> Iterator[str]:
    """Relative names of the files and links of a folder, in no order; `kept` is one that no ignore rule may hide."""
    listed = _listed(folder, kept)
    for name in walked(folder) if listed is None else listed:
        path = folder / name
        if path.is_symlink() or path.is_file():
            yield name


def _listed(folder: Path, kept: str) -> list[str] | None:
    """What git tracks or would add; None without git, and when the repository around the folder ignores it."""
    if shutil.which("git") is None:
        return None
    done = run_git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    if done.returncode or (kept not in names if kept else not names):
        return None
    return [name for name in names if not APART & set(Path(name).parts)]


def walked(folder: Path) -> Iterator[str]:
    """Relative names of all files and links of a folder but caches of Python, `.git` and our own, in no order."""
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
