"""`assay scheduler` with workers on threads in place of a Ray cluster: `serve.py STORE ROOT NAME`.

All else is the product's: the command, its driver, the dispatcher, workers, adapter and spool. Leases are short.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator import leases

leases.LEASE_S, leases.BEAT_S = 1.5, 0.3  # before anybody takes them over

from jobs.adapters.native import NativeAdapter  # noqa: E402
from orchestrator import dispatch, scheduler  # noqa: E402
from orchestrator.cards import CardName  # noqa: E402
from orchestrator.choose import simulated_cards  # noqa: E402
from orchestrator.cli import call  # noqa: E402
from orchestrator.place import InProcessPlacer  # noqa: E402
from orchestrator.scripted import ScriptedProbe  # noqa: E402
from orchestrator.worker import GpuWorker, WorkerCard, WorkerSettings  # noqa: E402


class Threads(InProcessPlacer):
    """Workers on threads."""

    def joined(self) -> tuple[WorkerCard, ...]:
        return ()


def make(worker: str, card: CardName, stopped: Callable[[], bool]) -> GpuWorker:
    probe = ScriptedProbe([card.uuid], time.monotonic, [])
    adapters = {"native": NativeAdapter(models=lambda _folder: "d")}
    return GpuWorker(worker, card, WORKS, probe, os.environ, stopped, adapters)


store, root, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
WORKS = WorkerSettings(root / name / "spool", root / name / "scratch", root / "locks")
dispatch.ASK_AGAIN_S = 0.2  # a block whose lease has ended is waited for no longer than it must
scheduler.Scheduler.__init__.__kwdefaults__["keep_s"] = 0.2  # type: ignore[index]
vars(scheduler)["ClusterPlacer"] = lambda **_given: Threads(simulated_cards(name, 1), make)
if __name__ == "__main__":
    sys.exit(call(["scheduler", "--address", "here", "--store", store, "--once"]))
