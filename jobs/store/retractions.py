"""Retraction: a run or sweep that is not to be trusted keeps its rows, and what rests on it is struck out.

A verdict rests on its own sweep, on each run of that sweep but those that it sets aside as retracted, and on what it
cites from elsewhere, such as goldens; a golden rests on the runs that gave its ids. That a verdict rests on a run is
written down (`citation`) once the run is retracted, and not told from times: one may be judged while it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Row, Select, Table, insert, literal, select, update

from jobs.column_types import clean_text
from jobs.errors import SpecError
from jobs.reviewed import Golden
from jobs.store import events
from jobs.tables import attempt, citation, comment, golden, run, scenario, sweep, verdict
from jobs.verdict import Retraction

Kind = Literal["sweep", "run", "golden"]

AT_ONCE = 500
"""Ids looked up together: bounds the length of a statement."""


@dataclass(frozen=True, slots=True)
class Struck:
    """What a retraction strikes out: goldens by id, verdicts by id and sweep, comments by where they were posted."""

    id: str
    sweep_id: str
    reason: str
    goldens: tuple[str, ...]
    verdicts: tuple[tuple[str, str], ...]
    comments: tuple[str, ...]


def retract(connection: Connection, subject: str, reason: str, by: str, now: datetime) -> Struck:
    """Mark a run or a sweep as not to be trusted; the same once more changes nothing.

    Raises SpecError without a reason, for a sweep that is open, for a run that measured nothing, and for what is
    retracted for another reason: the first one stands wherever it was read.
    """
    if not reason.strip():
        raise SpecError("a retraction needs a reason", "say what is wrong: --reason WHY")
    table = sweep if subject.startswith("swp_") else run
    owner = sweep.c.id if table is sweep else run.c.sweep_id
    sweep_id = connection.execute(select(owner).where(table.c.id == subject)).scalar_one_or_none()
    if sweep_id is None:
        raise SpecError(f"no run or sweep {subject!r} in this store", "assay status lists sweeps, assay explain runs")
    hold(connection, sweep_id)
    row = connection.execute(select(table).where(table.c.id == subject).with_for_update()).one()
    if table is sweep and row.state == "open":
        raise SpecError(f"sweep {subject} is not judged yet", f"give it up first: assay cancel {subject}")
    if table is run and row.state != "complete":
        raise SpecError(f"run {subject} is {row.state}: it measured nothing to retract", "leave it as it is")
    if row.retracted_reason not in (None, clean_text(reason)):
        told = f"{subject} is retracted already, since {row.retracted_at:%Y-%m-%d %H:%M} UTC: {row.retracted_reason}"
        raise SpecError(told, "that reason stands and nothing was changed; a retraction is not taken back")
    if row.retracted_reason is None:
        events.log(connection, sweep_id, subject, "retracted", now, message=f"by {by}: {reason}")
        values = {"retracted_reason": reason, "retracted_at": now}
        connection.execute(update(table).where(table.c.id == subject).values(**values))
    if table is run and row.retracted_reason is None:
        for judged in connection.execute(select(verdict.c.id).where(verdict.c.sweep_id == sweep_id)).scalars().all():
            cite(connection, judged, [subject])
    runs = run.c.sweep_id == sweep_id if table is sweep else run.c.id == subject
    goldens = _strike_goldens(connection, select(run.c.id).where(runs), f"{subject} is retracted: {reason}", now)
    cited = select(citation.c.citing).where(citation.c.cited.in_([subject, *goldens]))
    resting = (verdict.c.sweep_id == sweep_id) | verdict.c.id.in_(cited)
    verdicts = connection.execute(select(verdict.c.id, verdict.c.sweep_id).where(resting).order_by(verdict.c.id)).all()
    posted = select(comment).where(comment.c.verdict_id.in_([found.id for found in verdicts])).order_by(comment.c.id)
    return Struck(
        subject,
        sweep_id,
        reason,
        tuple(goldens),
        tuple((found.id, found.sweep_id) for found in verdicts),
        tuple(f"{found.repository}#{found.pull_request}" for found in connection.execute(posted)),
    )


def hold(connection: Connection, sweep_id: str) -> None:
    """Let no other writer judge a sweep or retract of it before this transaction ends."""
    connection.execute(select(sweep.c.id).where(sweep.c.id == sweep_id).with_for_update(key_share=True))


def cite_fallen(connection: Connection, sweep_id: str, verdict_id: str, aside: Collection[str]) -> None:
    """Note what a new verdict rests on of what fell while it was judged; `aside`: runs that it leaves out for that."""
    fallen = select(run.c.id).where(run.c.sweep_id == sweep_id, run.c.retracted_reason.is_not(None))
    cite(connection, verdict_id, [one for one in connection.execute(fallen).scalars() if one not in aside])


def of_verdicts(connection: Connection, rows: Mapping[str, Any]) -> dict[str, tuple[Retraction, ...]]:
    """What strikes out the verdicts of some sweeps; `rows`: sweep id -> its newest verdict's row."""
    found: dict[str, list[Retraction]] = defaultdict(list)
    ids = list(rows)
    for start in range(0, len(ids), AT_ONCE):
        part = ids[start : start + AT_ONCE]
        for row in connection.execute(_marked(sweep).where(sweep.c.id.in_(part))):
            found[row.id].append(_retraction("sweep", row))
        sweeps = {rows[one].id: one for one in part}
        for kind, row in _cited(connection, list(sweeps)):
            found[sweeps[row.citing]].append(_retraction(kind, row, row.cell))
    return {sweep_id: tuple(found[sweep_id]) for sweep_id in found}


def goldens_of(connection: Connection, ids: list[str]) -> dict[str, str]:
    """Those of some goldens that are retracted, and why."""
    marked = select(golden).where(golden.c.id.in_(ids), golden.c.retracted_reason.is_not(None))
    return {row.id: row.retracted_reason for row in connection.execute(marked)} if ids else {}


def cite(connection: Connection, citing: str, cited: list[str]) -> None:
    """Note that a verdict or golden rests on some ids."""
    if cited:
        connection.execute(insert(citation), [{"citing": citing, "cited": one} for one in dict.fromkeys(cited)])


def write_golden(connection: Connection, made: Golden, ids_digest: str, now: datetime) -> None:
    """Store a golden with what it rests on; a resend is a no-op."""
    if connection.execute(select(golden.c.id).where(golden.c.id == made.id)).scalar() is not None:
        return
    measured = attempt.c.run_id.in_(made.runs), attempt.c.state == "measured"
    first = connection.execute(select(attempt.c.id).where(*measured).order_by(attempt.c.run_id).limit(1)).scalar_one()
    row = {"id": made.id, "attempt_id": first, "cell": made.cell, "ids_digest": ids_digest, "reason": made.reason}
    connection.execute(insert(golden), {**row, "document": made.model_dump(mode="json"), "created_at": now})
    cite(connection, made.id, [made.sweep, *made.runs])
    events.log(connection, made.sweep, made.id, "blessed", now, message=f"{made.cell}, by {made.by}: {made.reason}")


def _strike_goldens(connection: Connection, runs: Any, why: str, now: datetime) -> list[str]:
    resting = select(citation.c.citing).where(citation.c.cited.in_(runs))
    wanted = select(golden.c.id).where(golden.c.id.in_(resting), golden.c.retracted_reason.is_(None))
    ids = list(connection.execute(wanted.order_by(golden.c.id)).scalars())
    if ids:
        connection.execute(update(golden).where(golden.c.id.in_(ids)).values(retracted_reason=why, retracted_at=now))
    return ids


def _cited(connection: Connection, citing: Sequence[str]) -> Iterator[tuple[Kind, Row[Any]]]:
    """What is retracted of all that some verdicts cite: goldens, and runs or sweeps of elsewhere."""
    its = select(scenario.c.name).where(scenario.c.id == run.c.scenario_id).scalar_subquery()
    cells: tuple[tuple[Kind, Table, Any], ...] = (
        ("run", run, its), ("golden", golden, golden.c.cell), ("sweep", sweep, literal(""))
    )  # fmt: skip
    for kind, table, cell in cells:
        wanted = _marked(table, citation.c.citing, cell.label("cell")).join(citation, citation.c.cited == table.c.id)
        for row in connection.execute(wanted.where(citation.c.citing.in_(citing))):
            yield kind, row


def _marked(table: Table, *further: Any) -> Select[Any]:
    """Retracted rows of a table, in order."""
    columns = (table.c.id, table.c.retracted_reason, table.c.retracted_at, *further)
    return select(*columns).where(table.c.retracted_reason.is_not(None)).order_by(table.c.id)


def _retraction(kind: Kind, row: Row[Any], cell: str = "") -> Retraction:
    return Retraction(kind=kind, id=row.id, cell=cell, reason=row.retracted_reason, at=row.retracted_at.isoformat())
