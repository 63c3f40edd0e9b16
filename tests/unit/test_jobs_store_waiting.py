"""Of each block that waits the store says why; and it knows the cards of those who serve it."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest

from jobs.errors import SpecError
from jobs.model import Limits
from jobs.store import CardSeen, Store
from jobs.store.cluster import FRESH_S
from tests.unit.store_sweeps import LEASE_S, Clock, claimed, measure, running, submitted

pytest_plugins = ("tests.unit.jobs_store_cases",)

H200 = "NVIDIA H200"


def serve(
    store: Store, *cards: tuple[str, str, str], name: str = H200, scheduler: str = "host/1", memory_bytes: int = 0
) -> None:
    """Cards as (uuid, state, reason)."""
    store.put_cards(
        [
            CardSeen(
                uuid=uuid,
                name=name,
                host="host",
                worker=f"w-{uuid}",
                state=state,  # type: ignore[arg-type]
                reason=reason,
                memory_bytes=memory_bytes,
            )
            for uuid, state, reason in cards
        ],
        scheduler,
    )


def reasons(store: Store, sweep_id: str | None = None) -> list[str]:
    """Why each block waits; what blocks of one cell have in common is told once in the store."""
    return [one.reason for one in store.queue(sweep_id).waiting for _ in range(one.blocks)]


def test_without_a_scheduler_that_is_said(store: Store, clock: Clock) -> None:
    submitted(store, blocks=2)
    assert reasons(store) == ["no scheduler serves this store"] * 2
    serve(store, ("GPU-a", "clear", ""))
    assert reasons(store)[0].startswith("next for a clear card")
    clock.pass_s(FRESH_S + 1)
    assert reasons(store) == ["no scheduler serves this store"] * 2, "one that has gone silent serves nobody"


def test_a_block_tells_what_is_before_it_and_what_the_cards_are_at(store: Store, clock: Clock) -> None:
    nightly = submitted(store, "nightly", priority="nightly", blocks=2)
    clock.pass_s(1)
    gate = submitted(store, "gate", blocks=2)
    serve(store, ("GPU-a", "busy", "run run_1"), ("GPU-b", "drained", "3 faults"))
    cards = "no card is clear (busy or drained): GPU-a busy: run run_1; GPU-b drained: 3 faults"
    assert reasons(store) == [
        *[f"{cards}; 0 blocks before it, priority pr"] * 2,
        *[f"{cards}; 2 blocks before it, priority nightly"] * 2,
    ]
    assert reasons(store, nightly) == reasons(store)[2:]
    assert [(one.sweep_id, one.blocks, one.runs_left) for one in store.queue().waiting] == [
        (gate, 2, 8),
        (nightly, 2, 8),
    ]


def test_blocks_behind_a_canary_name_it(store: Store) -> None:
    submitted(store, blocks=3)
    serve(store, ("GPU-a", "busy", "x"), ("GPU-b", "clear", ""))
    first = claimed(store, card="GPU-a", canary=True)
    assert (
        reasons(store) == [f"block {first.block_id} on card GPU-a runs first: the others follow its first result"] * 2
    )
    assert store.queue().running == 1
    measure(store, first, runs=1)
    assert all(reason.startswith("next for a clear card") for reason in reasons(store))


def test_a_leased_block_tells_what_it_waits_for_itself(store: Store, clock: Clock) -> None:
    submitted(store)
    serve(store, ("GPU-a", "busy", "pid 7"))
    claim = claimed(store, worker="host/1/w")
    assert reasons(store) == []
    store.waits(claim.block_id, claim.fence, "card GPU-a is not clear (contended): process 7")
    assert reasons(store) == ["card GPU-a is not clear (contended): process 7"]
    store.waits(claim.block_id, claim.fence, None)
    assert reasons(store) == []
    clock.pass_s(LEASE_S + 1)
    (said,) = reasons(store)
    assert said.startswith("the lease of host/1/w ended at 05:01:00 UTC")


def test_what_was_said_of_a_lost_lease_is_not_kept(store: Store, clock: Clock) -> None:
    submitted(store)
    serve(store, ("GPU-a", "clear", ""))
    claim = claimed(store)
    clock.pass_s(LEASE_S + 1)
    again = claimed(store)
    store.waits(claim.block_id, claim.fence, "from an old world")
    assert reasons(store) == []
    store.waits(again.block_id, again.fence, "card x")
    store.release_block(again.block_id, again.fence)
    serve(store, ("GPU-a", "clear", ""))
    assert reasons(store)[0].startswith("next for a clear card")


def test_a_begun_block_names_its_card(store: Store) -> None:
    submitted(store)
    claim = claimed(store, card="GPU-a")
    measure(store, claim, runs=1)
    store.release_block(claim.block_id, claim.fence)
    serve(store, ("GPU-b", "clear", ""))
    assert reasons(store) == ["it was begun on card GPU-a, which no scheduler serves"]
    serve(store, ("GPU-a", "drained", "ECC"))
    assert reasons(store) == ["it was begun on card GPU-a, which is drained: ECC"]


def test_field_7_a_class_of_cards_that_nobody_has_is_named_with_what_there_is(store: Store) -> None:
    submitted(store, card_class="A100")
    serve(store, ("GPU-a", "clear", ""))
    assert reasons(store) == ["no card of class 'A100' is served; there are: NVIDIA H200"]


def test_field_7_memory_that_no_card_has_is_named_with_what_there_is(store: Store, clock: Clock) -> None:
    asked: dict[str, Any] = {"card_class": "h200", "card_memory_bytes": 160 * 10**9, "to_cards": True}
    first = submitted(store, "early", **asked)  # nobody serves yet: who comes may have such a card
    serve(store, ("GPU-a", "clear", ""), memory_bytes=150_754_820_096)
    wanted = "of class 'h200' with 160,000,000,000 bytes or more"
    assert reasons(store) == [f"no card {wanted} is served; there are: NVIDIA H200 (150,754,820,096 bytes)"]
    refusal = f"cell0 asks for a card {wanted}, and those that are served are: NVIDIA H200 (150,754,820,096 bytes)"
    with pytest.raises(SpecError, match=re.escape(refusal)):
        submitted(store, "late", **asked)
    assert submitted(store, "early", **asked) == first, "a resend is harmless"
    serve(store, ("GPU-b", "busy", "pid 7"), name="NVIDIA H200 X", memory_bytes=160 * 10**9)
    assert reasons(store) == ["no card is clear (busy): GPU-b busy: pid 7; 0 blocks before it, priority pr"]
    assert submitted(store, "late", **asked) != first
    clock.pass_s(FRESH_S + 1)
    submitted(store, "silent", **asked)


def test_schedulers_of_another_state_of_assay_are_named(store: Store) -> None:
    submitted(store)
    serve(store, ("GPU-a", "clear", ""), scheduler="host/1@0123456789ab")
    assert reasons(store) == ["it was submitted by assay harness, and the schedulers are of 0123456789ab"]
    serve(store, ("GPU-b", "clear", ""), scheduler="host/2@harness")
    assert reasons(store)[0].startswith("next for a clear card")


def test_untouched_blocks_of_a_cell_are_told_together_and_others_apart(store: Store) -> None:
    sweep_id = submitted(store, cells=2, blocks=3)
    serve(store, ("GPU-a", "clear", ""))
    claim = claimed(store, sweep_id, card="GPU-a")
    measure(store, claim, runs=1)
    store.release_block(claim.block_id, claim.fence)
    told = [(one.cell, one.number, one.blocks, one.runs_left) for one in store.queue().waiting]
    assert told == [("cell0", 0, 1, 3), ("cell0", 1, 2, 8), ("cell1", 0, 3, 12)]
    ahead = [one.reason.split("; ")[-1] for one in store.queue().waiting]
    assert ahead == [f"{count} block{'s' * (count != 1)} before it, priority pr" for count in (0, 1, 3)]


def test_settled_sweeps_are_those_with_nothing_left_to_run(store: Store) -> None:
    sweep_id = submitted(store, limits=Limits(attempts=1))
    submitted(store, "other")
    claim = claimed(store, sweep_id)
    measure(store, claim, runs=3)
    assert store.settled() == ()
    running(store, claim, 3)
    store.release_block(claim.block_id, claim.fence)
    assert store.settled() == (sweep_id,)


# ---- cards -------------------------------------------------------------------------------------------------------


def test_a_card_keeps_since_when_it_is_as_it_is(store: Store, clock: Clock) -> None:
    serve(store, ("GPU-a", "clear", ""))
    begin = clock.now
    clock.pass_s(10)
    serve(store, ("GPU-a", "clear", ""))
    (row,) = store.cards()
    assert (row.since, row.seen_at) == (begin, clock.now)
    clock.pass_s(10)
    serve(store, ("GPU-a", "busy", "pid 7"))
    (row,) = store.cards()
    assert (row.state, row.reason, row.since) == ("busy", "pid 7", begin + timedelta(seconds=20))


def test_a_card_that_nobody_speaks_of_is_unknown(store: Store, clock: Clock) -> None:
    serve(store, ("GPU-a", "clear", ""))
    serve(store, ("GPU-b", "clear", ""), scheduler="other/1")
    store.leave_cards("other/1", "its scheduler ended")
    assert [(row.uuid, row.state, row.reason) for row in store.cards()] == [
        ("GPU-a", "clear", ""),
        ("GPU-b", "unknown", "its scheduler ended"),
    ]
    clock.pass_s(FRESH_S + 1)
    assert store.cards()[0].state == "unknown"
    assert "no scheduler has spoken of it since 2026-11-30 05:00 UTC" in store.cards()[0].reason
