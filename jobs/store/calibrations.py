"""The noise of scenarios on cards, as A/A sweeps measured it, and what of it is known for another sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from jobs.model import Manifest
from jobs.noise import Calibration, scenario_digest
from jobs.tables import calibration, run, scenario, sweep

ALIKE = ("metric", "card", "uuid", "blocks", "sigma", "smallest_detectable", "budget_blocks")
"""Columns that hold what a calibration's field of that name does."""

AT_ONCE = 500
"""Digests looked up together: bounds the length of a statement."""


def write(
    connection: Connection, sweep_id: str, manifest: Manifest, found: Sequence[Calibration], now: datetime
) -> None:
    """Store what an A/A sweep measured; measured again, of the same sweep, it replaces what was there."""
    wanted = select(scenario.c.name, scenario.c.id).where(scenario.c.sweep_id == sweep_id)
    ids = {row.name: row.id for row in connection.execute(wanted)}
    digests = {plan.cell: digest for plan, digest in _digests(manifest)}
    connection.execute(delete(calibration).where(calibration.c.scenario_id.in_(ids.values())))
    rows = [
        {
            "scenario_id": ids[one.cell],
            "scenario_digest": digests[one.cell],
            "created_at": now,
            **one.model_dump(
                include={"metric", "uuid", "card", "blocks", "sigma", "smallest_detectable", "budget_blocks"}
            ),
        }
        for one in found
    ]
    if rows:
        connection.execute(insert(calibration), rows)


def known(connection: Connection, manifest: Manifest, before: datetime) -> tuple[Calibration, ...]:
    """The newest noise of a sweep's scenarios, card by card, that was known before it was submitted.

    What a retracted sweep measured is not known, nor what rests on a run that was retracted since.
    """
    if connection.execute(select(calibration.c.metric).limit(1)).first() is None:
        return ()
    cells: dict[str, list[str]] = {}
    for plan, digest in _digests(manifest):
        cells.setdefault(digest, []).append(plan.cell)
    newest: dict[tuple[str, str, str], Row[Any]] = {}
    fallen = select(run.c.id).where(
        run.c.scenario_id == calibration.c.scenario_id, run.c.retracted_at >= calibration.c.created_at
    )
    wanted = (
        select(calibration, scenario.c.sweep_id)
        .join(scenario, scenario.c.id == calibration.c.scenario_id)
        .join(sweep, sweep.c.id == scenario.c.sweep_id)
        .where(sweep.c.retracted_reason.is_(None), calibration.c.created_at <= before, ~fallen.exists())
        .order_by(calibration.c.created_at, calibration.c.scenario_id)
    )
    digests = list(cells)
    for start in range(0, len(digests), AT_ONCE):
        part = wanted.where(calibration.c.scenario_digest.in_(digests[start : start + AT_ONCE]))
        newest.update({(row.scenario_digest, row.uuid, row.metric): row for row in connection.execute(part)})
    return tuple(_made(row, cell) for (digest, _, _), row in sorted(newest.items()) for cell in cells[digest])


def _digests(manifest: Manifest) -> Iterable[tuple[Any, str]]:
    base = next((arm for arm in manifest.arms if arm.role == "base"), None)
    return ((plan, scenario_digest(plan, base)) for plan in manifest.cells) if base is not None else ()


def _made(row: Row[Any], cell: str) -> Calibration:
    fields = {name: getattr(row, name) for name in ALIKE}
    return Calibration(cell=cell, sweep=row.sweep_id, at=row.created_at.isoformat(), **fields)
