"""What the store answers with: plain frozen rows and the ids that name them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Generic, Literal, TypeVar

from ulid import ULID

from jobs.lifecycle import Tried
from jobs.model import ArmPlan, CellPlan, RunFact, RunState

T = TypeVar("T")
Priority = Literal["pr", "nightly"]
PRIORITIES: tuple[Priority, ...] = ("pr", "nightly")
"""In the order in which they are served; the store holds the index."""
IdKind = Literal["swp", "cel", "blk", "run", "att", "vrd", "gld", "cmt"]


def new_id(kind: IdKind, now: datetime) -> str:
    """A prefixed ULID, lower case: sortable by time to the millisecond, unique without asking the store."""
    return f"{kind}_{ULID.from_datetime(now)}".lower()


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Rows of `total`: those of page `number` (from 1), at most `size` a page."""

    rows: tuple[T, ...]
    total: int
    number: int
    size: int

    @property
    def last(self) -> int:
        """The number of the last page; 1 where no row is."""
        return max(1, -(-self.total // self.size))


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A submitted sweep."""

    id: str
    name: str
    state: Literal["open", "judged"]
    submit_key: str
    manifest_digest: str
    request: int
    harness_digest: str
    harness_version: str
    created_at: datetime
    judged_at: datetime | None
    priority: Priority = "pr"
    retracted_reason: str | None = None
    retracted_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class StoredRun:
    """One run with what it was asked to be."""

    sweep: SweepRow
    plan: CellPlan
    arm: ArmPlan
    fact: RunFact


@dataclass(frozen=True, slots=True)
class RunTicket:
    """One run of a claimed block, in its place in the order."""

    run_id: str
    position: int
    arm: str
    state: RunState
    tried: tuple[Tried, ...]  # how earlier attempts ended, in order


@dataclass(frozen=True, slots=True)
class BlockClaim:
    """The right to run one block until `leased_until`; every later change must show `fence`."""

    block_id: str
    fence: int
    sweep_id: str
    cell: str
    plan: CellPlan
    number: int
    runs: tuple[RunTicket, ...]
    leased_until: datetime

    @property
    def pending(self) -> tuple[RunTicket, ...]:
        """The runs still to do, in order."""
        return tuple(run for run in self.runs if run.state == "pending")


@dataclass(frozen=True, slots=True)
class AttemptRef:
    """An opened attempt."""

    attempt_id: str
    run_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Pending:
    """How far a sweep is: runs by state, attempts that hold a card now, blocks under a lease."""

    pending: int
    complete: int
    exhausted: int
    live_attempts: int
    leased_blocks: int

    @property
    def runs(self) -> int:
        """All runs of the manifest."""
        return self.pending + self.complete + self.exhausted


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a sweep or a part of it; `subject` is the part's id."""

    seq: int
    sweep_id: str
    subject: str
    kind: str
    frm: str
    target: str
    message: str
    worker: str
    at: datetime
