"""A small process that outlives the driver by a moment and ends what a killed driver leaves behind.

Ray's own processes notice a vanished driver late: after a SIGKILL two of its agents were seen for 15 to 70 s. The guard
waits on a pipe whose other end only the driver holds. When that closes, however the driver ended, it ends every process
that carries the driver's mark in its environment, or that runs this Python or Ray's programs with a file open under the
driver's own temporary folder (Ray's processes rename themselves, which can hide their environment), then removes that
folder. Mark and folder are made for this driver alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

MARK = "ASSAY_MARK"
MOST_SWEEP_S = 40.0
MOST_FOLDER_BYTES = 107 - len("/assay-01234567/session_2026-11-30_14-10-01_887299_4194304/sockets/plasma_store")
"""Of the folder for temporary files: Ray's longest socket under it must fit into the 107 bytes that Linux gives one."""

_GUARD = r"""
import os, shutil, signal, sys, time
mark, folder, python = ("ASSAY_MARK=" + sys.argv[1]).encode(), sys.argv[2], os.path.realpath(sys.executable)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
os.read(0, 1)
def ours(pid):
    try:
        if mark in open("/proc/%s/environ" % pid, "rb").read().split(b"\0"): return True
        program, fds = os.readlink("/proc/%s/exe" % pid), "/proc/%s/fd/" % pid
        if program != python and "/ray/core/" not in program: return False
        return any(os.readlink(fds + fd).startswith(folder + "/") for fd in os.listdir(fds))
    except OSError: return False
spared = (str(os.getpid()), sys.argv[3])
quiet, deadline = 0, time.monotonic() + 30
while quiet < 3 and time.monotonic() < deadline:
    found = [p for p in os.listdir("/proc") if p.isdigit() and p not in spared and ours(p)]
    for pid in found:
        try: os.kill(int(pid), signal.SIGKILL)
        except OSError: pass
    quiet = 0 if found else quiet + 1
    time.sleep(0.1)
shutil.rmtree(folder, ignore_errors=True)
"""


@dataclass(slots=True)
class Guard:
    """The guard of this process. `folder` is where everything that it started may write."""

    mark: str
    folder: Path
    _process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, mark: str) -> Guard:
        """Start it; `mark` must be unique to this driver, and goes into the environment of all it starts."""
        folder = Path(tempfile.mkdtemp(prefix="assay-", dir=_short_enough(tempfile.gettempdir())))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, mark, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", "")},
            cwd="/",
            start_new_session=True,
        )
        return cls(mark, folder, process)

    def finish(self) -> None:
        """Let it sweep up now, and wait for it: afterwards nothing of ours is left. Harmless a second time."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            swept = self._process.wait(timeout=MOST_SWEEP_S) == 0
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self._process.kill()
            swept = self._process.wait() == 0
        if not swept:
            shutil.rmtree(self.folder, ignore_errors=True)


def _short_enough(folder: str) -> str:
    """The folder for temporary files, or /tmp where sockets in it would have longer names than the system takes."""
    return folder if len(os.fsencode(folder)) <= MOST_FOLDER_BYTES else "/tmp"
