"""Why more bytes cross the link than must: a run's distance to the floor, split into causes that add up to it.

The floor takes each byte of capacity to save one byte of each pass. What falls short of that has a cause: capacity that
holds nothing that stays (a ring or slot, alignment and granule rounding, room left over), and keys that stay in the end
but crossed the link all the same (to come in first, to come back after an eviction, to pass through). Keys that do not
stay are charged what they were asked for beyond once a pass, and credited what they were hit while they were in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.paging.traffic import Filling, KeyTraffic

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        "over_floor_first_fill_bytes": "keys that stay, when they first came in",
        "over_floor_eviction_bytes": "keys that stay, when they came back after an eviction",
        "over_floor_bypass_bytes": "keys that stay, when they passed through before",
        "over_floor_asked_bytes": "other keys, asked for more than once a pass, or less",
        "over_floor_early_hit_bytes": "other keys, hit while they were in: a credit",
        "over_floor_routed_bytes": "experts that do not stay, asked for beyond what one token chooses, or less",
        "over_floor_ring_bytes": "capacity that is a ring or a slot",
        "over_floor_rounding_bytes": "capacity lost to alignment and granule rounding",
        "over_floor_unfilled_bytes": "capacity left over, with the room that passing keys need",
        "over_floor_granted_bytes": "capacity that went to the KV cache",
        "over_floor_prompt_bytes": "passes that gave no token of their own",
    }
)
"""Fact -> what it is, in the order of telling. All are bytes over a process's whole life; their sum is the distance."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key at the end of a run: its bytes, what it did, and whether it is resident."""

    nbytes: int
    traffic: KeyTraffic
    stays: bool
    routed: bool = False
    """Whether it is an expert, which no pass has to ask for."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a run did in all: forward passes, tokens given to all `batch` sequences, capacity and how it is filled.

    `left_bytes` is what of the capacity weights still have in the end, once a KV cache has grown.
    """

    passes: int
    tokens: int
    batch: int
    capacity_bytes: int
    left_bytes: int
    fits: bool
    filling: Filling
    least_read_bytes: int
    """What a pass of one token reads, each key once: all keys, but of experts those that it chooses."""


def over_floor(keys: Iterable[Key], run: Run) -> dict[str, int]:
    """Bytes of each cause, by the names of `CAUSES`; all zero where everything fits."""
    keys = tuple(keys)
    weights = sum(key.nbytes for key in keys)
    causes = dict.fromkeys(CAUSES, 0)
    for key in keys:
        t = key.traffic
        crossed = t.retained + t.bypassed + t.staged + t.in_place
        if key.stays:
            causes["over_floor_first_fill_bytes"] += key.nbytes * min(t.retained, 1)
            causes["over_floor_eviction_bytes"] += key.nbytes * max(t.retained - 1, 0)
            causes["over_floor_bypass_bytes"] += key.nbytes * (crossed - t.retained)
        elif not run.fits:
            cause = "over_floor_routed_bytes" if key.routed else "over_floor_asked_bytes"
            causes[cause] += key.nbytes * (t.hits + crossed - run.passes)
            causes["over_floor_early_hit_bytes"] -= key.nbytes * t.hits
    if run.fits:
        return causes
    content = sum(key.nbytes for key in keys if key.stays)
    useful = min(run.capacity_bytes, weights)
    rounding = run.filling.held_bytes - content
    causes["over_floor_ring_bytes"] = run.passes * run.filling.ring_bytes
    causes["over_floor_rounding_bytes"] = run.passes * rounding
    left = min(run.left_bytes, weights)
    causes["over_floor_granted_bytes"] = run.passes * (useful - left)
    causes["over_floor_unfilled_bytes"] = run.passes * (left - run.filling.ring_bytes - rounding - content)
    floor = weights - useful
    of_all = floor * run.tokens // run.batch
    causes["over_floor_prompt_bytes"] = floor * run.passes - of_all
    causes["over_floor_routed_bytes"] += of_all - floor_bytes(run)
    return causes


def floor_bytes(run: Run) -> int:
    """Least bytes over the link for the tokens of a run: one pass for as many as it has sequences."""
    return max(0, run.least_read_bytes - run.capacity_bytes) * run.tokens // run.batch
