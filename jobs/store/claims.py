"""Attempts and their moves, and how runs end, under the fence of the block's lease.

Every change is guarded by the state and fence it expects, so that of two writers one gets Conflict, and a resend of a
change that is already there changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, bindparam, exists, insert, select, update

from jobs.errors import Conflict, StoreError, UnknownAttempt
from jobs.lifecycle import ENDS, LIVE, Tried, advance, attempts_left
from jobs.model import AttemptState, Limits, RunState
from jobs.store import events
from jobs.store.rows import AttemptRef, new_id
from jobs.tables import attempt, block, run, sweep

# Statements of every run stand here once: to put one together takes longer than to have it carried out.
_RUN = select(run).where(run.c.id == bindparam("of")).with_for_update()
_LEASE = select(block.c.fence, block.c.worker).where(block.c.id == bindparam("of")).with_for_update()
_ATTEMPT: Select[Any] = (
    select(
        attempt.c.id, attempt.c.run_id, attempt.c.sweep_id, attempt.c.number, attempt.c.fence,
        attempt.c.state, attempt.c.worker, attempt.c.record_digest,
    )
    .where(attempt.c.id == bindparam("of"))
    .with_for_update()
)  # fmt: skip
_ATTEMPTS = (
    select(attempt.c.id, attempt.c.number, attempt.c.state, attempt.c.fault, attempt.c.fence, attempt.c.worker)
    .where(attempt.c.run_id == bindparam("of"))
    .order_by(attempt.c.number)
)
_OPEN = insert(attempt)
_CHANGE = update(attempt).where(
    attempt.c.id == bindparam("of"),
    attempt.c.state == bindparam("expected"),
    attempt.c.fence == bindparam("under"),
    exists().where(run.c.id == attempt.c.run_id, block.c.id == run.c.block_id, block.c.fence == bindparam("under")),
)
_END_RUN = update(run).where(run.c.id == bindparam("of"), run.c.state == bindparam("expected"))
_ONE_LEFT_LESS = update(block).where(block.c.id == bindparam("of")).values(runs_left=block.c.runs_left - 1)


def open_attempt(connection: Connection, run_id: str, fence: int, worker: str, card: str, now: datetime) -> AttemptRef:
    """Start the next attempt at a run, in state claimed; a resend is a no-op.

    Raises Conflict when the run is done, its block is not held under `fence`, another attempt is under way, or no
    attempt is left.
    """
    return _open(connection, run_id, fence, worker, card, now, ("claimed",))


def start_attempt(connection: Connection, run_id: str, fence: int, worker: str, card: str, now: datetime) -> AttemptRef:
    """Open the next attempt and take it to running, as one change; a resend is a no-op. Raises as `open_attempt`."""
    return _open(connection, run_id, fence, worker, card, now, ("claimed", "clearing", "running"))


def _open(
    connection: Connection, run_id: str, fence: int, worker: str, card: str, now: datetime, path: tuple[str, ...]
) -> AttemptRef:
    """A new attempt that has gone through the states of `path`."""
    found = run_row(connection, run_id)
    if found.state != "pending":
        raise Conflict(f"run {run_id} is {found.state}", "claim a block again and take its pending runs")
    _require_fence(connection, found.block_id, fence)
    earlier = connection.execute(_ATTEMPTS, {"of": run_id}).all()
    live = [row for row in earlier if row.state in LIVE]
    if live:
        if (live[0].state, live[0].fence, live[0].worker) == (path[-1], fence, worker):
            return AttemptRef(live[0].id, run_id, live[0].number)
        raise Conflict(f"attempt {live[0].id} at run {run_id} is {live[0].state}", "end it first")
    if not _has_attempts_left(connection, found.sweep_id, [Tried(row.state, row.fault) for row in earlier]):
        raise Conflict(f"run {run_id} has no attempt left", "finish the run as exhausted")
    ref = AttemptRef(new_id("att", now), run_id, len(earlier) + 1)
    connection.execute(
        _OPEN,
        {
            "id": ref.attempt_id,
            "run_id": run_id,
            "sweep_id": found.sweep_id,
            "number": ref.number,
            "fence": fence,
            "state": path[-1],
            "reason": "",
            "worker": worker,
            "card": card,
            "opened_at": now,
        },
    )
    events.log_moves(connection, found.sweep_id, ref.attempt_id, path, now, worker, card)
    return ref


def move(
    connection: Connection, attempt_id: str, fence: int, frm: str, to: str, reason: str, fault: str, now: datetime
) -> None:
    """Change an attempt's state. Raises IllegalMove off the lifecycle, Conflict when state or fence is another."""
    assert to != "measured", "an attempt is measured by writing its record"
    found = attempt_row(connection, attempt_id)
    if (found.state, found.fence) == (to, fence):
        return
    advance(frm, to, events.teller(connection, attempt_id))
    change(connection, found, fence, frm, {"state": to, "reason": reason, "fault": fault}, now)
    events.log(
        connection, found.sweep_id, attempt_id, "attempt", now, frm=frm, target=to, message=reason, worker=found.worker
    )


def change(
    connection: Connection, found: Row[Any], fence: int, frm: str, values: dict[str, Any], now: datetime
) -> None:
    """The guarded update of an attempt: only from `frm`, and only while its block is held under `fence`."""
    closed = {"closed_at": now} if values["state"] in ENDS else {}
    done = connection.execute(_CHANGE, {"of": found.id, "expected": frm, "under": fence, **values, **closed})
    guarded(
        done.rowcount,
        f"attempt {found.id} is {found.state} under fence {found.fence}, not {frm} under fence {fence}"
        if (found.state, found.fence) != (frm, fence)
        else f"the block of attempt {found.id} is no longer held under fence {fence}",
    )


def finish_run(
    connection: Connection, run_id: str, state: RunState, reason: str, fence: int | None, now: datetime
) -> None:
    """End a run without a measurement; with a fence, only while its block is held under it.

    Raises Conflict while an attempt is under way or when the fence is old, IllegalMove when the run is complete.
    """
    found = run_row(connection, run_id)
    if found.state == state:
        return
    if fence is not None:
        _require_fence(connection, found.block_id, fence)
    live = attempt.c.state.in_(LIVE)
    running = connection.execute(select(attempt.c.id).where(attempt.c.run_id == run_id, live)).scalar()
    if running is not None:
        raise Conflict(f"run {run_id} still has attempt {running} under way", "end the attempt first")
    set_run(connection, found, state, reason, now)


def set_run(connection: Connection, found: Row[Any], state: RunState, reason: str, now: datetime) -> None:
    """The guarded update of a run's state."""
    advance(found.state, state, events.teller(connection, found.id))
    guard = {"of": found.id, "expected": found.state}
    guarded(connection.execute(_END_RUN, {**guard, "state": state}).rowcount, f"run {found.id} moved")
    connection.execute(_ONE_LEFT_LESS, {"of": found.block_id})
    events.log(connection, found.sweep_id, found.id, "run", now, frm=found.state, target=state, message=reason)


def attempt_row(connection: Connection, attempt_id: str) -> Row[Any]:
    """An attempt's row, locked where the database locks rows. Raises UnknownAttempt when there is none."""
    row = connection.execute(_ATTEMPT, {"of": attempt_id}).one_or_none()
    if row is None:
        raise UnknownAttempt(f"no attempt {attempt_id!r} in this store", "open it first")
    return row


def end_live(
    connection: Connection, which: ColumnElement[bool], state: AttemptState, reason: str, now: datetime
) -> list[str]:
    """End the live attempts of some blocks as lost or cancelled, and exhaust the runs that have no attempt left."""
    blocks = select(block.c.id).where(which)
    runs = connection.execute(select(run).where(run.c.block_id.in_(blocks), run.c.state == "pending")).all()
    live = select(attempt).where(attempt.c.run_id.in_([row.id for row in runs]), attempt.c.state.in_(LIVE))
    ended = connection.execute(live.with_for_update()).all()
    for row in ended:
        advance(row.state, state, events.teller(connection, row.id))
        closing = update(attempt).where(attempt.c.id == row.id, attempt.c.state == row.state)
        fault = "lost" if state == "lost" else ""
        connection.execute(closing.values(state=state, reason=reason, fault=fault, closed_at=now))
        events.log(
            connection, row.sweep_id, row.id, "attempt", now,
            frm=row.state, target=state, message=reason, worker=row.worker,
        )  # fmt: skip
    tries = tried(connection, [row.id for row in runs])
    for row in runs:
        if not _has_attempts_left(connection, row.sweep_id, tries[row.id]):
            set_run(connection, row, "exhausted", "no attempt left", now)
    return [row.id for row in ended]


def tried(connection: Connection, run_ids: Iterable[str]) -> dict[str, list[Tried]]:
    """How the attempts at some runs stand, in order."""
    wanted = list(run_ids)
    found: dict[str, list[Tried]] = {run_id: [] for run_id in wanted}
    columns = select(attempt.c.run_id, attempt.c.state, attempt.c.fault)
    for run_id, state, fault in connection.execute(
        columns.where(attempt.c.run_id.in_(wanted)).order_by(attempt.c.number)
    ):
        found[run_id].append(Tried(state, fault))
    return found


def _has_attempts_left(connection: Connection, sweep_id: str, tries: Collection[Tried]) -> bool:
    if not tries:  # the limits, which stand in the whole manifest, leave everybody a first one
        return True
    manifest = connection.execute(select(sweep.c.manifest).where(sweep.c.id == sweep_id)).scalar_one()
    return attempts_left(tuple(tries), Limits.model_validate(manifest["limits"]))


def _require_fence(connection: Connection, block_id: str, fence: int) -> None:
    found = connection.execute(_LEASE, {"of": block_id}).one()
    if found.fence != fence or found.worker is None:
        raise Conflict(f"block {block_id} is not held under fence {fence}", "claim it again")


def run_row(connection: Connection, run_id: str) -> Row[Any]:
    """A run's row, locked where the database locks rows. Raises StoreError when there is none."""
    row = connection.execute(_RUN, {"of": run_id}).one_or_none()
    if row is None:
        raise StoreError(f"no run {run_id!r} in this store", "submit the sweep first")
    return row


def guarded(rows: int, message: str) -> None:
    """Raise Conflict unless a guarded update met exactly its row."""
    if rows != 1:
        raise Conflict(message, "claim the block again; what was done under the old fence does not count")
