"""Readings of one series over sweeps, made in code: one run a sweep, a day apart."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs.history import History, StoredReading, breaks_of, changes_of, points_of
from jobs.model import Reading


def readings(values: Sequence[Reading], **changed: dict[int, str]) -> list[StoredReading]:
    """One run a sweep, a day apart; `changed`: what a field is from a place on."""
    first = StoredReading(
        "swp", "nightly", datetime(2026, 11, 1, tzinfo=UTC), "cell", "head", "run", 0, "e1", "550", "h1", None
    )
    found = []
    for place, value in enumerate(values):
        own = {
            field: max((at, word) for at, word in places.items() if at <= place)[1]
            for field, places in changed.items()
            if min(places) <= place
        }
        at = first.at + timedelta(days=place)
        found.append(first._replace(sweep=f"swp_{place:03}", at=at, value=value, **own))
    return found


def history(name: str, rows: Sequence[StoredReading], series: str = "ser_a", **settings: Any) -> History:
    """The series of some readings, oldest first; `settings`: what was in force."""
    points = points_of(sorted(rows, key=lambda row: (row.at, row.arm)))
    changes, note = changes_of(name, points)
    return History(
        series=series, family="counter", name=name, card="sim-h200", model_digest="ab" * 32, prompt_digest="cd" * 32,
        config={"effective": settings}, points=points, breaks=breaks_of(points), changes=changes, note=note,
    )  # fmt: skip
