"""How long the pages of ten thousand cells take to write, how large they are, and when a browser first paints them.

The store is that of `judge_cells`, its sweep judged. `assay report --format html --out` is timed from its start to its
exit. Each page is then opened from disk in a fresh Chromium, and the time of its first contentful paint taken from the
browser's own clock: median of several, without the browser's start.

    python -m benchmarks.site_cells [--cells N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.judge_cells import CELLS, command, fill
from benchmarks.sim_decode import host_facts

PAINTS = 5
PAINTED = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)"


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ab-") as folder:
        url, site = f"sqlite:///{folder}/store.db", Path(folder, "site")
        fill(url, arguments.cells)
        rows = [command(url, "assay judge", "judge")]
        rows.append(command(url, "assay report", "report", "--format", "html", "--out", str(site)))
        files = [path for path in site.rglob("*") if path.is_file()]
        written = {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
        pages = [paint(kind, page) for kind, page in first_pages(site).items()]
    record = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": host_facts(),
        "load_average": os.getloadavg(),
        "cells": arguments.cells,
        "rows": rows,
        "written": written,
        "pages": pages,
    }
    document = json.dumps(record, indent=1)
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


def first_pages(site: Path) -> dict[str, Path]:
    """One page of each kind."""
    (sweep,) = (site / "sweeps").iterdir()
    return {
        "index": site / "index.html",
        "sweep": sweep / "index.html",
        "cell": min((sweep / "cells").iterdir()),
        "list of cells": sweep / "cells-1.html",
        "scenario": min((site / "scenarios").iterdir()),
    }


def paint(kind: str, page: Path) -> dict[str, Any]:
    """Milliseconds from the navigation's start to the first contentful paint; none where there is no browser."""
    chromium = shutil.which("chromium")
    told: dict[str, Any] = {"page": kind, "bytes": page.stat().st_size}
    if chromium is None:
        return {**told, "first_paint_ms": None}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        taken = []
        for _ in range(PAINTS):
            context = browser.new_context(viewport={"width": 1280, "height": 900})
            tab = context.new_page()
            tab.goto(page.as_uri())
            while not (painted := tab.evaluate(PAINTED)):  # a page's policy lets in no function to wait for
                tab.wait_for_timeout(20)
            taken += painted
            context.close()
        version = browser.version
        browser.close()
    told |= {"first_paint_ms": round(statistics.median(taken)), "slowest_ms": round(max(taken))}
    return {**told, "chromium": version}


if __name__ == "__main__":
    main()
