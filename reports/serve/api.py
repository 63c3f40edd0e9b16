"""The JSON API: what the pages show, in pages of at most 100 rows. Names and types are those of the documents."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime
from typing import Any, cast

from fastapi import APIRouter, Depends, Response

from jobs.document import Document
from jobs.model import CellInput
from jobs.redact import redacted
from jobs.store.cluster import CardRow, Queue
from jobs.store.listing import SweepFilter, SweepLine
from jobs.store.reader import CellProgress, Reader
from jobs.store.rows import Event, Page, Pending, SweepRow
from jobs.store.verdict_parts import CellFilter
from jobs.verdict import CellVerdict, Finding, Verdict
from reports.serve.asked import (
    PAGE_SIZE,
    After,
    CellName,
    Number,
    OfCell,
    OfSweep,
    Part,
    RunId,
    Size,
    State,
    SweepId,
    no_other,
)  # fmt: skip
from reports.serve.faults import Fault

BLOCKS_A_PAGE = 20
EVENTS_A_PAGE = 200


@dataclass(frozen=True, slots=True)
class SweepNow:
    """A sweep as it stands: `verdict` is the one in force without its cells and findings; `cells` counts them."""

    row: SweepRow
    progress: Pending
    verdict: Verdict | None
    cells: tuple[tuple[str, int], ...]
    findings: int
    queue: Queue | None
    events: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class CellNow:
    """A cell: what was judged of it, and its plan and runs of some of its `blocks`."""

    verdict: CellVerdict | None
    findings: tuple[Finding, ...]
    input: CellInput
    page: int
    pages: int
    blocks: int


@dataclass(frozen=True, slots=True)
class RunNow:
    """A run and its cell."""

    sweep: str
    cell: str
    input: CellInput


def routes(reader: Reader) -> APIRouter:
    """All routes, under /api/v1."""
    faults: dict[int | str, dict[str, Any]] = {
        status: {"model": Fault, "description": text}
        for status, text in (
            (400, "no host is named"), (401, "the token is missing"), (404, "there is no such thing"),
            (421, "another host is named"), (422, "a parameter is not understood"), (503, "the store gives no answer"),
        )
    }  # fmt: skip
    router = APIRouter(prefix="/api/v1", dependencies=[Depends(no_other)], responses=faults)

    @router.get("/sweeps", response_model=Page[SweepLine])
    def sweeps(
        state: State = "", verdict: OfSweep = "", model: Part = "", scenario: Part = "", text: Part = "",
        page: Number = 1, size: Size = PAGE_SIZE,
    ) -> Response:  # fmt: skip
        """Sweeps that fit, newest first."""
        wanted = sweep_filter(state, verdict, model, scenario, text)
        return _json(reader.sweeps(wanted, page, size))

    @router.get("/sweeps/{sweep}", response_model=SweepNow)
    def sweep(sweep: SweepId) -> Response:
        """A sweep as it stands, its verdict without cells and findings."""
        now = reader.overview(sweep, 0, 0)
        return _json(SweepNow(now.row, now.progress, now.verdict, now.cells, now.findings, now.queue, now.events))

    @router.get("/sweeps/{sweep}/cells", response_model=Page[CellVerdict])
    def cells(
        sweep: SweepId, outcome: OfCell = "", model: Part = "", text: Part = "",
        page: Number = 1, size: Size = PAGE_SIZE,
    ) -> Response:  # fmt: skip
        """The cells of a verdict that fit, worst first."""
        part = reader.cells(sweep, cell_filter(outcome, model, text), page, size)
        return _json(Page(part.verdict.cells, part.page.total, page, size))

    @router.get("/sweeps/{sweep}/cell", response_model=CellNow)
    def cell(sweep: SweepId, name: CellName, page: Number = 1) -> Response:
        """One cell: its verdict, plan and runs, these block by block."""
        part = reader.cell(sweep, name, page, BLOCKS_A_PAGE)
        judged = part.verdict.cells[0] if part.verdict is not None else None
        found = part.verdict.findings if part.verdict is not None else ()
        pages = max(1, -(-part.blocks // BLOCKS_A_PAGE))
        return _json(CellNow(judged, found, part.doc.cells[0], page, pages, part.blocks), is_raw=True)

    @router.get("/sweeps/{sweep}/findings", response_model=Page[Finding])
    def findings(sweep: SweepId, page: Number = 1, size: Size = PAGE_SIZE) -> Response:
        """The findings of a verdict, worst first."""
        return _json(reader.findings(sweep, page, size)[1])

    @router.get("/sweeps/{sweep}/progress", response_model=Page[CellProgress])
    def progress(sweep: SweepId, page: Number = 1, size: Size = PAGE_SIZE) -> Response:
        """How far each cell is, in the sweep's order."""
        return _json(reader.progress(sweep, page, size)[1])

    @router.get("/sweeps/{sweep}/events", response_model=tuple[Event, ...])
    def events(sweep: SweepId, after: After = 0) -> Response:
        """What happened, in order, from the event after `after`; at most 200."""
        return _json(reader.events(sweep, after, EVENTS_A_PAGE), is_raw=True)

    @router.get("/runs/{run}", response_model=RunNow)
    def run(run: RunId) -> Response:
        """One run with all that it measured, and its cell's plan."""
        found = reader.run(run)
        cell = CellInput(plan=found.plan, runs=(found.fact,))
        return _json(RunNow(found.sweep.id, found.plan.cell, cell), is_raw=True)

    @router.get("/cards", response_model=tuple[CardRow, ...])
    def cards() -> Response:
        """The cards of the schedulers that serve this store."""
        return _json(reader.cards())

    return router


def sweep_filter(state: str, verdict: str, model: str, scenario: str, text: str) -> SweepFilter:
    """The filter of a request whose parameters have been looked at; an empty one asks for all."""
    kinds: dict[str, Any] = {"state": state or None, "verdict": verdict or None}
    return SweepFilter(**kinds, model=model, scenario=scenario, text=text)


def cell_filter(outcome: str, model: str, text: str) -> CellFilter:
    """The same of cells."""
    return CellFilter(outcome=cast("Any", outcome or None), model=model, text=text)


def _json(found: Any, *, is_raw: bool = False) -> Response:
    """A response; `is_raw`: it holds what programs printed, which no judge has looked through for secrets."""
    body = _plain(found)
    return Response(json.dumps(redacted(body) if is_raw else body, allow_nan=False), media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, Document):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value.isoformat() if isinstance(value, datetime) else value
