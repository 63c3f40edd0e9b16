"""What a comment over many cells costs: a bound at ten thousand, and in quick tests no more than in step with cells."""

from __future__ import annotations

import time

import pytest

from benchmarks.comment_cells import SHORT, worse
from benchmarks.judge_cells import judged, sweep
from jobs.verdict import Verdict
from reports.render import COMMENT_LIMIT, comment_length, render

MOST_S = 2.0
"""Processor seconds of a comment over ten thousand cells."""


def cpu_s(verdict: Verdict, limit: int = COMMENT_LIMIT) -> float:
    began_s = time.process_time()
    body = render(verdict, "comment", limit=limit)
    took_s = time.process_time() - began_s
    assert comment_length(body) <= limit and verdict.outcome in body
    return took_s


@pytest.mark.parametrize("of", [lambda verdict: verdict, worse], ids=["all better", "all worse"])
def test_eight_times_the_cells_cost_about_that_at_most(of: object) -> None:
    assert callable(of)
    few, many = of(judged(sweep(10))), of(judged(sweep(80)))
    cpu_s(few)  # imports, templates
    assert cpu_s(many) < 2 * 8 * cpu_s(few)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comment_over_ten_thousand_cells_takes_less_than_two_seconds() -> None:
    better = judged(sweep(10_000))
    cpu_s(judged(sweep(1)))  # imports, templates
    for verdict in (better, worse(better)):
        assert cpu_s(verdict) < MOST_S
        assert cpu_s(verdict, SHORT) < MOST_S
