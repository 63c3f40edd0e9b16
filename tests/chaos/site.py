"""A place for one chaos test: a copy of the product, a store, a stand-in engine, and what must hold in the end."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock
from sqlalchemy import create_engine

from jobs.judge import input_digest, normalise
from jobs.model import ArmPlan, CellPlan, Limits, Manifest, RunSettings
from jobs.provenance import harness_digest, tree_digest
from jobs.store import Store
from jobs.store.connect import parse_url
from reports.render import render
from tests.chaos.points import Point

ROOT = Path(__file__).parents[2]
PARTS = ("engine", "jobs", "reports", "orchestrator", "alembic")
LEASE_S = 1.5
"""As `serve.py` sets it."""
RUNS = 4


def copy_product(lib: Path) -> Path:
    """The product on an import path of its own, so that no edit meanwhile forbids a resume; faults beside it."""
    for part in PARTS:
        shutil.copytree(ROOT / part, lib / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "tests" / "chaos" / "fault.py", lib / "sitecustomize.py")
    return lib


def wish_of(point: Point, mark: Path) -> str:
    """What `fault.py` is told."""
    module, _, function = point.call.partition(":")
    wish = {"module": module, "name": function, "when": point.when, "fault": point.fault, "skip": point.skip}
    return json.dumps({**wish, "mark": str(mark)})


def outlasted(pid: int) -> None:
    """Wait until a process stands still, and on until its leases have ended."""
    wait_for("it to stand still", lambda: state_of(pid) == "T")
    time.sleep(2 * LEASE_S)


def wait_for(what: str, found: Callable[[], object], within_s: float = 60) -> None:
    deadline_s = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < deadline_s, f"waited {within_s} s for {what}"
        time.sleep(0.02)


def state_of(pid: int) -> str:
    """One letter; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def living(home: Path) -> dict[int, str]:
    """Processes and their command lines, found by the home that all of a site inherit."""
    found, needle = {}, f"HOME={home}".encode()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


@dataclass
class Site:
    """`lib` holds the product. The sweep: base and head, four runs, on the card of whoever serves."""

    root: Path
    url: str
    lib: Path
    sweep_id: str = ""
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def mark(self) -> Path:
        """Made by the fault, with the PID of who met it."""
        return self.root / "mark"

    def submit(self, wish: dict[str, Any] | None = None, **limits: float) -> None:
        """Put the sweep into a new store."""
        tree = self.root / "arm"
        (tree / "engine").mkdir(parents=True)
        (tree / "engine" / "__init__.py").write_text("")
        shutil.copyfile(ROOT / "tests" / "fakes" / "engine_main.py", tree / "engine" / "__main__.py")
        asked = json.dumps({"sleep_s": 0.1, "began": str(self.root / "began"), **(wish or {})})
        arms = tuple(
            ArmPlan(
                name=name, role=role, source="path", tree_digest=tree_digest(tree),
                python_path=str(tree), env={"FAKE_ENGINE": asked},
            )
            for name, role in (("base", "base"), ("head", "head"))
        )  # fmt: skip
        cell = CellPlan(
            cell="m/p", model="m", model_path="/m", model_digest="d", prompt="p", prompt_ids=(1,),
            settings=RunSettings(tokens=3, generations=1), arms=("base", "head"),
        )  # fmt: skip
        bounds = Limits.model_validate({"run_timeout_s": 30, "queue_timeout_s": 30, **limits})
        with Store.open(self.url, lambda: datetime.now(UTC)) as store:
            manifest = Manifest(name="chaos", arms=arms, cells=(cell,), limits=bounds)
            self.sweep_id = store.submit(manifest, harness_digest(self.lib), "test")

    def serve(self, name: str = "here", point: Point | None = None) -> subprocess.Popen[str]:
        """Start a scheduler, named as its card's host is, in which `point` happens."""
        environ = {**os.environ, "HOME": str(self.root), "TMPDIR": str(self.root), "PYTHONPATH": str(self.lib)}
        environ |= {"XDG_CACHE_HOME": str(self.root / "cache"), "XDG_STATE_HOME": str(self.root / "state")}
        if point is not None and point.call:
            environ["CHAOS"] = wish_of(point, self.mark)
        program = str(ROOT / "tests" / "chaos" / "serve.py")
        process = subprocess.Popen(
            [sys.executable, "-P", program, self.url, str(self.root), name],
            cwd=self.root, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def resume(self) -> str:
        """The next scheduler on the same card."""
        again = self.serve()
        text, _ = again.communicate(timeout=90)
        assert again.returncode == 0, text
        assert "Traceback" not in text
        return text

    def store(self) -> Store:
        return Store.open(self.url, lambda: datetime.now(UTC), migrate=False)

    def processes(self) -> dict[int, str]:
        """What lives of this site, by PID."""
        return living(self.root)

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self.started:
            process.kill()
            process.communicate()
        for pid in self.processes():
            os.kill(pid, 9)

    # ---- what must hold ------------------------------------------------------------------------------------------

    def no_verdict_yet(self) -> None:
        """On a part of the rows nothing has been judged."""
        with self.store() as store:
            if store.pending(self.sweep_id).complete < RUNS:
                assert store.verdict(self.sweep_id) is None

    def is_whole(self, costs: str) -> None:
        """One complete attempt a run, judged on all rows; `costs` is how the one attempt ended that does not count."""
        with self.store() as store:
            left = store.pending(self.sweep_id)
            assert (left.runs, left.complete, left.live_attempts, left.leased_blocks) == (RUNS, RUNS, 0, 0)
            given = store.judge_input(self.sweep_id)
            spent = []
            for run in given.cells[0].runs:
                (measured,) = [one for one in run.attempts if one.state == "measured"]
                assert run.record is not None and run.record.attempt_id == measured.attempt_id
                spent += [(one.state, one.reason) for one in run.attempts if one.state != "measured"]
            assert [state for state, _ in spent] == ([costs] if costs else []), spent
            assert store.sweep(self.sweep_id).state == "judged"
            verdict = store.verdict(self.sweep_id)
            assert verdict is not None and verdict.outcome == "PASS"
            assert verdict.input_digest == input_digest(normalise(given)), "judged on what is stored, and all of it"
            ended = Counter(event.target for event in store.events(self.sweep_id) if event.kind == "run")
            assert ended == {"complete": RUNS}, "each run ended once"
        text = render(verdict, "json")
        for state, reason in spent:
            assert reason and reason in text and state in text, "the report names what happened"

    def nothing_is_left(self) -> None:
        """No process, no lock of a card, no outcome in the spool, no connection, no writer's lock."""
        wait_for(f"no process left: {self.processes()}", lambda: not self.processes(), 15)
        for lock in (self.root / "locks").glob("*.lock"):
            FileLock(lock).acquire(timeout=0.5).lock.release()
        assert not list(self.root.glob("*/spool/**/*.json"))
        if self.url.startswith("sqlite"):
            connection = sqlite3.connect(self.url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)
            connection.execute("BEGIN IMMEDIATE")
            connection.close()
            return
        others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        engine = create_engine(parse_url(self.url))
        try:
            with engine.connect() as own:
                wait_for("no connection left", lambda: not own.exec_driver_sql(others).scalar_one(), 10)
        finally:
            engine.dispose()
