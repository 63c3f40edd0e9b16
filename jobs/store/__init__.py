"""The store: what was asked, what happened, what was measured and what it means, in SQLite or PostgreSQL.

`Store` is the whole interface. One process writes (the dispatcher); any number may read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from sqlalchemy import Connection

from jobs import collector
from jobs.cells_read import CellsRead
from jobs.history import History
from jobs.model import AttemptState, CellInput, JudgeInput, Manifest, RunRecord, RunState
from jobs.more_runs import BaseAgain, FreshBlocks
from jobs.near_tie import Adjudication
from jobs.noise import Calibration
from jobs.reviewed import Golden
from jobs.store import (
    calibrations,
    claims,
    cluster,
    comments,
    events,
    histories,
    ids,
    leases,
    older,
    packs,
    readback,
    records,
    retractions,
    revision,
    submission,
    transfer,
    verdicts,
)
from jobs.store.cluster import CardRow, CardSeen, Queue, WaitingBlocks
from jobs.store.connect import Database
from jobs.store.retractions import Struck
from jobs.store.rows import AttemptRef, BlockClaim, Event, Pending, Priority, RunTicket, StoredRun, SweepRow
from jobs.store.transfer import Exported, Imported
from jobs.tables import block
from jobs.verdict import Retraction, Verdict

__all__ = [
    "AttemptRef",
    "BlockClaim",
    "CardRow",
    "CardSeen",
    "Event",
    "Exported",
    "Imported",
    "Pending",
    "Priority",
    "Queue",
    "RunTicket",
    "Store",
    "StoredRun",
    "Struck",
    "SweepRow",
    "WaitingBlocks",
]

Found = TypeVar("Found")

LISTED_SWEEPS = 50
LISTED_EVENTS = 10_000
HISTORY_SWEEPS = 200


class Store:
    """One store. Every method is one transaction.

    `clock` gives aware times. Methods raise StoreError when the database fails, Conflict when a guard does, and
    SpecError for an id that names nothing.
    """

    def __init__(self, url: str, *, clock: Callable[[], datetime]) -> None:
        self._database = Database(url)
        self._clock = clock
        self._ahead = timedelta(0)
        self._asked = records.Asked()

    @classmethod
    def open(cls, url: str, clock: Callable[[], datetime], migrate: bool = True) -> Store:
        """Open a store at the newest revision: brought there when `migrate`, else required to be there."""
        store = cls(url, clock=clock)
        if migrate:
            revision.upgrade(store._database)
        else:
            revision.require_head(store._database)
        return store

    def follow_server_time(self) -> None:
        """Go by the database server's clock from here on, so that drivers on several hosts agree on when leases end.

        A store in a file is on one host, which has one clock.
        """
        self._ahead = self._database.ahead_of(self._clock())

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Give all connections back."""
        self._database.close()

    # ---- sweeps --------------------------------------------------------------------------------------------------

    def submit(
        self,
        manifest: Manifest,
        harness_digest: str,
        harness_version: str,
        *,
        key: str = "",
        request: int = 0,
        priority: Priority = "pr",
        to_cards: bool = False,
    ) -> str:
        """Insert a sweep with its scenarios, blocks and runs; a resend returns the same id.

        Raises KeyTaken when the key was submitted with another manifest or by another harness; with `to_cards`
        SpecError when no card of those that serve the store could take it.

        `key` is the client's own word for this submission; without one the manifest itself is the key.
        """
        now = self._now()
        return self._database.write(
            lambda c: submission.submit(
                c, manifest, harness_digest, harness_version, key, request, now, priority, to_cards=to_cards
            )
        )

    def sweeps(self, limit: int = LISTED_SWEEPS) -> tuple[SweepRow, ...]:
        """The newest sweeps first."""
        return self._database.read(lambda c: submission.listed(c, limit))

    def open_sweeps(self) -> tuple[SweepRow, ...]:
        """Sweeps that are not judged, in the order in which they are served."""
        return self._database.read(submission.still_open)

    def sweep(self, id_or_prefix: str) -> SweepRow:
        """A sweep by its id or a unique beginning of it."""
        return self._database.read(lambda c: submission.one(c, ids.resolve_id(c, id_or_prefix, "swp")))

    def resolve_id(self, prefix: str, kind: str = "") -> str:
        """The one id that begins with `prefix`; `kind` (swp, cel, blk, run, att, vrd) narrows the search."""
        return self._database.read(lambda c: ids.resolve_id(c, prefix, kind))

    def find_open(self, manifest_digest: str, harness_digest: str) -> str | None:
        """The newest unjudged sweep of this manifest and harness: what `--resume` goes on with."""
        return self._database.read(lambda c: submission.find_open(c, manifest_digest, harness_digest))

    def manifest(self, sweep_id: str) -> Manifest:
        """What a sweep was submitted with."""
        return self._database.read(lambda c: submission.manifest_of(c, sweep_id))

    def put_pack(self, digest: str, pack: IO[bytes]) -> None:
        """Keep an arm's pack of that digest, whole or not at all; one that is there stays as it is."""
        now = self._now()
        self._database.write(lambda c: packs.put(c, digest, pack, now))

    def pack(self, digest: str) -> Iterator[bytes]:
        """An arm's pack chunk by chunk, as it is stored: whoever gets it holds it against its name. None when absent.

        No connection is held between chunks.
        """
        position = 0
        while some := self._database.read(partial(packs.chunks_from, digest=digest, position=position)):
            yield from some
            position += len(some)

    # ---- work ----------------------------------------------------------------------------------------------------

    def claim_block(self, sweep_id: str | None, worker: str, lease_s: float, **asks: Any) -> BlockClaim | None:
        """Lease the first block with pending runs that nobody holds, of one sweep or (None) of all in their turn.

        None when there is none. `asks`: what a claimer says of itself beside these, see `leases.Claimer`.
        """
        who, taken = leases.Claimer(worker, lease_s, **asks), list[BlockClaim]()

        def claim(connection: Connection) -> BlockClaim | None:
            now = self._now()  # a lease begins when its writer has got the lock, and not before it waited
            for found in taken:  # by a try whose connection went: it may have been committed before it went
                if leases.stands(connection, found, worker, now):
                    return found
            taken[:] = filter(None, [leases.claim_block(connection, sweep_id, who, now)])
            return taken[0] if taken else None

        return self._database.write(claim)

    def heartbeat(self, block_id: str, fence: int, lease_s: float) -> datetime:
        """Prolong a lease; returns its new end. Conflict when it is gone."""
        return self._database.write(lambda c: leases.heartbeat(c, block_id, fence, lease_s, self._now()))

    def release_block(self, block_id: str, fence: int) -> None:
        """Give a block back; what still runs in it becomes lost."""
        now = self._now()
        self._database.write(lambda c: leases.release_block(c, block_id, fence, now))

    def reap(self, now: datetime, worker: str | None = None) -> tuple[str, ...]:
        """Break the leases that ended before `now`, and all of `worker` when given; returns the attempts lost."""
        at = self._now()
        ended = block.c.leased_until < now
        if worker is not None:
            ended |= block.c.worker == worker
        return self._database.write(lambda c: leases.reap(c, ended, "", at))

    def reap_ended(self) -> tuple[str, ...]:
        """Break the leases that have ended by now; returns the attempts lost."""
        return self.reap(self._now())

    def break_leases(self, sweep_id: str, reason: str) -> tuple[str, ...]:
        """Break every lease in a sweep whose workers are known to be gone; returns the attempts lost."""
        at = self._now()
        return self._database.write(lambda c: leases.reap(c, block.c.sweep_id == sweep_id, reason, at))

    def forfeited(self, held: Sequence[tuple[str, int]]) -> tuple[str, ...]:
        """Those of some leases, as (block, fence), that are no longer held: their blocks' ids."""
        return self._database.read(lambda c: leases.forfeited(c, held))

    def waits(self, block_id: str, fence: int, reason: str | None) -> None:
        """Say why a leased block does not run just now; None: it does."""
        self._database.write(lambda c: leases.waits(c, block_id, fence, reason))

    def cancel(self, sweep_id: str, reason: str) -> tuple[str, ...]:
        """Give up all that is pending of an open sweep; the attempts that were cut off. SpecError when it is judged."""
        now = self._now()
        return self._database.write(lambda c: leases.cancel(c, sweep_id, reason, now))

    def open_attempt(self, run_id: str, fence: int, worker: str, card: str) -> AttemptRef:
        """Start the next attempt at a pending run, in state claimed."""
        now = self._now()
        return self._database.write(lambda c: claims.open_attempt(c, run_id, fence, worker, card, now))

    def start_attempt(self, run_id: str, fence: int, worker: str, card: str) -> AttemptRef:
        """Start the next attempt at a pending run on a card that was seen to be clear: it runs from here on."""
        now = self._now()
        return self._database.write(lambda c: claims.start_attempt(c, run_id, fence, worker, card, now))

    def move(self, attempt_id: str, fence: int, frm: str, to: str, reason: str = "", *, fault: str = "") -> None:
        """Change an attempt's state; a resend is a no-op. IllegalMove off the lifecycle, Conflict on another state.

        `fault`: the class of error that ended it, which has a bound of its own where the sweep's limits give one.
        """
        now = self._now()
        self._database.write(lambda c: claims.move(c, attempt_id, fence, frm, to, reason, fault, now))

    def write_record(
        self,
        attempt_id: str,
        fence: int,
        record: RunRecord,
        state: AttemptState = "measured",
        reason: str = "",
        *,
        fault: str = "",
    ) -> None:
        """Store a running attempt's record and end it in `state`; measured completes the run, others leave it pending.

        A resend is a no-op; a differing resend is Conflict.
        """
        now = self._now()
        ended = (state, reason, fault)
        self._database.write(lambda c: records.write_record(c, self._asked, attempt_id, fence, record, *ended, now))

    def finish_run(
        self, run_id: str, state: RunState = "exhausted", reason: str = "", *, fence: int | None = None
    ) -> None:
        """End a run that has no attempt left, or none worth making; `fence` keeps out who lost the block."""
        now = self._now()
        self._database.write(lambda c: claims.finish_run(c, run_id, state, reason, fence, now))

    def pending(self, sweep_id: str) -> Pending:
        """How far a sweep is."""
        return self._database.read(lambda c: leases.progress(c, [sweep_id])[sweep_id])

    def queue(self, sweep_id: str | None = None) -> Queue:
        """The open blocks of one sweep or of all, and why each that waits does."""
        now = self._now()
        return self._database.read(lambda c: cluster.queue(c, sweep_id, now))

    def settled(self) -> tuple[str, ...]:
        """Open sweeps with no run pending: what is left to judge."""
        return self._database.read(cluster.settled)

    def put_cards(self, rows: Sequence[CardSeen], scheduler: str) -> None:
        """Write down the cards of a scheduler as it sees them now."""
        now = self._now()
        made = [CardRow(**asdict(row), scheduler=scheduler, since=now, seen_at=now) for row in rows]
        self._database.write(lambda c: cluster.put_cards(c, made))

    def leave_cards(self, scheduler: str, reason: str) -> None:
        """A scheduler has ended: of its cards nothing is known any more."""
        now = self._now()
        self._database.write(lambda c: cluster.leave_cards(c, scheduler, reason, now))

    def cards(self) -> tuple[CardRow, ...]:
        """All cards that schedulers of this store have served."""
        now = self._now()
        return self._database.read(lambda c: cluster.cards(c, now))

    def progress(self, sweep_ids: Sequence[str]) -> dict[str, Pending]:
        """How far some sweeps are."""
        return self._database.read(lambda c: leases.progress(c, sweep_ids))

    # ---- what came of it -----------------------------------------------------------------------------------------

    def add_runs(self, sweep_id: str, asked: BaseAgain | FreshBlocks) -> None:
        """Add runs that the judge asks for to an open sweep; those that are there already are not added again."""
        now = self._now()
        self._database.write(lambda c: submission.add_runs(c, sweep_id, asked, now))

    def judge_input(self, sweep_id: str) -> JudgeInput:
        """Everything the judge may read, from one consistent view."""
        with collector.paused():
            return self._database.read(lambda c: readback.judge_input(c, sweep_id))

    def around_cells(self, sweep_id: str) -> JudgeInput:
        """The judge's input without its cells."""
        return self._database.read(lambda c: readback.around_cells(c, sweep_id))

    def cell_inputs(self, sweep_id: str, names: Collection[str]) -> tuple[CellInput, ...]:
        """Some cells of the judge's input, with nothing else of it."""
        return self._database.read(lambda c: readback.cell_inputs(c, sweep_id, names))

    def judged(self, sweep_id: str, judge: Callable[[CellsRead], Found]) -> Found:
        """What a judge makes of the same, read from one consistent view while it goes on from cell to cell."""
        with collector.paused():
            return self._database.read(lambda c: judge(readback.cells_read(c, sweep_id)))

    def record(self, attempt_id: str) -> RunRecord | None:
        """What one attempt measured, also one that was set aside; None when it wrote nothing."""
        return self._database.read(lambda c: readback.record(c, attempt_id))

    def histories(
        self, series: str, *, cell: str | None = None, arm: str | None = None, last: int = HISTORY_SWEEPS
    ) -> tuple[History, ...]:
        """The series that an id or the name of a counter or metric names, over the last sweeps that measured it."""
        return self._database.read(lambda c: histories.histories(c, series, cell, arm, last))

    def cell_histories(
        self, sweep_id: str, cell: str, names: Collection[str], *, last: int = HISTORY_SWEEPS
    ) -> tuple[History, ...]:
        """The series of these names that a cell of a sweep measured, over the last sweeps that did; none: no series."""
        return self._database.read(lambda c: histories.of_cell(c, sweep_id, cell, names, last))

    def run(self, run_id: str) -> StoredRun:
        """One run with its sweep, cell and arm."""
        return self._database.read(lambda c: readback.one_run(c, run_id))

    def write_adjudication(self, sweep_id: str, answer: Adjudication) -> None:
        """Store the answer to a question of the judge; of several to one question the first stands."""
        now = self._now()
        self._database.write(lambda c: verdicts.write_adjudication(c, sweep_id, answer, now))

    def write_verdict(self, sweep_id: str, verdict: Verdict, input_digest: str, *, closes: bool = True) -> str:
        """Store a verdict and mark the sweep judged; returns the verdict's id.

        One that does not close the sweep speaks for the time being: the sweep stays open and can be gone on with.
        """
        now = self._now()
        with collector.paused():
            return self._database.write(
                lambda c: verdicts.write_verdict(c, sweep_id, verdict, input_digest, now, closes=closes)
            )

    def verdict(self, sweep_id: str) -> Verdict | None:
        """The verdict in force, struck out where what it rests on was retracted; None before the first."""
        with collector.paused():
            return self._database.read(lambda c: verdicts.newest(c, sweep_id))

    def retractions(self, sweep_id: str) -> tuple[Retraction, ...]:
        """What was retracted of all that a sweep's verdict in force rests on."""
        return self._database.read(lambda c: verdicts.fallen(c, sweep_id))

    def outcomes(self, sweep_ids: Sequence[str]) -> dict[str, tuple[str, int]]:
        """Outcome and exit code of the verdict in force of each of some sweeps that has one."""
        return self._database.read(lambda c: verdicts.outcomes(c, sweep_ids))

    def retract(self, subject: str, reason: str, by: str) -> Struck:
        """Mark a run or a sweep as not to be trusted; its rows stay, and what rests on it is struck out."""
        now = self._now()
        return self._database.write(lambda c: retractions.retract(c, subject, reason, by, now))

    def write_golden(self, golden: Golden) -> None:
        """Store a golden with what it rests on."""
        now, digest = self._now(), submission.ids_digest(golden.streams[0].ids)
        self._database.write(lambda c: retractions.write_golden(c, golden, digest, now))

    def write_calibrations(self, sweep_id: str, found: Sequence[Calibration]) -> None:
        """Store the noise that an A/A sweep measured."""
        now = self._now()

        def written(connection: Connection) -> None:
            manifest = submission.manifest_of(connection, sweep_id)
            calibrations.write(connection, sweep_id, manifest, found, now)

        self._database.write(written)

    # ---- between stores ------------------------------------------------------------------------------------------

    def export_sweep(self, sweep_id: str, out: IO[bytes]) -> Exported:
        """Write a judged sweep with all that cites it, for another store. SpecError for one that is open."""
        with self._database.reading() as connection:  # not asked again: `out` would hold the first try's part
            return transfer.export(connection, sweep_id, out)

    def import_sweep(self, path: Path) -> Imported:
        """Take in a sweep that `export_sweep` wrote; the same once more changes nothing.

        A file of an older revision is migrated first. Raises SpecError for one that is damaged or of a revision that
        is not known, Conflict where the sweep has other content.
        """
        with older.brought_up(path, transfer.read(path)) as (newest, told):
            return self._database.write(lambda c: transfer.load(c, newest, told))

    # ---- events --------------------------------------------------------------------------------------------------

    def events(self, sweep_id: str, after: int = 0, limit: int = LISTED_EVENTS) -> tuple[Event, ...]:
        """A sweep's events in order, from the one after `after`."""
        return self._database.read(lambda c: events.listed(c, sweep_id, after, limit))

    def last_events(self, sweep_id: str, limit: int) -> tuple[Event, ...]:
        """A sweep's newest events, in order."""
        return self._database.read(lambda c: events.newest(c, sweep_id, limit))

    def log_event(self, sweep_id: str, kind: str, message: str, *, subject: str = "", worker: str = "") -> None:
        """Note something that is no state change, such as a wait for a dirty card and why."""
        now = self._now()
        self._database.write(
            lambda c: events.log(c, sweep_id, subject or sweep_id, kind, now, message=message, worker=worker)
        )

    def events_about(self, subject: str, kind: str) -> tuple[Event, ...]:
        """The events of one kind about one subject, in all sweeps, in order."""
        return self._database.read(lambda c: events.about(c, subject, kind))

    def write_comment(self, sweep_id: str, repository: str, pull_request: int, remote_id: str, digest: str) -> None:
        """Note that a comment of a pull request shows a sweep's newest verdict."""
        now = self._now()
        self._database.write(lambda c: comments.write(c, sweep_id, repository, pull_request, remote_id, digest, now))

    def _now(self) -> datetime:
        now = self._clock()
        assert now.tzinfo is not None, "the store's clock gives naive times"
        return now + self._ahead
