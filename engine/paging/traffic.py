"""What each key did over a run: the sums that counters are held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class KeyTraffic:
    """Touches of one key by how they were served, and how often it was evicted."""

    hits: int = 0
    retained: int = 0
    bypassed: int = 0
    staged: int = 0
    in_place: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Filling:
    """How a budget is filled: `held_bytes` where resident keys lie, `ring_bytes` for what comes and goes."""

    held_bytes: int
    ring_bytes: int
