"""Who may run what: the queue of blocks over all sweeps, leases on them, and fences against those who lost one.

PR gates go before nightly sweeps, and within each the sweep that was submitted first. A sweep of which nothing is
measured yet is given to one card alone: what breaks every run of it then costs one card's time, not the cluster's.
A block that was begun stays with its card, so that base and head meet the same one. Claims lock only what they take
(`FOR UPDATE SKIP LOCKED`); SQLite has one writer at a time, which comes to the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, and_, exists, func, literal, or_, select, update

from jobs.card_choice import ANY_CARD
from jobs.errors import SpecError
from jobs.lifecycle import LIVE
from jobs.model import CellPlan
from jobs.store import claims, events
from jobs.store.rows import BlockClaim, Pending, RunTicket
from jobs.tables import attempt, block, run, scenario, sweep


@dataclass(frozen=True, slots=True)
class Claimer:
    """Who asks for a block: the worker, its card by UUID ("": none that matters), by its model's name and memory.

    `passes_over`: sweeps that this one cannot serve. With `canary`, a sweep goes to one card until it has a result.
    """

    worker: str
    lease_s: float
    card: str = ""
    card_name: str = ""
    card_memory_bytes: int = 0  # not known
    canary: bool = False
    passes_over: tuple[str, ...] = ()


def claim_block(connection: Connection, sweep_id: str | None, who: Claimer, now: datetime) -> BlockClaim | None:
    """Lease the first block with work that nobody holds, of one sweep or (None) of all; None when there is none.

    What an expired lease left running becomes lost; runs that thereby have no attempt left become exhausted.
    """
    for turn in connection.execute(_sweeps_in_turn(sweep_id, who, now)).scalars().all():
        if who.canary and not _may_fan_out(connection, turn, now):
            continue
        claim = _claim_of(connection, turn, who, now)
        if claim is not None:
            return claim
    return None


def stands(connection: Connection, claim: BlockClaim, worker: str, now: datetime) -> bool:
    """Whether a claim was committed and is in force: nobody else can have raised the fence to just this one."""
    own = (block.c.worker == worker) & (block.c.leased_until >= now)
    return connection.execute(select(exists().where(_held(claim.block_id, claim.fence), own))).scalar_one()


def _sweeps_in_turn(sweep_id: str | None, who: Claimer, now: datetime) -> Select[Any]:
    """Open sweeps with a block that `who` may have, first come first served within a priority."""
    if sweep_id is not None:
        return select(literal(sweep_id))
    work = exists().where(block.c.sweep_id == sweep.c.id, block.c.scenario_id == scenario.c.id, *_claimable(who, now))
    turn = select(sweep.c.id).where(sweep.c.state == "open", sweep.c.id.not_in(who.passes_over), work)
    return turn.order_by(sweep.c.priority, sweep.c.created_at, sweep.c.id)


def _may_fan_out(connection: Connection, sweep_id: str, now: datetime) -> bool:
    """Whether a sweep has a result, or nobody is about to give it one. Holds other claimers of it off meanwhile."""
    done = exists().where(run.c.sweep_id == sweep_id, run.c.state == "complete")
    if connection.execute(select(done)).scalar_one():
        return True
    connection.execute(select(sweep.c.id).where(sweep.c.id == sweep_id).with_for_update(key_share=True))
    canary = exists().where(block.c.sweep_id == sweep_id, block.c.worker.is_not(None), block.c.leased_until >= now)
    return not connection.execute(select(canary)).scalar_one()


def _claim_of(connection: Connection, sweep_id: str, who: Claimer, now: datetime) -> BlockClaim | None:
    candidates = (
        select(block)
        .join(scenario, scenario.c.id == block.c.scenario_id)
        .where(block.c.sweep_id == sweep_id, *_claimable(who, now))
        .order_by(block.c.place)
        .limit(1)
        .with_for_update(skip_locked=True, of=block)
    )
    while (found := connection.execute(candidates).one_or_none()) is not None:
        if found.worker is not None:  # of a block that was given back or taken away all has ended
            claims.end_live(connection, block.c.id == found.id, "lost", f"the lease of {found.worker} ended", now)
        fence, until = found.fence + 1, now + timedelta(seconds=who.lease_s)
        mine = update(block).where(block.c.id == found.id, block.c.fence == found.fence)
        held = {"worker": who.worker, "leased_until": until, "card": who.card or found.card, "waits": None}
        claims.guarded(
            connection.execute(mine.values(fence=fence, **held)).rowcount, f"block {found.id} was claimed by another"
        )
        claim = _claim(connection, found, fence, until)
        if claim.pending:
            events.log(connection, sweep_id, found.id, "claimed", now, message=f"fence {fence}", worker=who.worker)
            return claim
        connection.execute(update(block).where(block.c.id == found.id).values(worker=None, leased_until=None))
    return None


def _claimable(who: Claimer, now: datetime) -> list[ColumnElement[bool]]:
    """What makes a block one that `who` may have: work left, nobody's, and its card's if it has begun on one."""
    rules = [block.c.runs_left > 0, or_(block.c.worker.is_(None), block.c.leased_until < now)]
    if who.card:
        begun = exists().where(run.c.block_id == block.c.id, run.c.state == "complete")
        rules.append(or_(block.c.card.is_(None), block.c.card == who.card, ~begun))
    if who.card_name:
        name = who.card_name.lower()  # "holds" without LIKE, in which a class's own % and _ would mean more
        holds = func.replace(literal(name), func.lower(scenario.c.card_class), "") != name
        rules.append(or_(scenario.c.card_class.in_(("", ANY_CARD)), holds))
        rules.append(scenario.c.card_memory_bytes <= who.card_memory_bytes)
    return rules


def heartbeat(connection: Connection, block_id: str, fence: int, lease_s: float, now: datetime) -> datetime:
    """Prolong a lease; returns its new end. Raises Conflict when it is no longer held."""
    until = now + timedelta(seconds=lease_s)
    done = connection.execute(update(block).where(_held(block_id, fence)).values(leased_until=until))
    claims.guarded(done.rowcount, f"the lease on {block_id} with fence {fence} is gone")
    return until


def waits(connection: Connection, block_id: str, fence: int, reason: str | None) -> None:
    """Say why a leased block does not run just now; None: it does. Of one that was lost nothing is said."""
    connection.execute(update(block).where(_held(block_id, fence)).values(waits=reason))


def _held(block_id: str, fence: int) -> ColumnElement[bool]:
    return and_(block.c.id == block_id, block.c.fence == fence, block.c.worker.is_not(None))


def forfeited(connection: Connection, held: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Those of some leases, as (block, fence), that are no longer held."""
    rows = select(block.c.id, block.c.fence).where(
        block.c.id.in_([one for one, _ in held]), block.c.worker.is_not(None)
    )
    still = {(row.id, row.fence) for row in connection.execute(rows)}
    return tuple(block_id for block_id, fence in held if (block_id, fence) not in still)


def release_block(connection: Connection, block_id: str, fence: int, now: datetime) -> None:
    """Give a block back; what still runs in it becomes lost. Raises Conflict when somebody else holds it."""
    held = (block.c.id == block_id) & (block.c.fence == fence)
    done = connection.execute(update(block).where(held).values(worker=None, leased_until=None, waits=None))
    claims.guarded(done.rowcount, f"the lease on {block_id} with fence {fence} is gone")
    claims.end_live(connection, block.c.id == block_id, "lost", "its block was released", now)


def reap(connection: Connection, ended: ColumnElement[bool], reason: str, now: datetime) -> tuple[str, ...]:
    """Break the leases on the blocks that `ended` picks; returns the attempts that became lost.

    The fence goes up, so that a worker that was only slow can no longer write.
    """
    return _break(connection, ended, "lost", reason, now)


def cancel(connection: Connection, sweep_id: str, reason: str, now: datetime) -> tuple[str, ...]:
    """End all that is pending of a sweep; returns the attempts that were cut off. Raises SpecError when it is judged.

    Whoever runs one of them meets Conflict at its next word, and ends its child.
    """
    row = connection.execute(select(sweep.c.state).where(sweep.c.id == sweep_id).with_for_update()).one_or_none()
    if row is None:
        raise SpecError(f"no id begins with {sweep_id!r} in this store", "assay status lists them")
    if row.state != "open":
        raise SpecError(f"sweep {sweep_id} is judged already", "nothing of it is left to cancel")
    cut = _break(connection, block.c.sweep_id == sweep_id, "cancelled", reason, now)
    pending_runs = select(run).where(run.c.sweep_id == sweep_id, run.c.state == "pending").with_for_update()
    left = connection.execute(pending_runs).all()
    for found in left:
        claims.set_run(connection, found, "exhausted", reason, now)
    events.log(connection, sweep_id, sweep_id, "cancelled", now, message=f"{reason}: {len(left)} runs given up")
    return cut


def _break(
    connection: Connection, which: ColumnElement[bool], state: Any, reason: str, now: datetime
) -> tuple[str, ...]:
    leased = block.c.worker.is_not(None) & which
    ended: list[str] = []
    for found in connection.execute(select(block).where(leased).with_for_update()).all():
        mine = block.c.id == found.id
        ended += claims.end_live(connection, mine, state, reason or f"the lease of {found.worker} ended", now)
        free = {"worker": None, "leased_until": None, "waits": None, "fence": block.c.fence + 1}
        connection.execute(update(block).where(mine).values(**free))
        message = reason or "the lease ended"
        events.log(connection, found.sweep_id, found.id, "reaped", now, message=message, worker=found.worker)
    return tuple(ended)


def progress(connection: Connection, sweep_ids: Sequence[str]) -> dict[str, Pending]:
    """How far some sweeps are: their runs by state, attempts that hold a card now, blocks under a lease."""
    counts = {sweep_id: Counter[str]() for sweep_id in sweep_ids}
    states = select(run.c.sweep_id, run.c.state, func.count()).where(run.c.sweep_id.in_(sweep_ids))
    live = select(attempt.c.sweep_id, literal("live"), func.count()).where(
        attempt.c.sweep_id.in_(sweep_ids), attempt.c.state.in_(LIVE)
    )
    leased = select(block.c.sweep_id, literal("leased"), func.count()).where(
        block.c.sweep_id.in_(sweep_ids), block.c.worker.is_not(None)
    )
    for wanted in (
        states.group_by(run.c.sweep_id, run.c.state),
        live.group_by(attempt.c.sweep_id),
        leased.group_by(block.c.sweep_id),
    ):
        for sweep_id, what, count in connection.execute(wanted):
            counts[sweep_id][what] = count
    return {
        sweep_id: Pending(found["pending"], found["complete"], found["exhausted"], found["live"], found["leased"])
        for sweep_id, found in counts.items()
    }


def _claim(connection: Connection, found: Row[Any], fence: int, until: datetime) -> BlockClaim:
    plan = connection.execute(select(scenario.c.plan).where(scenario.c.id == found.scenario_id)).scalar_one()
    runs = connection.execute(select(run).where(run.c.block_id == found.id).order_by(run.c.position)).all()
    tries = claims.tried(connection, [row.id for row in runs])
    cell = CellPlan.model_validate(plan)
    return BlockClaim(
        block_id=found.id,
        fence=fence,
        sweep_id=found.sweep_id,
        cell=cell.cell,
        plan=cell,
        number=found.number,
        runs=tuple(RunTicket(row.id, row.position, row.arm, row.state, tuple(tries[row.id])) for row in runs),
        leased_until=until,
    )
