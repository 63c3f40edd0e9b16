"""The card along a run: regions, extremes and intruders as words and at their places, old and unclear runs said."""

from __future__ import annotations

from typing import Any

import pytest

from jobs import timeline
from jobs.model import Interval
from jobs.timeline import MOST_POINTS
from reports import text
from reports.blocks import Bar
from reports.evidence import timeline as section
from reports.evidence.runs import Measured, measured
from reports.pictures import card
from tests.unit import reports_runs as runs

MEASURED = measured(runs.judge_input().cells[0])


def with_proof(pair: Measured, **over: Any) -> Measured:
    run, record = pair
    proof = record.certificate
    assert proof is not None
    return run, record.model_copy(update={"certificate": proof.model_copy(update=over)})


def picture(place: int, **over: Any) -> dict[str, Bar]:
    proof = with_proof(MEASURED[place], **over)[1].certificate
    assert proof is not None
    along = timeline.read(proof.during)
    assert along is not None
    return {bar.label: bar for _, bars in card.build(proof, along).groups for bar in bars}


def test_the_timed_region_is_marked_behind_every_bar_and_told_in_words() -> None:
    along = runs.along(0)
    proof = MEASURED[0][1].certificate
    assert proof is not None
    bars = card.build(proof, along)
    (band,) = bars.bands
    assert (band.start, band.width) == (300, 600)  # 0.9 s to 2.7 s of 3 s
    assert bars.ends == ("0 s", "3 s")
    engine = picture(0)["Engine"]
    assert engine.reading == "before it generates 0 to 0.5 s, warm-up 0.5 to 0.9 s, timed region 0.9 to 2.7 s"
    assert [(part.kind, part.start, part.width) for part in engine.slices] == [
        ("load", 0, 167),
        ("warm_up", 167, 133),
        ("timed", 300, 600),
    ]


def test_a_slowed_clock_shows_as_a_dip_an_event_and_figures() -> None:
    bars = picture(1)
    assert bars["SM clock"].reading == "345 MHz to 1,980 MHz; timed region 345 MHz to 1,980 MHz"
    (line,) = bars["SM clock"].lines
    assert line == ((0, 50), (333, 50), (333, 793), (467, 793), (467, 50), (1000, 50))
    assert bars["hardware thermal slowdown, slowed"].reading == "1 to 1.4 s"
    assert [(part.kind, part.start) for part in bars["hardware thermal slowdown, slowed"].slices] == [("slowed", 333)]
    assert bars["power cap"].slices[0].kind == "event", "as ordered"
    assert bars["Memory clock"].reading == "3,201 MHz throughout"
    assert bars["Memory clock"].lines == (((0, 50), (1000, 50)),)


def test_a_line_is_cut_where_nothing_is_known_and_an_absent_series_says_so() -> None:
    memory = picture(1)["Used memory"]
    assert len(memory.lines) == 2
    assert memory.lines[0][-1][0] < memory.lines[1][0][0]
    assert memory.reading == "0 B to 6.442 GB; timed region 4.295 GB to 6.442 GB; not told at 1 point"
    power = picture(1)["Power"]
    assert (power.reading, power.lines) == ("not told by this card", ())


def test_foreign_work_stands_where_it_stood_and_past_the_last_sample_too() -> None:
    bars = picture(2)
    (part,) = bars["process 4242"].slices
    assert (part.kind, part.start, part.width) == ("foreign", 625, 375)  # 2.5 s to 4 s of 4 s
    assert bars["process 4242"].reading == "2.5 to 4 s"
    slowed = picture(0, intervals=(Interval(start_s=1.0, end_s=1.4, what="clocks slowed: power brake"),))
    assert slowed["clocks slowed: power brake"].slices[0].kind == "slowed", "no process"
    assert picture(0)["Foreign work"].reading == "none seen"
    many = tuple(Interval(start_s=1.0, end_s=1.0, what=f"process {pid}", pid=pid) for pid in range(40))
    bars = picture(0, intervals=many)
    assert sum(name.startswith("process") for name in bars) == card.MOST_STANDING
    assert bars["More"].reading == "28 things more stood there"
    assert bars["process 0"].reading == "at 1 s"
    assert bars["process 0"].slices[0].width > 0, "one sample is seen too"


def test_what_comes_and_goes_ten_thousand_times_is_some_marks_and_a_count() -> None:
    flapping = tuple(Interval(start_s=i / 5, end_s=i / 5, what="process 7", pid=7) for i in range(10_000))
    bar = picture(0, intervals=flapping)["process 7"]
    assert len(bar.slices) <= 334
    assert (bar.slices[0].start, bar.slices[-1].start + bar.slices[-1].width) == (0, 1000)
    assert bar.reading == "at 0 s, at 0.2 s, at 0.4 s, at 0.6 s and 9,996 more"


def test_the_longest_run_gives_a_bounded_picture() -> None:
    samples = 18_000
    clocks = [1980 - place % 7 for place in range(samples)]
    along = timeline.build([200 * place for place in range(samples)], {"sm_clock_mhz": clocks}, None, None)
    assert along is not None
    proof = MEASURED[0][1].certificate
    assert proof is not None
    bars = [bar for _, group in card.build(proof, along).groups for bar in group]
    assert sum(len(line) for bar in bars for line in bar.lines) <= 2 * MOST_POINTS
    assert "each of 188 samples in a row" in card.points(along)
    assert bars[0].reading == "when it generated was not told"


def test_a_run_that_was_not_clear_stands_first_and_open_and_one_without_samples_is_counted() -> None:
    throttled = with_proof(MEASURED[2], verdict="throttled")
    old = with_proof(MEASURED[1], during={"throttle_bits": 0})
    part = section.build([MEASURED[0], old, throttled])
    assert [(text.inline(fold.summary).split(":")[0], fold.open) for fold in part.folded] == [
        ("head 0.2", True),
        ("base 0.0", False),
    ]
    assert "throttled" in text.inline(part.folded[0].summary)
    assert text.section(part, folded=False).endswith("Of 1 run no samples were kept along the run.")
    assert section.build([old]).summary[0] == section.build([]).summary[0]


def test_runs_with_pictures_are_bounded_and_the_rest_counted() -> None:
    part = section.build([MEASURED[0]] * (section.MOST_RUNS + 3))
    assert len(part.folded) == section.MOST_RUNS
    assert "3 clear runs more; the first 12 are shown." in text.section(part, folded=False)


@pytest.mark.parametrize("word", ["<script>alert(1)</script>", "\x1b[31m \u202e"])
def test_what_stood_there_is_text_in_every_form(word: str) -> None:
    pair = with_proof(MEASURED[0], intervals=(Interval(start_s=0.0, end_s=1.0, what=word, pid=1),))
    shown = text.section(section.build([pair]), folded=True)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
