"""One verdict where it is posted: comments of every length, check run and job's summary say what all forms say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from jobs.verdict import Verdict
from reports.publish import comment as posting
from reports.publish import summary
from reports.publish.api import GitHub
from reports.publish.check import Check, conclusion_of, put
from reports.publish.comment import Letter, PullRequest, post
from reports.render import COMMENT_FLOOR, marker, render
from reports.sections import headline
from reports.text import inline
from reports.view import SweepView
from tests.unit.fake_github import BOT, JOB_TOKEN, NEW, REPOSITORY, FakeGitHub
from tests.unit.reports_parsing import Page, markdown
from tests.unit.test_reports_forms import VERDICTS, read, worst

LIMITS: Final = (65_536, 12_000, 5_000, 2_000, 1_400, COMMENT_FLOOR)
SWEEP: Final = "swp_01jb9m3n4p5q6r7s8t9v0w1x2y"
EACH = pytest.mark.parametrize("name", VERDICTS)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGitHub]:
    monkeypatch.setattr(posting, "SETTLE_S", 0.0)
    with FakeGitHub() as fake:
        yield fake


def says_the_same(page: Page, verdict: Verdict, *, whole: bool = True) -> None:
    """Outcome and exit code always; counts, headline, next step and the worst rows unless it is but a pointer.

    However short, the rows that it has are the worst, in their order.
    """
    shown = " ".join(page.text.split())
    assert verdict.outcome in shown[:80]
    is_pointer = f"{verdict.outcome}, exit {verdict.exit_code}" in shown
    assert is_pointer or f"Exit code {verdict.exit_code}." in shown
    assert not (whole and is_pointer)
    if not is_pointer:
        for told in (inline(headline.counts(SweepView(verdict))), verdict.headline, verdict.next_step):
            assert told in shown
    rows, expected = read(page.tables), worst(SweepView(verdict))
    assert rows == (expected if whole else expected[: len(rows)])


@EACH
def test_a_comment_says_the_same_at_every_length(name: str) -> None:
    verdict, pages = VERDICTS[name], []
    for limit in LIMITS:
        pages.append(markdown(render(verdict, "comment", limit=limit)))
        says_the_same(pages[-1], verdict, whole=limit == LIMITS[0])
    lengths = [len(read(page.tables)) for page in pages]
    assert lengths == sorted(lengths, reverse=True), "a shorter one never has more"


@EACH
def test_what_is_posted_and_what_a_job_sums_up_say_the_same(server: FakeGitHub, name: str, tmp_path: Path) -> None:
    verdict = VERDICTS[name]

    def text(limit: int) -> str:
        return render(verdict, "comment", limit=limit)

    api = GitHub(server.url, JOB_TOKEN, sleep=lambda _: None, clock=lambda: 0.0)
    post(api, PullRequest(REPOSITORY, 7), Letter(SWEEP, NEW, marker(verdict), text))
    title = f"{verdict.outcome}: {verdict.headline}"
    put(api, Check(REPOSITORY, NEW, "assay", SWEEP, conclusion_of(verdict), title, text))
    api.close()
    summary.append(tmp_path / "step.md", text)
    (check,), (comment,) = server.checks, server.of(BOT)
    for body in (comment, check["output"]["summary"], (tmp_path / "step.md").read_text()):
        says_the_same(markdown(body), verdict)
    assert check["output"]["title"].startswith(verdict.outcome)
    passes = check["conclusion"] in ("success", "neutral")
    assert passes == (verdict.exit_code == 0), "what a branch rule lets through is what the exit code does"
