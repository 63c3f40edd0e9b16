"""Rebuilding what was written: the judge's input, and single records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Table, and_, func, select

from jobs import more_runs
from jobs.cells_read import CellsRead, cards_of
from jobs.errors import SpecError
from jobs.model import (
    AttemptFact,
    CellInput,
    CellPlan,
    Certificate,
    Equation,
    Generation,
    Interval,
    JudgeInput,
    KeyBytes,
    Manifest,
    Missing,
    Reading,
    RunFact,
    RunRecord,
    SeamRow,
    SequenceTokens,
    Stamp,
)
from jobs.store import calibrations, retractions, submission, verdicts
from jobs.store.records import COLUMNS_ALIKE
from jobs.store.rows import StoredRun, SweepRow
from jobs.store.strict import flag_text
from jobs.tables import (
    attempt,
    block,
    certificate,
    certificate_interval,
    key_bytes,
    run,
    sample,
    scenario,
    seam,
    series,
    sweep,
    token_stream,
    value,
)

Rows = dict[str, list[Row[Any]]]
"""Rows by attempt, in order."""

AT_ONCE = 200
"""Attempts whose rows are fetched together: bounds both memory and the length of a statement."""

CELLS_AT_ONCE = 50
"""Cells that are held together while a sweep is read."""


def judge_input(connection: Connection, sweep_id: str) -> JudgeInput:
    """Everything the judge may read of a sweep, from one consistent view."""
    read = cells_read(connection, sweep_id)
    cells = tuple(read.cells)
    stamp = read.around.stamp.model_copy(update={"cards": cards_of(cells)})
    return read.around.model_copy(update={"cells": cells, "stamp": stamp})


def cells_read(connection: Connection, sweep_id: str) -> CellsRead:
    """The same, each cell read from that view when its turn comes."""
    plans = _plans(connection, sweep_id)
    retracted = submission.one(connection, sweep_id).retracted_reason
    around = around_cells(connection, sweep_id)
    return CellsRead(around, _cells(connection, plans, retracted), _further(connection, sweep_id, plans))


def around_cells(connection: Connection, sweep_id: str) -> JudgeInput:
    """The judge's input without its cells."""
    return _around(connection, submission.one(connection, sweep_id), submission.manifest_of(connection, sweep_id))


def _around(connection: Connection, row: SweepRow, manifest: Manifest) -> JudgeInput:
    return JudgeInput(
        manifest=manifest,
        manifest_digest=row.manifest_digest,
        cells=(),
        adjudications=verdicts.adjudications(connection, row.id),
        calibrations=calibrations.known(connection, manifest, row.created_at),
        retracted_goldens=retractions.goldens_of(connection, [one.id for one in manifest.reviewed.goldens]),
        stamp=Stamp(
            sweep_id=row.id,
            request=row.request,
            harness_digest=row.harness_digest,
            harness_version=row.harness_version,
            base_source=_source(manifest, "base"),
            head_source=_source(manifest, "head"),
            created_at=row.created_at.isoformat(),
        ),
    )


def cell_inputs(connection: Connection, sweep_id: str, names: Collection[str]) -> tuple[CellInput, ...]:
    """Some cells of a sweep with their runs, in the sweep's order; a name that is no cell's gives none."""
    plans = _plans(connection, sweep_id, scenario.c.name.in_(names))
    return tuple(_cells(connection, plans, submission.one(connection, sweep_id).retracted_reason))


def one_cell(connection: Connection, sweep_id: str, name: str, first: int, count: int) -> tuple[JudgeInput, int]:
    """The judge's input of one cell alone, with its runs of `count` blocks from block `first`; and how many it has.

    Raises SpecError where the sweep has no cell of that name. A manifest of ten thousand cells is not validated for it.
    """
    wanted = select(scenario.c.id, scenario.c.plan).where(scenario.c.sweep_id == sweep_id, scenario.c.name == name)
    found = connection.execute(wanted).one_or_none()
    if found is None:
        raise SpecError(f"sweep {sweep_id} has no cell {name!r}", "its page lists its cells")
    raw = connection.execute(select(sweep.c.manifest).where(sweep.c.id == sweep_id)).scalar_one()
    manifest = Manifest.model_validate({**raw, "cells": [found.plan]})
    row = submission.one(connection, sweep_id)
    around = _around(connection, row, manifest)
    blocks = connection.execute(select(func.count()).where(block.c.scenario_id == found.id)).scalar_one()
    here = and_(block.c.scenario_id == found.id, block.c.number >= first, block.c.number < first + count)
    runs = tuple(_run_facts(connection, here, row.retracted_reason)[found.id])
    cell = CellInput(plan=manifest.cells[0], runs=runs)
    asked = tuple(one for one in around.adjudications if one.asked.cell == name)
    return around.model_copy(update={"cells": (cell,), "adjudications": asked}), blocks


def _plans(connection: Connection, sweep_id: str, *only: ColumnElement[bool]) -> dict[str, CellPlan]:
    """Plans by scenario, in the sweep's order."""
    wanted = select(scenario.c.id, scenario.c.plan).where(scenario.c.sweep_id == sweep_id, *only)
    scenarios = connection.execute(wanted.order_by(scenario.c.position)).all()
    return {one.id: CellPlan.model_validate(one.plan) for one in scenarios}


def _cells(connection: Connection, plans: Mapping[str, CellPlan], retracted: str | None) -> Iterator[CellInput]:
    ids = list(plans)
    for start in range(0, len(ids), CELLS_AT_ONCE):
        part = ids[start : start + CELLS_AT_ONCE]
        facts = _run_facts(connection, block.c.scenario_id.in_(part), retracted)
        for one in part:
            yield CellInput(plan=plans[one], runs=tuple(facts[one]))


def _further(connection: Connection, sweep_id: str, plans: Mapping[str, CellPlan]) -> int:
    """How many kinds of further runs all cells were given, told by each one's last block and last position."""
    wanted = (
        select(run.c.scenario_id, func.max(block.c.number), func.max(run.c.position))
        .join(block, block.c.id == run.c.block_id)
        .where(run.c.sweep_id == sweep_id)
        .group_by(run.c.scenario_id)
    )
    rows = connection.execute(wanted).all()
    return sum(len(tuple(more_runs.given(plans[one], [more_runs.RunPlace(*last)]))) for one, *last in rows)


def record(connection: Connection, attempt_id: str) -> RunRecord | None:
    """What one attempt measured, also one that was set aside; None when it wrote nothing."""
    found = connection.execute(select(attempt).where(attempt.c.id == attempt_id)).one_or_none()
    if found is None:
        raise SpecError(f"no attempt {attempt_id!r} in this store", "assay status lists them")
    return _records(connection, [found]).get(attempt_id)


def one_run(connection: Connection, run_id: str) -> StoredRun:
    """One run, with its sweep, cell and arm. Raises SpecError when there is none."""
    row = connection.execute(select(run.c.sweep_id, run.c.scenario_id).where(run.c.id == run_id)).one_or_none()
    if row is None:
        raise SpecError(f"no run {run_id!r} in this store", "assay explain ID CELL lists the runs of a cell")
    of = submission.one(connection, row.sweep_id)
    (fact,) = _run_facts(connection, run.c.id == run_id, of.retracted_reason)[row.scenario_id]
    plan = connection.execute(select(scenario.c.plan).where(scenario.c.id == row.scenario_id)).scalar_one()
    arms = submission.manifest_of(connection, row.sweep_id).arms
    arm = next(one for one in arms if one.name == fact.arm)
    return StoredRun(of, CellPlan.model_validate(plan), arm, fact)


def _run_facts(connection: Connection, which: ColumnElement[bool], retracted: str | None) -> dict[str, list[RunFact]]:
    """Runs by scenario, in block order: those of some blocks, or one. `retracted`: why all of their sweep is."""
    whole = None if retracted is None else f"all of its sweep: {retracted}"
    ordered = (
        select(run, block.c.number.label("block_number"))
        .join(block, block.c.id == run.c.block_id)
        .where(which)
        .order_by(block.c.number, run.c.position)
    )
    runs = connection.execute(ordered).all()
    told = [column for column in attempt.c if column.name not in ("opened_at", "closed_at", "worker", "card")]
    attempts = [
        row
        for start in range(0, len(runs), AT_ONCE)
        for row in connection.execute(
            select(*told)
            .where(attempt.c.run_id.in_([one.id for one in runs[start : start + AT_ONCE]]))
            .order_by(attempt.c.run_id, attempt.c.number)
        ).all()
    ]
    by_run: Rows = _grouped(attempts, "run_id")
    records = _records(connection, [row for row in attempts if row.state == "measured"])
    facts: dict[str, list[RunFact]] = defaultdict(list)
    for row in runs:
        tries = by_run.get(row.id, [])
        measured = [records[one.id] for one in tries if one.state == "measured"]
        facts[row.scenario_id].append(
            RunFact(
                run_id=row.id,
                block_id=row.block_id,
                block=row.block_number,
                position=row.position,
                arm=row.arm,
                state=row.state,
                attempts=tuple(
                    AttemptFact(attempt_id=one.id, number=one.number, state=one.state, reason=one.reason)
                    for one in tries
                ),
                record=measured[0] if measured else None,
                retracted=row.retracted_reason or whole,
            )
        )
    return facts


def _records(connection: Connection, attempts: list[Row[Any]]) -> dict[str, RunRecord]:
    found: dict[str, RunRecord] = {}
    written = [row for row in attempts if row.record_digest is not None]
    for start in range(0, len(written), AT_ONCE):
        part = written[start : start + AT_ONCE]
        ids = [row.id for row in part]
        tables = (token_stream, sample, seam, key_bytes, certificate, certificate_interval)
        rows = {table.name: _rows(connection, table, ids) for table in tables}
        readings = _readings(connection, ids)
        for row in part:
            found[row.id] = _record(row, {name: of.get(row.id, []) for name, of in rows.items()}, readings[row.id])
    return found


def _record(row: Row[Any], parts: Rows, readings: dict[str, dict[str, Reading]]) -> RunRecord:
    steps = {one.position: one.numbers for one in parts["sample"] if one.name == "step_ns"}
    return RunRecord(
        run_id=row.run_id,
        attempt_id=row.id,
        attempt_number=row.number,
        **{name: getattr(row, name) for name in COLUMNS_ALIKE},
        equations=tuple(Equation.model_validate(one) for one in row.equations),
        generations=_generations(parts["token_stream"], steps),
        counters=readings["counter"],
        metrics=readings["metric"],
        seams=tuple(SeamRow(**_fields(one, SeamRow)) for one in parts["seam"]),
        keys=tuple(KeyBytes(**_fields(one, KeyBytes)) for one in parts["key_bytes"]),
        certificate=_certificate(parts),
        flags=tuple(sorted(flag_text(place, fault) for place, fault in (row.flags or {}).items())),
    )


def _generations(streams: list[Row[Any]], steps: Mapping[int, tuple[int, ...]]) -> tuple[Generation, ...]:
    """Streams in order: one of sequence 0 begins a generation, and the ones after it are its further sequences."""
    starts = [at for at, row in enumerate(streams) if row.sequence == 0]
    return tuple(
        _generation(streams[start], steps.get(streams[start].position, ()), streams[start + 1 : end])
        for start, end in pairwise((*starts, len(streams)))
    )


def _generation(row: Row[Any], step_ns: tuple[int, ...], further: list[Row[Any]]) -> Generation:
    return Generation(
        index=row.generation,
        warmup=row.warmup,
        ids=row.ids,
        stop_reason=row.stop_reason,
        gaps=row.gaps,
        counters=row.counters,
        prefill_ns=row.prefill_ns,
        step_ns=step_ns,
        further=tuple(SequenceTokens(ids=one.ids, stop_reason=one.stop_reason, gaps=one.gaps) for one in further),
    )


def _certificate(parts: Rows) -> Certificate | None:
    if not parts["certificate"]:
        return None
    (row,) = parts["certificate"]
    intervals = tuple(Interval(**_fields(one, Interval)) for one in parts["certificate_interval"])
    fields = _fields(row, Certificate, apart={"intervals", "reasons"})
    return Certificate(**fields, reasons=tuple(row.reasons), intervals=intervals)


def _readings(connection: Connection, ids: list[str]) -> dict[str, dict[str, dict[str, Reading]]]:
    """attempt -> family -> name -> reading."""
    found: dict[str, dict[str, dict[str, Reading]]] = {one: {"counter": {}, "metric": {}} for one in ids}
    rows = (
        select(value.c.attempt_id, series.c.family, series.c.name, value.c.integer, value.c.real, value.c.missing)
        .join(series, series.c.id == value.c.series_id)
        .where(value.c.attempt_id.in_(ids))
        .order_by(series.c.name)
    )
    for attempt_id, family, name, integer, real, missing in connection.execute(rows).all():
        reading: Reading = real if integer is None else integer
        found[attempt_id][family][name] = reading if missing is None else Missing(missing=missing)
    return found


def _rows(connection: Connection, table: Table, ids: list[str]) -> Rows:
    wanted = select(table).where(table.c.attempt_id.in_(ids))
    if "position" in table.c:
        wanted = wanted.order_by(table.c.position)
    return _grouped(connection.execute(wanted).all(), "attempt_id")


def _grouped(rows: Iterable[Row[Any]], column: str) -> Rows:
    groups: Rows = defaultdict(list)
    for row in rows:
        groups[getattr(row, column)].append(row)
    return groups


def _fields(row: Row[Any], form: type[Any], apart: frozenset[str] | set[str] = frozenset()) -> dict[str, Any]:
    return {name: getattr(row, name) for name in form.model_fields if name not in apart}


def _source(manifest: Manifest, role: str) -> str:
    return next((arm.source for arm in manifest.arms if arm.role == role), "")
