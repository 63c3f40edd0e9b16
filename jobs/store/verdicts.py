"""Verdicts as stored: numbered documents, never edited; the newest one speaks. And the answers they rest on."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, Label, Row, Select, Table, Text, insert, select, type_coerce, update

from jobs.column_types import Canonical
from jobs.errors import StoreError
from jobs.lifecycle import advance
from jobs.near_tie import Adjudication
from jobs.outcomes import EXIT_WHEN_BLOCKING
from jobs.retracted import struck
from jobs.store import events, retractions, submission
from jobs.store.rows import new_id
from jobs.tables import adjudication, cell_verdict, finding, sweep, verdict
from jobs.verdict import CellVerdict, Finding, Retraction, Verdict, woven

CELL = ("cell", "model", "outcome", "exit_code")
FINDING = ("outcome", "cell", "arm", "message", "gate", "exit_code")
"""What cells and findings are asked for by, beside their documents."""

AT_ONCE = 500
"""Rows written or fetched together: bounds memory."""


def write_verdict(
    connection: Connection, sweep_id: str, document: Verdict, input_digest: str, now: datetime, *, closes: bool = True
) -> str:
    """Store a verdict with its findings and, if it `closes`, mark the sweep judged; returns its id.

    The same verdict of the same input is no second one; another becomes the next number. Raises StoreError when the
    document speaks of another sweep.
    """
    if document.stamp.sweep_id != sweep_id:
        raise StoreError(f"the verdict speaks of {document.stamp.sweep_id}, not {sweep_id}", "judge this sweep's input")
    retractions.hold(connection, sweep_id)
    row = submission.one(connection, sweep_id)
    frame = document.frame()
    cells, findings = ([one.canonical() for one in rows] for rows in (document.cells, document.findings))
    digest = _digest(woven(frame, cells, findings))  # all is written out once: of a large sweep it is most of the work
    named = (verdict.c.id, verdict.c.number, verdict.c.digest, verdict.c.input_digest)
    newest = connection.execute(_newest_first(sweep_id, *named)).one_or_none()
    if newest is not None and (newest.digest, newest.input_digest) == (digest, input_digest):
        if closes and row.state == "open":
            _close(connection, sweep_id, row.state, f"verdict {newest.number}", now)
        return str(newest.id)
    verdict_id = new_id("vrd", now)
    number = 1 if newest is None else newest.number + 1
    connection.execute(
        insert(verdict),
        {
            "id": verdict_id,
            "sweep_id": sweep_id,
            "number": number,
            "input_digest": input_digest,
            "digest": digest,
            "document": Canonical(frame),
            "outcome": document.outcome,
            "exit_code": document.exit_code,
            "created_at": now,
        },
    )
    _write_rows(connection, cell_verdict, verdict_id, CELL, document.cells, cells)
    _write_rows(connection, finding, verdict_id, FINDING, document.findings, findings)
    used = [row.id for row in document.reviewed if row.kind == "golden" and row.state == "used"]
    retractions.cite(connection, verdict_id, used)
    aside = {row.run_id for row in document.set_aside if row.state == "retracted"}
    retractions.cite_fallen(connection, sweep_id, verdict_id, aside)
    said = f"{document.outcome}, exit {document.exit_code}"
    if row.state == "open" and closes:
        _close(connection, sweep_id, row.state, said, now)
    else:
        events.log(connection, sweep_id, sweep_id, "verdict", now, frm=row.state, target=row.state, message=said)
    return verdict_id


def write_adjudication(connection: Connection, sweep_id: str, answer: Adjudication, now: datetime) -> None:
    """Store an answer with its question; of several the first stands."""
    submission.one(connection, sweep_id)
    question = answer.asked.digest()
    rows = connection.execute(_adjudications(sweep_id)).all()
    if any(row.question_digest == question for row in rows):
        return
    document = answer.model_dump(mode="json")
    row = {"sweep_id": sweep_id, "number": len(rows) + 1, "question_digest": question, "document": document}
    connection.execute(insert(adjudication), {**row, "created_at": now})
    asked = answer.asked
    said = answer.failure or f"answered at {len(answer.positions)} indices"
    subject = f"{asked.head} of {asked.cell} at index {asked.first}: {said}"
    events.log(connection, sweep_id, sweep_id, "adjudication", now, message=subject)


def adjudications(connection: Connection, sweep_id: str) -> tuple[Adjudication, ...]:
    """What the oracle was asked about a sweep, and its answers, in order."""
    return tuple(Adjudication.model_validate(row.document) for row in connection.execute(_adjudications(sweep_id)))


def _adjudications(sweep_id: str) -> Select[Any]:
    return select(adjudication).where(adjudication.c.sweep_id == sweep_id).order_by(adjudication.c.number)


def _close(connection: Connection, sweep_id: str, frm: str, said: str, now: datetime) -> None:
    advance(frm, "judged", events.teller(connection, sweep_id))
    connection.execute(update(sweep).where(sweep.c.id == sweep_id).values(state="judged", judged_at=now))
    events.log(connection, sweep_id, sweep_id, "verdict", now, frm=frm, target="judged", message=said)


def _write_rows(
    connection: Connection, table: Table, verdict_id: str, fields: Sequence[str], rows: Sequence[Any], texts: list[str]
) -> None:
    """Cells or findings in their order: what is asked for by itself, and each one's whole text."""
    for start in range(0, len(rows), AT_ONCE):
        part = enumerate(zip(rows[start : start + AT_ONCE], texts[start : start + AT_ONCE], strict=True), start)
        written = (
            {"verdict_id": verdict_id, "position": position, "document": Canonical(text)}
            | {name: getattr(row, name) for name in fields}
            for position, (row, text) in part
        )
        connection.execute(insert(table), list(written))


def _digest(pieces: Iterable[str]) -> str:
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece.encode())
    return sha.hexdigest()


def outcomes(connection: Connection, sweep_ids: Sequence[str]) -> dict[str, tuple[str, int]]:
    """Outcome and exit code of the verdicts in force, without their documents; sweeps without one are not there."""
    rows = _in_force(connection, sweep_ids)
    struck_out = retractions.of_verdicts(connection, rows)
    retracted: tuple[str, int] = ("RETRACTED", EXIT_WHEN_BLOCKING["RETRACTED"])
    return {one: retracted if one in struck_out else (row.outcome, row.exit_code) for one, row in rows.items()}


def fallen(connection: Connection, sweep_id: str) -> tuple[Retraction, ...]:
    """What was retracted of all that a sweep's verdict in force rests on."""
    return retractions.of_verdicts(connection, _in_force(connection, [sweep_id])).get(sweep_id, ())


def _in_force(connection: Connection, sweep_ids: Sequence[str]) -> dict[str, Any]:
    """The newest verdicts of some sweeps, without their documents."""
    columns = (verdict.c.id, verdict.c.sweep_id, verdict.c.outcome, verdict.c.exit_code, verdict.c.created_at)
    wanted = select(*columns).where(verdict.c.sweep_id.in_(sweep_ids)).order_by(verdict.c.number)
    return {row.sweep_id: row for row in connection.execute(wanted)}


def newest(connection: Connection, sweep_id: str) -> Verdict | None:
    """The verdict in force, struck out where what it rests on was retracted; None before the first.

    Raises StoreError when it cannot be read any more.
    """
    row = newest_frame(connection, sweep_id)
    if row is None:
        return None
    with readable(row.id):
        frame = Verdict.model_validate_json(row.text)
        cells = tuple(CellVerdict.model_validate_json(text) for text in _texts(connection, cell_verdict, row.id))
        findings = tuple(Finding.model_validate_json(text) for text in _texts(connection, finding, row.id))
    found = frame.model_copy(update={"cells": cells, "findings": findings})
    return struck(found, fallen(connection, sweep_id))


def newest_frame(connection: Connection, sweep_id: str) -> Row[Any] | None:
    """Id and frame (`text`) of the verdict in force; None before the first."""
    return connection.execute(_newest_first(sweep_id, verdict.c.id, text_of(verdict))).one_or_none()


@contextmanager
def readable(verdict_id: str) -> Iterator[None]:
    """StoreError where a verdict is of another form than this assay's."""
    try:
        yield
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise  # a broken row, and not one of another version
        raise StoreError(
            f"verdict {verdict_id} was written by another version of assay", "judge the sweep again"
        ) from error


def _texts(connection: Connection, table: Table, verdict_id: str) -> Iterator[str]:
    wanted = select(text_of(table)).where(table.c.verdict_id == verdict_id).order_by(table.c.position)
    yield from connection.execute(wanted, execution_options={"yield_per": AT_ONCE}).scalars()


def text_of(table: Table) -> Label[str]:
    """A row's document as it stands, to be read once and not into objects of its own before."""
    return type_coerce(table.c.document, Text).label("text")


def _newest_first(sweep_id: str, *wanted: Any) -> Select[Any]:
    return select(*wanted).where(verdict.c.sweep_id == sweep_id).order_by(verdict.c.number.desc()).limit(1)
