"""Several processes on one store: bounded waiting, nothing twice, nothing lost."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy import Connection, update

from jobs import migrate
from jobs.errors import StoreError
from jobs.model import ArmPlan, CellPlan, Manifest, RunSettings
from jobs.store import Store
from jobs.store.connect import TRIES, Database
from jobs.tables import sweep

pytest_plugins = ("tests.unit.jobs_store_cases",)

PROCESSES = 4
BLOCKS = 12

WORKER = """
import sys
from datetime import UTC, datetime
from jobs.model import Generation, RunRecord
from jobs.store import Store

url, sweep_id, worker = sys.argv[1:]
store = Store.open(url, lambda: datetime.now(UTC))
sys.stdin.readline()
while (claim := store.claim_block(sweep_id, worker, 60)) is not None:
    for run in claim.pending:
        attempt = store.open_attempt(run.run_id, claim.fence, worker, "SIM")
        store.move(attempt.attempt_id, claim.fence, "claimed", "clearing")
        store.move(attempt.attempt_id, claim.fence, "clearing", "running")
        one = Generation(index=0, warmup=False, ids=(claim.number, run.position), stop_reason="length")
        counters = {f"counter{number}": number for number in range(40)}
        store.write_record(attempt.attempt_id, claim.fence, RunRecord(
            run_id=run.run_id, attempt_id=attempt.attempt_id, attempt_number=attempt.number, exit_code=0,
            generations=(one,), counters=counters, log_tail=worker,
        ))
    store.release_block(claim.block_id, claim.fence)
"""


def manifest() -> Manifest:
    plan = CellPlan(
        cell="cell",
        model="toy",
        model_path="/models/toy",
        model_digest="d",
        prompt="p",
        prompt_ids=(1,),
        settings=RunSettings(tokens=1),
        arms=("base",),
        blocks=BLOCKS,
    )
    return Manifest(name="sweep", arms=(ArmPlan(name="base", role="base", source="checkout"),), cells=(plan,))


def start(checkout: Path, script: str, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, "-c", script, *words],
        env=environment,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors


def test_field_64_many_writers_and_a_long_reader(checkout: Path, store_url: str) -> None:
    store = Store.open(store_url, lambda: datetime.now(UTC))
    sweep_id = store.submit(manifest(), "harness", "0.1")
    database = Database(store_url)
    with database.reading() as connection:
        connection.execute(sweep.select()).all()  # this view stays open while the others write
        processes = [start(checkout, WORKER, store_url, sweep_id, f"w{number}") for number in range(PROCESSES)]
        finish(processes)
    database.close()
    runs = store.judge_input(sweep_id).cells[0].runs
    store.close()
    assert len(runs) == BLOCKS * 2
    for run in runs:
        assert (run.state, [one.state for one in run.attempts]) == ("complete", ["measured"])
        assert run.record is not None
        assert run.record.generations[0].ids == (run.block, run.position)
        assert run.record.counters == {f"counter{number}": number for number in range(40)}
    by_block = {
        run.block: {one.record.log_tail for one in runs if one.record and one.block == run.block} for run in runs
    }
    assert all(len(workers) == 1 for workers in by_block.values()), "a block was split over workers"


def test_several_may_open_a_new_store_at_once(checkout: Path, store_url: str) -> None:
    script = "import sys; from jobs import migrate; sys.stdin.readline(); migrate.upgrade(sys.argv[1])"
    finish([start(checkout, script, store_url) for _ in range(PROCESSES)])
    assert migrate.check(store_url).is_current


def test_several_may_submit_the_same_at_once(store_url: str) -> None:
    store = Store.open(store_url, lambda: datetime.now(UTC))
    made: list[str] = []

    def submit() -> None:
        own = Store.open(store_url, lambda: datetime.now(UTC), migrate=False)
        made.append(own.submit(manifest(), "harness", "0.1", key="ci-1"))
        own.close()

    threads = [threading.Thread(target=submit) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 6
    assert len(set(made)) == 1
    assert len(store.sweeps()) == 1
    store.close()


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_field_70_a_server_that_hangs_up_is_called_again(store_url: str) -> None:
    """The server ends the link in the middle of a change: the change is made, once."""
    store = Store.open(store_url, lambda: datetime.now(UTC))
    sweep_id = store.submit(manifest(), "harness", "0.1")
    pauses: list[float] = []
    database = Database(store_url, sleep=pauses.append)

    def rename(connection: Connection) -> None:
        connection.execute(update(sweep).where(sweep.c.id == sweep_id).values(name="renamed"))
        if not pauses:
            connection.exec_driver_sql("SELECT pg_terminate_backend(pg_backend_pid())")

    database.write(rename)
    assert len(pauses) == 1
    assert store.sweep(sweep_id).name == "renamed"


# ---- a locked SQLite ---------------------------------------------------------------------------------------------


class Locked:
    """A store whose write lock somebody holds until the `free_after`-th pause of the waiting one."""

    def __init__(self, file: Path, free_after: int) -> None:
        migrate.upgrade(f"sqlite:///{file}")
        self.holder = sqlite3.connect(file, isolation_level=None)
        self.holder.execute("BEGIN IMMEDIATE")
        self.pauses: list[float] = []
        self.free_after = free_after
        self.database = Database(f"sqlite:///{file}", sleep=self.sleep, lock_wait_s=0.01)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self.free_after:
            self.holder.execute("ROLLBACK")


def test_a_lock_that_goes_away_is_waited_for(tmp_path: Path) -> None:
    locked = Locked(tmp_path / "store.sqlite", free_after=2)
    assert locked.database.write(lambda c: c.exec_driver_sql("SELECT 1").scalar()) == 1
    assert len(locked.pauses) == 2
    assert locked.pauses == sorted(locked.pauses)


def test_a_lock_that_stays_ends_in_one_clear_line(tmp_path: Path) -> None:
    locked = Locked(tmp_path / "store.sqlite", free_after=99)
    with pytest.raises(StoreError, match=r"database is locked \(another process holds the store"):
        locked.database.write(lambda c: c.exec_driver_sql("SELECT 1").scalar())
    assert len(locked.pauses) == TRIES - 1


def test_readers_do_not_wait_for_a_writer(tmp_path: Path) -> None:
    locked = Locked(tmp_path / "store.sqlite", free_after=99)
    with locked.database.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM sweep").scalar() == 0
    assert locked.pauses == []


def test_an_error_of_our_own_is_not_retried(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    migrate.upgrade(url)
    pauses: list[float] = []
    database = Database(url, sleep=pauses.append)
    with pytest.raises(StoreError, match="no such table"):
        database.write(lambda c: c.exec_driver_sql("SELECT * FROM absent"))
    assert pauses == []


def test_a_store_that_is_a_folder_or_vanished_while_in_use_is_named(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    migrate.upgrade(f"sqlite:///{file}")
    database = Database(f"sqlite:///{file}")
    for part in tmp_path.iterdir():
        part.unlink()
    with pytest.raises(StoreError, match=r"no such table.*store\.sqlite was removed, replaced or changed"):
        database.write(lambda c: c.exec_driver_sql("SELECT * FROM run"))
    with pytest.raises(StoreError, match="is a folder"):
        Database(f"sqlite:///{tmp_path}").write(lambda c: c.exec_driver_sql("SELECT 1"))
