"""Migrations with rows in the store: up and down from each release on both stores, killed midway, copied before."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from sqlalchemy import (
    BigInteger,
    Boolean,
    Connection,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    select,
)

from jobs import migrate
from jobs.errors import StoreError
from jobs.store import revision
from jobs.store.connect import Database
from orchestrator.cli import call
from tests.unit.migrations_later import scripts_with

pytest_plugins = ("tests.unit.jobs_store_cases",)

RELEASES = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", "0009", "0010", "0011", "0012", "0013")


def fill(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """One row in each table that has none, whatever the revision: what is there is asked of the database."""
    tables = MetaData()
    tables.reflect(connection)
    words = {"state": {"sweep": "open", "run": "pending", "attempt": "measured"}, "family": {"series": "counter"}}
    for table in tables.sorted_tables:
        if table.name == "alembic_version" or connection.execute(table.select()).first():
            continue
        row: dict[str, Any] = {}
        for column in table.columns:
            is_id = column.name == "id" or any(key.column.name == "id" for key in column.foreign_keys)
            if column.name == "missing" or (column.nullable and not column.foreign_keys):
                continue
            row[column.name] = words.get(column.name, {}).get(table.name) or (
                "id" if is_id else SAMPLES[type(column.type.as_generic())]
            )
        connection.execute(table.insert(), row | ({"integer": 7} if table.name == "value" else {}))
    return rows(connection)


SAMPLES = {Text: "{}", BigInteger: 5, Integer: 5, Boolean: False, Double: 0.5, LargeBinary: b"\0"}


def rows(connection: Connection) -> dict[str, list[tuple[Any, ...]]]:
    """All that stands in a database: table -> rows, each as its sorted columns' values."""
    tables = MetaData()
    tables.reflect(connection)
    found = {}
    for table in tables.sorted_tables:
        columns = sorted(table.columns, key=lambda column: column.name)
        found[table.name] = [tuple(row) for row in connection.execute(select(*columns)).all()]
    del found["alembic_version"]
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_field_65_rows_of_each_release_come_up_to_the_newest_and_down_again(store_url: str, release: str) -> None:
    """What stood there before stands there after: the columns that were added go again, the rows do not."""
    database = Database(store_url)
    database.write(lambda c: command.upgrade(revision._config(c, None), release))
    stood = database.write(fill)
    assert all(stood.values())
    assert migrate.upgrade(store_url).is_current
    with database.reading() as connection:
        newest = rows(connection)
    assert {table: len(newest[table]) for table in stood} == dict.fromkeys(stood, 1)
    database.write(lambda c: command.downgrade(revision._config(c, None), release))
    with database.reading() as connection:
        assert rows(connection) == stood
    database.close()


def test_all_releases_are_tried() -> None:
    known = {script.revision for script in ScriptDirectory(str(migrate.scripts())).walk_revisions()}
    assert set(RELEASES) == known


INTERRUPTED = """
import sys
from pathlib import Path
from jobs.store import revision
from jobs.store.connect import Database
revision.upgrade(Database(sys.argv[1]), Path(sys.argv[2]))
"""


def test_field_65_an_upgrade_that_is_killed_is_made_again(checkout: Path, store_url: str, tmp_path: Path) -> None:
    """SIGKILL between two changes of one migration: nothing of it stands, and the next upgrade goes all the way."""
    migrate.upgrade(store_url)
    database = Database(store_url)
    stood = database.write(fill)
    mark = tmp_path / "mark"
    folder = scripts_with(tmp_path, r9001=f"open({str(mark)!r}, 'w').close(); __import__('time').sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, store_url, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])},
    )
    while not mark.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    with database.reading() as connection:
        assert revision.current(connection) == migrate.head()
        assert rows(connection) == stood
    script = folder / "versions" / "r9001.py"
    script.write_text(script.read_text().replace("sleep(60)", "sleep(0)"))
    assert revision.upgrade(database, folder) == (migrate.head(), "9001")
    with database.reading() as connection:
        assert rows(connection) == {**stood, "later": []}
    database.close()


def test_a_store_in_a_file_is_copied_before_it_is_upgraded(tmp_path: Path) -> None:
    """The copy is the store as it was, for the assay that it was of; a store that is new or current needs none."""
    file = tmp_path / "store.sqlite"
    url = f"sqlite:///{file}"
    database = Database(url)
    database.write(lambda c: command.upgrade(revision._config(c, None), "0004"))
    stood = database.write(fill)
    copy = tmp_path / "store.sqlite.0004.bak"
    assert migrate.upgrade(url).backup == copy
    kept = Database(f"sqlite:///{copy}")
    with kept.reading() as connection:
        assert revision.current(connection) == "0004"
        assert rows(connection) == stood
    kept.close()  # its log stands beside the file for as long as it is open
    assert migrate.upgrade(url).backup is None
    assert migrate.upgrade(f"sqlite:///{tmp_path / 'new.sqlite'}").backup is None
    assert [path.name for path in tmp_path.glob("*.bak*")] == [copy.name]
    database.close()


def test_db_upgrade_names_the_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    database = Database(url)
    database.write(lambda c: command.upgrade(revision._config(c, None), "0004"))
    database.close()
    assert call(["db", "upgrade", "--store", url]) == 0
    said = f"0004 -> {migrate.head()}; as it was: {tmp_path / 'store.sqlite.0004.bak'}"
    assert said in "".join(capsys.readouterr().out.splitlines())


def test_without_room_for_the_copy_nothing_is_upgraded(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    database = Database(url)
    database.write(lambda c: command.upgrade(revision._config(c, None), "0004"))
    (tmp_path / "store.sqlite.0004.bak").mkdir()  # as good as a full disk: nothing can be written there
    with pytest.raises(StoreError, match=r"cannot be copied to .*0004\.bak.*nothing was changed"):
        migrate.upgrade(url)
    assert migrate.current(url).current == "0004"
    assert not list(tmp_path.glob("*.tmp"))
    database.close()
