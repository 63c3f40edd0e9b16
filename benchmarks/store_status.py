"""How long `assay status` takes to say of each waiting block why it waits, on a store of a million attempts.

Fills a store through its own submission, marks most of it as done by one statement a table (an attempt a run, five
events an attempt), and times what a person types and what a scheduler asks all the time. On SQLite, and on PostgreSQL
with the tests' own server, as on any machine where the development environment is.

    python -m benchmarks.store_status [--attempts N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text

from benchmarks.sim_decode import host_facts
from jobs.model import ArmPlan, CellPlan, Manifest, RunSettings
from jobs.provenance import own_root
from jobs.store import CardSeen, Store
from jobs.store.connect import parse_url
from tests.unit.postgres_server import PostgresServer, programs

RUNS_A_SWEEP = 10_000
OPEN_SWEEPS = 20
TIMES = 5

DONE = (
    "INSERT INTO attempt (id, run_id, sweep_id, number, fence, state, reason, worker, card, opened_at, closed_at)"
    " SELECT 'att_' || substr(id, 5), id, sweep_id, 1, 1, 'measured', '', 'w', 'GPU-0', {at}, {at} FROM run"
    " WHERE {done}",
    *(
        "INSERT INTO event (sweep_id, subject, kind, frm, target, message, worker, at)"
        f" SELECT sweep_id, 'att_' || substr(id, 5), 'attempt', '{frm}', '{target}', '', 'w', {{at}} FROM run"
        " WHERE {done}"
        for frm, target in (
            ("", "claimed"), ("claimed", "clearing"), ("clearing", "running"), ("running", "measured"),
            ("pending", "complete"),
        )
    ),
    "UPDATE run SET state = 'complete' WHERE {done}",
    "UPDATE block SET runs_left = (SELECT count(*) FROM run WHERE run.block_id = block.id AND run.state = 'pending')",
    "UPDATE sweep SET state = 'judged' WHERE name = 'judged'",
)  # fmt: skip
AT = "'2026-11-30T05:00:00.000000Z'"
HALF = (
    "(sweep_id IN (SELECT id FROM sweep WHERE name = 'judged') OR block_id IN (SELECT id FROM block WHERE number < {}))"
)


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    rows = []
    for place in (sqlite, postgresql):
        with place() as url:
            rows.append({"store": place.__name__, **measure(url, arguments.attempts)})
    record = {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "host": host_facts(), "rows": rows}
    document = json.dumps(record, indent=1)
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


@contextmanager
def sqlite() -> Iterator[str]:
    """A store in a file."""
    with tempfile.TemporaryDirectory(prefix="ab-") as folder:
        yield f"sqlite:///{folder}/store.db"


@contextmanager
def postgresql() -> Iterator[str]:
    """A store on a server of its own, as PostgreSQL comes: it flushes, and cleans up behind what is written."""
    found = programs()
    assert found is not None, "install the development environment"
    server = PostgresServer.make(found, settings=())
    try:
        yield server.url.render_as_string(hide_password=False)
    finally:
        server.remove()


def measure(url: str, attempts: int) -> dict[str, Any]:
    """Milliseconds of each question, the middle one of several."""
    store = Store.open(url, lambda: datetime.now(UTC))
    fill(store, url, attempts)
    last = next(row.id for row in store.sweeps() if row.state == "open")
    begin = store.queue()
    assert begin.waiting
    done = {
        "attempts": count(url, "attempt"),
        "events": count(url, "event"),
        "blocks_waiting": sum(one.blocks for one in begin.waiting),
        "queue_of_all_ms": timed(store.queue),
        "queue_of_one_sweep_ms": timed(lambda: store.queue(last)),
        "pending_of_one_sweep_ms": timed(lambda: store.pending(last)),
        "claim_of_all_ms": timed(lambda: claim_and_release(store)),
        "reap_ms": timed(lambda: store.reap(datetime.now(UTC))),
    }
    words = {"status": ("status",), "status_of_one": ("status", last), "watch_once": ("watch", "--once")}
    for name, command in words.items():
        typed = partial(assay, *command, "--store", url)
        done[f"assay_{name}_ms"] = timed(typed)
        done[f"assay_{name}_cpu_ms"] = timed(typed, cpu_of_children)
    store.close()
    return done


def fill(store: Store, url: str, attempts: int) -> None:
    """Sweeps of one cell: judged ones whose runs are all done, and open ones that are done by half."""
    judged = (attempts - OPEN_SWEEPS * RUNS_A_SWEEP // 2) // RUNS_A_SWEEP
    for number in range(judged + OPEN_SWEEPS):
        name = "judged" if number < judged else "open"
        store.submit(manifest(name), "h" * 64, "0", key=f"{number}", priority="nightly" if number % 2 else "pr")
    engine = create_engine(parse_url(url))
    done = HALF.format(RUNS_A_SWEEP // 4 // 2)
    for statement in ("ANALYZE", *DONE, "ANALYZE"):
        with engine.begin() as connection:
            connection.execute(text(statement.format(at=AT, done=done)))
    engine.dispose()
    cards = [
        CardSeen(uuid=f"GPU-{n}", name="NVIDIA H200", host="h", worker=f"w{n}", state="busy", reason="a run")
        for n in range(64)
    ]
    store.put_cards(cards, "scheduler")


def manifest(name: str) -> Manifest:
    """Base and head, two runs of each a block."""
    cell = CellPlan(
        cell="m/p",
        model="m",
        model_path="/m",
        model_digest="d",
        prompt="p",
        prompt_ids=(1,),
        settings=RunSettings(tokens=1),
        arms=("base", "head"),
        blocks=RUNS_A_SWEEP // 4,
    )
    arms = tuple(ArmPlan(name=role, role=role, source="checkout") for role in ("base", "head"))
    return Manifest(name=name, arms=arms, cells=(cell,))


def claim_and_release(store: Store) -> None:
    """What a seat of a scheduler asks for."""
    claim = store.claim_block(None, "w", 60, card="GPU-0", card_name="NVIDIA H200", canary=True)
    assert claim is not None
    store.release_block(claim.block_id, claim.fence)


def assay(*words: str) -> None:
    """A command from its start to its exit."""
    environ = {**os.environ, "PYTHONPATH": str(own_root())}
    command = [sys.executable, "-P", "-m", "orchestrator.cli", *words]
    subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)


def count(url: str, table: str) -> int:
    """Rows of a table."""
    engine = create_engine(parse_url(url))
    with engine.connect() as connection:
        found = int(connection.execute(text(f"SELECT count(*) FROM {table}")).scalar_one())
    engine.dispose()
    return found


def cpu_of_children() -> float:
    """Seconds of a core that commands of ours have taken: the same on a machine that others use."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Milliseconds, the middle of several."""
    took = []
    for _ in range(TIMES):
        begin_s = clock()
        action()
        took.append((clock() - begin_s) * 1e3)
    return round(sorted(took)[TIMES // 2], 1)


if __name__ == "__main__":
    main()
