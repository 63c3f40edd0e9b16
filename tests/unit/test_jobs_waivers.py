"""Waivers: what is accepted for a time stays in sight, and nothing else is accepted with it."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import Gate, JudgeInput
from jobs.reviewed import Reviewed, Waiver
from jobs.verdict import Verdict
from reports.render import render

TODAY = "2026-12-01T09:00:00+00:00"
SEGMENTS = Waiver(
    cell="smollm2/*", metric="segments", outcome="REGRESSED", reason="the driver splits the graph",
    evidence="https://example.org/4711", written=date(2026, 11, 2), expires=date(2026, 12, 31), by="Ada",
)  # fmt: skip


def judged(doc: JudgeInput, *waivers: Waiver, today: str = TODAY, proposed: bool = False, **manifest: Any) -> Verdict:
    reviewed = Reviewed(at="c" * 40, **{"proposed_waivers" if proposed else "waivers": waivers})
    asked = doc.manifest.model_copy(update={"reviewed": reviewed, **manifest})
    stamp = doc.stamp.model_copy(update={"created_at": today})
    verdict = judge(doc.model_copy(update={"manifest": asked, "stamp": stamp}))
    assert isinstance(verdict, Verdict)
    assert Verdict.model_validate_json(verdict.canonical()) == verdict
    return verdict


def more_segments(documents: Any, **changes: int) -> JudgeInput:
    doc: JudgeInput = documents.sweep(head=documents.stable_arm(changes={"segments": 2, **changes}))
    return doc


def test_a_waived_finding_costs_nothing_and_is_shown_with_its_evidence(documents: Any) -> None:
    verdict = judged(more_segments(documents), SEGMENTS)
    assert (verdict.outcome, verdict.exit_code, verdict.cells[0].outcome) == ("WAIVED", 0, "WAIVED")
    (finding,) = verdict.findings
    assert (finding.was, finding.waiver, finding.metric) == ("REGRESSED", SEGMENTS.id, "segments")
    for form in ("comment", "html", "text", "json"):
        text = " ".join(render(verdict, form).split())
        assert "segments rose by 1" in text, form
        assert "waived as REGRESSED until 2026-12-31" in text, form
        assert "example.org/4711" in text, form
    assert "🟡 **regressed, waived**" in render(verdict, "comment")
    (row,) = verdict.reviewed
    assert (row.kind, row.state, row.cells) == ("waiver", "used", (verdict.cells[0].cell,))
    assert next(row for row in verdict.cells[0].exact if row.metric == "segments").note.endswith("waived")
    assert verdict.notes == ()


@pytest.mark.parametrize(
    "other",
    [{"metric": "fallbacks"}, {"cell": "qwen/*"}, {"outcome": "VIOLATION", "metric": "*"}, {"metric": "tokens"}],
)
def test_a_waiver_of_another_scope_waives_nothing_and_is_said_to_be_unused(
    documents: Any, other: dict[str, str]
) -> None:
    verdict = judged(more_segments(documents), SEGMENTS.model_copy(update=other))
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    (note,) = verdict.notes
    assert note.startswith("The waiver of ") and " was not used: " in note
    assert note in " ".join(render(verdict, "text").split())


def test_a_finding_beside_the_waived_one_still_counts(documents: Any) -> None:
    verdict = judged(more_segments(documents, fallbacks=1), SEGMENTS)
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    assert "fallbacks" in verdict.headline
    assert [one.outcome for one in verdict.findings] == ["REGRESSED", "WAIVED"]


@pytest.mark.parametrize(
    ("today", "state", "why"),
    [
        ("2026-12-31T23:59:59+00:00", "used", ""),
        ("2027-01-01T00:00:00+00:00", "expired", "it expired on 2026-12-31"),
        ("2026-11-02T00:00:00+00:00", "used", ""),
        ("2026-11-01T23:59:59+00:00", "not in force", "it is dated 2026-11-02, after the sweep"),
        ("", "not in force", "it is not known on which day"),
    ],
)
def test_a_waiver_counts_from_its_day_to_its_last_one(documents: Any, today: str, state: str, why: str) -> None:
    verdict = judged(more_segments(documents), SEGMENTS, today=today)
    (row,) = verdict.reviewed
    assert (row.state, why in row.why) == (state, True)
    assert verdict.exit_code == (0 if state == "used" else 1)
    assert bool(verdict.notes) is (state != "used")


def test_a_waiver_of_the_change_itself_does_not_count_and_is_said(documents: Any) -> None:
    verdict = judged(more_segments(documents), SEGMENTS, proposed=True)
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    (row,) = verdict.reviewed
    assert row.state == "not in force"
    assert "a change cannot waive what it does itself" in " ".join(render(verdict, "comment").split())


def test_waived_tokens_leave_the_counters_of_other_work_open(documents: Any) -> None:
    tokens = SEGMENTS.model_copy(update={"metric": "tokens", "outcome": "SHORT"})
    short = documents.stable_arm(ids=lambda _run, _generation: documents.IDS[:9], stop=lambda _r, _g: "eos")
    doc = documents.sweep(head=short)
    plain = judged(doc)
    assert (plain.outcome, plain.exit_code) == ("SHORT", 1)
    assert "MISSING" not in {one.outcome for one in plain.findings}
    verdict = judged(doc, tokens)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3), "lengths differ, so nothing is known of counters"
    assert "WAIVED" in {one.outcome for one in verdict.findings}
    assert judged(doc, tokens, gate=Gate(exact="off")).outcome == "WAIVED"


def test_wrong_ids_can_be_waived_by_their_class_alone(documents: Any) -> None:
    def wrong(_run: int, _generation: int) -> tuple[int, ...]:
        return (*documents.IDS[:7], 9, *documents.IDS[8:])

    doc = documents.sweep(head=documents.stable_arm(ids=wrong, gap=5.0), base=documents.arm(gap=5.0))
    waiver = SEGMENTS.model_copy(update={"metric": "tokens", "outcome": "VIOLATION"})
    verdict = judged(doc, waiver)
    assert (verdict.outcome, verdict.exit_code) == ("WAIVED", 0)
    assert "VIOLATION" in {row.klass for row in verdict.cells[0].identity}, "the row says what was found"
    assert not any(row.klass == "improved" for row in verdict.cells[0].exact)


@pytest.mark.parametrize("outcome", ["MISSING", "VACUOUS"])
def test_what_proves_nothing_is_not_waived(documents: Any, outcome: str) -> None:
    """The file is refused for it; a document that holds one all the same waives nothing."""
    doc = documents.sweep(head=documents.stable_arm(changes={"htod_bytes": None}))
    if outcome == "VACUOUS":
        doc = documents.sweep(head=documents.arm(counters=documents.resident))
    verdict = judged(doc, SEGMENTS.model_copy(update={"metric": "*", "outcome": outcome}))
    assert (outcome in {one.outcome for one in verdict.findings}, verdict.exit_code != 0) == (True, True)


def test_base_that_does_not_repeat_itself_is_not_waived(documents: Any) -> None:
    unsteady = documents.arm(by_run=lambda run: {"segments": 1 + run % 2})
    waiver = SEGMENTS.model_copy(update={"outcome": "NONDETERMINISTIC", "metric": "*"})
    assert judged(documents.sweep(base=unsteady), waiver).exit_code == 3
    head = documents.stable_arm(by_run=lambda run: {"segments": 1 + run % 2})
    assert judged(documents.sweep(head=head), waiver).outcome == "WAIVED"


def test_what_costs_nothing_needs_no_waiver(documents: Any) -> None:
    verdict = judged(more_segments(documents), SEGMENTS, gate=Gate(exact="advise"))
    assert verdict.outcome == "REGRESSED"
    (row,) = verdict.reviewed
    assert (row.state, row.why) == ("unused", "what it would waive costs nothing here")


def test_a_time_that_is_worse_can_be_waived(documents: Any) -> None:
    slow = documents.stable_arm(step_ns=lambda block, run: 30_000_000 + 1000 * block + run)
    doc = documents.sweep(head=slow, cell={"blocks": 12}, gate=Gate(time="block"))
    assert judged(doc).outcome == "TIME_WORSE"
    waiver = SEGMENTS.model_copy(update={"outcome": "TIME_WORSE", "metric": "decode_ms_per_token"})
    verdict = judged(doc, waiver)
    assert [one.outcome for one in verdict.findings if one.metric == "decode_ms_per_token"] == ["WAIVED"]


def test_documents_without_reviewed_files_are_written_as_before(documents: Any) -> None:
    doc = more_segments(documents)
    assert "reviewed" not in doc.manifest.canonical()
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    text = verdict.canonical()
    assert '"reviewed"' not in text and '"waiver"' not in text and '"was"' not in text


@pytest.mark.parametrize(
    ("end", "waived"),
    [
        ("crash: ended by signal 11", {"outcome": "REGRESSED", "metric": "*"}),
        ("non_finite: NaN at layer 3", {"outcome": "VIOLATION", "metric": "tokens"}),
    ],
)
def test_a_waived_end_of_all_runs_leaves_nothing_proven(documents: Any, end: str, waived: dict[str, str]) -> None:
    doc = documents.sweep(head=documents.stable_arm(fact=documents.lost("failed", end)))
    verdict = judged(doc, SEGMENTS.model_copy(update=waived))
    assert [(one.outcome, one.exit_code) for one in verdict.findings] == [("MISSING", 3), ("WAIVED", 0)]
    assert "none is left to compare with base" in verdict.headline


def test_a_waived_end_of_one_run_leaves_the_others_to_compare(documents: Any) -> None:
    lost = documents.lost("failed", "crash: ended by signal 11")
    doc = documents.replace_runs(
        documents.sweep(),
        lambda run: run.model_copy(update=lost) if (run.arm, run.position) == ("head", 2) else run,
    )
    assert judged(doc).outcome == "REGRESSED"
    assert judged(doc, SEGMENTS.model_copy(update={"metric": "*"})).outcome == "WAIVED"


@pytest.mark.parametrize(("meets", "outcome", "exit_code"), [(True, "WAIVED", 0), (False, "VIOLATION", 1)])
def test_that_ids_waver_can_be_waived_and_that_none_is_base_s_cannot(
    documents: Any, meets: bool, outcome: str, exit_code: int
) -> None:
    def wavering(run: int, _generation: int) -> tuple[int, ...]:
        return documents.IDS if meets and run == 1 else (*documents.IDS[:3], 9 + run, *documents.IDS[4:])

    doc = documents.sweep(head=documents.stable_arm(ids=wavering), base=documents.arm(gap=5.0), cell={"blocks": 4})
    assert judged(doc).outcome == "NONDETERMINISTIC"
    verdict = judged(doc, SEGMENTS.model_copy(update={"metric": "tokens", "outcome": "NONDETERMINISTIC"}))
    assert (verdict.outcome, verdict.exit_code) == (outcome, exit_code)
    if not meets:
        assert "in none of 8 runs is generation 1 what it is in base" in verdict.headline
