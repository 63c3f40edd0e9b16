"""The digest of a folder's files as this process reads them: a child's own word for what it loaded is not enough.

Reading a model takes seconds, so a digest is kept for as long as no file of the folder changes its inode, size or
times. The time of the last change of the inode is among them: unlike the one of the content, nobody can set it back.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from engine.errors import EngineError
from engine.zoo import model_digest
from engine.zoo.fetch import sha256_of
from jobs.errors import SpecError
from jobs.model import CellPlan
from jobs.whole_trees import program_digest

Stamp = tuple[str, int, int, int, int]


class FolderDigests:
    """Digests by folder. Call it with a folder; raises SpecError when it cannot be read.

    `digest` computes one, and may raise SpecError or EngineError.
    """

    def __init__(self, digest: Callable[[Path], str]) -> None:
        self._digest = digest
        self._known: dict[Path, tuple[tuple[Stamp, ...], str]] = {}

    def __call__(self, folder: Path) -> str:
        """The digest of the files in `folder` now."""
        try:
            stamps = _stamps(folder)
            known = self._known.get(folder)
            if known is not None and known[0] == stamps:
                return known[1]
            digest = self._digest(folder)
            if _stamps(folder) != stamps:
                raise SpecError(f"files in {folder} change while they are read", "let nothing write there during a run")
        except (EngineError, OSError) as exc:
            raise SpecError(
                f"{folder} cannot be read: {exc}", "put its files back as they were, or submit anew"
            ) from exc
        self._known[folder] = (stamps, digest)
        return digest


class ModelDigests(FolderDigests):
    """Digests of models by their folders."""

    def __init__(self) -> None:
        super().__init__(lambda folder: model_digest(folder, hollow=True))


class AnyModelDigests(FolderDigests):
    """Digests of models by their folder or file: those that the engine loads as it has them, others by all bytes."""

    def __init__(self) -> None:
        super().__init__(_any_digest)


def _any_digest(place: Path) -> str:
    try:
        return model_digest(place, hollow=True)
    except EngineError:
        return program_digest(place) if place.is_dir() else sha256_of(place)


def model_fault(models: Callable[[Path], str], cell: CellPlan) -> str | None:
    """What is wrong with a cell's model, as this process reads its files, against the plan."""
    folder = Path(cell.model_path)
    try:
        digest = models(folder)
    except SpecError as exc:
        return f"model {cell.model}: {exc}"
    if not cell.model_digest or digest == cell.model_digest:
        return None
    return (
        f"model {cell.model} in {cell.model_path} has digest {digest[:12]}, the plan says {cell.model_digest[:12]}: "
        f"it changed since the sweep was submitted; {last_changed(folder)}"
    )


def last_changed(folder: Path) -> str:
    """The file of a folder that was changed last, and when, in words."""
    try:
        name, *_, changed_ns = max(_stamps(folder), key=lambda stamp: stamp[-1], default=("", 0))
    except OSError as exc:
        return f"its files cannot be listed: {exc}"
    if not name:
        return "it holds no file"
    at = datetime.fromtimestamp(int(changed_ns) / 1e9, UTC)
    return f"the file changed last is {name}, at {at.isoformat(timespec='seconds')}"


def _stamps(folder: Path) -> tuple[Stamp, ...]:
    """(name, inode, size, mtime_ns, ctime_ns) of every file below a folder."""
    found = []
    for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
        if path.is_file():
            row = path.stat()
            name = path.relative_to(folder).as_posix() if path != folder else path.name
            found.append((name, row.st_ino, row.st_size, row.st_mtime_ns, row.st_ctime_ns))
    return tuple(found)
