"""A sweep in one file, between stores: every row of it as the columns hold it, in lines of JSON, compressed.

The first line says the form, the store's revision and the sweep; then for each table its columns and a line a row; the
last line counts the rows and holds digests. Rows are written as stored and not as read, so both databases give the same
file, and what was imported is proven by writing it out again: its digest is the file's, or nothing stays.
"""

from __future__ import annotations

import gzip
import json
import zlib
from base64 import b64decode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sqlalchemy import Column, Connection, LargeBinary, Table, bindparam, select

from jobs.column_types import clean_text
from jobs.errors import Conflict, SpecError, StoreError
from jobs.store import calibrations, readback, revision, submission, verdicts
from jobs.store.connect import insert_into
from jobs.store.sweep_rows import AT_ONCE, SCHEMA, TABLES, Tally, columns_of, content, line_of, stored_type
from jobs.tables import citation, series, sweep

LONGEST_LINE = 1 << 29
HERE = {table.name: columns_of(table) for table in TABLES}
"""Columns that are written, by table, in a store of the newest revision."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What a file holds: rows by table, the digest of all, and the other sweeps on which what is told of it rests."""

    sweep_id: str
    revision: str
    digest: str
    tables: dict[str, dict[str, Any]]
    rests_on: tuple[str, ...]
    fallen: tuple[str, ...]  # ids of what was retracted of all that its verdict rests on

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return sum(told["rows"] for told in self.tables.values())


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import came to; `absent`: sweeps that the imported one rests on and that are not in the store."""

    sweep_id: str
    rows: int
    digest: str
    was_there: bool
    absent: tuple[str, ...]


def export(connection: Connection, sweep_id: str, out: IO[bytes]) -> Exported:
    """Write a judged sweep. Raises SpecError for one that is open: what is measured still has no end to write."""
    row = submission.one(connection, sweep_id)
    if row.state == "open":
        raise SpecError(f"sweep {sweep_id} is open", f"wait until it is judged, or give it up: assay cancel {sweep_id}")
    manifest = submission.manifest_of(connection, sweep_id)
    noise = calibrations.known(connection, manifest, row.created_at)
    others = {one.sweep for one in noise} | {one.sweep for one in manifest.reviewed.goldens}
    fallen = {one.id for one in verdicts.fallen(connection, sweep_id)}
    return write(connection, sweep_id, out, _present(connection, others) - {sweep_id}, fallen)


def write(connection: Connection, sweep_id: str, out: IO[bytes], rests_on: set[str], fallen: set[str]) -> Exported:
    """Write a sweep's rows, and last what is told of it."""
    tally = Tally()
    with gzip.GzipFile(fileobj=out, mode="wb", filename="", mtime=0) as packed:
        for line in content(connection, sweep_id, _need_revision(connection)):
            tally.add(line)
            packed.write(line)
        told = {
            **tally.told(),
            "rests_on": sorted(rests_on),
            "fallen": sorted(fallen),
        }
        packed.write(line_of(told))
    return _exported(sweep_id, _need_revision(connection), told)


def read(path: Path) -> Exported:
    """What a file says it holds, after all of it was read against its digests.

    Raises SpecError for what is no export, is damaged or cut off, and for one of a revision that is not known here.
    """
    tally, first, last = Tally(), b"", b""
    for line in _lines(path):
        if last:
            tally.add(last)
        first, last = first or line, line
    head, told = _object(path, first), _object(path, last)
    if head.get("schema") != SCHEMA:
        raise _no_export(path, f"its form is {head.get('schema')!r}, and not {SCHEMA}")
    if {name: told.get(name) for name in tally.told()} != tally.told():
        raise _no_export(path, "its digests are not those of what it holds; it is cut off or damaged")
    if not all(isinstance(told.get(name), list) for name in ("rests_on", "fallen")):
        raise _no_export(path, "its last line lacks what it rests on")
    if not revision.is_known(at := str(head.get("revision"))):
        raise SpecError(
            f"{path} was exported at revision {at}, which this assay ({revision.head()}) does not know",
            "use the newer assay that wrote it",
        )
    return _exported(str(head.get("sweep")), at, told)


def load(connection: Connection, path: Path, told: Exported) -> Imported:
    """Import a file that `read` has read; what is there already stays as it is.

    Raises Conflict when the sweep, or another of the same submission, is there with other content; SpecError when the
    file is not what this assay wrote, or when what struck its verdict out is not here.
    """
    sweep_id = told.sweep_id
    was_there = bool(_present(connection, {sweep_id}))
    if not was_there:
        _refuse_same_submission(connection, path)
        for table, columns, rows in batches(path, HERE):
            insert(connection, table, columns, rows)
    tally = Tally()
    for line in content(connection, sweep_id, told.revision):
        tally.add(line)
    _compare(path, told, tally, was_there)
    if not was_there:
        _need_readable(connection, path, sweep_id)
        here = {one.id for one in verdicts.fallen(connection, sweep_id)}
        if unknown := sorted(set(told.fallen) - here):
            raise SpecError(
                f"the verdict of {sweep_id} is struck out by {', '.join(unknown)}, not retracted in this store",
                f"import what it rests on first: {', '.join(told.rests_on) or 'its goldens'}",
            )
    absent = sorted(set(told.rests_on) - _present(connection, set(told.rests_on)))
    return Imported(sweep_id, told.rows, told.digest, was_there, tuple(absent))


def _exported(sweep_id: str, at: str, told: Mapping[str, Any]) -> Exported:
    rests_on, fallen = (tuple(map(str, told[name])) for name in ("rests_on", "fallen"))
    return Exported(sweep_id, at, told["sha256"], told["tables"], rests_on, fallen)


# ---- what is read ------------------------------------------------------------------------------------------------


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as packed:
            while line := packed.readline(LONGEST_LINE):
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise _no_export(path, str(error)) from error


def _object(path: Path, line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _no_export(path, "a line is no JSON") from error
    if not isinstance(found, dict):
        raise _no_export(path, "it does not begin and end as one")
    return found


def _no_export(path: Path, why: str) -> SpecError:
    return SpecError(f"{path} is no whole export of a sweep: {why}", "write it again: assay db export")


def batches(
    path: Path, known: Mapping[str, list[Column[Any]]]
) -> Iterator[tuple[Table, list[Column[Any]], list[list[Any]]]]:
    """Rows of a file, some at a time, with their table and its columns. SpecError where they are not those known."""
    columns = known[sweep.name]
    rows: list[list[Any]] = []
    for line in _lines(path):
        if line.startswith(b"{"):
            told = _object(path, line)
            if rows:
                yield columns[0].table, columns, rows
                rows = []
            if "table" in told:
                named = {column.name: column for column in known.get(told["table"], ())}
                if not named or sorted(named) != sorted(told["columns"]):
                    raise _no_export(path, f"table {told['table']} has other columns than a store of its revision")
                columns = [named[name] for name in told["columns"]]
            continue
        rows.append(_cells(path, columns, line))
        if len(rows) >= AT_ONCE:
            yield columns[0].table, columns, rows
            rows = []


def _cells(path: Path, columns: list[Column[Any]], line: bytes) -> list[Any]:
    """A row as the database takes it."""
    try:
        cells = json.loads(line)
        if not isinstance(cells, list) or len(cells) != len(columns):
            raise ValueError
        return [
            (b64decode(cell, validate=True) if isinstance(stored_type(column), LargeBinary) else clean_text(cell))
            if isinstance(cell, str)
            else cell
            for column, cell in zip(columns, cells, strict=True)
        ]
    except (ValueError, RecursionError) as error:
        raise _no_export(path, "a row is not as its table") from error


def insert(connection: Connection, table: Table, columns: list[Column[Any]], rows: list[list[Any]]) -> None:
    names = [f"given_{column.name}" for column in columns]
    given = {
        column.name: bindparam(name, type_=stored_type(column)) for name, column in zip(names, columns, strict=True)
    }
    into = insert_into(connection, table).values(given)
    if table in (series, citation):  # other sweeps may have the same; that it is the same is proven afterwards
        into = into.on_conflict_do_nothing()
    connection.execute(into, [dict(zip(names, row, strict=True)) for row in rows])


def _refuse_same_submission(connection: Connection, path: Path) -> None:
    _, columns, rows = next(batches(path, HERE))
    told = dict(zip((column.name for column in columns), rows[0], strict=True))
    same = (sweep.c.submit_key == told["submit_key"]) & (
        (sweep.c.manifest_digest == told["manifest_digest"]) | (sweep.c.submit_key != "")
    )
    found = connection.execute(select(sweep.c.id).where(same)).scalars().first()
    if found is not None:
        raise Conflict(f"sweep {found} of this store is of the same submission as {told['id']}", "use another store")


def _compare(path: Path, told: Exported, tally: Tally, was_there: bool) -> None:
    here = tally.told()
    if here["sha256"] == told.digest:
        return
    other = [name for name in here["tables"] if here["tables"][name] != told.tables.get(name)]
    if was_there:
        raise Conflict(
            f"sweep {told.sweep_id} is in this store with other content than in {path}: {', '.join(other)}",
            "it was judged again, retracted or commented in one of the two; nothing was changed",
        )
    raise _no_export(path, f"it does not come back as it is: {', '.join(other)}; nothing was imported")


def _need_readable(connection: Connection, path: Path, sweep_id: str) -> None:
    try:
        readback.judge_input(connection, sweep_id)
        verdicts.newest(connection, sweep_id)
    except (ValueError, KeyError, StoreError) as error:
        raise _no_export(path, f"its rows cannot be read: {error}") from error


def _need_revision(connection: Connection) -> str:
    return revision.current(connection) or ""


def _present(connection: Connection, ids: set[str]) -> set[str]:
    return set(connection.execute(select(sweep.c.id).where(sweep.c.id.in_(ids))).scalars())
