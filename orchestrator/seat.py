"""What the dispatcher knows of each worker: its card, the block it holds, what it was asked and until when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from jobs.lifecycle import Tried
from jobs.near_tie import FollowUp
from jobs.store import AttemptRef, BlockClaim, CardSeen, Pending, RunTicket
from jobs.store.cluster import CardState
from orchestrator.clear import ClearVerdict
from orchestrator.place import Ticket
from orchestrator.worker import WorkerCard


@dataclass(frozen=True, slots=True)
class Happening:
    """Something to show: a run began, ended, waits, or a worker was lost. At each end `counts` asks how far it is."""

    kind: str  # begin, end, wait, lost, asks, gone, drained
    cell: str = ""
    arm: str = ""
    text: str = ""
    counts: Callable[[], Pending] | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A question of the judge about a sweep, and how many workers were lost over it."""

    sweep_id: str
    asked: FollowUp
    lost: int = 0


@dataclass(slots=True)
class Seat:
    """One worker with what it is at. `tried` holds how attempts at the run in hand have ended."""

    hello: WorkerCard
    claim: BlockClaim | None = None
    runs: list[RunTicket] = field(default_factory=list)
    tried: list[Tried] = field(default_factory=list)
    ticket: Ticket | None = None
    due_s: float = 0.0  # when the ticket counts as lost
    attempt: AttemptRef | None = None
    question: Question | None = None
    dirty_since_s: float | None = None
    look_at_s: float = 0.0
    claim_at_s: float = 0.0
    shown_reason: str = ""
    seen: ClearVerdict | None = None  # the last look's answer
    seen_at_s: float = float("-inf")
    faults: int = 0  # attempts in a row that ended by the card's or the host's fault
    drained_until_s: float = 0.0
    drained_for: str = ""
    packs: set[str] = field(default_factory=set)  # of arms whose trees its host is known to have

    @property
    def worker(self) -> str:
        """The worker's name for the placer."""
        return self.hello.worker

    @property
    def card(self) -> str:
        """The worker's card by UUID."""
        return self.hello.card.uuid

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing in hand."""
        return self.ticket is None and self.claim is None

    def as_seen(self, now_s: float, now: datetime) -> CardSeen:
        """The card for the store: drained, at work, or as the last look found it."""
        state, reason, until = _looked_like(self.seen), "", None
        if self.drained_until_s > now_s:
            state, reason = "drained", self.drained_for
            until = now + timedelta(seconds=self.drained_until_s - now_s)
        elif self.attempt is not None and self.claim is not None:
            state = "busy"
            reason = f"run {self.attempt.run_id} of {self.claim.sweep_id}: {self.claim.cell}"
        elif self.question is not None:
            state, reason = "busy", f"a question to the oracle for {self.question.sweep_id}"
        elif self.seen is None:
            reason = "nobody has looked yet"
        else:
            reason = "; ".join(self.seen.reasons)
        hello = self.hello
        return CardSeen(
            uuid=self.card, name=hello.card.name, host=hello.host, worker=self.worker,
            state=state, reason=reason, until=until, memory_bytes=hello.card.memory_bytes,
        )  # fmt: skip

    def overdue(self, answer_s: float) -> str:
        """What its worker was to do when the ticket's time was over, `answer_s` beyond what it was given for the work.

        A worker ends its child at the run's own deadline, so that one who is silent for longer hangs after the run.
        """
        if self.attempt is not None:
            return f"storing: no outcome came within {answer_s:g} s of the run's own deadline"
        if self.question is not None:
            return f"adjudicating: no answer came within {answer_s:g} s of the engines' own deadlines"
        return f"claimed: it did not say within {answer_s:g} s whether its card is clear"

    def hold(self, claim: BlockClaim, runs: list[RunTicket]) -> None:
        """Take a block in hand, with those of its runs that are to be made."""
        self.claim, self.runs = claim, runs
        self.tried = list(runs[0].tried) if runs else []

    def next_run(self) -> None:
        """The run in hand is settled."""
        self.runs.pop(0)
        self.tried = list(self.runs[0].tried) if self.runs else []

    def drop(self) -> None:
        """The block is no longer ours; a ticket under way stays with its attempt, and what it brings will not count."""
        self.claim, self.runs, self.tried = None, [], []
        self.dirty_since_s, self.shown_reason = None, ""


def _looked_like(seen: ClearVerdict | None) -> CardState:
    """Clear, in others' hands or slowed (busy), or unknown: an unfit card too, of which nothing good is known."""
    if seen is None or seen.verdict == "unknown" or seen.fault:
        return "unknown"
    return "clear" if seen.clear else "busy"
