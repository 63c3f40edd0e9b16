"""How long a sweep will take, from how long it took before; no earlier run gives no number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from jobs.errors import StoreError
from jobs.model import JudgeInput, Manifest
from jobs.order import run_order
from jobs.store import Store


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds by cell, from the newest earlier sweep of the same name; None where there was none."""

    by_cell: Mapping[str, float | None]
    limit_s: float

    @property
    def words(self) -> str:
        """The whole in words, with its source."""
        known = [seconds for seconds in self.by_cell.values() if seconds is not None]
        if len(known) < len(self.by_cell):
            return f"time not known before a first run; the limit is {_span(self.limit_s)}"
        return f"about {_span(sum(known))} on one card by the last run of this sweep"

    def cell_words(self, cell: str) -> str:
        """One cell in words."""
        seconds = self.by_cell.get(cell)
        return "not known" if seconds is None else f"about {_span(seconds)}"


def estimate(manifest: Manifest, store_url: str) -> Estimate:
    """Estimate from the store, if there is one; a store that cannot be read is as none, since nothing depends on it."""
    runs = {c.cell: sum(len(run_order(c, block)) for block in range(c.blocks)) for c in manifest.cells}
    limit_s = sum(runs.values()) * manifest.limits.run_timeout_s
    earlier = _earlier(manifest.name, store_url)
    by_cell = {cell: None if cell not in earlier else earlier[cell] * count for cell, count in runs.items()}
    return Estimate(by_cell, limit_s)


def _earlier(name: str, store_url: str) -> Mapping[str, float]:
    """Mean seconds of a run by cell, in the newest judged sweep of that name."""
    try:
        store = Store.open(store_url, lambda: datetime.now(UTC), migrate=False)
    except StoreError:
        return {}
    try:
        judged = [row for row in store.sweeps() if row.name == name and row.state == "judged"]
        return _means(store.judge_input(judged[0].id)) if judged else {}
    finally:
        store.close()


def _means(given: JudgeInput) -> dict[str, float]:
    means = {}
    for cell in given.cells:
        records = [run.record for run in cell.runs if run.record is not None]
        spans = [
            (datetime.fromisoformat(r.ended_at) - datetime.fromisoformat(r.started_at)).total_seconds()
            for r in records
            if r.started_at and r.ended_at
        ]
        if spans:
            means[cell.plan.cell] = sum(spans) / len(spans)
    return means


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
