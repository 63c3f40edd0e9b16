"""Many simulated cards on several Ray nodes of this machine: is every run made once, and are the cards kept busy?

The nodes are raylets of one Ray cluster on loopback; all else is the product's own commands: `assay submit`, then
`assay scheduler --once`, which places, runs, stores and judges. Each run is a shell program that sleeps and prints the
lines of docs/adapters.md. What is told afterwards is read from the store.

    python -m benchmarks.cluster_load [--nodes N] [--cards N] [--runs N] [--run-s S] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import create_engine, text

from benchmarks.main_job import pss_bytes
from benchmarks.sim_decode import host_facts
from jobs.provenance import harness_digest, own_root
from orchestrator.ray_app import OBJECT_STORE_BYTES, RAY_ENVIRONMENT, SIMULATED_RESOURCE

RUNS_A_BLOCK = 4
SAMPLE_S = 5.0
PROGRAM = """\
#!/bin/bash
exec 3> "$ASSAY_RESULT"
echo '{"type": "hello", "protocol": 1, "device": {"uuid": "'"$ASSAY_CARD"'"}}' >&3
sleep "$SLEEP_S"
echo '{"type": "generation", "index": 0, "warmup": false, "ids": [1, 2, 3, 4], "stop_reason": "length"}' >&3
echo '{"type": "result", "counters": {}}' >&3
"""
SWEEP = """\
sweep: cluster-load
models:
  none: {{path: model.bin}}
prompts:
  short: {{ids: [1, 2, 3, 4]}}
arms:
  base: {{source: "path:{arm}", adapter: command, command: ./run.sh, env: {{SLEEP_S: "{run_s}"}}}}
  head: {{like: base}}
run: {{tokens: 4, generations: 1}}
blocks: {{count: {blocks}}}
gate: {{exact: off}}
"""


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cards", type=int, default=64)
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--run-s", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ac-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        record = measure(Path(folder), arguments.nodes, arguments.cards, arguments.runs, arguments.run_s)
    document = json.dumps(record, indent=1)
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


def measure(root: Path, nodes: int, cards: int, runs: int, run_s: float) -> dict[str, Any]:
    """The record of one sweep on a cluster that is there for it alone."""
    load_before = os.getloadavg()
    environ = {**os.environ, **RAY_ENVIRONMENT, "HOME": str(root), "TMPDIR": str(root), "PYTHONPATH": str(own_root())}
    environ |= {"XDG_CACHE_HOME": f"{root}/cache", "XDG_STATE_HOME": f"{root}/state", "RAY_AUTH_MODE": "token"}
    arm = root / "arm"
    arm.mkdir()
    (arm / "run.sh").write_text(PROGRAM)
    (arm / "run.sh").chmod(0o755)
    (root / "model.bin").write_bytes(b"none")
    (root / "sweep.yaml").write_text(SWEEP.format(arm=arm, run_s=run_s, blocks=runs // RUNS_A_BLOCK))
    store = f"sqlite:///{root / 'store.db'}"
    assay(environ, root, "db", "upgrade", "--store", store)
    submitted = json.loads(assay(environ, root, "submit", "sweep.yaml", "--store", store, "--json"))
    with cluster(root, environ, nodes, cards) as address, watched(root) as seen:
        begin_s = time.monotonic()
        said = assay(environ, root, "scheduler", "--address", address, "--store", store, "--once")
        wall_s = time.monotonic() - begin_s
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "harness_digest": harness_digest(own_root()),
        "nodes": nodes,
        "cards": cards,
        "runs": runs,
        "run_s": run_s,
        "scheduler_wall_s": round(wall_s, 1),
        **stored(store, submitted["sweep"], cards, run_s),
        "peak_pss_bytes": max(seen.pss_bytes),
        "peak_processes": max(seen.processes),
        "load_average": {"before": load_before, "during": seen.load, "after": os.getloadavg()},
        "scheduler_said": said.splitlines()[-5:],
        "host": host_facts(),
    }


@contextmanager
def cluster(root: Path, environ: Mapping[str, str], nodes: int, cards: int) -> Iterator[str]:
    """A head and further raylets, which share the simulated cards between them; the head's address."""
    ray = str(Path(sys.executable).with_name("ray"))
    subprocess.run([ray, "get-auth-token", "--generate"], env=environ, check=False, capture_output=True)
    os.environ.update(environ)  # Ray reads it when it is first loaded
    from ray.cluster_utils import Cluster  # `ray start` refuses further nodes where all binds to loopback

    made = Cluster()
    try:
        for number in range(nodes):
            mine = {SIMULATED_RESOURCE: cards // nodes + (number < cards % nodes)}
            about: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "resources": mine}
            about |= {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
            made.add_node(**about, temp_dir=f"{root}/ray")
        yield made.address
    finally:
        made.shutdown()  # type: ignore[no-untyped-call]
        for process in of_cluster(root):
            process.kill()


@dataclass(slots=True)
class Seen:
    """What samples of the cluster's processes gave."""

    pss_bytes: list[int] = field(default_factory=lambda: [0])
    processes: list[int] = field(default_factory=lambda: [0])
    load: list[float] = field(default_factory=list)


@contextmanager
def watched(root: Path) -> Iterator[Seen]:
    """Sample the memory of all that belongs to the cluster, on a thread."""
    seen, over = Seen(), threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            found = of_cluster(root)
            seen.pss_bytes.append(sum(pss_bytes(process.pid) for process in found))
            seen.processes.append(len(found))
            seen.load.append(round(os.getloadavg()[0], 2))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def of_cluster(root: Path) -> list[psutil.Process]:
    """All that carries the cluster's folder in its environment or command line, this process apart."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and (
                process.environ().get("HOME") == str(root) or f"{root}/" in " ".join(process.cmdline())
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def assay(environ: Mapping[str, str], root: Path, *words: str) -> str:
    """A command of ours; what it printed, on both streams when it told nothing on the first."""
    command = [sys.executable, "-P", "-m", "orchestrator.cli", *words]
    done = subprocess.run(command, cwd=root, env=environ, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout or done.stderr


def stored(url: str, sweep_id: str, cards: int, run_s: float) -> dict[str, Any]:
    """What the store says of the sweep: who ran what, when, and how long a card had nothing to do between its runs."""
    engine = create_engine(url)
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT a.run_id, a.state, a.card, a.opened_at, a.closed_at, r.block_id, r.arm"
                " FROM attempt a JOIN run r ON r.id = a.run_id WHERE a.sweep_id = :id"
            ),
            {"id": sweep_id},
        ).all()
        states = Counter(
            connection.execute(text("SELECT state FROM run WHERE sweep_id = :id"), {"id": sweep_id}).scalars()
        )
    engine.dispose()
    measured = Counter(row.run_id for row in rows if row.state == "measured")
    opened = [seconds(row.opened_at) for row in rows]
    span_s = max(opened) - min(opened)
    window = (min(opened), max(opened))
    cards_of_block: dict[str, set[str]] = {}
    for row in rows:
        cards_of_block.setdefault(row.block_id, set()).add(row.card)
    spans = [(row.card, seconds(row.opened_at), seconds(row.closed_at)) for row in rows]
    return {
        "runs_by_state": dict(states),
        "attempts_by_state": dict(Counter(row.state for row in rows)),
        "runs_measured_once": sum(count == 1 for count in measured.values()),
        "runs_measured_more_than_once": sum(count > 1 for count in measured.values()),
        "cards_used": len({row.card for row in rows}),
        "blocks_on_more_than_one_card": sum(len(found) > 1 for found in cards_of_block.values()),
        "first_to_last_claim_s": round(span_s, 1),
        "cards_busy": round(busy_share(spans, window, cards), 4),
        "cards_in_the_program": round(sum(min(run_s, max(0.0, window[1] - at)) for at in opened) / cards / span_s, 4),
        "between_runs_of_a_card_s": quantiles(gaps(spans)),
        "attempt_s": quantiles([end - begin for _, begin, end in spans]),
    }


def busy_share(spans: Sequence[tuple[str, float, float]], window: tuple[float, float], cards: int) -> float:
    """Share of the cards' time within a window in which an attempt was open on them."""
    begin, end = window
    return sum(max(0.0, min(b, end) - max(a, begin)) for _, a, b in spans) / cards / (end - begin)


def gaps(spans: Sequence[tuple[str, float, float]]) -> list[float]:
    """Seconds between the end of an attempt and the next one's begin on the same card."""
    found: list[float] = []
    by_card: dict[str, list[tuple[float, float]]] = {}
    for card, begin, end in spans:
        by_card.setdefault(card, []).append((begin, end))
    for own in by_card.values():
        own.sort()
        found += [later[0] - earlier[1] for earlier, later in pairwise(own)]
    return found


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Middle, ninth tenth, most."""
    ordered = sorted(values)
    at = {"median": 0.5, "p90": 0.9, "most": 1.0}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 3) for name, share in at.items()}


def seconds(stamp: str) -> float:
    """A time of the store as seconds."""
    return datetime.fromisoformat(stamp).timestamp()


if __name__ == "__main__":
    main()
