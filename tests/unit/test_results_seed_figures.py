"""docs/results/seed-figures.md: each figure of the reports' tables, and where our comment shows it for the experiment.

What the page cites is looked up in comments that are rendered here: of the record of both sweeps at full size, and of
the reports' own figures put to the judge.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jobs.compare import MeasuredArm, Standing, exact_rows
from jobs.model import KeyBytes, SeamRow
from jobs.verdict import ArmView, CellVerdict, Verdict, WitnessRow
from reports.render import render
from tests.unit import reports_samples as samples
from tests.unit import test_jobs_bot_table as bot
from tests.unit import test_jobs_seeds as theirs
from tests.unit.reports_parsing import Page, markdown

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGE = RESULTS / "seed-figures.md"
ROLES = {"base": "base", "null": "null", "head": "head"}
PRINTED = (
    "70.16 %, 2.349 GB, 336, 11 %, 16.77 GB, 44.63 %, 1.05 GB, 49.9 MB, 7.8 MB, 1.158 GB, 90 %, 1.97×",  # attribution
    "16, 3, page_ins=3008, page_ins=0, [96347 … 752]",  # before and after
    "2, 0, 7,725,907,968, 7,726,753,178",  # gates
    "184, 183, 154, 153, 34, 30, 120, 13.415, 12.132, −9.6 %, 74.54, 82.43, +10.6 %",  # capture, in two steps
    "12.307, 11.959, −2.9 %, 81.26, 83.62, 33803, 46283, 0.0937",
    "37.12 µs, 52.89 µs, +42.5 %, 235.70 µs, 324.76 µs, 539.89 µs, 734.71 µs",  # the bot's three red rows
)
"""Figures of the reports' tables as they are printed there."""


@dataclass(frozen=True)
class Row:
    """A row of the page: a figure of theirs, what ours is, and where that stands."""

    figure: str
    theirs: str
    ours: str
    place: str


def rows() -> list[Row]:
    """Every row of the page's tables of four columns."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if len(cells) == 4 and "`" in cells[3]:
            found.append(Row(cells[0], cells[1], cells[2], cells[3].strip("`")))
    return found


def recorded(name: str) -> Verdict:
    """One of the two sweeps as its record has it: arms with their counters, and base against head."""
    record = json.loads((RESULTS / "seeds.json").read_text(encoding="utf-8"))[name]
    order = [arm for arm in ("base", "null", "lru", "size", "split", "pointwise", "head") if arm in record["arms"]]
    arms = tuple(_arm(arm, record["arms"][arm]) for arm in order)
    base, head = (
        MeasuredArm(arm.arm, (), arm.values) for arm in (arms[0], next(arm for arm in arms if arm.role == "head"))
    )
    ran = tuple(
        WitnessRow(expr="page_ins > 0", arm=arm.arm, holds=True, values={"page_ins": arm.values["page_ins"]})
        for arm in arms
    )
    cell = CellVerdict(
        cell=record["cell"], outcome=record["outcome"], exit_code=record["exit_code"], model="m", prompt="p", arms=arms,
        witnesses=ran, exact=exact_rows(base, head, record["cell"], (), Standing()),
    )  # fmt: skip
    return samples.verdict(sweep=name, cells=(cell,), gate={"identity": "off", "exact": "block", "time": "off"})


def _arm(name: str, record: dict[str, Any]) -> ArmView:
    seams = [
        SeamRow(step=n, node=seam["place"].replace("*", str(n)), op=seam["op"], reason=seam["reason"], path="eager")
        for seam in record["seams"]
        for n in range(seam["steps"])
    ]
    return ArmView(
        arm=name, role=ROLES.get(name, "variant"), source="checkout", config=record["config"], runs_expected=2,
        runs_complete=2, values=record["values"], facts=record["facts"], seams=tuple(seams),
        top_keys=tuple(KeyBytes(**key) for key in record["top_keys"]), crossings=tuple(record["crossings"]),
        card="sim-h200", uuid="SIM-0", certificates={"clear": 2},
    )  # fmt: skip


def timed(documents: Any, base_ns: int, head_ns: int) -> Verdict:
    """Two decode times of theirs, as if six blocks had measured them."""
    return theirs.verdict_of(
        documents.sweep(
            base=documents.arm(step_ns=lambda _block, _run: base_ns),
            head=documents.stable_arm(step_ns=lambda _block, _run: head_ns),
            cell={"blocks": 6},
        )
    )


def botched() -> Verdict:
    """The bot's table with the noise of its own runners, a cell a row, worst first as it printed them."""
    cells = tuple(
        samples.cell(
            cell=name, outcome="PASS", arms=(), exact=(), identity=(), witnesses=(), invariants=(),
            time=(bot.judged(base, head, [bot.NOISE, 1 / bot.NOISE] * 3),),
        )
        for name, base, head, _ in bot.printed()
    )  # fmt: skip
    return samples.verdict(sweep="bot", outcome="PASS", cells=cells, cells_expected=59, cells_judged=59)


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    """Comments as GitHub's parser reads them, by the name that the page gives them."""
    from tests.unit.conftest import Documents

    documents = Documents()
    made = {
        "residency": recorded("seed-residency"),
        "capture": recorded("seed-capture"),
        "refused": theirs.verdict_of(theirs.admission(documents, engaged=True)),
        "not engaged": theirs.verdict_of(theirs.admission(documents, engaged=False)),
        "tie": theirs.adjudicated(
            theirs.divergence(documents, theirs.CAPTURED, theirs.LISTED), theirs.CAPTURED, theirs.FP32_MARGIN
        ),
        "timed": timed(documents, 13_415_000, 12_132_000),
        "timed again": timed(documents, 12_307_000, 11_959_000),
        "bot": botched(),
    }
    return {name: markdown(render(verdict, "comment")) for name, verdict in made.items()}


def shown(page: Page, place: str) -> list[str]:
    """What stands at "table / row / column", of every row that begins so; or whether words stand there at all."""
    caption, _, rest = place.partition(" / ")
    if caption == "words":
        return [rest] if rest in " ".join(page.text.split()) else []
    table = page.table(caption)
    column = next(head for head in table.head if rest.endswith(f" / {head}"))
    row = rest.removesuffix(f" / {column}")
    at = table.head.index(column)
    return [cells[at] for cells in table.rows if row in (*cells[:2], f"{cells[1]} {cells[-1]}")]


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.place)
def test_each_figure_of_the_page_stands_where_it_says(pages: dict[str, Page], row: Row) -> None:
    name, _, place = row.place.partition(": ")
    assert row.ours in shown(pages[name], place), row


def test_every_figure_of_the_reports_tables_is_on_the_page() -> None:
    told = " | ".join(row.theirs for row in rows())
    for figure in [figure for line in PRINTED for figure in line.split(", ")]:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.])", told), figure


def test_the_record_and_the_page_are_of_the_sweeps_that_stand_in_the_repository() -> None:
    record = json.loads((RESULTS / "seeds.json").read_text(encoding="utf-8"))
    assert sorted(record) == ["seed-capture", "seed-residency"]
    for name in record:
        assert (RESULTS.parents[1] / "sweeps" / f"{name}.yaml").is_file()
