"""A scenario over sweeps as charts: places, intervals, changes arm by arm, and that the page reads without script."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest

from jobs.history import History, StoredReading
from jobs.model import Missing
from reports import charts
from reports.render.pages import Links, scenario_page
from tests.unit import reports_samples as samples
from tests.unit.history_readings import history, readings
from tests.unit.reports_parsing import Page

BYTES, TIME = "htod_bytes", "decode_ms_per_token"


def of_arm(arm: str, rows: list[StoredReading]) -> list[StoredReading]:
    return [row._replace(arm=arm) for row in rows]


def shown(*histories: History, name: str = "cell") -> str:
    return scenario_page(charts.build(name, histories), Links(root="../", sweeps=lambda sweep: f"../sweeps/{sweep}/"))


def test_each_arm_is_a_line_and_changes_are_its_own() -> None:
    """Base and head share a series where their settings are equal: what differs between them is no change of either."""
    base, head = of_arm("base", readings([5] * 6)), of_arm("head", readings([7, 7, 7, 9, 9, 9]))
    (chart,) = charts.build("cell", [history(BYTES, base + head)]).exact
    assert [line.label for line in chart.lines] == ["head", "base"]
    assert [x for x, _ in chart.lines[0].dots] == [25, 215, 405, 595, 785, 975]
    assert [y for _, y in chart.lines[0].dots] == [500] * 3 + [80] * 3
    assert [y for _, y in chart.lines[1].dots] == [920] * 6, "one scale for both"
    assert chart.changes == (595,)
    assert (chart.top, chart.bottom) == ("9 B", "5 B")
    assert [line.latest for line in chart.lines] == ["9 B", "5 B"]


def test_intervals_go_from_the_lowest_run_to_the_highest() -> None:
    rows = readings([20.0, 21.0])
    rows.append(rows[1]._replace(value=23.0))
    (chart,) = charts.build("cell", [history(TIME, rows)]).time
    (line,) = chart.lines
    assert line.intervals == ((975, 640, 80),)
    assert line.dots == ((25, 920), (975, 360)), "a point is the median"
    assert chart.notes == ("too few points to seek changes of a time: 2 of the 8 it takes",)


def test_retracted_points_are_struck_and_do_not_set_the_scale() -> None:
    rows = readings([7, 900, Missing(missing="no ring"), 9])
    rows[1] = rows[1]._replace(retracted="the fan was blocked")
    (chart,) = charts.build("cell", [history(BYTES, rows)]).exact
    (line,) = chart.lines
    assert line.dots == ((25, 920), (975, 80))
    assert [x for x, _ in line.struck] == [342]
    assert chart.top == "9 B"
    drawn = chart.data["lines"][0]
    assert (drawn["values"], drawn["struck"]) == ([7, None, None, 9], [None, 900, None, None])
    assert drawn["told"] == ["7 B", "900 B (retracted)", "n/a: no ring", "9 B"]
    page = shown(history(BYTES, rows))
    assert "<s>900 B</s>" in page
    assert "retracted: the fan was blocked" in Page(page).text


def test_breaks_of_driver_and_harness_stand_apart_from_changes() -> None:
    rows = readings([7, 7, 7, 9], driver={1: "560"}, harness={3: "h2"})
    (chart,) = charts.build("cell", [history(BYTES, rows)]).exact
    assert (chart.changes, chart.breaks) == ((975,), (342,))
    table = Page(shown(history(BYTES, rows))).table("Changes of level, newest first")
    assert table.rows == [
        [BYTES, "head", "7 B", "9 B", "+2 B (+28.6 %)", "swp_003", "2026-11-04 00:00", "harness h1 -> h2"]
    ]


def test_what_did_not_move_is_a_row_and_no_chart() -> None:
    scenario = charts.build(
        "cell", [history("segments", readings([1, 1, 1])), history(BYTES, readings([5, 5, 6]), "ser_b")]
    )
    assert [chart.metric for chart in scenario.exact] == [BYTES]
    assert scenario.unmoved is not None
    page = Page(shown(history("segments", readings([1, 1, 1]))))
    assert page.table("The same in every sweep").rows == [["segments", "1"]]
    assert "No change of level in 3 sweeps." in page.text


def test_series_of_one_arm_are_told_apart_by_the_settings_that_differ() -> None:
    old = history(BYTES, readings([5, 6]), "ser_a", policy="lru", granule=4096)
    new = history(
        BYTES, [row._replace(sweep=f"{row.sweep}b") for row in readings([7, 8])], "ser_b", policy="stable", granule=4096
    )
    (chart,) = charts.build("cell", [old, new]).exact
    assert sorted(line.label for line in chart.lines) == ["head policy=lru", "head policy=stable"]
    assert len({line.kind for line in chart.lines}) == 2


def test_of_cells_that_share_a_series_the_named_one_is_shown() -> None:
    rows = readings([5, 6])
    others = [row._replace(cell="other", value=99) for row in rows]
    for order in (rows + others, others + rows):
        (chart,) = charts.build("cell", [history(BYTES, order)]).exact
        assert chart.data["lines"][0]["values"] == [5, 6]


def test_sweeps_of_one_day_are_told_apart_by_the_minute() -> None:
    rows = readings([5, 6])
    assert charts.build("cell", [history(BYTES, rows)]).ends == ("2026-11-01", "2026-11-02")
    rows[1] = rows[1]._replace(at=rows[0].at.replace(hour=9, minute=5))
    assert charts.build("cell", [history(BYTES, rows)]).ends == ("2026-11-01 00:00", "2026-11-01 09:05")


def test_one_sweep_is_shown_and_said_to_be_one() -> None:
    page = Page(shown(history(TIME, readings([20.0]))))
    assert "One sweep so far" in page.text
    assert page.table(f"{TIME}, newest first").rows[0][4] == "20.00 ms/token"


@pytest.mark.parametrize("largest", [(999, 1, "B"), (1_000, 1_000, "kB"), (3_979_122_688, 10**9, "GB")])
def test_an_axis_is_in_the_unit_of_its_largest_value(largest: tuple[int, int, str]) -> None:
    value, step, unit = largest
    (chart,) = charts.build("cell", [history(BYTES, readings([1, value]))]).exact
    assert chart.data["unit"] == unit
    assert chart.data["lines"][0]["values"][1] == value / step


def test_field_81_a_chart_shows_large_integers_and_small_ratios_as_they_are() -> None:
    large = 2**53 + 1
    (chart,) = charts.build("cell", [history(BYTES, readings([large - 1, large]))]).exact
    assert chart.data["lines"][0]["told"] == ["9,007,199,254,740,992 B", "9,007,199,254,740,993 B"]
    assert chart.lines[0].latest == "9,007,199,254,740,993 B"
    assert [y for _, y in chart.lines[0].dots] == [920, 80], "a difference of one byte is one"
    (ratio,) = charts.build("cell", [history("byte_hit_rate", readings([0.9999, 1.00004, 0.00004]))]).exact
    assert ratio.data["lines"][0]["told"] == ["99.99 %", "100.004 %", "0.004 %"]
    assert (ratio.data["unit"], ratio.bottom) == ("%", "0.004 %")


def test_a_page_may_run_its_own_scripts_and_no_other_and_holds_every_point_without() -> None:
    page = shown(history(BYTES, readings([5, 6, 7])))
    parsed = Page(page)
    assert parsed.unbalanced == []
    scripts = [attrs for tag, attrs in parsed.tags if tag == "script"]
    assert [one["src"] for one in scripts] == ["../assets/uPlot.iife.min.js", "../assets/charts.js"]
    assert "default-src 'none'; style-src 'self' file:; script-src 'self' file:; base-uri 'none'" in html.unescape(page)
    assert not [key for _, attrs in parsed.tags for key in attrs if key.startswith("on") or key == "style"]
    assert len(parsed.table(f"{BYTES}, newest first").rows) == 3
    assert re.findall(r'<path class="dots line-0" d="([^"]+)"', page) == ["M25 920h0M500 500h0M975 80h0"]


@pytest.mark.parametrize("name", samples.HOSTILE)
def test_field_77_hostile_names_are_text_and_data_on_a_scenarios_page(name: str) -> None:
    rows: Any = [
        row._replace(arm=name or "x", engine=name, driver=f"{name}{place}", cell=name)
        for place, row in enumerate(readings([5, 6]))
    ]
    page = shown(history(BYTES, rows, policy=name), name=name)
    parsed = Page(page)
    assert parsed.unbalanced == []
    assert not {"img", "iframe", "b", "style"} & {tag for tag, _ in parsed.tags}
    assert len([tag for tag, _ in parsed.tags if tag == "script"]) == 2
    (data,) = [attrs["data-chart"] for _, attrs in parsed.tags if "data-chart" in attrs]
    assert json.loads(data or "")["lines"][0]["values"] == [5, 6]
