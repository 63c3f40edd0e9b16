"""From outcomes to the store: those that workers bring, and those that an earlier driver left in the spool."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.errors import Conflict, IllegalMove, UnknownAttempt, Unstorable
from jobs.model import AttemptState
from jobs.store import Store
from orchestrator.outcome import RunOutcome, Spool


@dataclass(frozen=True, slots=True)
class Settled:
    """How an attempt stands in the store."""

    state: AttemptState
    reason: str
    retry: bool = False
    fault: str = ""
    """The class of error that ended it, for which the sweep's limits may have a bound."""
    unstorable: str = ""
    """Why the record could not be kept, if it could not."""


def settle(store: Store, outcome: RunOutcome) -> Settled:
    """Write one outcome to the store; a resend is a no-op. Raises Conflict when the attempt is no longer ours.

    A record that no store could hold ends its attempt as failed: it will not become better by being sent again.
    """
    try:
        if outcome.record is not None:
            written = (outcome.attempt_id, outcome.fence, outcome.record, outcome.end, outcome.reason)
            store.write_record(*written, fault=outcome.fault)
        else:
            if outcome.end == "measured":
                raise Unstorable(f"the outcome of {outcome.attempt_id} is measured and holds no record")
            moved = (outcome.attempt_id, outcome.fence, "running", outcome.end, outcome.reason)
            store.move(*moved, fault=outcome.fault)
    except Unstorable as exc:
        reason = f"protocol: {exc}"
        store.move(outcome.attempt_id, outcome.fence, "running", "failed", reason, fault="protocol")
        return Settled("failed", reason, fault="protocol", unstorable=str(exc))
    return Settled(outcome.end, outcome.reason, outcome.retry, outcome.fault)


@dataclass(frozen=True, slots=True)
class Ingested:
    """How many outcomes of a spool counted; of each that could not be kept or read, where it is now and why."""

    kept: int
    aside: tuple[tuple[Path, str], ...]


def ingest(store: Store, spool: Spool, sweep_id: str) -> Ingested:
    """Store outcomes that an earlier driver left in the spool. Each file is met once.

    One that came too late (its attempt was given up) is noted and forgotten: a later attempt has its place. One that
    cannot be kept or read is noted, and its file set aside.
    """
    kept, aside = 0, list[tuple[Path, str]]()
    for attempt_id in spool.unreadable(sweep_id):
        file = spool.set_aside(sweep_id, attempt_id)
        aside.append((file, f"the outcome of {attempt_id} cannot be read"))
        store.log_event(sweep_id, "unreadable", f"its spooled outcome is kept in {file}", subject=attempt_id)
    for outcome in spool.left_over(sweep_id):
        try:
            settled = settle(store, outcome)
        except (Conflict, IllegalMove, UnknownAttempt) as late:
            store.log_event(sweep_id, "too_late", str(late), subject=outcome.attempt_id)
            spool.acknowledge(sweep_id, outcome.attempt_id)
            continue
        if settled.unstorable:
            file = spool.set_aside(sweep_id, outcome.attempt_id)
            aside.append((file, f"the outcome of {outcome.attempt_id} cannot be stored: {settled.unstorable}"))
            store.log_event(sweep_id, "unstorable", f"{settled.unstorable}; kept in {file}", subject=outcome.attempt_id)
        else:
            kept += 1
            spool.acknowledge(sweep_id, outcome.attempt_id)
    return Ingested(kept, tuple(aside))
