"""Readings of a series over sweeps: which series a word names, and what their attempts measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, select

from jobs.errors import SpecError
from jobs.history import History, StoredReading, breaks_of, changes_of, points_of
from jobs.model import Missing, Reading
from jobs.tables import attempt, block, run, scenario, series, sweep, value

_JOINED = (
    value.join(series, series.c.id == value.c.series_id)
    .join(attempt, attempt.c.id == value.c.attempt_id)
    .join(run, run.c.id == attempt.c.run_id)
    .join(scenario, scenario.c.id == run.c.scenario_id)
    .join(sweep, sweep.c.id == run.c.sweep_id)
)
_MEASURED = attempt.c.state == "measured"

MOST_SERIES = 20
"""More than one reader can look at; a scenario narrows them."""


def histories(connection: Connection, word: str, cell: str | None, arm: str | None, last: int) -> tuple[History, ...]:
    """The series that an id's beginning (`ser_..`) or a counter's or metric's name names, over the last sweeps.

    `cell` is a scenario's name or a part of it. Raises SpecError where there is none, and where there are too many.
    """
    named = series.c.id.startswith(word, autoescape=True) if word.startswith("ser_") else series.c.name == word
    where = [named, *([scenario.c.name.contains(cell, autoescape=True)] if cell else [])]
    where += [run.c.arm == arm] if arm else []
    sweeps = _newest(connection, where, last)
    wanted = select(series.c.id).select_from(_JOINED).where(*where, _MEASURED, sweep.c.id.in_(sweeps)).distinct()
    ids = connection.execute(wanted).scalars().all()
    if not ids:
        told = "".join((f" in a scenario of {cell}" if cell else "", f" of arm {arm}" if arm else ""))
        raise SpecError(f"nothing in this store has measured {word}{told}", "assay explain ID CELL lists what there is")
    if len(ids) > MOST_SERIES:
        raise SpecError(f"{word} names {len(ids)} series", "name a scenario with --cell, or one series by its id")
    return _read(connection, ids, [*where, sweep.c.id.in_(sweeps)])


def of_cell(connection: Connection, sweep_id: str, cell: str, names: Collection[str], last: int) -> tuple[History, ...]:
    """The series of these names that a cell of a sweep measured, by name, over the last sweeps that have that scenario.

    Rows are reached from the scenario's own attempts: of a sweep of thousands of cells many can share a series.
    """
    own = select(scenario.c.id, scenario.c.model_digest, scenario.c.prompt_digest)
    here = connection.execute(own.where(scenario.c.sweep_id == sweep_id, scenario.c.name == cell)).one_or_none()
    if here is None:
        return ()
    alike = (scenario.c.model_digest == here.model_digest, scenario.c.prompt_digest == here.prompt_digest)
    newest = select(scenario.c.id).join(sweep, sweep.c.id == scenario.c.sweep_id).where(scenario.c.name == cell, *alike)
    ordered = newest.order_by(sweep.c.created_at.desc(), sweep.c.id.desc()).limit(last)
    scenarios = connection.execute(ordered).scalars().all()
    measured = select(value.c.series_id).where(value.c.attempt_id.in_(_attempts([here.id])))
    named = select(series.c.id).where(series.c.id.in_(measured), series.c.name.in_(names))
    ids = connection.execute(named).scalars().all()
    return _read(connection, ids, [value.c.series_id.in_(ids), value.c.attempt_id.in_(_attempts(scenarios))])


def _attempts(scenarios: Sequence[str]) -> Select[tuple[str]]:
    """The attempts that measured something, of some scenarios."""
    joined = attempt.join(run, run.c.id == attempt.c.run_id).join(block, block.c.id == run.c.block_id)
    return select(attempt.c.id).select_from(joined).where(block.c.scenario_id.in_(scenarios), _MEASURED)


def _newest(connection: Connection, where: Sequence[ColumnElement[bool]], last: int) -> Sequence[str]:
    """The last sweeps that measured what `where` asks for."""
    newest = select(sweep.c.id).select_from(_JOINED).where(*where, _MEASURED).group_by(sweep.c.id, sweep.c.created_at)
    ordered = newest.order_by(sweep.c.created_at.desc(), sweep.c.id.desc())
    return connection.execute(ordered.limit(last)).scalars().all()


def _read(connection: Connection, ids: Sequence[str], where: Sequence[ColumnElement[bool]]) -> tuple[History, ...]:
    rows: dict[str, list[StoredReading]] = defaultdict(list)
    wanted = (
        select(
            value.c.series_id, value.c.integer, value.c.real, value.c.missing,
            sweep.c.id.label("sweep"), sweep.c.name, sweep.c.created_at, sweep.c.harness_digest,
            sweep.c.retracted_reason.label("sweep_retracted"), run.c.id.label("run"), run.c.arm,
            run.c.retracted_reason, scenario.c.name.label("cell"), attempt.c.engine_digest, attempt.c.device,
        )
        .select_from(_JOINED)
        .where(*where, _MEASURED)
        .order_by(sweep.c.created_at, sweep.c.id, scenario.c.position, run.c.arm, attempt.c.id)
    )  # fmt: skip
    for row in connection.execute(wanted):
        rows[row.series_id].append(_reading(row))
    found = connection.execute(select(series).where(series.c.id.in_(ids)).order_by(series.c.name, series.c.id))
    return tuple(_history(row, rows[row.id]) for row in found)


def _history(row: Row[Any], readings: list[StoredReading]) -> History:
    points = points_of(readings)
    changes, note = changes_of(row.name, points)
    fields = ("family", "name", "card", "model_digest", "prompt_digest", "config")
    return History(
        series=row.id,
        points=points,
        breaks=breaks_of(points),
        changes=changes,
        note=note,
        **{name: getattr(row, name) for name in fields},
    )


def _reading(row: Any) -> StoredReading:
    told: Reading = row.real if row.integer is None else row.integer
    whole = None if row.sweep_retracted is None else f"all of its sweep: {row.sweep_retracted}"
    return StoredReading(
        sweep=row.sweep,
        sweep_name=row.name,
        at=row.created_at,
        cell=row.cell,
        arm=row.arm,
        run=row.run,
        value=told if row.missing is None else Missing(missing=row.missing),
        engine=row.engine_digest or "",
        driver=str((row.device or {}).get("driver") or ""),
        harness=row.harness_digest,
        retracted=row.retracted_reason or whole,
    )
