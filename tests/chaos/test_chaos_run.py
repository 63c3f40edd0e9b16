"""SIGKILL and stops of `assay run`: afterwards `--resume` completes with one complete attempt a run.

No fault switch in the product. Points that can be seen from outside (a child in its run, its worker, the Ray node) are
found by process and killed; points inside the driver are found by a driver whose one function is wrapped, here in the
test, so that it kills itself before or after it. After each: no process is left, no card is held, nothing counts twice.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from tests.chaos.run_site import Site, nothing_left, one_complete_attempt_a_run, output, parent, resume, servers
from tests.chaos.site import wait_for

# Each replaces one call of the dispatcher by a kill before or after it.
AFTER_CLAIM = "dispatch.Dispatcher._begin = kill"
BEFORE_WRITE = "aftermath.settle = kill"
AFTER_WRITE = "own = aftermath.settle\naftermath.settle = lambda *given: (own(*given), kill())"


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
