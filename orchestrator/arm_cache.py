"""Trees of arms that were shipped to this host, by the digests of their packs::

    PACK/tree           what was packed
    PACK/tree.sha256    the digest of that; locked by whoever runs from it, and as old as its last use
    .PACK.PID.part      what came so far of one, to worker PID

A tree stands whole or not at all, and one whose files were changed is shipped anew. The least used make room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jobs.arm_packs import unpack
from jobs.errors import PackError, SpecError
from jobs.model import ArmPlan
from jobs.provenance import publish
from jobs.whole_trees import program_digest

MOST_BYTES = 16 << 30
PART_S = 3600.0
"""For how long what has come of a pack, or of its tree, is left alone: its worker may have been killed meanwhile."""
_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(slots=True)
class ArmCache:
    """The trees below `folder` (None: none are taken), of at most `most_bytes` as long as nobody runs from the rest."""

    folder: Path | None
    most_bytes: int = MOST_BYTES
    _refused: dict[str, str] = field(default_factory=dict)  # why a pack that came is not here

    def holds(self, pack: str) -> bool:
        """Whether a tree is here, whole and as it was shipped."""
        return self.folder is not None and _intact(self.folder / pack)

    def take(self, pack: str, position: int, data: bytes) -> None:
        """Keep a chunk of a pack that is on its way; the first one begins anew."""
        part = self._part(pack)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab" if position else "wb") as file:
            file.write(data)

    def finish(self, pack: str) -> bool:
        """All has come: check it, unpack it, make room. False where it cannot be had, and `placed` says why."""
        part = self._part(pack)
        try:
            assert self.folder is not None

            def fill(folder: Path) -> None:
                (folder / "tree").mkdir()
                unpack(part, pack, folder / "tree")
                (folder / "tree.sha256").write_text(program_digest(folder / "tree"), encoding="ascii")

            publish(self.folder / pack, fill, _intact)
            self._refused.pop(pack, None)
            self._make_room(pack)
        except (PackError, SpecError, OSError) as error:
            self._refused[pack] = str(error)
            return False
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
        return True

    @contextlib.contextmanager
    def placed(self, arm: ArmPlan) -> Iterator[ArmPlan]:
        """The arm with its tree as it lies here, which stays there meanwhile. Raises PackError when it does not."""
        if not arm.pack:
            yield arm
            return
        with contextlib.ExitStack() as held:
            try:
                place = self._place(arm.pack)
                mark = held.enter_context((place / "tree.sha256").open("rb"))
                fcntl.flock(mark, fcntl.LOCK_SH)
                if not os.fstat(mark.fileno()).st_nlink:  # it made room between being opened and being locked
                    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), mark.name)
                os.utime(mark.fileno())
            except OSError as error:
                why = self._refused.get(arm.pack) or f"it was not shipped here: {error.strerror}"
                raise PackError(f"the tree of arm {arm.name} is not on this host: {why}") from error
            yield arm.model_copy(update={"python_path": str(place / "tree")})

    def _place(self, pack: str) -> Path:
        if self.folder is None or not _DIGEST.fullmatch(pack):
            raise PackError(f"no pack {pack!r} is taken here")
        return self.folder / pack

    def _part(self, pack: str) -> Path:
        return self._place(pack).with_name(f".{pack}.{os.getpid()}.part")

    def _make_room(self, but: str) -> None:
        """Remove the trees that were used longest ago, until the rest fits; none that somebody runs from."""
        assert self.folder is not None
        for draft in self.folder.glob(".*"):
            with contextlib.suppress(OSError):
                if draft.stat().st_mtime < time.time() - PART_S:
                    shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
        kept: list[tuple[float, int, Path]] = []
        for mark in self.folder.glob("*/tree.sha256"):
            with contextlib.suppress(OSError):
                kept.append((mark.stat().st_mtime, _size(mark.parent), mark))
        total = sum(size for _, size, _ in kept)
        for _, size, mark in sorted(kept):
            if total <= self.most_bytes:
                return
            if mark.parent.name != but and _removed(mark):
                total -= size


def _intact(place: Path) -> bool:
    try:
        return (place / "tree.sha256").read_text(encoding="ascii") == program_digest(place / "tree")
    except (OSError, SpecError):
        return False


def _size(folder: Path) -> int:
    return sum(Path(where, name).lstat().st_size for where, _, names in os.walk(folder) for name in names)


def _removed(mark: Path) -> bool:
    """Remove a tree unless it is in use: without its mark first, so that half of it is none."""
    with contextlib.suppress(OSError), mark.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mark.unlink()
        shutil.rmtree(mark.parent, ignore_errors=True)
        return True
    return False
