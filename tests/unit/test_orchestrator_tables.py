"""Tables on a terminal, whole at any width, and the counters that turned a cell red beside them."""

from __future__ import annotations

import os
import pty
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import Lock
from jobs.verdict import CellVerdict, Finding, MetricRow, Verdict
from orchestrator.commands.terminal import say_table
from orchestrator.summary import tables
from reports.render import render

HEADINGS = ("arm", "bytes a token", "what")
ROWS = (("base", "111,617,280", "x" * 30), ("head", "91,006,080", "y" * 30))


def printed(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    """What stands on a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    ours, terminals = pty.openpty()
    with os.fdopen(terminals, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        say_table("cells", HEADINGS, ROWS)
        monkeypatch.undo()
    found = b""
    with (
        suppress(OSError),
        os.fdopen(ours, "rb", buffering=0) as reader,
    ):  # a terminal that nobody writes to is an error
        while part := reader.read(65536):
            found += part
    return found.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [30, 50, 80, 300])
def test_no_cell_is_lost_on_a_terminal_of_any_width(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    text = printed(monkeypatch, columns)
    for cell in (*HEADINGS, *(cell for row in ROWS for cell in row)):
        assert cell in text
    assert ("  what           " + "x" * 30 in text) is (columns < 60), "a line for each cell where a row has no room"


def test_without_a_terminal_a_table_is_as_wide_as_it_needs_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (("a" * 250, "1", "2"),)
    say_table("cells", HEADINGS, rows)
    assert "a" * 250 in capsys.readouterr().out


def metric(name: str, klass: str, *, gating: bool) -> MetricRow:
    fields = {"metric": name, "unit": "count", "direction": "lower", "gating": gating, "class": klass}
    return MetricRow.model_validate({**fields, "base": 1200, "head": 1500, "delta": 300})


def test_an_arm_whose_ids_break_a_lock_is_not_called_ok(documents: Any) -> None:
    """Base and head agree, so that no comparison differs: the lock alone says that both are wrong."""
    doc = documents.sweep(cell={"locks": (Lock(prompt="capital", index=0, expected=1),)})
    verdict = judge(doc)
    assert isinstance(verdict, Verdict) and verdict.outcome == "VIOLATION"
    [table] = tables(verdict)
    assert [row[2] for row in table.rows] == ["VIOLATION"] * 3
    text = " ".join(render(verdict, "text").split())
    assert text.count("VIOLATION") > 3 and "head VIOLATION" in text and "base VIOLATION" in text
    assert "wrong: base gives id" in text and "Identical in all" in text
    clean = judge(documents.sweep())
    assert isinstance(clean, Verdict)
    assert [row[2] for row in tables(clean)[0].rows] == ["ok"] * 3


def test_the_counters_that_turned_a_cell_red_are_named() -> None:
    exact = (
        metric("vmm_calls_steady", "regressed", gating=True),
        metric("segments", "varies", gating=True),
        metric("hits", "regressed", gating=False),
        metric("fallbacks", "same", gating=True),
    )
    cell = CellVerdict(cell="c", outcome="REGRESSED", exit_code=1, model="m", prompt="p", arms=(), exact=exact)
    fields = {"sweep": "s", "outcome": "REGRESSED", "exit_code": 1, "headline": "h", "next_step": "n"}
    verdict = Verdict.model_construct(**fields, cells=(cell,))  # type: ignore[arg-type]
    [table] = tables(verdict)
    assert table.worse == ("worse: vmm_calls_steady 1,200 -> 1,500", "varies: segments 1,200 -> 1,500")


class Counted(list[Finding]):
    """Findings that count how often somebody goes through them."""

    passes = 0

    def __iter__(self) -> Iterator[Finding]:
        self.passes += 1
        return super().__iter__()


def test_findings_are_gone_through_once_for_all_cells_of_a_table(documents: Any) -> None:
    ids = documents.IDS
    verdict = judge(documents.sweep(head=documents.stable_arm(ids=lambda _r, _g: (*ids[:-1], 9), gap=0.9)))
    assert isinstance(verdict, Verdict)
    findings = Counted(verdict.findings)
    many = verdict.model_copy(update={"cells": verdict.cells * 20, "findings": findings})
    made = tables(many)
    assert len(made) == 20
    assert all("VIOLATION" in str(table.rows) for table in made)
    assert findings.passes == 1
