"""A fault at each named point: the next scheduler ends with one complete attempt a run, and nothing is left over.

The points stand in `points.py`. What Ray adds, its workers and nodes, stands in `test_chaos_ray.py`, and what a person
does to `assay run` in `test_chaos_run.py`.
"""

from __future__ import annotations

import importlib
import operator
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.points import CHILD, DISPATCHER, NODE, SERVER, WORKER, Point, table
from tests.chaos.site import LEASE_S, Site, copy_product, outlasted, wait_for
from tests.unit.postgres_server import PostgresServer, programs

pytest_plugins = ("tests.unit.jobs_store_cases",)
pytestmark = pytest.mark.timeout(240)


SEED = int(os.environ.get("CHAOS_SEED", "6"))
"""Of the cases that `make test` takes; all others are slow."""
SAMPLED = 2


def rows(*points: Point) -> list[object]:
    """A case for each point and each kind of store that it can happen with; all but a sample of them are slow."""
    cases = [(point, kind) for point in points for kind in ("sqlite", "postgresql") if point.only in ("", kind)]
    sample = random.Random(SEED).sample(cases, min(SAMPLED, len(cases) // 3))
    return [
        pytest.param(point, kind, id=f"{kind}-{point}", marks=[] if (point, kind) in sample else [pytest.mark.slow])
        for point, kind in cases
    ]


@pytest.fixture(scope="session")
def lib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_product(tmp_path_factory.mktemp("product"))


@pytest.fixture
def root() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="ac", dir="/tmp"))
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture
def site(lib: Path, root: Path, store_url: str) -> Iterator[Site]:
    made = Site(root, store_url, lib)
    yield made
    made.end()


EXITS = {"kill": 4, "full": 4, "drop": 0, "cut": 0, "stop": 0}
"""Of the scheduler that met the fault; a spool that is full ends none."""
SAYS = {"kill": "the driver was killed by signal 9", "full": "full", "drop": "", "cut": "", "stop": ""}


@pytest.mark.parametrize(("point", "store_url"), rows(*DISPATCHER), indirect=["store_url"])
def test_a_fault_in_the_scheduler_or_its_transactions(site: Site, point: Point) -> None:
    site.submit()
    first = site.serve(point=point)
    if point.fault == "stop":
        stand_still(site, point)
    text, _ = first.communicate(timeout=90)
    assert site.mark.exists(), f"{point} was not reached: {text}"
    assert "Traceback" not in text
    goes_on = (point.fault == "full" and point.process != "store") or "judge" in point.name or "verdict" in point.name
    if not goes_on:
        assert first.returncode == EXITS[point.fault], text
        assert SAYS[point.fault] in text or "No space left" in text
    site.no_verdict_yet()
    site.resume()
    site.is_whole(point.costs)
    site.nothing_is_left()


def stand_still(site: Site, point: Point) -> None:
    """Wait while who met the fault stands still; let another scheduler go on, where that is the point's."""
    wait_for(str(point), lambda: site.mark.exists() and site.mark.read_text())
    stopped = int(site.mark.read_text())
    outlasted(stopped)
    if point.meanwhile:
        other = site.serve("there")
        text, _ = other.communicate(timeout=60)
        assert other.returncode == 0, text
        site.is_whole(point.costs)
    os.kill(stopped, signal.SIGCONT)


@pytest.mark.parametrize(("point", "store_url"), rows(*CHILD), indirect=["store_url"])
def test_a_fault_in_an_engine(site: Site, point: Point) -> None:
    fault = {"at": point.name, "do": point.fault, "mark": str(site.mark)}
    site.submit({"fault": fault}, run_timeout_s=8, start_timeout_s=6)
    first = site.serve()
    if point.fault == "stop":
        stand_still(site, point)
    text, _ = first.communicate(timeout=90)
    assert first.returncode == 0, text
    assert "Traceback" not in text
    site.resume()
    site.is_whole(point.costs)
    site.nothing_is_left()


def decoding(site: Site) -> None:
    """Wait until a child decodes."""
    with site.store() as store:
        wait_for("a child", lambda: store.pending(site.sweep_id).live_attempts)
    wait_for("a child", lambda: any("-m engine run" in line for line in site.processes().values()))


@pytest.mark.parametrize(("point", "store_url"), rows(SERVER["still"], SERVER["lock"]), indirect=["store_url"])
def test_a_scheduler_or_its_store_that_stands_still_while_a_child_decodes(site: Site, point: Point) -> None:
    """Nobody takes over meanwhile, so that whoever comes back breaks no lease of its own."""
    site.submit({"sleep_s": 2 * LEASE_S})
    first = site.serve()
    decoding(site)
    if point.fault == "lock":
        with sqlite3.connect(site.url.removeprefix("sqlite:///"), isolation_level=None) as other:
            other.execute("BEGIN IMMEDIATE")
            time.sleep(3 * LEASE_S)
            other.execute("COMMIT")
        other.close()
    else:
        driver = next(pid for pid, line in site.processes().items() if "serve.py" in line and pid != first.pid)
        os.kill(driver, signal.SIGSTOP)
        outlasted(driver)
        os.kill(driver, signal.SIGCONT)
    text, _ = first.communicate(timeout=90)
    assert first.returncode == 0, text
    site.resume()
    site.is_whole(point.costs)
    site.nothing_is_left()


@pytest.mark.parametrize(
    "point", [pytest.param(SERVER[name], id=name, marks=pytest.mark.slow) for name in ("restart", "stop")]
)
def test_a_fault_in_the_server_of_the_store(lib: Path, root: Path, point: Point) -> None:
    found = programs()
    assert found is not None
    server = PostgresServer.make(found, settings=())
    site = Site(root, server.url.render_as_string(hide_password=False), lib)
    try:
        site.submit({"sleep_s": 1.0})
        first = site.serve()
        decoding(site)
        if point.fault == "restart":
            server.stop(signal.SIGQUIT)
            time.sleep(LEASE_S)
            server.start()
        else:
            still = server.processes()
            for pid in still:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(2 * LEASE_S)
            for pid in still:
                os.kill(pid, signal.SIGCONT)
        text, _ = first.communicate(timeout=120)
        assert first.returncode == 0, text
        site.resume()
        site.is_whole(point.costs)
        site.nothing_is_left()
    finally:
        site.end()
        server.remove()


def test_the_record_lists_every_point_and_there_are_enough(checkout: Path) -> None:
    listed = [line for line in (checkout / "docs/results/chaos.md").read_text().splitlines() if line.startswith("| ")]
    assert listed[1:] == table()
    assert len({(point.process, point.name) for point in (*DISPATCHER, *CHILD, *WORKER, *NODE)}) >= 25


@pytest.mark.parametrize("point", [point for point in (*DISPATCHER, *WORKER) if point.call], ids=str)
def test_every_point_is_a_function_of_the_product(point: Point) -> None:
    """One that was renamed would be met by nobody, and found out by the slow tests only."""
    module, _, name = point.call.partition(":")
    assert callable(operator.attrgetter(name)(importlib.import_module(module)))
