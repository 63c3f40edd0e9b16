"""The verdict of a sweep: outcomes and exit codes of whole documents, in the order that the design gives them."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.judge import concluded, judge
from jobs.judge_arm import _top_keys
from jobs.judge_pair import rows_of_time
from jobs.model import Gate, JudgeInput, KeyBytes, Lock, RunSettings, Witness
from jobs.reviewed import Expectation
from jobs.verdict import CellVerdict, IdentityRow, MetricRow, Verdict


def verdict_of(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    assert Verdict.model_validate_json(verdict.canonical()) == verdict  # nothing in it that JSON cannot hold
    return verdict


def cell_of(verdict: Verdict) -> CellVerdict:
    assert len(verdict.cells) == 1
    return verdict.cells[0]


def identity(verdict: Verdict, right: str, what: str = "pair") -> IdentityRow:
    return next(row for row in cell_of(verdict).identity if row.what == what and row.right.split()[0] == right)


def exact(verdict: Verdict, metric: str) -> MetricRow:
    return next(row for row in cell_of(verdict).exact if row.metric == metric)


def flip(ids: tuple[int, ...], at: int, to: int = 33803) -> tuple[int, ...]:
    return (*ids[:at], to, *ids[at + 1 :])


# ---- clean -------------------------------------------------------------------------------------------------------


def test_lru_against_stable_with_equal_tokens_is_improved(documents: Any) -> None:
    verdict = verdict_of(documents.sweep())
    assert (verdict.outcome, verdict.exit_code) == ("IMPROVED", 0)
    assert verdict.findings == ()
    assert (verdict.cells_expected, verdict.cells_judged) == (1, 1)
    assert identity(verdict, "head").klass == "IDENTICAL"
    assert identity(verdict, "null", "null").klass == "IDENTICAL"
    assert {row.right for row in cell_of(verdict).identity if row.what == "self"} == {"base", "null", "head"}
    row = exact(verdict, "htod_bytes")
    assert (row.klass, row.delta) == ("improved", -3_456_000_000)
    assert "htod_bytes fell by 3,456,000,000 (-42.4%)" in verdict.headline
    assert all(row.holds for row in cell_of(verdict).witnesses)
    assert all(row.holds and row.checked == 2 for row in cell_of(verdict).invariants)


def test_base_as_its_own_head_is_a_clean_pass(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.arm()))
    assert (verdict.outcome, verdict.exit_code, verdict.findings) == ("PASS", 0, ())
    assert "no gating counter moved" in verdict.headline


def test_an_arm_shows_its_values_facts_and_certificates(documents: Any) -> None:
    base, null, head = cell_of(verdict_of(documents.sweep())).arms
    assert (base.arm, null.arm, head.arm) == ("base", "null", "head")
    assert (head.runs_expected, head.runs_complete) == (2, 2)
    assert head.values["htod_bytes"] == 4_697_726_976
    assert head.config == {"weight_budget": "50%", "policy": "stable"}
    assert head.facts["weight_bytes"] == 84_934_656
    assert head.certificates == {"clear": 2}
    assert head.stop_reasons == {"length": 6}
    assert head.top_keys == (KeyBytes(key="layer.0.up", nbytes=1_000_000, retained=2, bypassed=3),)
    assert head.crossings == (5, 5_000_000)
    assert [seam.reason for seam in head.seams] == ["host_read"]


def test_keys_that_came_through_a_ring_are_among_those_that_moved_most(documents: Any) -> None:
    record = next(run.record for cell in documents.sweep().cells for run in cell.runs if run.record)
    keys = (
        KeyBytes(key="kept", nbytes=9, retained=1),
        KeyBytes(key="ringed", nbytes=7, staged=3),
        KeyBytes(key="read over the link", nbytes=11, in_place=2),
        KeyBytes(key="in", nbytes=99, hits=4),
    )
    assert _top_keys(record.model_copy(update={"keys": keys})) == (keys[2], keys[1], keys[0])
    layers = tuple(KeyBytes(key=f"layers.{layer}", nbytes=1, retained=1) for layer in (10, 2, 1))
    assert _top_keys(record.model_copy(update={"keys": layers})) == layers[::-1]


def test_a_declared_stop_that_both_arms_share_is_identical(documents: Any) -> None:
    ended = {"ids": lambda _r, _g: documents.IDS[:30], "stop": lambda _r, _g: "eos"}
    doc = documents.sweep(
        base=documents.arm(**ended),
        head=documents.stable_arm(**ended),
        cell={"settings": RunSettings(tokens=32, generations=3)},
    )
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("IMPROVED", 0)
    assert identity(verdict, "head").left_stop == "eos"


def test_blind_spots_say_what_could_not_be_caught(documents: Any) -> None:
    spots = " ".join(verdict_of(documents.sweep()).blind_spots)
    assert "no oracle was run" in spots
    assert "Simulated cards" in spots
    assert "one prompt" in spots
    assert "No null arm" not in spots
    bare = " ".join(verdict_of(documents.sweep(cell={"witnesses": ()})).blind_spots)
    assert "without a witness" in bare


# ---- identity ----------------------------------------------------------------------------------------------------


def test_a_slot_corrupted_from_a_later_generation_on_is_a_violation(documents: Any) -> None:
    head = documents.stable_arm(ids=lambda _r, gen: documents.IDS if gen == 0 else flip(documents.IDS, 7))
    verdict = verdict_of(documents.sweep(head=head))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert [finding.outcome for finding in verdict.findings] == ["VIOLATION"]
    row = identity(verdict, "head")
    assert (row.klass, row.generation, row.first_difference) == ("VIOLATION", 1, 7)
    assert identity(verdict, "head", "self").klass == "VIOLATION"
    assert "at index 7 of generation 2 " in verdict.headline


def test_tokens_that_differ_make_speed_and_bytes_different_work(documents: Any) -> None:
    head = documents.stable_arm(ids=lambda _r, _g: flip(documents.IDS, 7))
    verdict = verdict_of(documents.sweep(head=head))
    assert verdict.exit_code == 1
    assert {row.klass for row in cell_of(verdict).time} == {"DIFFERENT_WORK"}
    row = exact(verdict, "htod_bytes")
    assert row.klass == "neutral"
    assert row.note.startswith("different work")


@pytest.mark.parametrize("stop", ["length", "eos", None])
def test_field_41_a_stop_after_three_tokens_is_short_whatever_stop_it_declares(
    documents: Any, stop: str | None
) -> None:
    head = documents.stable_arm(ids=lambda _r, _g: documents.IDS[:3], stop=lambda _r, _g: stop)
    verdict = verdict_of(documents.sweep(head=head))
    assert (verdict.outcome, verdict.exit_code) == ("SHORT", 1)
    assert [finding.outcome for finding in verdict.findings] == ["SHORT"]
    assert "stops after 3 tokens" in verdict.headline


def test_both_arms_short_of_what_was_asked_is_no_pass(documents: Any) -> None:
    short = {"ids": lambda _r, _g: documents.IDS[:3]}
    verdict = verdict_of(documents.sweep(base=documents.arm(**short), head=documents.stable_arm(**short)))
    assert (verdict.outcome, verdict.exit_code) == ("SHORT", 1)
    assert {finding.arm for finding in verdict.findings} == {"base", "null", "head"}
    assert any("base itself gives 3 of 32 tokens" in finding.message for finding in verdict.findings)


def test_a_head_that_runs_on_is_long(documents: Any) -> None:
    base = documents.arm(ids=lambda _r, _g: documents.IDS[:30], stop=lambda _r, _g: "eos")
    doc = documents.sweep(base=base, cell={"settings": RunSettings(tokens=32, generations=3)})
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("LONG", 1)


def test_a_small_gap_is_unadjudicated_and_counts_as_a_violation(documents: Any) -> None:
    small = {"gap": 0.09}
    head = documents.stable_arm(ids=lambda _r, _g: flip(documents.IDS, 19, 46283), **small)
    verdict = concluded(documents.sweep(base=documents.arm(**small), head=head), "no worker was there")
    assert (verdict.outcome, verdict.exit_code) == ("UNADJUDICATED", 1)
    assert "the oracle could not be asked (no worker was there)" in verdict.headline


def test_a_head_that_does_not_repeat_itself_is_at_fault(documents: Any) -> None:
    head = documents.stable_arm(ids=lambda run, _g: documents.IDS if run == 0 else flip(documents.IDS, 9))
    verdict = verdict_of(documents.sweep(head=head))
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 1)
    assert identity(verdict, "head").klass == "NONDETERMINISTIC"


def test_a_base_that_does_not_repeat_itself_leaves_the_question_open(documents: Any) -> None:
    shaky = documents.arm(ids=lambda run, _g: documents.IDS if run == 0 else flip(documents.IDS, 9))
    verdict = verdict_of(documents.sweep(base=shaky, null=documents.arm()))
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 3)


def test_a_base_that_is_corrupted_in_the_same_way_every_time_is_said_to_be_base(documents: Any) -> None:
    broken = {"ids": lambda _r, gen: documents.IDS if gen == 0 else flip(documents.IDS, 7)}
    verdict = verdict_of(documents.sweep(base=documents.arm(**broken), head=documents.stable_arm(**broken)))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert [finding.arm for finding in verdict.findings] == ["base"]
    assert "base itself is corrupted" in verdict.headline
    assert identity(verdict, "head").klass == "IDENTICAL"  # the same as base, and as wrong


def test_a_null_arm_with_other_tokens_takes_base_down(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(null=documents.arm(ids=lambda _r, _g: flip(documents.IDS, 9))))
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 3)
    assert "null is base again" in verdict.headline


def test_a_variant_must_give_bases_tokens_and_its_counters_do_not_gate(documents: Any) -> None:
    worse = documents.arm(changes={"segments": 9})
    verdict = verdict_of(documents.sweep(others={"other": worse}))
    assert (verdict.outcome, verdict.exit_code) == ("IMPROVED", 0)
    wrong = documents.arm(ids=lambda _r, _g: flip(documents.IDS, 9))
    verdict = verdict_of(documents.sweep(others={"other": wrong}))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert verdict.findings[0].arm == "other"


def test_a_lock_is_a_violation_and_a_tripwire_a_note(documents: Any) -> None:
    lock = Lock(prompt="capital", index=0, expected=1)
    verdict = verdict_of(documents.sweep(cell={"locks": (lock,)}))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    warned = verdict_of(documents.sweep(cell={"locks": (lock.model_copy(update={"tripwire": True}),)}))
    assert (warned.outcome, warned.exit_code) == ("IMPROVED", 0)
    assert any(note.startswith("tripwire: head gives id 7042") for note in cell_of(warned).notes)


# ---- engaged -----------------------------------------------------------------------------------------------------


def test_a_path_that_never_streams_is_vacuous_and_claims_nothing(documents: Any) -> None:
    """It would show as a large gain in bytes, and its larger peak as a regression: neither is judged."""
    head = documents.stable_arm(counters=documents.resident, changes={"peak_resident_bytes": 84_934_656})
    verdict = verdict_of(documents.sweep(head=head))
    assert (verdict.outcome, verdict.exit_code) == ("VACUOUS", 3)
    assert [finding.outcome for finding in verdict.findings] == ["VACUOUS"]
    row = identity(verdict, "head")
    assert row.klass == "VACUOUS"
    assert "not claimed" in row.note
    assert identity(verdict, "null", "null").klass == "IDENTICAL"
    assert not any(row.gating for row in cell_of(verdict).exact)
    assert {row.klass for row in cell_of(verdict).exact} <= {"same", "neutral", "not_recorded"}
    witness = next(row for row in cell_of(verdict).witnesses if row.arm == "head")
    assert (witness.holds, witness.values) == (False, {"page_ins": 0})


def test_an_unmet_witness_does_not_hide_wrong_tokens(documents: Any) -> None:
    head = documents.stable_arm(counters=documents.resident, ids=lambda _r, _g: flip(documents.IDS, 7))
    verdict = verdict_of(documents.sweep(head=head))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert [finding.outcome for finding in verdict.findings] == ["VIOLATION", "VACUOUS"]


def test_a_witness_over_a_counter_that_was_not_recorded_is_unmet(documents: Any) -> None:
    head = documents.stable_arm(changes={"page_ins": None})
    verdict = verdict_of(documents.sweep(head=head))
    assert verdict.exit_code == 3
    assert "VACUOUS" in {finding.outcome for finding in verdict.findings}
    assert "not recorded" in verdict.headline


def test_a_witness_asks_only_the_arms_that_it_names(documents: Any) -> None:
    only_head = Witness(expr="bypassed_page_ins > 0", arms=("head",))
    assert verdict_of(documents.sweep(cell={"witnesses": (only_head,)})).outcome == "IMPROVED"
    every = Witness(expr="bypassed_page_ins > 0")
    assert verdict_of(documents.sweep(cell={"witnesses": (every,)})).outcome == "VACUOUS"


# ---- exact and time ----------------------------------------------------------------------------------------------


def test_more_bytes_are_a_regression(documents: Any) -> None:
    stable = documents.stable_arm()
    verdict = verdict_of(documents.sweep(base=stable, null=stable, head=documents.arm()))
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    assert "htod_bytes rose by 3,456,000,000" in verdict.headline


def test_field_28_one_worse_gating_metric_outweighs_a_better_one(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(changes={"segments": 2})))
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    assert exact(verdict, "htod_bytes").klass == "improved"


def test_a_declared_change_is_accepted_and_shown(documents: Any) -> None:
    declared = (Expectation(metric="segments", change="higher", reason="the new op reads the host"),)
    head = documents.stable_arm(changes={"segments": 2})
    verdict = verdict_of(documents.sweep(head=head, expectations=declared))
    assert (verdict.outcome, verdict.exit_code) == ("DECLARED", 0)
    assert "the new op reads the host" in verdict.headline


def test_a_neutral_counter_that_moves_is_listed_and_does_not_gate(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.arm(changes={"evictions": 1})))
    assert (verdict.outcome, verdict.exit_code) == ("PASS", 0)
    assert exact(verdict, "evictions").klass == "neutral"


@pytest.mark.parametrize(("who", "expected"), [("head", 1), ("base", 3)])
def test_an_exact_metric_that_varies_inside_an_arm_is_a_finding(documents: Any, who: str, expected: int) -> None:
    varying = {"by_run": lambda run: {"host_syncs": 96 + run}}
    arm = documents.stable_arm(**varying) if who == "head" else documents.arm(**varying)
    verdict = verdict_of(documents.sweep(**{who: arm}))
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", expected)
    assert exact(verdict, "host_syncs").klass == "varies"
    assert "varies: 96..97" in verdict.findings[0].message


def test_a_counter_that_does_not_gate_may_vary_with_a_note(documents: Any) -> None:
    head = documents.stable_arm(by_run=lambda run: {"pool_hits": run})
    verdict = verdict_of(documents.sweep(head=head))
    assert (verdict.outcome, verdict.exit_code) == ("IMPROVED", 0)
    assert [finding.exit_code for finding in verdict.findings] == [0]


def test_a_null_arm_with_other_bytes_takes_base_down(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(null=documents.arm(changes={"host_syncs": 97})))
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 3)


def test_a_gating_metric_that_head_no_longer_records_is_missing(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(changes={"step_kernels": None})))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert exact(verdict, "step_kernels").klass == "vanished"


def test_a_pair_without_any_gating_metric_proves_nothing(documents: Any) -> None:
    from jobs.gates import GATING

    gone = {"changes": dict.fromkeys(GATING)}
    doc = documents.sweep(base=documents.arm(**gone), head=documents.arm(**gone))
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert any("no gating metric" in finding.message for finding in verdict.findings)


def slower(block: int, run: int) -> int:
    return 24_000_000 + 10_000 * ((block + run) % 3)


@pytest.mark.parametrize(
    ("gate", "outcome", "code"), [("advise", "IMPROVED", 0), ("block", "TIME_WORSE", 1), ("off", "IMPROVED", 0)]
)
def test_slower_over_blocks_advises_or_blocks(documents: Any, gate: str, outcome: str, code: int) -> None:
    head = documents.stable_arm(step_ns=slower)
    doc = documents.sweep(head=head, cell={"blocks": 6}, gate=Gate.model_validate({"time": gate}))
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)
    noted = [finding.outcome for finding in verdict.findings]
    assert noted == ([] if gate == "off" else ["TIME_WORSE"])


def test_a_verdict_on_times_holds_its_rate_of_false_alarms(documents: Any) -> None:
    verdict = verdict_of(documents.sweep())
    assert verdict.time_false_alarms == 0.01
    without = verdict.model_copy(update={"time_false_alarms": None}).model_dump(mode="json")
    assert "time_false_alarms" not in without  # as verdicts of before are written


@pytest.mark.parametrize(("cells", "roles", "rows"), [(1, ["head"], 3), (4, ["head", "variant"], 12), (4, [], 1)])
def test_the_rate_is_shared_out_over_all_rows_that_are_planned(
    documents: Any, cells: int, roles: list[str], rows: int
) -> None:
    """Three time metrics for each arm under test of each cell; variants beside a head are only shown."""
    given = documents.sweep().manifest
    base = next(arm for arm in given.arms if arm.role == "base")
    arms = (base, *(base.model_copy(update={"name": f"arm{n}", "role": role}) for n, role in enumerate(roles)))
    cell = given.cells[0].model_copy(update={"arms": tuple(arm.name for arm in arms)})
    assert rows_of_time(given.model_copy(update={"arms": arms, "cells": (cell,) * cells})) == rows


def test_time_that_blocks_and_is_undecided_is_no_pass(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(gate=Gate(time="block")))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert "not decided" in verdict.headline


# ---- gates and folding -------------------------------------------------------------------------------------------


def test_identity_that_advises_costs_nothing_and_is_never_called_a_pass(documents: Any) -> None:
    head = documents.stable_arm(ids=lambda _r, _g: flip(documents.IDS, 7))
    verdict = verdict_of(documents.sweep(head=head, gate=Gate(identity="advise")))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 0)
    assert "(advises only)" in verdict.headline


def test_exact_gates_still_block_where_identity_only_advises(documents: Any) -> None:
    head = documents.arm(ids=lambda _r, _g: flip(documents.IDS, 7), changes={"segments": 5})
    verdict = verdict_of(documents.sweep(head=head, gate=Gate(identity="advise")))
    assert (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    assert exact(verdict, "segments").note.startswith("different work")


def test_missing_evidence_blocks_wherever_any_gate_blocks(documents: Any) -> None:
    head = documents.stable_arm(counters=documents.resident)
    one = verdict_of(documents.sweep(head=head, gate=Gate(identity="advise")))
    assert (one.outcome, one.exit_code) == ("VACUOUS", 3)
    none = verdict_of(documents.sweep(head=head, gate=Gate(identity="advise", exact="advise")))
    assert (none.outcome, none.exit_code) == ("VACUOUS", 0)


def test_findings_come_worst_first(documents: Any) -> None:
    head = documents.arm(
        ids=lambda _r, _g: flip(documents.IDS, 7), changes={"segments": 5, "step_kernels": 700}, counters=documents.lru
    )
    verdict = verdict_of(documents.sweep(head=head, null=documents.arm(changes={"host_syncs": 97})))
    assert [finding.outcome for finding in verdict.findings] == [
        "VIOLATION",
        "REGRESSED",
        "REGRESSED",
        "NONDETERMINISTIC",
    ]
    assert [finding.exit_code for finding in verdict.findings] == [1, 1, 1, 3]
    assert "3 more findings" in verdict.headline
