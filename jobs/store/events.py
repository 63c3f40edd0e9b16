"""The log of what happened: every state change, and whatever else somebody must be able to ask about later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy import Connection, insert, select

from jobs.lifecycle import Move
from jobs.store.rows import Event
from jobs.tables import event

_APPEND = insert(event)


def log(
    connection: Connection,
    sweep_id: str,
    subject: str,
    kind: str,
    now: datetime,
    *,
    frm: str = "",
    target: str = "",
    message: str = "",
    worker: str = "",
) -> None:
    """Append one event."""
    row = {"sweep_id": sweep_id, "subject": subject, "kind": kind, "frm": frm, "target": target}
    connection.execute(_APPEND, {**row, "message": message, "worker": worker, "at": now})


def log_moves(
    connection: Connection, sweep_id: str, attempt_id: str, path: Sequence[str], now: datetime, worker: str, said: str
) -> None:
    """Append the moves of a new attempt through the states of `path`; the first says `said`."""
    row = {"sweep_id": sweep_id, "subject": attempt_id, "kind": "attempt", "worker": worker, "at": now}
    moves = zip(("", *path), path, strict=False)
    rows = [{**row, "frm": frm, "target": to, "message": "" if frm else said} for frm, to in moves]
    connection.execute(_APPEND, rows)


def listed(connection: Connection, sweep_id: str, after: int, limit: int) -> tuple[Event, ...]:
    """A sweep's events in order, from the one after `after`."""
    wanted = select(event).where(event.c.sweep_id == sweep_id, event.c.seq > after).order_by(event.c.seq).limit(limit)
    return tuple(Event(**row._mapping) for row in connection.execute(wanted))


def newest(connection: Connection, sweep_id: str, limit: int) -> tuple[Event, ...]:
    """The newest events of a sweep, in order."""
    wanted = select(event).where(event.c.sweep_id == sweep_id).order_by(event.c.seq.desc()).limit(limit)
    return tuple(Event(**row._mapping) for row in reversed(connection.execute(wanted).all()))


def about(connection: Connection, subject: str, kind: str) -> tuple[Event, ...]:
    """The events of one kind about one subject, in all sweeps, in order."""
    wanted = select(event).where(event.c.subject == subject, event.c.kind == kind).order_by(event.c.seq)
    return tuple(Event(**row._mapping) for row in connection.execute(wanted))


def teller(connection: Connection, subject: str) -> Callable[[], tuple[Move, ...]]:
    """The history of one attempt, run or sweep, read when somebody asks for it."""
    return lambda: history(connection, subject)


def history(connection: Connection, subject: str) -> tuple[Move, ...]:
    """The state changes of one attempt, run or sweep."""
    wanted = select(event).where(event.c.subject == subject, event.c.target != "").order_by(event.c.seq)
    return tuple(
        Move(row.frm, row.target, row.message, row.at.isoformat(timespec="seconds"))
        for row in connection.execute(wanted)
    )
