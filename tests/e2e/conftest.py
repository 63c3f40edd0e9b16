"""A browser and pages of reports, made once for all tests that look at pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit import reports_runs as runs
from tests.unit import reports_samples as samples
from tests.unit.report_pages import write_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MATRIX_NAME = "smollm2-135m/capital/weight_budget=3{}%/kv_layout=seq-major/policy=stable"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's chromium; tests that ask for it have the mark `browser`, and are skipped where there is none."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Pages by name: a good sweep, a broken one with its evidence, many cells, and hostile names."""
    root = tmp_path_factory.mktemp("site")
    hostile = "".join(samples.HOSTILE)[:380]
    made = {
        "good": write_html(samples.verdict(), root / "good", doc=runs.judge_input()),
        "broken": write_html(samples.broken(), root / "broken", doc=runs.judge_input()),
        "many": write_html(samples.many(9), root / "many", doc=runs.judge_input(word="cell 0")),
        "hostile": write_html(samples.hostile(hostile), root / "hostile", doc=runs.judge_input(word=hostile)),
        "matrix": write_html(samples.many(9, MATRIX_NAME), root / "matrix"),
        "long": write_html(samples.hostile("x" * 300), root / "long"),
    }
    cells = {f"{name} cell": next((index.parent / "cells").iterdir()) for name, index in made.items() if name != "good"}
    return made | cells
