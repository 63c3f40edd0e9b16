"""The digest of a model's files as this process reads them: a child's own word for what it loaded is not enough.

Reading a model takes seconds, so a digest is kept for as long as no file of the folder changes its inode, size or
times. The time of the last change of the inode is among them: unlike the one of the content, nobody can set it back.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from engine.errors import EngineError
from engine.zoo import model_digest
from jobs.errors import SpecError

Stamp = tuple[str, int, int, int, int]


class ModelDigests:
    """Digests by folder. Call it with a folder; raises SpecError when the model cannot be read."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[Stamp, ...], str]] = {}

    def __call__(self, folder: Path) -> str:
        """The digest of the files in `folder` now."""
        try:
            stamps = _stamps(folder)
            known = self._known.get(folder)
            if known is not None and known[0] == stamps:
                return known[1]
            digest = model_digest(folder, hollow=True)
            if _stamps(folder) != stamps:
                raise SpecError(f"files in {folder} change while they are read", "let nothing write there during a run")
        except (EngineError, OSError) as exc:
            raise SpecError(f"{folder} cannot be read: {exc}", "build the model again") from exc
        self._known[folder] = (stamps, digest)
        return digest


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
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            row = path.stat()
            found.append(
                (path.relative_to(folder).as_posix(), row.st_ino, row.st_size, row.st_mtime_ns, row.st_ctime_ns)
            )
    return tuple(found)
