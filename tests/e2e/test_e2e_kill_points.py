"""SIGKILL at six named points: afterwards `assay run --resume` completes with one complete attempt a run.

No fault switch in the product. Points that can be seen from outside (a child in its run, its worker, the Ray node) are
found by process and killed; points inside the driver are found by a driver whose one function is wrapped, here in the
test, so that it kills itself before or after it. After each: no process is left, no card is held, nothing counts twice.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from jobs.store import Store

ROOT = Path(__file__).parents[2]
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
from orchestrator import dispatch
from orchestrator.cli import call
def kill(*_args, **_kwargs):
    for pid in (os.getppid(), os.getpid()): os.kill(pid, signal.SIGKILL)  # the command and its driver
{patch}
sys.exit(call(sys.argv[1:]))
"""
# Each replaces one call of the dispatcher by a kill before or after it.
AFTER_CLAIM = "dispatch.Dispatcher._begin = kill"
BEFORE_WRITE = "dispatch.settle = kill"
AFTER_WRITE = "own = dispatch.settle\ndispatch.settle = lambda *given: (own(*given), kill())"


@dataclass
class Site:
    """A place of its own: home, caches, temporary folder, a store and a sweep with a slow stand-in engine."""

    root: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def mark(self) -> Path:
        return self.root / "mark"

    def assay(self, *words: str, patch: str = "") -> subprocess.Popen[str]:
        """Start a driver, wrapped by `patch`."""
        program = self.root / "driver.py"
        program.write_text(DRIVER.format(patch=patch))
        home = str(self.root / "home")
        environ = {**os.environ, "HOME": home, "XDG_CACHE_HOME": f"{home}/cache", "XDG_STATE_HOME": f"{home}/state"}
        environ |= {"TMPDIR": str(self.root / "t"), "PYTHONPATH": str(self.root / "lib")}
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
        """Live processes of this site, found by the home that all of them inherit."""
        found = {}
        needle = f"HOME={self.root / 'home'}".encode()
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and needle in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def store(self) -> Store:
        return Store.open(f"sqlite:///{self.root / '.assay' / 'store.db'}", lambda: datetime.now(UTC), migrate=False)


@pytest.fixture
def site() -> Iterator[Site]:
    root = Path(tempfile.mkdtemp(prefix="ak", dir="/tmp"))  # short: Ray's sockets lie below it
    (root / "home").mkdir()
    (root / "t").mkdir()
    (root / "sleep_s").write_text("0.7")
    for part in ("engine", "jobs", "reports", "orchestrator", "alembic"):  # an edit meanwhile must not forbid a resume
        shutil.copytree(ROOT / part, root / "lib" / part, ignore=shutil.ignore_patterns("__pycache__"))
    package = root / "arm" / "engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copyfile(FAKE, package / "__main__.py")
    env = json.dumps({"FAKE_ENGINE": json.dumps({"sleep_file": str(root / "sleep_s"), "mark": str(root / "mark")})})
    (root / "sweep.yaml").write_text(SWEEP.format(env=env))
    made = Site(root)
    yield made
    for process in made.started:
        process.kill()
        process.wait()
    shutil.rmtree(root, ignore_errors=True)


def wait_for(what: str, found: Callable[[], bool], within_s: float = 60) -> None:
    deadline_s = time.monotonic() + within_s
    while not found():
        assert time.monotonic() < deadline_s, f"waited {within_s} s for {what}"
        time.sleep(0.02)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def output(process: subprocess.Popen[str], within_s: float = 90) -> str:
    text, _ = process.communicate(timeout=within_s)
    return text


def one_complete_attempt_a_run(site: Site) -> dict[str, int]:
    """Counts of attempt states; every run complete by exactly one measured attempt, and nothing under a lease."""
    store = site.store()
    (row,) = store.sweeps()
    left = store.pending(row.id)
    assert (left.runs, left.complete, left.live_attempts, left.leased_blocks) == (4, 4, 0, 0)
    states: dict[str, int] = {}
    for run in store.judge_input(row.id).cells[0].runs:
        assert [a.state for a in run.attempts].count("measured") == 1
        assert run.record is not None
        assert run.record.attempt_id == next(a.attempt_id for a in run.attempts if a.state == "measured")
        for attempt in run.attempts:
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


@pytest.mark.parametrize(
    ("patch", "tries"),
    [
        pytest.param(AFTER_CLAIM, {"measured": 4}, id="driver-after-claim", marks=pytest.mark.slow),
        pytest.param(BEFORE_WRITE, {"measured": 4}, id="driver-before-store-write", marks=pytest.mark.slow),
        pytest.param(AFTER_WRITE, {"measured": 4}, id="driver-after-store-write-before-acknowledge"),
    ],
)
@pytest.mark.timeout(240)
def test_a_driver_killed_at_a_named_point_is_resumed(site: Site, patch: str, tries: dict[str, int]) -> None:
    first = site.assay("run", "sweep.yaml", patch=patch)
    output(first)
    assert first.returncode == -signal.SIGKILL
    resume(site)
    assert one_complete_attempt_a_run(site) == tries
    nothing_left(site)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_driver_killed_while_a_child_decodes_loses_one_attempt(site: Site) -> None:
    first = site.assay("run", "sweep.yaml")
    wait_for("a child", lambda: len(site.children()) == 2)
    first.kill()
    output(first)
    resume(site)
    assert one_complete_attempt_a_run(site) == {"measured": 4, "lost": 1}
    nothing_left(site)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["child", "worker"])
@pytest.mark.timeout(240)
def test_a_child_or_worker_killed_in_a_run_costs_one_attempt_and_the_sweep_goes_on(site: Site, who: str) -> None:
    run = site.assay("run", "sweep.yaml")
    wait_for("a child", lambda: len(site.children()) == 2)
    child = site.children()[1]
    time.sleep(0.3)
    os.kill(child if who == "child" else parent(child), signal.SIGKILL)
    text = output(run)
    assert "Traceback" not in text
    assert run.returncode == 0, text
    assert one_complete_attempt_a_run(site) == {"measured": 4, "failed" if who == "child" else "lost": 1}
    nothing_left(site)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_ray_node_ends_the_run_with_a_way_on(site: Site) -> None:
    (site.root / "sleep_s").write_text("60")  # Ray takes 10 s and more to notice; shorter runs are simply finished
    run = site.assay("run", "sweep.yaml")
    wait_for("a child", lambda: len(site.children()) == 1)
    (node,) = [pid for pid, line in site.descendants().items() if "raylet/raylet" in line.split()[0]]
    os.kill(node, signal.SIGKILL)
    text = output(run)
    (site.root / "sleep_s").write_text("0.1")
    assert run.returncode == 4, text
    assert "Traceback" not in text
    assert "state-dump" not in text
    assert "assay run sweep.yaml --resume" in text
    resume(site)
    assert one_complete_attempt_a_run(site) == {"measured": 4, "lost": 1}
    nothing_left(site)


SERVERS = ("gcs_server", "raylet")


def servers(site: Site) -> dict[str, int]:
    """Ray's own servers by name."""
    found = {line.split()[0].rpartition("/")[2]: pid for pid, line in site.descendants().items() if line.strip()}
    return {name: found[name] for name in SERVERS if name in found}


@pytest.mark.slow
@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.parametrize("killed", [("gcs_server",), ("gcs_server", "raylet")])
@pytest.mark.timeout(240)
def test_ray_without_its_control_server_ends_the_run_with_a_way_on(
    site: Site, killed: tuple[str, ...], starting: bool
) -> None:
    """Ray's library then ends the process that it lives in with exit code 1, which is no regression."""
    (site.root / "sleep_s").write_text("60")
    run = site.assay("run", "sweep.yaml")
    wait_for("Ray's servers", lambda: len(servers(site)) == 2)
    if not starting:
        wait_for("a child", lambda: len(site.children()) == 1)
    for name in killed:
        os.kill(servers(site)[name], signal.SIGKILL)
    text = output(run)
    (site.root / "sleep_s").write_text("0.1")
    assert run.returncode == 4, text
    assert "Traceback" not in text
    assert "assay run sweep.yaml --resume" in text.splitlines()[-1]
    nothing_left(site)
    resume(site)
    assert one_complete_attempt_a_run(site)["measured"] == 4
    nothing_left(site)


@pytest.mark.timeout(240)
def test_a_driver_that_dies_under_its_command_is_a_fault_of_the_host(site: Site) -> None:
    """The quick stand-in for what Ray's library does to its process."""
    run = site.assay("run", "sweep.yaml")
    wait_for("a child", lambda: len(site.children()) == 1)
    (driver,) = [pid for pid, line in site.descendants().items() if "driver.py" in line and parent(pid) == run.pid]
    os.kill(driver, signal.SIGKILL)
    text = output(run)
    assert run.returncode == 4, text
    last = text.splitlines()[-1]
    assert "the driver was killed by signal 9" in last and "assay run sweep.yaml --resume" in last
    nothing_left(site)
    resume(site)
    assert one_complete_attempt_a_run(site) == {"measured": 4, "lost": 1}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.timeout(240)
def test_a_stop_while_ray_is_starting_says_how_to_go_on(site: Site, number: int, code: int) -> None:
    """Ray takes SIGTERM for itself meanwhile."""
    run = site.assay("run", "sweep.yaml")
    wait_for("Ray's servers", lambda: bool(servers(site)))
    run.send_signal(number)
    text = output(run)
    assert run.returncode == code, text
    assert "assay run sweep.yaml --resume" in text.splitlines()[-1]
    assert not site.children()
    nothing_left(site)
    resume(site)
    assert one_complete_attempt_a_run(site) == {"measured": 4}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stop_at_any_moment_leaves_a_store_that_goes_on(site: Site) -> None:
    """From the submission on: the same code and way on, whatever was being done, and nothing left."""
    moments = random.Random(20)
    run = site.assay("run", "sweep.yaml")
    for _ in range(6):
        assert run.stdout is not None
        while "runs pending" not in run.stdout.readline():
            assert run.poll() is None
        time.sleep(moments.uniform(0.0, 6.0))
        run.send_signal(moments.choice([signal.SIGTERM, signal.SIGINT]))
        text = output(run)
        if run.returncode == 0:  # it was judging already
            break
        assert run.returncode in (130, 143), text
        assert "assay run sweep.yaml --resume" in text.splitlines()[-1]
        nothing_left(site)
        run = site.assay("run", "sweep.yaml", "--resume")
    output(run)
    assert one_complete_attempt_a_run(site)["measured"] == 4


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(240)
def test_an_interrupt_ends_every_child_and_says_how_to_go_on(site: Site, number: int, code: int) -> None:
    """Ctrl-C as a terminal sends it, to the whole foreground group; SIGTERM as a service manager does."""
    run = site.assay("run", "sweep.yaml")
    wait_for("a child", lambda: len(site.children()) == 2)
    if number == signal.SIGINT:
        os.killpg(run.pid, number)
    else:
        run.send_signal(number)
    begin_s = time.monotonic()
    text = output(run)
    assert time.monotonic() - begin_s < 20
    assert run.returncode == code, text
    assert "Traceback" not in text
    assert "assay run sweep.yaml --resume" in text
    nothing_left(site)
    resume(site)
    assert one_complete_attempt_a_run(site) == {"measured": 4, "cancelled": 1}
    nothing_left(site)
