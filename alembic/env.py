"""Runs the migrations: on the connection that assay hands over, or by `alembic -x url=URL ...` from a checkout."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, create_engine

from jobs.store.connect import parse_url
from jobs.tables import metadata


def run(connection: Connection) -> None:
    # Batch mode: SQLite changes a table by copying it.
    context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


def run_offline(url: str) -> None:
    context.configure(url=url, target_metadata=metadata, literal_binds=True, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


handed_over = context.config.attributes.get("connection")
url = context.get_x_argument(as_dictionary=True).get("url", "sqlite:///.assay/store.sqlite")
if context.is_offline_mode():
    run_offline(url)
elif handed_over is not None:
    run(handed_over)
else:
    with create_engine(parse_url(url)).begin() as own:
        run(own)
