"""A store, cards with scripts, and sweeps of a stand-in engine: what the dispatcher and the scheduler are tried on."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from jobs.adapters.base import RunOrder
from jobs.adapters.native import NativeAdapter
from jobs.model import ArmPlan, CellPlan, Limits, Manifest, RunSettings
from jobs.provenance import tree_digest
from jobs.store import Pending, Priority, Store
from orchestrator.cards import CardName
from orchestrator.choose import simulated_cards
from orchestrator.dispatch import Dispatcher
from orchestrator.embedded import half_done
from orchestrator.leases import BEAT_S
from orchestrator.lost import HostLost
from orchestrator.outcome import RunOutcome, Spool
from orchestrator.place import InProcessPlacer
from orchestrator.scripted import ScriptedProbe
from orchestrator.seat import Happening
from orchestrator.worker import GpuWorker, WorkerSettings, WorkOrder

FAKE = Path(__file__).parents[1] / "fakes" / "engine_main.py"

PATIENT = Limits(queue_timeout_s=20)


class Field:
    """A store, cards with scripts, and a sweep of the stand-in engine with one wish an arm."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path
        package = tmp_path / "arm" / "engine"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        shutil.copyfile(FAKE, package / "__main__.py")
        self.now_s = 0.0  # what the store's clock is ahead
        self.store = Store.open(
            f"sqlite:///{tmp_path / 'store.db'}", lambda: datetime.now(UTC) + timedelta(seconds=self.now_s)
        )
        self.works = WorkerSettings(tmp_path / "spool", tmp_path / "scratch", tmp_path / "locks")
        self.spool = Spool(self.works.spool)
        self.heard: list[Happening] = []
        self.scripts: dict[str, list[dict[str, Any]]] = {}
        self.clock: Callable[[], float] = time.monotonic  # of the cards' scripts
        self.cards: tuple[CardName, ...] = simulated_cards("test", 1)

    def submit(
        self,
        wishes: dict[str, dict[str, Any]],
        *,
        blocks: int = 1,
        limits: Limits = PATIENT,
        name: str = "fake",
        priority: Priority = "pr",
        harness: str = "h" * 64,
    ) -> tuple[str, Manifest]:
        """A sweep of one cell; each arm's stand-in engine does as its wish says."""
        tree = self.root / "arm"
        arms = tuple(
            ArmPlan(
                name=name,
                role="base" if name == "base" else "head",
                source="path",
                tree_digest=tree_digest(tree),
                python_path=str(tree),
                env={"FAKE_ENGINE": json.dumps(wish)},
            )
            for name, wish in wishes.items()
        )
        cell = CellPlan(
            cell="m/p",
            model="m",
            model_path="/m",
            model_digest="d",
            prompt="p",
            prompt_ids=(1,),
            settings=RunSettings(tokens=3, generations=1),
            arms=tuple(wishes),
            blocks=blocks,
        )
        manifest = Manifest(name=name, arms=arms, cells=(cell,), limits=limits)
        return self.store.submit(manifest, harness, "test", priority=priority), manifest

    def make(self, worker: str, card: CardName, stopped: Callable[[], bool]) -> GpuWorker:
        probe = ScriptedProbe([card.uuid], self.clock, self.scripts.get(worker, []))
        adapters = {"native": NativeAdapter(models=lambda _folder: "d")}
        return GpuWorker(worker, card, self.works, probe, {"PATH": "/usr/bin:/bin"}, stopped, adapters)

    def work(
        self,
        sweep_id: str,
        manifest: Manifest,
        *,
        placer: InProcessPlacer | None = None,
        stopped: Callable[[], bool] = lambda: False,
        beat_s: float = BEAT_S,
    ) -> Pending:
        placer = placer or InProcessPlacer(self.cards, self.make)
        hellos = placer.open()
        homes = half_done(self.store.judge_input(sweep_id))
        dispatcher = Dispatcher(
            self.store,
            placer,
            "driver",
            sweep_id,
            stopped=stopped,
            tell=self.heard.append,
            beat_s=beat_s,
        )
        try:
            dispatcher.seat(hellos, homes.values())
            return dispatcher.work()
        except HostLost:
            dispatcher.abandon()
            raise
        finally:
            placer.close()

    def attempts(self, sweep_id: str) -> dict[str, list[tuple[str, str]]]:
        """(state, reason) of each attempt, by arm, in order."""
        found: dict[str, list[tuple[str, str]]] = {}
        for run in (run for cell in self.store.judge_input(sweep_id).cells for run in cell.runs):
            found.setdefault(run.arm, []).extend((a.state, a.reason) for a in run.attempts)
        return found

    def spool_one(self, sweep_id: str, manifest: Manifest) -> tuple[str, RunOutcome]:
        """One attempt run by a driver that died before it stored the outcome."""
        claim = self.store.claim_block(sweep_id, "dead/w0", 60)
        assert claim is not None
        run = claim.pending[0]
        attempt = self.store.open_attempt(run.run_id, claim.fence, "dead/w0", self.cards[0].uuid)
        self.store.move(attempt.attempt_id, claim.fence, "claimed", "clearing")
        self.store.move(attempt.attempt_id, claim.fence, "clearing", "running")
        worker = self.make("w0", self.cards[0], lambda: False)
        worker.start()
        try:
            arm = next(arm for arm in manifest.arms if arm.name == run.arm)
            order = RunOrder(run.run_id, attempt.attempt_id, 1, claim.plan, arm, self.cards[0].uuid, 20.0)
            return attempt.attempt_id, worker.run(WorkOrder(sweep_id, claim.fence, order))
        finally:
            worker.close()
