"""What the host did during a run, from the process table and CPU clocks; nothing here touches a card."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path
from typing import Any

import psutil


class HostMeter:
    """CPU time of the whole host against our own between `start` and `read`; a large rest is somebody else's work."""

    def __init__(self) -> None:
        self._begin = self._now()

    def read(self) -> dict[str, Any]:
        """Load, cores, and CPU seconds: of all, of this process and its ended children, and of the others."""
        wall_s, all_s, own_s = (now - then for now, then in zip(self._now(), self._begin, strict=True))
        return {
            "load_1m": os.getloadavg()[0],
            "cores": os.cpu_count(),
            "wall_s": round(wall_s, 3),
            "cpu_s": round(all_s, 3),
            "own_cpu_s": round(own_s, 3),
            "foreign_cpu_s": round(max(0.0, all_s - own_s), 3),
        }

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0)
        guest_s = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted within user and nice
        own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return time.monotonic(), sum(times) - idle_s - guest_s, sum(u.ru_utime + u.ru_stime for u in own)


def visible_pids(pids: tuple[int, ...]) -> frozenset[int]:
    """Those of `pids` that this process table knows."""
    return frozenset(pid for pid in pids if Path(f"/proc/{pid}").exists())


def group_members(pids: tuple[int, ...], group: int) -> frozenset[int]:
    """Those of `pids` that belong to a process group."""
    found = set()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == group:
                found.add(pid)
    return frozenset(found)
