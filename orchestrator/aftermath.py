"""What follows from how an attempt ended: another one, a run given up, a card that gets no more work for a while."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jobs.errors import Conflict, IllegalMove, UnknownAttempt
from jobs.lifecycle import Tried, attempts_left
from jobs.store import AttemptRef, BlockClaim, Store
from orchestrator.drain import DRAIN_S, counted, is_drained
from orchestrator.leases import Leases
from orchestrator.lost import WorkerLost
from orchestrator.outcome import RunOutcome
from orchestrator.place import Placer
from orchestrator.plans import Plans
from orchestrator.seat import Happening, Seat
from orchestrator.settle import settle


class Aftermath:
    """Writes ends into the store and draws the consequences for a seat. With `drains`, other cards take its work."""

    def __init__(
        self,
        store: Store,
        placer: Placer,
        plans: Plans,
        leases: Leases,
        tell: Callable[[Happening], None],
        clock: Callable[[], float],
        *,
        drains: bool,
    ) -> None:
        self._store = store
        self._placer = placer
        self._plans = plans
        self._leases = leases
        self._tell = tell
        self._clock = clock
        self._drains = drains

    def ended(self, seat: Seat, outcome: RunOutcome) -> None:
        """Store an outcome, acknowledge it, and decide about another attempt. Raises Conflict when it came too late."""
        if (claim := seat.claim) is None:
            self._placer.acknowledge(seat.worker, outcome.sweep_id, outcome.attempt_id)
            return
        run = seat.runs[0]
        if outcome.unspooled:
            about = f"its outcome came without being kept on its host: {outcome.unspooled}"
            self._store.log_event(
                outcome.sweep_id, "unspooled", about, subject=outcome.attempt_id, worker=outcome.worker
            )
        try:
            done = settle(self._store, outcome)
        except (Conflict, IllegalMove):  # it came too late: another attempt has its place
            self._placer.acknowledge(seat.worker, outcome.sweep_id, outcome.attempt_id)
            raise
        self._placer.acknowledge(seat.worker, outcome.sweep_id, outcome.attempt_id)
        if done.state == "measured":
            seat.next_run()
        else:
            tried = Tried(done.state, done.fault)
            self._again_or_not(seat, claim, tried, done.reason, done.retry or done.state == "contaminated")
        self._count(seat, done.state, done.fault, done.reason)
        self._tell(Happening("end", claim.cell, run.arm, done.reason, partial(self._store.pending, claim.sweep_id)))

    def collect(self, worker: str, but: str = "") -> RunOutcome | None:
        """Store what a worker's host kept of earlier runs; the outcome of attempt `but` is handed back instead.

        What came too late is noted, and forgotten there; what is another store's stays.
        """
        kept = None
        for outcome in self._placer.left_over(worker):
            if outcome.attempt_id == but:
                kept = outcome
                continue
            try:
                settle(self._store, outcome)
            except UnknownAttempt:
                continue
            except (Conflict, IllegalMove) as late:
                self._store.log_event(outcome.sweep_id, "too_late", str(late), subject=outcome.attempt_id)
            self._placer.acknowledge(worker, outcome.sweep_id, outcome.attempt_id)
        return kept

    def lost(self, seat: Seat, attempt: AttemptRef | None, kept: RunOutcome | None, lost: WorkerLost) -> None:
        """A worker died: its attempt, if it was at one, is lost, unless its outcome was `kept`."""
        if kept is not None:
            with self._leases.forfeiting(seat):
                self.ended(seat, kept)
            return
        if attempt is not None and seat.claim is not None:
            with self._leases.forfeiting(seat):
                self._store.move(attempt.attempt_id, seat.claim.fence, "running", "lost", str(lost), fault="lost")
                self._again_or_not(seat, seat.claim, Tried("lost", "lost"), str(lost), may=True)
        self._count(seat, "lost", "lost", str(lost))

    def give_up(self, seat: Seat, claim: BlockClaim, who: str, reason: str) -> None:
        """A card that stays slowed or in others' hands is no fault: the run in hand ends without a sample, unproven."""
        run = seat.runs[0]
        attempt = self._store.open_attempt(run.run_id, claim.fence, who, seat.card)
        self._store.move(attempt.attempt_id, claim.fence, "claimed", "clearing")
        self._store.move(attempt.attempt_id, claim.fence, "clearing", "contaminated", reason)
        self._store.finish_run(run.run_id, "exhausted", reason, fence=claim.fence)
        seat.next_run()
        seat.look_at_s = 0.0  # the wait was the queue's: the next run has one look, and no wait of its own
        self._tell(Happening("end", claim.cell, run.arm, reason, partial(self._store.pending, claim.sweep_id)))

    def drain(self, seat: Seat, reason: str) -> None:
        """Give a card no work for a while, and its block to others; said once."""
        seat.faults, seat.drained_until_s, seat.drained_for = 0, self._clock() + DRAIN_S, reason
        about = f"card {seat.card} gets no work for {DRAIN_S / 60:g} min: {reason}"
        if (claim := seat.claim) is not None:
            self._store.log_event(claim.sweep_id, "drained", about, subject=claim.block_id, worker=seat.worker)
            self._leases.give_back(seat)
        seat.drop()
        self._tell(Happening("drained", claim.cell if claim else "", "all", about))

    def _count(self, seat: Seat, state: str, fault: str, reason: str) -> None:
        """Repeated faults of a card drain it, where other work waits for other cards."""
        seat.faults = counted(seat.faults, state, fault)
        if self._drains and is_drained(seat.faults):
            self.drain(seat, f"{seat.faults} attempts in a row ended by its fault, the last one: {reason}")

    def _again_or_not(self, seat: Seat, claim: BlockClaim, tried: Tried, reason: str, may: bool) -> None:
        """Another attempt at the same run if that can help and the limits allow it; else the run is exhausted."""
        seat.tried.append(tried)
        if tried.state == "cancelled":
            return
        if may and attempts_left(seat.tried, self._plans.limits(claim.sweep_id)):
            return
        self._store.finish_run(seat.runs[0].run_id, "exhausted", reason, fence=claim.fence)
        seat.next_run()
