"""The pages of a verdict: one of the sweep, one of each cell. Each says by `Links` where it stands among the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

from jobs.model import JudgeInput
from jobs.verdict import CellVerdict
from reports import explain, tiles
from reports.blocks import Section
from reports.charts import Scenario
from reports.index import Entry, rows_of
from reports.render.environment import page
from reports.sections import blind, capture, headline, hygiene, identity, reviewed, stamp, time, traffic, witnesses
from reports.view import CellView, Scope, SweepView
from reports.wording import OUTCOMES, gloss

_SECTIONS: Final = (identity, witnesses, traffic, capture, time, reviewed, hygiene, blind, stamp)
_PAGE_CELLS: Final = 8
_PAGE_ROWS: Final = 2000
_FIRST_ROWS: Final = 200
"""Rows of a table on the page of a sweep: the worst. The list of cells goes on."""


@dataclass(frozen=True, slots=True)
class Links:
    """Where a page's links lead, each relative to that page; an empty one is not there.

    `root` stands before the shared assets. `cell` gives a cell's page by its name, `evidence` a place
    on it, `scenario` what the cell did over sweeps; `cells` is the list of all cells, `sweeps` gives the page
    of a sweep by its id.
    """

    root: str = ""
    index: str = ""
    sweep: str = ""
    cell: Callable[[str], str] = lambda _name: ""
    evidence: Callable[[str, str], str] = lambda _cell, _anchor: ""
    scenario: Callable[[str], str] = lambda _cell: ""
    cells: str = ""
    sweeps: Callable[[str], str] = lambda _id: ""

    def deeper(self) -> Links:
        """The same places as a page sees them that stands one folder below."""
        return replace(
            self,
            root=_up(self.root) or "../",
            index=_up(self.index),
            scenario=lambda cell: _up(self.scenario(cell)),
            sweeps=lambda sweep_id: _up(self.sweeps(sweep_id)),
        )


def _up(link: str) -> str:
    return f"../{link}" if link else ""


@dataclass(frozen=True, slots=True)
class Turn:
    """The pages of an index before and after one; an empty one is not there."""

    newer: str = ""
    older: str = ""


def index_page(
    entries: Sequence[Entry],
    links: Links,
    *,
    total: int | None = None,
    turn: Turn | None = None,
    template: str = "index.html.j2",
    style: str | None = None,
    **more: Any,
) -> str:
    """A page of the index of sweeps: these entries, of `total` in all.

    `template` may be one that extends the index's, with `more` values of its own.
    """
    return page(
        template,
        style,
        links=links,
        rows=rows_of(entries),
        total=len(entries) if total is None else total,
        turn=turn or Turn(),
        **more,
    )


def sections_of(view: SweepView) -> Iterable[ModuleType]:
    """The sections that a verdict has: without reviewed files there is nothing to say of them."""
    return (module for module in _SECTIONS if module is not reviewed or view.verdict.reviewed)


def sweep_page(
    view: SweepView, links: Links, style: str | None = None, *, template: str = "page.html.j2", **more: Any
) -> str:
    """The page of a sweep; `style`: the style sheet, where the page holds it. `template` and `more` as of an index."""
    cells = view.first_cells(_PAGE_CELLS)
    scope = Scope(cells, _FIRST_ROWS, _FIRST_ROWS, len(view.cells) - len(cells) + view.cells_left_out)
    sections = [module.build(view, scope) for module in (headline, *sections_of(view))]
    figures = tiles.of_cell(cells[0]) if scope.is_single else tiles.of_sweep(view)
    verdict = view.verdict
    named: dict[str, Any] = {"name": verdict.sweep, "outcome": verdict.outcome, "exit_code": verdict.exit_code, **more}
    return _judged(template, view, links, style, sections=sections, tiles=figures, **named)


def shown_first(view: SweepView) -> list[str]:
    """All cells by name: those that the page of the sweep names, then the others, worst first."""
    named = [cell.cell for cell in view.cells[:_FIRST_ROWS]]
    named += [finding.cell for finding in view.verdict.findings[:_FIRST_ROWS] if finding.cell]
    worse = [row.cell for row in view.worse]
    named += (worse or [row.cell for row in view.ranked])[:_FIRST_ROWS]
    everything = {cell.cell: None for cell in view.cells}
    return list(dict.fromkeys([*(name for name in named if name in everything), *everything]))


def list_page(view: SweepView, cells: Sequence[CellVerdict], links: Links, place: int, pages: Sequence[str]) -> str:
    """A part of the list of all cells, worst first; it is page `place` of `pages`, given as links."""
    turn = Turn(pages[place - 1] if place else "", pages[place + 1] if place + 1 < len(pages) else "")
    where = f"Page {place + 1} of {len(pages)}"
    sections = [headline.listed(view, cells)]
    return page(
        "cells.html.j2",
        None,
        links=links,
        sections=sections,
        turn=turn,
        where=where,
        sweep=view.verdict.sweep,
        total=len(view.cells),
        command=view.command("explain", view.verdict.stamp.sweep_id, "CELL"),
    )


def cell_page(
    view: SweepView,
    cell: CellView,
    doc: JudgeInput | None,
    links: Links,
    *,
    template: str = "cell.html.j2",
    **more: Any,
) -> str:
    """The page of a cell; with the judge's input `doc` it goes on to runs, samples, certificates, logs and tokens."""
    scope = Scope((cell,), _PAGE_ROWS, _PAGE_ROWS)
    fallen = headline.struck(view)
    sections = [Section("retracted", "Retracted", (), shown=tuple(fallen))] if fallen else []
    sections += [module.build(view, scope) for module in sections_of(view) if module is not stamp]
    if doc is not None:
        sections += explain.sections(view.verdict, doc, cell.name)
    sections.append(stamp.build(view, scope))
    code = cell.source.exit_code
    named: dict[str, Any] = {"name": cell.name, "outcome": cell.source.outcome, "exit_code": code, **more}
    return _judged(template, view, links, None, sections=sections, tiles=tiles.of_cell(cell), **named)


def scenario_page(scenario: Scenario, links: Links) -> str:
    """A scenario over sweeps, as pictures that read without script; with script they can be pointed at."""
    return page("scenario.html.j2", None, scripts=True, links=links, scenario=scenario)


def _judged(template: str, view: SweepView, links: Links, style: str | None, *, outcome: str, **values: Any) -> str:
    verdict = view.verdict
    return page(
        template,
        style,
        links=links,
        behind=view.cells[0].cell if len(view.cells) == 1 else "",
        total=len(view.cells) + view.cells_left_out,
        outcome=outcome,
        tone=OUTCOMES[outcome][0],
        gloss=gloss(outcome, verdict.gate),
        headline=verdict.headline,
        next_step=verdict.next_step,
        counts=headline.counts(view),
        sweep=verdict.sweep,
        sweep_id=verdict.stamp.sweep_id,
        digest=verdict.input_digest,
        **values,
    )
