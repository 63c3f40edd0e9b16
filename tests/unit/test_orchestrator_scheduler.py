"""A scheduler on threads: sweeps in turn, cancels, workers that stand still, cards at fault, a verdict at the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.cells_read import CellsRead
from jobs.errors import StoreError
from jobs.judge import judge_read
from jobs.model import Limits
from orchestrator.choose import simulated_cards
from orchestrator.dispatch import Dispatcher
from orchestrator.lost import HostLost, Stopped, WorkerLost
from orchestrator.outcome import RunOutcome
from orchestrator.place import InProcessPlacer, Ticket
from orchestrator.scheduler import Scheduler
from orchestrator.worker import WorkerCard, WorkOrder
from tests.unit.orchestrator_field import Field

HARNESS = "h" * 64


class Threads(InProcessPlacer):
    """Workers of whom none come later."""

    def joined(self) -> tuple[WorkerCard, ...]:
        return ()


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(tmp_path)


def serve(field: Field, placer: Threads | None = None, stopped: Callable[[], bool] = lambda: False) -> Scheduler:
    placer = placer or Threads(field.cards, field.make)
    hellos = placer.open()
    scheduler = Scheduler(
        field.store, placer, "here/1", HARNESS, stopped=stopped, tell=field.heard.append, keep_s=0.2
    )  # fmt: skip
    try:
        scheduler.serve(hellos, once=True)
    finally:
        placer.close()
    return scheduler


def test_sweeps_are_served_in_turn_and_judged(field: Field) -> None:
    nightly, _ = field.submit({"base": {}, "head": {}}, name="nightly", priority="nightly")
    gate, _ = field.submit({"base": {}, "head": {}}, name="gate")
    serve(field)
    assert [row.state for row in field.store.sweeps()] == ["judged", "judged"]
    claims = [e.sweep_id for one in (nightly, gate) for e in field.store.events(one) if e.kind == "claimed"]
    at = {one: next(e.seq for e in field.store.events(one) if e.kind == "claimed") for one in (nightly, gate)}
    assert len(claims) == 2
    assert at[gate] < at[nightly]
    assert set(field.store.outcomes((nightly, gate))) == {nightly, gate}
    assert [(row.state, row.reason) for row in field.store.cards()] == [("unknown", "its scheduler ended")]


def test_a_sweep_of_another_state_of_assay_is_left_to_its_own_scheduler(field: Field) -> None:
    other, _ = field.submit({"base": {}, "head": {}}, name="other", harness="f" * 64)
    serve(field)
    assert field.store.pending(other).pending == 4


def test_a_cancel_ends_the_child_and_the_next_sweep_is_served(field: Field) -> None:
    long, _ = field.submit({"base": {"sleep_s": 60}}, name="long")
    after, _ = field.submit({"base": {}, "head": {}}, name="after")

    def cancel() -> None:
        while not field.store.pending(long).live_attempts:
            time.sleep(0.02)
        field.store.cancel(long, "cancelled by mia")

    begin_s = time.monotonic()
    thread = threading.Thread(target=cancel)
    thread.start()
    serve(field)
    thread.join()
    assert time.monotonic() - begin_s < 30
    assert field.attempts(long) == {"base": [("cancelled", "cancelled by mia")]}
    assert field.store.pending(after).complete == 4
    assert [h.kind for h in field.heard].count("gone") == 1
    assert field.spool.sweeps() == (), "what was cut off is nobody's outcome"


class Standing(Threads):
    """A worker whose first run never answers, as when its process is stopped."""

    stands = 1
    ended: list[str]

    def run(self, worker: str, work: WorkOrder) -> Ticket:
        if self.stands:
            self.stands -= 1
            return Ticket(worker, threading.Event())
        return super().run(worker, work)

    def ready(self, tickets: Any, timeout_s: float) -> tuple[Ticket, ...]:
        real = [ticket for ticket in tickets if not isinstance(ticket.ref, threading.Event)]
        if not real:
            time.sleep(timeout_s / 10)
            return ()
        return super().ready(real, timeout_s)


def test_a_worker_that_stands_still_past_its_deadline_is_lost_and_replaced(field: Field) -> None:
    sweep_id, _ = field.submit({"base": {}, "head": {}}, limits=Limits(run_timeout_s=0.5, queue_timeout_s=20))
    placer = Standing(field.cards, field.make)
    dispatcher = Dispatcher(field.store, placer, "here", sweep_id, tell=field.heard.append, answer_s=0.5)
    hellos = placer.open()
    try:
        dispatcher.seat(hellos)
        done = dispatcher.work()
    finally:
        placer.close()
    first = field.attempts(sweep_id)["base"][0]
    assert first == ("lost", "worker w0: storing: no outcome came within 0.5 s of the run's own deadline")
    assert done.pending == 0


class Staring(Standing):
    """Workers of which the first look never ends."""

    def look(self, worker: str) -> Ticket:
        if self.stands:
            self.stands -= 1
            return Ticket(worker, threading.Event())
        return super().look(worker)


def test_a_worker_that_never_says_whether_its_card_is_clear_is_replaced_and_costs_no_attempt(field: Field) -> None:
    sweep_id, _ = field.submit({"base": {}, "head": {}}, limits=Limits(queue_timeout_s=20))
    placer = Staring(field.cards, field.make)
    dispatcher = Dispatcher(field.store, placer, "here", sweep_id, tell=field.heard.append, answer_s=1.0)
    hellos = placer.open()
    try:
        dispatcher.seat(hellos)
        done = dispatcher.work()
    finally:
        placer.close()
    lost = [one.text for one in field.heard if one.kind == "lost"]
    assert lost == ["worker w0: claimed: it did not say within 1 s whether its card is clear"]
    assert done.pending == 0
    assert {state for tries in field.attempts(sweep_id).values() for state, _ in tries} == {"measured"}


class Faulty(Threads):
    """A card whose every run ends by a fault of the device."""

    bad = "w0"

    def outcome(self, ticket: Ticket) -> RunOutcome:
        answer = super().outcome(ticket)
        if ticket.worker != self.bad:
            return answer
        broken = {"end": "failed", "reason": "device: ECC", "fault": "device", "retry": True, "record": None}
        return answer.model_copy(update=broken)


def test_field_17_a_card_at_fault_again_and_again_gets_no_more_work_and_one_message(field: Field) -> None:
    field.cards = simulated_cards("test", 2)
    sweep_id, _ = field.submit({"base": {}, "head": {}}, blocks=2, limits=Limits(attempts=9, queue_timeout_s=20))
    serve(field, Faulty(field.cards, field.make))
    assert field.store.pending(sweep_id).complete == 8
    runs = field.store.judge_input(sweep_id).cells[0].runs
    assert {run.record.certificate.uuid for run in runs if run.record and run.record.certificate} == {
        field.cards[1].uuid
    }
    drained = [h.text for h in field.heard if h.kind == "drained"]
    assert len(drained) == 1
    assert field.cards[0].uuid in drained[0]
    assert "device: ECC" in drained[0]
    states = [state for tries in field.attempts(sweep_id).values() for state, _ in tries]
    assert states.count("failed") == 3


def test_field_15_a_card_lost_in_mid_run_leaves_with_one_message_and_the_queue_keeps_its_runs(field: Field) -> None:
    field.cards = simulated_cards("test", 2)
    begun: list[float] = []

    def since_the_first_run_began() -> float:
        if not begun and any(h.kind == "begin" for h in field.heard):
            begun.append(time.monotonic())
        return time.monotonic() - begun[0] if begun else 0.0

    field.clock = since_the_first_run_began
    field.scripts["w0"] = [{"at_s": 0.3, "error": "Unknown Error"}]
    sweep_id, _ = field.submit({"base": {"sleep_s": 0.8}, "head": {}}, limits=Limits(queue_timeout_s=1))
    serve(field)
    left = field.store.pending(sweep_id)
    assert (left.complete, left.exhausted) == (4, 0)
    runs = field.store.judge_input(sweep_id).cells[0].runs
    counted = {run.record.certificate.uuid for run in runs if run.record and run.record.certificate}
    assert counted == {field.cards[1].uuid}
    (drained,) = [h.text for h in field.heard if h.kind == "drained"]
    assert field.cards[0].uuid in drained
    assert "Unknown Error" in drained
    tries = [one for arm in field.attempts(sweep_id).values() for one in arm]
    (lost,) = [reason for state, reason in tries if state != "measured"]
    assert "Unknown Error" in lost, "tried once there, and not in a tight loop"


def test_an_outcome_that_a_node_kept_is_stored_before_anything_runs(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    field.spool_one(sweep_id, manifest)
    field.now_s += 61.0  # the lease of the one that died ends; what it measured counts all the same
    serve(field)
    assert field.spool.sweeps() == ()
    tries = field.attempts(sweep_id)
    assert [state for state, _ in tries["base"] + tries["head"]] == ["measured"] * 4


class Gone(Threads):
    """A node that goes with its worker on the first run."""

    lose = 1

    def outcome(self, ticket: Ticket) -> RunOutcome:
        if ticket.worker == "w0" and self.lose:
            self.lose -= 1
            super().outcome(ticket)
            raise WorkerLost("w0", "the node died")
        return super().outcome(ticket)

    def replace(self, worker: str) -> WorkerCard:
        raise WorkerLost(worker, "its node is gone")


def test_field_8_a_node_that_goes_costs_its_attempt_and_the_others_serve_on(field: Field) -> None:
    field.cards = simulated_cards("test", 2)
    sweep_id, _ = field.submit({"base": {}, "head": {}}, blocks=2)
    serve(field, Gone(field.cards, field.make))
    assert field.store.pending(sweep_id).complete == 8
    states = [state for tries in field.attempts(sweep_id).values() for state, _ in tries]
    assert states.count("lost") == 1


def test_the_last_node_that_goes_ends_the_scheduler_and_another_one_goes_on(field: Field) -> None:
    sweep_id, _ = field.submit({"base": {}, "head": {}})
    with pytest.raises(HostLost, match="no card is left"):
        serve(field, Gone(field.cards, field.make))
    assert field.store.pending(sweep_id).leased_blocks == 0
    serve(field)
    assert field.store.pending(sweep_id).complete == 4


def test_a_scheduler_that_is_stopped_leaves_nothing_leased(field: Field) -> None:
    sweep_id, _ = field.submit({"base": {"sleep_s": 30}})
    with pytest.raises(Stopped):
        serve(field, stopped=lambda: bool(field.store.pending(sweep_id).live_attempts))
    left = field.store.pending(sweep_id)
    assert (left.leased_blocks, left.live_attempts, left.pending) == (0, 0, 2)


def test_a_card_in_others_hands_is_not_given_a_block(field: Field) -> None:
    """The block stays for whoever has a clear card; the queue says what the dirty one is at."""
    field.cards = simulated_cards("test", 2)
    field.scripts["w0"] = [{"processes": [{"pid": 4_000_001, "used_bytes": 5}]}]
    sweep_id, _ = field.submit({"base": {"sleep_s": 0.2}, "head": {}}, blocks=2)
    seen: set[str] = set()

    def look() -> bool:
        seen.update(row.reason for row in field.store.cards() if row.state == "busy")
        return False

    serve(field, stopped=look)
    assert any("process 4000001" in reason for reason in seen)
    runs = field.store.judge_input(sweep_id).cells[0].runs
    assert {run.record.certificate.uuid for run in runs if run.record and run.record.certificate} == {
        field.cards[1].uuid
    }
    assert all(state == "measured" for tries in field.attempts(sweep_id).values() for state, _ in tries)


def test_a_scheduler_that_stood_still_past_its_leases_does_not_count_twice(field: Field) -> None:
    """SIGSTOP for longer than a lease: another one has run the block meanwhile."""
    sweep_id, _ = field.submit({"base": {}, "head": {}})

    class Stood(Threads):
        stood = False

        def outcome(self, ticket: Ticket) -> RunOutcome:
            answer = super().outcome(ticket)
            if not self.stood:
                self.stood = True
                field.now_s += 120.0
                claim = field.store.claim_block(None, "other", 60.0)
                assert claim is not None
                field.store.release_block(claim.block_id, claim.fence)
            return answer

    serve(field, Stood(field.cards, field.make))
    tries = field.attempts(sweep_id)
    assert [state for state, _ in tries["base"]] == ["lost", "measured", "measured"]
    assert field.spool.sweeps() == ()
    late = [e for e in field.store.events(sweep_id) if e.kind == "forfeited"]
    assert len(late) == 1


def test_a_sweep_that_is_judged_for_long_keeps_no_card_of_another_from_work(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = field.submit({"base": {}, "head": {}}, name="first")
    after, _ = field.submit({"base": {}, "head": {}}, name="after")
    judging, runs_done = threading.Event(), threading.Event()

    def slow(given: CellsRead) -> Any:
        if given.around.manifest.name == "first":
            judging.set()
            assert runs_done.wait(30), "the other sweep's runs are made meanwhile"
        return judge_read(given)

    monkeypatch.setattr("orchestrator.conclude.judge_read", slow)

    def look() -> bool:
        if judging.is_set() and not runs_done.is_set() and field.store.pending(after).complete == 4:
            assert field.store.verdict(first) is None
            runs_done.set()
        return False

    serve(field, stopped=look)
    assert runs_done.is_set()
    assert {row.state for row in field.store.sweeps()} == {"judged"}


def test_a_sweep_whose_rows_are_damaged_stays_open_and_the_others_are_judged(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, _ = field.submit({"base": {}, "head": {}}, name="broken")
    fine, _ = field.submit({"base": {}, "head": {}}, name="fine")

    def judged(given: CellsRead) -> Any:
        if given.around.manifest.name == "broken":
            raise StoreError("a row cannot be read", "restore it")
        return judge_read(given)

    monkeypatch.setattr("orchestrator.conclude.judge_read", judged)
    serve(field)
    assert {row.name: row.state for row in field.store.sweeps()} == {"broken": "open", "fine": "judged"}
    said = [event.message for event in field.store.events(broken) if event.kind == "waiting"]
    assert said == ["it cannot be judged from here: a row cannot be read (restore it)"]
    assert field.store.verdict(fine) is not None
