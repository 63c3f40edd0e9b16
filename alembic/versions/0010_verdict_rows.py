"""Give each cell and finding of a verdict a row of its own, and list sweeps without reading their manifests.

Revision 0010, after 0009. A verdict of ten thousand cells was one text of 200 MB, of which nothing could be read but
all of it. Each row holds its part of that text byte by byte, so that the digest of the whole stays what it was.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import sqlalchemy as sa
from alembic import context, op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_CELL = ("cell", "model", "outcome", "exit_code")
_FINDING = ("outcome", "cell", "arm", "message", "gate", "exit_code")
_AT_ONCE = 500
_NOT_STORABLE = re.compile("[\0\ud800-\udfff]")


def _table(name: str, *columns: str) -> sa.TableClause:
    numbers = ("position", "exit_code")
    return sa.table(name, *(sa.column(one, sa.BigInteger() if one in numbers else sa.Text()) for one in columns))


_verdict = _table("verdict", "id", "document")
_cell = _table("cell_verdict", "verdict_id", "position", "document", *_CELL)
_finding = _table("finding", "verdict_id", "position", "document", *_FINDING)


def upgrade() -> None:
    if context.is_offline_mode():  # SQL cannot take documents apart: where one stands this fails, before any change
        op.execute("INSERT INTO finding (verdict_id, position, outcome) SELECT id, -1, NULL FROM verdict")
    op.create_table(
        "cell_verdict",
        sa.Column("verdict_id", sa.Text(), nullable=False),
        sa.Column("position", sa.BigInteger(), nullable=False),
        sa.Column("cell", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.Column("exit_code", sa.BigInteger(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("verdict_id", "position", name="pk_cell_verdict"),
        sa.ForeignKeyConstraint(["verdict_id"], ["verdict.id"], name="fk_cell_verdict_verdict_id"),
    )
    op.add_column("finding", sa.Column("document", sa.Text(), nullable=True))
    if not context.is_offline_mode():
        _take_apart(op.get_bind())
    in_force = ["sweep_id", "number", "outcome", "exit_code", "created_at", "id"]
    op.create_index("ix_verdict_in_force", "verdict", in_force)
    listed = ["created_at", "id", "name", "state", "judged_at", "priority", "retracted_at"]
    op.create_index("ix_sweep_listed", "sweep", listed)


def downgrade() -> None:
    op.drop_index("ix_sweep_listed", "sweep")
    op.drop_index("ix_verdict_in_force", "verdict")
    connection = op.get_bind()
    for verdict_id, text in _documents(connection):
        for name, table in (("cells", _cell), ("findings", _finding)):
            wanted = sa.select(table.c.document).where(table.c.verdict_id == verdict_id, table.c.document.is_not(None))
            rows = connection.execute(wanted.order_by(table.c.position)).scalars()
            text = text.replace(f'"{name}":[]', f'"{name}":[{",".join(rows)}]', 1)
        connection.execute(sa.update(_verdict).where(_verdict.c.id == verdict_id).values(document=text))
    op.drop_column("finding", "document")
    op.drop_table("cell_verdict")


def _take_apart(connection: sa.Connection) -> None:
    for verdict_id, text in _documents(connection):
        text, cells = _apart(text, "cells")
        _write(connection, _cell, verdict_id, _CELL, cells)
        text, findings = _apart(text, "findings")
        if findings:
            connection.execute(sa.delete(_finding).where(_finding.c.verdict_id == verdict_id))
        _write(connection, _finding, verdict_id, _FINDING, findings)
        connection.execute(sa.update(_verdict).where(_verdict.c.id == verdict_id).values(document=text))


def _documents(connection: sa.Connection) -> Iterator[tuple[str, str]]:
    ids = connection.execute(sa.select(_verdict.c.id)).scalars().all()
    one = sa.select(_verdict.c.document)
    for verdict_id in ids:
        yield verdict_id, connection.execute(one.where(_verdict.c.id == verdict_id)).scalar_one()


def _apart(text: str, name: str) -> tuple[str, list[str]]:
    """A document without the objects of one list, and these as they are written.

    One by one: all of them as Python's own objects would take gigabytes.
    """
    mark = f'"{name}":['  # inside a string there would be backslashes in it
    begin = text.find(mark) + len(mark)
    if begin < len(mark):
        return text, []
    rows, end, decoder = [], begin, json.JSONDecoder()
    while text[end] != "]":
        start = end + (text[end] == ",")
        end = decoder.raw_decode(text, start)[1]
        rows.append(text[start:end])
    return text[:begin] + text[end:], rows


def _write(
    connection: sa.Connection, table: sa.TableClause, verdict_id: str, fields: tuple[str, ...], rows: list[str]
) -> None:
    for start in range(0, len(rows), _AT_ONCE):
        written = []
        for position, text in enumerate(rows[start : start + _AT_ONCE], start):
            told = json.loads(text)
            own = {"verdict_id": verdict_id, "position": position, "document": text}
            written.append(own | {name: _clean(told.get(name, "")) for name in fields})
        connection.execute(sa.insert(table), written)


def _clean(value: str | int) -> str | int:
    """As a store takes it: PostgreSQL refuses NUL and lone halves of pairs, which JSON holds as escapes."""
    return _NOT_STORABLE.sub("\ufffd", value) if isinstance(value, str) else value
