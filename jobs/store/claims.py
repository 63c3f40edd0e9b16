"""Who may run what: leases on blocks, fences against those who lost one, attempts and their moves.

Every change is guarded by the state and fence it expects, so that of two writers one gets Conflict, and a resend of a
change that is already there changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, exists, func, insert, or_, select, update

from jobs.errors import Conflict, StoreError, UnknownAttempt
from jobs.lifecycle import ENDS, LIVE, advance, attempts_left
from jobs.model import AttemptState, CellPlan, Limits, RunState
from jobs.store import events
from jobs.store.rows import AttemptRef, BlockClaim, Pending, RunTicket, new_id
from jobs.tables import attempt, block, run, scenario, sweep


def claim_block(connection: Connection, sweep_id: str, worker: str, lease_s: float, now: datetime) -> BlockClaim | None:
    """Lease the first block with work that nobody holds; None when there is none.

    What an expired lease left running becomes lost; runs that thereby have no attempt left become exhausted.
    """
    free = or_(block.c.worker.is_(None), block.c.leased_until < now)
    has_work = exists().where(run.c.block_id == block.c.id, run.c.state == "pending")
    candidates = (
        select(block)
        .join(scenario, scenario.c.id == block.c.scenario_id)
        .where(block.c.sweep_id == sweep_id, free, has_work)
        .order_by(scenario.c.position, block.c.number)
        .limit(1)
        .with_for_update(skip_locked=True, of=block)
    )
    while (found := connection.execute(candidates).one_or_none()) is not None:
        _lose(connection, block.c.id == found.id, f"the lease of {found.worker} ended", now)
        fence, until = found.fence + 1, now + timedelta(seconds=lease_s)
        _guarded(
            connection.execute(
                update(block)
                .where(block.c.id == found.id, block.c.fence == found.fence)
                .values(fence=fence, worker=worker, leased_until=until)
            ).rowcount,
            f"block {found.id} was claimed by another",
        )
        claim = _claim(connection, found, fence, until)
        if claim.pending:
            events.log(connection, sweep_id, found.id, "claimed", now, message=f"fence {fence}", worker=worker)
            return claim
        connection.execute(update(block).where(block.c.id == found.id).values(worker=None, leased_until=None))
    return None


def heartbeat(connection: Connection, block_id: str, fence: int, lease_s: float, now: datetime) -> datetime:
    """Prolong a lease; returns its new end. Raises Conflict when it is no longer held."""
    until = now + timedelta(seconds=lease_s)
    held = (block.c.id == block_id) & (block.c.fence == fence) & block.c.worker.is_not(None)
    done = connection.execute(update(block).where(held).values(leased_until=until))
    _guarded(done.rowcount, f"the lease on {block_id} with fence {fence} is gone")
    return until


def release_block(connection: Connection, block_id: str, fence: int, now: datetime) -> None:
    """Give a block back; what still runs in it becomes lost. Raises Conflict when somebody else holds it."""
    held = (block.c.id == block_id) & (block.c.fence == fence)
    done = connection.execute(update(block).where(held).values(worker=None, leased_until=None))
    _guarded(done.rowcount, f"the lease on {block_id} with fence {fence} is gone")
    _lose(connection, block.c.id == block_id, "its block was released", now)


def reap(connection: Connection, ended: ColumnElement[bool], reason: str, now: datetime) -> tuple[str, ...]:
    """Break the leases on the blocks that `ended` picks; returns the attempts that became lost.

    The fence goes up, so that a worker that was only slow can no longer write.
    """
    leased = block.c.worker.is_not(None) & ended
    blocks = connection.execute(select(block).where(leased).with_for_update()).all()
    lost: list[str] = []
    for found in blocks:
        lost += _lose(connection, block.c.id == found.id, reason or f"the lease of {found.worker} ended", now)
        connection.execute(
            update(block).where(block.c.id == found.id).values(worker=None, leased_until=None, fence=block.c.fence + 1)
        )
        message = reason or "the lease ended"
        events.log(connection, found.sweep_id, found.id, "reaped", now, message=message, worker=found.worker)
    return tuple(lost)


def open_attempt(connection: Connection, run_id: str, fence: int, worker: str, card: str, now: datetime) -> AttemptRef:
    """Start the next attempt at a run, in state claimed.

    Raises Conflict when the run is done, its block is not held under `fence`, another attempt is under way, or no
    attempt is left.
    """
    found = _run(connection, run_id)
    if found.state != "pending":
        raise Conflict(f"run {run_id} is {found.state}", "claim a block again and take its pending runs")
    _require_fence(connection, found.block_id, fence)
    earlier = connection.execute(select(attempt).where(attempt.c.run_id == run_id).order_by(attempt.c.number)).all()
    live = [row for row in earlier if row.state in LIVE]
    if live:
        if (live[0].state, live[0].fence, live[0].worker) == ("claimed", fence, worker):
            return AttemptRef(live[0].id, run_id, live[0].number)
        raise Conflict(f"attempt {live[0].id} at run {run_id} is {live[0].state}", "end it first")
    if not _has_attempts_left(connection, found.sweep_id, [row.state for row in earlier]):
        raise Conflict(f"run {run_id} has no attempt left", "finish the run as exhausted")
    ref = AttemptRef(new_id("att", now), run_id, len(earlier) + 1)
    connection.execute(
        insert(attempt),
        {
            "id": ref.attempt_id,
            "run_id": run_id,
            "sweep_id": found.sweep_id,
            "number": ref.number,
            "fence": fence,
            "state": "claimed",
            "reason": "",
            "worker": worker,
            "card": card,
            "opened_at": now,
        },
    )
    events.log(
        connection, found.sweep_id, ref.attempt_id, "attempt", now, target="claimed", worker=worker, message=card
    )
    return ref


def move(connection: Connection, attempt_id: str, fence: int, frm: str, to: str, reason: str, now: datetime) -> None:
    """Change an attempt's state. Raises IllegalMove off the lifecycle, Conflict when state or fence is another."""
    assert to != "measured", "an attempt is measured by writing its record"
    found = attempt_row(connection, attempt_id)
    if (found.state, found.fence) == (to, fence):
        return
    advance(frm, to, events.history(connection, attempt_id))
    change(connection, found, fence, frm, {"state": to, "reason": reason}, now)
    events.log(
        connection, found.sweep_id, attempt_id, "attempt", now, frm=frm, target=to, message=reason, worker=found.worker
    )


def change(
    connection: Connection, found: Row[Any], fence: int, frm: str, values: dict[str, Any], now: datetime
) -> None:
    """The guarded update of an attempt: only from `frm`, and only while its block is held under `fence`."""
    held = exists().where(run.c.id == attempt.c.run_id, block.c.id == run.c.block_id, block.c.fence == fence)
    guard = (attempt.c.id == found.id) & (attempt.c.state == frm) & (attempt.c.fence == fence) & held
    closed = {"closed_at": now} if values["state"] in ENDS else {}
    done = connection.execute(update(attempt).where(guard).values(**values, **closed))
    _guarded(
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
    found = _run(connection, run_id)
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
    advance(found.state, state, events.history(connection, found.id))
    guard = (run.c.id == found.id) & (run.c.state == found.state)
    _guarded(connection.execute(update(run).where(guard).values(state=state)).rowcount, f"run {found.id} moved")
    events.log(connection, found.sweep_id, found.id, "run", now, frm=found.state, target=state, message=reason)


def retract_run(connection: Connection, run_id: str, reason: str, now: datetime) -> None:
    """Mark a run as not to be trusted; a second reason replaces the first, and the log keeps both."""
    found = _run(connection, run_id)
    connection.execute(update(run).where(run.c.id == run_id).values(retracted_reason=reason, retracted_at=now))
    events.log(connection, found.sweep_id, run_id, "retracted", now, message=reason)


def pending(connection: Connection, sweep_id: str) -> Pending:
    """How far a sweep is."""
    states = select(run.c.state, func.count()).where(run.c.sweep_id == sweep_id).group_by(run.c.state)
    runs = {row[0]: row[1] for row in connection.execute(states)}
    live = select(func.count()).where(attempt.c.sweep_id == sweep_id, attempt.c.state.in_(LIVE))
    leased = select(func.count()).where(block.c.sweep_id == sweep_id, block.c.worker.is_not(None))
    return Pending(
        pending=runs.get("pending", 0),
        complete=runs.get("complete", 0),
        exhausted=runs.get("exhausted", 0),
        live_attempts=connection.execute(live).scalar_one(),
        leased_blocks=connection.execute(leased).scalar_one(),
    )


def attempt_row(connection: Connection, attempt_id: str) -> Row[Any]:
    """An attempt's row, locked where the database locks rows. Raises UnknownAttempt when there is none."""
    row = connection.execute(select(attempt).where(attempt.c.id == attempt_id).with_for_update()).one_or_none()
    if row is None:
        raise UnknownAttempt(f"no attempt {attempt_id!r} in this store", "open it first")
    return row


def _claim(connection: Connection, found: Row[Any], fence: int, until: datetime) -> BlockClaim:
    plan = connection.execute(select(scenario.c.plan).where(scenario.c.id == found.scenario_id)).scalar_one()
    runs = connection.execute(select(run).where(run.c.block_id == found.id).order_by(run.c.position)).all()
    states = _attempt_states(connection, [row.id for row in runs])
    cell = CellPlan.model_validate(plan)
    return BlockClaim(
        block_id=found.id,
        fence=fence,
        sweep_id=found.sweep_id,
        cell=cell.cell,
        plan=cell,
        number=found.number,
        runs=tuple(RunTicket(row.id, row.position, row.arm, row.state, tuple(states[row.id])) for row in runs),
        leased_until=until,
    )


def _lose(connection: Connection, which: ColumnElement[bool], reason: str, now: datetime) -> list[str]:
    """Mark the live attempts of some blocks lost, and exhaust the runs that have no attempt left."""
    blocks = select(block.c.id).where(which)
    runs = connection.execute(select(run).where(run.c.block_id.in_(blocks), run.c.state == "pending")).all()
    live = select(attempt).where(attempt.c.run_id.in_([row.id for row in runs]), attempt.c.state.in_(LIVE))
    lost = connection.execute(live.with_for_update()).all()
    for row in lost:
        advance(row.state, "lost", events.history(connection, row.id))
        closing = update(attempt).where(attempt.c.id == row.id, attempt.c.state == row.state)
        connection.execute(closing.values(state="lost", reason=reason, closed_at=now))
        events.log(
            connection, row.sweep_id, row.id, "attempt", now,
            frm=row.state, target="lost", message=reason, worker=row.worker,
        )  # fmt: skip
    states = _attempt_states(connection, [row.id for row in runs])
    for row in runs:
        if not _has_attempts_left(connection, row.sweep_id, states[row.id]):
            set_run(connection, row, "exhausted", "no attempt left", now)
    return [row.id for row in lost]


def _attempt_states(connection: Connection, run_ids: Iterable[str]) -> dict[str, list[AttemptState]]:
    wanted = list(run_ids)
    states: dict[str, list[AttemptState]] = {run_id: [] for run_id in wanted}
    rows = select(attempt.c.run_id, attempt.c.state).where(attempt.c.run_id.in_(wanted)).order_by(attempt.c.number)
    for run_id, state in connection.execute(rows):
        states[run_id].append(state)
    return states


def _has_attempts_left(connection: Connection, sweep_id: str, states: Iterable[str]) -> bool:
    manifest = connection.execute(select(sweep.c.manifest).where(sweep.c.id == sweep_id)).scalar_one()
    limits = Limits.model_validate(manifest["limits"])
    return attempts_left(tuple(states), limits.attempts, limits.contamination_reruns)


def _require_fence(connection: Connection, block_id: str, fence: int) -> None:
    held = select(block.c.fence, block.c.worker).where(block.c.id == block_id).with_for_update()
    found = connection.execute(held).one()
    if found.fence != fence or found.worker is None:
        raise Conflict(f"block {block_id} is not held under fence {fence}", "claim it again")


def _run(connection: Connection, run_id: str) -> Row[Any]:
    row = connection.execute(select(run).where(run.c.id == run_id).with_for_update()).one_or_none()
    if row is None:
        raise StoreError(f"no run {run_id!r} in this store", "submit the sweep first")
    return row


def _guarded(rows: int, message: str) -> None:
    if rows != 1:
        raise Conflict(message, "claim the block again; what was done under the old fence does not count")
