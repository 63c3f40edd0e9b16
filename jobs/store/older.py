"""An export of an older revision, brought to the newest one by way of a store of that revision."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Integer, LargeBinary, MetaData
from sqlalchemy.types import NullType

from jobs.store import revision, transfer
from jobs.store.connect import Database
from jobs.store.sweep_rows import COUNTED_ANEW
from jobs.store.transfer import Exported


@contextmanager
def brought_up(path: Path, told: Exported) -> Iterator[tuple[Path, Exported]]:
    """A file that `transfer.read` has read and what it holds, as it is; one of an older revision migrated meanwhile.

    Raises SpecError where a row is not as its table was at that revision, StoreError where its migration is refused.
    """
    if told.revision == revision.head():
        yield path, told
        return
    with tempfile.TemporaryDirectory(prefix="assay-import-") as folder:
        newest = Path(folder) / path.name
        database = Database(f"sqlite:///{folder}/older.sqlite")
        try:
            revision.upgrade(database, to=told.revision)
            database.write(lambda connection: _fill(connection, path))
            revision.upgrade(database)
            with newest.open("wb") as out, database.reading() as connection:
                written = transfer.write(connection, told.sweep_id, out, set(told.rests_on), set(told.fallen))
        finally:
            database.close()
        yield newest, written


def _fill(connection: Connection, path: Path) -> None:
    """Put a file's rows into the tables that stand there, as they were stored."""
    tables = MetaData()
    tables.reflect(connection)
    for table in tables.tables.values():
        for column in table.c:
            if not isinstance(column.type, Integer | LargeBinary):
                column.type = NullType()  # a cell is what the database held, and not what is read of it
    anew = {(column.table.name, column.name) for column in COUNTED_ANEW}
    known = {name: [c for c in table.c if (name, c.name) not in anew] for name, table in tables.tables.items()}
    for table, columns, rows in transfer.batches(path, known):
        transfer.insert(connection, table, columns, rows)
