"""A verdict in force, read in parts: its frame, some of its cells and findings, and how many there are of each outcome.

What was retracted is told as `jobs.retracted` tells it, also in counts and filters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Table, case, func, literal_column, select, true

from jobs.document import Document
from jobs.outcomes import EXIT_WHEN_BLOCKING, severity
from jobs.retracted import struck
from jobs.store import verdicts
from jobs.store.rows import Page
from jobs.tables import cell_verdict, finding
from jobs.verdict import CellVerdict, Finding, Outcome, Retraction, Verdict

D = TypeVar("D", bound=Document)
Counts = tuple[tuple[Outcome, int], ...]
"""How many there are of each outcome, worst first."""

FINDINGS_OF_A_CELL = 100
"""How many of its findings a cell brings at most among others; all of them stand in the list of findings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFilter:
    """Which cells are asked for; what is left out fits all. `model` and `text` are parts of a name, in either case."""

    outcome: Outcome | None = None
    model: str = ""
    text: str = ""


def of(connection: Connection, sweep_id: str, *, is_struck: bool = True) -> Parts | None:
    """The verdict in force of a sweep; None before the first. `is_struck`: whether anything of it may be retracted.

    Raises StoreError when it cannot be read any more.
    """
    row = verdicts.newest_frame(connection, sweep_id)
    if row is None:
        return None
    with verdicts.readable(row.id):
        frame = Verdict.model_validate_json(row.text)
    return Parts(connection, row.id, frame, verdicts.fallen(connection, sweep_id) if is_struck else ())


class Parts:
    """A verdict in force within one view of the store."""

    def __init__(self, connection: Connection, verdict_id: str, frame: Verdict, why: Sequence[Retraction]) -> None:
        self._connection = connection
        self._id = verdict_id
        self._frame = frame
        self._why = why
        fallen = sorted({one.cell for one in why})
        self._outcome: ColumnElement[Any] = cell_verdict.c.outcome
        self._exit_code: ColumnElement[Any] = cell_verdict.c.exit_code
        if fallen:
            rests = true() if "" in fallen else cell_verdict.c.cell.in_(fallen)
            # literal, since PostgreSQL takes two placeholders for two expressions and groups by neither
            code: ColumnElement[Any] = literal_column(str(EXIT_WHEN_BLOCKING["RETRACTED"]))
            self._outcome = case((rests, literal_column("'RETRACTED'")), else_=self._outcome)
            self._exit_code = case((rests, code), else_=self._exit_code)

    def verdict(self, cells: Sequence[CellVerdict] = (), findings: Sequence[Finding] = ()) -> Verdict:
        """The frame with these cells and findings, struck out where what it rests on was retracted."""
        return struck(self._frame.model_copy(update={"cells": tuple(cells), "findings": tuple(findings)}), self._why)

    def of_cell(self, name: str) -> Verdict | None:
        """The verdict with one cell, and of findings and attempts set aside that cell's; None where it has none."""
        cells = self._read(cell_verdict, CellVerdict, self._places(cell_verdict, cell_verdict.c.cell == name, most=1))
        if not cells:
            return None
        whole = self.verdict(cells, self.findings_of([name]))
        return whole.model_copy(update={"set_aside": tuple(row for row in whole.set_aside if row.cell == name)})

    def first_cell(self) -> tuple[CellVerdict, ...]:
        """The first in the document, which tells what all its arms are; none where it has none."""
        return self._read(cell_verdict, CellVerdict, [0])

    def cells(self, wanted: CellFilter, number: int, size: int) -> Page[CellVerdict]:
        """A page of the cells that fit, worst first, each as it stands in the document: to be struck with the whole."""
        where = [] if wanted.outcome is None else [self._outcome == wanted.outcome]
        for column, part in ((cell_verdict.c.model, wanted.model), (cell_verdict.c.cell, wanted.text)):
            where += [column.icontains(part, autoescape=True)] if part else []
        here = (cell_verdict.c.verdict_id == self._id, *where)
        total = self._connection.execute(select(func.count()).select_from(cell_verdict).where(*here)).scalar_one()
        shown = self._places(cell_verdict, *where, order=self._order(), first=(number - 1) * size, most=size)
        return Page(self._read(cell_verdict, CellVerdict, shown), total, number, size)

    def beginning(self, worst: int, findings: int) -> Verdict:
        """The verdict with its `worst` cells, in the document's order, and its first `findings`."""
        here = self._places(cell_verdict, order=self._order(), most=worst)
        told = self._read(finding, Finding, range(findings))
        return self.verdict(self._read(cell_verdict, CellVerdict, sorted(here)), told)

    def findings_of(self, cells: Sequence[str]) -> tuple[Finding, ...]:
        """The findings of some cells, worst first."""
        here = self._places(finding, finding.c.cell.in_(cells), most=FINDINGS_OF_A_CELL * len(cells))
        return self._read(finding, Finding, here)

    def findings(self, number: int, size: int) -> Page[Finding]:
        """A page of the findings, worst first, after what was retracted since."""
        marks = self.verdict().findings
        total = len(marks) + sum(count for _, count in self._stored_findings)
        first, last = (number - 1) * size, number * size
        places = range(max(0, first - len(marks)), max(0, last - len(marks)))
        return Page((*marks[first:last], *self._read(finding, Finding, places)), total, number, size)

    def cell_counts(self) -> Counts:
        """Cells by outcome."""
        return _summed((outcome, count) for outcome, _, count in self._kinds)

    def finding_counts(self) -> Counts:
        """Findings by outcome."""
        return _summed([*((one.outcome, 1) for one in self.verdict().findings), *self._stored_findings])

    @cached_property
    def _kinds(self) -> list[tuple[Outcome, int, int]]:
        """Outcome and exit code of cells and how many have both, worst first."""
        columns = (self._outcome.label("outcome"), self._exit_code.label("code"))
        counted = select(*columns, func.count()).where(cell_verdict.c.verdict_id == self._id)
        rows = self._connection.execute(counted.group_by(*columns)).all()
        return sorted((tuple(row) for row in rows), key=lambda row: severity(row[0], row[1]))

    @cached_property
    def _stored_findings(self) -> list[tuple[Outcome, int]]:
        columns = (finding.c.outcome, finding.c.exit_code)
        counted = select(*columns, func.count()).where(finding.c.verdict_id == self._id).group_by(*columns)
        rows = sorted(self._connection.execute(counted).all(), key=lambda row: severity(row[0], row[1]))
        return [(outcome, count) for outcome, _, count in rows]

    def _order(self) -> list[ColumnElement[int]]:
        kinds = ((self._outcome == outcome) & (self._exit_code == code) for outcome, code, _ in self._kinds)
        return [case(*((kind, place) for place, kind in enumerate(kinds)))] if self._kinds else []

    def _places(
        self,
        table: Table,
        *where: ColumnElement[bool],
        order: Sequence[Any] = (),
        first: int = 0,
        most: int,
    ) -> list[int]:
        """Where in the document the rows stand that fit: each row has 20 kB, so none of them is sorted itself."""
        wanted = select(table.c.position).where(table.c.verdict_id == self._id, *where)
        ordered = wanted.order_by(*order, table.c.position).offset(first).limit(most)
        return list(self._connection.execute(ordered).scalars())

    def _read(self, table: Table, form: type[D], places: Sequence[int]) -> tuple[D, ...]:
        """Some cells or findings, in the order of `places`; those that are not there are left out."""
        wanted = select(table.c.position, verdicts.text_of(table)).where(
            table.c.verdict_id == self._id, table.c.position.in_(places)
        )
        with verdicts.readable(self._id):
            rows = {row.position: form.model_validate_json(row.text) for row in self._connection.execute(wanted)}
        return tuple(rows[place] for place in places if place in rows)


def _summed(counts: Iterable[tuple[Outcome, int]]) -> Counts:
    found: Counter[Outcome] = Counter()
    for outcome, count in counts:
        found[outcome] += count
    return tuple(found.items())
