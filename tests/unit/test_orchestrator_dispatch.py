"""The dispatcher with a real store, threads for workers and a stand-in engine: every run once, every loss visible."""

from __future__ import annotations

import errno
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jobs.judge import judge
from jobs.model import Limits
from jobs.verdict import Verdict
from orchestrator.choose import simulated_cards
from orchestrator.lost import HostLost, Stopped, WorkerLost
from orchestrator.outcome import RunOutcome
from orchestrator.place import InProcessPlacer, Ticket
from orchestrator.settle import ingest
from orchestrator.worker import WorkerCard
from tests.unit.orchestrator_field import Field


@pytest.fixture
def field(tmp_path: Path) -> Field:
    return Field(tmp_path)


def test_a_sweep_runs_each_run_once_in_order_and_leaves_nothing(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {"ids": [5, 6, 8]}})
    done = field.work(sweep_id, manifest)
    assert (done.complete, done.pending, done.leased_blocks, done.live_attempts) == (4, 0, 0, 0)
    given = field.store.judge_input(sweep_id)
    runs = sorted(given.cells[0].runs, key=lambda run: run.position)
    assert [run.arm for run in runs] == ["base", "head", "head", "base"]
    assert [run.record.generations[0].ids for run in runs if run.record] == [(5, 6, 7), (5, 6, 8), (5, 6, 8), (5, 6, 7)]
    begun = [run.record.started_at for run in runs if run.record]
    assert begun == sorted(begun)
    assert all(len(run.attempts) == 1 for run in runs)
    assert field.spool.left_over(sweep_id) == ()
    assert [h.arm for h in field.heard if h.kind == "begin"] == ["base", "head", "head", "base"]


def test_blocks_spread_over_cards_and_each_block_stays_on_one(field: Field) -> None:
    field.cards = simulated_cards("test", 2)
    sweep_id, manifest = field.submit({"base": {"sleep_s": 0.1}, "head": {"sleep_s": 0.1}}, blocks=4)
    assert field.work(sweep_id, manifest).complete == 16
    homes: dict[str, set[str]] = {}
    for run in field.store.judge_input(sweep_id).cells[0].runs:
        assert run.record is not None
        assert run.record.certificate is not None
        homes.setdefault(run.block_id, set()).add(run.record.certificate.uuid)
    assert all(len(uuids) == 1 for uuids in homes.values())
    assert len(set.union(*homes.values())) == 2


def test_a_crash_is_tried_again_up_to_the_limit_and_the_other_arm_goes_on(field: Field) -> None:
    sweep_id, manifest = field.submit(
        {"base": {}, "head": {"die": signal.SIGSEGV}}, limits=Limits(attempts=2, queue_timeout_s=20)
    )
    done = field.work(sweep_id, manifest)
    assert (done.complete, done.exhausted) == (2, 2)
    tries = field.attempts(sweep_id)
    assert [state for state, _ in tries["head"]] == ["failed"] * 4
    assert "signal 11" in tries["head"][0][1]
    assert [state for state, _ in tries["base"]] == ["measured"] * 2


def test_a_refusal_is_not_tried_again_and_its_reason_stands(field: Field) -> None:
    error = {"code": 13, "kind": "refused", "message": "budget 1 below 2", "remedy": "raise it"}
    sweep_id, manifest = field.submit({"base": {}, "head": {"error": error}})
    assert field.work(sweep_id, manifest).exhausted == 2
    assert field.attempts(sweep_id)["head"] == [("refused", "refused: budget 1 below 2 (raise it)")] * 2


def test_a_contaminated_run_is_set_aside_and_rerun(field: Field) -> None:
    """Somebody comes when the first child is there, and goes when it has ended."""
    started = field.root / "started"
    field.clock = lambda: 2.0 if any(h.kind == "end" for h in field.heard) else float(started.exists())
    intruder = [{"at_s": 1.0, "processes": [{"pid": 4_000_001, "used_bytes": 5}]}, {"at_s": 2.0, "processes": []}]
    field.scripts["w0"] = intruder
    sweep_id, manifest = field.submit({"base": {"sleep_s": 1.0, "mark": str(started)}, "head": {}})
    assert field.work(sweep_id, manifest).complete == 4
    tries = field.attempts(sweep_id)["base"]
    assert [state for state, _ in tries][:2] == ["contaminated", "measured"]
    assert "4000001" in tries[0][1]


def test_a_dirty_card_is_a_wait_with_a_reason_and_no_attempt(field: Field) -> None:
    field.clock = lambda: float(any(h.kind == "wait" for h in field.heard))
    field.scripts["w0"] = [{"processes": [{"pid": 4_000_001, "used_bytes": 5}]}, {"at_s": 1.0, "processes": []}]
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    assert field.work(sweep_id, manifest).complete == 4
    assert all(state == "measured" for tries in field.attempts(sweep_id).values() for state, _ in tries)
    waits = [event for event in field.store.events(sweep_id) if event.kind == "waiting"]
    assert len(waits) == 1
    assert "4000001" in waits[0].message


@pytest.mark.parametrize(
    ("state", "words"),
    [({"mig_enabled": True}, "MIG is on"), ({"error": "the card fell off the bus"}, "the card fell off the bus")],
)
def test_a_card_at_fault_ends_the_wait_as_a_fault_of_the_host(field: Field, state: dict[str, Any], words: str) -> None:
    field.scripts["w0"] = [state]
    sweep_id, manifest = field.submit({"base": {}, "head": {}}, limits=Limits(queue_timeout_s=1))
    with pytest.raises(HostLost, match=words):
        field.work(sweep_id, manifest)
    left = field.store.pending(sweep_id)
    assert (left.pending, left.leased_blocks, left.live_attempts) == (4, 0, 0)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"throttle_bits": 0x40}, "hardware thermal slowdown"),
        ({"processes": [{"pid": 4_000_001, "used_bytes": 5}]}, "process 4000001"),
        ({"processes": [{"pid": 4_000_001}], "ecc_uncorrected": None}, "process 4000001"),
        ({"used_bytes": 9 << 30}, "no process listed"),
    ],
)
def test_field_19_a_card_slowed_or_used_by_others_all_the_time_is_an_open_verdict_and_no_fault(
    field: Field, state: dict[str, Any], words: str
) -> None:
    field.scripts["w0"] = [state]
    sweep_id, manifest = field.submit({"base": {}, "head": {}}, limits=Limits(queue_timeout_s=1))
    begin_s = time.monotonic()
    done = field.work(sweep_id, manifest)
    assert time.monotonic() - begin_s < 8  # the wait is the queue's, once, and not once a run
    assert (done.pending, done.exhausted, done.leased_blocks) == (0, 4, 0)
    tries = field.attempts(sweep_id)["base"]
    assert [state for state, _ in tries] == ["contaminated"] * 2
    assert words in tries[0][1]
    verdict = judge(field.store.judge_input(sweep_id))
    assert isinstance(verdict, Verdict)
    assert verdict.exit_code == 3


def test_a_driver_that_lost_its_block_exhausts_no_run_of_it(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {"silent": True}}, limits=Limits(attempts=1, queue_timeout_s=20))
    robbed: list[str] = []

    class Robbed(InProcessPlacer):
        """Loses the block to another driver just after the attempt was stored."""

        def acknowledge(self, worker: str, sweep_id: str, attempt_id: str) -> None:
            super().acknowledge(worker, sweep_id, attempt_id)
            robbed.extend(field.store.break_leases(sweep_id, "another driver") or ["-"])

    assert field.work(sweep_id, manifest, placer=Robbed(field.cards, field.make)).pending == 0
    assert robbed
    assert [h.kind for h in field.heard].count("gone") == 1
    events = field.store.events(sweep_id)
    assert ["not held under fence" in e.message for e in events if e.kind == "forfeited"] == [True]
    ended = [e.message for e in events if e.kind == "run"]
    assert ended == ["no attempt left"] * 2, "by whoever broke the lease, under a fence of its own"


class LossyPlacer(InProcessPlacer):
    """Loses the worker on its first run; `alive`: whether a new one can be had."""

    lose = 1
    alive = True
    kept = False
    """Whether it had spooled what it measured."""

    def outcome(self, ticket: Ticket) -> RunOutcome:
        answer = super().outcome(ticket)
        if self.lose:
            self.lose -= 1
            if not self.kept:
                self.acknowledge(ticket.worker, answer.sweep_id, answer.attempt_id)
            raise WorkerLost(ticket.worker, "killed by signal 9")
        return answer

    def replace(self, worker: str) -> WorkerCard:
        if not self.alive:
            raise HostLost("the node died")
        return super().replace(worker)


def test_field_8_a_lost_worker_loses_one_attempt_and_a_new_one_goes_on(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    done = field.work(sweep_id, manifest, placer=LossyPlacer(field.cards, field.make))
    assert done.complete == 4
    assert [state for state, _ in field.attempts(sweep_id)["base"]] == ["lost", "measured", "measured"]
    assert [h.kind for h in field.heard].count("lost") == 1


def test_a_worker_lost_after_it_spooled_its_outcome_costs_nothing(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    placer = LossyPlacer(field.cards, field.make)
    placer.kept = True
    assert field.work(sweep_id, manifest, placer=placer).complete == 4
    assert [state for state, _ in field.attempts(sweep_id)["base"]] == ["measured", "measured"]
    assert [h.kind for h in field.heard].count("lost") == 1
    assert field.spool.sweeps() == ()


def _no_room(*_given: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device", "/spool")


def test_an_outcome_that_its_host_cannot_keep_is_stored_all_the_same_and_said(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.outcome._opened", _no_room)
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    assert field.work(sweep_id, manifest).complete == 4
    said = [event for event in field.store.events(sweep_id) if event.kind == "unspooled"]
    assert len(said) == 4 and "No space left on device" in said[0].message
    assert field.spool.sweeps() == ()


def test_a_worker_whose_host_has_no_room_for_a_run_is_lost_and_another_try_made(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = tempfile.mkdtemp, [0]

    def full_at_first(**given: Any) -> str:
        tries[0] += 1
        if tries[0] == 1:
            _no_room()
        return str(real(**given))

    monkeypatch.setattr(tempfile, "mkdtemp", full_at_first)
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    assert field.work(sweep_id, manifest).complete == 4
    (state, reason), *rest = field.attempts(sweep_id)["base"]
    assert state == "lost" and "No space left on device" in reason
    assert rest == [("measured", "")] * 2


def test_leases_live_on_while_a_new_worker_waits_for_its_card(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    stolen: list[object] = []

    class Waiting(LossyPlacer):
        def replace(self, worker: str) -> WorkerCard:
            field.now_s = 50.0  # of a lease of 60
            time.sleep(0.4)
            field.now_s = 100.0
            stolen.append(field.store.claim_block(sweep_id, "thief", 60))
            return super().replace(worker)

    assert field.work(sweep_id, manifest, placer=Waiting(field.cards, field.make), beat_s=0.05).complete == 4
    assert stolen == [None]


def test_a_lost_host_leaves_a_store_that_a_second_driver_finishes(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    placer = LossyPlacer(field.cards, field.make)
    placer.alive = False
    with pytest.raises(HostLost):
        field.work(sweep_id, manifest, placer=placer)
    assert field.store.pending(sweep_id).leased_blocks == 0
    assert field.work(sweep_id, manifest).complete == 4


def test_a_block_leased_to_a_driver_that_died_is_waited_for(field: Field) -> None:
    """As on a store of several hosts, where nobody else may say that the driver is gone."""
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    claim = field.store.claim_block(sweep_id, "elsewhere/w0", 1.0)
    assert claim is not None
    field.store.open_attempt(claim.pending[0].run_id, claim.fence, "elsewhere/w0", "SIM")
    assert field.work(sweep_id, manifest).complete == 4
    assert [h.text for h in field.heard if h.kind == "wait"] == [
        "another driver holds the lease on 1 block: waiting for it, or for the lease to end"
    ]
    assert [state for state, _ in field.attempts(sweep_id)["base"]].count("lost") == 1


def test_a_wait_for_another_drivers_lease_can_be_stopped(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    assert field.store.claim_block(sweep_id, "elsewhere/w0", 600.0) is not None
    with pytest.raises(Stopped):
        field.work(sweep_id, manifest, stopped=lambda: bool(field.heard))
    assert field.store.pending(sweep_id).leased_blocks == 1


def test_a_stop_ends_children_and_the_sweep_can_be_resumed(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {"sleep_s": 0.2}, "head": {"sleep_s": 30}})
    begin_s = time.monotonic()

    def in_heads_run() -> bool:
        left = field.store.pending(sweep_id)
        return (left.complete, left.live_attempts) == (1, 1)

    with pytest.raises(Stopped):
        field.work(sweep_id, manifest, stopped=in_heads_run)
    assert time.monotonic() - begin_s < 10
    left = field.store.pending(sweep_id)
    assert (left.leased_blocks, left.live_attempts, left.complete) == (0, 0, 1)
    assert field.attempts(sweep_id)["head"][0][0] == "cancelled"


def test_an_outcome_left_in_the_spool_counts_once_and_a_late_one_not_at_all(field: Field) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    claim = field.store.claim_block(sweep_id, "dead/w0", 60)
    assert claim is not None
    kept: list[RunOutcome] = []

    class KeepingPlacer(InProcessPlacer):
        """Forgets nothing: as if the driver had died before each acknowledgement."""

        def acknowledge(self, worker: str, sweep_id: str, attempt_id: str) -> None:
            kept.append(next(o for o in field.spool.left_over(sweep_id) if o.attempt_id == attempt_id))

    field.store.break_leases(sweep_id, "its driver is gone")
    assert field.work(sweep_id, manifest, placer=KeepingPlacer(field.cards, field.make)).complete == 4
    before = field.store.judge_input(sweep_id)
    left = field.spool.left_over(sweep_id)
    assert len(left) == 4
    assert ingest(field.store, field.spool, sweep_id).kept == 4
    assert field.store.judge_input(sweep_id) == before
    late = left[0].model_copy(update={"fence": 1, "reason": "from another world"})
    field.spool.put(late.model_copy(update={"record": late.record and late.record.model_copy(update={"exit_code": 3})}))
    assert ingest(field.store, field.spool, sweep_id).kept == 0
    assert field.store.judge_input(sweep_id) == before
    assert field.spool.left_over(sweep_id) == ()
    assert [e.kind for e in field.store.events(sweep_id)].count("too_late") == 1


@pytest.mark.parametrize("poison", ["beyond", "unreadable", "other_attempt", "no_record", "unknown_attempt"])
def test_a_poison_file_in_the_spool_is_met_once_and_the_sweep_goes_on(field: Field, poison: str) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {}})
    attempt_id, outcome = field.spool_one(sweep_id, manifest)
    folder = field.works.spool / sweep_id
    file = folder / f"{attempt_id}.json"
    if poison == "unreadable":
        file.write_text('{"half": NaN')
    elif poison == "other_attempt":
        file.rename(folder / "att_other.json")
    elif poison == "no_record":
        field.spool.put(outcome.model_copy(update={"record": None}))
    elif poison == "unknown_attempt":
        file.unlink()
        field.spool.put(outcome.model_copy(update={"attempt_id": "att_elsewhere"}))
    else:
        assert outcome.record is not None
        wide = outcome.record.model_copy(update={"peak_rss_bytes": 2**63})
        field.spool.put(outcome.model_copy(update={"record": wide}))
    assert ingest(field.store, field.spool, sweep_id).kept == 0
    assert not folder.exists()
    noted = {"unreadable": "unreadable", "other_attempt": "unreadable", "unknown_attempt": "too_late"}
    (event,) = [e for e in field.store.events(sweep_id) if e.kind == noted.get(poison, "unstorable")]
    if poison != "unknown_attempt":
        assert "kept in" in event.message
        assert len(list((field.works.spool / "aside").iterdir())) == 1
    assert ingest(field.store, field.spool, sweep_id).kept == 0
    field.store.break_leases(sweep_id, "its driver is gone")
    assert field.work(sweep_id, manifest).complete == 4
    first = field.attempts(sweep_id)["base"][0]
    assert first[0] == ("failed" if poison in ("beyond", "no_record") else "lost")
    if poison == "beyond":
        assert first[1].startswith("protocol: ")
        assert "peak_rss_bytes" in first[1]


@pytest.mark.parametrize(
    "spoil", ['{"type": "result", "counters": {"hits": 1e400}}', "[" * 100_000, '{"type": "hello", "protocol": 1}']
)
def test_field_67_a_child_that_writes_what_cannot_be_kept_fails_its_run_and_the_worker_lives(
    field: Field, spoil: str
) -> None:
    sweep_id, manifest = field.submit({"base": {}, "head": {"spoil": spoil}})
    done = field.work(sweep_id, manifest)
    assert (done.complete, done.exhausted) == (2, 2)
    tries = field.attempts(sweep_id)["head"]
    assert [state for state, _ in tries] == ["failed"] * 2
    assert all(reason.startswith("protocol: ") for _, reason in tries)


def test_a_half_done_block_goes_back_to_its_card_or_nowhere(field: Field) -> None:
    field.cards = simulated_cards("test", 2)
    sweep_id, manifest = field.submit({"base": {"sleep_s": 0.3}, "head": {"sleep_s": 0.3}})
    second_only = InProcessPlacer(field.cards[1:], field.make)
    with pytest.raises(Stopped):
        field.work(sweep_id, manifest, placer=second_only, stopped=lambda: field.store.pending(sweep_id).complete >= 1)
    assert field.store.pending(sweep_id).complete >= 1
    with pytest.raises(HostLost, match="begun on card"):
        field.work(sweep_id, manifest, placer=InProcessPlacer(field.cards[:1], field.make))
    assert field.work(sweep_id, manifest).pending == 0
    runs = field.store.judge_input(sweep_id).cells[0].runs
    uuids = Counter(r.record.certificate.uuid for r in runs if r.record and r.record.certificate)
    assert uuids == {field.cards[1].uuid: 4}
