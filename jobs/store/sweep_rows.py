"""Every row of one sweep as the columns hold it, in lines of JSON that are the same from either database.

A line says what it is of, then each table its columns, and each row follows on a line. Rows are written as stored and
not as read; a digest of the lines is what a sweep's content goes by.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, Table, Text, TypeDecorator, select, type_coerce
from sqlalchemy.types import TypeEngine

from jobs.tables import (
    adjudication,
    attempt,
    block,
    calibration,
    cell_verdict,
    certificate,
    certificate_interval,
    citation,
    comment,
    event,
    finding,
    golden,
    key_bytes,
    run,
    sample,
    scenario,
    seam,
    series,
    sweep,
    token_stream,
    value,
    verdict,
)

SCHEMA = "assay.export/1"
TABLES = (
    sweep, scenario, block, run, attempt, event, series, value, sample, token_stream, seam, key_bytes, certificate,
    certificate_interval, adjudication, verdict, cell_verdict, finding, golden, citation, calibration, comment,
)  # fmt: skip
"""All tables that hold rows of a sweep, each after those that it refers to."""

COUNTED_ANEW = {event.c.seq}
"""Columns that each store fills by itself; rows stand in their order."""

TABLE = b'{"table":"'
AT_ONCE = 2000


@dataclass(slots=True)
class Tally:
    """Digests and rows of the lines of content, table by table and of all."""

    whole: Any = field(default_factory=hashlib.sha256)
    tables: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, line: bytes) -> None:
        """Count a line."""
        self.whole.update(line)
        if line.startswith(TABLE):
            self.tables[line[len(TABLE) :].split(b'"', 1)[0].decode(errors="replace")] = [-1, hashlib.sha256()]
        if self.tables:
            of_table = next(reversed(self.tables.values()))
            of_table[0] += 1
            of_table[1].update(line)

    def told(self) -> dict[str, Any]:
        """Rows and digest of each table, and the digest of all."""
        tables = {name: {"rows": rows, "sha256": sha.hexdigest()} for name, (rows, sha) in self.tables.items()}
        return {"tables": tables, "sha256": self.whole.hexdigest()}


def content(connection: Connection, sweep_id: str, at: str) -> Iterator[bytes]:
    """The lines of a sweep in a store of revision `at`; of one that is not there, those of no rows."""
    yield line_of({"schema": SCHEMA, "revision": at, "sweep": sweep_id})
    for table in TABLES:
        columns = columns_of(table)
        yield line_of({"table": table.name, "columns": [column.name for column in columns]})
        wanted = _ordered(connection, table, columns).where(_of_sweep(table, sweep_id))
        for row in connection.execute(wanted, execution_options={"yield_per": AT_ONCE}):
            yield line_of([b64encode(cell).decode() if isinstance(cell, bytes | memoryview) else cell for cell in row])


def _of_sweep(table: Table, sweep_id: str) -> ColumnElement[bool]:
    """Which rows of a table are a sweep's."""
    if table is sweep:
        return sweep.c.id == sweep_id
    if "sweep_id" in table.c:
        return table.c.sweep_id == sweep_id
    attempts = select(attempt.c.id).where(attempt.c.sweep_id == sweep_id)
    if table is series:
        return series.c.id.in_(select(value.c.series_id).where(value.c.attempt_id.in_(attempts)))
    told = select(verdict.c.id).where(verdict.c.sweep_id == sweep_id)
    if table is citation:
        blessed = select(golden.c.id).where(golden.c.attempt_id.in_(attempts))
        return citation.c.citing.in_(told) | citation.c.citing.in_(blessed)
    if "attempt_id" in table.c:
        return table.c.attempt_id.in_(attempts)
    if "verdict_id" in table.c:
        return table.c.verdict_id.in_(told)
    return table.c.scenario_id.in_(select(scenario.c.id).where(scenario.c.sweep_id == sweep_id))


def _ordered(connection: Connection, table: Table, columns: Sequence[Column[Any]]) -> Select[Any]:
    """By key, and by bytes in both databases, whatever a server's language sorts by."""
    keys: list[ColumnElement[Any]] = [
        column.collate("C")
        if connection.dialect.name == "postgresql" and isinstance(stored_type(column), Text)
        else column
        for column in table.primary_key
    ]
    return select(*(type_coerce(column, stored_type(column)).label(column.name) for column in columns)).order_by(*keys)


def columns_of(table: Table) -> list[Column[Any]]:
    """Those that are written, in order."""
    return [column for column in table.c if column not in COUNTED_ANEW]


def stored_type(column: Column[Any]) -> TypeEngine[Any]:
    """What a column holds in the database, below what it is read as."""
    return column.type.impl_instance if isinstance(column.type, TypeDecorator) else column.type


def line_of(part: Any) -> bytes:
    """A line of JSON."""
    return json.dumps(part, separators=(",", ":"), allow_nan=False).encode() + b"\n"
