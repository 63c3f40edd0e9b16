"""Runs that the judge asks for before it answers: base again where ids differ, fresh blocks where the screen moved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jobs import compare, stats
from jobs.judge import concluded, judge
from jobs.model import CellInput, Gate, JudgeInput, Limits, RunFact
from jobs.more_runs import BASE_AGAIN, BaseAgain, FreshBlocks
from jobs.order import run_order
from jobs.spec.form import LEAST_DECIDING, LEAST_SCREENING
from jobs.verdict import TimeRow, Verdict


def verdict_of(doc: JudgeInput) -> Verdict:
    answer = judge(doc)
    assert isinstance(answer, Verdict), answer
    return answer


def other_ids(documents: Any, at: int = 7) -> Any:
    ids = (*documents.IDS[:at], 1, *documents.IDS[at + 1 :])
    return documents.stable_arm(ids=lambda _run, _generation: ids)


def without_null(documents: Any, **parts: Any) -> JudgeInput:
    """A sweep of base and head alone: base has run twice."""
    doc = documents.sweep(**parts)
    [cell] = doc.cells
    plan = cell.plan.model_copy(update={"arms": ("base", "head")})
    kept = [run for run in cell.runs if run.arm != "null"]
    order = {run.run_id: (run.block, run.position) for run in kept}
    places: dict[tuple[int, str], list[int]] = {
        (block, name): [] for block, name in {(run.block, run.arm) for run in kept}
    }
    for position, name in enumerate(run_order(plan, 0)):
        places[0, name].append(position)
    runs = []
    for run in sorted(kept, key=lambda run: order[run.run_id]):
        runs.append(run.model_copy(update={"position": places[run.block, run.arm].pop(0)}))
    arms = tuple(arm for arm in doc.manifest.arms if arm.role != "null")
    manifest = doc.manifest.model_copy(update={"arms": arms, "cells": (plan,)})
    made: JudgeInput = doc.model_copy(update={"manifest": manifest, "cells": (CellInput(plan=plan, runs=tuple(runs)),)})
    return made


def again(documents: Any, doc: JudgeInput, **changes: Any) -> JudgeInput:
    """The document with base run again, as the judge asked; `changes` are of its script."""
    [asked] = _asked(doc)
    assert isinstance(asked, BaseAgain)
    [cell] = doc.cells
    source = without_null(documents, base=documents.arm(**changes)).cells[0].runs
    runs = [run for run in source if run.arm == asked.arm] * 2
    first = len(cell.plan.arms) * 2
    added = tuple(_renamed(run, first + number) for number, run in enumerate(runs))
    assert len(added) == asked.runs == BASE_AGAIN
    more: JudgeInput = doc.model_copy(update={"cells": (cell.model_copy(update={"runs": (*cell.runs, *added)}),)})
    return more


def _renamed(run: RunFact, position: int) -> RunFact:
    assert run.record is not None
    name = f"{run.run_id}_{position}"
    record = run.record.model_copy(update={"run_id": name, "attempt_id": f"att_{name}"})
    attempts = (run.attempts[0].model_copy(update={"attempt_id": f"att_{name}"}),)
    return run.model_copy(update={"run_id": name, "position": position, "record": record, "attempts": attempts})


def _asked(doc: JudgeInput) -> tuple[Any, ...]:
    answer = judge(doc)
    assert isinstance(answer, tuple), answer.headline
    return answer


# ---- base again --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.5, 0.01], ids=["clear", "near"])
def test_base_that_ran_twice_runs_again_where_ids_differ_and_before_the_oracle_is_asked(
    documents: Any, gap: float
) -> None:
    doc = without_null(documents, base=documents.arm(gap=gap), head=other_ids(documents))
    assert _asked(doc) == (BaseAgain(cell=doc.cells[0].plan.cell, arm="base", card="SIM-0", block=0),)


def test_base_that_repeats_itself_leaves_a_violation(documents: Any) -> None:
    doc = again(documents, without_null(documents, head=other_ids(documents)))
    verdict = verdict_of(doc)
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert "6 runs" in verdict.cells[0].identity[1].note, "base against itself over all its runs"


def test_base_that_does_not_repeat_itself_then_leaves_it_open(documents: Any) -> None:
    """Two runs of base agreed by chance: of six one gives what head gives, and head is accused of nothing."""
    doc = without_null(documents, head=other_ids(documents))
    wrong = (*documents.IDS[:7], 1, *documents.IDS[8:])
    verdict = verdict_of(again(documents, doc, ids=lambda run, _g: wrong if run == 1 else documents.IDS))
    assert (verdict.outcome, verdict.exit_code) == ("NONDETERMINISTIC", 3)
    assert verdict.findings[0].arm == "base"


def test_base_that_contradicts_itself_runs_again_too(documents: Any) -> None:
    wavering = documents.arm(ids=lambda run, _g: (*documents.IDS[:3], 7 + run, *documents.IDS[4:]))
    [asked] = _asked(without_null(documents, base=wavering))
    assert asked.kind == "base"


def test_head_alone_that_contradicts_itself_says_nothing_of_base(documents: Any) -> None:
    wavering = documents.stable_arm(ids=lambda run, _g: (*documents.IDS[:3], 7 + run, *documents.IDS[4:]))
    assert verdict_of(without_null(documents, head=wavering)).outcome == "NONDETERMINISTIC"


@pytest.mark.parametrize("why", ["a null arm", "same ids", "identity is off", "no room"])
def test_base_does_not_run_again_without_need(documents: Any, why: str) -> None:
    head = other_ids(documents)
    made: dict[str, Callable[[], JudgeInput]] = {
        "a null arm": lambda: documents.sweep(head=head),
        "same ids": lambda: without_null(documents),
        "identity is off": lambda: without_null(documents, head=head, gate=Gate(identity="off")),
        "no room": lambda: without_null(documents, head=head, limits=Limits(follow_ups=0)),
    }
    verdict = verdict_of(made[why]())
    told = "base ran 2 times and was not run again" in " ".join(verdict.cells[0].notes)
    assert told is (why == "no room")


def test_nobody_to_run_base_again_is_said(documents: Any) -> None:
    verdict = concluded(without_null(documents, head=other_ids(documents)), "no worker was there")
    assert (verdict.outcome, verdict.exit_code) == ("VIOLATION", 1)
    assert any(note.endswith("whether it repeats itself: no worker was there") for note in verdict.cells[0].notes)


def test_further_runs_count_against_the_limit_of_follow_ups(documents: Any) -> None:
    """One was spent on base: a near tie that is found after it has none left to be asked about."""
    near = without_null(documents, base=documents.arm(gap=0.01), head=other_ids(documents), limits=Limits(follow_ups=1))
    verdict = verdict_of(again(documents, near, gap=0.01))
    assert verdict.outcome == "UNADJUDICATED" and "limits.follow_ups allows no more" in verdict.headline


def test_after_base_ran_again_the_oracle_is_asked(documents: Any) -> None:
    near = without_null(documents, base=documents.arm(gap=0.01), head=other_ids(documents))
    [asked] = _asked(again(documents, near, gap=0.01))
    assert asked.kind == "oracle"


def test_times_of_base_again_are_in_no_block(documents: Any) -> None:
    doc = without_null(documents, head=other_ids(documents))
    slow = again(documents, doc, step_ns=lambda _block, _run: 900_000_000)
    rows = {row.metric: row for row in verdict_of(slow).cells[0].time}
    assert rows["decode_ms_per_token"].base_median == 20.0


# ---- fresh blocks ------------------------------------------------------------------------------------------------

SCREEN, FRESH = 8, 16


def timed(documents: Any, head_ns: Any, *, fresh: int = 0, screen: int = SCREEN, **manifest: Any) -> JudgeInput:
    """Blocks that screen, of which `fresh` more have been run; `head_ns` by block."""

    def jitter(block: int, run: int) -> int:
        return 20_000_000 + 20_000 * ((block * 7 + run * 3) % 5)

    doc = documents.sweep(
        base=documents.arm(step_ns=jitter),
        head=documents.arm(step_ns=lambda block, run: int(jitter(block, run) * head_ns(block))),
        cell={"blocks": screen + fresh},
        varies=(),
        **manifest,
    )
    plan = doc.cells[0].plan.model_copy(update={"blocks": screen, "fresh_blocks": FRESH})
    made: JudgeInput = doc.model_copy(
        update={
            "manifest": doc.manifest.model_copy(update={"cells": (plan,)}),
            "cells": (doc.cells[0].model_copy(update={"plan": plan}),),
        }
    )
    return made


def decode_row(verdict: Verdict) -> TimeRow:
    return next(row for row in verdict.cells[0].time if row.metric == "decode_ms_per_token")


@pytest.mark.parametrize("ratio", [1.1, 0.9], ids=["slower", "faster"])
def test_blocks_that_moved_ask_for_fresh_ones_to_decide(documents: Any, ratio: float) -> None:
    doc = timed(documents, lambda _block: ratio)
    assert _asked(doc) == (FreshBlocks(cell=doc.cells[0].plan.cell, first=SCREEN, count=FRESH),)
    decided = decode_row(verdict_of(timed(documents, lambda _block: ratio, fresh=FRESH)))
    assert (decided.klass, decided.blocks) == ("WORSE" if ratio > 1 else "BETTER", FRESH)
    assert decided.ratio == pytest.approx(ratio, rel=1e-3)


def test_blocks_that_did_not_move_ask_for_none_and_are_the_same(documents: Any) -> None:
    row = decode_row(verdict_of(timed(documents, lambda _block: 1.0)))
    assert (row.klass, row.blocks) == ("SAME", SCREEN)


def test_a_screen_alone_is_never_an_alarm(documents: Any) -> None:
    """Nobody ran the fresh blocks: however slow head is in the others, nothing is decided, and time does not gate."""
    doc = timed(documents, lambda _block: 3.0, limits=Limits(follow_ups=0))
    verdict = verdict_of(doc)
    row = decode_row(verdict)
    assert row.klass == "UNDECIDED" and stats.AWAITS in row.note and "seems slower" in row.note
    assert verdict.exit_code == 0
    assert any("16 fresh blocks that decide on time were not run: limits" in note for note in verdict.cells[0].notes)
    gated = verdict_of(timed(documents, lambda _block: 3.0, limits=Limits(follow_ups=0), gate=Gate(time="block")))
    assert (gated.outcome, gated.exit_code) == ("MISSING", 3)


def test_fresh_blocks_decide_alone(documents: Any) -> None:
    """Head was slow in all blocks that screened, and in none of the fresh ones: it is not worse."""
    row = decode_row(verdict_of(timed(documents, lambda block: 1.2 if block < SCREEN else 1.0, fresh=FRESH)))
    assert (row.klass, row.blocks) == ("SAME", FRESH)
    assert row.ratio == pytest.approx(1.0)


def test_a_change_that_only_fresh_blocks_show_is_not_decided(documents: Any) -> None:
    row = decode_row(verdict_of(timed(documents, lambda block: 1.0 if block < SCREEN else 1.2, fresh=FRESH)))
    assert row.klass == "UNDECIDED" and "did not show it" in row.note


@pytest.mark.parametrize("why", ["time is off", "other tokens"])
def test_fresh_blocks_are_not_asked_for_what_cannot_be_decided(documents: Any, why: str) -> None:
    doc = timed(documents, lambda _block: 1.1, gate=Gate(time="off" if why == "time is off" else "advise"))
    if why == "other tokens":
        ids = (*documents.IDS[:7], 1, *documents.IDS[8:])
        doc = documents.replace_runs(doc, lambda run: _with_ids(run, ids) if run.arm == "head" else run)
    assert isinstance(judge(doc), Verdict)


def _with_ids(run: RunFact, ids: tuple[int, ...]) -> RunFact:
    assert run.record is not None
    generations = tuple(one.model_copy(update={"ids": ids}) for one in run.record.generations)
    return run.model_copy(update={"record": run.record.model_copy(update={"generations": generations})})


def test_the_stages_of_a_plan_with_fresh_blocks_and_without() -> None:
    two = compare.TimePlan(8, fresh=16)
    assert (two.screening, two.deciding) == (range(8), range(8, 24))
    one = compare.TimePlan(24)
    assert (one.screening, one.deciding) == (range(8), range(8, 24))


def test_bounds_of_the_sweep_file_are_those_of_the_statistics() -> None:
    assert (LEAST_SCREENING, LEAST_DECIDING) == (stats.MIN_SCREENING, stats.MIN_BLOCKS)
