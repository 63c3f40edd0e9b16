"""One measuring process a card: a host-wide file lock per UUID.

The lock is an advisory lock on an open file, so the kernel frees it when its holder dies, however it dies. A line
beside it says who holds it; that line is for people only and is never trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock, Timeout

from orchestrator.cards import CardHeld, ProbeError

WAIT_S = 1.0


class CardLock:
    """Holds one card for this process.

    Raises CardHeld naming the holder when it is taken, ProbeError when the folder of locks has been tampered with.
    """

    def __init__(self, uuid: str, who: str, folder: Path) -> None:
        self._folder = folder
        self._uuid = uuid
        self._who = who
        stem = re.sub(r"[^A-Za-z0-9.-]", "_", uuid)
        self._lock_path = self._folder / f"{stem}.lock"
        self._holder_path = self._folder / f"{stem}.holder"
        self._lock: FileLock | None = None

    def acquire(self, wait_s: float = WAIT_S, stopped: Callable[[], bool] = lambda: False) -> None:
        """Take the card within `wait_s` seconds, or say who has it."""
        self._open_to_all()
        lock = FileLock(self._lock_path, mode=0o666, thread_local=False, preserve_lock_file=True)
        try:
            lock.acquire(timeout=wait_s, cancel_check=stopped)
        except Timeout as exc:
            raise CardHeld(f"card {self._uuid} is held by {self.holder()}", "wait for it or end it") from exc
        self._lock = lock
        with contextlib.suppress(OSError):
            self._write_holder(json.dumps({"pid": os.getpid(), "who": self._who}))

    def _open_to_all(self) -> None:
        """Make the folder, for every user. Who may write beside it or in it must not lead us elsewhere by a link."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as exc:
            raise ProbeError(
                f"card locks cannot lie in {self._folder}: {exc.strerror}", "remove what is there"
            ) from exc
        try:
            with contextlib.suppress(PermissionError):  # another user made it, with these rights
                os.fchmod(folder, 0o777)  # no sticky bit: with it, Linux forbids opening another user's lock file
        finally:
            os.close(folder)
        for path in (self._lock_path, self._holder_path):
            if path.is_symlink():
                raise ProbeError(f"{path} is a link, and card locks follow none", "find out who made it; remove it")

    def _write_holder(self, line: str) -> None:
        self._holder_path.unlink(missing_ok=True)
        fresh = os.open(self._holder_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        with os.fdopen(fresh, "w") as file:
            file.write(line)

    def release(self) -> None:
        """Give the card back; harmless when it is not held."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._holder_path.unlink(missing_ok=True)
            self._lock.release()
            self._lock = None

    def holder(self) -> str:
        """Who says that it holds the card."""
        try:
            note = json.loads(self._holder_path.read_text())
            return f"process {int(note['pid'])} ({note['who']})"
        except (OSError, ValueError, KeyError, TypeError):
            return "a process that left no name"
