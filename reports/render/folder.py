"""The pages of one sweep in a folder: written within bounds, known again, and removed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from jobs.history import History
from jobs.model import JudgeInput
from reports.escape import slug
from reports.evidence import anchors
from reports.render.environment import ASSETS, GENERATOR
from reports.render.pages import Links, cell_page, list_page, shown_first, sweep_page
from reports.view import SweepView, build_cell

CELL_PAGES: Final = 500
CELL_BYTES: Final = 20_000_000
LISTED_CELLS: Final = 500
"""Most pages of cells and their bytes, and cells on a page of the list: the worst come first."""

_AT_ONCE: Final = 20  # cells read together: bounds memory
_HEAD_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Behind:
    """What stands behind a verdict: the judge's input of some cells, and what a cell measured over sweeps."""

    cells: Callable[[Sequence[str]], JudgeInput]
    histories: Callable[[str], Sequence[History]] = lambda _cell: ()


def write_assets(out_dir: Path) -> None:
    """Put the style sheet, and script with its licence, where every page of a folder finds them."""
    (out_dir / "assets").mkdir(exist_ok=True)
    for source in ASSETS:
        shutil.copyfile(source, out_dir / "assets" / source.name)


def write_pages(view: SweepView, folder: Path, behind: Behind | None, links: Links | None = None) -> Path:
    """Write a sweep's pages into a folder that is there; the path of its own.

    `links`: where it stands among other sweeps. Cells have pages, worst first, as long as `CELL_PAGES` and `CELL_BYTES`
    allow; a list of all cells stands beside them where not all have one, or where they are many.
    """
    links = links or Links()
    (folder / "cells").mkdir(exist_ok=True)
    below = replace(links.deeper(), sweep="../index.html")
    names = shown_first(view)
    written = dict(_write_cells(view, folder, names[:CELL_PAGES], behind, below))
    is_long = len(names) > LISTED_CELLS or len(written) < len(names)
    own = replace(
        links,
        cell=lambda name: f"cells/{slug(name)}.html" if name in written else "",
        evidence=lambda name, anchor: f"cells/{slug(name)}.html#{anchor}" if anchor in written.get(name, ()) else "",
        cells=_list_name(0) if is_long else "",
    )
    if is_long:
        _write_list(view, folder, own)
    page = folder / "index.html"
    page.write_text(sweep_page(view, own), encoding="utf-8")
    return page


def _write_cells(
    view: SweepView, folder: Path, names: Sequence[str], behind: Behind | None, links: Links
) -> Iterator[tuple[str, frozenset[str]]]:
    """Cells whose pages were written, with the places on each."""
    cells = {cell.cell: cell for cell in view.cells}
    left = CELL_BYTES
    for start in range(0, len(names), _AT_ONCE):
        part = names[start : start + _AT_ONCE]
        doc = None if behind is None else behind.cells(part)
        places = {} if doc is None else {cell.plan.cell: anchors(cell) for cell in doc.cells if cell.plan.cell in part}
        for name in part:
            shown, here = build_cell(cells[name]), places.get(name, frozenset())
            page = cell_page(view, shown, doc, replace(links, evidence=_within(here))).encode()
            left -= len(page)
            if left < 0 and start:
                return
            (folder / "cells" / f"{shown.slug}.html").write_bytes(page)
            yield name, here


def _within(places: frozenset[str]) -> Callable[[str, str], str]:
    return lambda _cell, anchor: f"#{anchor}" if anchor in places else ""


def _write_list(view: SweepView, folder: Path, links: Links) -> None:
    count = -(-len(view.cells) // LISTED_CELLS)
    for place in range(count):
        part = view.cells[place * LISTED_CELLS : (place + 1) * LISTED_CELLS]
        page = list_page(view, part, replace(links, sweep="index.html"), place, [_list_name(at) for at in range(count)])
        (folder / _list_name(place)).write_text(page, encoding="utf-8")


def _list_name(place: int) -> str:
    return f"cells-{place + 1}.html"


def remove_pages(out_dir: Path) -> None:
    """Remove what was written of a sweep into a folder: pages by name and by what they say they are, and their assets.

    Any other file stays, and so does a folder that holds one. Raises OSError when a page cannot be removed.
    """
    if not remove_ours((out_dir / "index.html", *out_dir.glob("cells-*.html"), *(out_dir / "cells").glob("*.html"))):
        return
    for source in ASSETS:
        (out_dir / "assets" / source.name).unlink(missing_ok=True)
    for folder in (out_dir / "cells", out_dir / "assets"):
        remove_empty(folder)


def remove_ours(pages: Sequence[Path]) -> bool:
    """Remove those files that are ours; whether one was."""
    ours = [page for page in pages if page.is_file() and not page.is_symlink() and is_ours(page)]
    for page in ours:
        page.unlink()
    return bool(ours)


def remove_empty(folder: Path) -> None:
    """Remove a folder, unless another file is in it or it is not there."""
    with suppress(OSError):
        folder.rmdir()


def is_ours(report: Path) -> bool:
    """Whether a file says that it is a page, a comment or a verdict of ours. Raises OSError."""
    if report.suffix == ".json":  # sorted by name, so the word is not near the beginning
        return b'"schema":"assay.verdict/' in report.read_bytes()
    with report.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    return (GENERATOR if report.suffix == ".html" else "<!-- assay:").encode() in head
