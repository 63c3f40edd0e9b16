"""A store that is only read: what a server shows of it, every answer bounded and from one consistent view."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from sqlalchemy import Connection, case, func, select

from jobs.errors import SpecError
from jobs.history import History
from jobs.model import JudgeInput
from jobs.store import cluster, events, histories, ids, leases, listing, readback, revision, submission, verdict_parts
from jobs.store.cluster import CardRow, Queue
from jobs.store.connect import Database
from jobs.store.listing import SweepFilter, SweepLine
from jobs.store.rows import Event, Page, Pending, StoredRun, SweepRow
from jobs.store.verdict_parts import CellFilter, Counts
from jobs.tables import run, scenario
from jobs.verdict import Finding, Verdict

T = TypeVar("T")
EVENTS = 12
QUEUE_LINES = 20


@dataclass(frozen=True, slots=True)
class Overview:
    """A sweep as it stands. `verdict`: the one in force with its worst cells and first findings; None before the first.

    `cells` counts all of its cells by outcome, worst first, and `findings` is how many there are. `queue` and `events`,
    the newest, tell of one that is open.
    """

    row: SweepRow
    progress: Pending
    verdict: Verdict | None
    cells: Counts
    findings: int
    queue: Queue | None
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class CellsPart:
    """A page of a verdict's cells, in `verdict` in the page's order, and all of them by outcome."""

    row: SweepRow
    verdict: Verdict
    page: Page[str]
    counts: Counts


@dataclass(frozen=True, slots=True)
class CellPart:
    """A cell: what was judged of it (None: nothing yet), and its runs of blocks `first` to below `last` of `blocks`."""

    row: SweepRow
    verdict: Verdict | None
    doc: JudgeInput
    first: int
    last: int
    blocks: int


@dataclass(frozen=True, slots=True)
class CellProgress:
    """How far a cell is: its runs by state."""

    cell: str
    model: str
    pending: int
    complete: int
    exhausted: int


class Reader:
    """One store, read-only. Every method is one transaction.

    Raises StoreError when the database fails or is of another revision than this assay's, and SpecError for an id or
    name that names nothing. `clock` gives aware times.
    """

    def __init__(self, url: str, clock: Callable[[], datetime]) -> None:
        self._database = Database(url, read_only=True)
        self._clock = clock
        revision.require_head(self._database)
        self._head = revision.head()

    @property
    def shown(self) -> str:
        """The store's URL without its password."""
        return self._database.shown

    def close(self) -> None:
        """Give all connections back."""
        self._database.close()

    def sweeps(self, wanted: SweepFilter, number: int, size: int) -> Page[SweepLine]:
        """A page of the sweeps that fit, newest first."""
        return self._read(lambda c: listing.page_of(c, wanted, number, size))

    def sweep(self, sweep: str) -> SweepRow:
        """A sweep by its id or a unique beginning of it."""
        return self._read(lambda c: _found(c, sweep))

    def overview(self, sweep: str, worst: int, findings: int) -> Overview:
        """A sweep as it stands, with its `worst` cells and first `findings`."""
        return self._read(lambda c: self._overview(c, sweep, worst, findings))

    def cells(self, sweep: str, wanted: CellFilter, number: int, size: int) -> CellsPart:
        """A page of a judged sweep's cells. SpecError where there is no verdict yet."""

        def read(connection: Connection) -> CellsPart:
            row, parts = _judged(connection, sweep)
            page = parts.cells(wanted, number, size)
            verdict = parts.verdict(page.rows, parts.findings_of([one.cell for one in page.rows]))
            names = Page(tuple(one.cell for one in page.rows), page.total, number, size)
            return CellsPart(row, verdict, names, parts.cell_counts())

        return self._read(read)

    def findings(self, sweep: str, number: int, size: int) -> tuple[SweepRow, Page[Finding]]:
        """A page of a judged sweep's findings, worst first. SpecError where there is no verdict yet."""

        def read(connection: Connection) -> tuple[SweepRow, Page[Finding]]:
            row, parts = _judged(connection, sweep)
            return row, parts.findings(number, size)

        return self._read(read)

    def cell(self, sweep: str, name: str, number: int, blocks: int) -> CellPart:
        """A cell with page `number` (from 1) of its runs, `blocks` blocks a page."""

        def read(connection: Connection) -> CellPart:
            row = _found(connection, sweep)
            first = (number - 1) * blocks
            doc, total = readback.one_cell(connection, row.id, name, first, blocks)
            parts = verdict_parts.of(connection, row.id)
            verdict = parts.of_cell(name) if parts is not None else None
            return CellPart(row, verdict, doc, first, first + blocks, total)

        return self._read(read)

    def progress(self, sweep: str, number: int, size: int) -> tuple[SweepRow, Page[CellProgress]]:
        """A page of the cells of a sweep with how far each is, in the sweep's order."""

        def read(connection: Connection) -> tuple[SweepRow, Page[CellProgress]]:
            row = _found(connection, sweep)
            return row, _progress(connection, row.id, number, size)

        return self._read(read)

    def cell_histories(self, sweep: str, cell: str, names: Collection[str], last: int) -> tuple[History, ...]:
        """What a cell of a sweep measured of some counters and metrics, over the last sweeps that measured them."""
        return self._read(lambda c: histories.of_cell(c, _found(c, sweep).id, cell, names, last))

    def events(self, sweep: str, after: int, limit: int) -> tuple[Event, ...]:
        """A sweep's events in order, from the one after `after`."""
        return self._read(lambda c: events.listed(c, _found(c, sweep).id, after, limit))

    def run(self, run_id: str) -> StoredRun:
        """One run with its sweep, cell and arm, by its id or a unique beginning of it."""
        return self._read(lambda c: readback.one_run(c, ids.resolve_id(c, run_id, "run")))

    def cards(self) -> tuple[CardRow, ...]:
        """All cards that schedulers of this store have served."""
        return self._read(lambda c: cluster.cards(c, self._clock()))

    def _overview(self, connection: Connection, sweep: str, worst: int, findings: int) -> Overview:
        row = _found(connection, sweep)
        is_open = row.state == "open"
        parts = verdict_parts.of(connection, row.id)
        return Overview(
            row,
            leases.progress(connection, [row.id])[row.id],
            parts.beginning(worst, findings) if parts is not None else None,
            parts.cell_counts() if parts is not None else (),
            parts.findings(1, 1).total if parts is not None else 0,
            cluster.queue(connection, row.id, self._clock()) if is_open else None,
            events.newest(connection, row.id, EVENTS) if is_open else (),
        )

    def _read(self, action: Callable[[Connection], T]) -> T:
        def checked(connection: Connection) -> T:
            if revision.told(connection) != self._head:  # somebody has upgraded it meanwhile
                revision.require_at_head(connection, self._database.shown)
            return action(connection)

        return self._database.read(checked)


def _found(connection: Connection, sweep: str) -> SweepRow:
    return submission.one(connection, ids.resolve_id(connection, sweep, "swp"))


def _judged(connection: Connection, sweep: str) -> tuple[SweepRow, verdict_parts.Parts]:
    row = _found(connection, sweep)
    parts = verdict_parts.of(connection, row.id)
    if parts is None:
        raise SpecError(f"sweep {row.id} is not judged yet", "look at how far it is, and ask again later")
    return row, parts


def _progress(connection: Connection, sweep_id: str, number: int, size: int) -> Page[CellProgress]:
    total = connection.execute(select(func.count()).where(scenario.c.sweep_id == sweep_id)).scalar_one()
    first = (number - 1) * size
    here = (scenario.c.sweep_id == sweep_id, scenario.c.position >= first, scenario.c.position < first + size)
    rows = connection.execute(
        select(scenario.c.id, scenario.c.name, scenario.c.model).where(*here).order_by(scenario.c.position)
    ).all()
    states = ("pending", "complete", "exhausted")
    sums = (func.sum(case((run.c.state == state, 1), else_=0)) for state in states)
    counted = select(run.c.scenario_id, *sums).where(
        run.c.sweep_id == sweep_id, run.c.scenario_id.in_([row.id for row in rows])
    )
    counts = {
        one: [int(count) for count in found] for one, *found in connection.execute(counted.group_by(run.c.scenario_id))
    }
    cells = tuple(CellProgress(row.name, row.model, *counts.get(row.id, (0, 0, 0))) for row in rows)
    return Page(cells, total, number, size)
