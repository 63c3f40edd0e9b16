"""A file's connection is kept for the next transaction, by the process that opened it and while the file is there."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.exc import OperationalError

from jobs.errors import StoreError
from jobs.store.connect import Database


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A database of one empty table, with a write-ahead log as a store has it."""
    place = tmp_path / "store.db"
    with sqlite3.connect(place) as made:
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("CREATE TABLE t (n INTEGER)")
    made.close()
    return place


@pytest.fixture
def opened(file: Path) -> tuple[Database, list[int]]:
    """The database, and an entry for each connection that was opened."""
    database, connections = Database(f"sqlite:///{file}"), list[int]()
    event.listen(database._engine, "connect", lambda *_: connections.append(os.getpid()))
    return database, connections


def insert(database: Database, number: int) -> None:
    database.write(lambda c: c.exec_driver_sql("INSERT INTO t VALUES (?)", (number,)))


def numbers(database: Database) -> list[int]:
    return database.read(lambda c: list(c.exec_driver_sql("SELECT n FROM t ORDER BY n").scalars()))


def test_transactions_share_one_connection_and_leave_the_log_until_the_end(
    file: Path, opened: tuple[Database, list[int]]
) -> None:
    database, connections = opened
    for number in range(20):
        insert(database, number)
    assert numbers(database) == list(range(20))
    assert len(connections) == 1
    log = file.with_name("store.db-wal")
    assert log.stat().st_size > 0, "a last connection that is closed copies the log into the file, each time"
    database.close()
    assert not log.exists()


def test_another_process_sees_at_once_what_was_committed(file: Path, opened: tuple[Database, list[int]]) -> None:
    database, _ = opened
    insert(database, 1)
    with sqlite3.connect(file) as other:
        assert other.execute("SELECT n FROM t").fetchall() == [(1,)]
        other.execute("INSERT INTO t VALUES (2)")
    other.close()
    assert numbers(database) == [1, 2]
    database.close()


def test_a_fork_opens_a_connection_of_its_own(
    opened: tuple[Database, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, connections = opened
    insert(database, 1)
    own = os.getpid()
    monkeypatch.setattr("os.getpid", lambda: own + 1)
    insert(database, 2)
    assert len(connections) == 2
    assert numbers(database) == [1, 2]
    database.close()


@pytest.mark.parametrize("act", [insert, lambda database, _number: numbers(database)], ids=["write", "read"])
def test_a_file_that_was_removed_takes_no_more_rows(
    file: Path, opened: tuple[Database, list[int]], act: Callable[[Database, int], object]
) -> None:
    database, _ = opened
    insert(database, 1)
    file.rename(file.with_name("gone.db"))
    with pytest.raises(StoreError, match="unable to open"):
        act(database, 2)
    database.close()
    assert not file.exists()


def test_a_file_that_was_replaced_is_the_one_that_is_written(file: Path, opened: tuple[Database, list[int]]) -> None:
    database, _ = opened
    copy = file.with_name("copy.db")
    shutil.copyfile(file, copy)
    insert(database, 1)
    database_files = [file, file.with_name("store.db-wal"), file.with_name("store.db-shm")]
    for place in database_files:
        place.rename(place.with_name(f"old-{place.name}"))
    copy.rename(file)
    insert(database, 2)
    assert numbers(database) == [2]
    database.close()


def test_a_full_disk_asks_for_space_and_for_no_backup(file: Path, opened: tuple[Database, list[int]]) -> None:
    """Nothing that was committed is lost by it, and an older copy of the store would lose some."""
    database, _ = opened
    insert(database, 1)
    database.read(lambda c: c.exec_driver_sql("PRAGMA max_page_count = 1").scalar_one())
    with pytest.raises(StoreError, match="disk is full") as caught:
        database.write(lambda c: c.exec_driver_sql("INSERT INTO t VALUES (zeroblob(100000))"))
    assert caught.value.remedy == "free space where the store lies; what it held before stays"
    assert numbers(database) == [1]
    database.close()


def test_a_servers_full_disk_asks_for_the_same(file: Path) -> None:
    """In PostgreSQL's own words, class 53100."""
    database = Database(f"sqlite:///{file}")

    def without_room(_: Connection) -> None:
        words = 'could not extend file "base/5/16384": No space left on device\nHINT:  Check free disk space.'
        raise OperationalError("INSERT", None, sqlite3.OperationalError(words))

    with pytest.raises(StoreError, match="No space left on device") as caught:
        database.write(without_room)
    assert caught.value.remedy == "free space where the store lies; what it held before stays"
    database.close()
