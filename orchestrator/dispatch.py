"""The dispatcher: takes blocks from the store, gives their runs to workers one by one, writes down what comes back.

The only holder of the store. Each worker has a seat; a seat holds one block at a time and walks it run by run on one
card, so base and head of a block never meet two cards. Nothing is repeated silently: every try is an attempt in the
store, and how often a run may be tried is the manifest's limit. A dirty card before the spawn is a wait with a reason.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jobs.adapters.base import RunOrder
from jobs.adapters.native_forced import ForceOrder
from jobs.errors import Conflict, IllegalMove, StoreError, UnknownAttempt, Unstorable
from jobs.lifecycle import attempts_left
from jobs.model import ArmPlan, AttemptState, Manifest
from jobs.near_tie import Adjudication, FollowUp
from jobs.store import AttemptRef, BlockClaim, Pending, RunTicket, Store
from orchestrator.clear import ClearVerdict
from orchestrator.lost import HostLost, Stopped, WorkerLost
from orchestrator.outcome import RunOutcome, Spool
from orchestrator.place import Placer, Ticket
from orchestrator.worker import WorkerCard, WorkOrder

LEASE_S = 60.0
BEAT_S = LEASE_S / 4
TICK_S = 0.2
LOOK_AGAIN_S = 2.0
STOP_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Happening:
    """Something to show: a run began, ended, waits, or a worker was lost. `counts` stands with each end."""

    kind: str  # begin, end, wait, lost, asks
    cell: str = ""
    arm: str = ""
    text: str = ""
    counts: Pending | None = None


@dataclass(slots=True)
class Seat:
    """One worker with what it is at. `tried` holds how attempts at the run in hand have ended."""

    hello: WorkerCard
    backlog: list[BlockClaim] = field(default_factory=list)
    claim: BlockClaim | None = None
    runs: list[RunTicket] = field(default_factory=list)
    tried: list[AttemptState] = field(default_factory=list)
    ticket: Ticket | None = None
    attempt: AttemptRef | None = None
    dirty_since_s: float | None = None
    look_at_s: float = 0.0
    shown_reason: str = ""

    @property
    def worker(self) -> str:
        """The worker's name for the placer."""
        return self.hello.worker

    @property
    def card(self) -> str:
        """The worker's card by UUID."""
        return self.hello.card.uuid


class Dispatcher:
    """Works one sweep to its end. `driver` names this process in the store; `homes` are cards of blocks half done.

    `work` raises Stopped when `stopped` says so, HostLost when workers cannot be had any more; both leave a store that
    can be resumed.
    """

    def __init__(
        self,
        store: Store,
        placer: Placer,
        sweep_id: str,
        manifest: Manifest,
        driver: str,
        *,
        homes: Mapping[str, str] | None = None,
        stopped: Callable[[], bool] = lambda: False,
        tell: Callable[[Happening], None] = lambda _happening: None,
        clock: Callable[[], float] = time.monotonic,
        beat_s: float = BEAT_S,
    ) -> None:
        self._store = store
        self._placer = placer
        self._sweep_id = sweep_id
        self._limits = manifest.limits
        self._arms: dict[str, ArmPlan] = {arm.name: arm for arm in manifest.arms}
        self._cells = manifest.cells
        self._driver = driver
        self._homes = dict(homes or {})
        self._stopped = stopped
        self._tell = tell
        self._clock = clock
        self._beat_s = beat_s
        self._beat_at_s = 0.0
        self._seats: list[Seat] = []
        self._told_of_leases = False

    def work(self) -> Pending:
        """Run what is pending; the counts at the end. The placer must be open, and stays so."""
        while True:
            for seat in self._seats:
                self._push(seat)
            tickets = [seat.ticket for seat in self._seats if seat.ticket is not None]
            is_idle = not tickets and not any(seat.claim or seat.backlog for seat in self._seats)
            if is_idle:
                left = self._store.pending(self._sweep_id)
                if not (left.pending and left.leased_blocks):
                    return left
                self._tell_of_leases(left)
            if self._stopped():
                self._wind_down()
                raise Stopped
            self._beat()
            if not tickets:
                time.sleep(LOOK_AGAIN_S if is_idle else TICK_S)
                continue
            for ticket in self._placer.ready(tickets, TICK_S):
                self._receive(next(seat for seat in self._seats if seat.ticket is ticket))

    def ask(self, questions: Sequence[FollowUp]) -> None:
        """Have the judge's questions answered, one by one, each on the card that base ran on.

        Raises HostLost when that is not here, or when workers are lost over a question as often as attempts are
        allowed.
        """
        for question in questions:
            seat = next((seat for seat in self._seats if question.card in ("", seat.card)), None)
            if seat is None:
                raise HostLost(f"card {question.card}, on which base ran, is not here to ask the oracle about its ids")
            about = f"the oracle about index {question.first} of {question.base}'s ids"
            self._tell(Happening("asks", question.cell, question.head, about))
            answer = self._answer(seat, question)
            self._store.write_adjudication(self._sweep_id, answer)

    def _answer(self, seat: Seat, question: FollowUp) -> Adjudication:
        """What a worker says to a question. One that is lost over it is replaced and asked again."""
        plan = next(cell for cell in self._cells if cell.cell == question.cell)
        arms = self._arms[question.base], self._arms[question.head]
        order = ForceOrder(question, plan, *arms, timeout_s=self._limits.run_timeout_s)
        for _ in range(self._limits.attempts):
            ticket = self._placer.adjudicate(seat.worker, order)
            try:
                while not self._placer.ready([ticket], TICK_S):
                    if self._stopped():
                        self._placer.stop()
                        raise Stopped
                answer = self._placer.adjudication(ticket)
            except WorkerLost as lost:
                self._tell(Happening("lost", question.cell, question.head, str(lost)))
                seat.hello = self._placer.replace(seat.worker)
                continue
            if self._stopped():  # what was cut off is no answer
                raise Stopped
            return answer
        raise HostLost(f"{self._limits.attempts} workers were lost over a question about {question.cell}")

    def _tell_of_leases(self, left: Pending) -> None:
        """What is pending is leased to another driver: it works there, or it died and its leases end within LEASE_S."""
        if not self._told_of_leases:
            self._told_of_leases = True
            blocks = f"{left.leased_blocks} block{'s' * (left.leased_blocks != 1)}"
            reason = f"another driver holds the lease on {blocks}: waiting for it, or for the lease to end"
            self._store.log_event(self._sweep_id, "waiting", reason, worker=self._driver)
            self._tell(Happening("wait", self._sweep_id, "all", reason))

    def seat(self, hellos: tuple[WorkerCard, ...]) -> None:
        """Give the workers their seats. Raises HostLost when a half-done block's card is not among theirs."""
        self._seats = [Seat(hello) for hello in hellos]
        absent = sorted(set(self._homes.values()) - {seat.card for seat in self._seats})
        if absent:
            raise HostLost(f"a block was begun on card {absent[0]}, which is not here: start the sweep anew")

    # ---- forward -------------------------------------------------------------------------------------------------

    def _push(self, seat: Seat) -> None:
        """Get an idle seat going: next run of its block, else next block."""
        if seat.ticket is not None:
            return
        if seat.claim is not None and not seat.runs:
            self._store.release_block(seat.claim.block_id, seat.claim.fence)
            seat.claim = None
        if seat.claim is None:
            self._take_block(seat)
        if seat.claim is not None and seat.runs and self._clock() >= seat.look_at_s:
            seat.ticket = self._placer.look(seat.worker)

    def _take_block(self, seat: Seat) -> None:
        """The next block that may run on this seat's card; blocks begun elsewhere go to the seat with their card."""
        while not seat.backlog:
            claim = self._store.claim_block(self._sweep_id, f"{self._driver}/{seat.worker}", LEASE_S)
            if claim is None:
                return
            home = self._homes.get(claim.block_id, seat.card)
            next(other for other in self._seats if other.card == home).backlog.append(claim)
        seat.claim = seat.backlog.pop(0)
        seat.runs = self._runnable(seat.claim)
        seat.tried = list(seat.runs[0].attempts) if seat.runs else []

    def _runnable(self, claim: BlockClaim) -> list[RunTicket]:
        """The pending runs of a block; those of an arm that could not be built end here, with no attempt."""
        found = []
        for run in claim.pending:
            if reason := self._arms[run.arm].unbuilt:
                self._store.finish_run(run.run_id, "exhausted", reason, fence=claim.fence)
                counts = self._store.pending(self._sweep_id)
                self._tell(Happening("end", claim.cell, run.arm, reason, counts))
            else:
                found.append(run)
        return found

    def _begin(self, seat: Seat) -> None:
        """Open the attempt and hand the run over."""
        assert seat.claim is not None
        claim, run = seat.claim, seat.runs[0]
        attempt = self._store.open_attempt(run.run_id, claim.fence, f"{self._driver}/{seat.worker}", seat.card)
        self._store.move(attempt.attempt_id, claim.fence, "claimed", "clearing")
        self._store.move(attempt.attempt_id, claim.fence, "clearing", "running")
        order = RunOrder(
            run_id=run.run_id,
            attempt_id=attempt.attempt_id,
            attempt_number=attempt.number,
            cell=claim.plan,
            arm=self._arms[run.arm],
            card_uuid=seat.card,
            timeout_s=self._limits.run_timeout_s,
        )
        seat.attempt = attempt
        seat.ticket = self._placer.run(seat.worker, WorkOrder(self._sweep_id, claim.fence, order))
        self._tell(Happening("begin", claim.cell, run.arm))

    # ---- back ----------------------------------------------------------------------------------------------------

    def _receive(self, seat: Seat) -> None:
        """Take what a seat's ticket brought."""
        ticket, attempt = seat.ticket, seat.attempt
        assert ticket is not None
        seat.ticket = seat.attempt = None
        try:
            if attempt is None:
                self._looked(seat, self._placer.verdict(ticket))
            else:
                self._ended(seat, self._placer.outcome(ticket))
        except WorkerLost as lost:
            self._lost(seat, attempt, lost)

    def _looked(self, seat: Seat, verdict: ClearVerdict) -> None:
        """Begin on a clear card; else wait, say why once a reason, and give up at the queue's limit."""
        if verdict.clear:
            seat.dirty_since_s, seat.shown_reason = None, ""
            self._begin(seat)
            return
        assert seat.claim is not None
        now_s = self._clock()
        seat.dirty_since_s = now_s if seat.dirty_since_s is None else seat.dirty_since_s
        seat.look_at_s = now_s + LOOK_AGAIN_S
        reason = f"card {seat.card} is not clear ({verdict.verdict}): {'; '.join(verdict.reasons)}"
        if reason != seat.shown_reason:
            seat.shown_reason = reason
            self._store.log_event(self._sweep_id, "waiting", reason, subject=seat.claim.block_id, worker=seat.worker)
            self._tell(Happening("wait", seat.claim.cell, seat.runs[0].arm, reason))
        if now_s - seat.dirty_since_s <= self._limits.queue_timeout_s:
            return
        waited = f"{reason}; waited {self._limits.queue_timeout_s:g} s"
        if verdict.fault:
            raise HostLost(waited)
        self._give_up(seat, waited)

    def _give_up(self, seat: Seat, reason: str) -> None:
        """A card that stays slowed or in others' hands is no fault: the run in hand ends without a sample, unproven."""
        assert seat.claim is not None
        claim, run = seat.claim, seat.runs[0]
        attempt = self._store.open_attempt(run.run_id, claim.fence, f"{self._driver}/{seat.worker}", seat.card)
        self._store.move(attempt.attempt_id, claim.fence, "claimed", "clearing")
        self._store.move(attempt.attempt_id, claim.fence, "clearing", "contaminated", reason)
        self._store.finish_run(run.run_id, "exhausted", reason, fence=claim.fence)
        self._next_run(seat)
        seat.look_at_s = 0.0  # the wait was the queue's: the next run has one look, and no wait of its own
        self._tell(Happening("end", claim.cell, run.arm, reason, self._store.pending(self._sweep_id)))

    def _ended(self, seat: Seat, outcome: RunOutcome) -> None:
        """Store an outcome, acknowledge it, and decide about another attempt."""
        assert seat.claim is not None
        run = seat.runs[0]
        done = settle(self._store, outcome)
        self._placer.acknowledge(seat.worker, outcome.sweep_id, outcome.attempt_id)
        if done.state != "measured":
            self._again_or_not(seat, done.state, done.reason, done.retry or done.state == "contaminated")
        else:
            self._next_run(seat)
        self._tell(Happening("end", seat.claim.cell, run.arm, done.reason, self._store.pending(self._sweep_id)))

    def _lost(self, seat: Seat, attempt: AttemptRef | None, lost: WorkerLost) -> None:
        """A worker died: its attempt is lost, its card gets a new one, the block goes on."""
        assert seat.claim is not None
        self._tell(Happening("lost", seat.claim.cell, seat.runs[0].arm, str(lost)))
        if attempt is not None:
            self._store.move(attempt.attempt_id, seat.claim.fence, "running", "lost", str(lost))
            self._again_or_not(seat, "lost", str(lost), may=True)
        with self._beating():  # a new worker may wait long for a card that somebody took meanwhile
            seat.hello = self._placer.replace(seat.worker)

    def _again_or_not(self, seat: Seat, state: AttemptState, reason: str, may: bool) -> None:
        """Another attempt at the same run if that can help and the limits allow it; else the run is exhausted."""
        seat.tried.append(state)
        if state == "cancelled":
            return
        if may and attempts_left(seat.tried, self._limits.attempts, self._limits.contamination_reruns):
            return
        assert seat.claim is not None
        self._store.finish_run(seat.runs[0].run_id, "exhausted", reason, fence=seat.claim.fence)
        self._next_run(seat)

    def _next_run(self, seat: Seat) -> None:
        seat.runs.pop(0)
        seat.tried = list(seat.runs[0].attempts) if seat.runs else []

    # ---- leases and the end --------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Keep every lease alive, well before its end."""
        if self._clock() < self._beat_at_s:
            return
        self._beat_at_s = self._clock() + self._beat_s
        for claim in self._held():
            self._store.heartbeat(claim.block_id, claim.fence, LEASE_S)

    def _held(self) -> list[BlockClaim]:
        return [claim for s in self._seats for claim in (*([s.claim] if s.claim else []), *s.backlog)]

    @contextlib.contextmanager
    def _beating(self) -> Iterator[None]:
        """Keep the leases alive on a thread, while this one waits for something that may take longer than they last.

        A beat that fails says nothing here: the next guarded change finds the lease gone.
        """
        over, held = threading.Event(), self._held()

        def beat() -> None:
            while not over.wait(self._beat_s):
                for claim in held:
                    with contextlib.suppress(StoreError):
                        self._store.heartbeat(claim.block_id, claim.fence, LEASE_S)

        thread = threading.Thread(target=beat, name="leases", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def abandon(self) -> None:
        """Give the blocks back after a loss: what ran in them becomes lost, and a resume need not wait for leases."""
        for seat in self._seats:
            for claim in [*([seat.claim] if seat.claim else []), *seat.backlog]:
                with contextlib.suppress(Conflict):  # somebody else has it already
                    self._store.release_block(claim.block_id, claim.fence)
            seat.claim, seat.backlog = None, []

    def _wind_down(self) -> None:
        """Stop what runs, store what was stopped, give the blocks back."""
        self._placer.stop()
        deadline_s = self._clock() + STOP_WAIT_S
        while (left := [s for s in self._seats if s.attempt is not None]) and self._clock() < deadline_s:
            for ticket in self._placer.ready([s.ticket for s in left if s.ticket is not None], TICK_S):
                self._receive_last(next(seat for seat in left if seat.ticket is ticket))
        self.abandon()

    def _receive_last(self, seat: Seat) -> None:
        ticket, attempt = seat.ticket, seat.attempt
        assert ticket is not None and attempt is not None and seat.claim is not None
        seat.ticket = seat.attempt = None
        try:
            outcome = self._placer.outcome(ticket)
        except WorkerLost:  # how a scheduler reports a call that it cancelled
            self._store.move(attempt.attempt_id, seat.claim.fence, "running", "cancelled", "stopped by the user")
            return
        settle(self._store, outcome)
        self._placer.acknowledge(seat.worker, outcome.sweep_id, outcome.attempt_id)


@dataclass(frozen=True, slots=True)
class Settled:
    """How an attempt stands in the store; `fault` says why its record could not be kept, if it could not."""

    state: AttemptState
    reason: str
    retry: bool = False
    fault: str = ""


def settle(store: Store, outcome: RunOutcome) -> Settled:
    """Write one outcome to the store; a resend is a no-op. Raises Conflict when the attempt is no longer ours.

    A record that no store could hold ends its attempt as failed: it will not become better by being sent again.
    """
    try:
        if outcome.record is not None:
            store.write_record(outcome.attempt_id, outcome.fence, outcome.record, outcome.end, outcome.reason)
        else:
            if outcome.end == "measured":
                raise Unstorable(f"the outcome of {outcome.attempt_id} is measured and holds no record")
            store.move(outcome.attempt_id, outcome.fence, "running", outcome.end, outcome.reason)
    except Unstorable as exc:
        reason = f"protocol: {exc}"
        store.move(outcome.attempt_id, outcome.fence, "running", "failed", reason)
        return Settled("failed", reason, fault=str(exc))
    return Settled(outcome.end, outcome.reason, outcome.retry)


def ingest(store: Store, spool: Spool, sweep_id: str) -> int:
    """Store outcomes that an earlier driver left in the spool; how many counted. Each file is met once.

    One that came too late (its attempt was given up) is noted and forgotten: a later attempt has its place. One that
    cannot be kept or read is noted, and its file set aside.
    """
    kept = 0
    for attempt_id in spool.unreadable(sweep_id):
        aside = spool.set_aside(sweep_id, attempt_id)
        store.log_event(sweep_id, "unreadable", f"its spooled outcome is kept in {aside}", subject=attempt_id)
    for outcome in spool.left_over(sweep_id):
        try:
            settled = settle(store, outcome)
        except (Conflict, IllegalMove, UnknownAttempt) as late:
            store.log_event(sweep_id, "too_late", str(late), subject=outcome.attempt_id)
            spool.acknowledge(sweep_id, outcome.attempt_id)
            continue
        if settled.fault:
            aside = spool.set_aside(sweep_id, outcome.attempt_id)
            store.log_event(sweep_id, "unstorable", f"{settled.fault}; kept in {aside}", subject=outcome.attempt_id)
        else:
            kept += 1
            spool.acknowledge(sweep_id, outcome.attempt_id)
    return kept
