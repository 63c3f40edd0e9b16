"""Migrations by URL, for the command line: `assay db upgrade` and `assay db check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.errors import StoreError
from jobs.store import revision
from jobs.store.connect import Database


@dataclass(frozen=True, slots=True)
class RevisionState:
    """Where a store stands: its revision (None: empty) and the newest one."""

    current: str | None
    head: str
    backup: Path | None = None
    """The copy that was made before an upgrade."""

    @property
    def is_current(self) -> bool:
        """Whether nothing is left to upgrade."""
        return self.current == self.head


def head() -> str:
    """The newest revision that this installation knows."""
    return revision.head()


def scripts() -> Path:
    """The folder of migrations of this installation."""
    return revision.scripts()


def current(url: str) -> RevisionState:
    """Where a store stands, without changing it. Raises StoreError when it cannot be reached or is no store."""
    database = Database(url)
    try:
        if database.file is not None and not database.file.exists():
            return RevisionState(None, revision.head())
        with database.reading() as connection:
            return RevisionState(revision.current(connection), revision.head())
    finally:
        database.close()


def upgrade(url: str) -> RevisionState:
    """Create or upgrade a store. Raises StoreError, having written nothing, when that is refused."""
    database = Database(url)
    try:
        before, after = revision.upgrade(database)
        is_copied = database.is_sqlite and before not in (None, after)
        return RevisionState(after, after, revision.backup_of(database, str(before)) if is_copied else None)
    finally:
        database.close()


def check(url: str) -> RevisionState:
    """Raise StoreError unless a store exists and is at the newest revision."""
    database = Database(url)
    try:
        revision.require_head(database)
        return RevisionState(revision.head(), revision.head())
    finally:
        database.close()


__all__ = ["RevisionState", "StoreError", "check", "current", "head", "scripts", "upgrade"]
