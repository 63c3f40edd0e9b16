"""Which revision a store is at, and how it gets to the newest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, inspect, text

from jobs.errors import StoreError
from jobs.store.connect import Database

if TYPE_CHECKING:
    from alembic.config import Config

DECLARED = re.compile(r'^(revision|down_revision)(?:: [^=]+)? = "([^"]+)"$', re.MULTILINE)
UPGRADE_LOCK = 0x617373617900  # any constant of ours: PostgreSQL's advisory locks are numbers


def scripts() -> Path:
    """The folder of migrations: inside the wheel, else beside the packages in a checkout."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "migrations", package.parent / "alembic"):
        if (folder / "env.py").is_file():
            return folder
    raise StoreError("the migrations are missing from this installation", "install gpu-assay again")


def head(folder: Path | None = None) -> str:
    """The newest revision. Raises StoreError when the scripts have none or several."""
    known = _revisions(folder)
    heads = sorted(set(known) - set(known.values()))
    if not heads:
        raise StoreError(f"no migrations in {folder or scripts()}", "install gpu-assay again")
    if len(heads) > 1:
        raise StoreError(f"the migrations have more than one head: {', '.join(heads)}", "merge them into one line")
    return heads[0]


def _revisions(folder: Path | None) -> dict[str, str]:
    """Revision -> the one that it follows, as the scripts say. Alembic's own reader takes 0.3 s only to be imported."""
    found = {}
    for script in ((folder or scripts()) / "versions").glob("*.py"):
        given = dict(DECLARED.findall(script.read_text(encoding="utf-8")))
        found[given.get("revision", "")] = given.get("down_revision", "")
    found.pop("", None)
    return found


def current(connection: Connection) -> str | None:
    """The revision of a store; None for an empty database. Raises StoreError for a database that is not a store."""
    tables = set(inspect(connection).get_table_names())
    if "alembic_version" in tables:
        found = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
        if len(found) == 1:
            return str(found[0])
        if found or tables != {"alembic_version"}:
            raise StoreError(f"the store's revision is unclear: {list(found)}", "restore it from a backup")
        return None
    if tables:
        raise StoreError(
            f"the database holds tables ({', '.join(sorted(tables)[:3])} ...) but is no store of assay",
            "give a new file or an empty database",
        )
    return None


def is_known(found: str) -> bool:
    """Whether these scripts have a revision."""
    return found in _revisions(None)


def told(connection: Connection) -> str | None:
    """The revision that a store says it is at, where it is known to be one."""
    found: str | None = connection.execute(text("SELECT max(version_num) FROM alembic_version")).scalar_one()
    return found


def require_known(found: str | None, folder: Path | None = None) -> None:
    """Raise StoreError when a store is at a revision that these scripts do not have."""
    if found is not None and found not in _revisions(folder):
        raise StoreError(
            f"the store is at revision {found}, which this assay ({head(folder)}) does not know",
            "use the newer assay that wrote it",
        )


def upgrade(database: Database, folder: Path | None = None, to: str = "") -> tuple[str | None, str]:
    """Bring a store to the newest revision, or `to` one; returns those before and after. Writes nothing when refused.

    One transaction, so one that is broken off leaves the store as it was, and the next goes the whole way. SQLite
    changes a table by writing it anew, so a store in a file is copied first, and `backup_of` says where to.
    """
    from alembic import command

    newest = to or head(folder)
    with database.reading() as connection:
        before = current(connection)
    require_known(before, folder)
    if before == newest:
        return before, newest
    if database.is_sqlite:
        _use_write_ahead_log(database)

    def act(connection: Connection) -> None:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": UPGRADE_LOCK})
        elif (found := current(connection)) not in (None, newest):  # somebody else may have been first
            database.copy_to(backup_of(database, str(found)))
        command.upgrade(_config(connection, folder), newest)

    database.write(act)
    return before, newest


def backup_of(database: Database, found: str) -> Path:
    """Where a store in a file at revision `found` is copied to before it is upgraded."""
    assert database.file is not None, "a server's store is not copied: its changes of tables are transactions"
    return database.file.with_name(f"{database.file.name}.{found}.bak")


def require_head(database: Database, folder: Path | None = None) -> None:
    """Raise StoreError unless the store is at the newest revision."""
    if database.file is not None and not database.file.exists():
        raise StoreError(f"no store at {database.file}", f"create it: assay db upgrade --store {database.shown}")
    with database.reading() as connection:
        require_at_head(connection, database.shown, folder)


def require_at_head(connection: Connection, shown: str, folder: Path | None = None) -> None:
    """The same of a store that is open; `shown`: its URL without a password."""
    found = current(connection)
    require_known(found, folder)
    if found != (newest := head(folder)):
        raise StoreError(
            f"the store is at revision {found or 'none'}, this assay needs {newest}",
            f"assay db upgrade --store {shown}",
        )


def _use_write_ahead_log(database: Database) -> None:
    """Readers then never block the writer; the mode is kept in the file."""
    with database.plain() as connection:
        mode = connection.exec_driver_sql("PRAGMA journal_mode = WAL").scalar()
    if mode != "wal":
        raise StoreError(
            f"{database.file} cannot use a write-ahead log (mode {mode})",
            "put the store on a local disk, or use PostgreSQL",
        )


def _config(connection: Connection, folder: Path | None) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(folder or scripts()).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
