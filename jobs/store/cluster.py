"""What can be asked of the queue: which blocks wait and why, and the cards of the schedulers that serve the store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, Integer, Row, and_, case, cast, func, literal, or_, select, update

from jobs.card_choice import asked_of_card, is_fit, kinds
from jobs.model import Manifest
from jobs.store.connect import insert_into
from jobs.store.rows import PRIORITIES
from jobs.tables import block, card, run, scenario, sweep

FRESH_S = 60.0
"""A card that its scheduler has not spoken of for as long is served by nobody: a scheduler speaks each 10 s."""

CardState = Literal["clear", "busy", "unknown", "drained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSeen:
    """A card as a scheduler sees it. `until`: when draining ends."""

    uuid: str
    name: str
    host: str
    worker: str
    state: CardState
    reason: str = ""
    until: datetime | None = None
    memory_bytes: int = 0  # not known

    @property
    def is_free(self) -> bool:
        """Whether it takes the next block."""
        return self.state == "clear"


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRow(CardSeen):
    """A card as its scheduler last saw it. `since`: when it came to its state."""

    scheduler: str
    since: datetime
    seen_at: datetime


@dataclass(frozen=True, slots=True)
class WaitingBlocks:
    """Blocks of one cell with runs to do that are not running, for one reason; `block_id` and `number` of the first."""

    block_id: str
    sweep_id: str
    cell: str
    number: int
    blocks: int
    runs_left: int
    reason: str


@dataclass(frozen=True, slots=True)
class Queue:
    """The open blocks of a store: how many run, and those that wait, in the order in which they are served."""

    running: int
    waiting: tuple[WaitingBlocks, ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """An open sweep in the order of service, with what is ahead of it."""

    id: str
    harness: str
    priority: int
    blocks_ahead: int
    canary: str  # the block that has to give a result first; empty: none
    canary_card: str


def put_cards(connection: Connection, rows: Sequence[CardRow]) -> None:
    """Write down cards as they are now; one that has not changed its state keeps since when it is in it."""
    for row in rows:
        wanted = insert_into(connection, card).values(**asdict(row))
        new = wanted.excluded
        changes = {name: new[name] for name in asdict(row) if name not in ("uuid", "since")}
        since = case((card.c.state == new.state, card.c.since), else_=new.since)
        connection.execute(wanted.on_conflict_do_update(index_elements=["uuid"], set_={**changes, "since": since}))


def leave_cards(connection: Connection, scheduler: str, reason: str, now: datetime) -> None:
    """A scheduler has ended: of its cards nothing is known any more."""
    left = {"state": "unknown", "reason": reason, "since": now, "until": None, "scheduler": ""}
    connection.execute(update(card).where(card.c.scheduler == scheduler).values(**left))


def cards(connection: Connection, now: datetime) -> tuple[CardRow, ...]:
    """All cards that were ever served, by host and worker; those that nobody speaks of any more are unknown."""
    rows = [CardRow(**row._mapping) for row in connection.execute(select(card).order_by(card.c.host, card.c.worker))]
    return tuple(row if not row.scheduler or _is_fresh(row, now) else _stale(row) for row in rows)


def unservable(connection: Connection, manifest: Manifest, now: datetime) -> str:
    """What no card that is served has, though a sweep asks for it, with what there is; empty where one has it, or none
    is served yet."""
    served = [one for one in cards(connection, now) if _is_fresh(one, now)]
    for plan in manifest.cells if served else ():
        if not any(is_fit(one, plan.card_class, plan.card_memory_bytes) for one in served):
            wanted = asked_of_card(plan.card_class, plan.card_memory_bytes)
            there = kinds(served, plan.card_memory_bytes)
            return f"{plan.cell} asks for a card {wanted}, and those that are served are: {there}"
    return ""


def settled(connection: Connection) -> tuple[str, ...]:
    """Open sweeps with no run pending: what is left to judge."""
    pending = select(block.c.id).where(block.c.sweep_id == sweep.c.id, block.c.runs_left > 0).exists()
    return tuple(connection.execute(select(sweep.c.id).where(sweep.c.state == "open", ~pending)).scalars())


def queue(connection: Connection, sweep_id: str | None, now: datetime) -> Queue:
    """The open blocks of one sweep or of all, with the reason of each that waits.

    Blocks that nobody has touched yet differ by their place alone, so those of a cell are told together: a store may
    hold tens of thousands.
    """
    known = cards(connection, now)
    turns = [turn for turn in _turns(connection, now) if sweep_id in (None, turn.id)]
    ids = [turn.id for turn in turns]
    mine = and_(block.c.runs_left > 0, block.c.sweep_id.in_(ids))
    running = connection.execute(select(func.count()).where(mine, ~_not_running(now))).scalar_one()
    rows = [*_touched(connection, mine, now), *_untouched(connection, mine)]
    begun = _begun(connection, [row.id for row in rows if row.card])
    found: list[WaitingBlocks] = []
    for turn in turns:
        ahead = turn.blocks_ahead
        for row in sorted((row for row in rows if row.sweep_id == turn.id), key=lambda row: row.place):
            reason = _why(row, turn, ahead, known, row.id in begun, now)
            found.append(WaitingBlocks(row.id, row.sweep_id, row.name, row.number, row.blocks, row.runs_left, reason))
            ahead += row.blocks
    return Queue(running, tuple(found))


def _touched(connection: Connection, mine: ColumnElement[bool], now: datetime) -> Sequence[Row[Any]]:
    """Blocks that wait though somebody had them, one by one."""
    somebody = or_(block.c.worker.is_not(None), block.c.card.is_not(None))
    wanted = select(
        block.c.id, block.c.sweep_id, block.c.number, block.c.place, block.c.runs_left, block.c.worker, block.c.card,
        block.c.leased_until, block.c.waits, literal(1).label("blocks"), scenario.c.name, scenario.c.card_class,
        scenario.c.card_memory_bytes,
    )  # fmt: skip
    return connection.execute(
        wanted.join(scenario, scenario.c.id == block.c.scenario_id).where(mine, somebody, _not_running(now))
    ).all()


def _untouched(connection: Connection, mine: ColumnElement[bool]) -> Sequence[Row[Any]]:
    """Blocks that nobody has had yet, those of a scenario together."""
    first = (
        select(
            block.c.scenario_id,
            func.min(block.c.place).label("place"),
            func.count().label("blocks"),
            func.sum(block.c.runs_left).label("runs"),
        )
        .where(mine, block.c.worker.is_(None), block.c.card.is_(None))
        .group_by(block.c.scenario_id)
        .subquery()
    )
    wanted = select(
        block.c.id, block.c.sweep_id, block.c.number, block.c.place, cast(first.c.runs, Integer).label("runs_left"),
        block.c.worker, block.c.card, block.c.leased_until, block.c.waits, first.c.blocks,
        scenario.c.name, scenario.c.card_class,
        scenario.c.card_memory_bytes,
    )  # fmt: skip
    here = and_(block.c.scenario_id == first.c.scenario_id, block.c.place == first.c.place)
    return connection.execute(wanted.join(first, here).join(scenario, scenario.c.id == block.c.scenario_id)).all()


def _not_running(now: datetime) -> ColumnElement[bool]:
    return or_(block.c.worker.is_(None), block.c.leased_until < now, block.c.waits.is_not(None))


def _turns(connection: Connection, now: datetime) -> list[_Turn]:
    """Open sweeps with work, in the order of service."""
    free = or_(block.c.worker.is_(None), block.c.leased_until < now)
    waiting = select(block.c.sweep_id, func.count()).where(block.c.runs_left > 0, free).group_by(block.c.sweep_id)
    counts = {row[0]: row[1] for row in connection.execute(waiting)}
    rows = connection.execute(
        select(sweep.c.id, sweep.c.harness_digest, sweep.c.priority)
        .where(sweep.c.state == "open")
        .order_by(sweep.c.priority, sweep.c.created_at, sweep.c.id)
    )
    ahead, turns = 0, []
    for row in rows:
        canary = _canary(connection, row.id, now)
        turns.append(_Turn(row.id, row.harness_digest[:12], row.priority, ahead, *canary))
        ahead += counts.get(row.id, 0)
    return turns


def _canary(connection: Connection, sweep_id: str, now: datetime) -> tuple[str, str]:
    """The block and card from which a sweep's first result is awaited; empty where it has one, or nobody tries."""
    done = select(run.c.id).where(run.c.sweep_id == sweep_id, run.c.state == "complete").exists()
    if connection.execute(select(done)).scalar_one():
        return "", ""
    held = and_(block.c.sweep_id == sweep_id, block.c.worker.is_not(None), block.c.leased_until >= now)
    found = connection.execute(select(block.c.id, block.c.card).where(held).limit(1)).one_or_none()
    return (found.id, found.card or "") if found is not None else ("", "")


def _begun(connection: Connection, blocks: list[str]) -> frozenset[str]:
    """Those of some blocks that have a complete run, and so stay with their card."""
    done = select(run.c.block_id).where(run.c.block_id.in_(blocks), run.c.state == "complete").distinct()
    return frozenset(connection.execute(done).scalars())


def _why(row: Any, turn: _Turn, ahead: int, known: Iterable[CardRow], is_begun: bool, now: datetime) -> str:
    """Why a block does not run, in one line; `ahead` counts those that wait before it."""
    if row.worker is not None:
        if row.leased_until >= now:
            return str(row.waits)
        return f"the lease of {row.worker} ended at {row.leased_until:%H:%M:%S} UTC: the next scheduler takes it"
    served = [one for one in known if _is_fresh(one, now)]
    if is_begun:
        own = next((one for one in served if one.uuid == row.card), None)
        if own is None:
            return f"it was begun on card {row.card}, which no scheduler serves"
        if not own.is_free:
            return f"it was begun on card {row.card}, which is {own.state}: {own.reason}"
    if not served:
        return "no scheduler serves this store"
    others = sorted({state for one in served if (state := one.scheduler.partition("@")[2]) not in ("", turn.harness)})
    served = [one for one in served if one.scheduler.partition("@")[2] in ("", turn.harness)]
    if not served:
        return f"it was submitted by assay {turn.harness}, and the schedulers are of {', '.join(others)}"
    fitting = [one for one in served if is_fit(one, row.card_class, row.card_memory_bytes)]
    if not fitting:
        wanted = asked_of_card(row.card_class, row.card_memory_bytes)
        return f"no card {wanted} is served; there are: {kinds(served, row.card_memory_bytes)}"
    if turn.canary:
        where = f" on card {turn.canary_card}" if turn.canary_card else ""
        return f"block {turn.canary}{where} runs first: the others follow its first result"
    priority = PRIORITIES[turn.priority]
    queued = f"{ahead} block{'s' * (ahead != 1)} before it, priority {priority}"
    if any(one.is_free for one in fitting):
        return f"next for a clear card; {queued}"
    states = sorted({one.state for one in fitting})
    each = "; ".join(f"{one.uuid} {one.state}: {one.reason}" for one in fitting[:3])
    more = f"; and {len(fitting) - 3} more" if len(fitting) > 3 else ""
    return f"no card is clear ({' or '.join(states)}): {each}{more}; {queued}"


def _is_fresh(row: CardRow, now: datetime) -> bool:
    return bool(row.scheduler) and row.seen_at > now - timedelta(seconds=FRESH_S)


def _stale(row: CardRow) -> CardRow:
    return replace(row, state="unknown", reason=f"no scheduler has spoken of it since {row.seen_at:%Y-%m-%d %H:%M} UTC")
