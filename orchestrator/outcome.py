"""What a worker hands back for one attempt, and the spool that keeps it until somebody has stored it.

The spool is a folder on the worker's own disk: one file an attempt, written whole, flushed to the disk, and removed
only when the dispatcher acknowledges. A dispatcher that dies between a run's end and its store write loses nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, TextIO

from pydantic import ValidationError

from jobs.document import Document
from jobs.model import RunRecord

TRIES = 100
"""How often a folder is made anew that another worker's last outcome took away."""
OutcomeEnd = Literal["measured", "refused", "failed", "cancelled", "contaminated"]


class RunOutcome(Document):
    """How an attempt ended, with the fence that it ran under.

    `record` is there whenever a child ran; it counts only when `end` is measured. `retry`: another attempt could end
    otherwise. `fault`: the class of error that ended it. `unspooled`: why its worker could not keep it.
    """

    sweep_id: str
    run_id: str
    attempt_id: str
    fence: int
    worker: str
    end: OutcomeEnd
    reason: str = ""
    retry: bool = False
    fault: str = ""
    record: RunRecord | None = None
    unspooled: str = ""


class Spool:
    """Outcomes not yet acknowledged, in `folder`/SWEEP/ATTEMPT.json."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, outcome: RunOutcome) -> None:
        """Keep an outcome; when this returns it survives a power cut. Raises OSError where it cannot be kept."""
        folder = self._folder / outcome.sweep_id
        target = folder / f"{outcome.attempt_id}.json"
        draft = target.with_suffix(".tmp")
        try:
            with _opened(draft) as file:
                file.write(outcome.canonical())
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # it takes room on a disk that may have none
                draft.unlink()
                folder.rmdir()
            raise
        descriptor = os.open(folder, os.O_RDONLY)  # an outcome may be taken, and the folder, once it stands
        try:
            draft.rename(target)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def acknowledge(self, sweep_id: str, attempt_id: str) -> None:
        """Forget an outcome that is stored, or was never whole, and the sweep's folder with its last one."""
        folder = self._folder / sweep_id
        for kind in ("json", "tmp"):
            (folder / f"{attempt_id}.{kind}").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or never made
            folder.rmdir()

    def sweeps(self) -> tuple[str, ...]:
        """The sweeps of which an outcome is kept."""
        return tuple(sorted({path.parent.name for path in self._folder.glob("swp_*/*.json")}))

    def left_over(self, sweep_id: str) -> tuple[RunOutcome, ...]:
        """Outcomes of a sweep that nobody acknowledged, oldest first; those that cannot be read are not among them."""
        return tuple(outcome for _, outcome in self._read(sweep_id) if outcome is not None)

    def unreadable(self, sweep_id: str) -> tuple[str, ...]:
        """Attempts whose file says nothing that can be understood; set them aside and let them count as lost."""
        return tuple(path.stem for path, outcome in self._read(sweep_id) if outcome is None)

    def set_aside(self, sweep_id: str, attempt_id: str) -> Path:
        """Move an outcome out of the way, where a person can look at it and no driver meets it again; its new place."""
        folder = self._folder / sweep_id
        aside = self._folder / "aside"
        aside.mkdir(parents=True, exist_ok=True)
        target = aside / f"{sweep_id}.{attempt_id}.json"
        with contextlib.suppress(FileNotFoundError):  # acknowledged, or given by hand
            (folder / f"{attempt_id}.json").rename(target)
        with contextlib.suppress(OSError):
            folder.rmdir()
        return target

    def clear_drafts(self, sweep_id: str) -> None:
        """Remove what workers that are gone had begun to write of a sweep; no live one may be writing any."""
        folder = self._folder / sweep_id
        for draft in folder.glob("*.tmp"):
            draft.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()

    def _read(self, sweep_id: str) -> list[tuple[Path, RunOutcome | None]]:
        files = sorted((self._folder / sweep_id).glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [(path, _outcome(path, sweep_id)) for path in files]


def _opened(draft: Path) -> TextIO:
    """A new file in a folder made for it: whoever acknowledges the last outcome meanwhile removes the folder again."""
    for _ in range(TRIES):
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            draft.parent.mkdir(parents=True, exist_ok=True)
            return draft.open("w", encoding="utf-8")
    draft.parent.mkdir(parents=True, exist_ok=True)  # something else is in the way: say so
    return draft.open("w", encoding="utf-8")


def _outcome(path: Path, sweep_id: str) -> RunOutcome | None:
    """A file's outcome; None also when it speaks of another sweep or attempt than its name says."""
    try:
        outcome = RunOutcome.model_validate_json(path.read_bytes())
    except (ValidationError, OSError):
        return None
    return outcome if (outcome.sweep_id, outcome.attempt_id) == (sweep_id, path.stem) else None
