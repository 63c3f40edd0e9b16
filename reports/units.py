"""The unit of a reading by its name: a counter's, a metric's, or a plan fact's."""

from __future__ import annotations

from engine.counters import COUNTERS
from jobs.metrics import METRICS
from reports.traffic import shown_unit


def unit_of(name: str) -> str:
    """The unit as `reports.format` knows it; an unknown name ending in `_bytes` is bytes, any other a count."""
    if name in METRICS:
        return shown_unit(name, METRICS[name].unit)
    if name in COUNTERS:
        return COUNTERS[name].unit
    return "bytes" if "bytes" in name.split("_") else "count"
