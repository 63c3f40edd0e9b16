"""Many writers at the same instant: SQLite with a long reader and a writer killed, PostgreSQL with a restart midway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest

from jobs.store import Store
from jobs.store.connect import Database
from jobs.tables import event
from tests.unit.postgres_server import PostgresServer, programs
from tests.unit.store_sweeps import LEASE_S, record_of, submitted

WRITERS, ROWS = 32, 500
RUNS, ENDING = 1_500, 150
"""Of PostgreSQL; `ENDING` at once is more than the 100 connections that a server takes as it comes."""

STORM = """
import os, sys
from datetime import UTC, datetime
from pathlib import Path
from jobs.store import Store

url, sweep_id, folder, writers, rows = sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
begin, go = os.pipe()
pids = []
for writer in range(writers):
    pid = os.fork()
    if pid == 0:
        os.close(go)
        store = Store.open(url, lambda: datetime.now(UTC), migrate=False)
        os.read(begin, 1)  # all at the same instant: when the parent closes its end
        with open(folder / f"{writer}", "w", buffering=1) as acknowledged:
            for row in range(rows):
                store.log_event(sweep_id, "storm", f"{writer} {row}")
                acknowledged.write(f"{row}\\n")
        os._exit(0)
    pids.append(pid)
print(*pids, flush=True)
sys.stdin.readline()
os.close(begin)
os.close(go)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(*codes, flush=True)
"""


@pytest.mark.slow
def test_field_64_32_writers_with_a_long_reader_and_one_of_them_killed(checkout: Path, tmp_path: Path) -> None:
    """Every row that was acknowledged is there once; of the killed one at most the row that it was writing as well."""
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    store = Store.open(url, lambda: datetime.now(UTC))
    sweep_id = submitted(store)
    acknowledged = tmp_path / "acknowledged"
    acknowledged.mkdir()
    command = [sys.executable, "-c", STORM, url, sweep_id, str(acknowledged), str(WRITERS), str(ROWS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    database = Database(url)
    with database.reading() as connection:
        before = len(connection.execute(event.select()).all())
        process.stdin.write("go\n")
        process.stdin.flush()
        victim = acknowledged / "0"
        while not victim.exists() or len(victim.read_text().split()) < 20:
            time.sleep(0.005)
        os.kill(pids[0], signal.SIGKILL)
        codes = [int(word) for word in process.stdout.readline().split()]
        assert len(connection.execute(event.select()).all()) == before, "the reader's view stood still meanwhile"
    assert codes == [-signal.SIGKILL, *[0] * (WRITERS - 1)]
    stored = Counter(row.message for row in store.events(sweep_id, limit=10**6) if row.kind == "storm")
    for writer in range(WRITERS):
        done = len((acknowledged / f"{writer}").read_text().split())
        assert done == ROWS or writer == 0
        kept = sum(stored[f"{writer} {row}"] for row in range(ROWS))
        assert all(stored[f"{writer} {row}"] == 1 for row in range(done))
        assert kept in (done, done + 1)
        assert kept == done or writer == 0
    assert set(stored.values()) == {1}
    database.close()
    store.close()


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of this test's own, as it comes: it flushes to the disk what it acknowledges."""
    found = programs()
    assert found is not None
    made = PostgresServer.make(found, settings=())
    yield made
    made.remove()


def connections(server: PostgresServer) -> int:
    """Clients of the server beside this question."""
    with psycopg.connect(host=str(server.folder), user="postgres", dbname="postgres") as own:
        row = own.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        ).fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.slow
def test_field_70_1500_runs_that_end_together_while_the_server_restarts(server: PostgresServer) -> None:
    url = server.url.render_as_string(hide_password=False)
    store = Store.open(url, lambda: datetime.now(UTC))
    sweep_id = submitted(store, blocks=RUNS // 4)
    fences, attempts = {}, []
    while (claim := store.claim_block(sweep_id, "w", LEASE_S * 60)) is not None:
        for run in claim.runs:
            attempts.append(store.start_attempt(run.run_id, claim.fence, "w", f"GPU-{claim.number}"))
            fences[attempts[-1].attempt_id] = claim.fence
    assert len(attempts) == RUNS
    assert connections(server) == 0, "no connection is held while the cards work"
    gate, ends, failures = threading.Barrier(ENDING + 1), list(attempts), []
    turn = threading.Lock()

    def end_runs() -> None:
        gate.wait()
        while True:
            with turn:
                if not ends:
                    return
                attempt = ends.pop()
            try:
                store.write_record(attempt.attempt_id, fences[attempt.attempt_id], record_of(attempt))
            except Exception as error:  # noqa: BLE001 - of a thread: shown below
                failures.append(error)
                return

    threads = [threading.Thread(target=end_runs) for _ in range(ENDING)]
    for thread in threads:
        thread.start()
    gate.wait()
    while len(ends) > RUNS // 2:
        time.sleep(0.01)
    server.stop(signal.SIGQUIT)  # as in a crash: what is under way is cut off in the middle
    time.sleep(1.0)
    server.start()
    for thread in threads:
        thread.join()
    assert failures == []
    counts = store.pending(sweep_id)
    assert (counts.complete, counts.pending, counts.live_attempts) == (RUNS, 0, 0)
    written = [e.subject for e in store.events(sweep_id, limit=10**6) if e.target == "measured"]
    assert Counter(written) == {attempt.attempt_id: 1 for attempt in attempts}
    assert connections(server) == 0
    store.close()
