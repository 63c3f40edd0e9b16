"""Verdicts as stored: numbered documents, never edited; the newest one speaks. And the answers they rest on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError
from sqlalchemy import Connection, Select, Text, insert, select, type_coerce, update

from jobs.column_types import Canonical
from jobs.errors import StoreError
from jobs.lifecycle import advance
from jobs.near_tie import Adjudication
from jobs.outcomes import EXIT_WHEN_BLOCKING
from jobs.retracted import struck
from jobs.store import events, retractions, submission
from jobs.store.rows import new_id
from jobs.tables import adjudication, finding, sweep, verdict
from jobs.verdict import Retraction, Verdict


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
    text = Canonical(document.canonical())  # written out once: of a large sweep it is the most of the work
    digest = hashlib.sha256(text.encode()).hexdigest()
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
            "document": text,
            "outcome": document.outcome,
            "exit_code": document.exit_code,
            "created_at": now,
        },
    )
    _write_findings(connection, verdict_id, document)
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


def _write_findings(connection: Connection, verdict_id: str, document: Verdict) -> None:
    fields = ("outcome", "cell", "arm", "message", "gate", "exit_code")
    rows = [
        {"verdict_id": verdict_id, "position": position, **{name: getattr(one, name) for name in fields}}
        for position, one in enumerate(document.findings)
    ]
    if rows:
        connection.execute(insert(finding), rows)


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
    text = type_coerce(verdict.c.document, Text).label("text")  # read once, not into objects of its own before
    row = connection.execute(_newest_first(sweep_id, verdict.c.id, text)).one_or_none()
    if row is None:
        return None
    try:
        found = Verdict.model_validate_json(row.text)
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise  # a broken row, and not one of another version
        raise StoreError(
            f"verdict {row.id} was written by another version of assay", "judge the sweep again"
        ) from error
    return struck(found, fallen(connection, sweep_id))


def _newest_first(sweep_id: str, *wanted: Any) -> Select[Any]:
    return select(*wanted).where(verdict.c.sweep_id == sweep_id).order_by(verdict.c.number.desc()).limit(1)
