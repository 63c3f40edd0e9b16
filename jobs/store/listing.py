"""Sweeps in pages: which fit a filter, and of those on a page what a list tells. No manifest is read.

In SQLite a column behind a large one costs the reading of that one, so what a list shows stands in indexes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, FromClause, Row, and_, exists, func, or_, select

from jobs.store import leases, verdict_parts, verdicts
from jobs.store.rows import Page, Pending
from jobs.store.verdict_parts import Counts
from jobs.tables import cell_verdict, citation, golden, run, scenario, sweep, verdict
from jobs.verdict import Outcome, Verdict

State = Literal["open", "judged"]
NEWEST_OF_A_MANIFEST = 50
"""Sweeps of one manifest that are looked at for one that answers again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFilter:
    """Which sweeps are asked for; what is left out fits all.

    `verdict`: the outcome in force, "none" before the first. `model` and `scenario` are parts of a name of one of its
    scenarios, `text` of the sweep's own name or the beginning of its id. ASCII letters fit in either case.
    """

    state: State | None = None
    verdict: Outcome | Literal["none"] | None = None
    model: str = ""
    scenario: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepLine:
    """A sweep as a list tells of it.

    `verdict`: the one in force with the first of its cells and none of its findings, which `cells` and `findings` count
    by outcome, worst first. `superseded_by`: the newest sweep of the same manifest that has an answer. `progress`: how
    far it is, while it is open.
    """

    id: str
    name: str
    state: State
    created_at: datetime
    judged_at: datetime | None
    verdict: Verdict | None = None
    cells: Counts = ()
    findings: Counts = ()
    superseded_by: str = ""
    progress: Pending | None = None


def page_of(connection: Connection, wanted: SweepFilter, number: int, size: int) -> Page[SweepLine]:
    """A page of the sweeps that fit, newest first."""
    conditions = _conditions(wanted)
    counted = _with_verdicts() if wanted.verdict else sweep
    total = connection.execute(select(func.count()).select_from(counted).where(*conditions)).scalar_one()
    columns = (
        *(sweep.c[name] for name in ("id", "name", "state", "created_at", "judged_at")),
        verdict.c.id.label("verdict_id"),
        _struck().label("is_struck"),
    )
    order = (sweep.c.created_at.desc(), sweep.c.id.desc())
    listed = select(*columns).select_from(_with_verdicts()).where(*conditions).order_by(*order)
    rows = connection.execute(listed.limit(size).offset((number - 1) * size)).all()
    later = _superseding(connection, [row.id for row in rows])
    progress = leases.progress(connection, [row.id for row in rows if row.state == "open"])
    lines = tuple(_line(connection, row, later.get(row.id, ""), progress.get(row.id)) for row in rows)
    return Page(lines, total, number, size)


def _with_verdicts() -> FromClause:
    """Each sweep with its verdict in force, if it has one."""
    its = verdict.alias("its")
    newest = select(func.max(its.c.number)).where(its.c.sweep_id == sweep.c.id).correlate(sweep).scalar_subquery()
    return sweep.outerjoin(verdict, and_(verdict.c.sweep_id == sweep.c.id, verdict.c.number == newest))


def _conditions(wanted: SweepFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    if wanted.state is not None:
        found.append(sweep.c.state == wanted.state)
    if wanted.verdict == "none":
        found.append(verdict.c.id.is_(None))
    elif wanted.verdict == "RETRACTED":
        found.append(_struck())
    elif wanted.verdict is not None:
        found += [verdict.c.outcome == wanted.verdict, ~_struck()]
    for name, part in (("model", wanted.model), ("name", wanted.scenario)):
        if part:
            named = select(scenario.c.sweep_id).where(scenario.c[name].icontains(part, autoescape=True))
            found.append(sweep.c.id.in_(named))  # once over all names, whatever a planner believes of each sweep's
    if wanted.text:
        begin = sweep.c.id.startswith(wanted.text.lower(), autoescape=True)
        found.append(or_(sweep.c.name.icontains(wanted.text, autoescape=True), begin))
    return found


def _struck() -> ColumnElement[bool]:
    """Whether the verdict in force is struck out: its sweep is retracted, or something that it cites."""
    cited = citation.c.cited
    fallen = or_(
        *(
            exists().where(table.c.id == cited, table.c.retracted_at.is_not(None)).correlate(citation)
            for table in (run, golden, sweep.alias("elsewhere"))
        )
    )
    rests = exists().where(citation.c.citing == verdict.c.id, fallen).correlate(verdict)
    return and_(verdict.c.id.is_not(None), or_(sweep.c.retracted_at.is_not(None), rests))


def _superseding(connection: Connection, ids: Sequence[str]) -> dict[str, str]:
    """Of some sweeps those that a later one answers, and the newest that does: of the same manifest and engines."""
    asked = select(sweep.c.id, sweep.c.manifest_digest).where(sweep.c.id.in_(ids))
    manifests = {row.id: row.manifest_digest for row in connection.execute(asked)}
    found: dict[str, str] = {}
    for manifest in set(manifests.values()):
        same = select(sweep.c.id).where(sweep.c.manifest_digest == manifest)
        newest = connection.execute(same.order_by(sweep.c.id.desc()).limit(NEWEST_OF_A_MANIFEST)).scalars().all()
        if len(newest) > 1:
            mine = {one for one in ids if manifests[one] == manifest}
            found |= _later(_engines(connection, {*newest, *mine}), mine)
    return found


def _later(answers: Mapping[str, tuple[frozenset[str], bool]], mine: Collection[str]) -> dict[str, str]:
    """Sweep -> a newer one that answers what it asked; `answers`: its engines, and whether its answer holds."""
    newest: dict[frozenset[str], str] = {}
    for one in sorted(answers, reverse=True):
        engines, holds = answers[one]
        if holds:
            newest.setdefault(engines, one)
    return {one: newest[answers[one][0]] for one in mine if one in answers and newest.get(answers[one][0], "") > one}


def _engines(connection: Connection, ids: Collection[str]) -> dict[str, tuple[frozenset[str], bool]]:
    """What ran for the arms of sweeps that have a verdict, told by its first cell, and whether it holds and is last."""
    first = and_(cell_verdict.c.verdict_id == verdict.c.id, cell_verdict.c.position == 0)
    told = verdicts.text_of(cell_verdict)
    holds = and_(sweep.c.state == "judged", ~_struck())
    wanted = select(sweep.c.id, told, holds).select_from(_with_verdicts().join(cell_verdict, first))
    found = {}
    for one, text, is_held in connection.execute(wanted.where(sweep.c.id.in_(ids))):
        arms = json.loads(text)["arms"]
        found[one] = frozenset(f"{arm['arm']}={arm.get('engine_digest', '')}" for arm in arms), bool(is_held)
    return found


def _line(connection: Connection, row: Row[Any], later: str, progress: Pending | None) -> SweepLine:
    own = {name: getattr(row, name) for name in ("id", "name", "state", "created_at", "judged_at")}
    parts = verdict_parts.of(connection, row.id, is_struck=row.is_struck) if row.verdict_id else None
    if parts is not None:
        told = {"cells": parts.cell_counts(), "findings": parts.finding_counts()}
        own |= {"verdict": parts.verdict(parts.first_cell()), **told}
    return SweepLine(**own, superseded_by=later, progress=progress)
