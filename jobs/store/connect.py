"""The way to the database: one engine a process, short transactions, bounded waiting for locks."""

from __future__ import annotations

import os
import re
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timedelta
from importlib import import_module
from json import JSONDecodeError
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import ValidationError
from sqlalchemy import Connection, Engine, Table, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    DisconnectionError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
)
from sqlalchemy.pool import NullPool, QueuePool

from jobs.errors import Conflict, StoreError

T = TypeVar("T")

LOCK_WAIT_S = 30
"""How long the database itself waits for another writer; 5 s was too short under bursts (skypilot#4552)."""

CONNECT_WAIT_S = 10
TRIES = 4
RETRY_PAUSE_S = 0.25
MOST_PAUSE_S = 2.0
OUTAGE_WAIT_S = 60.0
"""How long a server that was there before is waited for: a restart takes seconds, a recovery after a crash longer."""

SOON_S = 1.0
"""How long a reader waits, who has somebody waiting in turn."""

LONGEST_READ_S = 10
"""How long a question of such a reader may take: one that is asked in vain must not hold its server."""

READ_ONLY = f"-c default_transaction_read_only=on -c statement_timeout={LONGEST_READ_S}s"
SECRETS = frozenset({"password", "sslpassword"})
"""Parameters of a PostgreSQL URL's query that are not shown."""
SECRET_WORDS = re.compile(r"\b((?:ssl)?password)=[^&\s]*", re.IGNORECASE)
POSTGRES_RETRY = frozenset({"40001", "40P01", "55P03", "23505"})
"""Serialization failure, deadlock, lock not available; and a unique violation, since the second try sees the row."""


class Database:
    """Transactions on one store.

    Raises StoreError, with a remedy, where the database cannot be reached or stays locked. Connections are opened for
    a transaction and given back at its end, so none is held while a card works and none survives a fork. One to a file
    is kept for the next transaction, by the process that opened it and while the file stands in its place: the last one
    that is closed copies SQLite's whole log into the file, which costs more than most transactions.

    One that is `read_only` is refused every write by the database itself, and answers soon rather than surely: it waits
    neither long for a lock nor for a server to come back.
    """

    def __init__(
        self,
        url: str,
        *,
        sleep: Callable[[float], None] = time.sleep,
        lock_wait_s: float = LOCK_WAIT_S,
        read_only: bool = False,
    ) -> None:
        self.url = parse_url(url)
        self._read_only = read_only
        self.shown = shown_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._sleep = sleep
        self._reached = False
        self._engine = _engine(self.url, min(lock_wait_s, SOON_S) if read_only else lock_wait_s, read_only)
        if self.is_sqlite:
            event.listen(self._engine, "do_connect", self._on_connect_to_file)
            event.listen(self._engine, "connect", self._on_connected_to_file)
            event.listen(self._engine, "checkout", self._on_reuse_of_file)

    @property
    def file(self) -> Path | None:
        """The database's file; None for a server."""
        return Path(self.url.database or "") if self.is_sqlite else None

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent view of the store."""
        with self._explained(), self._view() as connection:
            try:
                yield connection
            except ValueError as error:  # a reader only takes apart what it read, so any of these is a broken row
                raise self._unreadable(error) from error

    @contextmanager
    def _view(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            if not self.is_sqlite:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            yield connection

    def read(self, action: Callable[[Connection], T]) -> T:
        """What `action` finds in a consistent view of the store; asked again when the server went away meanwhile."""

        def once() -> T:
            with self._view() as connection:
                return action(connection)

        with self._explained():
            try:
                return self._insist(once)
            except ValueError as error:
                raise self._unreadable(error) from error

    def write(self, action: Callable[[Connection], T]) -> T:
        """Run `action` in one transaction; try again, a bounded number of times, when locked out or cut off.

        `action` must be a guarded change, since after a lost connection the first try may have been committed.
        """
        with self._explained():
            return self._insist(lambda: self._write_once(action))

    def _insist(self, once: Callable[[], T]) -> T:
        """Try again when locked out, a few times; when a server that was there is gone, as long as a restart takes."""
        tries, waited_s = 1, 0.0
        while True:
            try:
                found = once()
            except DBAPIError as error:
                gone = self._reached and not self.is_sqlite and _is_outage(error)
                is_late = waited_s >= (SOON_S if self._read_only else OUTAGE_WAIT_S)
                if is_late if gone else not _may_retry(error) or tries >= (1 if self._read_only else TRIES):
                    raise
                pause_s = min(RETRY_PAUSE_S * 2**tries, MOST_PAUSE_S)
                tries, waited_s = tries + 1, waited_s + pause_s
                self._sleep(pause_s)
            else:
                self._reached = True
                return found

    @contextmanager
    def plain(self) -> Iterator[Connection]:
        """A connection outside any transaction, for what cannot run inside one."""
        with self._explained(), self._engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def ahead_of(self, now: datetime) -> timedelta:
        """How far the server's clock is ahead of `now`; nothing for a store in a file."""
        if self.is_sqlite:
            return timedelta(0)
        with self.reading() as connection:
            server: datetime = connection.exec_driver_sql("SELECT clock_timestamp()").scalar_one()
        return server - now

    def copy_to(self, target: Path) -> None:
        """Copy a store in a file, as last committed, to `target`, which appears whole or not at all."""
        draft = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            with closing(sqlite3.connect(str(self.file))) as source, closing(sqlite3.connect(draft)) as copy:
                source.backup(copy)
            with draft.open("rb") as file:
                os.fsync(file.fileno())
            draft.replace(target)
        except (sqlite3.Error, OSError) as error:
            raise StoreError(
                f"store {self.shown} cannot be copied to {target} before it is upgraded: {error}",
                "make room there and the folder writable; nothing was changed",
            ) from error
        finally:
            with suppress(OSError):
                draft.unlink(missing_ok=True)

    def close(self) -> None:
        """Give all connections back."""
        self._engine.dispose()

    def _on_connect_to_file(self, _dialect: Any, _record: Any, words: list[Any], options: dict[str, Any]) -> None:
        """A store that was there and is not must not come back as an empty file."""
        if self._reached or self._read_only:
            words[0] = f"file:{quote(words[0])}?mode={'ro' if self._read_only else 'rw'}"
            options["uri"] = True

    def _on_connected_to_file(self, _connection: Any, record: Any) -> None:
        record.info["opened"] = self._identity()

    def _on_reuse_of_file(self, _connection: Any, record: Any, _proxy: Any) -> None:
        """A kept connection goes on writing to a file that was removed or replaced, and must not cross a fork."""
        if record.info["opened"] != self._identity():
            raise DisconnectionError

    def _identity(self) -> tuple[int, ...]:
        """This process and the store's file; no file where it is gone."""
        try:
            found = Path(self.url.database or "").stat()
        except OSError:
            return (os.getpid(),)
        return os.getpid(), found.st_dev, found.st_ino

    def _write_once(self, action: Callable[[Connection], T]) -> T:
        with self._engine.connect() as connection:
            connection = connection.execution_options(assay_write=True)
            with connection.begin():
                if not self.is_sqlite:
                    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_WAIT_S}s'")
                return action(connection)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            reason = (str(error.orig).strip().splitlines() or ["no reason given"])[0]
            if isinstance(error, IntegrityError):
                raise Conflict(f"store {self.shown}: {reason}", "another writer was first; read its state") from error
            raise StoreError(f"store {self.shown}: {reason}", self._remedy(reason)) from error
        except (JSONDecodeError, ValidationError, struct.error) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> StoreError:
        """A row that assay cannot have written as it stands: changed by hand, or by a failing disk."""
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            why = f"{error.title}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        else:
            why = (str(error).splitlines() or [type(error).__name__])[0]
        return StoreError(
            f"store {self.shown}: a row cannot be read: {why}", "it was changed or damaged; restore it from a backup"
        )

    def _remedy(self, reason: str) -> str:
        if self.file is not None and self.file.is_dir():
            return f"name a file: {self.file} is a folder"
        if "unable to open" in reason and self.file is not None and not self._reached:
            return f"check that the folder {self.file.parent} exists and may be written"
        if "locked" in reason or "busy" in reason:
            return "another process holds the store; end it, or use PostgreSQL for several writers"
        if "readonly" in reason:
            return f"make {self.file} and its folder writable"
        if "not a database" in reason:
            return f"give another file: {self.file} holds something else"
        if "interrupted" in reason or "statement timeout" in reason:
            return f"it took more than {LONGEST_READ_S} s: ask for less, or later"
        if "disk is full" in reason or "No space left" in reason:
            return "free space where the store lies; what it held before stays"
        if "disk" in reason or "malformed" in reason or "decode to UTF-8" in reason:
            return "check the disk; restore the store from a backup"
        if self.file is not None:
            return f"{self.file} was removed, replaced or changed while in use: restore it, or run the sweep anew"
        return "check the URL, that the server runs and that it may be reached from here"


def insert_into(connection: Connection, table: Table) -> Any:
    """An INSERT that can say ON CONFLICT, in the words of the connection's database."""
    return import_module(f"sqlalchemy.dialects.{connection.dialect.name}").insert(table)


def shown_url(text: str) -> str:
    """A store's URL as anyone may read it: without a password, wherever it stands. What is no URL comes back unread."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        return _unreadable_url(text)
    if url.password is None and not SECRETS & set(url.query):
        return text
    return url._replace(password=None).difference_update_query(SECRETS).render_as_string(hide_password=False)


def _unreadable_url(text: str) -> str:
    """Its end alone, since what stands before the last @ may hold a password."""
    return SECRET_WORDS.sub(r"\1=***", text.rsplit("@", maxsplit=1)[-1])


def parse_url(text: str) -> URL:
    """A store's URL with its driver named. Raises StoreError for what is neither SQLite nor PostgreSQL."""
    remedy = "give sqlite:///PATH or postgresql://USER@HOST/NAME"
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise StoreError(f"{_unreadable_url(text)!r} is no store URL", remedy) from error
    if backend == "sqlite":
        if url.database in {None, "", ":memory:"}:
            raise StoreError("a store in memory is gone with its process", "give sqlite:///PATH")
        return url.set(drivername="sqlite")
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    raise StoreError(f"{backend} is no store", remedy)


def _engine(url: URL, lock_wait_s: float, read_only: bool) -> Engine:
    if url.get_backend_name() != "sqlite":
        limits = {"options": f"{url.query.get('options', '')} {READ_ONLY}".strip()} if read_only else {}
        try:
            return create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": CONNECT_WAIT_S, **limits})
        except ImportError as error:
            raise StoreError("PostgreSQL needs psycopg", "pip install 'gpu-assay[postgres]'") from error
    engine = create_engine(
        url, poolclass=QueuePool, pool_size=1, max_overflow=-1, connect_args={"timeout": lock_wait_s}
    )
    event.listen(engine, "connect", _on_connect)
    if read_only:
        event.listen(engine, "begin", _on_begin_of_read)
    event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _record: Any) -> None:
    """The driver must not begin transactions by itself: it would take the write lock too late to wait for it."""
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute("PRAGMA synchronous = FULL")  # an acknowledged record outlives a power cut
    cursor.close()


def _on_begin(connection: Connection) -> None:
    options = connection.get_execution_options()
    if options.get("isolation_level") != "AUTOCOMMIT":
        connection.exec_driver_sql("BEGIN IMMEDIATE" if options.get("assay_write") else "BEGIN")


def _on_begin_of_read(connection: Connection) -> None:
    late_s = time.monotonic() + LONGEST_READ_S
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    driver.set_progress_handler(lambda: time.monotonic() > late_s, 100_000)


def _is_outage(error: DBAPIError) -> bool:
    """Whether the server is gone or full: it broke the connection off, takes none (more) yet, or nobody listens."""
    state = getattr(error.orig, "sqlstate", None)
    if error.connection_invalidated or (state or "").startswith(("57P", "08", "53300")):
        return True
    return isinstance(error, OperationalError) and state is None


def _may_retry(error: DBAPIError) -> bool:
    if error.connection_invalidated or getattr(error.orig, "sqlstate", None) in POSTGRES_RETRY:
        return True
    return "database is locked" in str(error.orig) or "database table is locked" in str(error.orig)
