"""Puts a synthetic judge input into a store as if its runs had been made, and makes one of base against itself."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs.calibration import AGAIN, against_itself
from jobs.model import JudgeInput
from jobs.order import run_order
from jobs.store import Store
from tests.unit.store_sweeps import CARD, LEASE_S

Put = Callable[[JudgeInput], str]
"""Puts a document into a store and judges it; the sweep's id."""


def opened(folder: Path) -> Store:
    """The default store of a folder."""
    return Store.open(f"sqlite:///{folder}/.assay/store.db", lambda: datetime.now(UTC))


def put(store: Store, doc: JudgeInput, key: str = "") -> str:
    """The sweep's id in the store; every run of the document has a record there, under the store's own ids.

    Runs that the document lacks stay pending; a further call measures them.
    """
    sweep_id = store.submit(doc.manifest, "h" * 64, "0.1", key=key)
    given = {
        (cell.plan.cell, run.block, run.position): run.record
        for cell in doc.cells
        for run in cell.runs
        if run.record is not None
    }
    claims = []
    while (claim := store.claim_block(sweep_id, "w", LEASE_S)) is not None:
        claims.append(claim)
    for claim in claims:
        for ticket in claim.pending:
            record = given.get((claim.cell, claim.number, ticket.position))
            if record is None:
                continue
            attempt = store.start_attempt(ticket.run_id, claim.fence, "w", CARD)
            ids = {"run_id": attempt.run_id, "attempt_id": attempt.attempt_id, "attempt_number": attempt.number}
            store.write_record(attempt.attempt_id, claim.fence, record.model_copy(update=ids))
        store.release_block(claim.block_id, claim.fence)
    return sweep_id


def itself(documents: Any, blocks: int, **again: Any) -> JudgeInput:
    """A sweep of base against itself, as a calibration submits it; `again`: what the second arm does all the same."""
    doc: JudgeInput = documents.sweep(head=documents.arm(**again), cell={"blocks": blocks}, varies=())
    manifest = against_itself(doc.manifest, blocks)
    (plan,), (given,) = manifest.cells, doc.cells
    runs = []
    for block in range(blocks):
        left = {
            name: [run for run in given.runs if (run.arm, run.block) == (arm, block)]
            for name, arm in (("base", "base"), (AGAIN, "head"))
        }
        for position, name in enumerate(run_order(plan, block)):
            runs.append(left[name].pop(0).model_copy(update={"arm": name, "position": position}))
    cells = (given.model_copy(update={"plan": plan, "runs": tuple(runs)}),)
    return doc.model_copy(update={"manifest": manifest, "manifest_digest": manifest.digest(), "cells": cells})
