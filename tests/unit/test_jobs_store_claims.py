"""Leases, fences and attempts: every run is measured exactly once, whoever dies and whoever is slow."""

from __future__ import annotations

from datetime import timedelta

import pytest

from jobs.errors import Conflict, IllegalMove, StoreError
from jobs.lifecycle import Tried
from jobs.model import Limits
from jobs.store import Store
from tests.unit.store_sweeps import (
    CARD,
    LEASE_S,
    Clock,
    claimed,
    manifest,
    measure,
    record_of,
    run_fact,
    run_facts,
    running,
    submitted,
)

pytest_plugins = ("tests.unit.jobs_store_cases",)

# ---- blocks ------------------------------------------------------------------------------------------------------


def test_blocks_go_out_in_order_each_to_one_worker(store: Store) -> None:
    sweep_id = submitted(store, cells=2, blocks=2)
    claims = [claimed(store, sweep_id, f"w{number}") for number in range(4)]
    assert [(claim.cell, claim.number) for claim in claims] == [
        ("cell0", 0), ("cell0", 1), ("cell1", 0), ("cell1", 1),
    ]  # fmt: skip
    assert len({claim.block_id for claim in claims}) == 4
    assert store.claim_block(sweep_id, "w9", LEASE_S) is None
    assert store.pending(sweep_id).leased_blocks == 4


def test_a_claim_says_what_to_run(store: Store, clock: Clock) -> None:
    claim = claimed(store, submitted(store))
    assert [run.arm for run in claim.runs] == ["base", "head", "head", "base"]
    assert claim.plan == manifest().cells[0]
    assert claim.fence == 1
    assert claim.leased_until == clock.now + timedelta(seconds=LEASE_S)


def test_a_released_block_is_claimed_again_without_its_complete_runs(store: Store) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id)
    attempt = running(store, claim)
    store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))
    store.release_block(claim.block_id, claim.fence)
    again = claimed(store, sweep_id, "v")
    assert (again.block_id, again.fence) == (claim.block_id, claim.fence + 1)
    assert [run.position for run in again.pending] == [1, 2, 3]
    assert again.runs[0].tried == (Tried("measured"),)


def test_a_finished_sweep_has_nothing_to_claim(store: Store) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id)
    measure(store, claim)
    store.release_block(claim.block_id, claim.fence)
    assert store.claim_block(sweep_id, "w", LEASE_S) is None
    counts = store.pending(sweep_id)
    assert (counts.complete, counts.pending, counts.live_attempts, counts.leased_blocks) == (4, 0, 0, 0)


def test_another_sweep_s_blocks_are_left_alone(store: Store) -> None:
    first = submitted(store)
    second = store.submit(manifest(cells=2), "harness", "0.1")
    assert claimed(store, second).sweep_id == second
    assert store.pending(first).leased_blocks == 0


# ---- leases ------------------------------------------------------------------------------------------------------


def test_a_live_lease_keeps_others_out_and_an_ended_one_does_not(store: Store, clock: Clock) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id)
    clock.pass_s(LEASE_S)
    assert store.claim_block(sweep_id, "v", LEASE_S) is None
    clock.pass_s(1)
    again = claimed(store, sweep_id, "v")
    assert (again.block_id, again.fence) == (claim.block_id, 2)


def test_a_heartbeat_prolongs_the_lease(store: Store, clock: Clock) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id)
    clock.pass_s(LEASE_S - 1)
    assert store.heartbeat(claim.block_id, claim.fence, LEASE_S) == clock.now + timedelta(seconds=LEASE_S)
    clock.pass_s(LEASE_S - 1)
    assert store.reap(clock.now) == ()
    assert store.claim_block(sweep_id, "v", LEASE_S) is None


def test_reaping_makes_running_attempts_lost_and_leaves_their_runs_pending(store: Store, clock: Clock) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id)
    attempt = running(store, claim)
    assert store.reap(clock.now) == ()
    clock.pass_s(LEASE_S + 1)
    assert store.reap(clock.now) == (attempt.attempt_id,)
    fact = run_fact(store, sweep_id, attempt.run_id)
    assert fact.state == "pending"
    assert [(one.state, one.reason) for one in fact.attempts] == [("lost", "the lease of w ended")]
    assert store.reap(clock.now) == ()
    assert store.pending(sweep_id).leased_blocks == 0


def test_reaping_by_worker_spares_the_others(store: Store, clock: Clock) -> None:
    sweep_id = submitted(store, cells=2)
    dead, alive = claimed(store, sweep_id, "dead"), claimed(store, sweep_id, "alive")
    lost = running(store, dead, worker="dead")
    kept = running(store, alive, worker="alive")
    assert store.reap(clock.now, worker="dead") == (lost.attempt_id,)
    store.write_record(kept.attempt_id, alive.fence, record_of(kept))
    with pytest.raises(Conflict):
        store.heartbeat(dead.block_id, dead.fence, LEASE_S)


def test_breaking_leases_is_bounded_to_the_sweep(store: Store) -> None:
    mine, other = submitted(store), store.submit(manifest(cells=2), "harness", "0.1")
    claim, theirs = claimed(store, mine), claimed(store, other)
    attempt = running(store, claim)
    assert store.break_leases(mine, "resumed") == (attempt.attempt_id,)
    store.heartbeat(theirs.block_id, theirs.fence, LEASE_S)
    reasons = [one.reason for one in run_fact(store, mine, attempt.run_id).attempts]
    assert reasons == ["resumed"]


def test_a_slow_worker_is_fenced_out(store: Store, clock: Clock) -> None:
    """It lost its lease, somebody else runs its block: nothing that it still sends may count."""
    sweep_id = submitted(store)
    old = claimed(store, sweep_id, "slow")
    attempt = running(store, old, worker="slow")
    clock.pass_s(LEASE_S + 1)
    new = claimed(store, sweep_id, "quick")
    for late in (
        lambda: store.write_record(attempt.attempt_id, old.fence, record_of(attempt)),
        lambda: store.write_record(attempt.attempt_id, new.fence, record_of(attempt)),
        lambda: store.move(attempt.attempt_id, old.fence, "running", "failed"),
        lambda: store.heartbeat(old.block_id, old.fence, LEASE_S),
        lambda: store.release_block(old.block_id, old.fence),
        lambda: store.open_attempt(old.runs[1].run_id, old.fence, "slow", CARD),
        lambda: store.finish_run(old.runs[1].run_id, fence=old.fence),
    ):
        with pytest.raises((Conflict, IllegalMove)):
            late()
    measure(store, new, "quick")
    for fact in run_facts(store, sweep_id):
        assert [one.state for one in fact.attempts].count("measured") == 1
        assert fact.record is not None
        assert fact.record.attempt_id != attempt.attempt_id


def test_a_slow_worker_whose_block_nobody_took_may_go_on(store: Store, clock: Clock) -> None:
    claim = claimed(store, submitted(store))
    attempt = running(store, claim)
    clock.pass_s(LEASE_S * 10)
    store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))


# ---- attempts ----------------------------------------------------------------------------------------------------


def test_attempts_are_numbered_and_their_ends_kept(store: Store, clock: Clock) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id)
    first = running(store, claim)
    clock.pass_s(3)
    store.move(first.attempt_id, claim.fence, "running", "contaminated", "pid 7 on the card")
    second = running(store, claim)
    store.write_record(second.attempt_id, claim.fence, record_of(second))
    fact = run_fact(store, sweep_id, first.run_id)
    assert [(one.number, one.state, one.reason) for one in fact.attempts] == [
        (1, "contaminated", "pid 7 on the card"), (2, "measured", ""),
    ]  # fmt: skip
    assert fact.state == "complete"
    told = [(event.frm, event.target) for event in store.events(sweep_id) if event.subject == first.attempt_id]
    assert told == [("", "claimed"), ("claimed", "clearing"), ("clearing", "running"), ("running", "contaminated")]


def test_a_run_has_one_attempt_at_a_time(store: Store) -> None:
    claim = claimed(store, submitted(store))
    attempt = running(store, claim)
    with pytest.raises(Conflict, match=f"attempt {attempt.attempt_id} at run .* is running"):
        store.open_attempt(attempt.run_id, claim.fence, "w", CARD)


def test_resends_change_nothing(store: Store) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id)
    run_id = claim.runs[0].run_id
    attempt = store.open_attempt(run_id, claim.fence, "w", CARD)
    assert store.open_attempt(run_id, claim.fence, "w", CARD) == attempt
    for frm, to in (("claimed", "clearing"), ("clearing", "running")):
        store.move(attempt.attempt_id, claim.fence, frm, to)
        store.move(attempt.attempt_id, claim.fence, frm, to)
    for _ in range(3):
        store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))
    for _ in range(2):
        store.release_block(claim.block_id, claim.fence)
    store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))
    assert [event.target for event in store.events(sweep_id) if event.subject == attempt.attempt_id] == [
        "claimed", "clearing", "running", "measured",
    ]  # fmt: skip


def test_a_differing_resend_is_loud(store: Store) -> None:
    claim = claimed(store, submitted(store))
    attempt = running(store, claim)
    store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))
    with pytest.raises(Conflict, match="already holds another record"):
        store.write_record(attempt.attempt_id, claim.fence, record_of(attempt, exit_code=13))
    with pytest.raises(Conflict, match="already holds another record"):
        store.write_record(attempt.attempt_id, claim.fence, record_of(attempt), state="failed")


def test_moves_off_the_lifecycle_and_from_another_state(store: Store) -> None:
    claim = claimed(store, submitted(store))
    attempt = store.open_attempt(claim.runs[0].run_id, claim.fence, "w", CARD)
    with pytest.raises(IllegalMove, match=r"claimed cannot become running.*new -> claimed"):
        store.move(attempt.attempt_id, claim.fence, "claimed", "running")
    with pytest.raises(Conflict, match="is claimed under fence 1, not running under fence 1"):
        store.move(attempt.attempt_id, claim.fence, "running", "failed")
    with pytest.raises(Conflict, match="is claimed under fence 1, not claimed under fence 7"):
        store.move(attempt.attempt_id, 7, "claimed", "clearing")
    with pytest.raises(Conflict):
        store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))
    with pytest.raises(StoreError, match="no attempt 'att_none'"):
        store.move("att_none", claim.fence, "claimed", "clearing")


def test_a_record_of_another_attempt_is_refused(store: Store) -> None:
    claim = claimed(store, submitted(store))
    one = running(store, claim, 0)
    two = running(store, claim, 1)
    with pytest.raises(StoreError, match="the record names"):
        store.write_record(one.attempt_id, claim.fence, record_of(two))


def test_a_complete_run_is_never_tried_again(store: Store) -> None:
    claim = claimed(store, submitted(store))
    attempt = running(store, claim)
    store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))
    with pytest.raises(Conflict, match="is complete"):
        store.open_attempt(attempt.run_id, claim.fence, "w", CARD)
    with pytest.raises(IllegalMove, match="complete cannot become exhausted"):
        store.finish_run(attempt.run_id)


def test_a_failed_attempt_may_leave_a_record_without_completing_its_run(store: Store) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id)
    attempt = running(store, claim)
    store.write_record(attempt.attempt_id, claim.fence, record_of(attempt, 14), state="failed", reason="out of memory")
    fact = run_fact(store, sweep_id, attempt.run_id)
    assert (fact.state, fact.record) == ("pending", None)
    assert store.record(attempt.attempt_id) == record_of(attempt, 14)
    again = running(store, claim)
    assert again.number == 2


# ---- how often ---------------------------------------------------------------------------------------------------


def test_attempts_are_used_up(store: Store) -> None:
    sweep_id = submitted(store, limits=Limits(attempts=2))
    claim = claimed(store, sweep_id)
    for _ in range(2):
        attempt = running(store, claim)
        store.move(attempt.attempt_id, claim.fence, "running", "failed", "signal 11")
    with pytest.raises(Conflict, match="no attempt left"):
        store.open_attempt(attempt.run_id, claim.fence, "w", CARD)
    store.finish_run(attempt.run_id, reason="2 attempts failed")
    store.finish_run(attempt.run_id, reason="2 attempts failed")
    assert run_fact(store, sweep_id, attempt.run_id).state == "exhausted"
    assert store.pending(sweep_id).exhausted == 1


def test_a_run_that_was_lost_too_often_is_exhausted_not_claimed_for_ever(store: Store, clock: Clock) -> None:
    sweep_id = submitted(store, limits=Limits(attempts=2))
    for _ in range(2):
        running(store, claimed(store, sweep_id))
        clock.pass_s(LEASE_S + 1)
    claim = claimed(store, sweep_id)
    assert (claim.runs[0].state, claim.runs[0].tried) == ("exhausted", (Tried("lost", "lost"),) * 2)
    assert [run.position for run in claim.pending] == [1, 2, 3]


def test_a_block_whose_runs_are_all_used_up_is_not_handed_out(store: Store, clock: Clock) -> None:
    sweep_id = submitted(store, limits=Limits(attempts=1))
    claim = claimed(store, sweep_id)
    for place in range(4):
        running(store, claim, place)
    clock.pass_s(LEASE_S + 1)
    assert store.claim_block(sweep_id, "v", LEASE_S) is None
    counts = store.pending(sweep_id)
    assert (counts.exhausted, counts.live_attempts, counts.leased_blocks) == (4, 0, 0)


def test_a_run_is_not_finished_under_a_running_attempt(store: Store) -> None:
    claim = claimed(store, submitted(store))
    attempt = running(store, claim)
    with pytest.raises(Conflict, match="still has attempt"):
        store.finish_run(attempt.run_id)
    with pytest.raises(StoreError, match="no run 'run_none'"):
        store.finish_run("run_none")


@pytest.mark.parametrize("died_after", ["claim", "open", "clearing", "running", "write", "all"])
def test_whoever_dies_where_the_next_one_completes_each_run_once(store: Store, died_after: str) -> None:
    sweep_id = submitted(store)
    claim = claimed(store, sweep_id, "first")
    if died_after == "all":
        measure(store, claim, "first")
    elif died_after != "claim":
        attempt = store.open_attempt(claim.runs[0].run_id, claim.fence, "first", CARD)
        path = [("claimed", "clearing"), ("clearing", "running")]
        for frm, to in path[: {"open": 0, "clearing": 1}.get(died_after, 2)]:
            store.move(attempt.attempt_id, claim.fence, frm, to)
        if died_after == "write":
            store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))
    store.break_leases(sweep_id, "resumed")
    while (again := store.claim_block(sweep_id, "second", LEASE_S)) is not None:
        measure(store, again, "second")
        store.release_block(again.block_id, again.fence)
    if died_after == "write":  # the first one's outbox still holds what was not acknowledged
        store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))
    for fact in run_facts(store, sweep_id):
        states = [one.state for one in fact.attempts]
        assert (fact.state, states.count("measured")) == ("complete", 1)
        assert set(states) <= {"measured", "lost"}
    lost = [one for fact in run_facts(store, sweep_id) for one in fact.attempts if one.state == "lost"]
    assert len(lost) == (1 if died_after in {"open", "clearing", "running"} else 0)
