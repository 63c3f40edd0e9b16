"""Which exact metrics gate, in which direction, by which rules; and the equations that must close on every run.

Rules for zero and for what is not there: 0 against 0 is the same; 0 against 5 is "new non-zero" and judged by
direction; 5 against 0 is "now zero"; 0.0 and -0.0 are equal; NaN and infinities are no measurements; a metric that
one side did not record is new, vanished or not recorded, never equal. A captured step that is captured no more is
worse although its number of segments is lower.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from engine.counters import COUNTERS
from jobs.metrics import METRICS, NOT_RECORDED, Direction
from jobs.model import Missing, Reading
from jobs.reviewed import Expectation
from jobs.verdict import MetricClass

GATING: frozenset[str] = frozenset(
    {
        "htod_bytes",
        "segments",
        "fallbacks",
        "vmm_calls_steady",
        "alloc_calls_steady",
        "host_syncs",
        "step_kernels",
        "peak_committed_bytes",
        "peak_resident_bytes",
    }
)
"""Exact metrics that may turn the exit code red. All others are listed and never gate."""

STEP_METRICS: frozenset[str] = frozenset({"step_kernels"})
"""Counters of the one-token steps: they cannot be there where every generation gave a single id, its prefill's."""

UNDECLARED = "not counted by this program"
"""The reason of a gating counter that neither the sweep file nor the program of an arm names."""

NO_STEP = "not asked for: no generation gave a second id, so no one-token step ran"

CAPTURE_SIGNS: frozenset[str] = frozenset({"segments", "replays"})
"""Counters that are 0 exactly where no step runs from a graph: compared only between arms that both capture."""

CAPTURE_LOST = "capture is lost: base runs its steps from a graph and head does not"
CAPTURE_VARIES = "the arms differ in capture on purpose"
CAPTURE_GAINED = "base runs no step from a graph, so there is nothing to compare with"

TOUCHES = "hits + page_ins == touches"
TOUCHES_IN_PLACE = "hits + page_ins + zero_copy_reads == touches"
"""The same of an engine that records reads in place, over the link: they are neither hits nor page-ins."""

DECLARABLE: frozenset[str] = GATING | CAPTURE_SIGNS
"""What can be worse, and so be declared."""

NEVER_GATES = "does not gate, so there is nothing to accept"

CLOSING: tuple[str, ...] = (
    TOUCHES,
    "page_ins == retained_page_ins + bypassed_page_ins + staged_page_ins",
    "htod_bytes == retained_bytes + bypassed_page_in_bytes + staged_bytes",
    "htod_bytes == device_htod_bytes",
    "ref_underflows == 0",
    "unaccounted_bytes == 0",
    "quarantined_bytes == 0",
    "oversubscribed_bytes == 0",
)
"""Equations that the judge closes itself from the recorded counters, whatever the engine says of its own."""


@dataclass(frozen=True, slots=True)
class ExactMetric:
    """One exact figure: a counter, or a metric made of counters."""

    name: str
    unit: str
    direction: Direction
    gating: bool


class Ruling(NamedTuple):
    """How base and head compare in one exact metric."""

    klass: MetricClass
    delta: Reading
    note: str = ""


_NEITHER = Ruling("not_recorded", NOT_RECORDED)


def _exact_metrics() -> dict[str, ExactMetric]:
    counters = (
        ExactMetric(c.name, c.unit, c.direction, c.name in GATING) for c in COUNTERS.values() if c.scope != "clock"
    )
    derived = (ExactMetric(m.name, m.unit, m.direction, m.gating) for m in METRICS.values() if m.exact)
    return {row.name: row for row in (*counters, *derived)}


EXACT: Mapping[str, ExactMetric] = MappingProxyType(_exact_metrics())
"""Every exact metric by name, in the order of its registry. `GATING` is a subset."""

assert frozenset(EXACT) >= GATING, "a gating metric that no registry defines"


def exact_metric(name: str) -> ExactMetric:
    """An exact metric's row; a name that no registry holds has no direction and so cannot gate."""
    return EXACT.get(name) or ExactMetric(name, "count", "neutral", False)


def matching(expectations: Iterable[Expectation], metric: str, cell: str) -> Expectation | None:
    """The first declared change that covers a metric in a cell; `cell` of a declaration is a shell pattern."""
    for expectation in expectations:
        if expectation.metric == metric and fnmatch.fnmatchcase(cell, expectation.cell):
            return expectation
    return None


def allows(declared: Expectation, base: int | float, head: int | float) -> bool:
    """Whether a change goes the way that was declared, and no further; no change is none."""
    return head != base and not _beyond(declared, base, head)


def _beyond(declared: Expectation, base: int | float, head: int | float) -> str:
    """How a change is not what was declared; empty when it is. Fewer segments are not none: that is capture lost."""
    delta = head - base
    if declared.metric == "segments" and declared.change == "lower" and declared.at_most is None and head == 0 < base:
        return "declared lower, and none is left: where that is meant, say how far (at_most)"
    went = "higher" if delta > 0 else "lower"
    if declared.change not in ("any", went):
        return f"declared {declared.change}, went {went}"
    if declared.at_most is not None and abs(delta) > declared.at_most:
        return f"declared to move by {declared.at_most:,} at most, moved by {abs(delta):,}"
    return ""


def rule(
    metric: ExactMetric,
    base: Reading,
    head: Reading,
    declared: Expectation | None = None,
    *,
    capture_varies: bool = False,
) -> Ruling:
    """Compare two readings of one exact metric; integers as integers.

    `capture_varies`: the arms were asked for another capture setting, and the sweep says so.
    """
    if type(base) is Missing or type(head) is Missing:
        return _NEITHER if base is head is NOT_RECORDED else _absent(base, head)
    delta = head - base
    if delta == 0:
        note = f"a declared change did not happen: {declared.reason}" if declared else ""
        return Ruling("same", delta, note)
    zero = "new non-zero" if base == 0 else "now zero" if head == 0 else ""
    klass, why = _moved(metric, base, head, capture_varies=capture_varies)
    if declared is None:
        return Ruling(klass, delta, _join(zero, why))
    if beyond := _beyond(declared, base, head):
        return Ruling(klass, delta, _join(zero, beyond, why))
    if not metric.gating and klass != "regressed":
        return Ruling(klass, delta, _join(zero, f"declared, and {metric.name} {NEVER_GATES}", why))
    word = "declared by this change" if declared.added else "self-declared" if declared.self_declared else "declared"
    return Ruling("declared", delta, _join(zero, f"{word}: {declared.reason}"))


def _moved(
    metric: ExactMetric, base: int | float, head: int | float, *, capture_varies: bool
) -> tuple[MetricClass, str]:
    """What a change is where nothing is declared, and why; where one arm alone captures, fewer segments are no gain."""
    if metric.name in CAPTURE_SIGNS and (base == 0 or head == 0):
        if capture_varies:
            return "neutral", CAPTURE_VARIES
        return ("neutral", CAPTURE_GAINED) if base == 0 else ("regressed", CAPTURE_LOST)
    if not metric.gating or metric.direction == "neutral":
        return "neutral", ""
    return ("improved" if (head > base) is (metric.direction == "higher") else "regressed"), ""


def _absent(base: Reading, head: Reading) -> Ruling:
    if base == NOT_RECORDED and head == NOT_RECORDED:
        return _NEITHER
    for side, reading in (("base", base), ("head", head)):
        if type(reading) is Missing and reading.missing.startswith("varies"):
            return Ruling("varies", reading, f"{side} {reading.missing}")
    if base == NOT_RECORDED and type(head) is not Missing:
        return Ruling("new", NOT_RECORDED, "base does not record it")
    if head == NOT_RECORDED and type(base) is not Missing:
        return Ruling("vanished", NOT_RECORDED, "head does not record it")
    reasons = [f"{side}: {r.missing}" for side, r in (("base", base), ("head", head)) if type(r) is Missing]
    return Ruling("not_recorded", Missing.made(missing="; ".join(reasons)), "; ".join(reasons))


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)
