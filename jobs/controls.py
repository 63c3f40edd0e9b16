"""What makes a comparison of figures doubtful although each figure stands: said beside them, and never guessed at.

Counts that rank two arms the other way than their bytes do; settings that nobody asked for and whose default changed;
metrics that one arm renamed, or that two arms read from different places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.counters import COUNTERS
from jobs.judge_arm import ArmEvidence
from jobs.model import Missing, Reading
from jobs.reads import Figure
from jobs.settings_served import effective
from jobs.verdict import MetricRow

PAIRS: Mapping[str, str] = {
    **{counter.name: counter.twin for counter in COUNTERS.values() if counter.twin is not None},
    "page_ins_per_token": "htod_bytes_per_token",
    "count_hit_rate": "byte_hit_rate",
    "bypassed_count_share": "bypassed_byte_share",
}
"""Counts and shares by count, each with its twin by bytes."""


def notes(base: ArmEvidence, other: ArmEvidence, rows: Sequence[MetricRow]) -> list[str]:
    """All that is to be said of two arms' figures; `rows` are their exact metrics."""
    return [*contradictions(other.name, rows), *renamed(other.name, rows), *redefined(base, other)]


def contradictions(arm: str, rows: Sequence[MetricRow]) -> Iterator[str]:
    """Pairs of a count and its bytes that moved opposite ways: by one an arm is ahead, by the other behind."""
    known = {row.metric: row for row in rows}
    for name, twin in PAIRS.items():
        count, size = known.get(name), known.get(twin)
        if count is None or size is None:
            continue
        ways = [_way(row.delta) for row in (count, size)]
        if ways[0] * ways[1] < 0:
            words = {1: "higher", -1: "lower"}
            counted, bytes_ = (f"{row.metric} {words[way]}" for row, way in zip((count, size), ways, strict=True))
            yield f"{arm} ranks otherwise by bytes than by count: {counted} and {bytes_}; the bytes tell what it costs"


def changed_defaults(base: ArmEvidence, other: ArmEvidence) -> Iterator[str]:
    """Settings that neither arm was asked for and that both served, by default, in another value."""
    mine, theirs = _defaults(base), _defaults(other)
    for name in sorted(mine.keys() & theirs.keys()):
        if mine[name] != theirs[name]:
            words = [f"{' / '.join(sorted(values[name]))} in " for values in (mine, theirs)]
            told = f"{words[0]}{base.name} and {words[1]}{other.name}"
            yield f"the default of {name} changed: {told}, and the sweep asks neither for a value"


def renamed(arm: str, rows: Sequence[MetricRow]) -> Iterator[str]:
    """Metrics that vanished, each with the new ones of the same value, which may be the same under another name."""
    new = [row for row in rows if row.klass == "new"]
    for gone in (row for row in rows if row.klass == "vanished"):
        alike = [row.metric for row in new if row.unit == gone.unit and row.head == gone.base]
        if alike:
            yield (
                f"{arm} no longer records {gone.metric} and newly records {' and '.join(alike)} of the same value: "
                "if it was renamed, nothing compares the two; record both names in one of the builds"
            )


def redefined(base: ArmEvidence, other: ArmEvidence) -> Iterator[str]:
    """Counters that the two arms' outputs are read from in different places: one name, two figures."""
    mine, theirs = (arm.plan.reads.counters if arm.plan.reads is not None else {} for arm in (base, other))
    for name in sorted(mine.keys() & theirs.keys()):
        if mine[name] != theirs[name]:
            places = f"{_place(mine[name])} in {base.name} and {_place(theirs[name])} in {other.name}"
            yield f"{name} is read from {places}: whether it is one figure nobody checks"


def _way(delta: Reading) -> int:
    return 0 if type(delta) is Missing else (delta > 0) - (delta < 0)


def _defaults(arm: ArmEvidence) -> dict[str, frozenset[str]]:
    """The values of each setting that was left to its default in every run."""
    found: dict[str, set[str]] = {}
    asked: set[str] = set()
    for record in arm.records():
        for name, entry in record.effective_config.items():
            if isinstance(entry, dict) and entry.get("source") == "default":
                found.setdefault(name, set()).add(str(effective(entry)))
            else:
                asked.add(name)
    return {name: frozenset(values) for name, values in found.items() if name not in asked}


def _place(figure: Figure) -> str:
    return f"{figure.at!r} ({figure.unit})"
