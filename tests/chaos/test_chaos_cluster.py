"""A Ray cluster on this host: a worker, a node or the scheduler is killed while a child decodes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.chaos.points import CLUSTER, Point
from tests.chaos.run_site import Site, one_complete_attempt_a_run, output, parent
from tests.chaos.site import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
RAY = str(Path(sys.executable).with_name("ray"))
SHORT_LEASES = """\
from orchestrator import leases
leases.LEASE_S = dispatch.LEASE_S = 3.0
dispatch.Dispatcher.__init__.__kwdefaults__["beat_s"] = 0.5
"""
STORE = ("--store", "s.db")
JOIN = """\
import sys
from ray._private import ray_constants, services
services.resolve_ip_for_localhost = lambda host: host
ray_constants.ENABLE_RAY_CLUSTER = True
from ray.scripts.scripts import main
main()
"""
"""`ray start` of a second node that stays on loopback, to which Ray keeps whoever may not join others."""


@dataclass
class Cluster:
    """A head without cards, and nodes of one simulated card each."""

    site: Site
    port: int
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, cards: int) -> subprocess.Popen[bytes]:
        """Start a node, the head first, and wait until it is up."""
        log = self.site.root / f"node{len(self.nodes)}.log"
        if self.nodes:
            command = [sys.executable, "-c", JOIN, "start", "--block", f"--address=127.0.0.1:{self.port}"]
        else:
            command = [RAY, "start", "--block", "--head", f"--port={self.port}", "--include-dashboard=false"]
            command += [f"--temp-dir={self.site.root}/ray"]
        command += ["--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", "--node-ip-address=127.0.0.1"]
        command += ["--resources", json.dumps({"assay_simulated_card": cards})]
        with log.open("wb") as file:
            node = subprocess.Popen(
                command, cwd=self.site.root, env=self.site.environ(), stdout=file, stderr=file, start_new_session=True
            )
        self.nodes.append(node)
        wait_for("a node", lambda: "Ray runtime started" in log.read_text(errors="replace") or node.poll() is not None)
        assert node.poll() is None, log.read_text(errors="replace")
        return node

    def serve(self) -> subprocess.Popen[str]:
        """A scheduler, until nothing is open."""
        words = ("scheduler", "--address", f"127.0.0.1:{self.port}", *STORE, "--once")
        return self.site.assay(*words, patch=SHORT_LEASES)


@pytest.fixture
def cluster(site: Site) -> Iterator[Cluster]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    site.extra |= {"RAY_AUTH_MODE": "token", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    made = Cluster(site, port)
    subprocess.run([RAY, "get-auth-token", "--generate"], env=site.environ(), check=False, capture_output=True)
    made.start(cards=0)
    yield made
    for pid in site.descendants():
        os.kill(pid, signal.SIGKILL)
    for node in made.nodes:
        node.wait()


def submitted(cluster: Cluster) -> Site:
    site = cluster.site
    for words in (("db", "upgrade"), ("submit", "sweep.yaml")):
        done = site.assay(*words, *STORE)
        text = output(done)
        assert done.returncode == 0, text
    return site


def children_gone(site: Site) -> None:
    wait_for("no child", lambda: not any("-m engine run" in line for line in site.descendants().values()), 20)
    assert not list((site.root / "home" / "state" / "assay" / "spool").glob("*"))


@pytest.mark.parametrize("point", CLUSTER, ids=str)
def test_what_is_killed_on_a_cluster_costs_one_attempt(cluster: Cluster, point: Point) -> None:
    """The sweep goes on: with the worker's successor, on the other node, with the next scheduler."""
    cluster.start(cards=1)
    if point.process == "Ray node":
        cluster.start(cards=1)
    site = submitted(cluster)
    first = cluster.serve()
    wait_for("a child", lambda: len(site.children()) == 1, 90)
    worker = parent(site.children()[0])
    driver = next(pid for pid, line in site.descendants().items() if "driver.py" in line and parent(pid) == first.pid)
    os.kill({"worker": worker, "Ray node": parent(worker), "scheduler": driver}[point.process], signal.SIGKILL)
    text = output(first, within_s=150)
    assert "Traceback" not in text
    assert first.returncode == (4 if point.process == "scheduler" else 0), text
    again = cluster.serve()
    text = output(again, within_s=150)
    assert again.returncode == 0, text
    assert one_complete_attempt_a_run(site, "s.db") == {"measured": 4, point.costs: 1}
    children_gone(site)
