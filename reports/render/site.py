"""A folder of sweeps: an index, the pages of each sweep, those of scenarios, and the assets that all share.

index.html, index-2.html ..    sweeps, newest first
sweeps/ID/                     index.html, cells/, cells-1.html .., entry.json: what the index says of it
scenarios/                     what each scenario did over sweeps
assets/
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from jobs.errors import SpecError
from jobs.history import History
from jobs.verdict import Verdict
from reports import charts
from reports.escape import slug
from reports.index import Entry, entry_of, question_of, standing
from reports.render.folder import Behind, remove_ours, remove_pages, write_assets, write_pages
from reports.render.pages import Links, Turn, index_page, scenario_page, shown_first
from reports.view import SweepView

INDEX: Final = "index.html"
LISTED_SWEEPS: Final = 100
SCENARIO_PAGES: Final = 40
SCENARIO_BYTES: Final = 10_000_000
"""Sweeps on a page of the index; most scenarios that a sweep's writing brings up to date, worst first, and bytes."""

_ENTRY: Final = "entry.json"
_SCHEMA: Final = "assay.entry/1"
_PLAIN_ID: Final = re.compile(r"swp_[0-9a-z]{26}")


def write_sweep(out: Path, verdict: Verdict, behind: Behind, *, manifest_digest: str, store: str = "") -> Path:
    """Write the pages of a sweep and of its scenarios into a folder of sweeps; the path of the sweep's own.

    The index is `write_index`'s. Raises OSError.
    """
    remove_pages(out)  # of a form where a folder held one sweep
    folder = out / "sweeps" / _folder_of(verdict.stamp.sweep_id)
    remove_pages(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_assets(out)
    view = SweepView(verdict, store)
    scenarios = _write_scenarios(out, shown_first(view)[:SCENARIO_PAGES], behind.histories)
    links = Links(
        root="../../",
        index=f"../../{INDEX}",
        scenario=lambda name: f"../../scenarios/{scenarios[name]}" if name in scenarios else "",
    )
    page = write_pages(view, folder, behind, links)
    told = {"schema": _SCHEMA, **asdict(entry_of(verdict, question_of(verdict, manifest_digest)))}
    (folder / _ENTRY).write_text(json.dumps(told, separators=(",", ":")) + "\n", encoding="utf-8")
    return page


def write_index(out: Path) -> Path:
    """Write the index of the sweeps whose pages stand in a folder; its path.

    Raises SpecError for an entry that cannot be read.
    """
    there = standing(entries(out))
    remove_ours((out / INDEX, *out.glob("index-*.html")))
    count = max(1, -(-len(there) // LISTED_SWEEPS))
    names = [INDEX, *(f"index-{place + 1}.html" for place in range(1, count))]
    links = Links(sweeps=lambda sweep_id: f"sweeps/{_folder_of(sweep_id)}/index.html")
    for place, name in enumerate(names):
        part = there[place * LISTED_SWEEPS : (place + 1) * LISTED_SWEEPS]
        turn = Turn(names[place - 1] if place else "", names[place + 1] if place + 1 < count else "")
        (out / name).write_text(index_page(part, links, total=len(there), turn=turn), encoding="utf-8")
    return out / INDEX


def entries(out: Path) -> tuple[Entry, ...]:
    """What the index says of each sweep whose pages stand in a folder. Raises SpecError for one that is damaged."""
    found = []
    for path in sorted((out / "sweeps").glob(f"*/{_ENTRY}")):
        try:
            found.append(_entry(path.read_text(encoding="utf-8")))
        except ValueError as error:
            remedy = "write that sweep's pages again, or remove its folder"
            raise SpecError(f"{path} is no entry of an index: {error}", remedy) from error
    return tuple(found)


def has_sweeps(out: Path) -> bool:
    """Whether pages of sweeps stand in a folder, each in a folder of its own."""
    return any((out / "sweeps").glob(f"*/{_ENTRY}"))


def _write_scenarios(out: Path, cells: list[str], histories: Callable[[str], Sequence[History]]) -> dict[str, str]:
    """File names of the scenarios' pages by cell; a cell that measured no series has none."""
    (out / "scenarios").mkdir(exist_ok=True)
    links = Links(root="../", index=f"../{INDEX}", sweeps=lambda sweep_id: _sweep_link(out, sweep_id))
    written: dict[str, str] = {}
    left = SCENARIO_BYTES
    for cell in cells:
        found = histories(cell)
        if not found:
            continue
        page = scenario_page(charts.build(cell, found), links).encode()
        left -= len(page)
        if left < 0:
            break
        written[cell] = f"{_scenario_name(cell, found[0])}.html"
        (out / "scenarios" / written[cell]).write_bytes(page)
    return written


def _scenario_name(cell: str, measured: History) -> str:
    """By name, and by what else must be equal for a history: cells of two stores may share a name alone."""
    kept = slug(f"{cell}\n{measured.model_digest}\n{measured.prompt_digest}\n{measured.card}").rpartition("-")[2]
    return f"{slug(cell).rpartition('-')[0]}-{kept}"


def _sweep_link(out: Path, sweep_id: str) -> str:
    """From a scenario's page to a sweep's, where it stands in the folder."""
    name = _folder_of(sweep_id)
    return f"../sweeps/{name}/index.html" if (out / "sweeps" / name).is_dir() else ""


def _folder_of(sweep_id: str) -> str:
    return sweep_id if _PLAIN_ID.fullmatch(sweep_id) else slug(sweep_id)


def _entry(text: str) -> Entry:
    raw = json.loads(text)
    if not isinstance(raw, dict) or raw.pop("schema", None) != _SCHEMA:
        raise ValueError(f"its schema is not {_SCHEMA}")
    known = {field.name: field for field in fields(Entry)}
    if unknown := sorted(set(raw) - set(known)):
        raise ValueError(f"unknown fields: {', '.join(unknown)}")
    try:
        return Entry(**{name: _tuples(value) for name, value in raw.items()})
    except TypeError as error:
        raise ValueError(str(error)) from error


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
