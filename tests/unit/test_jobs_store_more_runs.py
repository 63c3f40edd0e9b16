"""Runs that are added to a sweep because the judge asks for them: stored, queued and judged like all others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jobs.errors import Conflict, SpecError
from jobs.more_runs import BaseAgain, FreshBlocks
from jobs.order import run_order
from jobs.store import Store
from orchestrator.conclude import judge_sweep
from tests.unit.store_sweeps import CARD, Clock, claimed, measure, run_facts, submitted

pytest_plugins = ("tests.unit.jobs_store_cases",)

AGAIN = BaseAgain(cell="cell0", arm="base", card=CARD, block=0)


@pytest.fixture
def store(store_url: str, clock: Clock) -> Iterator[Store]:
    opened = Store.open(store_url, clock)
    yield opened
    opened.close()


def test_base_again_joins_its_block_and_stays_with_its_card(store: Store) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id, card=CARD)
    measure(store, claim)
    store.release_block(claim.block_id, claim.fence)
    assert store.claim_block(sweep_id, "w", 60.0, card=CARD) is None
    store.add_runs(sweep_id, AGAIN)
    store.add_runs(sweep_id, AGAIN)  # a resend
    assert (store.pending(sweep_id).runs, store.pending(sweep_id).pending) == (8, 4)
    assert store.settled() == ()
    assert store.claim_block(sweep_id, "w", 60.0, card="SIM-0001") is None, "another card is not base's"
    more = claimed(store, sweep_id, card=CARD)
    assert [(run.arm, run.position) for run in more.pending] == [("base", place) for place in range(4, 8)]
    measure(store, more)
    store.release_block(more.block_id, more.fence)
    assert store.settled() == (sweep_id,)
    facts = run_facts(store, sweep_id)
    assert [run.arm for run in facts] == ["base", "head", "head", "base", *["base"] * 4]
    assert len({run.run_id for run in facts}) == 8
    assert [event.message for event in store.events(sweep_id) if event.kind == "asked"] == [
        "cell0: base runs 4 times more, in block 0"
    ]


def test_fresh_blocks_follow_the_planned_ones_in_their_own_order(store: Store) -> None:
    sweep_id = submitted(store, cells=2, blocks=3)
    asked = FreshBlocks(cell="cell0", first=3, count=2)
    store.add_runs(sweep_id, asked)
    store.add_runs(sweep_id, asked)
    plan = store.manifest(sweep_id).cells[0]
    facts = [run for run in run_facts(store, sweep_id) if run.block >= 3]
    assert [run.arm for run in facts] == [*run_order(plan, 3), *run_order(plan, 4)]
    assert {run.state for run in facts} == {"pending"}
    order = []
    while (claim := store.claim_block(sweep_id, "w", 60.0)) is not None:
        order.append((claim.cell, claim.number))
        measure(store, claim)
        store.release_block(claim.block_id, claim.fence)
    planned = [(f"cell{cell}", number) for cell in range(2) for number in range(3)]
    assert order == [*planned, ("cell0", 3), ("cell0", 4)], "what was asked for is served last"
    assert [len(cell.runs) for cell in store.judge_input(sweep_id).cells] == [20, 12]


def test_runs_are_not_added_to_a_judged_sweep_nor_to_what_it_does_not_have(store: Store) -> None:
    sweep_id = submitted(store)
    for asked, says in ((AGAIN.model_copy(update={"cell": "no"}), "no cell 'no'"),
                        (AGAIN.model_copy(update={"block": 7}), "no block 7")):  # fmt: skip
        with pytest.raises(SpecError, match=says):
            store.add_runs(sweep_id, asked)
    judge_sweep(store, sweep_id, final=True)
    with pytest.raises(Conflict, match="is judged: no run is added"):
        store.add_runs(sweep_id, AGAIN)
    assert store.pending(sweep_id).runs == 4
