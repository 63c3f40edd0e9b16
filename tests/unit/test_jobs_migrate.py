"""Migrations: from empty to newest on both stores, equal to the tables, and no write where something is wrong."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, inspect

from jobs import migrate
from jobs.errors import StoreError
from jobs.store import Store, revision
from jobs.store.connect import Database, parse_url
from jobs.tables import metadata
from tests.unit.migrations_later import scripts_with

pytest_plugins = ("tests.unit.jobs_store_cases",)


def clock() -> datetime:
    return datetime(2026, 11, 30, tzinfo=UTC)


def names(connection: Connection) -> dict[str, set[str | None]]:
    """Every constraint and index of a database by table."""
    found: dict[str, set[str | None]] = {}
    look = inspect(connection)
    for table in sorted(set(look.get_table_names()) - {"alembic_version"}):
        found[table] = {look.get_pk_constraint(table)["name"]}
        for rows in (look.get_foreign_keys, look.get_unique_constraints, look.get_check_constraints, look.get_indexes):
            found[table] |= {row["name"] for row in rows(table)}
    return found


# ---- the way up --------------------------------------------------------------------------------------------------


def test_an_empty_database_becomes_a_store(store_url: str) -> None:
    assert migrate.current(store_url) == migrate.RevisionState(None, migrate.head())
    state = migrate.upgrade(store_url)
    assert state.is_current
    assert migrate.check(store_url) == migrate.current(store_url) == migrate.upgrade(store_url) == state


def test_the_migrations_make_what_the_tables_say(store_url: str) -> None:
    migrate.upgrade(store_url)
    engine = create_engine(parse_url(store_url))
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_field_65_every_constraint_has_a_name_alike_in_both(store_url: str, tmp_path: Path) -> None:
    """compare_metadata looks at no CHECK; a constraint without a name could never be dropped on SQLite."""
    migrate.upgrade(store_url)
    engine = create_engine(parse_url(store_url))
    with engine.begin() as connection:
        migrated = names(connection)
        connection.exec_driver_sql("DROP TABLE alembic_version")
        metadata.drop_all(connection)
        metadata.create_all(connection)
        assert migrated == names(connection)
    engine.dispose()
    assert all(None not in found for found in migrated.values())
    assert {"ck_attempt_state", "ck_value_one", "uq_attempt_run_id_number"} <= migrated["attempt"] | migrated["value"]


def test_keys_stored_before_there_was_a_ring_came_through_none(tmp_path: Path) -> None:
    """Up from 0002 with a row in it, and down again."""
    database = Database(f"sqlite:///{tmp_path / 'store.sqlite'}")
    row = "INSERT INTO key_bytes (attempt_id, position, key, nbytes, hits, retained, bypassed, evicted)"

    def alone(sql: str) -> list[Any]:
        with sqlite3.connect(tmp_path / "store.sqlite") as connection:
            return connection.execute(sql).fetchall()

    def move(command_: Callable[[Config, str], None], target: str) -> None:
        database.write(lambda connection: command_(revision._config(connection, None), target))

    move(command.upgrade, "0002")
    alone(f"{row} VALUES ('att', 0, 'k', 7, 6, 5, 4, 3)")
    move(command.upgrade, "0003")
    assert alone("SELECT nbytes, bypassed, evicted, staged FROM key_bytes") == [(7, 4, 3, 0)]
    alone("UPDATE key_bytes SET staged = 2")
    move(command.downgrade, "0002")
    assert alone("SELECT hits, retained FROM key_bytes") == [(6, 5)]
    database.close()


def test_streams_stored_before_there_were_batches_are_first_sequences(tmp_path: Path) -> None:
    """Up from 0001 with a row in it, and down again, which no further sequence outlives."""
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    database = Database(url)
    columns = "attempt_id, position, generation, warmup, ids, ids_digest, gaps, counters, prefill_ns"
    row = "VALUES ('att', {}, 0, 0, x'', 'd', x'', '{{}}', 0"

    def alone(sql: str) -> list[Any]:
        """On a connection that does not hold foreign keys: what is asked here is the one table."""
        with sqlite3.connect(tmp_path / "store.sqlite") as connection:
            return connection.execute(sql).fetchall()

    def move(command_: Callable[[Config, str], None], target: str) -> None:
        database.write(lambda connection: command_(revision._config(connection, None), target))

    move(command.upgrade, "0001")
    alone(f"INSERT INTO token_stream ({columns}) {row.format(0)})")
    move(command.upgrade, "0002")
    assert alone("SELECT position, sequence FROM token_stream") == [(0, 0)]
    alone(f"INSERT INTO token_stream ({columns}, sequence) {row.format(1)}, 1)")
    move(command.downgrade, "0001")
    assert alone("SELECT position FROM token_stream") == [(0,)]
    database.close()


def test_check_constraints_say_the_same_in_both(tmp_path: Path) -> None:
    def checks(file: Path) -> dict[str, str]:
        found = {}
        with sqlite3.connect(file) as connection:
            for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE type = 'table'"):
                for line in filter(lambda line: "CHECK" in line, sql.splitlines()):
                    _, name, rule = line.strip().rstrip(",").split(" ", 2)
                    found[name] = rule
        return found

    migrated, made = tmp_path / "migrated.sqlite", tmp_path / "made.sqlite"
    migrate.upgrade(f"sqlite:///{migrated}")
    engine = create_engine(f"sqlite:///{made}")
    metadata.create_all(engine)
    engine.dispose()
    assert checks(migrated) == checks(made)
    assert len(checks(made)) == 5


def test_field_65_down_and_up_again(store_url: str) -> None:
    migrate.upgrade(store_url)
    database = Database(store_url)

    def down(connection: Connection) -> None:
        command.downgrade(revision._config(connection, None), "base")

    database.write(down)
    with database.reading() as connection:
        assert inspect(connection).get_table_names() == ["alembic_version"]
    database.close()
    assert migrate.current(store_url).current is None
    assert migrate.upgrade(store_url).is_current


def test_a_later_migration_is_applied_and_asked_for(store_url: str, tmp_path: Path) -> None:
    migrate.upgrade(store_url)
    folder = scripts_with(tmp_path, r9001="pass")
    database = Database(store_url)
    needs = rf"at revision {migrate.head()}, this assay needs 9001 \(assay db upgrade --store"
    with pytest.raises(StoreError, match=needs):
        revision.require_head(database, folder)
    assert revision.upgrade(database, folder) == (migrate.head(), "9001")
    revision.require_head(database, folder)
    database.close()
    with pytest.raises(StoreError, match=rf"at revision 9001, which this assay \({migrate.head()}\) does not know"):
        migrate.upgrade(store_url)


def test_a_migration_that_fails_leaves_the_store_as_it_was(store_url: str, tmp_path: Path) -> None:
    migrate.upgrade(store_url)
    database = Database(store_url)
    folder = scripts_with(tmp_path, r9001="raise RuntimeError('no')")
    with pytest.raises(RuntimeError, match="no"):
        revision.upgrade(database, folder)
    with database.reading() as connection:
        assert revision.current(connection) == migrate.head()
        assert "later" not in inspect(connection).get_table_names()
    database.close()


def test_sql_can_be_written_without_a_database(tmp_path: Path) -> None:
    """For a new store; where verdicts stand, which only Python can take apart, it changes nothing."""
    for url, word in (("sqlite:///x", "BLOB"), ("postgresql://h/x", "BYTEA")):
        out = io.StringIO()
        config = Config(output_buffer=out, cmd_opts=None)
        config.set_main_option("script_location", str(migrate.scripts()))
        config.cmd_opts = type("Options", (), {"x": [f"url={url}"]})()
        command.upgrade(config, "head", sql=True)
        assert "CREATE TABLE token_stream" in out.getvalue()
        assert word in out.getvalue()
        if word == "BLOB":
            script = out.getvalue()
    sqlite3.connect(tmp_path / "new.sqlite").executescript(script)
    assert migrate.check(f"sqlite:///{tmp_path / 'new.sqlite'}").is_current
    before, last = script.split("-- Running upgrade 0009 -> 0010")
    old = sqlite3.connect(tmp_path / "old.sqlite")
    old.executescript(before)
    old.execute("INSERT INTO verdict VALUES ('vrd_1', 'swp_1', 1, '', '', '{}', 'PASS', 0, '')")
    old.commit()
    with pytest.raises(sqlite3.IntegrityError, match=r"finding\.outcome"):
        old.executescript(f"--{last}")
    assert old.execute("SELECT version_num FROM alembic_version").fetchall() == [("0009",)]
    assert old.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'cell_verdict'").fetchall() == [(0,)]


# ---- one line of scripts -----------------------------------------------------------------------------------------


def test_field_65_two_heads_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    assert migrate.head()
    folder = scripts_with(tmp_path, r9001="pass", r9002="pass")
    with pytest.raises(StoreError, match="more than one head"):
        revision.head(folder)
    file = tmp_path / "store.sqlite"
    with pytest.raises(StoreError, match="more than one head"):
        revision.upgrade(Database(f"sqlite:///{file}"), folder)
    assert not file.exists()


def test_migrations_do_not_read_the_tables() -> None:
    """They must say the same when jobs/tables.py has moved on."""
    scripts = list((migrate.scripts() / "versions").glob("*.py"))
    assert scripts
    for script in scripts:
        tree = ast.parse(script.read_text("utf-8"))
        imports = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imports += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        assert not [name for name in imports if name.split(".")[0] in {"jobs", "engine", "reports", "orchestrator"}]


def test_a_wheel_carries_its_migrations_inside_jobs(checkout: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    for package in ("engine", "jobs"):
        shutil.copytree(checkout / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(checkout / "alembic", site / "jobs/migrations", ignore=shutil.ignore_patterns("__pycache__"))
    script = "from jobs import migrate; print(migrate.scripts()); print(migrate.upgrade('sqlite:///s').is_current)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == [str(site / "jobs/migrations"), "True"]


def test_alembic_s_own_command_works_in_the_checkout(checkout: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    words = ["-m", "alembic", "-x", f"url={url}", "upgrade", "head"]
    subprocess.run([sys.executable, *words], cwd=checkout, check=True, capture_output=True)
    assert migrate.check(url).is_current


# ---- what is refused ---------------------------------------------------------------------------------------------


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_store_of_a_newer_assay_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    migrate.upgrade(f"sqlite:///{file}")
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    before = digest(file)
    for opening in (lambda: Store.open(f"sqlite:///{file}", clock), lambda: migrate.check(f"sqlite:///{file}")):
        with pytest.raises(StoreError, match=r"at revision 9999.*use the newer assay"):
            opening()
    assert digest(file) == before


def test_a_database_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "accounts.sqlite"
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE accounts (name TEXT)")
    before = digest(file)
    with pytest.raises(StoreError, match=r"holds tables \(accounts \.\.\.\) but is no store of assay"):
        Store.open(f"sqlite:///{file}", clock)
    assert digest(file) == before


def test_a_file_that_is_no_database_is_said(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    file.write_text("no database at all, but long enough to be looked at" * 40)
    with pytest.raises(StoreError, match="not a database") as caught:
        Store.open(f"sqlite:///{file}", clock)
    assert caught.value.remedy


def test_a_store_that_is_not_there_is_not_made_by_looking(tmp_path: Path) -> None:
    file = tmp_path / "store.sqlite"
    for looking in (lambda: migrate.check(f"sqlite:///{file}"), lambda: Store.open(f"sqlite:///{file}", clock, False)):
        with pytest.raises(StoreError, match=r"no store at .*store\.sqlite \(create it: assay db upgrade"):
            looking()
    assert migrate.current(f"sqlite:///{file}").current is None
    assert not file.exists()


@pytest.mark.parametrize(
    ("url", "message", "remedy"),
    [
        ("sqlite:////nowhere/at/all/store.sqlite", "unable to open", "/nowhere/at/all"),
        ("sqlite://", "in memory", "sqlite:///PATH"),
        ("sqlite:///:memory:", "in memory", "sqlite:///PATH"),
        ("store.sqlite", "is no store URL", "sqlite:///PATH"),
        ("", "is no store URL", "sqlite:///PATH"),
        ("mysql://h/x", "mysql is no store", "postgresql://"),
        ("nonsense://h/x", "no store", "postgresql://"),
        ("postgresql://h:port/x", "is no store URL", "postgresql://"),
    ],
)
def test_a_store_out_of_reach_is_one_clear_line(url: str, message: str, remedy: str) -> None:
    with pytest.raises(StoreError) as caught:
        Store.open(url, clock)
    assert message in str(caught.value)
    assert remedy in caught.value.remedy
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 4


def test_a_server_out_of_reach_is_said_without_its_password() -> None:
    pytest.importorskip("psycopg", reason="skipped: no psycopg")
    with pytest.raises(StoreError) as caught:
        Store.open("postgresql://me:secret@127.0.0.1:1/x", clock)
    assert "127.0.0.1" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_sqlite_writes_ahead_and_holds_foreign_keys(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    migrate.upgrade(url)
    database = Database(url)
    with database.plain() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
