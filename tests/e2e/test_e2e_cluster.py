"""A Ray cluster started by hand, a store on PostgreSQL, two simulated cards: submitted, scheduled, judged; and refused.

Loopback only, and with Ray's token authentication as it comes: on.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytest_plugins = ("tests.unit.jobs_store_cases",)

ROOT = Path(__file__).parents[2]
SWEEP = """\
sweep: cluster
models:
  tiny: {build: tiny, seed: 7}
prompts:
  short: {ids: [1, 2, 3, 4]}
  long: {ids: [4, 3, 2, 1, 5, 6]}
arms:
  base: {source: "path:ROOT", config: {policy: lru}}
  head: {source: "path:ROOT", config: {policy: stable}}
matrix:
  prompt: [short, long]
  weight_budget: ["50%"]
  granule: [4096]
varies: [policy]
run: {tokens: 4, generations: 1}
witnesses:
  - {expr: "page_ins > 0"}
"""
COMMAND = ("-m", "orchestrator.cli")
OTHER = """\
import sys
import ray
from ray._private import utils
ray_version, python_version = utils.compute_version_info()
utils.compute_version_info = lambda: {versions}
from orchestrator.cli import call
sys.exit(call(sys.argv[1:]))
"""


@dataclass
class Cluster:
    """A Ray head of two simulated cards, and an environment to reach it from."""

    root: Path
    port: int
    environ: dict[str, str]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def assay(self, *words: str, program: tuple[str, ...] = COMMAND) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", *program, *words]
        return subprocess.run(
            command, cwd=self.root, env=self.environ, check=False, capture_output=True, text=True, timeout=200
        )

    def processes(self) -> list[psutil.Process]:
        """All that carries this cluster's folder in its environment or command line."""
        found = []
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline()) + process.environ().get("TMPDIR", "")
            except (psutil.Error, OSError):
                continue
            if str(self.root) in words and process.pid != os.getpid():
                found.append(process)
        return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # a short name: Ray makes sockets under it
    with tempfile.TemporaryDirectory(prefix="rc-", ignore_cleanup_errors=True, dir="/tmp") as folder:
        root = Path(folder)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environ = {**os.environ, "HOME": folder, "TMPDIR": folder, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token"}
        environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        environ |= {"XDG_CACHE_HOME": f"{folder}/cache", "XDG_STATE_HOME": f"{folder}/state"}
        made = Cluster(root, port, environ)
        (root / "sweep.yaml").write_text(SWEEP.replace("ROOT", str(ROOT)))
        ray = str(Path(sys.executable).with_name("ray"))
        subprocess.run([ray, "get-auth-token", "--generate"], env=environ, check=False, capture_output=True)
        command = [ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=1", "--num-gpus=0"]
        command += ["--include-dashboard=false", "--object-store-memory=80000000", f"--temp-dir={folder}/ray"]
        command += ["--resources", json.dumps({"assay_simulated_card": 2}), "--node-ip-address=127.0.0.1"]
        with (root / "ray.log").open("wb") as log:
            head = subprocess.Popen(command, cwd=root, env=environ, stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + 60
            while "Ray runtime started" not in (root / "ray.log").read_text(errors="replace"):
                assert head.poll() is None and time.monotonic() < deadline_s, (root / "ray.log").read_text()
                time.sleep(0.1)
            yield made
        finally:
            head.send_signal(signal.SIGTERM)
            try:
                head.wait(20)
            except subprocess.TimeoutExpired:
                head.kill()
            for process in made.processes():
                process.kill()


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_submitted_sweep_is_scheduled_run_and_judged(cluster: Cluster, store_url: str) -> None:
    assert cluster.assay("db", "upgrade", "--store", store_url).returncode == 0
    done = cluster.assay("submit", "sweep.yaml", "--store", store_url, "--json")
    assert done.returncode == 0, done.stderr
    sweep_id = json.loads(done.stdout)["sweep"]
    trees = cluster.root / "cache" / "assay" / "trees"
    (trees if trees.exists() else cluster.root / "cache" / "trees").rename(cluster.root / "away")  # as on another host
    served = cluster.assay("scheduler", "--address", cluster.address, "--store", store_url, "--once")
    assert served.returncode == 0, served.stdout + served.stderr
    assert "on 2 cards" in served.stderr
    gate = cluster.assay("gate", sweep_id, "--store", store_url)
    assert gate.returncode == 0, gate.stdout + gate.stderr
    status = json.loads(cluster.assay("status", sweep_id, "--store", store_url, "--json").stdout)
    assert (status["complete"], status["pending"], status["leased_blocks"], status["state"]) == (8, 0, 0, "judged")
    cards = json.loads(cluster.assay("cards", "--store", store_url, "--json").stdout)["cards"]
    assert len({card["uuid"] for card in cards}) == 2
    assert {card["reason"] for card in cards} == {"its scheduler ended"}
    assert [path.name for path in cluster.root.glob("cache/assay/packs/*/tree/engine/run.py")] == ["run.py"]
    left = [p for p in cluster.processes() if "engine" in " ".join(p.cmdline()) and "run" in p.cmdline()]
    assert left == []


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("versions", "says"),
    [
        pytest.param("('0.0.1', python_version)", "Ray: 0.0.1", id="ray"),
        pytest.param("(ray_version, '3.9.99')", "Python: 3.9.99", id="python"),
    ],
)
def test_another_ray_or_python_is_refused_by_name(cluster: Cluster, store_url: str, versions: str, says: str) -> None:
    assert cluster.assay("db", "upgrade", "--store", store_url).returncode == 0
    (cluster.root / "other.py").write_text(OTHER.format(versions=versions))
    words = ("scheduler", "--address", cluster.address, "--store", store_url, "--once")
    done = cluster.assay(*words, program=("other.py",))
    assert done.returncode == 4
    assert "is of another Ray or Python than this" in done.stderr
    assert says in done.stderr


@pytest.mark.parametrize("store_url", ["sqlite"], indirect=True)
def test_no_cluster_at_an_address_is_said(cluster: Cluster, store_url: str) -> None:
    assert cluster.assay("db", "upgrade", "--store", store_url).returncode == 0
    done = cluster.assay("scheduler", "--address", "127.0.0.1:1", "--store", store_url, "--once")
    assert done.returncode == 4
    assert "127.0.0.1:1" in done.stderr
