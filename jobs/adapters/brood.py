"""All that one child has started, wherever it went: found after the child's end, ended, and named.

Three nets, since each has a hole: its process group (left by setsid), a mark in the environment (lost with a wiped
one), and adoption: this process is the reaper of its descendants, so that one whose parent has died becomes its own
child, and not init's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "ASSAY_CHILD"
"""Variable that every process of one child inherits, so that one that left group and session is found all the same."""
ROUNDS = 50
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Brood:
    """The descendants of one child, told apart by its mark and by which children this process had `before`."""

    mark: str
    before: frozenset[int]

    @classmethod
    def expected(cls) -> Brood:
        """For the child that is spawned next. From now on this process adopts orphans among its descendants."""
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        mark = f"{os.getpid():010d}-{time.monotonic_ns():020d}"  # of fixed length: it lies on the child's stack
        return cls(mark, frozenset(pid for pid, _ in _own_children()))

    def end(self) -> tuple[int, ...]:
        """KILL all of them that live; their PIDs. Call it when the child itself has been reaped.

        Looked for until nothing is left, since one that is being killed may just have started another.
        """
        ended: set[int] = set()
        for _ in range(ROUNDS):
            killed = {pid for pid in {*self._marked(), *self._adopted()} if _kill(pid)}
            if not killed:
                break
            ended |= killed
            time.sleep(0.02)
        for pid in ended:
            with contextlib.suppress(ChildProcessError):  # not adopted: another's to reap
                os.waitpid(pid, os.WNOHANG)
        return tuple(sorted(ended))

    def _marked(self) -> Iterator[int]:
        """Processes whose environment carries the mark; one of another user cannot be read and is not ours."""
        word = f"{MARK}={self.mark}".encode()
        return (pid for pid in _pids() if word in _environment(pid))

    def _adopted(self) -> Iterator[int]:
        """Children of this process that it did not spawn: neither had before, nor another run's, nor just forked."""
        own = _environment(os.getpid())
        for pid, state in _own_children():
            if pid in self.before or state in "ZX":
                continue
            environment = _environment(pid)
            if environment != own and not any(word.startswith(f"{MARK}=".encode()) for word in environment):
                yield pid


def end_members(group: int) -> tuple[int, ...]:
    """KILL what has outlived a group's reaped leader; a group without members is not touched, its number may be new."""
    members = tuple(pid for pid in _pids() if (stat := _stat(pid)) and int(stat[2]) == group and stat[0] not in "ZX")
    if members:
        signal_group(group, signal.SIGKILL)
    return members


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _kill(pid: int) -> bool:
    """Whether it could be signalled: not when it is gone, or another user's."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _own_children() -> Iterator[tuple[int, str]]:
    """PID and state of each child of this process."""
    own = str(os.getpid())
    return ((pid, stat[0]) for pid in _pids() if (stat := _stat(pid)) and stat[1] == own)


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _stat(pid: int) -> tuple[str, str, str] | None:
    """State, parent and process group; None when it is gone."""
    try:
        state, parent, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None
    return state, parent, group


def _environment(pid: int) -> list[bytes]:
    """The variables that a process was started with; empty where they cannot be read, as a zombie's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
