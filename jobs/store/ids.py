"""Finding anything stored by the beginning of its id."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select

from jobs.errors import SpecError
from jobs.tables import attempt, block, golden, run, scenario, sweep, verdict

SHOWN = 6
TABLES = {"swp": sweep, "cel": scenario, "blk": block, "run": run, "att": attempt, "vrd": verdict, "gld": golden}
NAMES = {**{kind: table.name for kind, table in TABLES.items()}, "cel": "cell"}


def resolve_id(connection: Connection, prefix: str, kind: str = "") -> str:
    """The one id that begins with `prefix`, with or without its kind (`swp_01j..` or `01j..`).

    Raises SpecError when none or several fit; the latter lists them. What is of another kind than was asked for is
    named, with those that may be meant.
    """
    wanted = prefix.strip().lower()
    fitting = _beginning(connection, wanted, [kind] if kind else TABLES)
    if len(fitting) == 1 or wanted in fitting:
        return wanted if wanted in fitting else fitting[0]
    if fitting:
        raise SpecError(f"{prefix!r} is the beginning of several ids: {', '.join(fitting[:SHOWN])}", "give more of it")
    others = _beginning(connection, wanted, TABLES) if kind else []
    if len(others) == 1:
        is_one = f"{others[0]} is a {NAMES[others[0][:3]]}, and a {NAMES[kind]} is asked for"
        raise SpecError(is_one, _of_kind(connection, others[0], kind))
    remedy = "assay status lists sweeps, and with a sweep's id its runs; --store names another store"
    raise SpecError(f"no id begins with {prefix!r} in this store", remedy)


def _beginning(connection: Connection, wanted: str, kinds: Iterable[str]) -> list[str]:
    """Ids of some kinds that begin with what is wanted, the first ones of each."""
    head, mark, _ = wanted.partition("_")
    found: list[str] = []
    for kind in kinds if wanted else ():
        if not mark or head == kind:
            column = TABLES[kind].c.id
            begin = wanted if mark else f"{kind}_{wanted}"
            query = select(column).where(column.startswith(begin, autoescape=True)).order_by(column)
            found += connection.execute(query.limit(SHOWN)).scalars()
    return found


def _of_kind(connection: Connection, other: str, kind: str) -> str:
    """Which ids of a kind something else belongs to, or has."""
    table = TABLES[other[:3]]
    if kind == "swp" and "sweep_id" in table.c:
        return f"its sweep: {connection.execute(select(table.c.sweep_id).where(table.c.id == other)).scalar_one()}"
    if kind == "run" and table is sweep:
        rows = connection.execute(select(run.c.id, run.c.arm).where(run.c.sweep_id == other).order_by(run.c.id)).all()
        more = f", and {len(rows) - SHOWN} more: assay explain {other} CELL lists a cell's" if len(rows) > SHOWN else ""
        return f"its runs: {', '.join(f'{row.id} ({row.arm})' for row in rows[:SHOWN])}{more}"
    return "assay status lists sweeps, and assay explain ID CELL the runs of a cell"
