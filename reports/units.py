"""The unit of a reading by its name: a counter's, a metric's, or a plan fact's."""

from __future__ import annotations

from engine.counters import COUNTERS
from jobs.metrics import METRICS
from reports.traffic import shown_unit


def unit_of(name: str) -> str:
    """The unit as `reports.format` knows it; of an unknown name, `..._bytes` is bytes and `..._bytes_per_x` bytes/x."""
    if name in METRICS:
        return shown_unit(name, METRICS[name].unit)
    if name in COUNTERS:
        return COUNTERS[name].unit
    if "bytes" not in name.split("_"):
        return "count"
    _, per, what = name.partition("bytes_per_")
    return f"bytes/{what}" if per else "bytes"
