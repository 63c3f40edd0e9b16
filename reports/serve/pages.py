"""The pages: the list of sweeps, a sweep, its cells and findings, a cell, a scenario. They need no script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Depends
from fastapi.responses import FileResponse, HTMLResponse

from jobs.errors import SpecError
from jobs.store.listing import SweepLine
from jobs.store.reader import CellPart, Overview, Reader
from jobs.store.rows import Page, SweepRow
from reports import charts, evidence
from reports.blocks import Section
from reports.format import integer, plural
from reports.index import Entry, entry_of
from reports.render.environment import ASSETS, page
from reports.render.pages import Links, Turn, cell_page, index_page, scenario_page, sweep_page
from reports.sections import headline
from reports.serve import live
from reports.serve.api import BLOCKS_A_PAGE, cell_filter, sweep_filter
from reports.serve.asked import (
    OUTCOMES,
    PAGE_SIZE,
    CellName,
    Hold,
    Number,
    OfCell,
    OfSweep,
    Part,
    State,
    SweepId,
    no_other,
)  # fmt: skip
from reports.view import SweepView, Whole, build_cell

SWEEPS_A_PAGE = 25
WORST_CELLS = 50
FIRST_FINDINGS = 100
"""What the page of a sweep shows of a large verdict; lists of their own go on."""

RENEW_S = 5


@dataclass(frozen=True, slots=True)
class Field:
    """An input of a filter: one of `options`, or any text where there are none."""

    name: str
    title: str
    value: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place(Turn):
    """The same pages, and which this one is."""

    where: str = ""


def routes(reader: Reader, store_words: str) -> APIRouter:
    """All pages and their assets; `store_words`: the option that names the store, for the commands on them."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse, dependencies=[Depends(no_other)])
    assets = {source.name: source for source in ASSETS}

    @router.get("/")
    def index(
        state: State = "", verdict: OfSweep = "", model: Part = "", scenario: Part = "", text: Part = "",
        page: Number = 1, hold: Hold = "",
    ) -> str:  # fmt: skip
        asked = {"state": state, "verdict": verdict, "model": model, "scenario": scenario, "text": text}
        found = reader.sweeps(sweep_filter(**asked), page, SWEEPS_A_PAGE)
        return _index(found, asked, is_held=bool(hold))

    @router.get("/sweeps/{sweep}")
    def sweep(sweep: SweepId, hold: Hold = "") -> str:
        now = reader.overview(sweep, WORST_CELLS, FIRST_FINDINGS)
        return _sweep(now, store_words, is_held=bool(hold))

    @router.get("/sweeps/{sweep}/cells")
    def cells(sweep: SweepId, outcome: OfCell = "", model: Part = "", text: Part = "", page: Number = 1) -> str:
        asked = {"outcome": outcome, "model": model, "text": text}
        part = reader.cells(sweep, cell_filter(**asked), page, PAGE_SIZE)
        view = SweepView(part.verdict, store_words)
        fields = (
            Field("outcome", "Outcome", outcome, ("", *OUTCOMES)),
            Field("model", "Model", model),
            Field("text", "Cell", text),
        )
        counted = ", ".join(f"{integer(count)} {name}" for name, count in part.counts)
        gloss = f"{plural(part.page.total, 'cell')} of {integer(sum(count for _, count in part.counts))}: {counted}."
        return _list(
            part.row, "all cells", "Cells of", f"Worst first. {gloss}", part.page, asked,
            headline.listed(view, part.verdict.cells), filters=fields,
        )  # fmt: skip

    @router.get("/sweeps/{sweep}/findings")
    def findings(sweep: SweepId, page: Number = 1) -> str:
        row, found = reader.findings(sweep, page, PAGE_SIZE)
        gloss = f"{plural(found.total, 'finding')}, worst first."
        shown = Section("findings", "Findings", (), (headline.findings_table(found.rows, with_cell=True),))
        return _list(row, "all findings", "Findings of", gloss, found, {}, shown)

    @router.get("/sweeps/{sweep}/progress")
    def progress(sweep: SweepId, page: Number = 1, hold: Hold = "") -> str:
        row, found = reader.progress(sweep, page, PAGE_SIZE)
        more = _renewed(row, is_held=bool(hold), here="progress", asked={"page": page} if page > 1 else {})
        gloss = f"{plural(found.total, 'cell')}."
        return _list(row, "progress", "Progress of", gloss, found, {}, live.cells(found.rows), **more)

    @router.get("/sweeps/{sweep}/cell")
    def cell(sweep: SweepId, name: CellName, page: Number = 1) -> str:
        return _cell(reader.cell(sweep, name, page, BLOCKS_A_PAGE), name, page, store_words)

    @router.get("/sweeps/{sweep}/scenario")
    def scenario(sweep: SweepId, name: CellName) -> str:
        row = reader.sweep(sweep)
        found = reader.cell_histories(row.id, name, charts.CHARTED, charts.HISTORY_SWEEPS)
        if not found:
            raise SpecError(f"no run of {name} in sweep {row.id} has measured anything yet", "look at its progress")
        return scenario_page(charts.build(name, found), _inside(row))

    @router.get("/assets/{name}", response_class=FileResponse)
    def asset(name: str) -> FileResponse:
        if name not in assets:
            raise SpecError(f"there is no asset {name}", "go back to the list of sweeps")
        return FileResponse(assets[name])

    return router


# ---- where things stand ------------------------------------------------------------------------------------------


def _named(path: str, name: str, anchor: str = "") -> str:
    return f"{path}?name={quote(name, safe='')}{f'#{anchor}' if anchor else ''}"


def _beside(row: SweepRow) -> Links:
    """From a sweep's own page, /sweeps/ID."""
    return Links(
        root="../",
        index="../",
        cell=lambda name: _named(f"{row.id}/cell", name),
        evidence=lambda name, anchor: _named(f"{row.id}/cell", name, anchor),
        scenario=lambda name: _named(f"{row.id}/scenario", name),
        cells=f"{row.id}/cells",
        sweeps=lambda other: other,
    )


def _inside(row: SweepRow) -> Links:
    """From a page below it."""
    return Links(
        root="../../",
        index="../../",
        sweep=f"../{row.id}",
        cell=lambda name: _named("cell", name),
        evidence=lambda name, anchor: _named("cell", name, anchor),
        scenario=lambda name: _named("scenario", name),
        cells="cells",
        sweeps=lambda other: f"../{other}",
    )


def _place(found: Page[Any], asked: Mapping[str, Any]) -> Place:
    """Where a page is among others that are asked for alike."""

    def link(number: int) -> str:
        told = {name: value for name, value in asked.items() if value != ""}
        return f"?{urlencode({**told, 'page': number})}"

    return Place(
        newer=link(min(found.number - 1, found.last)) if found.number > 1 else "",
        older=link(found.number + 1) if found.number < found.last else "",
        where=f"Page {integer(found.number)} of {integer(found.last)}",
    )


def _renewed(row: SweepRow, *, is_held: bool, here: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """How the page of an open sweep renews itself, and the address at which it does not."""
    is_live = row.state == "open" and not is_held
    hold = f"{here}?{urlencode({**asked, 'hold': '1'})}"
    return {"renew_s": RENEW_S if is_live else 0, "hold_href": hold if is_live else ""}


# ---- pages -------------------------------------------------------------------------------------------------------


def _index(found: Page[SweepLine], asked: Mapping[str, str], *, is_held: bool) -> str:
    fields = (
        Field("state", "State", asked["state"], ("", "open", "judged")),
        Field("verdict", "Verdict", asked["verdict"], ("", "none", *OUTCOMES)),
        Field("model", "Model", asked["model"]),
        Field("scenario", "Scenario", asked["scenario"]),
        Field("text", "Name or id", asked["text"]),
    )
    is_live = any(line.state == "open" for line in found.rows) and not is_held
    place = _place(found, asked)
    return index_page(
        [_entry(line) for line in found.rows],
        Links(sweeps=lambda sweep_id: f"sweeps/{sweep_id}"),
        total=found.total,
        turn=place,
        template="served_index.html.j2",
        forms=True,
        filters=fields,
        filtered=any(asked.values()) or found.number > 1,
        where=place.where if found.last > 1 else "",
        renew_s=RENEW_S if is_live else 0,
    )


def _entry(line: SweepLine) -> Entry:
    progress = "" if line.progress is None else live.in_a_line(line.progress)
    if line.verdict is None:
        return Entry(line.id, line.name, line.created_at.isoformat(), progress=progress)
    told = entry_of(line.verdict)
    own: dict[str, Any] = {"name": line.name, "at": line.created_at.isoformat(), "superseded_by": line.superseded_by}
    return replace(told, **own, cells=line.cells, findings=line.findings, progress=progress)


def _sweep(now: Overview, store_words: str, *, is_held: bool) -> str:
    links, told = _beside(now.row), live.sections(now)
    renewed = _renewed(now.row, is_held=is_held, here=now.row.id, asked={})
    if now.verdict is None:
        gloss = f"{live.in_a_line(now.progress)}. Not judged yet."
        found: Page[None] = Page((), 0, 1, 1)
        return page(
            "served_list.html.j2", None, links=replace(links, sweep=""), sweep=now.row.name, title="Sweep",
            what="sweep", gloss=gloss, filters=(), turn=_place(found, {}), sections=told,
            progress_href=f"{now.row.id}/progress", **renewed,
        )  # fmt: skip
    view = SweepView(now.verdict, store_words, Whole(now.cells, now.findings))
    return sweep_page(
        view,
        links if len(view.cells) > 1 else replace(links, cells=""),
        template="served_sweep.html.j2",
        live=told,
        findings_href=f"{now.row.id}/findings" if view.findings_left_out else "",
        progress_href=f"{now.row.id}/progress" if told else "",
        **renewed,
    )


def _cell(part: CellPart, name: str, number: int, store_words: str) -> str:
    places = evidence.anchors(part.doc.cells[0])
    links = replace(
        _inside(part.row),
        evidence=lambda cell, anchor: f"#{anchor}" if cell == name and anchor in places else "",
    )
    turn = _place(Page((), part.blocks, number, BLOCKS_A_PAGE), {"name": name})
    if part.verdict is None:
        found = evidence.sections(part.doc, part.doc.cells[0], (), None)
        return page(
            "served_list.html.j2", None, links=links, sweep=part.row.name, title=f"{name} of", what="cell",
            gloss="Not judged yet: its runs so far.", filters=(), turn=turn, sections=found, progress_href="",
            renew_s=0, hold_href="",
        )  # fmt: skip
    view = SweepView(part.verdict, store_words)
    return cell_page(view, build_cell(view.cells[0]), part.doc, links, template="served_cell.html.j2", turn=turn)


def _list(
    row: SweepRow,
    what: str,
    title: str,
    gloss: str,
    found: Page[Any],
    asked: Mapping[str, Any],
    section: Section,
    *,
    filters: tuple[Field, ...] = (),
    renew_s: int = 0,
    hold_href: str = "",
) -> str:
    """A page of rows of a sweep."""
    return page(
        "served_list.html.j2", None, forms=bool(filters), links=_inside(row), sweep=row.name, title=title, what=what,
        gloss=gloss, filters=filters, turn=_place(found, asked), sections=(section,), renew_s=renew_s,
        hold_href=hold_href, progress_href="",
    )  # fmt: skip
