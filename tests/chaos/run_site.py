"""A place to run `assay run` in, on a Ray of its own: a home, caches, a store, a sweep with a slow stand-in engine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from jobs.judge import input_digest, normalise
from jobs.store import Store
from tests.chaos.points import Point
from tests.chaos.site import ROOT, copy_product, living, wait_for, wish_of

FAKE = ROOT / "tests" / "fakes" / "engine_main.py"
SWEEP = """\
sweep: kills
models:
  tiny: {{build: tiny, seed: 7}}
prompts:
  short: {{ids: [1, 2]}}
arms:
  base: {{source: "path:arm", env: {env}}}
  head: {{like: base}}
run: {{tokens: 3, generations: 1}}
limits: {{run_timeout_s: 60}}
"""
DRIVER = """\
import os, signal, sys
from orchestrator import aftermath, dispatch
from orchestrator.cli import call
def kill(*_args, **_kwargs):
    for pid in (os.getppid(), os.getpid()): os.kill(pid, signal.SIGKILL)  # the command and its driver
{patch}
sys.exit(call(sys.argv[1:]))
"""


@dataclass
class Site:
    """A place of its own: home, caches, temporary folder, a store and a sweep with a slow stand-in engine."""

    root: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)
    extra: dict[str, str] = field(default_factory=dict)

    @property
    def mark(self) -> Path:
        return self.root / "mark"

    @property
    def met(self) -> Path:
        """Made by the fault, with the PID of who met it."""
        return self.root / "met"

    def environ(self) -> dict[str, str]:
        """What each process of this place finds."""
        home = str(self.root / "home")
        places = {"HOME": home, "XDG_CACHE_HOME": f"{home}/cache", "XDG_STATE_HOME": f"{home}/state"}
        above = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # a host without a network may have libraries there
        places |= {
            "TMPDIR": str(self.root / "t"),
            "PYTHONPATH": os.pathsep.join([f"{self.root}/lib", *filter(None, above)]),
        }
        return {**os.environ, **places, **self.extra}

    def assay(self, *words: str, patch: str = "", point: Point | None = None) -> subprocess.Popen[str]:
        """Start a driver, wrapped by `patch`, or with a fault at one point of it or of its workers."""
        program = self.root / "driver.py"
        program.write_text(DRIVER.format(patch=patch))
        environ = self.environ()
        if point is not None and point.call:
            environ["CHAOS"] = wish_of(point, self.met)
        process = subprocess.Popen(
            [sys.executable, str(program), *words],
            cwd=self.root,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def children(self) -> list[int]:
        """PIDs of engine children so far, in order of their start."""
        return [int(line.split()[0]) for line in self.mark.read_text().splitlines()] if self.mark.exists() else []

    def descendants(self) -> dict[int, str]:
        """What lives of this site, by PID."""
        return living(self.root / "home")

    def store(self, name: str = ".assay/store.db") -> Store:
        return Store.open(f"sqlite:///{self.root / name}", lambda: datetime.now(UTC), migrate=False)


@contextlib.contextmanager
def laid_out() -> Iterator[Site]:
    """A place with a copy of the product and an arm of the stand-in engine; the sweep is the test's own."""
    root = Path(tempfile.mkdtemp(prefix="ak", dir="/tmp"))  # short: Ray's sockets lie below it
    (root / "home").mkdir()
    (root / "t").mkdir()
    copy_product(root / "lib")
    package = root / "arm" / "engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copyfile(FAKE, package / "__main__.py")
    shutil.copy(FAKE.with_name("card_holder.py"), package)
    made = Site(root)
    try:
        yield made
    finally:
        for process in made.started:
            process.kill()
            process.wait()
        shutil.rmtree(root, ignore_errors=True)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def output(process: subprocess.Popen[str], within_s: float = 90) -> str:
    text, _ = process.communicate(timeout=within_s)
    return text


def one_complete_attempt_a_run(site: Site, name: str = ".assay/store.db") -> dict[str, int]:
    """Counts of attempt states; every run complete by exactly one measured attempt, and nothing under a lease."""
    store = site.store(name)
    (row,) = store.sweeps()
    left = store.pending(row.id)
    assert (left.runs, left.complete, left.live_attempts, left.leased_blocks) == (4, 4, 0, 0)
    states: dict[str, int] = {}
    given, verdict = store.judge_input(row.id), store.verdict(row.id)
    assert verdict is not None and verdict.input_digest == input_digest(normalise(given)), (
        "judged on all that is stored"
    )
    told = {(one.attempt_id, one.reason) for one in verdict.set_aside}
    for run in given.cells[0].runs:
        assert [a.state for a in run.attempts].count("measured") == 1
        assert run.record is not None
        assert run.record.attempt_id == next(a.attempt_id for a in run.attempts if a.state == "measured")
        for attempt in run.attempts:
            assert attempt.state == "measured" or (attempt.attempt_id, attempt.reason) in told, "the report says why"
            states[attempt.state] = states.get(attempt.state, 0) + 1
    assert row.state == "judged"
    store.close()
    return states


def nothing_left(site: Site) -> None:
    wait_for(f"no process left: {site.descendants()}", lambda: not site.descendants(), 15)
    temporary = site.root / "t"  # the guard of a driver that died sweeps up within moments of its death
    wait_for("no folder left", lambda: not [p for p in temporary.iterdir() if p.name != "assay-cards"], 15)
    assert not list((site.root / "home" / "state" / "assay" / "spool").glob("*"))


def resume(site: Site) -> str:
    """Go on, at once and without waiting for leases; the card must be free."""
    again = site.assay("run", "sweep.yaml", "--resume")
    text = output(again)
    assert "Traceback" not in text
    assert again.returncode == 0, text
    return text


SERVERS = ("gcs_server", "raylet")


def servers(site: Site) -> dict[str, int]:
    """Ray's own servers by name."""
    found = {line.split()[0].rpartition("/")[2]: pid for pid, line in site.descendants().items() if line.strip()}
    return {name: found[name] for name in SERVERS if name in found}
