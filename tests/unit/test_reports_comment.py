"""What the pull request comment shows, and that it fits any limit without breaking."""

from __future__ import annotations

import re
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import Missing
from jobs.verdict import CellVerdict, LossRow, Verdict
from reports.render import COMMENT_FLOOR, COMMENT_LIMIT, LimitTooSmall, comment_length, marker, render
from tests.unit import reports_samples as samples
from tests.unit.reports_parsing import Page, markdown

EMOJI = "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 20
FIGURES = ("Byte hit rate", "htod bytes per token", "by bytes", "by count", "Floor", "Distance")
LIMITS = (COMMENT_FLOOR, 801, 1000, 1500, 2500, 4000, 6000, 9000, 14_000, 30_000, 65_536, 262_144)


def rows(count: int) -> Verdict:
    """One cell with `count` regressed counters, each with a long name of its own."""
    exact = tuple(
        samples.metric(f"counter_{place}_{'x' * 200}", "count", place + 1, 2 * place + 3, "regressed")
        for place in range(count)
    )
    return samples.verdict(outcome="REGRESSED", exit_code=1, cells=(samples.cell(exact=exact, exit_code=1),))


SIZES = MappingProxyType(
    {
        "one": samples.broken(),
        "500 cells": samples.many(500, "cell {} " + EMOJI),
        "5 rows": rows(5),
        "500 rows": rows(500),
        "20000 rows": rows(20_000),
        "hostile": samples.hostile("``` | @x </details> \U0001f600" * 15),
    }
)


@pytest.fixture(scope="module", params=SIZES)
def sized(request: pytest.FixtureRequest) -> Verdict:
    return SIZES[request.param]


@pytest.mark.parametrize("limit", LIMITS)
def test_field_74_every_limit_is_met_and_nothing_is_cut(sized: Verdict, limit: int) -> None:
    body = render(sized, "comment", limit=limit)
    assert len(body) <= comment_length(body) <= limit
    assert len(body.encode()) <= 4 * limit
    assert body.startswith(marker(sized) + "\n")
    page = markdown(body)
    assert page.unbalanced == []
    assert page.links == []
    for table in page.tables:
        assert {len(row) for row in table.rows} <= {len(table.head)}
    assert sized.outcome in page.text
    assert re.search(rf"exit (code )?{sized.exit_code}\b", page.text, re.IGNORECASE)


def test_field_74_the_default_limit_is_the_host_s() -> None:
    assert comment_length(render(SIZES["20000 rows"], "comment")) <= COMMENT_LIMIT == 65_536


def test_a_limit_below_the_floor_is_refused_with_the_floor() -> None:
    with pytest.raises(LimitTooSmall, match=str(COMMENT_FLOOR)):
        render(samples.verdict(), "comment", limit=COMMENT_FLOOR - 1)


def test_the_ladder_goes_from_all_to_worst_rows_to_counts_to_a_pointer() -> None:
    verdict = samples.many(60, "cell {} with some words")
    steps = [render(verdict, "comment", limit=limit) for limit in (65_536, 12_000, 5_000, 1_400, COMMENT_FLOOR)]
    assert all(len(longer) > len(shorter) for longer, shorter in pairwise(steps))
    full, bare, worst, few, pointer = map(markdown, steps)
    assert "Bytes" in full.text
    assert "details" in {tag for tag, _ in full.tags}
    assert "details" not in {tag for tag, _ in bare.tags}
    assert worst.table("Findings").rows
    assert "20 REGRESSED, 40 IMPROVED" in few.text
    assert "more rows, in the full report" in worst.text
    assert "assay report swp_" in pointer.text


def test_rows_left_out_are_counted() -> None:
    page = markdown(render(SIZES["500 rows"], "comment"))
    table = page.table("Rows that are worse or unknown")
    assert "480 more rows, in the full report." in page.text
    assert len(table.rows) == 20


def test_the_marker_survives_any_name_and_differs_by_sweep() -> None:
    made = [marker(samples.verdict(sweep=name)) for name in (*samples.HOSTILE, "a--b", "a-b")]
    assert len(set(made)) == len(made)
    assert all(re.fullmatch(r"<!-- assay:sweep=[a-z0-9-]+ -->", line) and "--" not in line[4:-3] for line in made)
    assert len(marker(samples.verdict(sweep="x" * 5000))) < 120


@pytest.fixture(scope="module")
def clean() -> Page:
    return markdown(render(samples.verdict(), "comment"))


def test_the_first_words_are_verdict_and_next_step(clean: Page) -> None:
    first = clean.text.split("Worst rows first")[0]
    for needed in ("IMPROVED", "head streams 41.0 % fewer bytes", "Next: Nothing blocks", "Exit code 0."):
        assert needed in first


def test_sections_come_in_the_order_people_read(clean: Page) -> None:
    order = ["Worst rows first", "Token identity", "Did the path run", "Bytes", "Capture", "Time", "Hygiene"]
    order += ["What this cannot catch", "Stamp"]
    titles = re.sub(r"\n\s*", "\n", clean.text)
    places = [re.search(rf"^{title}(,|:|$)", titles, re.MULTILINE).start() for title in order]  # type: ignore[union-attr]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "figure", ["Byte hit rate", "htod bytes per token", "by bytes", "by count", "Floor", "Distance"]
)
def test_the_figures_stand_for_every_arm(clean: Page, figure: str) -> None:
    table = clean.table("Bytes by arm")
    assert table.head == ["Figure", "base", "null", "head", "head against base"]
    row = next(row for row in table.rows if figure in row[0])
    assert all(re.search(r"\d", cell) for cell in row[1:4]), row


def test_usual_things_are_folded_and_unusual_ones_are_not() -> None:
    clean_body, broken_body = render(samples.verdict(), "comment"), render(samples.broken(), "comment")
    unfolded = re.sub(r"<details>.*?</details>", "", clean_body, flags=re.DOTALL)
    assert "hits + page_ins == touches" in clean_body
    assert "hits + page_ins == touches" not in unfolded
    assert "Seams by cause" not in unfolded
    shown = re.sub(r"<details>.*?</details>", "", broken_body, flags=re.DOTALL)
    for needed in (
        "46283",
        "Witnesses not met",
        "Seams by cause",
        "pid 4242 held 2.1 GB",
        "Ids around the first difference",
    ):
        assert needed in shown


def test_the_first_difference_is_shown_in_context() -> None:
    page = markdown(render(samples.broken(), "comment"))
    table = page.table("Ids around the first difference")
    assert table.head == ["index", *map(str, range(15, 23))]
    assert table.rows[0] == ["base", *map(str, samples.IDS[15:23])]
    assert table.rows[1][:6] == ["head", "33", "29", "34", "34", "46283"]
    assert "top-2 logit gap there: base 0.0781, head 2.5" in page.text
    assert "in generation 2 at index 19" in page.text


def test_time_on_a_simulated_card_is_said_to_be_no_evidence(clean: Page) -> None:
    assert "The card is simulated" in clean.text
    real = tuple(
        arm.model_copy(update={"uuid": "GPU-1", "card": "NVIDIA H200"}) for arm in samples.verdict().cells[0].arms
    )
    other = samples.verdict(cells=(samples.cell(arms=real),))
    assert "The card is simulated" not in markdown(render(other, "comment")).text


def test_tokens_that_differ_mark_the_bytes_as_different_work() -> None:
    said = "Tokens differ, so head did other work than base"
    assert said in markdown(render(samples.broken(), "comment")).text
    assert said not in markdown(render(samples.verdict(), "comment")).text


def test_equal_ids_of_a_path_that_never_ran_are_not_called_identical() -> None:
    vacuous = samples.identical().model_copy(update={"klass": "VACUOUS"})
    shown = markdown(render(samples.verdict(cells=(samples.cell(identity=(vacuous,)),)), "comment")).text
    assert "not claimed in 1 of 1 comparison" in shown
    assert "identical in all" not in shown
    assert "Tokens differ" not in shown


def test_no_comparison_at_all_is_missing_and_not_equal() -> None:
    shown = markdown(render(samples.verdict(cells=(samples.cell(identity=()),)), "comment")).text
    assert "no token streams were compared, so nothing is known about identity" in shown


def test_arms_held_against_themselves_alone_are_not_called_identical() -> None:
    alone = samples.cell(identity=(samples.identical("head gen 1", "head gen 2", "self"),))
    shown = markdown(render(samples.verdict(cells=(alone,)), "comment")).text
    assert "missing: base and head were not compared" in shown


def test_tokens_bytes_and_segments_of_each_arm_stand_in_one_row() -> None:
    table = markdown(render(samples.verdict(), "comment")).table("Arms side by side")
    assert [row[:2] for row in table.rows] == [["base", "base"], ["null", "🟢 identical"], ["head", "🟢 identical"]]
    assert [row[2:] for row in table.rows][-1] == ["2.349 GB", "1.158 GB", "1", "0", "0"]
    assert "Arms side by side" not in render(samples.verdict(cells=()), "comment")


def test_seams_are_counted_by_cause_for_each_arm() -> None:
    table = markdown(render(samples.broken(), "comment")).table("Seams by cause, plan steps")
    path = "eager-device-seam"
    assert table.rows == [
        ["KernelCaptureUnsupported", "ai.onnx::Split", "0", "0", "20", path, "/model/layers.*/Split"],
        ["ClassifierDisqualified", "ai.onnx::Add", "0", "0", "10", path, "/model/layers.*/Add"],
    ]


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({}, "unchanged: base 1 segment"),
        ({"seams": 5, "segments": 6}, "worse: base 1 segment"),
        ({"segments": 0}, "not captured: base 1 segment"),
        ({"segments": 0, "seams": 2}, "not captured: base 1 segment"),
        ({"seams": Missing(missing="not recorded")}, "unknown: base 1 segment"),
    ],
)
def test_capture_is_judged_by_what_must_not_rise(changes: dict[str, int | Missing], state: str) -> None:
    sides = samples.arms()
    sides[2].values.update(changes)
    assert state in markdown(render(samples.verdict(cells=(samples.cell(arms=sides),)), "comment")).text


@pytest.mark.parametrize(("fallbacks", "state"), [(0, "captured: base 0 segments"), (3, "falls back: base 0 segments")])
def test_capture_that_head_alone_has_is_not_worse_for_its_segments(fallbacks: int, state: str) -> None:
    sides = samples.arms()
    sides[0].values["segments"] = 0
    sides[2].values.update({"segments": 3, "seams": 2, "fallbacks": fallbacks})
    assert state in markdown(render(samples.verdict(cells=(samples.cell(arms=sides),)), "comment")).text


def test_capture_that_is_lost_is_no_better_capture() -> None:
    sides = samples.arms()
    sides[2].values["segments"] = 0
    lost = samples.metric("segments", "count", 1, 0, "regressed", note="capture is lost")
    cell = samples.cell(arms=sides, exact=(lost,))
    assert "lost: base 1 segment" in markdown(render(samples.verdict(cells=(cell,)), "comment")).text


def test_a_head_that_falls_back_as_base_does_is_still_said_to_fall_back() -> None:
    sides = samples.arms()
    for side in sides:
        side.values["fallbacks"] = 2
    shown = markdown(render(samples.verdict(cells=(samples.cell(arms=sides),)), "comment"))
    assert "falls back: base 1 segment, 0 seams, 2 fallbacks" in shown.text
    assert shown.table("Capture by arm").rows


def test_a_missing_reading_shows_its_reason() -> None:
    gone = samples.arm("head", "head", "stable", samples.STABLE, 0, 0)
    gone.values["byte_hit_rate"] = Missing(missing="varies 0.5 to 0.7")
    cell: CellVerdict = samples.cell(arms=(samples.arms()[0], gone))
    row = markdown(render(samples.verdict(cells=(cell,)), "comment")).table("Bytes by arm").rows[0]
    assert row == ["Byte hit rate", "49.45 %", "n/a: varies 0.5 to 0.7", "no comparison"]


def test_several_cells_share_one_table_of_bytes() -> None:
    page = markdown(render(samples.many(4), "comment"))
    table = page.table("Bytes by cell and arm, worst cells first")
    assert len(table.rows) == 8, "no row of a null arm that is as base"
    assert table.rows[0][:2] == ["cell 0", "base"]


def test_the_stamp_leads_back(clean: Page) -> None:
    for needed in (
        "swp_01JB2M3N4P5Q6R7S8T9V0W1X2Y",
        "abababababab",
        "cdcdcdcdcdcd",
        "run_01",
        "run_02",
        "assay explain swp_",
    ):
        assert needed in clean.text


def test_field_81_one_byte_beyond_2_to_53_is_worse_and_shown_with_all_its_digits(documents: Any) -> None:
    """As a float the two are one number."""
    large = 2**53
    verdict = judge(
        documents.sweep(
            base=documents.arm(changes={"peak_committed_bytes": large}),
            head=documents.arm(changes={"peak_committed_bytes": large + 1}),
        )
    )
    assert isinstance(verdict, Verdict) and (verdict.outcome, verdict.exit_code) == ("REGRESSED", 1)
    page = markdown(render(verdict, "comment"))
    assert "peak_committed_bytes rose by 1 (+0.0%), from 9,007,199,254,740,992 to 9,007,199,254,740,993" in page.text
    (row,) = [row for table in page.tables for row in table.rows if row[0] == "peak_committed_bytes"]
    assert row[1:3] == ["9,007,199,254,740,992 B", "9,007,199,254,740,993 B"]
    assert '"head":9007199254740993' in render(verdict, "json")


def test_field_81_ratios_just_beside_one_are_not_shown_as_one() -> None:
    rows = [
        samples.cell().time[0].model_copy(update={"metric": name, "ratio": ratio, "low": ratio, "high": ratio})
        for name, ratio in (("a", 0.004), ("b", 0.99995), ("c", 1.00004), ("d", 1.0))
    ]
    page = markdown(render(samples.verdict(cells=(samples.cell(time=tuple(rows)),)), "comment"))
    shown = [row[3] for row in page.table("Time by metric").rows]
    assert shown[0] == "0.004000×" and shown[3] == "1.000×"
    assert shown[1:3] == ["0.99995×", "1.00004×"] and "-0.0" not in page.text and "−0.0 %" not in page.text


def test_field_81_a_difference_behind_a_hundred_thousand_ids_is_shown_in_its_place(documents: Any) -> None:
    ids = tuple(range(100_000))
    row = samples.violation(first_difference=99_999, common_prefix=99_999, compared=100_000, left_context=ids[-5:])
    body = render(samples.verdict(cells=(samples.cell(identity=(row,)),)), "comment")
    assert "at index 99,999" in body and len(body) < 20_000


def test_hygiene_tells_clocks_and_what_an_arm_lost_to_its_card() -> None:
    sides = tuple(arm.model_copy(update={"sm_clock_mhz": (1_755.0, 1_980.0)}) for arm in samples.arms())
    losses = (LossRow(arm="head", attempts=6, contaminated=1, throttled=1),)
    page = markdown(render(samples.verdict(cells=(samples.cell(arms=sides, losses=losses),)), "comment"))
    assert "0 attempts set aside; SM clock 1,755 to 1,980 MHz." in page.text
    (row,) = page.table("Arms that are incomplete or not certified clear").rows
    assert row[0] == "head" and row[5:7] == ["1,755 to 1,980 MHz", "2 of 6 attempts: contaminated 1, throttled 1"]
    mixed = (sides[0], sides[1], samples.arms()[2])
    assert "not known of every run" in render(samples.verdict(cells=(samples.cell(arms=mixed),)), "comment")
    assert "SM clock" not in re.sub(
        r"<details>.*?</details>", "", render(samples.verdict(), "comment"), flags=re.DOTALL
    )
