"""Puts a synthetic judge input into a store as if its runs had been made: submitted, claimed, measured."""

from __future__ import annotations

from jobs.model import JudgeInput
from jobs.store import Store
from tests.unit.store_sweeps import CARD, LEASE_S


def put(store: Store, doc: JudgeInput, key: str = "") -> str:
    """The sweep's id in the store; every run of the document has a record there, under the store's own ids."""
    sweep_id = store.submit(doc.manifest, "h" * 64, "0.1", key=key)
    given = {
        (cell.plan.cell, run.block, run.position): run.record
        for cell in doc.cells
        for run in cell.runs
        if run.record is not None
    }
    while (claim := store.claim_block(sweep_id, "w", LEASE_S)) is not None:
        for ticket in claim.pending:
            record = given[claim.cell, claim.number, ticket.position]
            attempt = store.start_attempt(ticket.run_id, claim.fence, "w", CARD)
            ids = {"run_id": attempt.run_id, "attempt_id": attempt.attempt_id, "attempt_number": attempt.number}
            store.write_record(attempt.attempt_id, claim.fence, record.model_copy(update=ids))
        store.release_block(claim.block_id, claim.fence)
    return sweep_id
