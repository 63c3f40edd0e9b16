"""The queue over all sweeps: whose turn it is, on which card, who may not yet, and what a cancel leaves."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Connection, select, update

from jobs.card_choice import is_fit
from jobs.errors import Conflict, SpecError
from jobs.model import Limits
from jobs.store import Store
from jobs.store.connect import Database
from jobs.tables import attempt, block
from orchestrator.cards import CardName
from tests.unit.store_sweeps import (
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


# ---- whose turn --------------------------------------------------------------------------------------------------


def test_gates_go_before_nightly_sweeps_and_first_come_is_first_served(store: Store, clock: Clock) -> None:
    turn = []
    for name, priority in (("n1", "nightly"), ("p1", "pr"), ("n2", "nightly"), ("p2", "pr")):
        turn.append((priority == "nightly", submitted(store, name, priority=priority, blocks=2)))
        clock.pass_s(1)
    expected = [sweep_id for _, sweep_id in sorted(turn, key=lambda one: one[0]) for _ in range(2)]
    assert [claimed(store).sweep_id for _ in range(8)] == expected
    assert store.claim_block(None, "w", LEASE_S) is None


def test_a_gate_that_comes_later_is_served_before_the_rest_of_a_nightly_sweep(store: Store, clock: Clock) -> None:
    nightly = submitted(store, "nightly", priority="nightly", blocks=3)
    assert claimed(store).sweep_id == nightly
    clock.pass_s(1)
    gate = submitted(store, "gate")
    assert [claimed(store).sweep_id for _ in range(3)] == [gate, nightly, nightly]


def test_a_judged_or_passed_over_sweep_gives_nothing(store: Store) -> None:
    first = submitted(store, "first")
    second = submitted(store, "second")
    assert claimed(store, passes_over=(first,)).sweep_id == second
    assert store.claim_block(None, "w", LEASE_S, passes_over=(first,)) is None


# ---- a canary first ----------------------------------------------------------------------------------------------


def test_a_sweep_goes_to_one_card_until_it_has_a_result(store: Store) -> None:
    sweep_id = submitted(store, blocks=3)
    first = claimed(store, canary=True)
    assert store.claim_block(None, "v", LEASE_S, canary=True) is None
    assert store.claim_block(sweep_id, "v", LEASE_S, canary=True) is None
    measure(store, first, runs=1)
    assert [claimed(store, worker=worker, canary=True).number for worker in ("v", "u")] == [1, 2]


def test_another_sweep_does_not_wait_for_a_canary(store: Store, clock: Clock) -> None:
    first = submitted(store, "first", blocks=2)
    clock.pass_s(1)
    second = submitted(store, "second")
    assert [claimed(store, canary=True).sweep_id for _ in range(2)] == [first, second]


def test_a_canary_that_is_lost_or_fails_is_followed_by_one_other(store: Store, clock: Clock) -> None:
    submitted(store, blocks=3, limits=Limits(attempts=1))
    first = claimed(store, canary=True)
    running(store, first)
    clock.pass_s(LEASE_S + 1)  # its worker is gone
    again = claimed(store, canary=True)
    assert (again.block_id, again.runs[0].state) == (first.block_id, "exhausted")
    assert store.claim_block(None, "v", LEASE_S, canary=True) is None
    for run in again.pending:
        store.finish_run(run.run_id, reason="it crashes")
    store.release_block(again.block_id, again.fence)
    assert claimed(store, canary=True).number == 1
    assert store.claim_block(None, "v", LEASE_S, canary=True) is None


def test_two_that_ask_at_once_get_one_canary(store_url: str, clock: Clock) -> None:
    Store.open(store_url, clock).close()
    own = [Store.open(store_url, clock, migrate=False) for _ in range(6)]
    submitted(own[0], blocks=6)
    gate = threading.Barrier(len(own))
    got = []

    def ask(store: Store, worker: str) -> None:
        gate.wait()
        got.append(store.claim_block(None, worker, LEASE_S, canary=True))

    threads = [threading.Thread(target=ask, args=(one, f"w{number}")) for number, one in enumerate(own)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert sum(claim is not None for claim in got) == 1


# ---- on which card -----------------------------------------------------------------------------------------------


def test_a_block_that_has_begun_stays_with_its_card(store: Store) -> None:
    submitted(store, blocks=2)
    begun = claimed(store, card="GPU-a")
    measure(store, begun, runs=1)
    store.release_block(begun.block_id, begun.fence)
    other = claimed(store, card="GPU-b")
    assert other.block_id != begun.block_id
    assert store.claim_block(None, "w", LEASE_S, card="GPU-b") is None
    assert claimed(store, card="GPU-a").block_id == begun.block_id


def test_a_block_in_which_nothing_was_measured_may_go_to_another_card(store: Store, clock: Clock) -> None:
    sweep_id = submitted(store)
    begun = claimed(store, card="GPU-a")
    attempt_ = running(store, begun)
    clock.pass_s(LEASE_S + 1)
    again = claimed(store, card="GPU-b")
    assert again.block_id == begun.block_id
    assert [one.state for one in run_fact(store, sweep_id, attempt_.run_id).attempts] == ["lost"]


@pytest.mark.parametrize(
    ("card_class", "name", "fits"),
    [
        ("any", "NVIDIA H200", True),
        ("h200", "NVIDIA H200", True),
        ("H200", "NVIDIA H100", False),
        ("A%", "NVIDIA H200", False),
        ("_200", "NVIDIA H200", False),
    ],
)
def test_a_card_is_given_what_asks_for_its_class(store: Store, card_class: str, name: str, fits: bool) -> None:
    submitted(store, card_class=card_class)
    claim = store.claim_block(None, "w", LEASE_S, card="GPU-a", card_name=name)
    assert (claim is not None) is fits
    assert is_fit(CardName("GPU-a", name, "580", 0), card_class, 0) is fits


@pytest.mark.parametrize(("asked", "memory", "fits"), [(0, 0, True), (80, 80, True), (81, 80, False), (1, 0, False)])
def test_a_card_is_given_what_asks_for_no_more_memory_than_it_has(
    store: Store, asked: int, memory: int, fits: bool
) -> None:
    """0: of a card that its memory is not known."""
    submitted(store, card_memory_bytes=asked * 10**9)
    claim = store.claim_block(
        None, "w", LEASE_S, card="GPU-a", card_name="NVIDIA H200", card_memory_bytes=memory * 10**9
    )
    assert (claim is not None) is fits
    card = CardName("GPU-a", "NVIDIA H200", "580", 0, memory_bytes=memory * 10**9)
    assert is_fit(card, "any", asked * 10**9) is fits


# ---- how often ---------------------------------------------------------------------------------------------------


def test_a_class_of_error_uses_up_its_own_bound(store: Store) -> None:
    submitted(store, limits=Limits(attempts=2, retries={"lost": 3, "timeout": 0}))
    claim = claimed(store)
    for fault in ("lost", "lost", "crash"):
        one = running(store, claim)
        store.move(one.attempt_id, claim.fence, "running", "lost" if fault == "lost" else "failed", fault=fault)
    one = running(store, claim)
    store.write_record(one.attempt_id, claim.fence, record_of(one, 1), state="failed", fault="timeout")
    with pytest.raises(Conflict, match="no attempt left"):
        running(store, claim)


def test_an_attempt_whose_lease_ended_counts_as_lost(store_url: str, clock: Clock) -> None:
    store = Store.open(store_url, clock)
    submitted(store)
    running(store, claimed(store))
    clock.pass_s(LEASE_S + 1)
    store.reap(clock.now)
    with Database(store_url).reading() as connection:
        assert connection.execute(select(attempt.c.fault)).scalars().all() == ["lost"]
    store.close()


# ---- cancel ------------------------------------------------------------------------------------------------------


def test_a_cancel_ends_what_runs_and_keeps_what_was_measured(store: Store) -> None:
    sweep_id = submitted(store, blocks=2)
    other = submitted(store, "other")
    claim = claimed(store, sweep_id)
    measure(store, claim, runs=1)
    cut = running(store, claim, 1)
    assert store.cancel(sweep_id, "cancelled by mia") == (cut.attempt_id,)
    counts = store.pending(sweep_id)
    assert (counts.complete, counts.exhausted, counts.pending) == (1, 7, 0)
    assert (counts.live_attempts, counts.leased_blocks) == (0, 0)
    fact = run_fact(store, sweep_id, cut.run_id)
    assert [(one.state, one.reason) for one in fact.attempts] == [("cancelled", "cancelled by mia")]
    assert store.forfeited([(claim.block_id, claim.fence)]) == (claim.block_id,)
    with pytest.raises(Conflict):
        store.write_record(cut.attempt_id, claim.fence, record_of(cut))
    with pytest.raises(Conflict):
        store.heartbeat(claim.block_id, claim.fence, LEASE_S)
    assert claimed(store).sweep_id == other
    assert store.cancel(sweep_id, "again") == ()


def test_only_an_open_sweep_can_be_cancelled(store: Store) -> None:
    with pytest.raises(SpecError, match="no id begins with"):
        store.cancel("swp_none", "why")


# ---- what is left ------------------------------------------------------------------------------------------------


def test_a_lease_is_forfeited_by_its_fence(store: Store, clock: Clock) -> None:
    submitted(store, blocks=2)
    lost, kept = claimed(store), claimed(store)
    clock.pass_s(LEASE_S + 1)
    store.heartbeat(kept.block_id, kept.fence, LEASE_S)
    assert store.forfeited([(one.block_id, one.fence) for one in (lost, kept)]) == ()
    assert claimed(store, worker="v").block_id == lost.block_id
    assert store.forfeited([(one.block_id, one.fence) for one in (lost, kept)]) == (lost.block_id,)


def test_runs_left_are_counted_down_to_none(store_url: str, clock: Clock) -> None:
    """The count is what the queue goes by: it must never drift from the runs."""
    store = Store.open(store_url, clock)
    sweep_id = submitted(store, blocks=2, limits=Limits(attempts=1))
    first, second = claimed(store), claimed(store)
    measure(store, first, runs=2)
    store.finish_run(first.runs[2].run_id, reason="no")
    store.finish_run(first.runs[2].run_id, reason="no")
    running(store, second)
    store.release_block(second.block_id, second.fence)
    with Database(store_url).reading() as connection:
        left = {row.id: row.runs_left for row in connection.execute(select(block.c.id, block.c.runs_left))}
    pending = {one.block_id: 0 for one in run_facts(store, sweep_id)}
    for one in run_facts(store, sweep_id):
        pending[one.block_id] += one.state == "pending"
    assert left == pending == {first.block_id: 1, second.block_id: 3}
    store.close()


def test_one_manifest_may_be_submitted_under_several_keys_each_once(store: Store) -> None:
    given = manifest()
    ids = [store.submit(given, "h", "0.1", key=key, priority="nightly") for key in ("a", "b", "a", "b")]
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]
    assert [row.priority for row in store.sweeps()] == ["nightly"] * 2


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_field_71_leases_go_by_the_server_s_time(store_url: str, clock: Clock) -> None:
    """Drivers whose clocks are years apart agree on which lease has ended. A file is on one host, with one clock."""
    right, wrong = Store.open(store_url, clock), Store.open(store_url, lambda: clock().replace(year=2020))
    for one in (right, wrong):
        one.follow_server_time()
    submitted(right)
    claimed(right)
    assert wrong.claim_block(None, "v", LEASE_S) is None
    clock.pass_s(LEASE_S + 1)
    assert wrong.claim_block(None, "v", LEASE_S) is not None
    for one in (right, wrong):
        one.close()


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_a_claim_skips_what_another_transaction_holds(store_url: str, clock: Clock) -> None:
    """A claim that is not committed yet holds its row alone: the next claimer takes the next block without waiting."""
    store = Store.open(store_url, clock)
    submitted(store, blocks=2)
    database = Database(store_url)
    got = []

    def meanwhile(connection: Connection) -> None:
        first = connection.execute(select(block.c.id).order_by(block.c.place).limit(1).with_for_update()).scalar_one()
        connection.execute(update(block).where(block.c.id == first).values(waits="held"))
        got.append((first, claimed(store)))

    database.write(meanwhile)
    database.close()
    [(first, claim)] = got
    assert (claim.number, claim.block_id != first) == (1, True)
    store.close()
