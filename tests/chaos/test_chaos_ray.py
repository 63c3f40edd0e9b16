"""What Ray adds to the points: its workers as processes, its node and its servers, under `assay run`."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.chaos.points import NODE, WORKER, Point
from tests.chaos.run_site import Site, nothing_left, one_complete_attempt_a_run, output, parent, servers
from tests.chaos.site import LEASE_S, outlasted, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("point", WORKER, ids=str)
def test_a_fault_in_a_worker(site: Site, point: Point) -> None:
    """It costs one attempt at most, and the run goes on by itself."""
    if point.fault == "hang":
        hurry(site)
    run = site.assay("run", "sweep.yaml", point=point)
    if point.fault == "stop":
        wait_for(str(point), lambda: site.met.exists() and site.met.read_text())
        stopped = int(site.met.read_text())
        outlasted(stopped)
        os.kill(stopped, signal.SIGCONT)
    text = output(run, within_s=200)
    assert site.met.exists(), f"{point} was not reached: {text}"
    assert "Traceback" not in text
    assert run.returncode == 0, text
    assert one_complete_attempt_a_run(site) == {"measured": 4, **({point.costs: 1} if point.costs else {})}
    nothing_left(site)


def hurry(site: Site) -> None:
    """Give runs little time: a worker that says nothing counts as lost a minute after it."""
    sweep = site.root / "sweep.yaml"
    sweep.write_text(sweep.read_text().replace("run_timeout_s: 60", "run_timeout_s: 5"))


@pytest.mark.parametrize("point", NODE, ids=str)
def test_whoever_stands_still_while_a_child_decodes_goes_on(site: Site, point: Point) -> None:
    (site.root / "sleep_s").write_text(f"{2 * LEASE_S}")
    run = site.assay("run", "sweep.yaml")
    wait_for("a child", lambda: len(site.children()) == 1)
    child = site.children()[0]
    of_driver = [pid for pid, line in site.descendants().items() if "driver.py" in line and parent(pid) == run.pid]
    stopped = {
        "worker": lambda: parent(child),
        "driver": lambda: of_driver[0],
        "Ray node": lambda: servers(site)["raylet"],
        "Ray control server": lambda: servers(site)["gcs_server"],
    }[point.process]()
    os.kill(stopped, signal.SIGSTOP)
    outlasted(stopped)
    os.kill(stopped, signal.SIGCONT)
    (site.root / "sleep_s").write_text("0.1")
    begin_s = time.monotonic()
    text = output(run, within_s=120)
    assert run.returncode == 0, text
    assert time.monotonic() - begin_s < 60
    assert one_complete_attempt_a_run(site) == {"measured": 4}
    nothing_left(site)


def test_a_worker_that_stands_still_for_good_is_replaced_and_its_card_is_free(site: Site) -> None:
    """Its run's deadline and a minute later it counts as lost; what it held goes with it."""
    hurry(site)
    (site.root / "sleep_s").write_text("1")
    run = site.assay("run", "sweep.yaml")
    wait_for("a child", lambda: len(site.children()) == 1)
    os.kill(parent(site.children()[0]), signal.SIGSTOP)
    (site.root / "sleep_s").write_text("0.1")
    text = output(run, within_s=200)
    assert "Traceback" not in text
    assert run.returncode == 0, text
    assert one_complete_attempt_a_run(site) == {"measured": 4, "lost": 1}
    nothing_left(site)
