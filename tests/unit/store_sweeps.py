"""Small sweeps in a store, and workers of one line each, for tests of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs.model import ArmPlan, CellPlan, JudgeInput, Limits, Manifest, RunFact, RunRecord, RunSettings
from jobs.store import AttemptRef, BlockClaim, Store

LEASE_S = 60.0
CARD = "SIM-0000"


@dataclass
class Clock:
    """A clock that stands until it is told."""

    now: datetime = datetime(2026, 11, 30, 5, 0, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)


def manifest(
    name: str = "sweep",
    *,
    cells: int = 1,
    blocks: int = 1,
    card_class: str = "any",
    card_memory_bytes: int = 0,
    limits: Limits | None = None,
) -> Manifest:
    """Cells of a toy model under base and head."""
    arms = tuple(ArmPlan(name=role, role=role, source="checkout") for role in ("base", "head"))
    plans = tuple(
        CellPlan(
            cell=f"cell{number}",
            model="toy",
            model_path="/models/toy",
            model_digest="d",
            prompt="p",
            prompt_ids=(1,),
            settings=RunSettings(tokens=1),
            arms=("base", "head"),
            blocks=blocks,
            card_class=card_class,
            card_memory_bytes=card_memory_bytes,
        )
        for number in range(cells)
    )
    return Manifest(name=name, arms=arms, cells=plans, limits=limits or Limits())


def submitted(store: Store, name: str = "sweep", **asks: Any) -> str:
    """A sweep in the store; `key` and `priority` are the submission's, the rest the manifest's."""
    own = {word: asks.pop(word) for word in ("key", "priority", "to_cards") if word in asks}
    return store.submit(manifest(name, **asks), "harness", "0.1", **own)


def claimed(store: Store, sweep_id: str | None = None, worker: str = "w", **asks: Any) -> BlockClaim:
    """A block that must be there to claim."""
    claim = store.claim_block(sweep_id, worker, LEASE_S, **asks)
    assert claim is not None
    return claim


def running(store: Store, claim: BlockClaim, place: int = 0, worker: str = "w", card: str = CARD) -> AttemptRef:
    """An attempt at a run of a claimed block, under way."""
    attempt = store.open_attempt(claim.runs[place].run_id, claim.fence, worker, card)
    store.move(attempt.attempt_id, claim.fence, "claimed", "clearing")
    store.move(attempt.attempt_id, claim.fence, "clearing", "running")
    return attempt


def record_of(attempt: AttemptRef, exit_code: int = 0) -> RunRecord:
    """The least that a run can have measured."""
    return RunRecord(
        run_id=attempt.run_id, attempt_id=attempt.attempt_id, attempt_number=attempt.number, exit_code=exit_code
    )


def measure(store: Store, claim: BlockClaim, worker: str = "w", runs: int | None = None) -> None:
    """Measure the pending runs of a block, or the first `runs` of them."""
    for run in claim.pending[:runs]:
        attempt = running(store, claim, run.position, worker)
        store.write_record(attempt.attempt_id, claim.fence, record_of(attempt))


def run_facts(store: Store, sweep_id: str) -> list[RunFact]:
    """All runs of a sweep."""
    return [run for cell in store.judge_input(sweep_id).cells for run in cell.runs]


def run_fact(store: Store, sweep_id: str, run_id: str) -> RunFact:
    """One run of a sweep."""
    return next(run for run in run_facts(store, sweep_id) if run.run_id == run_id)


def measured_sweep(store: Store, doc: JudgeInput) -> str:
    """A sweep of a document's manifest in a store, with the document's records written as a worker's are; its id.

    Blocks of cells that the document holds no rows of stay as they are.
    """
    sweep_id = store.submit(doc.manifest, "h" * 64, "0.1.0")
    records = {(cell.plan.cell, run.block, run.position): run for cell in doc.cells for run in cell.runs}
    for _ in {(cell, block) for cell, block, _ in records}:
        claim = claimed(store, sweep_id, card="SIM-0")
        for ticket in claim.runs:
            run = records[claim.cell, claim.number, ticket.position]
            assert run.record is not None and run.arm == ticket.arm
            attempt = store.start_attempt(ticket.run_id, claim.fence, "w", "SIM-0")
            own = {"run_id": ticket.run_id, "attempt_id": attempt.attempt_id, "attempt_number": attempt.number}
            store.write_record(attempt.attempt_id, claim.fence, run.record.model_copy(update=own))
        store.release_block(claim.block_id, claim.fence)
    return sweep_id
