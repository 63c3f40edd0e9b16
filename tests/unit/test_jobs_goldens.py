"""Goldens: blessed ids as a third beside base and head, used only for what they were blessed for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs.goldens import digest_of_prompts
from jobs.judge import judge
from jobs.model import JudgeInput, RunFact, RunSettings
from jobs.reviewed import Golden, GoldenStream, Reviewed
from jobs.verdict import Verdict
from reports.render import render

Ids = Callable[[int, int], tuple[int, ...]]


def golden(documents: Any, **changes: Any) -> Golden:
    plan = documents.plan(("base", "head"))
    fields: dict[str, Any] = {
        "id": "gld_" + "0" * 26,
        "cell": plan.cell,
        "model_digest": plan.model_digest,
        "prompt_digest": digest_of_prompts(plan),
        "tokens": 32,
        "ignore_eos": True,
        "card": "sim-h200",
        "streams": (GoldenStream(ids=documents.IDS, stop="length", gaps=(5.0,) * 32),),
        "reason": "matches the fp32 reference",
        "by": "Ada",
        "at": "2026-11-02T10:00:00+00:00",
        "sweep": "swp_0",
        "arm": "base",
        "runs": ("run_0",),
        "engine_digest": "e" * 64,
    }
    return Golden(**{**fields, **changes})


def judged(doc: JudgeInput, *goldens: Golden, retracted: dict[str, str] | None = None, **reviewed: Any) -> Verdict:
    held = Reviewed(at="c" * 40, goldens=goldens, **reviewed)
    manifest = doc.manifest.model_copy(update={"reviewed": held})
    verdict = judge(doc.model_copy(update={"manifest": manifest, "retracted_goldens": retracted or {}}))
    assert isinstance(verdict, Verdict)
    assert Verdict.model_validate_json(verdict.canonical()) == verdict
    return verdict


def wrong(documents: Any, at: int = 7) -> Ids:
    return lambda _run, _generation: (*documents.IDS[:at], 9, *documents.IDS[at + 1 :])


def test_arms_that_meet_the_golden_pass_and_its_use_is_kept(documents: Any) -> None:
    verdict = judged(documents.sweep(), golden(documents))
    assert verdict.exit_code == 0
    rows = [row for row in verdict.cells[0].identity if row.what == "golden"]
    assert [(row.left, row.right, row.klass) for row in rows] == [
        ("golden", name, "IDENTICAL") for name in ("base", "null", "head")
    ]
    (row,) = verdict.reviewed
    assert (row.kind, row.state, row.cells) == ("golden", "used", (verdict.cells[0].cell,))
    assert "a golden was held against 1 of 1 cells" in verdict.blind_spots[0]
    assert "3 of an arm with the golden" in " ".join(render(verdict, "text").split())


def test_field_40_base_and_head_that_agree_and_are_both_wrong_do_not_pass(documents: Any) -> None:
    both = wrong(documents)
    doc = documents.sweep(base=documents.arm(ids=both), head=documents.stable_arm(ids=both))
    assert judged(doc).exit_code == 0, "nothing but a third can tell"
    verdict = judged(doc, golden(documents))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    found = {one.arm for one in verdict.findings if one.outcome == "VIOLATION"}
    assert found == {"base", "null", "head"}
    assert "differs from golden at index 7" in verdict.findings[0].message
    assert all(row.klass == "IDENTICAL" for row in verdict.cells[0].identity if row.what == "pair")


def test_field_40_both_right_is_the_mirror(documents: Any) -> None:
    assert judged(documents.sweep(), golden(documents)).outcome in ("PASS", "IMPROVED")


@pytest.mark.parametrize(
    ("given", "outcome"),
    [(lambda ids: ids[:9], "SHORT"), (lambda ids: (*ids[:31], 9), "VIOLATION")],
)
def test_head_alone_that_differs_from_the_golden_is_named(documents: Any, given: Any, outcome: str) -> None:
    ids = given(documents.IDS)
    stop = "eos" if len(ids) < 32 else "length"
    head = documents.stable_arm(ids=lambda _r, _g: ids, stop=lambda _r, _g: stop)
    verdict = judged(documents.sweep(head=head), golden(documents))
    mine = [one for one in verdict.findings if "golden" in one.message]
    assert {(one.outcome, one.arm, one.exit_code) for one in mine} == {(outcome, "head", 1)}


@pytest.mark.parametrize("arm", ["base", "head"])
@pytest.mark.parametrize(("run", "generation"), [(0, 0), (0, 2), (1, 0), (1, 2)])
def test_every_generation_of_every_run_is_held_against_the_golden(
    documents: Any, arm: str, run: int, generation: int
) -> None:
    """An arm that wavers may meet it in one run and not in the other: the one that does not shows."""

    def ids(at: int, index: int) -> tuple[int, ...]:
        return wrong(documents)(at, index) if (at, index) == (run, generation) else documents.IDS

    script = documents.arm(ids=ids) if arm == "base" else documents.stable_arm(ids=ids)
    verdict = judged(documents.sweep(**{arm: script}, null=documents.arm()), golden(documents))
    rows = {row.right.split()[0]: row for row in verdict.cells[0].identity if row.what == "golden"}
    assert (rows[arm].klass, rows[arm].first_difference, rows[arm].generation) == ("VIOLATION", 7, generation)
    assert any("differs from golden at index 7" in one.message for one in verdict.findings if one.arm == arm)
    assert {row.klass for name, row in rows.items() if name != arm} == {"IDENTICAL"}


def test_a_run_that_gave_more_generations_than_the_other_is_held_against_the_golden_whole(documents: Any) -> None:
    def ids(at: int, index: int) -> tuple[int, ...]:
        return wrong(documents)(at, index) if index == 2 else documents.IDS

    def shorter(run: RunFact) -> RunFact:
        if run.record is None or run.arm != "head" or run.position > 2:
            return run
        return run.model_copy(
            update={"record": run.record.model_copy(update={"generations": run.record.generations[:2]})}
        )

    doc = documents.replace_runs(documents.sweep(head=documents.stable_arm(ids=ids)), shorter)
    assert len({len(run.record.generations) for run in doc.cells[0].runs if run.arm == "head"}) == 2
    [row] = [
        row
        for row in judged(doc, golden(documents)).cells[0].identity
        if (row.what, row.right[:4]) == ("golden", "head")
    ]
    assert (row.klass, row.generation) == ("VIOLATION", 2)


def test_where_the_goldens_gap_is_small_nothing_adjudicates(documents: Any) -> None:
    close = GoldenStream(ids=documents.IDS, stop="length", gaps=(0.01,) * 32)
    both = wrong(documents)
    doc = documents.sweep(base=documents.arm(ids=both), head=documents.stable_arm(ids=both))
    verdict = judged(doc, golden(documents, streams=(close,)))
    assert (verdict.outcome, verdict.exit_code) == ("UNADJUDICATED", 1)
    assert "golden's gap there is 0.01" in verdict.headline


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"model_digest": "x"}, "another model"),
        ({"prompt_digest": "0" * 64}, "other prompts"),
        ({"tokens": 16}, "another number of tokens"),
        ({"ignore_eos": False}, "another rule for end ids"),
        ({"card": "NVIDIA H200"}, "another card (NVIDIA H200; this one ran on sim-h200)"),
        ({"cell": "another"}, "no cell of this sweep has its name"),
    ],
)
def test_a_golden_of_something_else_is_not_used_and_that_is_said(
    documents: Any, other: dict[str, Any], why: str
) -> None:
    both = wrong(documents)
    doc = documents.sweep(base=documents.arm(ids=both), head=documents.stable_arm(ids=both))
    verdict = judged(doc, golden(documents, **other))
    assert verdict.exit_code == 0
    (row,) = verdict.reviewed
    assert (row.state, why in row.why) == ("unused", True)
    assert any(why in note for note in verdict.notes)


def test_field_32_a_golden_of_another_card_is_used_where_the_scope_leaves_cards_out(documents: Any) -> None:
    both = wrong(documents)
    doc = documents.sweep(base=documents.arm(ids=both), head=documents.stable_arm(ids=both))
    identity = doc.manifest.identity.model_copy(update={"scope": ("batch", "driver")})
    wide = doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"identity": identity})})
    assert judged(doc, golden(documents, card="NVIDIA H200")).exit_code == 0
    assert judged(wide, golden(documents, card="NVIDIA H200")).exit_code == 1


def test_the_later_golden_of_a_cell_supersedes_the_earlier(documents: Any) -> None:
    old = golden(documents, streams=(GoldenStream(ids=wrong(documents)(0, 0), stop="length", gaps=(5.0,) * 32),))
    new = golden(documents, id="gld_" + "1" * 26, supersedes=old.id)
    verdict = judged(documents.sweep(), old, new)
    assert verdict.exit_code == 0
    assert [(row.id, row.state) for row in verdict.reviewed] == [(old.id, "unused"), (new.id, "used")]
    assert judged(documents.sweep(), old).exit_code == 1


def test_a_retracted_golden_is_struck_out_and_its_forerunner_does_not_come_back(documents: Any) -> None:
    old = golden(documents, streams=(GoldenStream(ids=wrong(documents)(0, 0), stop="length", gaps=(5.0,) * 32),))
    new = golden(documents, id="gld_" + "1" * 26, supersedes=old.id)
    verdict = judged(documents.sweep(), old, new, retracted={new.id: "its card was faulty"})
    assert verdict.exit_code == 0
    assert [(row.id, row.state) for row in verdict.reviewed] == [(old.id, "unused"), (new.id, "retracted")]
    assert any("is retracted: its card was faulty" in note for note in verdict.notes)
    assert judged(documents.sweep(), old).exit_code == 1
    assert judged(documents.sweep(), old, retracted={old.id: "why"}).exit_code == 0, "it accuses nobody any more"


def test_a_golden_of_the_change_itself_is_not_in_force(documents: Any) -> None:
    both = wrong(documents)
    mine = golden(documents, streams=(GoldenStream(ids=both(0, 0), stop="length", gaps=(5.0,) * 32),))
    verdict = judged(documents.sweep(), proposed_goldens=(mine,))
    assert verdict.exit_code == 0
    assert [row.state for row in verdict.reviewed] == ["not in force"]


def test_every_sequence_of_a_batch_is_held_against_its_own(documents: Any) -> None:
    from jobs.model import SequenceTokens

    def two(doc: JudgeInput, second: tuple[int, ...]) -> JudgeInput:
        def widened(run: Any) -> Any:
            other = (SequenceTokens(ids=second, stop_reason="length", gaps=(5.0,) * 32),)
            generations = tuple(g.model_copy(update={"further": other}) for g in run.record.generations)
            return run.model_copy(update={"record": run.record.model_copy(update={"generations": generations})})

        found: JudgeInput = documents.replace_runs(doc, widened)
        return found

    cell = {"config": {"weight_budget": "50%", "batch": 2}, "further_prompts": ((1, 2),)}
    doc = two(documents.sweep(cell=cell), wrong(documents)(0, 0))
    plan = doc.manifest.cells[0]
    right = GoldenStream(ids=documents.IDS, stop="length", gaps=(5.0,) * 32)
    blessed = golden(documents, prompt_digest=digest_of_prompts(plan), streams=(right, right))
    verdict = judged(doc, blessed)
    assert any("golden" in one.message and "sequence 2" in one.message for one in verdict.findings)


def test_plan_only_cells_have_no_ids_to_hold_against_a_golden(documents: Any) -> None:
    settings = RunSettings(tokens=32, generations=3, ignore_eos=True, arithmetic="none", device="sim")
    doc = documents.sweep(cell={"settings": settings})
    assert [row.state for row in judged(doc, golden(documents)).reviewed] == ["unused"]


def test_what_a_program_calls_its_card_frees_nobody_of_the_golden(documents: Any) -> None:
    """The worker's certificate says which card it was; a name of the program's own would set the golden aside."""
    told: dict[str, Any] = {"ids": wrong(documents), "gap": 5.0, "device": {"name": "something else"}}
    doc = documents.sweep(base=documents.arm(**told), head=documents.stable_arm(**told))
    verdict = judged(doc, golden(documents))
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert [row.state for row in verdict.reviewed] == ["used"]
