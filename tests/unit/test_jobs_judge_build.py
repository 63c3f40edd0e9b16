"""An arm that could not be built: whose fault it is, what it costs, and that nothing about it reads as a pass."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import ArmPlan, BuildFailure, BuildPlan, Gate, JudgeInput, Manifest
from jobs.outcomes import exit_for
from jobs.verdict import Verdict

REASON = "exit 2: make: *** [fast.o] Error 1"
LOG = "fast.c:3: error: expected ';'\nmake: *** [fast.o] Error 1"
BUILD = BuildPlan(command="make", outputs=("fast.so",))
BROKEN = {
    "plan": {
        "build": BUILD.model_copy(update={"failure": BuildFailure(reason=REASON, log_tail=LOG)}),
        "tree_digest": "",
    },
    "fact": {"state": "exhausted", "attempts": (), "record": None},
}


def verdict_of(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    assert Verdict.model_validate_json(verdict.canonical()) == verdict
    return verdict


def test_a_head_that_does_not_build_is_a_finding_against_head(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(**BROKEN)))
    (finding,) = verdict.findings
    assert (finding.outcome, finding.exit_code, finding.arm) == ("BUILD_FAILED", 1, "head")
    assert (verdict.outcome, verdict.exit_code, verdict.cells_judged) == ("BUILD_FAILED", 1, 0)
    assert f"all 2 of its runs are missing: {REASON}" in verdict.headline
    assert finding.log == LOG
    assert len(finding.run_ids) == 2
    (pair,) = [row for row in verdict.cells[0].identity if row.what == "pair"]
    assert (pair.klass, pair.note) == ("MISSING", f"build failed: {REASON}")
    head = next(arm for arm in verdict.cells[0].arms if arm.role == "head")
    assert (head.runs_complete, head.runs_expected) == (0, 2)


def test_a_build_that_went_well_is_judged_like_any_arm(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(plan={"build": BUILD})))
    assert (verdict.outcome, verdict.exit_code) == ("IMPROVED", 0)


def test_a_base_that_does_not_build_leaves_the_question_open(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(base=documents.arm(**BROKEN)))
    assert (verdict.outcome, verdict.exit_code) == ("BUILD_FAILED", 3)
    assert {(finding.arm, finding.outcome, finding.exit_code) for finding in verdict.findings} == {
        ("base", "BUILD_FAILED", 3),
        ("null", "BUILD_FAILED", 3),
    }


def test_a_head_is_not_blamed_for_what_base_cannot_do_either(documents: Any) -> None:
    doc = documents.sweep(base=documents.arm(**BROKEN), head=documents.stable_arm(**BROKEN))
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("BUILD_FAILED", 3)
    (of_head,) = [finding for finding in verdict.findings if finding.arm == "head"]
    assert of_head.message.endswith("base could not be built either")


def test_a_variant_that_does_not_build_is_found_beside_a_good_head(documents: Any) -> None:
    verdict = verdict_of(documents.sweep(others={"calm": documents.stable_arm(**BROKEN)}))
    assert [(finding.arm, finding.exit_code) for finding in verdict.findings] == [("calm", 1)]
    assert verdict.cells_judged == 1


def test_a_violation_outranks_it_and_a_broken_base_does_not_hide_it(documents: Any) -> None:
    wrong = documents.stable_arm(ids=lambda _run, _generation: (1, *documents.IDS[1:]))
    verdict = verdict_of(documents.sweep(head=wrong, others={"calm": documents.stable_arm(**BROKEN)}))
    assert [finding.outcome for finding in verdict.findings] == ["VIOLATION", "BUILD_FAILED"]


@pytest.mark.parametrize("dropped", [True, False])
def test_it_does_not_hang_on_the_rows_of_its_runs(documents: Any, dropped: bool) -> None:
    """The manifest says that the build failed: rows that are absent or still pending change nothing."""
    doc = documents.sweep(head=documents.stable_arm(**BROKEN))
    pending = documents.replace_runs(
        doc,
        lambda run: run if run.arm != "head" else None if dropped else run.model_copy(update={"state": "pending"}),
    )
    verdict = verdict_of(pending)
    assert [(finding.outcome, finding.exit_code) for finding in verdict.findings] == [("BUILD_FAILED", 1)]


@pytest.mark.parametrize(
    ("gate", "code"),
    [
        (Gate(exact="off"), 1),
        (Gate(identity="advise", exact="advise"), 0),
        (Gate(identity="off", exact="off", time="block"), 1),
    ],
)
def test_it_blocks_where_any_gate_blocks(documents: Any, gate: Gate, code: int) -> None:
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(**BROKEN), gate=gate))
    assert (verdict.outcome, verdict.exit_code) == ("BUILD_FAILED", code)


def test_records_of_an_arm_without_a_build_are_never_a_pass(documents: Any) -> None:
    """A contradiction: the plan says that there is no tree, and yet something ran."""
    verdict = verdict_of(documents.sweep(head=documents.stable_arm(plan=BROKEN["plan"])))
    assert verdict.exit_code == 1
    assert {"BUILD_FAILED", "NOT_COMPARABLE"} == {finding.outcome for finding in verdict.findings}


def test_base_costs_three() -> None:
    assert exit_for("BUILD_FAILED", "block", of_base=True) == 3
    assert exit_for("BUILD_FAILED", "block") == 1


# ---- in the manifest ---------------------------------------------------------------------------------------------


def test_an_arm_without_a_build_is_written_as_before_there_were_builds(documents: Any) -> None:
    """Else no manifest of an older store would have the digest that is stored with it."""
    arm = ArmPlan(name="base", role="base", source="checkout")
    assert "build" not in arm.model_dump()
    assert "build" not in arm.canonical()
    doc = documents.sweep()
    assert '"build"' not in doc.manifest.canonical()


def test_a_build_is_part_of_what_was_asked(documents: Any) -> None:
    plain, built = documents.sweep(), documents.sweep(head=documents.stable_arm(plan={"build": BUILD}))
    assert plain.manifest.digest() != built.manifest.digest()
    assert Manifest.model_validate_json(built.manifest.canonical()) == built.manifest
    assert not plain.manifest.arms[0].unbuilt
    assert not built.manifest.arms[-1].unbuilt
