"""A sweep's pages in a folder of their own, without a store: for tests of what stands on them."""

from __future__ import annotations

from pathlib import Path

from jobs.model import JudgeInput
from jobs.verdict import Verdict
from reports.render.folder import Behind, remove_pages, write_assets, write_pages
from reports.view import SweepView


def write_html(verdict: Verdict, folder: Path, *, doc: JudgeInput | None = None, store: str = "") -> Path:
    """Write them in place of those that are there; the path of index.html. `doc`: what stands behind the verdict."""
    remove_pages(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_assets(folder)
    return write_pages(SweepView(verdict, store), folder, None if doc is None else Behind(lambda _names: doc))
