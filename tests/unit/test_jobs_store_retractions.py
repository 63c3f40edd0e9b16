"""Retraction in both stores: nothing is deleted, and what rests on the retracted is struck out wherever it is read."""

from __future__ import annotations

from typing import Any

import pytest
from alembic import command
from sqlalchemy import delete

from jobs import migrate
from jobs.blessing import golden_of
from jobs.errors import SpecError
from jobs.judge import judge
from jobs.model import JudgeInput
from jobs.retracted import struck
from jobs.reviewed import Golden, Reviewed
from jobs.store import Store, revision
from jobs.store.connect import Database
from jobs.tables import citation
from jobs.verdict import Verdict
from orchestrator.conclude import judge_sweep
from reports.explain import explain
from reports.render import render
from tests.unit.store_sweeps import Clock, claimed, measure, run_facts, submitted
from tests.unit.stored_documents import put

pytest_plugins = ("tests.unit.jobs_store_cases",)


def judged(store: Store, clock: Clock, doc: JudgeInput, key: str = "") -> tuple[str, Verdict]:
    sweep_id = put(store, doc, key)
    clock.pass_s(1)
    verdict = judge_sweep(store, sweep_id)
    clock.pass_s(1)
    return sweep_id, verdict


def blessed(store: Store, sweep_id: str, clock: Clock) -> Golden:
    verdict = store.verdict(sweep_id)
    assert verdict is not None
    doc = store.judge_input(sweep_id)
    made = golden_of(
        doc, verdict, doc.cells[0], None, golden_id="gld_" + "0" * 26, reason="checked", by="Ada", now=clock.now
    )
    store.write_golden(made)
    clock.pass_s(1)
    return made


def shown(verdict: Verdict, form: Any) -> str:
    return " ".join(render(verdict, form).split())


def test_a_retracted_sweep_is_struck_out_wherever_it_is_read(store: Store, clock: Clock, documents: Any) -> None:
    sweep_id, before = judged(store, clock, documents.sweep())
    assert before.exit_code == 0
    found = store.retract(sweep_id, "the fan was blocked", "Ada")
    assert (found.id, [sweep for _, sweep in found.verdicts]) == (sweep_id, [sweep_id])
    after = store.verdict(sweep_id)
    assert after is not None
    assert (after.outcome, after.exit_code) == ("RETRACTED", 3)
    assert after.struck is not None
    assert (after.struck.outcome, after.struck.headline) == (before.outcome, before.headline)
    assert [(cell.outcome, cell.exit_code) for cell in after.cells] == [("RETRACTED", 3)]
    assert store.outcomes([sweep_id]) == {sweep_id: ("RETRACTED", 3)}
    assert "~~" in render(after, "comment")
    assert "<s>" in render(after, "html")
    assert "[struck out: " in shown(after, "text")
    for form in ("comment", "html", "text", "json", "junit"):
        assert "the fan was blocked" in shown(after, form), form
        assert "RETRACTED" in shown(after, form), form
    for limit in (800, 2000):
        assert "RETRACTED" in render(after, "comment", limit=limit)
    doc = store.judge_input(sweep_id)
    text = explain(after, doc, doc.cells[0].plan.cell)
    assert "struck out: The sweep" in text and "RETRACTED, exit 3" in text
    assert store.sweep(sweep_id).retracted_reason == "the fan was blocked"
    assert store.events(sweep_id)[-1].message == "by Ada: the fan was blocked"
    assert [one.id for one in store.sweeps()] == [sweep_id], "nothing is deleted"
    assert all(run.record is not None for run in run_facts(store, sweep_id))


def test_judging_a_retracted_sweep_again_proves_nothing(store: Store, clock: Clock, documents: Any) -> None:
    sweep_id, _ = judged(store, clock, documents.sweep())
    store.retract(sweep_id, "wrong model", "Ada")
    clock.pass_s(1)
    again = judge_sweep(store, sweep_id)
    assert (again.outcome, again.exit_code) == ("RETRACTED", 3)
    assert again.struck is not None and again.struck.outcome == "MISSING"
    assert "all of its sweep: wrong model" in again.struck.headline


def test_a_retracted_run_strikes_the_verdict_until_it_is_judged_without(
    store: Store, clock: Clock, documents: Any
) -> None:
    sweep_id, _ = judged(store, clock, documents.sweep(cell={"blocks": 2}))
    run_id = run_facts(store, sweep_id)[0].run_id
    store.retract(run_id, "another process was there", "Ada")
    after = store.verdict(sweep_id)
    assert after is not None and after.struck is not None
    assert (after.exit_code, after.struck.why[0].kind, after.struck.why[0].id) == (3, "run", run_id)
    assert after.struck.why[0].cell == after.cells[0].cell
    clock.pass_s(1)
    again = judge_sweep(store, sweep_id)
    assert again.struck is None, "this one does not rest on it"
    assert (again.outcome, again.exit_code) == ("MISSING", 3)
    assert "retracted: another process was there" in again.headline
    assert store.outcomes([sweep_id]) == {sweep_id: ("MISSING", 3)}
    aside = [(row.run_id, row.state, row.reason) for row in again.set_aside]
    assert (run_id, "retracted", "retracted: another process was there") in aside


def test_a_red_verdict_that_is_retracted_says_nothing_either(store: Store, clock: Clock, documents: Any) -> None:
    doc = documents.sweep(head=documents.stable_arm(changes={"segments": 2}))
    sweep_id, before = judged(store, clock, doc)
    assert before.exit_code == 1
    store.retract(sweep_id, "base was another commit", "Ada")
    assert store.outcomes([sweep_id]) == {sweep_id: ("RETRACTED", 3)}


def test_other_sweeps_and_other_cells_stand(store: Store, clock: Clock, documents: Any) -> None:
    first, _ = judged(store, clock, documents.sweep(), "one")
    second, before = judged(store, clock, documents.sweep(), "two")
    store.retract(first, "why", "Ada")
    assert store.verdict(second) == before
    verdict = struck(before, ())
    assert verdict is before


def test_a_golden_of_a_retracted_run_is_struck_out_in_verdicts_of_other_sweeps(
    store: Store, clock: Clock, documents: Any
) -> None:
    first, _ = judged(store, clock, documents.sweep(), "one")
    golden = blessed(store, first, clock)
    doc = documents.sweep()
    manifest = doc.manifest.model_copy(update={"reviewed": Reviewed(at="c" * 40, goldens=(golden,))})
    second, before = judged(store, clock, doc.model_copy(update={"manifest": manifest}), "two")
    third, _ = judged(store, clock, documents.sweep(), "three")
    assert [row.state for row in before.reviewed] == ["used"]
    found = store.retract(golden.runs[0], "the card was faulty", "Ada")
    assert found.goldens == (golden.id,)
    assert {sweep for _, sweep in found.verdicts} == {first, second}
    after = store.verdict(second)
    assert after is not None and after.struck is not None
    (why,) = after.struck.why
    assert (why.kind, why.id, why.cell) == ("golden", golden.id, golden.cell)
    assert store.outcomes([first, second, third]) == {
        first: ("RETRACTED", 3), second: ("RETRACTED", 3), third: (before.outcome, before.exit_code)
    }  # fmt: skip
    clock.pass_s(1)
    again = judge_sweep(store, second)
    assert again.struck is None
    (row,) = again.reviewed
    assert row.state == "retracted" and "the card was faulty" in row.why


def test_a_retracted_sweep_takes_its_goldens_with_it(store: Store, clock: Clock, documents: Any) -> None:
    first, _ = judged(store, clock, documents.sweep())
    golden = blessed(store, first, clock)
    assert store.retract(first, "why", "Ada").goldens == (golden.id,)
    assert store.resolve_id(golden.id[:12]) == golden.id
    verdict = store.verdict(first)
    assert verdict is not None
    doc = store.judge_input(first)
    with pytest.raises(SpecError, match="is retracted"):
        golden_of(doc, verdict, doc.cells[0], None, golden_id="gld_1", reason="r", by="b", now=clock.now)


def test_what_cannot_be_retracted_is_said(store: Store, clock: Clock, documents: Any) -> None:
    open_sweep = submitted(store)
    run_id = run_facts(store, open_sweep)[0].run_id
    with pytest.raises(SpecError, match="needs a reason"):
        store.retract(run_id, "  ", "Ada")
    with pytest.raises(SpecError, match="is pending: it measured nothing"):
        store.retract(run_id, "why", "Ada")
    with pytest.raises(SpecError, match="is not judged yet"):
        store.retract(open_sweep, "why", "Ada")
    for unknown in ("run_none", "swp_none"):
        with pytest.raises(SpecError, match="no run or sweep"):
            store.retract(unknown, "why", "Ada")
    claim = claimed(store, open_sweep)
    measure(store, claim, runs=1)
    store.retract(claim.runs[0].run_id, "seen before it was judged", "Ada")
    assert next(run.retracted for run in run_facts(store, open_sweep)) == "seen before it was judged"
    with pytest.raises(SpecError, match=r"is retracted already, since 2026-11-30 .*: seen before it was judged"):
        store.retract(claim.runs[0].run_id, "a better reason", "Ada")
    [told] = [event.message for event in store.events(open_sweep) if event.kind == "retracted"]
    assert told == "by Ada: seen before it was judged"
    assert next(run.retracted for run in run_facts(store, open_sweep)) == "seen before it was judged"


def test_a_run_that_is_retracted_while_it_is_judged_strikes_that_verdict(
    store: Store, clock: Clock, documents: Any
) -> None:
    """Read, retracted, written: by its times that verdict would be the younger one, and it rests on the run."""
    sweep_id = put(store, documents.sweep())
    verdict = judge(store.judge_input(sweep_id))
    assert isinstance(verdict, Verdict) and verdict.exit_code == 0
    clock.pass_s(1)
    run_id = run_facts(store, sweep_id)[0].run_id
    store.retract(run_id, "the fan was blocked", "Ada")
    clock.pass_s(1)
    store.write_verdict(sweep_id, verdict, verdict.input_digest)
    assert store.outcomes([sweep_id]) == {sweep_id: ("RETRACTED", 3)}
    clock.pass_s(1)
    assert judge_sweep(store, sweep_id).outcome == "MISSING"


def test_the_same_once_more_does_not_strike_what_was_judged_without_the_run(
    store: Store, clock: Clock, documents: Any
) -> None:
    sweep_id, _ = judged(store, clock, documents.sweep(cell={"blocks": 2}))
    run_id = run_facts(store, sweep_id)[0].run_id
    store.retract(run_id, "why", "Ada")
    clock.pass_s(-60)  # whoever judges may have a clock that is behind
    assert judge_sweep(store, sweep_id).outcome == "MISSING"
    clock.pass_s(120)
    store.retract(run_id, "why", "Bo")
    assert store.outcomes([sweep_id]) == {sweep_id: ("MISSING", 3)}


def test_a_retracted_run_of_an_anchor_is_set_aside_like_any_other(store: Store, clock: Clock, documents: Any) -> None:
    anchor = documents.arm(plan={"role": "anchor"})
    sweep_id, _ = judged(store, clock, documents.sweep(others={"release": anchor}))
    run_id = next(run.run_id for run in run_facts(store, sweep_id) if run.arm == "release")
    store.retract(run_id, "why", "Ada")
    assert store.outcomes([sweep_id]) == {sweep_id: ("RETRACTED", 3)}
    clock.pass_s(1)
    again = judge_sweep(store, sweep_id)
    assert (again.struck, again.exit_code) == (None, 0)
    assert [(row.run_id, row.state) for row in again.set_aside] == [(run_id, "retracted")]


@pytest.mark.parametrize("is_judged_without", [False, True])
def test_what_rested_on_a_run_that_was_retracted_before_that_was_noted_is_struck_out(
    store_url: str, store: Store, clock: Clock, documents: Any, is_judged_without: bool
) -> None:
    """A store as it was before: the upgrade notes it, and not of a verdict that left the run out."""
    sweep_id, before = judged(store, clock, documents.sweep())
    wrong = run_facts(store, sweep_id)[1]
    store.retract(wrong.run_id, "the fan was blocked", "Ada")
    clock.pass_s(1)
    if is_judged_without:
        judge_sweep(store, sweep_id)
    database = Database(store_url)
    database.write(lambda c: command.downgrade(revision._config(c, None), "0010"))
    database.write(lambda c: c.execute(delete(citation)))
    assert not store.retractions(sweep_id)
    assert migrate.upgrade(store_url).is_current
    found = store.verdict(sweep_id)
    assert found is not None
    if is_judged_without:
        assert (found.outcome, store.retractions(sweep_id)) == ("MISSING", ())
    else:
        assert (found.outcome, found.exit_code) == ("RETRACTED", 3)
        assert found.struck is not None and found.struck.headline == before.headline
        assert "the fan was blocked" in shown(found, "comment")
        [why] = store.retractions(sweep_id)
        assert (why.kind, why.id, why.cell) == ("run", wrong.run_id, before.cells[0].cell)
    stood = store.retractions(sweep_id)
    database.write(lambda c: command.downgrade(revision._config(c, None), "0010"))
    assert migrate.upgrade(store_url).is_current and store.retractions(sweep_id) == stood
    database.close()
