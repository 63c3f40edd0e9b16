"""Declared changes without effect are said: those that base does not hold yet, and those that excused nothing."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import Gate, JudgeInput
from jobs.reviewed import Expectation
from jobs.verdict import Verdict
from reports.render import render

SEGMENTS = Expectation(metric="segments", change="higher", reason="the new op reads the host")


def judged(doc: JudgeInput, **manifest: Any) -> Verdict:
    verdict = judge(doc.model_copy(update={"manifest": doc.manifest.model_copy(update=manifest)}))
    assert isinstance(verdict, Verdict)
    assert Verdict.model_validate_json(verdict.canonical()) == verdict
    return verdict


def more_segments(documents: Any) -> JudgeInput:
    doc: JudgeInput = documents.sweep(head=documents.stable_arm(changes={"segments": 2}))
    return doc


def test_a_declaration_that_base_lacks_stays_regressed_and_names_the_way(documents: Any) -> None:
    verdict = judged(more_segments(documents), proposed=(SEGMENTS,))
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    assert "base's commit does not hold that yet" in verdict.headline
    assert "merge the declaration into base before the change" in verdict.next_step
    row = next(row for row in verdict.cells[0].exact if row.metric == "segments")
    assert (row.klass, "not in force" in row.note) == ("regressed", True)
    assert any("segments" in note and "not in force" in note for note in verdict.notes)
    for form in ("comment", "html", "text"):
        assert "is not in force" in " ".join(render(verdict, form).split()), form


def test_a_declaration_of_the_other_way_excuses_nothing_even_when_merged(documents: Any) -> None:
    lower = SEGMENTS.model_copy(update={"change": "lower"})
    verdict = judged(more_segments(documents), proposed=(lower,))
    assert "does not hold that yet" not in verdict.headline
    assert "merge the declaration" not in verdict.next_step


def test_with_a_git_ref_as_base_the_next_step_says_where_to_declare(documents: Any) -> None:
    doc = more_segments(documents)
    arms = tuple(a.model_copy(update={"source": "git:main"} if a.role == "base" else {}) for a in doc.manifest.arms)
    assert "declare it in the expectations file with a reason" in judged(doc, arms=arms).next_step
    on_disk = SEGMENTS.model_copy(update={"metric": "fallbacks", "self_declared": True})  # outside base's repository
    assert "which way it goes" not in judged(doc, arms=arms, expectations=(on_disk,)).next_step


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cell": "no such cell*"}, "no cell of this sweep has a name that it matches"),
        ({"metric": "no_such_metric"}, "no run of those cells has the metric"),
        ({"metric": "host_syncs"}, "the metric did not move there"),
        ({"change": "lower"}, "the metric did not move as declared there"),
    ],
)
def test_an_expectation_that_excused_nothing_is_named_with_the_reason(
    documents: Any, given: dict[str, str], why: str
) -> None:
    verdict = judged(more_segments(documents), expectations=(SEGMENTS.model_copy(update=given),))
    (note,) = verdict.notes
    assert note.endswith(f"was not used: {why}")
    assert given.get("metric", "segments") in note
    assert note in " ".join(render(verdict, "text").split()).replace("- ", "")


def test_what_base_declares_and_does_not_gate_neither_names_the_outcome_nor_reads_as_a_gain(documents: Any) -> None:
    """The file on disk is refused for it; base's may be older than that."""
    doc = documents.sweep(head=documents.stable_arm(changes={"segments": 2, "page_ins": 99}))
    page_ins = Expectation(metric="page_ins", reason="more keys")
    verdict = judged(doc, expectations=(page_ins,))
    row = next(row for row in verdict.cells[0].exact if row.metric == "page_ins")
    assert (row.klass, row.gating) == ("neutral", False)
    assert any(
        "page_ins" in note and note.endswith("was not used: it does not gate, so there is nothing to accept")
        for note in verdict.notes
    )
    assert not any(finding.outcome == "DECLARED" for finding in verdict.findings)


def test_a_declared_row_beside_a_worse_one_is_not_called_better(documents: Any) -> None:
    doc = documents.sweep(head=documents.stable_arm(changes={"segments": 2, "fallbacks": 1}))
    verdict = judged(doc, expectations=(SEGMENTS,))
    assert verdict.outcome == "REGRESSED"
    text = render(verdict, "html")
    assert "other rows that moved" in text and "that are better" not in text


def test_of_two_expectations_of_one_metric_only_the_first_is_used(documents: Any) -> None:
    second = SEGMENTS.model_copy(update={"change": "any"})
    verdict = judged(more_segments(documents), expectations=(SEGMENTS, second))
    assert verdict.outcome == "DECLARED"
    (note,) = verdict.notes
    assert "another expectation before it" in note


def test_a_used_expectation_leaves_no_note(documents: Any) -> None:
    verdict = judged(more_segments(documents), expectations=(SEGMENTS,))
    assert verdict.notes == ()
    assert '"notes"' not in verdict.model_dump_json().split('"blind_spots"')[1]


def of_this_change(**fields: Any) -> Expectation:
    return SEGMENTS.model_copy(update={"self_declared": True, "added": True, **fields})


def test_a_change_that_declares_itself_is_accepted_and_shown_as_its_own_word(documents: Any) -> None:
    verdict = judged(more_segments(documents), expectations=(of_this_change(),))
    assert (verdict.outcome, verdict.exit_code) == ("DECLARED", 0)
    assert "declared by this change: the new op reads the host" in verdict.headline
    (row,) = verdict.reviewed
    assert (row.kind, row.state, row.cells) == ("expectation", "used", (verdict.cells[0].cell,))
    assert "declared by this change" in render(verdict, "comment")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"metric": "host_syncs"}, "the metric did not move there (host_syncs did not move)"),
        ({"change": "lower"}, "the metric did not move as declared there (segments went from 1 to 2)"),
    ],
)
def test_a_claim_of_the_change_itself_that_does_not_come_true_is_a_finding(
    documents: Any, fields: dict[str, Any], why: str
) -> None:
    verdict = judged(more_segments(documents), expectations=(of_this_change(**fields),))
    (finding,) = [one for one in verdict.findings if one.outcome == "NOT_AS_DECLARED"]
    assert (finding.exit_code, finding.gate, why in finding.message) == (1, "exact", True)
    assert verdict.exit_code == 1
    advised = judged(more_segments(documents), expectations=(of_this_change(**fields),), gate=Gate(exact="advise"))
    assert advised.exit_code == 0
    older = SEGMENTS.model_copy(update=fields)
    notes = judged(more_segments(documents), expectations=(older,))
    assert not [one for one in notes.findings if one.outcome == "NOT_AS_DECLARED"], "base's word is a note alone"


def test_a_claim_about_another_sweeps_cells_or_an_absent_metric_is_a_note(documents: Any) -> None:
    for fields in ({"cell": "another*"}, {"metric": "replays", "cell": "another*"}):
        verdict = judged(more_segments(documents), expectations=(of_this_change(**fields), SEGMENTS))
        assert verdict.outcome == "DECLARED"
    gone = documents.sweep(head=documents.stable_arm(changes={"segments": None}))
    outcomes = {one.outcome for one in judged(gone, expectations=(of_this_change(),)).findings}
    assert "NOT_AS_DECLARED" not in outcomes and "MISSING" in outcomes


def test_more_than_declared_is_a_regression_with_both_figures(documents: Any) -> None:
    doc = documents.sweep(head=documents.stable_arm(changes={"segments": 4}))
    within = judged(doc, expectations=(SEGMENTS.model_copy(update={"at_most": 3}),))
    assert (within.outcome, within.exit_code) == ("DECLARED", 0)
    beyond = judged(doc, expectations=(SEGMENTS.model_copy(update={"at_most": 2}),))
    assert (beyond.outcome, beyond.exit_code) == ("REGRESSED", 1)
    assert "declared to move by 2 at most, moved by 3" in beyond.headline


def test_an_expectation_of_base_that_is_used_says_to_take_it_out(documents: Any) -> None:
    (row,) = judged(more_segments(documents), expectations=(SEGMENTS,)).reviewed
    assert "take it out once the change is merged" in row.why
