"""The dispatcher: takes blocks from the store, gives their runs to workers one by one, writes down what comes back.

The only holder of the store. Each worker has a seat; a seat holds one block at a time and walks it run by run on one
card, so base and head of a block never meet two cards. Nothing is repeated silently: every try is an attempt in the
store, and how often a run may be tried is the manifest's limit. A dirty card before the spawn is a wait with a reason.
A seat whose lease is gone (cancelled, or taken over after this process stood still) ends its run and goes on with
another block. A worker that does not answer by its deadline counts as lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial

from jobs.adapters.base import RunOrder
from jobs.adapters.native_forced import ForceOrder
from jobs.judge import Asked
from jobs.model import ArmPlan
from jobs.more_runs import BaseAgain, FreshBlocks
from jobs.near_tie import Adjudication, FollowUp
from jobs.store import AttemptRef, BlockClaim, Pending, RunTicket, Store
from orchestrator.aftermath import Aftermath
from orchestrator.cards import ProbeError
from orchestrator.clear import ClearVerdict
from orchestrator.leases import BEAT_S, LEASE_S, Leases
from orchestrator.lost import HostLost, Stopped, WorkerLost
from orchestrator.outcome import RunOutcome
from orchestrator.place import Placer
from orchestrator.plans import Plans
from orchestrator.seat import Happening, Question, Seat
from orchestrator.settle import settle
from orchestrator.stop import pause
from orchestrator.worker import WorkerCard, WorkOrder

TICK_S = 0.2
LOOK_AGAIN_S = 2.0
SEEN_S = 10.0
"""How long a look at a card without work counts, before the next block is asked for."""
ASK_AGAIN_S = 1.0
"""How long a seat that got no block waits before it asks again."""
STOP_WAIT_S = 10.0
ANSWER_S = 60.0
"""Within which a worker says whether its card is clear, and by how much it may outlast the run's own deadline."""


class Dispatcher:
    """Works one sweep to its end, or (`sweep_id` None) serves whatever stands in the store. `driver` names it there.

    `work` raises Stopped when `stopped` says so, HostLost when workers cannot be had any more; both leave a store that
    can be resumed.
    """

    def __init__(
        self,
        store: Store,
        placer: Placer,
        driver: str,
        sweep_id: str | None = None,
        *,
        stopped: Callable[[], bool] = lambda: False,
        tell: Callable[[Happening], None] = lambda _happening: None,
        clock: Callable[[], float] = time.monotonic,
        beat_s: float = BEAT_S,
        answer_s: float = ANSWER_S,
    ) -> None:
        self._store = store
        self._placer = placer
        self._driver = driver
        self._sweep_id = sweep_id
        self._stopped = stopped
        self._tell = tell
        self._clock = clock
        self._answer_s = answer_s
        self._seats: list[Seat] = []
        self._questions: list[Question] = []
        self._plans = Plans(store)
        self._leases = Leases(store, placer, self._seats, tell, clock, beat_s)
        self._aftermath = Aftermath(store, placer, self._plans, self._leases, tell, clock, drains=sweep_id is None)
        self._told_of_leases = False
        self._serves_all = sweep_id is None
        self.passes_over: tuple[str, ...] = ()
        """Sweeps that are not served from here."""

    @property
    def seats(self) -> Sequence[Seat]:
        """The seats, to be looked at."""
        return self._seats

    def seat(self, hellos: tuple[WorkerCard, ...], needed: Collection[str] = ()) -> None:
        """Give the workers their seats. Raises HostLost when a card in `needed` (UUIDs) is not among theirs."""
        self._seats[:] = [Seat(hello) for hello in hellos]
        absent = sorted(set(needed) - {seat.card for seat in self._seats})
        if absent:
            raise HostLost(f"a block was begun on card {absent[0]}, which is not here: start the sweep anew")

    def join(self, hellos: tuple[WorkerCard, ...]) -> None:
        """Seats for workers that came later."""
        self._seats += [Seat(hello) for hello in hellos]

    def collect(self, worker: str) -> None:
        """Store what a worker's host kept of earlier runs."""
        self._aftermath.collect(worker)

    def work(self) -> Pending:
        """Run what is pending of the sweep; the counts at the end. The placer must be open, and stays so."""
        assert self._sweep_id is not None, "only a sweep has an end"
        while True:
            self.turn()
            if not all(seat.is_idle for seat in self._seats):
                continue
            for seat in self._seats:
                seat.claim_at_s = 0.0
            self._push_all()
            if all(seat.is_idle for seat in self._seats):
                left = self._store.pending(self._sweep_id)
                if not (left.pending and left.leased_blocks):
                    return left
                self._tell_of_leases(self._sweep_id, left)
                pause(LOOK_AGAIN_S, self._stopped)

    def ask(self, sweep_id: str, questions: Sequence[Asked]) -> None:
        """Have the judge's questions about a sweep answered, one by one, each on the card that base ran on.

        Raises HostLost when that is not here, or when workers are lost over a question as often as attempts are
        allowed. Further runs that it asks for are made last, all together.
        """
        for asked in questions:
            self.put(sweep_id, asked)
            while self._questions or any(seat.question for seat in self._seats):
                self.turn()
        if self._store.pending(sweep_id).pending:
            self.work()

    def put(self, sweep_id: str, asked: Asked) -> None:
        """Have a question answered as soon as its card is free. Raises HostLost when that is not here.

        Runs that it asks for join those of the sweep that are pending.
        """
        if not isinstance(asked, FreshBlocks) and not self._has_card(asked):
            raise HostLost(f"card {asked.card}, on which base ran, is not here to ask about its ids")
        if not isinstance(asked, FollowUp):
            self._store.add_runs(sweep_id, asked)
            arm, what = _asked_runs(asked)
            self._tell(Happening("asks", asked.cell, arm, what))
            return
        self._questions.append(Question(sweep_id, asked))

    def is_asking(self, sweep_id: str) -> bool:
        """Whether a question about a sweep waits for its answer."""
        asked = [*self._questions, *(seat.question for seat in self._seats if seat.question)]
        return any(question.sweep_id == sweep_id for question in asked)

    def turn(self) -> None:
        """One round: give out what can be given out, keep the leases, take what came back. Raises Stopped."""
        self._push_all()
        if self._stopped():
            self._wind_down()
            raise Stopped
        self._leases.keep()
        tickets = [seat.ticket for seat in self._seats if seat.ticket is not None]
        if not tickets:
            pause(TICK_S, self._stopped)
            return
        for ticket in self._placer.ready(tickets, TICK_S):
            self._receive(next(seat for seat in self._seats if seat.ticket is ticket))
        for seat in list(self._seats):
            if seat.ticket is not None and self._clock() > seat.due_s:
                self._overdue(seat)

    def forget(self, sweep_id: str) -> None:
        """Keep nothing of a sweep that is over."""
        self._plans.forget(sweep_id)

    def keep_leases(self) -> None:
        """Keep what is held, unless it is another's by now."""
        self._leases.keep()

    def waiting(self) -> AbstractContextManager[None]:
        """Keep what is held while this thread waits for something else."""
        return self._leases.meanwhile()

    def _tell_of_leases(self, sweep_id: str, left: Pending) -> None:
        """What is pending is leased to another driver: it works there, or it died and its leases end within LEASE_S."""
        if not self._told_of_leases:
            self._told_of_leases = True
            blocks = f"{left.leased_blocks} block{'s' * (left.leased_blocks != 1)}"
            reason = f"another driver holds the lease on {blocks}: waiting for it, or for the lease to end"
            self._store.log_event(sweep_id, "waiting", reason, worker=self._driver)
            self._tell(Happening("wait", sweep_id, "all", reason))

    # ---- forward -------------------------------------------------------------------------------------------------

    def _push_all(self) -> None:
        for seat in self._seats:
            if seat.ticket is None:
                with self._leases.forfeiting(seat):
                    self._push(seat)

    def _push(self, seat: Seat) -> None:
        """Get an idle seat going: next run of its block, else a question for its card, else the next block."""
        now_s = self._clock()
        if now_s < seat.drained_until_s:
            return
        if seat.claim is not None and not seat.runs:
            claim, seat.claim = seat.claim, None
            self._store.release_block(claim.block_id, claim.fence)
            seat.claim_at_s = 0.0
        has_seen = not self._serves_all or now_s < seat.seen_at_s + SEEN_S
        if seat.claim is None and has_seen:
            if self._take_question(seat):
                return
            if now_s >= seat.claim_at_s:
                self._take_block(seat)
        wants_look = bool(seat.runs) or (seat.claim is None and not has_seen)
        if wants_look and now_s >= seat.look_at_s:
            seat.ticket, seat.due_s = self._placer.look(seat.worker), now_s + self._answer_s

    def _take_question(self, seat: Seat) -> bool:
        """Put the first question for this seat's card to its worker."""
        question = next((one for one in self._questions if one.asked.card in ("", seat.card)), None)
        if question is None:
            return False
        self._questions.remove(question)
        asked, sweep_id = question.asked, question.sweep_id
        about = f"the oracle about index {asked.first} of {asked.base}'s ids"
        self._tell(Happening("asks", asked.cell, asked.head, about))
        plan = self._plans.cell(sweep_id, asked.cell)
        arms = self._plans.arm(sweep_id, asked.base), self._plans.arm(sweep_id, asked.head)
        self._supply(seat, *arms)
        limit_s = self._plans.limits(sweep_id).run_timeout_s
        seat.question = question
        seat.ticket = self._placer.adjudicate(seat.worker, ForceOrder(asked, plan, *arms, timeout_s=limit_s))
        seat.due_s = self._clock() + 2 * limit_s + self._answer_s  # of base and of head
        return True

    def _take_block(self, seat: Seat) -> None:
        """The next block that may run on this seat's card."""
        card, name = seat.card, "" if self._sweep_id else seat.hello.card.name
        claim = self._store.claim_block(
            self._sweep_id, self._who(seat), LEASE_S, card=card, card_name=name, canary=True,
            passes_over=self.passes_over, card_memory_bytes=seat.hello.card.memory_bytes,
        )  # fmt: skip
        if claim is None:
            seat.claim_at_s = self._clock() + ASK_AGAIN_S
        else:
            seat.hold(claim, [])  # held, should the next line find that it is gone already
            seat.hold(claim, self._runnable(claim))

    def _runnable(self, claim: BlockClaim) -> list[RunTicket]:
        """The pending runs of a block; those of an arm that could not be built end here, with no attempt."""
        found = []
        for run in claim.pending:
            if reason := self._plans.arm(claim.sweep_id, run.arm).unbuilt:
                self._store.finish_run(run.run_id, "exhausted", reason, fence=claim.fence)
                counts = partial(self._store.pending, claim.sweep_id)
                self._tell(Happening("end", claim.cell, run.arm, reason, counts))
            else:
                found.append(run)
        return found

    def _begin(self, seat: Seat) -> None:
        """Open the attempt and hand the run over, with the tree of its arm where that is not there yet."""
        assert seat.claim is not None
        claim, run = seat.claim, seat.runs[0]
        self._supply(seat, self._plans.arm(claim.sweep_id, run.arm))
        attempt = self._store.start_attempt(run.run_id, claim.fence, self._who(seat), seat.card)
        limits = self._plans.limits(claim.sweep_id)
        order = RunOrder(
            run_id=run.run_id,
            attempt_id=attempt.attempt_id,
            attempt_number=attempt.number,
            cell=claim.plan,
            arm=self._plans.arm(claim.sweep_id, run.arm),
            card_uuid=seat.card,
            timeout_s=limits.run_timeout_s,
            start_timeout_s=limits.start_timeout_s,
        )
        seat.attempt = attempt
        seat.ticket = self._placer.run(seat.worker, WorkOrder(claim.sweep_id, claim.fence, order))
        seat.due_s = self._clock() + limits.run_timeout_s + self._answer_s
        self._tell(Happening("begin", claim.cell, run.arm))

    def _supply(self, seat: Seat, *arms: ArmPlan) -> None:
        """Have the trees of arms shipped to a seat's host. One that does not come costs the attempt that needs it."""
        for pack in {arm.pack for arm in arms if arm.pack} - seat.packs:
            with self._leases.meanwhile():
                if self._placer.supply(seat.worker, pack, partial(self._store.pack, pack)):
                    seat.packs.add(pack)

    # ---- back ----------------------------------------------------------------------------------------------------

    def _receive(self, seat: Seat) -> None:
        """Take what a seat's ticket brought."""
        ticket, attempt, question = seat.ticket, seat.attempt, seat.question
        assert ticket is not None
        seat.ticket = seat.attempt = seat.question = None
        try:
            if question is not None:
                self._store.write_adjudication(question.sweep_id, self._placer.adjudication(ticket))
            elif attempt is not None:
                outcome = self._placer.outcome(ticket)
                if outcome.fault == "start":  # what was shipped may have had to make room since
                    seat.packs.clear()
                with self._leases.forfeiting(seat):
                    self._aftermath.ended(seat, outcome)
            else:
                verdict = self._placer.verdict(ticket)
                with self._leases.forfeiting(seat):
                    self._looked(seat, verdict)
        except WorkerLost as lost:
            self._lost(seat, attempt, question, lost)

    def _looked(self, seat: Seat, verdict: ClearVerdict) -> None:
        """Begin on a clear card; else wait, say why once a reason, and give up at the queue's limit."""
        now_s, seat.seen = self._clock(), verdict
        seat.seen_at_s = now_s if verdict.clear else float("-inf")
        if (claim := seat.claim) is None:
            seat.look_at_s = 0.0 if verdict.clear else now_s + LOOK_AGAIN_S
            return
        if verdict.clear:
            if seat.shown_reason:
                self._store.waits(claim.block_id, claim.fence, None)
            seat.dirty_since_s, seat.shown_reason = None, ""
            self._begin(seat)
            return
        seat.dirty_since_s = now_s if seat.dirty_since_s is None else seat.dirty_since_s
        seat.look_at_s = now_s + LOOK_AGAIN_S
        reason = f"card {seat.card} is not clear ({verdict.verdict}): {'; '.join(verdict.reasons)}"
        if reason != seat.shown_reason:
            seat.shown_reason = reason
            self._store.waits(claim.block_id, claim.fence, reason)
            self._store.log_event(claim.sweep_id, "waiting", reason, subject=claim.block_id, worker=seat.worker)
            self._tell(Happening("wait", claim.cell, seat.runs[0].arm, reason))
        limit_s = self._plans.limits(claim.sweep_id).queue_timeout_s
        if now_s - seat.dirty_since_s <= limit_s:
            return
        waited = f"{reason}; waited {limit_s:g} s"
        if not verdict.fault:
            self._aftermath.give_up(seat, claim, self._who(seat), waited)
        elif self._serves_all:
            self._aftermath.drain(seat, waited)
        else:
            raise HostLost(waited)

    def _overdue(self, seat: Seat) -> None:
        """A worker that does not answer is no worker: it is ended with all that it runs, and replaced."""
        attempt, question, words = seat.attempt, seat.question, seat.overdue(self._answer_s)
        seat.ticket = seat.attempt = seat.question = None
        self._lost(seat, attempt, question, WorkerLost(seat.worker, words))

    def _lost(self, seat: Seat, attempt: AttemptRef | None, question: Question | None, lost: WorkerLost) -> None:
        """A worker died: its card gets a new one, and the block goes on with what the dead one kept, or without it."""
        cell, arm = (seat.claim.cell, seat.runs[0].arm) if seat.claim else ("", "")
        if question is not None:
            cell, arm = question.asked.cell, question.asked.head
        self._tell(Happening("lost", cell, arm, str(lost)))
        kept = None
        try:
            with self._leases.meanwhile():  # a new worker may wait long for a card that somebody took meanwhile
                seat.hello = self._placer.replace(seat.worker)
                seat.packs.clear()
                kept = self._kept(seat, attempt)
        except (WorkerLost, HostLost, ProbeError) as gone:
            self._aftermath.lost(seat, attempt, None, lost)
            if not self._serves_all:
                raise
            self._leave(seat, str(gone))
        else:
            self._aftermath.lost(seat, attempt, kept, lost)
        if question is not None:
            self._ask_again(question, lost)

    def _kept(self, seat: Seat, attempt: AttemptRef | None) -> RunOutcome | None:
        """What the lost worker had spooled of an attempt; no draft of it is left."""
        kept = self._aftermath.collect(seat.worker, attempt.attempt_id if attempt else "")
        if kept is None and attempt is not None and seat.claim is not None:
            self._placer.acknowledge(seat.worker, seat.claim.sweep_id, attempt.attempt_id)
        return kept

    def _ask_again(self, question: Question, lost: WorkerLost) -> None:
        """Put a question again over which a worker was lost, as often as attempts are allowed.

        One sweep's driver ends then, and a resume asks again; where all sweeps are served the others go on, and this
        question counts as one that nobody could answer.
        """
        asked, limit = question.asked, self._plans.limits(question.sweep_id).attempts
        if question.lost + 1 < limit:
            if self._has_card(asked):  # else the sweep's judge asks anew, and hears that nobody is there
                self._questions.insert(0, Question(question.sweep_id, asked, question.lost + 1))
            return
        workers = f"{limit} worker{'s' * (limit != 1)} {'were' if limit != 1 else 'was'} lost"
        if not self._serves_all:
            raise HostLost(f"{workers} over a question about {asked.cell}")
        failure = f"{workers} over it, the last one: {lost}"
        self._store.write_adjudication(question.sweep_id, Adjudication(asked=asked, failure=failure))

    def _leave(self, seat: Seat, reason: str) -> None:
        """A worker that cannot be had again has no seat; its block goes to others, its questions to nobody."""
        self._seats.remove(seat)
        self._leases.give_back(seat)
        self._questions = [one for one in self._questions if self._has_card(one.asked)]
        self._tell(Happening("lost", "", "", f"card {seat.card} is served no more: {reason}"))

    def _has_card(self, asked: FollowUp | BaseAgain) -> bool:
        return any(asked.card in ("", seat.card) for seat in self._seats)

    def _who(self, seat: Seat) -> str:
        return f"{self._driver}/{seat.worker}"

    # ---- the end ---------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Give the blocks back after a loss: what ran in them becomes lost, and a resume need not wait for leases."""
        for seat in self._seats:
            self._leases.give_back(seat)
            seat.drop()

    def _wind_down(self) -> None:
        """Stop what runs, store what was stopped, give the blocks back."""
        self._placer.stop()
        deadline_s = self._clock() + STOP_WAIT_S
        while (left := [s for s in self._seats if s.attempt is not None]) and self._clock() < deadline_s:
            for ticket in self._placer.ready([s.ticket for s in left if s.ticket is not None], TICK_S):
                seat = next(seat for seat in left if seat.ticket is ticket)
                with self._leases.forfeiting(seat):
                    self._receive_last(seat)
        self.abandon()

    def _receive_last(self, seat: Seat) -> None:
        ticket, attempt = seat.ticket, seat.attempt
        assert ticket is not None and attempt is not None
        seat.ticket = seat.attempt = None
        try:
            outcome = self._placer.outcome(ticket)
        except WorkerLost:  # how a scheduler reports a call that it cancelled
            if seat.claim is None:
                return
            self._store.move(attempt.attempt_id, seat.claim.fence, "running", "cancelled", "stopped by the user")
            return
        settle(self._store, outcome)
        self._placer.acknowledge(seat.worker, outcome.sweep_id, outcome.attempt_id)


def _asked_runs(asked: BaseAgain | FreshBlocks) -> tuple[str, str]:
    """Which arm is to run further, and how often, in words."""
    if isinstance(asked, BaseAgain):
        return asked.arm, f"for {asked.runs} runs more, to see whether it repeats itself"
    return "all", f"for {asked.count} fresh blocks, to decide on time"
