"""One sweep on simulated cards in a folder of its own: spawned, run, stored, judged and rendered as any other.

What is left out of `assay run` is Ray, which places workers and changes nothing of what they do: here they are threads.
The cards are named for the stage, so that no other sweep of this host waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ulid import ULID

from jobs.model import Manifest
from jobs.provenance import harness_digest, own_root
from jobs.spec import load, plan
from jobs.store import Store
from orchestrator.choose import simulated_cards
from orchestrator.conclude import Concluded, judge_sweep, write_reports
from orchestrator.dispatch import Dispatcher
from orchestrator.embedded import open_questions
from orchestrator.lost import Stopped
from orchestrator.place import InProcessPlacer
from orchestrator.resolve import LocalResolver
from orchestrator.scripted import ScriptedProbe, State
from orchestrator.settings import Settings
from orchestrator.version import harness_version
from orchestrator.worker import GpuWorker, WorkerSettings

Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Stage:
    """A folder with store, cache and spool of its own.

    `environ` is what children may draw on; `stopped` ends it all.
    """

    folder: Path
    environ: Mapping[str, str]
    stopped: Stop = lambda: False
    host: str = field(default_factory=lambda: str(ULID()).lower())

    def play(
        self,
        name: str,
        sweep: str | Path,
        *,
        card: Sequence[State] = (),
        meddle: Callable[[Manifest], None] = lambda _manifest: None,
        cells: int | None = None,
    ) -> Concluded:
        """Run a sweep, its text or its file, to its verdict; store and reports stand in `folder`/NAME.

        `card` is the script of the card, `meddle` is done once the sweep is submitted, and with `cells` the driver is
        stopped when so many cells are complete. Raises SpecError for a sweep that is none, Stopped when it is stopped.
        """
        out = self.folder / name
        out.mkdir(parents=True)
        file = sweep if isinstance(sweep, Path) else out / "sweep.yaml"
        if isinstance(sweep, str):
            file.write_text(sweep, encoding="utf-8")
        given = self._settings(file.parent, out)
        manifest = plan(load(file), LocalResolver(given))
        store = Store.open(given.store_url, lambda: datetime.now(UTC))
        try:
            harness = harness_digest(own_root())
            sweep_id = store.submit(manifest, harness, harness_version(), key=f"stage-{ULID()}".lower())
            meddle(manifest)
            self._work(store, sweep_id, given, card, cells)
            verdict = judge_sweep(store, sweep_id, final=True)
            return write_reports(store, sweep_id, verdict, out, "")
        finally:
            store.close()

    def _work(self, store: Store, sweep_id: str, given: Settings, card: Sequence[State], cells: int | None) -> None:
        cards = simulated_cards(self.host, 1)
        works = WorkerSettings(given.spool, self.folder / "scratch", self.folder / "locks", who="assay selftest")

        def make(worker: str, name: Any, stopped: Stop) -> GpuWorker:
            probe = ScriptedProbe([name.uuid], time.monotonic, card)
            return GpuWorker(worker, name, works, probe, self.environ, stopped)

        def enough() -> bool:
            return self.stopped() or (cells is not None and _complete_cells(store, sweep_id) >= cells)

        placer = InProcessPlacer(cards, make)
        dispatcher = Dispatcher(store, placer, self.host, sweep_id, stopped=enough)
        try:
            dispatcher.seat(placer.open())
            dispatcher.work()
            while asked := open_questions(store, sweep_id):
                dispatcher.ask(sweep_id, asked)
        except Stopped:
            if self.stopped():
                raise
        finally:
            placer.close()

    def _settings(self, cwd: Path, out: Path) -> Settings:
        return Settings(
            cwd=cwd,
            store_url=f"sqlite:///{out / 'store.db'}",
            out=out,
            cache=self.folder / "cache",
            state=self.folder / "state",
            host=self.host,
            environ=self.environ,
        )


def _complete_cells(store: Store, sweep_id: str) -> int:
    cells = store.judge_input(sweep_id).cells
    return sum(all(run.state == "complete" for run in cell.runs) for cell in cells)
