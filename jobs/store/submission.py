"""Submitting a sweep, and finding sweeps and their parts again."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, func, insert, select, update

from jobs.errors import Conflict, KeyTaken, SpecError, StoreError
from jobs.model import CellPlan, Manifest
from jobs.more_runs import BaseAgain, FreshBlocks, planned_runs
from jobs.order import run_order
from jobs.store import cluster, events, packs
from jobs.store.rows import PRIORITIES, Priority, SweepRow, new_id
from jobs.tables import block, run, scenario, sweep


def submit(
    connection: Connection,
    manifest: Manifest,
    harness_digest: str,
    harness_version: str,
    key: str,
    request: int,
    now: datetime,
    priority: Priority = "pr",
    *,
    to_cards: bool = False,
) -> str:
    """Insert a sweep with all its scenarios, blocks and runs; a resend returns the same id.

    Raises KeyTaken when the key, or without a key the manifest, was submitted before with anything else, and SpecError
    when a pack of an arm is not here. `to_cards`: it
    is for the cards that serve this store; raises SpecError when some are served and none could ever take it.
    """
    digest = manifest.digest()
    same = sweep.c.submit_key == key if key else (sweep.c.manifest_digest == digest) & (sweep.c.submit_key == "")
    earlier = connection.execute(select(sweep).where(same)).one_or_none()
    if earlier is not None:
        if (earlier.manifest_digest, earlier.harness_digest) == (digest, harness_digest):
            return str(earlier.id)
        what = "another manifest" if earlier.manifest_digest != digest else "another version of the harness"
        raise KeyTaken(f"sweep {earlier.id} was submitted under this key with {what}", "submit under a new key")
    if to_cards and (lacking := cluster.unservable(connection, manifest, now)):
        raise SpecError(lacking, "start a scheduler with such a card first, or ask for less under cards:")
    packs.require(connection, manifest)
    sweep_id = new_id("swp", now)
    connection.execute(
        insert(sweep),
        {
            "id": sweep_id,
            "name": manifest.name,
            "state": "open",
            "submit_key": key,
            "manifest_digest": digest,
            "manifest": manifest.model_dump(mode="json"),
            "request": request,
            "harness_digest": harness_digest,
            "harness_version": harness_version,
            "created_at": now,
            "priority": PRIORITIES.index(priority),
        },
    )
    places = itertools.count()
    for position, plan in enumerate(manifest.cells):
        _scenario(connection, sweep_id, position, plan, places, now)
    events.log(connection, sweep_id, sweep_id, "submitted", now, target="open", message=manifest.name)
    return sweep_id


def listed(connection: Connection, limit: int) -> tuple[SweepRow, ...]:
    """The newest sweeps first."""
    wanted = select(*_sweep_columns()).order_by(sweep.c.created_at.desc(), sweep.c.id.desc()).limit(limit)
    return tuple(_row(row) for row in connection.execute(wanted))


def still_open(connection: Connection) -> tuple[SweepRow, ...]:
    """Sweeps that are not judged, in the order in which they are served."""
    order = (sweep.c.priority, sweep.c.created_at, sweep.c.id)
    wanted = select(*_sweep_columns()).where(sweep.c.state == "open").order_by(*order)
    return tuple(_row(row) for row in connection.execute(wanted))


def one(connection: Connection, sweep_id: str) -> SweepRow:
    """A sweep by its full id."""
    row = connection.execute(select(*_sweep_columns()).where(sweep.c.id == sweep_id)).one_or_none()
    if row is None:
        raise SpecError(f"no sweep {sweep_id!r} in this store", "assay status lists them")
    return _row(row)


def find_open(connection: Connection, manifest_digest: str, harness_digest: str) -> str | None:
    """The newest sweep of this manifest and harness that is not judged yet: what `--resume` goes on with."""
    wanted = (
        select(sweep.c.id)
        .where(sweep.c.manifest_digest == manifest_digest, sweep.c.harness_digest == harness_digest)
        .where(sweep.c.state == "open")
        .order_by(sweep.c.created_at.desc(), sweep.c.id.desc())
    )
    return connection.execute(wanted.limit(1)).scalar_one_or_none()


def manifest_of(connection: Connection, sweep_id: str) -> Manifest:
    """The manifest of a sweep. Raises StoreError when it is not what was submitted."""
    row = connection.execute(
        select(sweep.c.manifest, sweep.c.manifest_digest).where(sweep.c.id == sweep_id)
    ).one_or_none()
    if row is None:
        raise SpecError(f"no sweep {sweep_id!r} in this store", "assay status lists them")
    manifest = Manifest.model_validate(row.manifest)
    if manifest.digest() != row.manifest_digest:
        raise StoreError(f"the manifest of {sweep_id} is not what was submitted", "restore the store from a backup")
    return manifest


def _scenario(
    connection: Connection, sweep_id: str, position: int, plan: CellPlan, places: Iterator[int], now: datetime
) -> None:
    scenario_id = new_id("cel", now)
    connection.execute(
        insert(scenario),
        {
            "id": scenario_id,
            "sweep_id": sweep_id,
            "position": position,
            "name": plan.cell,
            "kind": plan.kind,
            "model": plan.model,
            "model_digest": plan.model_digest,
            "prompt_digest": _prompt_digest(plan),
            "card_class": plan.card_class,
            "card_memory_bytes": plan.card_memory_bytes,
            "plan": plan.model_dump(mode="json"),
        },
    )
    _blocks(connection, sweep_id, scenario_id, plan, range(plan.blocks), places, now)


def _blocks(
    connection: Connection,
    sweep_id: str,
    scenario_id: str,
    plan: CellPlan,
    numbers: Iterable[int],
    places: Iterator[int],
    now: datetime,
) -> None:
    """Blocks of a cell, each with its runs."""
    blocks, runs = [], []
    for number in numbers:
        common = {"sweep_id": sweep_id, "scenario_id": scenario_id}
        block_id = new_id("blk", now)
        order = run_order(plan, number)
        queued = {"fence": 0, "place": next(places), "runs_left": len(order)}
        blocks.append({"id": block_id, **common, "number": number, **queued})
        for place, arm in enumerate(order):
            row = {"id": new_id("run", now), **common, "block_id": block_id, "position": place}
            runs.append({**row, "arm": arm, "state": "pending"})
    if blocks:
        connection.execute(insert(block), blocks)
        connection.execute(insert(run), runs)


def add_runs(connection: Connection, sweep_id: str, asked: BaseAgain | FreshBlocks, now: datetime) -> None:
    """Runs beyond the planned ones, at the end of the sweep's queue; those that are there already are left alone.

    Raises Conflict when the sweep is judged, SpecError when it has no such cell or block.
    """
    row = one(connection, sweep_id)
    if row.state != "open":
        raise Conflict(f"sweep {sweep_id} is {row.state}: no run is added to it", "submit it again")
    found = connection.execute(
        select(scenario.c.id, scenario.c.plan).where(scenario.c.sweep_id == sweep_id, scenario.c.name == asked.cell)
    ).one_or_none()
    if found is None:
        raise SpecError(f"sweep {sweep_id} has no cell {asked.cell!r}", "assay status lists its cells")
    plan = CellPlan.model_validate(found.plan)
    if isinstance(asked, BaseAgain):
        said = _add_base(connection, sweep_id, found.id, plan, asked, now)
    else:
        said = _add_blocks(connection, sweep_id, found.id, plan, asked, now)
    if said:
        events.log(connection, sweep_id, sweep_id, "asked", now, message=f"{asked.cell}: {said}")


def _add_base(
    connection: Connection, sweep_id: str, scenario_id: str, plan: CellPlan, asked: BaseAgain, now: datetime
) -> str:
    """Base again behind the planned runs of a block, which stays with its card."""
    number = (block.c.scenario_id == scenario_id) & (block.c.number == asked.block)
    block_id = connection.execute(select(block.c.id).where(number)).scalar_one_or_none()
    if block_id is None:
        raise SpecError(f"{asked.cell} has no block {asked.block}", "assay status lists its blocks")
    first = planned_runs(plan)
    later = select(run.c.id).where(run.c.block_id == block_id, run.c.position >= first)
    if connection.execute(later.limit(1)).first() is not None:
        return ""
    own = {"sweep_id": sweep_id, "scenario_id": scenario_id, "block_id": block_id, "arm": asked.arm, "state": "pending"}
    places = range(first, first + asked.runs)
    connection.execute(insert(run), [{"id": new_id("run", now), **own, "position": place} for place in places])
    changed = {"runs_left": block.c.runs_left + asked.runs}
    connection.execute(update(block).where(block.c.id == block_id).values(**changed))
    return f"{asked.arm} runs {asked.runs} times more, in block {asked.block}"


def _add_blocks(
    connection: Connection, sweep_id: str, scenario_id: str, plan: CellPlan, asked: FreshBlocks, now: datetime
) -> str:
    numbers = select(block.c.number).where(block.c.scenario_id == scenario_id)
    there = set(connection.execute(numbers).scalars())
    wanted = [number for number in range(asked.first, asked.first + asked.count) if number not in there]
    last = connection.execute(select(func.max(block.c.place)).where(block.c.sweep_id == sweep_id)).scalar_one()
    _blocks(connection, sweep_id, scenario_id, plan, wanted, itertools.count(last + 1), now)
    return f"{len(wanted)} fresh blocks" if wanted else ""


def _prompt_digest(plan: CellPlan) -> str:
    """The digest of the prompt's ids; of a batch with several prompts, one over theirs."""
    if not plan.further_prompts:
        return ids_digest(plan.prompt_ids)
    digests = [ids_digest(prompt) for prompt in (plan.prompt_ids, *plan.further_prompts)]
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()


def ids_digest(ids: Sequence[int]) -> str:
    """sha256 of a list of token ids: the key by which equal streams are found."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def _row(row: Row[Any]) -> SweepRow:
    return SweepRow(**{**row._mapping, "priority": PRIORITIES[row.priority]})


def _sweep_columns() -> list[Any]:
    return [column for column in sweep.c if column.name != "manifest"]
