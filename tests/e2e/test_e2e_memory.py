"""What a whole run costs in memory, all its processes together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.main_job import MARK, measure, processes, pss_bytes

ROOT = Path(__file__).parents[2]
HELD_BYTES = 40 << 20
HOLDER = f"import time; held = b'x' * {HELD_BYTES}; print(flush=True); time.sleep(60)"


@pytest.mark.parametrize("orphan", [False, True])
def test_processes_are_found_by_descent_or_by_mark_and_their_memory_is_added(tmp_path: Path, orphan: bool) -> None:
    """A process that lost its parent, as Ray's daemons do, is found by the mark alone."""
    environ = {**os.environ, MARK: str(tmp_path)} if orphan else None
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, env=environ)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        found = processes(other.pid if orphan else os.getpid(), str(tmp_path))
        assert holder.pid in found
        assert pss_bytes(holder.pid) > HELD_BYTES
    finally:
        for process in (holder, other):
            process.kill()
            process.wait()
    deadline_s = time.monotonic() + 5
    while pss_bytes(holder.pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert pss_bytes(holder.pid) == 0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_sweep_stays_far_below_four_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    record = measure(ROOT / "sweeps" / "tiny.yaml")
    assert record["exit_code"] == 0, record["log_tail"]
    assert record["samples"] > 10
    assert record["processes_at_peak"] > 4  # the command, its driver, Ray's servers, a worker
    assert 200 << 20 < record["peak_pss_bytes"] < 2 << 30
