"""Samples of a card along a run as few points: extremes stay, the engine times its own region, damage is absence."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import timeline
from jobs.timeline import MOST_POINTS, Timeline


@pytest.mark.parametrize("samples", [1, MOST_POINTS, MOST_POINTS + 1, 18_000])
def test_an_extreme_of_one_sample_is_in_a_point_however_many_there_are(samples: int) -> None:
    times = [200 * place for place in range(samples)]
    series: dict[str, list[int | None]] = {
        "sm_clock_mhz": [1980] * samples,
        "used_bytes": [7 << 30] * samples,
        "throttle_bits": [0] * samples,
    }
    at = samples // 2
    series["sm_clock_mhz"][at], series["used_bytes"][at], series["throttle_bits"][at] = 345, 9 << 30, 0x40
    found = timeline.build(times, series, None, (1_000, 2_000))
    assert found is not None
    assert len(found.at_ms) <= MOST_POINTS
    assert {len(values) for values in found.series.values()} == {len(found.at_ms)}
    assert (found.at_ms[0], found.end_ms) == (0, times[-1])
    assert min(value for value in found.series["sm_clock_mhz"] if value is not None) == 345
    assert max(value for value in found.series["used_bytes"] if value is not None) == 9 << 30
    (slowed,) = [at_ms for at_ms, bits in zip(found.at_ms, found.series["throttle_bits"], strict=True) if bits == 0x40]
    assert 0 <= at * 200 - slowed < 200 * found.samples_a_point


def test_what_was_not_told_stays_unknown_and_no_sample_is_no_timeline() -> None:
    found = timeline.build([0, 200, 400], {"sm_clock_mhz": [1980, None, 1700], "used_bytes": [None] * 3}, None, None)
    assert found is not None
    assert found.series == {"sm_clock_mhz": (1980, None, 1700)}
    assert timeline.build([], {"sm_clock_mhz": []}, None, None) is None


def test_a_generation_lasted_as_long_as_its_engine_says_and_ended_as_its_line_came() -> None:
    line = {"type": "generation", "warmup": False, "prefill_ns": 250_000_000, "step_ns": [50_000_000, 60_000_000]}
    assert timeline.generation_span(line, 1_000) == (False, (640, 1_000))
    assert timeline.generation_span({**line, "warmup": True}, 300) == (True, (0, 300)), "not before the watch began"


@pytest.mark.parametrize(
    "over",
    [
        {"type": "progress"},
        {"step_ns": "many"},
        {"step_ns": [1, True]},
        {"step_ns": [-1]},
        {"prefill_ns": 0.5},
        {"prefill_ns": None},
    ],
)
def test_a_line_that_is_not_a_generation_s_or_not_one_to_trust_marks_nothing(over: dict[str, Any]) -> None:
    line = {"type": "generation", "warmup": False, "prefill_ns": 1, "step_ns": [1], **over}
    assert timeline.generation_span(line, 1_000) is None


def test_a_certificate_without_a_timeline_or_with_a_damaged_one_has_none() -> None:
    whole = Timeline(at_ms=(0, 200), end_ms=200, samples_a_point=1, series={"used_bytes": (1, None)}).model_dump()
    assert timeline.read({timeline.FIELD: whole}) == Timeline.model_validate(whole)
    assert timeline.read({"sm_clock_mhz": {"min": 1}}) is None
    assert timeline.read({timeline.FIELD: {**whole, "series": {"used_bytes": [1]}}}) is None
    assert timeline.read({timeline.FIELD: {**whole, "at_ms": []}}) is None
    assert timeline.read({timeline.FIELD: "damaged"}) is None
