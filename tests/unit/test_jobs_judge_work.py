"""Same work or not: streams that never met, lengths and tokens that differ where identity does not block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import AttemptFact, Equation, Gate, GateAction, Generation, JudgeInput, RunFact, RunSettings
from jobs.verdict import Verdict


def verdict_of(doc: JudgeInput) -> Verdict:
    verdict = judge(doc)
    assert isinstance(verdict, Verdict)
    return verdict


def renumbered(documents: Any, number: Callable[[Generation], dict[str, Any]], **cell: Any) -> Verdict:
    """The verdict where head's generations carry other indices or flags than those that were asked."""

    def change(run: RunFact) -> RunFact:
        if run.arm != "head":
            return run
        assert run.record is not None
        changed = tuple(g.model_copy(update=number(g)) for g in run.record.generations)
        return run.model_copy(update={"record": run.record.model_copy(update={"generations": changed})})

    return verdict_of(documents.replace_runs(documents.sweep(cell=cell), change))


@pytest.mark.parametrize("by", [1, 5])
def test_generations_that_do_not_count_from_zero_are_missing(documents: Any, by: int) -> None:
    verdict = renumbered(documents, lambda g: {"index": g.index + by})
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert any("do not count from 0" in finding.message for finding in verdict.findings)
    assert any("could be compared with base" in f.message for f in verdict.findings) is (by == 5)


def test_a_warm_up_that_is_not_the_first_is_misplaced(documents: Any) -> None:
    settings = RunSettings(tokens=32, generations=2, warmups=1, ignore_eos=True)
    verdict = renumbered(documents, lambda g: {"warmup": g.index == 2}, settings=settings)
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert any("warm-ups come first" in finding.message for finding in verdict.findings)


def test_arms_that_both_give_no_id_are_not_identical(documents: Any) -> None:
    silent = {"ids": lambda _r, _g: (), "stop": lambda _r, _g: "eos", "emitted": 0}
    busy = {"counters": lambda _steps: documents.lru(96)}
    both = documents.arm(**silent, **busy)
    settings = RunSettings(tokens=32, generations=3)
    verdict = verdict_of(documents.sweep(base=both, head=both, cell={"settings": settings}))
    assert (verdict.outcome, verdict.exit_code, verdict.cells_judged) == ("MISSING", 3, 0)
    assert "neither arm gave an id" in verdict.headline


@pytest.mark.parametrize("action", ["off", "advise"])
def test_counters_of_another_length_prove_nothing_where_identity_does_not_block(
    documents: Any, action: GateAction
) -> None:
    short = documents.arm(ids=lambda _r, _g: documents.IDS[:3])
    verdict = verdict_of(documents.sweep(head=short, gate=Gate(identity=action)))
    assert (verdict.outcome, verdict.exit_code) == ("MISSING", 3)
    assert "head gives 3 ids where base gives 32" in verdict.headline


@pytest.mark.parametrize(
    ("action", "outcome", "code"), [("off", "MISSING", 3), ("advise", "MISSING", 3), ("block", "VIOLATION", 1)]
)
def test_times_of_other_tokens_are_no_pass_where_time_blocks(
    documents: Any, action: GateAction, outcome: str, code: int
) -> None:
    wrong = (*documents.IDS[:7], 33803, *documents.IDS[8:])
    head = documents.arm(ids=lambda _r, _g: wrong, step_ns=lambda _b, _r: 60_000_000)
    gate = Gate(identity=action, exact="off", time="block")
    verdict = verdict_of(documents.sweep(head=head, cell={"blocks": 6}, gate=gate))
    assert (verdict.outcome, verdict.exit_code) == (outcome, code)


@pytest.mark.parametrize("attempts", [(), ("failed",), ("measured", "measured")])
def test_a_complete_run_holds_the_record_of_its_one_measured_attempt(documents: Any, attempts: tuple[str, ...]) -> None:
    def change(run: RunFact) -> RunFact:
        assert run.record is not None
        rows = [
            AttemptFact.model_validate(
                {"attempt_id": run.record.attempt_id if n == 1 else f"att_{n}", "number": n, "state": state}
            )
            for n, state in enumerate(attempts, start=1)
        ]
        return run.model_copy(update={"attempts": tuple(rows)}) if run.arm == "head" else run

    verdict = verdict_of(documents.replace_runs(documents.sweep(), change))
    assert (verdict.outcome, verdict.exit_code) == ("INFRASTRUCTURE", 4)


def test_a_record_of_another_run_is_not_this_runs(documents: Any) -> None:
    def change(run: RunFact) -> RunFact:
        assert run.record is not None
        other = run.record.model_copy(update={"run_id": "run_of_another"})
        return run.model_copy(update={"record": other}) if run.arm == "head" else run

    verdict = verdict_of(documents.replace_runs(documents.sweep(), change))
    assert (verdict.outcome, verdict.exit_code) == ("INFRASTRUCTURE", 4)
    assert "run_of_another" in verdict.headline


def test_a_head_that_is_base_again_is_said_to_have_no_change(documents: Any) -> None:
    same = verdict_of(documents.sweep(head=documents.arm(), varies=()))
    assert same.outcome == "PASS"
    assert same.blind_spots[0].startswith("head ran the engine of base with its settings")
    patched = documents.arm(plan={"tree_digest": "f" * 64}, record={"engine_digest": "f" * 64})
    for other in (documents.stable_arm(), patched):
        assert not any("ran the engine of base" in spot for spot in verdict_of(documents.sweep(head=other)).blind_spots)


def test_an_equation_that_head_no_longer_states_is_noted(documents: Any) -> None:
    stated = [Equation(name=name, text="1 == 1", relation="==", lhs=1, rhs=1, holds=True) for name in ("W3", "W1")]
    base, head = documents.arm(equations=tuple(stated)), documents.arm(equations=(stated[1],))
    (cell,) = verdict_of(documents.sweep(base=base, head=head, varies=())).cells
    assert "head no longer states equations that base does: W3" in cell.notes
    (cell,) = verdict_of(documents.sweep(base=head, head=base, varies=())).cells
    assert not any("no longer states" in note for note in cell.notes)
