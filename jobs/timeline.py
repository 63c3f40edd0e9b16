"""What a watch of a card saw along one run: few points however long it lasted, and when the run generated.

A certificate carries it among what it says of the time during the run. A point stands for some samples in a row and
keeps what would matter of them: the lowest clock, the most memory, the highest load, every clock event. An extreme so
never falls between two points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pydantic import ValidationError

from jobs.document import Document

MOST_POINTS: Final = 96
FIELD: Final = "timeline"
"""Its name in a certificate's `during`."""

Reading = int | None
"""One reading of one sample; None: not told."""
Span = tuple[int, int]
"""From when to when, in milliseconds since the watch began."""


def any_bits(bits: Iterable[int]) -> int:
    """All bits that are set in any of these."""
    out = 0
    for some in bits:
        out |= some
    return out


_KEPT: Final[Mapping[str, Callable[[Sequence[int]], int]]] = MappingProxyType(
    {
        "sm_clock_mhz": min,
        "memory_clock_mhz": min,
        "used_bytes": max,
        "utilisation_percent": max,
        "power_mw": max,
        "temperature_c": max,
        "throttle_bits": any_bits,
    }
)
"""Series -> what a point keeps of its samples."""

CLOCK_EVENTS: Final[Mapping[int, str]] = MappingProxyType(
    {
        0x1: "idle",
        0x2: "application clocks",
        0x4: "power cap",
        0x8: "hardware slowdown",
        0x10: "sync boost",
        0x20: "software thermal slowdown",
        0x40: "hardware thermal slowdown",
        0x80: "power brake",
        0x100: "display clocks",
        0x200: "user-defined clocks",
    }
)
"""NVML's clock event bits."""

SLOWING: Final = 0x8 | 0x20 | 0x40 | 0x80
"""Events that slow a card; idle, set clocks and the power cap are a card at work as ordered."""


class Timeline(Document):
    """Samples of a card along a run, times in milliseconds since the watch began.

    `at_ms` says when the first sample of each point was taken; a series has one reading a point, and one of which no
    reading is known is left out. `warm_up_ms` and `timed_ms` go from the beginning of the first such generation to the
    end of the last, and are absent where the engine did not tell of any while it ran.
    """

    at_ms: tuple[int, ...]
    end_ms: int  # of the last sample
    samples_a_point: int
    series: dict[str, tuple[int | None, ...]]
    warm_up_ms: Span | None = None
    timed_ms: Span | None = None


def build(
    times_ms: Sequence[int], series: Mapping[str, Sequence[Reading]], warm_up: Span | None, timed: Span | None
) -> Timeline | None:
    """The samples in `MOST_POINTS` points at most; None where there was none."""
    if not times_ms:
        return None
    stride = math.ceil(len(times_ms) / MOST_POINTS)
    starts = range(0, len(times_ms), stride)
    kept = {
        name: tuple(_kept(keep, series[name][start : start + stride]) for start in starts)
        for name, keep in _KEPT.items()
        if any(value is not None for value in series.get(name, ()))
    }
    return Timeline(
        at_ms=tuple(times_ms[start] for start in starts),
        end_ms=times_ms[-1],
        samples_a_point=stride,
        series=kept,
        warm_up_ms=warm_up,
        timed_ms=timed,
    )


def read(during: Mapping[str, Any]) -> Timeline | None:
    """The timeline of a certificate; None where it has none, as of before there were any, or one that is damaged."""
    if (told := during.get(FIELD)) is None:
        return None
    try:
        found = Timeline.model_validate(told)
    except ValidationError:
        return None
    points = len(found.at_ms)
    return found if points and all(len(values) == points for values in found.series.values()) else None


def generation_span(line: Mapping[str, Any], now_ms: int) -> tuple[bool, Span] | None:
    """Whether a line that comes now ends a warm-up, and from when to when it generated; None of any other line.

    By the engine's own times, which is what is judged, before the moment at which the line came. The line was not
    checked yet.
    """
    if line.get("type") != "generation":
        return None
    steps = line.get("step_ns")
    if not isinstance(steps, list):
        return None
    told = [line.get("prefill_ns"), *steps]
    times = [one for one in told if type(one) is int and one >= 0]
    if len(times) < len(told):
        return None
    lasted_ms = sum(times) // 1_000_000
    return line.get("warmup") is True, (max(0, now_ms - lasted_ms), now_ms)


def clock_events(bits: int) -> str:
    """NVML's clock event bitmask in words."""
    known = [name for bit, name in CLOCK_EVENTS.items() if bits & bit]
    rest = bits & ~sum(CLOCK_EVENTS)
    return ", ".join([*known, *([f"bits 0x{rest:x}"] if rest else [])])


def _kept(keep: Callable[[Sequence[int]], int], readings: Sequence[Reading]) -> Reading:
    known = [value for value in readings if value is not None]
    return keep(known) if known else None
