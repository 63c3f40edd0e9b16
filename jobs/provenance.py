"""What was measured and by what: digests of engine trees and of the harness, and how sources become trees.

The parent computes these; the child's own word is only compared with them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol

from jobs.errors import SpecError
from jobs.model import BuildFailure, BuildPlan

ENGINE_SUFFIXES = frozenset({".py", ".cu", ".json"})
HARNESS_PACKAGES = ("jobs", "reports", "orchestrator")
HARNESS_SUFFIXES = frozenset({".py", ".json", ".j2", ".css", ".js"})
# A wheel carries the migrations and sweeps under jobs/, a checkout beside it: neither changes how a run is judged.
HARNESS_APART = frozenset({"jobs/migrations", "jobs/sweeps"})

SHELL = ("bash", "-euo", "pipefail", "-c")
"""What runs a sweep file's commands: builds, and arms that are programs."""

SourceKind = Literal["checkout", "installed", "path", "git", "merge-base"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: a folder, or a zoo name (with a seed for a made-up one). One of the two is set.

    `layers` of a geometry, None for all; `hollow`: a build without its weights, or a folder that may be; `poured`: one
    whose weights are made at the disk's rate; `skew` of its routers. `any_files`: no engine of ours will load it, so
    that it may be any file or folder.
    """

    path: Path | None = None
    build: str | None = None
    seed: int | None = None
    layers: int | None = None
    hollow: bool = False
    any_files: bool = False
    poured: bool = False
    skew: float = 0.0


@dataclass(frozen=True, slots=True)
class ArmSource:
    """Where an arm's engine comes from; `value` is the git ref or the absolute folder, empty otherwise.

    `build`: what must be run in the whole tree of that source before it can serve. `program`: what serves is a command
    in that tree, which need hold no engine. `peer`: what serves is a library, driven by a file of the harness.
    """

    kind: SourceKind
    value: str = ""
    build: BuildPlan | None = None
    program: bool = False
    peer: bool = False


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model folder that exists, and the digest of its files."""

    path: Path
    digest: str


@dataclass(frozen=True, slots=True)
class ResolvedArm:
    """An engine tree that exists: the folder above `engine/` (None: the installed package), and its digest.

    With `failure` there is none: no folder, an empty digest.
    """

    python_path: Path | None
    tree_digest: str
    commit: str | None = None
    failure: BuildFailure | None = None
    note: str = ""  # on how its commit was found


class Resolver(Protocol):
    """Turns the words of a sweep file into things on this machine; every miss is a SpecError with a remedy."""

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        """Find or build a model."""

    def prompt_ids(self, model: ResolvedModel, text: str) -> tuple[int, ...]:
        """Encode text with the model's own tokenizer."""

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        """Find, export or build an engine tree; a build that fails is an answer, no error."""


def tree_digest(tree: Path, outputs: Sequence[str] = ()) -> str:
    """sha256 over the engine below `tree`: sorted relative paths and contents of its code and data, caches apart.

    `tree` is the folder that holds `engine/`; `outputs` are the files, or folders of files, that a build made in it:
    other bytes in one of them are another engine. Raises SpecError when there is no engine in the tree, or when an
    output is absent, empty as a folder, or leads out of the tree.
    """
    files = set(engine_files(tree))
    if not files:
        raise SpecError(f"no engine in {tree}", "give the folder that holds engine/__init__.py")
    for output in outputs:
        files |= output_files(tree, output)
    return _digest(tree, files)


def output_files(tree: Path, output: str) -> set[Path]:
    """The files of one declared output of a build, which may be a folder; caches in it do not count."""
    place = tree / output
    found = {place} if place.is_file() else set(_walk(place, Path.is_file))
    if not found:
        raise SpecError(f"output {output} is missing", "the build command must make it; outputs count from the tree")
    outside = [path for path in sorted(found) if not path.resolve().is_relative_to(tree.resolve())]
    if outside:
        raise SpecError(f"output {output} leads out of the tree, to {outside[0].resolve()}", "build into the tree")
    return found


def engine_files(tree: Path) -> Iterator[Path]:
    """The files that make an engine what it is, in no order; none when `tree` holds no engine package."""
    if (tree / "engine" / "__init__.py").is_file():
        yield from _walk(tree / "engine", lambda path: path.suffix in ENGINE_SUFFIXES)


def harness_digest(root: Path) -> str:
    """sha256 over jobs, reports and orchestrator below `root`: equal for a checkout and the wheel made of it."""

    def counts(path: Path) -> bool:
        inside = path.relative_to(root).as_posix()
        return path.suffix in HARNESS_SUFFIXES and not any(inside.startswith(f"{apart}/") for apart in HARNESS_APART)

    files = [path for package in HARNESS_PACKAGES for path in _walk(root / package, counts)]
    if not files:
        raise SpecError(f"no harness in {root}", "give the folder that holds jobs/, reports/ and orchestrator/")
    return _digest(root, files)


def own_root() -> Path:
    """The folder that this package was imported from: a checkout's root, or site-packages."""
    return Path(__file__).resolve().parent.parent


def find_checkout(start: Path) -> Path | None:
    """The nearest folder at or above `start` that holds an engine package; None when there is none."""
    for folder in (start, *start.parents):
        if (folder / "engine" / "__init__.py").is_file():
            return folder
    return None


def snapshot(tree: Path, cache: Path) -> tuple[Path, str]:
    """Copy the engine of `tree` into `cache` under its digest, so that edits made meanwhile cannot reach a run.

    Returns the copy's folder and the digest. Safe against other processes doing the same.
    """

    def fill(folder: Path) -> None:
        for path in engine_files(tree):
            target = folder / path.relative_to(tree)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    digest = tree_digest(tree)
    place = cache / f"tree-{digest[:40]}"
    if not _holds(place, digest):
        publish(place, fill, lambda folder: _holds(folder, digest))
        # An edit between digest and copy gives another tree than the one that was named.
        if not _holds(place, digest):
            shutil.rmtree(place, ignore_errors=True)
            raise SpecError(f"{tree}/engine changed while it was being copied", "run again once it is at rest")
    return place, digest


def publish(place: Path, fill: Callable[[Path], None], intact: Callable[[Path], bool]) -> None:
    """Make folder `place` by filling a neighbour and renaming it: others see all of it or none.

    What stands at `place` by then is kept if `intact` says so (another process was first), else replaced.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        fill(draft)
        draft.chmod(0o755)
        if place.exists() and not intact(place):
            _set_aside(place)
        try:
            draft.rename(place)
        except OSError:
            if not place.exists():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _set_aside(place: Path) -> None:
    """Rename before removing, so that no reader meets a half-removed folder under the real name."""
    grave = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        place.rename(grave / "old")
    except FileNotFoundError:
        pass
    finally:
        shutil.rmtree(grave, ignore_errors=True)


def _holds(place: Path, digest: str) -> bool:
    return place.is_dir() and any(engine_files(place)) and tree_digest(place) == digest


def _walk(folder: Path, counts: Callable[[Path], bool]) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        for name in names:
            path = Path(where, name)
            if not name.startswith(".") and counts(path):
                yield path


def _digest(root: Path, files: Iterable[Path]) -> str:
    """Each file enters as path, NUL, length, content: no two trees share a byte string."""
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: PurePosixPath(path.relative_to(root).as_posix())):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}", "mend or remove the file") from error
        total.update(path.relative_to(root).as_posix().encode() + b"\0" + len(content).to_bytes(8, "big") + content)
    return total.hexdigest()
