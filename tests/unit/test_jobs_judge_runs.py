"""What runs say by themselves: how they ended, whether they are complete, finite, closed, and what was planned."""

from __future__ import annotations

import math
from typing import Any

import pytest

from jobs.checks import invalid_figures
from jobs.judge import judge
from jobs.model import (
    Certificate,
    Equation,
    Gate,
    Generation,
    Invariant,
    JudgeInput,
    Missing,
    RunFact,
    RunRecord,
    RunSettings,
)
from jobs.verdict import Verdict


def verdict_of(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    assert Verdict.model_validate_json(verdict.canonical()) == verdict
    return verdict


def only(verdict: Verdict) -> tuple[str, int]:
    """Outcome and exit code of a verdict whose findings all say one thing."""
    assert {finding.outcome for finding in verdict.findings} == {verdict.outcome}
    return verdict.outcome, verdict.exit_code


# ---- endings -----------------------------------------------------------------------------------------------------

REFUSED = "refused: budget of 1,000 bytes is below the largest key of 2,000 bytes (raise it)"


@pytest.mark.parametrize(
    ("state", "reason", "outcome", "code"),
    [
        ("refused", REFUSED, "REGRESSED", 1),
        ("failed", "out_of_memory: no memory for the KV cache", "REGRESSED", 1),
        ("failed", "crash: ended by signal 11", "REGRESSED", 1),
        ("failed", "timeout: no end within 300 s", "REGRESSED", 1),
        ("failed", "unsupported: op Foo", "REGRESSED", 1),
        ("failed", "device: a stale address was read", "REGRESSED", 1),
        ("failed", "non_finite: logits at step 4", "VIOLATION", 1),
        ("failed", "crash: ended by signal 9", "INFRASTRUCTURE", 4),  # somebody else ended it
        ("failed", "provenance: engine was imported from elsewhere", "INFRASTRUCTURE", 4),
        ("failed", "", "INFRASTRUCTURE", 4),
        ("refused", "MIG is on", "INFRASTRUCTURE", 4),
        ("lost", "lease expired", "INFRASTRUCTURE", 4),
        ("contaminated", "pid 99 on the card", "CONTAMINATED", 3),
        ("cancelled", "stopped by the user", "MISSING", 3),
    ],
)
def test_a_head_that_gives_nothing_while_base_is_fine(
    documents: Any, state: str, reason: str, outcome: str, code: int
) -> None:
    head = documents.stable_arm(fact=documents.lost(state, reason))
    verdict = verdict_of(documents.sweep(head=head))
    assert only(verdict) == (outcome, code)
    assert verdict.cells_judged == 0
    assert len(verdict.set_aside) == 6
    if reason:
        assert reason in verdict.headline or state == "cancelled"


@pytest.mark.parametrize("who", ["base", "both"])
def test_without_base_there_is_nothing_to_compare_with(documents: Any, who: str) -> None:
    fails = documents.lost("refused", REFUSED)
    head = documents.stable_arm(fact=fails) if who == "both" else documents.stable_arm()
    verdict = verdict_of(documents.sweep(base=documents.arm(fact=fails), head=head))
    assert only(verdict) == ("MISSING", 3)


def test_field_36_logits_that_are_not_finite_in_both_arms_are_no_pass(documents: Any) -> None:
    fails = documents.lost("failed", "non_finite: logits at step 4")
    verdict = verdict_of(documents.sweep(base=documents.arm(fact=fails), head=documents.stable_arm(fact=fails)))
    assert only(verdict) == ("MISSING", 3)
    assert "non_finite" in verdict.headline


def test_head_cannot_be_blamed_while_base_was_only_contaminated(documents: Any) -> None:
    base = documents.arm(fact=documents.lost("contaminated", "pid 99"))
    head = documents.stable_arm(fact=documents.lost("refused", REFUSED))
    verdict = verdict_of(documents.sweep(base=base, head=head))
    assert verdict.exit_code == 3
    assert {finding.outcome for finding in verdict.findings} == {"CONTAMINATED", "MISSING"}


def test_the_last_try_that_was_not_contaminated_tells(documents: Any) -> None:
    doc = documents.sweep(head=documents.stable_arm(fact=documents.lost("contaminated", "pid 99")))

    def refuse_the_last(run: RunFact) -> RunFact:
        if run.arm != "head":
            return run
        last = run.attempts[-1].model_copy(update={"state": "refused", "reason": REFUSED, "number": 2})
        return run.model_copy(update={"attempts": (run.attempts[0], last, run.attempts[2])})

    assert only(verdict_of(documents.replace_runs(doc, refuse_the_last))) == ("REGRESSED", 1)


@pytest.mark.parametrize(
    ("record", "outcome", "code"),
    [
        ({"exit_code": 13, "error": REFUSED}, "REGRESSED", 1),
        ({"exit_code": 15}, "VIOLATION", 1),
        ({"exit_code": 99}, "REGRESSED", 1),
        ({"exit_code": None, "signal": 11}, "REGRESSED", 1),
        ({"exit_code": None, "signal": 9}, "INFRASTRUCTURE", 4),
        ({"exit_code": None, "signal": 9, "error": "timeout: 300 s"}, "REGRESSED", 1),
        ({"exit_code": None}, "INFRASTRUCTURE", 4),
        ({"exit_code": 0, "error": "protocol: two results"}, "REGRESSED", 1),
    ],
)
def test_a_record_is_read_by_its_exit_code_and_signal(
    documents: Any, record: dict[str, Any], outcome: str, code: int
) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record=record)))
    assert only(verdict) == (outcome, code)


def test_a_complete_run_without_a_record_is_our_fault(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(fact={"record": None})))
    assert only(verdict) == ("INFRASTRUCTURE", 4)


@pytest.mark.parametrize(
    "change", [{"state": "pending", "record": None, "attempts": ()}, {"retracted": "the card was later found bad"}]
)
def test_field_23_a_run_that_is_not_there_is_missing(documents: Any, change: dict[str, Any]) -> None:
    doc = documents.sweep()
    gone = documents.replace_runs(
        doc, lambda run: run.model_copy(update=change) if run.run_id == "run_0_5_base" else run
    )
    verdict = verdict_of(gone)
    assert only(verdict) == ("MISSING", 3)
    assert "1 of 2 runs of base are missing" in verdict.headline


@pytest.mark.parametrize("arms", [("base",), ("head",), ("null",), ("base", "head", "null")])
def test_field_23_runs_that_the_document_does_not_hold_are_missing(documents: Any, arms: tuple[str, ...]) -> None:
    gone = documents.replace_runs(documents.sweep(), lambda run: None if run.arm in arms else run)
    verdict = verdict_of(gone)
    assert only(verdict) == ("MISSING", 3)
    assert {finding.arm for finding in verdict.findings} == set(arms)


# ---- certificates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["contended", "unknown"])
def test_unknown_is_not_clear(documents: Any, word: str) -> None:
    dirty = Certificate.model_validate(
        {"uuid": "SIM-0", "card": "c", "driver": "d", "verdict": word, "grade": "pids", "reasons": ("pid 99",)}
    )
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record={"certificate": dirty})))
    assert only(verdict) == ("CONTAMINATED", 3)
    assert {row.state for row in verdict.set_aside} == {word}


def test_no_certificate_is_not_clear(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record={"certificate": None})))
    assert only(verdict) == ("CONTAMINATED", 3)


def test_a_throttled_card_leaves_tokens_and_bytes_and_takes_its_times(documents: Any) -> None:
    hot = Certificate(
        uuid="SIM-0", card="c", driver="d", verdict="throttled", grade="pids", reasons=("heat",), **documents.WATCHED
    )
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record={"certificate": hot})))
    assert (verdict.outcome, verdict.exit_code) == ("IMPROVED", 0)
    rows = [row for row in verdict.cells[0].time if row.metric == "decode_ms_per_token"]
    assert [(row.klass, row.note) for row in rows] == [
        ("THROTTLED_OUT", "no block holds both arms; 0 of 2 runs of head kept: 2 on a throttled card")
    ]
    assert not isinstance(rows[0].base_median, Missing) and isinstance(rows[0].head_median, Missing)
    assert any("throttled" in note for note in verdict.cells[0].notes)


# ---- complete, finite, closed ------------------------------------------------------------------------------------


def test_a_generation_that_is_not_there_is_missing(documents: Any) -> None:
    def drop_last(run: RunFact) -> RunFact:
        assert run.record is not None
        fewer = run.record.model_copy(update={"generations": run.record.generations[:2]})
        return run.model_copy(update={"record": fewer}) if run.arm == "head" else run

    verdict = verdict_of(documents.replace_runs(documents.sweep(), drop_last))
    assert (
        verdict.exit_code == 1
    )  # the totals no longer close either: an engine that skips a generation contradicts itself
    assert {"BROKEN_INVARIANT", "MISSING"} == {finding.outcome for finding in verdict.findings}
    assert any("2 of 3 measured generations" in finding.message for finding in verdict.findings)


def test_warm_ups_are_counted_apart(documents: Any) -> None:
    settings = RunSettings(tokens=32, generations=2, warmups=1, ignore_eos=True)
    assert verdict_of(documents.sweep(cell={"settings": settings})).outcome == "IMPROVED"
    asked = RunSettings(tokens=32, generations=2, warmups=2, ignore_eos=True)
    doc = documents.sweep(cell={"settings": settings})
    plan = doc.manifest.cells[0].model_copy(update={"settings": asked})
    manifest = doc.manifest.model_copy(update={"cells": (plan,)})
    cells = tuple(cell.model_copy(update={"plan": plan}) for cell in doc.cells)
    verdict = verdict_of(doc.model_copy(update={"manifest": manifest, "cells": cells}))
    assert only(verdict) == ("MISSING", 3)
    assert "1 of 2 warm-ups given" in verdict.headline


def test_a_difference_in_a_warm_up_is_a_violation_too(documents: Any) -> None:
    settings = RunSettings(tokens=32, generations=2, warmups=1, ignore_eos=True)
    wrong = (*documents.IDS[:7], 33803, *documents.IDS[8:])
    head = documents.stable_arm(ids=lambda _r, gen: wrong if gen == 0 else documents.IDS)
    verdict = verdict_of(documents.sweep(head=head, cell={"settings": settings}))
    assert only(verdict) == ("VIOLATION", 1)


@pytest.mark.parametrize(
    ("generation", "says"),
    [
        ({"step_ns": (5, 0)}, "a step took 0 ns"),
        ({"step_ns": (5,)}, "1 steps were timed, and 3 ids take 2"),
        ({"gaps": (0.5, 0.5)}, "2 top-2 gaps of 3 ids"),
        ({"gaps": (0.5, -0.1, 0.5)}, "the least -0.1"),
    ],
)
def test_times_and_gaps_that_ids_cannot_have_break_the_record(generation: dict[str, Any], says: str) -> None:
    fields = {"index": 0, "warmup": False, "ids": (1, 2, 3), "stop_reason": "length", **generation}
    row = Generation.model_validate(fields)
    record = RunRecord(run_id="r", attempt_id="a", attempt_number=1, exit_code=0, generations=(row,))
    assert [says in fault for fault in invalid_figures(record)] == [True]


@pytest.mark.parametrize("gap", [math.nan, math.inf, -math.inf])
def test_field_36_a_gap_that_is_no_number_is_a_violation_even_with_equal_tokens(documents: Any, gap: float) -> None:
    verdict = verdict_of(documents.sweep(base=documents.arm(gap=gap), head=documents.stable_arm(gap=gap)))
    assert only(verdict) == ("VIOLATION", 1)
    assert "not finite" in verdict.headline


def test_a_negative_id_is_no_token(documents: Any) -> None:
    ids = (*documents.IDS[:31], -1)
    verdict = verdict_of(
        documents.sweep(base=documents.arm(ids=lambda _r, _g: ids), head=documents.stable_arm(ids=lambda _r, _g: ids))
    )
    assert only(verdict) == ("VIOLATION", 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, 0.5])
def test_field_20_a_figure_that_cannot_be_rejects_the_record(documents: Any, value: float) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(changes={"step_kernels": value})))
    assert verdict.exit_code == 1
    assert "BROKEN_INVARIANT" in {finding.outcome for finding in verdict.findings}
    assert any("step_kernels is" in finding.message for finding in verdict.findings)


@pytest.mark.parametrize(
    "changes",
    [
        {"hits": 1},
        {"retained_page_ins": 1},
        {"htod_bytes": 1},
        {"device_htod_bytes": 1},  # a copy that the device never made
        {"unaccounted_bytes": 4096},
        {"oversubscribed_bytes": 1},
        {"ref_underflows": 1},
    ],
)
def test_counters_that_do_not_close_are_a_broken_record(documents: Any, changes: dict[str, int]) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(changes=changes)))
    assert verdict.exit_code == 1
    assert "BROKEN_INVARIANT" in {finding.outcome for finding in verdict.findings}
    rows = [row for row in verdict.cells[0].invariants if not row.holds]
    assert rows
    assert all(row.arm == "head" and row.worst is not None for row in rows)


def test_tokens_that_the_engine_counts_and_does_not_give_are_a_broken_record(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(emitted=97)))
    assert only(verdict) == ("BROKEN_INVARIANT", 1)
    assert "97 against 96" in verdict.headline


def test_totals_must_equal_the_sums_over_the_measured_generations(documents: Any) -> None:
    """Load is left out of the totals; a byte that is counted twice shows here."""
    steps = 32
    each = {"decode": documents.stable(steps), "load": {"htod_bytes": 5}, "prefill": {"emitted_tokens": steps}}
    head = documents.stable_arm(phases=lambda _gen: each)
    assert verdict_of(documents.sweep(head=head)).outcome == "IMPROVED"
    doubled = {**each, "warm": {"evicted_bytes": 1}}
    lying = documents.stable_arm(phases=lambda _gen: doubled, changes={"evicted_bytes": 4})
    verdict = verdict_of(documents.sweep(head=lying))
    assert only(verdict) == ("BROKEN_INVARIANT", 1)
    assert "evicted_bytes == its sum over the generations: 4 against 3" in verdict.headline


def equation(lhs: int, rhs: int, *, holds: bool) -> Equation:
    return Equation(name="W9", text="a == b", relation="==", lhs=lhs, rhs=rhs, holds=holds)


@pytest.mark.parametrize(
    ("stated", "is_fine"),
    [
        (equation(1, 1, holds=True), True),
        (equation(1, 2, holds=False), False),
        (equation(1, 2, holds=True), False),  # the engine says that it holds; its numbers do not
        (equation(1, 1, holds=False), False),
    ],
)
def test_an_engines_equation_must_hold_by_its_word_and_by_its_numbers(
    documents: Any, stated: Equation, is_fine: bool
) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(equations=(stated,))))
    assert verdict.outcome == ("IMPROVED" if is_fine else "BROKEN_INVARIANT")
    assert verdict.exit_code == (0 if is_fine else 1)


@pytest.mark.parametrize(
    ("expr", "outcome", "code"),
    [
        ("oversubscribed_bytes == 0", "IMPROVED", 0),
        ("segments <= 3 and fallbacks == 0", "IMPROVED", 0),
        ("evictions == 0", "BROKEN_INVARIANT", 1),  # of base, which evicts
        ("ring_waits == 0", "MISSING", 3),  # recorded by nobody: unknown is never good
    ],
)
def test_the_sweeps_own_invariants_hold_break_or_stay_open(documents: Any, expr: str, outcome: str, code: int) -> None:
    verdict = verdict_of(documents.sweep(cell={"invariants": (Invariant(expr=expr),)}))
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)


def test_an_invariant_that_cannot_be_read_is_no_pass_and_no_crash(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(cell={"invariants": (Invariant(expr="hits ="),)}))
    assert only(verdict) == ("MISSING", 3)
    assert "cannot be read" in verdict.headline


def test_ids_without_a_stop_reason_are_not_complete(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(stop=lambda _r, _g: None)))
    assert only(verdict) == ("SHORT", 1)


def test_more_tokens_than_asked_are_long(documents: Any) -> None:
    more = {"ids": lambda _r, _g: (*documents.IDS, 5)}
    verdict = verdict_of(documents.sweep(base=documents.arm(**more), head=documents.stable_arm(**more)))
    assert only(verdict) == ("LONG", 1)


# ---- match keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "outcome", "code", "words"),
    [
        ({"record": {"engine_digest": "f" * 64}}, "INFRASTRUCTURE", 4, "another build ran"),
        ({"record": {"engine_digest": ""}}, "NOT_COMPARABLE", 3, "engine that ran is unknown"),
        ({"plan": {"tree_digest": ""}}, "NOT_COMPARABLE", 3, "engine that ran is unknown"),
        ({"record": {"model_digest": "x" * 64}}, "NOT_COMPARABLE", 3, "another model ran"),
        ({"record": {"model_digest": ""}}, "NOT_COMPARABLE", 3, "model is unknown"),
        ({"effective": {"capture": False}}, "NOT_COMPARABLE", 3, "capture is True in base and False in head"),
        ({"effective": {"prefill_chunk": 64}}, "NOT_COMPARABLE", 3, "prefill_chunk is absent in base and 64 in head"),
        ({"effective": {"policy": "lru"}}, "NOT_COMPARABLE", 3, "policy was asked as stable and ran as lru"),
        ({"device": {"uuid": "SIM-1"}}, "NOT_COMPARABLE", 3, "block 0 ran on 2 cards: SIM-0, SIM-1"),
        ({"device": {"uuid": ""}}, "NOT_COMPARABLE", 3, "card that the run used is unknown"),
        ({"device": {"driver": "sim 2"}}, "NOT_COMPARABLE", 3, "card's driver is sim 1 in base and sim 2 in head"),
        ({"device": {"kind": "cuda"}}, "NOT_COMPARABLE", 3, "card's kind"),
        ({"device": {"granule_bytes": 4096}}, "NOT_COMPARABLE", 3, "card's granule_bytes"),
        ({"plan": {"env": {"OMP_NUM_THREADS": "2"}}}, "NOT_COMPARABLE", 3, "environments of base and head differ"),
    ],
)
def test_field_27_match_keys_split_and_never_merge(
    documents: Any, script: dict[str, Any], outcome: str, code: int, words: str
) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(**script)))
    assert verdict.exit_code == code
    assert verdict.outcome == outcome
    assert any(words in finding.message for finding in verdict.findings)
    assert verdict.cells_judged == 0
    pair = next(row for row in verdict.cells[0].identity if row.what == "pair")
    assert pair.klass == "NOT_COMPARABLE"
    assert not any(row.gating for row in verdict.cells[0].exact)


def test_what_varies_on_purpose_is_allowed_and_must_be_declared(documents: Any) -> None:
    assert verdict_of(documents.sweep()).outcome == "IMPROVED"
    verdict = verdict_of(documents.sweep(varies=()))
    assert only(verdict) == ("NOT_COMPARABLE", 3)
    assert "policy is 'lru' in base and 'stable' in head" in verdict.headline
    assert "varies" in verdict.next_step


def test_a_null_arm_may_not_vary_in_anything(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(null=documents.stable_arm()))
    assert any(finding.arm == "null" and finding.outcome == "NOT_COMPARABLE" for finding in verdict.findings)
    assert verdict.exit_code == 3


def test_a_certificate_for_another_card_is_our_fault(documents: Any) -> None:
    other = Certificate(uuid="SIM-7", card="c", driver="d", verdict="clear", grade="scripted", **documents.WATCHED)
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(record={"certificate": other})))
    assert only(verdict) == ("INFRASTRUCTURE", 4)


def test_blocks_may_run_on_different_cards_and_are_compared_on_each(documents: Any) -> None:
    doc = documents.sweep(cell={"blocks": 2})

    def second_card(run: RunFact) -> RunFact:
        assert run.record is not None
        assert run.record.certificate is not None
        if run.block == 0:
            return run
        record = run.record.model_copy(
            update={
                "device": {**run.record.device, "uuid": "SIM-1"},
                "certificate": run.record.certificate.model_copy(update={"uuid": "SIM-1"}),
            }
        )
        return run.model_copy(update={"record": record})

    verdict = verdict_of(documents.replace_runs(doc, second_card))
    assert verdict.outcome == "IMPROVED"
    pairs = [row for row in verdict.cells[0].identity if row.what == "pair"]
    assert [row.note.split(";")[0] for row in pairs] == ["card SIM-0 sim 1", "card SIM-1 sim 1"]


def test_generations_of_one_run_must_have_their_own_indices(documents: Any) -> None:
    def doubled(run: RunFact) -> RunFact:
        assert run.record is not None
        first: Generation = run.record.generations[0]
        twice = (first, first.model_copy(update={"prefill_ns": 1}), run.record.generations[2])
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": twice})})

    verdict = verdict_of(documents.replace_runs(documents.sweep(), doubled))
    assert only(verdict) == ("MISSING", 3)
    assert "one index" in verdict.headline


def test_an_exact_gate_that_is_off_judges_no_counter_and_claims_no_gain(documents: Any) -> None:
    head = documents.stable_arm(changes={"segments": 5})
    verdict = verdict_of(documents.sweep(head=head, gate=Gate(exact="off")))
    assert (verdict.outcome, verdict.exit_code, verdict.findings) == ("PASS", 0, ())
    assert "counters were not judged" in verdict.headline


def test_an_identity_gate_that_is_off_does_not_claim_equal_tokens(documents: Any) -> None:
    wrong = (*documents.IDS[:7], 33803, *documents.IDS[8:])
    head = documents.stable_arm(ids=lambda _r, _g: wrong)
    verdict = verdict_of(documents.sweep(head=head, gate=Gate(identity="off")))
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0)
    assert verdict.headline.startswith("Tokens differ")


def test_an_end_id_that_was_to_be_ignored_is_no_stop_even_in_both_arms(documents: Any) -> None:
    early = {"ids": lambda _r, _g: documents.IDS[:3], "stop": lambda _r, _g: "eos"}
    verdict = verdict_of(documents.sweep(base=documents.arm(**early), head=documents.stable_arm(**early)))
    assert only(verdict) == ("SHORT", 1)
    assert any("which was to be ignored" in finding.message for finding in verdict.findings)


def test_a_driver_that_changes_between_blocks_is_not_comparable(documents: Any) -> None:
    def later_driver(run: RunFact) -> RunFact:
        assert run.record is not None
        driver = "sim 1" if run.block == 0 else "sim 2"
        device = {**run.record.device, "driver": driver}
        return run.model_copy(update={"record": run.record.model_copy(update={"device": device})})

    verdict = verdict_of(documents.replace_runs(documents.sweep(cell={"blocks": 2}), later_driver))
    assert only(verdict) == ("NOT_COMPARABLE", 3)
    assert "driver is sim 1 / sim 2 in base" in verdict.headline


def test_head_is_not_blamed_for_what_base_does_now_and_then(documents: Any) -> None:
    doc = documents.sweep(head=documents.stable_arm(fact=documents.lost("failed", "crash: ended by signal 11")))
    fails = documents.lost("failed", "crash: ended by signal 11")
    shaky = documents.replace_runs(
        doc, lambda run: run.model_copy(update=fails) if run.run_id == "run_0_0_base" else run
    )
    verdict = verdict_of(shaky)
    assert only(verdict) == ("MISSING", 3)
    assert any("base fails too" in finding.message for finding in verdict.findings)


def test_a_witness_of_an_arm_without_runs_does_not_hold(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(fact=documents.lost("lost", "gone"))))
    assert only(verdict) == ("INFRASTRUCTURE", 4)  # the witness is unmet, and says nothing more than that
    assert [row.holds for row in verdict.cells[0].witnesses] == [True, True, False]
