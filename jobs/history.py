"""A counter or metric of one scenario over sweeps, with the places where it changed: advice, and no verdict.

A series goes by model, prompts, config and card model, so all points of one are of the same work. Drivers and versions
of the harness may change inside it; such breaks stand beside the points.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from jobs.document import Document
from jobs.metrics import CLOCKED
from jobs.model import Missing, Reading
from jobs.redact import redacted

FEWEST_TIMES = 8
"""Points of a timed series below which no change is sought: with fewer, noise alone shows too many."""

PENALTY = 4.0
"""Times variance times log(points), a change: of 200 series of white noise 3 % show one at 8 or 12 points and 1.5 % or
fewer from 20 on, and a step of 4 deviations in the middle is found in 91 % at 8 points, 99 % from 12 on (seeded draws;
at 3.0 up to 13 % show one)."""

SHORTEST_LEVEL = 2
"""Points between two changes of a timed series: a single one apart is an outlier."""


class StoredReading(NamedTuple):
    """One attempt's reading of a series, with where it comes from, oldest first."""

    sweep: str
    sweep_name: str
    at: datetime
    cell: str
    arm: str
    run: str
    value: Reading
    engine: str
    driver: str
    harness: str
    retracted: str | None


class Point(Document):
    """One arm in one sweep: the median of its runs, or why there is none; `struck`: why it counts no more."""

    sweep: str
    name: str
    at: str
    cell: str
    arm: str
    runs: int
    value: Reading
    low: Reading
    high: Reading
    engine: str
    driver: str
    harness: str
    struck: str = ""


class Change(Document):
    """The level of the series changed from one point to the next that counts; `index` is that next one's place."""

    index: int
    before: Reading  # median of the points since the change before
    after: Reading
    beside: tuple[str, ...] = ()  # what else changed there: build, driver, harness


class History(Document):
    """One series; `note` says when no change was sought, and why."""

    schema_: Literal["assay.history/1"] = "assay.history/1"
    series: str
    family: str
    name: str
    card: str
    model_digest: str
    prompt_digest: str
    config: dict[str, Any]
    points: tuple[Point, ...]
    breaks: tuple[tuple[int, str], ...]  # place of the first point of the new driver or harness, and what changed
    changes: tuple[Change, ...]
    note: str = ""

    def written(self) -> dict[str, Any]:
        """As JSON holds it, no secret of an arm's environment in it."""
        body = redacted(self.model_dump(mode="json"))
        return {"schema": body.pop("schema_"), **body}


def points_of(readings: Iterable[StoredReading]) -> tuple[Point, ...]:
    """Readings, oldest first, as a point for each arm of each cell of each sweep."""
    groups: dict[tuple[str, str, str], list[StoredReading]] = {}
    for one in readings:
        groups.setdefault((one.sweep, one.cell, one.arm), []).append(one)
    return tuple(_point(group) for group in groups.values())


def breaks_of(points: Sequence[Point]) -> tuple[tuple[int, str], ...]:
    """Where driver or harness changed from one point to the next."""
    found = []
    for place in range(1, len(points)):
        before, after = points[place - 1], points[place]
        for word in ("driver", "harness"):
            if getattr(before, word) != getattr(after, word):
                found.append((place, _moved(word, before, after)))
    return tuple(found)


def changes_of(name: str, points: Sequence[Point]) -> tuple[tuple[Change, ...], str]:
    """Where the level changed, and a note when it was not sought. Struck and missing points count for nothing.

    A counter is exact, so each other value is a change; of what a clock gives, changes are sought with ruptures.
    """
    told = [place for place, point in enumerate(points) if not point.struck and not isinstance(point.value, Missing)]
    values = [_number(points[place].value) for place in told]
    if not values:
        return (), ""
    if name in CLOCKED and len(values) < FEWEST_TIMES:
        return (), f"too few points to seek changes of a time: {len(values)} of the {FEWEST_TIMES} it takes"
    cuts = _timed(values) if name in CLOCKED else [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    edges = [0, *cuts, len(values)]
    levels = [_median(values[start:end]) for start, end in pairwise(edges)]
    return tuple(
        Change(
            index=told[cut],
            before=levels[at],
            after=levels[at + 1],
            beside=_beside(points[told[cut - 1]], points[told[cut]]),
        )
        for at, cut in enumerate(cuts)
    ), ""


def _timed(values: Sequence[float]) -> list[int]:
    """Places of changes of level: squared error, penalised by the variance that successive differences show."""
    import numpy as np
    import ruptures

    signal = np.asarray(values, dtype=np.float64)
    variance = float(np.var(np.diff(signal), ddof=1)) / 2
    if variance == 0:
        return [at for at in range(1, len(values)) if values[at] != values[at - 1]]
    search = ruptures.KernelCPD(kernel="linear", min_size=SHORTEST_LEVEL).fit(signal.reshape(-1, 1))
    return [int(place) for place in search.predict(pen=PENALTY * variance * math.log(len(values)))[:-1]]


def _point(group: Sequence[StoredReading]) -> Point:
    counting = [one for one in group if one.retracted is None]
    shown = counting or group
    values = [one.value for one in shown if not isinstance(one.value, Missing)]
    reasons = [one.value for one in shown if isinstance(one.value, Missing)]
    first = shown[0]
    none = reasons[0] if reasons else Missing(missing="not recorded")
    return Point(
        sweep=first.sweep,
        name=first.sweep_name,
        at=first.at.isoformat(),
        cell=first.cell,
        arm=first.arm,
        runs=len(values),
        value=_median(values) if values else none,
        low=min(values) if values else none,
        high=max(values) if values else none,
        engine=first.engine,
        driver=first.driver,
        harness=first.harness,
        struck="" if counting else str(first.retracted),
    )


def _median(values: Sequence[int | float]) -> int | float:
    """The value itself where all are equal, so that an exact counter stays an integer."""
    return values[0] if len(set(values)) == 1 else statistics.median(values)


def _number(value: Reading) -> int | float:
    assert not isinstance(value, Missing)
    return value


def _beside(before: Point, after: Point) -> tuple[str, ...]:
    words = ("engine", "driver", "harness")
    return tuple(_moved(word, before, after) for word in words if getattr(before, word) != getattr(after, word))


def _moved(word: str, before: Point, after: Point) -> str:
    one, other = (str(getattr(point, word))[:12] or "unknown" for point in (before, after))
    return f"{word} {one} -> {other}"
