"""How long a comment over ten thousand cells takes to render, where all cells are better and where all are worse.

A cell is that of `judge_cells`: 42 rows of metrics, 20 equations, two arms. Where all are worse, every gating row that
moved reads regressed and every cell has its finding, so that all of them have to be put in order. Timed are a comment
at GitHub's limit, one that has to be cut down to 2,500 characters, and text and JUnit XML beside them.

    python -m benchmarks.comment_cells [--cells N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.judge_cells import CELLS, judged, sweep, timed
from benchmarks.sim_decode import host_facts
from jobs.verdict import CellVerdict, Finding, Verdict
from reports.render import COMMENT_LIMIT, Form, comment_length, render

SHORT = 2_500
FORMS: tuple[tuple[str, Form, int | None], ...] = (
    ("comment", "comment", COMMENT_LIMIT),
    ("comment, shortened", "comment", SHORT),
    ("text", "text", None),
    ("JUnit XML", "junit", None),
)


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=CELLS)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    better = judged(sweep(arguments.cells))
    record = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": host_facts(),
        "load_average": os.getloadavg(),
        "cells": arguments.cells,
        "rows": [
            {"sweep": name, "form": form, **measured(verdict, kind, limit)}
            for name, verdict in (("all better", better), ("all worse", worse(better)))
            for form, kind, limit in FORMS
        ],
    }
    document = json.dumps(record, indent=1)
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


def measured(verdict: Verdict, form: Form, limit: int | None) -> dict[str, Any]:
    """Seconds, memory, and how long the text is."""
    made: list[str] = []
    took = timed(lambda: made.append(render(verdict, form, limit=limit)))
    assert limit is None or comment_length(made[0]) <= limit
    return {**took, "characters": len(made[0])}


def worse(verdict: Verdict) -> Verdict:
    """The same figures with base and head changed over."""
    cells = tuple(map(_worse, verdict.cells))
    findings = tuple(
        Finding(outcome="REGRESSED", cell=cell.cell, arm="head", message=f"htod_bytes rose in {cell.cell}",
                remedy="Find what streams that did not.", exit_code=1, gate="exact", metric="htod_bytes")
        for cell in cells
    )  # fmt: skip
    changes = {"outcome": "REGRESSED", "exit_code": 1, "cells": cells, "findings": findings}
    return verdict.model_copy(update=changes)


def _worse(cell: CellVerdict) -> CellVerdict:
    exact = tuple(
        row.model_copy(update={"base": row.head, "head": row.base, "klass": "regressed"})
        if row.klass == "improved"
        else row
        for row in cell.exact
    )
    return cell.model_copy(update={"outcome": "REGRESSED", "exit_code": 1, "exact": exact})


if __name__ == "__main__":
    main()
