"""What arms lose to their cards: told by arm, warned of where it is unequal, and never read as a time of zero."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import AttemptFact, Certificate, Gate, JudgeInput, RunFact
from jobs.verdict import TimeRow, Verdict
from reports.render import render

TIME = "decode_ms_per_token"


def verdict_of(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    return verdict


def losing(documents: Any, spoiled: dict[str, int], cell: Any = None) -> JudgeInput:
    """A sweep in which the first runs of each arm were first tried `spoiled` times on a contended card."""
    left = dict(spoiled)

    def change(run: RunFact) -> RunFact:
        if not left.get(run.arm):
            return run
        left[run.arm] -= 1
        first = AttemptFact(attempt_id=f"att_{run.run_id}", number=0, state="contaminated", reason="card contended")
        return run.model_copy(update={"attempts": (first, *run.attempts)})

    doc: JudgeInput = documents.replace_runs(documents.sweep(cell=cell), change)
    assert not any(left.values())
    return doc


def hot(documents: Any) -> Certificate:
    return Certificate(
        uuid="SIM-0", card="c", driver="d", verdict="throttled", grade="pids", reasons=("heat",), **documents.WATCHED
    )


def throttled(documents: Any, which: Callable[[RunFact], bool], **sweep: Any) -> Verdict:
    """A sweep in which the runs that `which` picks ran on a slowed card."""

    def change(run: RunFact) -> RunFact:
        assert run.record is not None
        slowed = run.record.model_copy(update={"certificate": hot(documents)})
        return run.model_copy(update={"record": slowed}) if which(run) else run

    return verdict_of(documents.replace_runs(documents.sweep(**sweep), change))


def time_row(verdict: Verdict) -> TimeRow:
    return next(row for row in verdict.cells[0].time if row.metric == TIME)


@pytest.mark.parametrize(("base", "head"), [(0, 1), (1, 0), (1, 2)])
def test_unequal_loss_is_a_warning_with_both_counts_and_leaves_the_outcome(
    documents: Any, base: int, head: int
) -> None:
    doc = losing(documents, {"base": base, "head": head, "null": base})
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("IMPROVED", 0)
    counts = {"base": (base, 2 + base), "head": (head, 2 + head)}
    said = {
        arm: f"{arm} lost {lost} of {tried} attempts to its card ({lost} contaminated, 0 throttled)"
        for arm, (lost, tried) in counts.items()
    }
    most, least = ("head", "base") if head > base else ("base", "head")
    begin = f"Unequal loss in {doc.manifest.cells[0].cell}: {said[most]}, and {said[least]}."
    assert [warning[: len(begin)] for warning in verdict.warnings][-1:] == [begin]
    assert {row.arm: (row.lost, row.attempts) for row in verdict.cells[0].losses}.items() >= counts.items()
    comment = render(verdict, "comment")
    for arm in ("base", "head"):
        lost, tried = counts[arm]
        assert f"{arm} lost {lost} of {tried} attempts to its card" in comment
    assert comment.index("Unequal loss") < comment.index("Over the link, a token")


def test_equal_loss_is_told_and_not_warned_of(documents: Any) -> None:
    verdict = verdict_of(losing(documents, {"base": 1, "head": 1, "null": 1}))
    assert verdict.warnings == ()
    assert [row.lost for row in verdict.cells[0].losses] == [1, 1, 1]
    assert "Unequal loss" not in render(verdict, "comment")


def test_a_verdict_without_loss_is_written_as_before(documents: Any) -> None:
    written = json.loads(verdict_of(documents.sweep()).canonical())
    assert "warnings" not in written and "losses" not in written["cells"][0]


def test_a_null_arm_that_lost_more_than_base_is_warned_of(documents: Any) -> None:
    (warning,) = verdict_of(losing(documents, {"null": 2})).warnings
    assert "null lost 2 of 4 attempts to its card (2 contaminated, 0 throttled), and base lost 0 of 2" in warning


def test_throttled_runs_count_as_lost_beside_contaminated_ones(documents: Any) -> None:
    verdict = throttled(documents, lambda run: run.arm == "head" and run.position < 3)
    (warning,) = verdict.warnings
    assert "head lost 1 of 2 attempts to its card (0 contaminated, 1 throttled), and base lost 0 of 2" in warning


def test_an_uncertified_record_counts_as_contaminated_once(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record={"certificate": None})))
    head = next(row for row in verdict.cells[0].losses if row.arm == "head")
    assert (head.attempts, head.contaminated, head.throttled) == (2, 2, 0)


@pytest.mark.parametrize("arm", ["base", "head"])
def test_field_19_an_arm_that_was_throttled_out_has_no_time_and_a_time_gate_stays_open(
    documents: Any, arm: str
) -> None:
    verdict = throttled(
        documents, lambda run: run.arm == arm, cell={"blocks": 4}, gate=Gate(identity="block", time="block")
    )
    row = time_row(verdict)
    assert (row.klass, row.blocks) == ("THROTTLED_OUT", 0)
    assert row.note == f"no block holds both arms; 0 of 8 runs of {arm} kept: 8 on a throttled card"
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert "throttled out" in render(verdict, "text")


def test_field_19_a_part_that_was_throttled_is_left_out_and_the_count_kept_is_told(documents: Any) -> None:
    every_second = throttled(documents, lambda run: run.arm == "head" and run.block % 2 == 0, cell={"blocks": 10})
    row = time_row(every_second)
    assert row.klass not in ("THROTTLED_OUT", "NO_VALID_SAMPLE", "NOT_MEASURED")
    assert row.blocks == 4  # 3, 5, 7 and 9: the first three screen
    assert "10 of 20 runs of head kept: 10 on a throttled card" in row.note
