"""A build that failed, as each form shows it: the reason, what to do, the end of its log, no secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import BuildFailure, BuildPlan, JudgeInput
from jobs.verdict import Verdict
from reports.render import COMMENT_FLOOR, render
from tests.unit.report_pages import write_html
from tests.unit.reports_parsing import Page, markdown

LOG = "\n".join(
    [
        *(f"compiling {number}" for number in range(30)),
        "<script>alert(1)</script> ``` @octocat",
        "GITHUB_TOKEN=hunter2hunter2",
        "fast.c:3: error: expected ';'",
        "make: *** [fast.o] Error 1",
    ]
)


@pytest.fixture
def doc(documents: Any) -> JudgeInput:
    failure = BuildFailure(reason="exit 2: make: *** [fast.o] Error 1", log_tail=LOG)
    build = BuildPlan(command="make", outputs=("fast.so",), failure=failure)
    head = documents.stable_arm(
        plan={"build": build, "tree_digest": ""}, fact={"state": "exhausted", "attempts": (), "record": None}
    )
    found: JudgeInput = documents.sweep(head=head)
    return found


@pytest.fixture
def verdict(doc: JudgeInput) -> Verdict:
    found = judge(doc)
    assert isinstance(found, Verdict)
    return found


def test_each_form_shows_the_reason_and_the_end_of_the_log(verdict: Verdict, doc: JudgeInput, tmp_path: Path) -> None:
    forms = {
        "comment": markdown(render(verdict, "comment")).text,
        "page": Page(render(verdict, "html")).text,
        "folder": Page(write_html(verdict, tmp_path, doc=doc).read_text()).text,
        "text": render(verdict, "text"),
    }
    for name, form in forms.items():
        assert "BUILD_FAILED" in form, name
        assert "exit 2: make: *** [fast.o] Error 1" in " ".join(form.split()), name
        assert "fast.c:3: error: expected ';'" in form, name
        assert "The log of head ends:" in form, name
        assert "hunter2" not in form, name
        assert "build's log names" in " ".join(form.split()), name
    kept = json.loads(render(verdict, "json"))["findings"][0]["log"]
    assert kept == LOG.replace("hunter2hunter2", "[redacted]")


def test_a_log_can_neither_inject_nor_break_its_block(verdict: Verdict) -> None:
    page = render(verdict, "html")
    assert "<script>alert" not in page
    shown = markdown(render(verdict, "comment"))
    assert "``` @octocat" in shown.text, "the line stands inside the block, which its ticks do not end"


def test_one_log_is_shown_once_for_all_cells(verdict: Verdict) -> None:
    (finding,) = verdict.findings
    many = tuple(finding.model_copy(update={"cell": f"cell {number}"}) for number in range(5))
    text = render(verdict.model_copy(update={"findings": many}), "text")
    assert text.count("The log of head ends:") == 1


@pytest.mark.parametrize("limit", [COMMENT_FLOOR, 1500, 3000, 6000])
def test_a_comment_with_a_log_still_fits(verdict: Verdict, limit: int) -> None:
    body = render(verdict, "comment", limit=limit)
    assert len(body.encode("utf-16-le")) // 2 <= limit
    assert "BUILD_FAILED" in body


def test_the_way_to_run_it_by_hand_is_not_that_of_the_installed_engine(
    verdict: Verdict, doc: JudgeInput, tmp_path: Path
) -> None:
    write_html(verdict, tmp_path, doc=doc)
    (cell,) = (tmp_path / "cells").glob("*.html")
    text = Page(cell.read_text()).text
    assert "# head: build failed: exit 2" in text
    assert text.count("assay engine run") == 2, "of base and null only"
