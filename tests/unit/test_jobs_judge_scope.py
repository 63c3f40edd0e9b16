"""Where the claim of equal tokens ends: blocks of one cell on several cards and drivers, by the contract's scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs.contract import IdentityContract
from jobs.judge import judge
from jobs.model import JudgeInput, RunFact, SequenceTokens
from jobs.verdict import Verdict

ALL = ("batch", "card", "driver")
NO_CARD = ("batch", "driver")
NO_DRIVER = ("batch", "card")


def two_places(
    documents: Any, scope: tuple[str, ...], *, other: frozenset[str] = frozenset(), **device: str
) -> Verdict:
    """Two blocks, the second of them elsewhere; `other` arms give another id there."""
    doc: JudgeInput = documents.sweep(cell={"blocks": 2}, identity=IdentityContract(scope=scope))

    def moved(run: RunFact) -> RunFact:
        assert run.record is not None and run.record.certificate is not None
        if run.block == 0:
            return run
        generations = run.record.generations
        if run.arm in other:
            ids = (*documents.IDS[:7], 1, *documents.IDS[8:])
            generations = tuple(g.model_copy(update={"ids": ids}) for g in generations)
        seen = run.record.certificate.model_copy(update={k: v for k, v in device.items() if k in ("uuid", "driver")})
        changes = {"device": {**run.record.device, **device}, "certificate": seen, "generations": generations}
        return run.model_copy(update={"record": run.record.model_copy(update=changes)})

    verdict = judge(documents.replace_runs(doc, moved))
    assert isinstance(verdict, Verdict)
    return verdict


def pairs(verdict: Verdict) -> list[str]:
    return [row.klass for row in verdict.cells[0].identity if row.what == "pair"]


def two_batches(
    documents: Any,
    scope: tuple[str, ...],
    *,
    other: frozenset[str] = frozenset(),
    moved: Callable[[RunFact], RunFact] = lambda run: run,
    **cell: Any,
) -> Verdict:
    """A cell at batch 1 and one at batch 2; in the latter `other` arms give another id, and runs are `moved`."""

    def wrong(_run: int, _generation: int) -> tuple[int, ...]:
        return (*documents.IDS[:7], 1, *documents.IDS[8:])

    def of_batch(batch: int, arms: dict[str, Any], **changes: Any) -> JudgeInput:
        plan = {"cell": f"c/batch={batch}", "config": {"weight_budget": "50%", "batch": batch}, **changes}
        doc: JudgeInput = documents.sweep(cell=plan, **arms)
        return doc

    told: dict[str, dict[str, Any]] = {name: {"ids": wrong} if name in other else {} for name in EVERYONE}
    made = {name: documents.stable_arm if name == "head" else documents.arm for name in EVERYONE}
    small = of_batch(1, {})
    large = of_batch(2, {name: made[name](**told[name]) for name in EVERYONE}, **cell)
    runs = tuple(again(moved(widened(run)), f"{run.run_id}_large") for run in large.cells[0].runs)
    cells = (large.cells[0].model_copy(update={"runs": runs}), small.cells[0])
    plans = tuple(cell.plan for cell in cells)
    manifest = small.manifest.model_copy(update={"cells": plans, "identity": IdentityContract(scope=scope)})
    verdict = judge(small.model_copy(update={"manifest": manifest, "cells": cells}))
    assert isinstance(verdict, Verdict)
    return verdict


def widened(run: RunFact) -> RunFact:
    """A second sequence beside the first, of the same prompt."""
    assert run.record is not None
    generations = tuple(
        g.model_copy(update={"further": (SequenceTokens(ids=g.ids, stop_reason=g.stop_reason, gaps=g.gaps),)})
        for g in run.record.generations
    )
    emitted = run.record.counters["emitted_tokens"]
    assert isinstance(emitted, int)
    changes = {"generations": generations, "counters": {**run.record.counters, "emitted_tokens": 2 * emitted}}
    return run.model_copy(update={"record": run.record.model_copy(update=changes)})


def again(run: RunFact, run_id: str) -> RunFact:
    """The same run under another id."""
    assert run.record is not None
    record = run.record.model_copy(update={"run_id": run_id})
    return run.model_copy(update={"run_id": run_id, "record": record})


EVERYONE = frozenset({"base", "head", "null"})


@pytest.mark.parametrize(("scope", "rows"), [(ALL, 2), (NO_CARD, 1), (("batch",), 1)])
def test_equal_tokens_on_two_cards_are_one_claim_or_two(documents: Any, scope: tuple[str, ...], rows: int) -> None:
    verdict = two_places(documents, scope, uuid="SIM-1")
    assert pairs(verdict) == ["IDENTICAL"] * rows
    assert verdict.exit_code == 0


def test_other_tokens_on_another_card_are_out_of_a_scope_of_one_card(documents: Any) -> None:
    verdict = two_places(documents, ALL, other=EVERYONE, uuid="SIM-1")
    assert pairs(verdict) == ["IDENTICAL", "IDENTICAL"]
    assert verdict.exit_code == 0


def test_other_tokens_on_another_card_break_a_claim_over_cards(documents: Any) -> None:
    verdict = two_places(documents, NO_CARD, other=EVERYONE, uuid="SIM-1")
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 1)
    assert pairs(verdict) == ["NONDETERMINISTIC"]
    assert {f.arm: f.exit_code for f in verdict.findings if f.outcome == "NONDETERMINISTIC"} == {
        "base": 3,
        "null": 3,
        "head": 1,
    }
    assert "(on SIM-0, driver sim 1 and on SIM-1, driver sim 1)" in verdict.findings[0].message


def test_head_alone_that_differs_on_another_card_is_found_in_either_scope(documents: Any) -> None:
    assert two_places(documents, ALL, other=frozenset({"head"}), uuid="SIM-1").outcome == "VIOLATION"
    over = two_places(documents, NO_CARD, other=frozenset({"head"}), uuid="SIM-1")
    assert (over.outcome, over.exit_code) == ("NONDETERMINISTIC", 1)


@pytest.mark.parametrize(("scope", "klass", "code"), [(ALL, "NOT_COMPARABLE", 3), (NO_DRIVER, "IDENTICAL", 0)])
def test_blocks_on_two_drivers_are_compared_where_the_scope_leaves_it_out(
    documents: Any, scope: tuple[str, ...], klass: str, code: int
) -> None:
    verdict = two_places(documents, scope, driver="sim 2")
    assert (set(pairs(verdict)), verdict.exit_code) == ({klass}, code)


def test_other_tokens_on_another_driver_break_a_claim_over_drivers(documents: Any) -> None:
    verdict = two_places(documents, NO_DRIVER, other=EVERYONE, driver="sim 2")
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 1)
    assert "driver sim 1 and on SIM-0, driver sim 2)" in verdict.findings[0].message


@pytest.mark.parametrize(
    ("device", "words"),
    [({"driver": "sim 2"}, "block 0 ran on 2 drivers: sim 1, sim 2"), ({"uuid": "SIM-1"}, "block 0 ran on 2 cards")],
)
def test_a_block_keeps_to_one_card_and_driver_whatever_the_scope(
    documents: Any, device: dict[str, str], words: str
) -> None:
    head = documents.stable_arm(device=device)
    verdict = judge(documents.sweep(head=head, identity=IdentityContract(scope=("batch",))))
    assert isinstance(verdict, Verdict)
    assert verdict.outcome in ("NOT_COMPARABLE", "INFRASTRUCTURE")
    assert any(words in finding.message for finding in verdict.findings)


@pytest.mark.parametrize("scope", [ALL, ("card", "driver"), ()])
def test_equal_tokens_at_two_batches_are_no_finding(documents: Any, scope: tuple[str, ...]) -> None:
    verdict = two_batches(documents, scope)
    assert ([f.message for f in verdict.findings], verdict.exit_code) == ([], 0)


def test_tokens_that_depend_on_the_batch_are_out_of_a_scope_of_one_batch(documents: Any) -> None:
    assert two_batches(documents, ALL, other=EVERYONE).findings == ()


def test_tokens_that_depend_on_the_batch_break_a_claim_over_batches(documents: Any) -> None:
    """Base does it too, so that it is no finding against head."""
    verdict = two_batches(documents, ("card", "driver"), other=EVERYONE)
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 3)
    assert {(f.cell, f.arm) for f in verdict.findings} == {("c/batch=2", arm) for arm in EVERYONE}
    words = (
        f"gives other tokens at batch 2 than at batch 1: id 1 instead of {documents.IDS[7]} at index 7 of generation 1"
    )
    assert all(words in finding.message for finding in verdict.findings)


def test_head_alone_that_depends_on_the_batch_is_a_finding_against_it(documents: Any) -> None:
    verdict = two_batches(documents, ("card", "driver"), other=frozenset({"head"}))
    assert verdict.exit_code == 1
    assert ("NONDETERMINISTIC", "head", 1) in {(f.outcome, f.arm, f.exit_code) for f in verdict.findings}


def test_cells_of_two_prompts_or_budgets_are_not_held_against_each_other(documents: Any) -> None:
    for other in ({"prompt": "story"}, {"config": {"weight_budget": "40%", "batch": 2}}):
        found = two_batches(documents, ("card", "driver"), other=EVERYONE, **other).findings
        assert "NONDETERMINISTIC" not in {finding.outcome for finding in found}


def test_batches_that_share_no_card_are_not_compared_and_that_is_said(documents: Any) -> None:
    def elsewhere(run: RunFact) -> RunFact:
        assert run.record is not None and run.record.certificate is not None
        seen = run.record.certificate.model_copy(update={"uuid": "SIM-1"})
        changes = {"device": {**run.record.device, "uuid": "SIM-1"}, "certificate": seen}
        return run.model_copy(update={"record": run.record.model_copy(update=changes)})

    apart = two_batches(documents, ("card", "driver"), moved=elsewhere)
    assert (apart.outcome, apart.exit_code) == ("MISSING", 3)
    assert "base could be compared over batches" in " ".join(finding.message for finding in apart.findings)
    assert two_batches(documents, ("driver",), moved=elsewhere).findings == ()
