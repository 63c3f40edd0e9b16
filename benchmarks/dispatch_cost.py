"""What a run costs the dispatcher: many cards that are threads of this process, and runs that only wait.

All but the card's own work is the product's: the store in a file, the dispatcher, the placer on threads. Its time is
the processor time of the thread that it runs on, and beside it the wall time that it was not waiting for an answer.
Memory is the resident set after each tenth of the runs.

    python -m benchmarks.dispatch_cost [--cards N] [--runs N] [--run-s S] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.sim_decode import host_facts
from jobs.adapters.base import RunOrder
from jobs.model import ArmPlan, CellPlan, Certificate, Generation, Manifest, RunRecord, RunSettings
from jobs.provenance import harness_digest, own_root
from jobs.store import Store
from orchestrator.cards import CardName
from orchestrator.choose import simulated_cards
from orchestrator.dispatch import Dispatcher
from orchestrator.outcome import RunOutcome
from orchestrator.place import InProcessPlacer, Ticket
from orchestrator.scripted import ScriptedProbe
from orchestrator.seat import Happening
from orchestrator.worker import GpuWorker, WorkerSettings, WorkOrder

CELLS = 10
RUNS_A_BLOCK = 4
COUNTERS = 40
TOKENS = 32
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", type=int, default=256)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--run-s", type=float, default=2.0, help="how long a run waits on its card")
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ab-") as folder:
        record = measure(Path(folder), arguments.cards, arguments.runs, arguments.run_s)
    document = json.dumps(record, indent=1)
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


class WaitingWorker(GpuWorker):
    """A worker whose run waits and brings a record of the usual size; it looks, and answers, as any other."""

    run_s = 2.0

    def run(self, work: WorkOrder) -> RunOutcome:
        """One attempt."""
        time.sleep(self.run_s)
        order = work.order
        return RunOutcome(
            sweep_id=work.sweep_id, run_id=order.run_id, attempt_id=order.attempt_id, fence=work.fence,
            worker=self.worker, end="measured", reason="", retry=False, record=record_of(order, self.card),
        )  # fmt: skip


@dataclass(slots=True)
class TimedPlacer(InProcessPlacer):
    """Workers as threads; how long was waited for them."""

    waited_s: float = 0.0

    def ready(self, tickets: Sequence[Ticket], timeout_s: float) -> tuple[Ticket, ...]:
        """Tickets whose thread has answered."""
        begin_s = time.perf_counter()
        try:
            return super(TimedPlacer, self).ready(tickets, timeout_s)
        finally:
            self.waited_s += time.perf_counter() - begin_s


@dataclass(slots=True)
class Growth:
    """Resident memory as runs end."""

    each: int
    ended: int = 0
    resident_bytes: list[int] = field(default_factory=list)

    def tell(self, happening: Happening) -> None:
        """Take note of an end."""
        if happening.kind == "end":
            self.ended += 1
            if self.ended % self.each == 0:
                self.resident_bytes.append(resident_bytes())


def measure(root: Path, cards: int, runs: int, run_s: float) -> dict[str, Any]:
    """The record of one sweep of `runs` runs, worked to its end."""
    load_before = os.getloadavg()
    store = Store.open(f"sqlite:///{root / 'store.db'}", lambda: datetime.now(UTC))
    sweep_id = store.submit(manifest(runs), "h" * 64, "0")
    works = WorkerSettings(root / "spool", root / "scratch", root / "locks")
    WaitingWorker.run_s = run_s

    def make(worker: str, card: CardName, stopped: Callable[[], bool]) -> GpuWorker:
        return WaitingWorker(worker, card, works, ScriptedProbe([card.uuid], time.monotonic), {}, stopped)

    placer, growth = TimedPlacer(simulated_cards("bench", cards), make), Growth(runs // 10)
    hellos = placer.open()
    dispatcher = Dispatcher(store, placer, "bench", sweep_id, tell=growth.tell)
    dispatcher.seat(hellos)
    begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
    left = dispatcher.work()
    cpu_s, wall_s = time.thread_time() - begin_cpu_s, time.perf_counter() - begin_s
    placer.close()
    store.close()
    assert (left.complete, left.pending, left.exhausted) == (runs, 0, 0), left
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "harness_digest": harness_digest(own_root()),
        "cards": cards,
        "runs": runs,
        "run_s": run_s,
        "wall_s": round(wall_s, 1),
        "dispatcher_cpu_ms_a_run": round(cpu_s / runs * 1e3, 2),
        "dispatcher_not_waiting_ms_a_run": round((wall_s - placer.waited_s) / runs * 1e3, 2),
        "cards_busy": round(runs * run_s / cards / wall_s, 3),
        "resident_bytes_after_each_tenth": growth.resident_bytes,
        "host": host_facts(),
        "load_average": {"before": load_before, "after": os.getloadavg()},
    }


def manifest(runs: int) -> Manifest:
    """Base and head, two runs of each a block."""
    arms = tuple(ArmPlan(name=role, role=role, source="checkout") for role in ("base", "head"))
    cells = tuple(
        CellPlan(
            cell=f"m/p{number}", model="m", model_path="/m", model_digest="d", prompt="p", prompt_ids=(number,),
            settings=RunSettings(tokens=TOKENS), arms=("base", "head"), blocks=runs // CELLS // RUNS_A_BLOCK,
        )
        for number in range(CELLS)
    )  # fmt: skip
    return Manifest(name="bench", arms=arms, cells=cells)


def record_of(order: RunOrder, card: CardName) -> RunRecord:
    """What a run of an engine brings: ids, a time a step, counters, a certificate."""
    generations = tuple(
        Generation(index=index, warmup=False, ids=tuple(range(TOKENS)), stop_reason="length", step_ns=(1000,) * TOKENS)
        for index in range(order.cell.settings.generations)
    )
    return RunRecord(
        run_id=order.run_id, attempt_id=order.attempt_id, attempt_number=order.attempt_number, exit_code=0,
        model_digest="d", generations=generations, counters={f"counter_{n}": n for n in range(COUNTERS)},
        effective_config={"policy": {"value": "lru", "source": "default"}},
        certificate=Certificate(uuid=card.uuid, card=card.name, driver="sim", verdict="clear", grade="scripted"),
    )  # fmt: skip


def resident_bytes() -> int:
    """Resident set of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


if __name__ == "__main__":
    main()
