"""Pages in a folder: written, known again, and removed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from jobs.model import JudgeInput
from jobs.verdict import Verdict
from reports.escape import slug
from reports.render.environment import GENERATOR, style_sheet
from reports.render.pages import Links, cell_page, sweep_page
from reports.view import SweepView, build_cell

_HEAD_BYTES: Final = 4096


def write_html(verdict: Verdict, out_dir: Path, *, doc: JudgeInput | None = None, store: str = "") -> Path:
    """Write the page, one page a cell and the shared assets into `out_dir`; the path of index.html.

    With the judge's input `doc`, each cell's page goes on to its runs, samples, certificates, logs and token diff.
    """
    view = SweepView(verdict, store)
    remove_pages(out_dir)
    (out_dir / "cells").mkdir(parents=True, exist_ok=True)
    (out_dir / "assets").mkdir(exist_ok=True)
    (out_dir / "assets" / "report.css").write_text(style_sheet(), encoding="utf-8")
    own = Links(root="../", sweep="../index.html")
    for cell in view.cells:
        shown = build_cell(cell)
        (out_dir / "cells" / f"{shown.slug}.html").write_text(cell_page(view, shown, doc, own), encoding="utf-8")
    index = out_dir / "index.html"
    whole = Links(cell=lambda name: f"cells/{slug(name)}.html")
    index.write_text(sweep_page(view, whole), encoding="utf-8")
    return index


def remove_pages(out_dir: Path) -> None:
    """Remove what `write_html` put into a folder: pages by name and by what they say they are, and their style sheet.

    Any other file stays, and so does a folder that holds one. Raises OSError when a page cannot be removed.
    """
    pages = (out_dir / "index.html", *(out_dir / "cells").glob("*.html"))
    ours = [page for page in pages if page.is_file() and not page.is_symlink() and is_ours(page)]
    if not ours:
        return
    for page in ours:
        page.unlink()
    (out_dir / "assets" / "report.css").unlink(missing_ok=True)
    for folder in (out_dir / "cells", out_dir / "assets"):
        with suppress(OSError):  # another file is in it, or it is not there
            folder.rmdir()


def is_ours(report: Path) -> bool:
    """Whether a file says that it is a page, a comment or a verdict of ours. Raises OSError."""
    if report.suffix == ".json":  # sorted by name, so the word is not near the beginning
        return b'"schema":"assay.verdict/' in report.read_bytes()
    with report.open("rb") as stream:
        head = stream.read(_HEAD_BYTES)
    return (GENERATOR if report.suffix == ".html" else "<!-- assay:").encode() in head
