"""The attribution of streamed bytes, held against the published figures that the report was conceived from."""

from __future__ import annotations

from itertools import pairwise

import pytest

from jobs.model import KeyBytes, Missing
from reports import traffic
from reports.blocks import Bars, Paragraph, Table
from reports.format import bytes_decimal, percent, show
from reports.pictures import traffic as drawn
from reports.render import render
from reports.sections import traffic as section
from reports.text import inline
from reports.view import Scope, SweepView, build_cell
from tests.unit import reports_samples as samples


def head() -> traffic.Traffic:
    return traffic.build(samples.arms()[2])


def test_the_published_attribution_is_reproduced() -> None:
    """Published: 70.16 %, 2.349 GB, 11 % of events, 44.63 % of bytes, 49.9 MB, 7.8 MB, 1.158 GB, 1.97x, about 90 %."""
    arm = head()
    assert show(arm.figures["byte_hit_rate"], "ratio") == "70.16 %"
    assert show(arm.figures["htod_bytes_per_token"], "bytes") == "2.349 GB"
    assert show(arm.figures["bypassed_count_share"], "ratio") == "11.17 %"
    assert show(arm.figures["bypassed_byte_share"], "ratio") == "44.63 %"
    assert show(arm.figures["floor_distance_bytes"], "bytes") == "1.158 GB"
    assert show(arm.figures["floor_ratio"], "x") == "1.972×"
    assert show(arm.mean_bypass_bytes, "bytes") == "49.92 MB"
    assert show(arm.mean_retained_bytes, "bytes") == "7.788 MB"
    assert show(arm.bypass_per_token_bytes, "bytes") == "1.048 GB"
    assert show(arm.bypass_of_distance, "ratio") == "90.54 %"


def test_the_attribution_is_said_in_words_in_every_form() -> None:
    view = SweepView(samples.verdict())
    built = section.build(view, Scope(view.first_cells(1), 20, 20))
    said = [inline(block.words) for block in built.shown if isinstance(block, Paragraph)]
    assert said == [
        "head: bypassed page-ins are 11.17 % of the page-ins and 44.63 % of the streamed bytes, 1.048 GB a token, "
        "90.54 % of the distance to the floor. A bypassed page-in is 49.92 MB in the mean, a retained one 7.788 MB. "
        "The most bytes are of lm_head.weight_Q4: 38.93 % of what crossed the link, 1.00 % of times."
    ]


def test_every_arm_has_every_figure() -> None:
    view = SweepView(samples.verdict())
    built = section.build(view, Scope(view.first_cells(1), 20, 20))
    table = next(block for block in built.shown if isinstance(block, Table))
    assert [column.title for column in table.columns] == ["Figure", "base", "null", "head", "head against base"]
    assert [inline(row[0]) for row in table.rows] == [label for _, label, _ in traffic.METRICS]
    assert all(inline(cell) for row in table.rows for cell in row)


def test_bars_meet_and_fill_the_whole() -> None:
    arm = head()
    for parts in (arm.by_count, arm.by_bytes):
        assert parts[0].start == 0
        assert all(left.start + left.width == right.start for left, right in pairwise(parts))
        assert parts[-1].start + parts[-1].width == 1000
        assert sum(part.share for part in parts) == pytest.approx(1)
    assert [part.kind for part in arm.by_count] == ["hit", "retained", "bypassed"]
    counts = {part.kind: part.share for part in arm.by_count}
    sizes = {part.kind: part.share for part in arm.by_bytes}
    assert percent(counts["bypassed"]) == "2.42 %"
    assert percent(sizes["bypassed"]) == "13.32 %"


def test_a_missing_counter_gives_no_bar_and_says_why() -> None:
    broken = samples.arm("head", "head", "stable", samples.STABLE, 1_048_412_160, 336)
    broken.values["hit_bytes"] = Missing(missing="varies 1 to 2")
    arm = traffic.build(broken)
    assert arm.by_bytes == ()
    assert arm.why == "hit_bytes: varies 1 to 2"


def test_a_missing_ring_is_no_gap_in_the_bars_but_a_missing_hit_is() -> None:
    assert head().why == ""  # the sample records no staged counters


def test_a_heavy_key_shows_how_often_it_crossed_beside_the_bytes_and_both_in_words() -> None:
    keys = next(one for one in drawn.build(build_cell(samples.cell())) if isinstance(one, Bars) and "keys" in one.title)
    groups = {title: {bar.label: bar for bar in bars} for title, bars in keys.groups}
    assert list(groups) == ["lm_head.weight_Q4, 389.3 MB", "layers.0.mlp.gate_proj, 48.66 MB"], "the heaviest first"
    bars = groups["lm_head.weight_Q4, 389.3 MB"]
    assert list(bars) == ["base, by count", "base, by bytes", "head, by count", "head, by bytes"], "null is base again"
    by_count, by_bytes = bars["head, by count"], bars["head, by bytes"]
    assert (by_count.reading, by_bytes.reading) == ("1.00 % (16 times)", "38.93 % (6.229 GB)")
    assert (by_count.slices[0].width, by_bytes.slices[0].width) == (10, 389)
    assert dict(keys.legend)["bytes"] == "of the bytes that crossed it"


def test_a_key_that_an_arm_does_not_tell_of_has_a_word_and_no_bar() -> None:
    base, null, head = samples.arms()
    fewer = head.model_copy(update={"top_keys": head.top_keys[1:]})
    found = drawn.build(build_cell(samples.cell(arms=(base, null, fewer))))
    keys = next(one for one in found if isinstance(one, Bars) and "keys" in one.title)
    first = keys.groups[0][1]
    assert [(bar.label, bar.reading, bar.slices) for bar in first[2:]] == [("head", "not among its heaviest", ())]
    light = head.model_copy(update={"top_keys": (KeyBytes(key="lm_head.weight_Q4", nbytes=389_283_840, bypassed=1),)})
    found = drawn.build(build_cell(samples.cell(arms=(base, null, light))))
    keys = next(one for one in found if isinstance(one, Bars) and "keys" in one.title)
    assert [title.split(",")[0] for title, _ in keys.groups] == ["lm_head.weight_Q4", "layers.0.mlp.gate_proj"]


def test_of_many_arms_base_and_head_alone_have_bars_of_keys() -> None:
    base, _, head = samples.arms()
    others = tuple(head.model_copy(update={"arm": f"v{place}", "role": "variant"}) for place in range(3))
    for arms, shown in (((base, *others, head), {"base", "head"}), ((base, *others), {"base", "v0", "v1"})):
        found = drawn.build(build_cell(samples.cell(arms=arms)))
        keys = next(one for one in found if isinstance(one, Bars) and "keys" in one.title)
        assert {bar.label.split(",")[0] for _, bars in keys.groups for bar in bars} == shown


def test_the_amount_stands_beside_each_share() -> None:
    served = drawn.build(build_cell(samples.cell()))[0]
    assert isinstance(served, Bars)
    readings = [bar.reading for bar in served.groups[-1][1]]
    assert "copied and not kept 2.42 % (336)" in readings[0]
    assert "copied and not kept 13.32 % (16.77 GB)" in readings[1]


def test_nothing_to_divide_by_is_missing_and_not_zero() -> None:
    idle = samples.arm("head", "head", "stable", 0, 0, 0)
    idle.values["retained_page_ins"] = 0
    arm = traffic.build(idle)
    assert isinstance(arm.mean_bypass_bytes, Missing)
    assert isinstance(arm.mean_retained_bytes, Missing)
    assert isinstance(arm.figures["bypassed_byte_share"], Missing)


def test_spans_of_nothing_have_no_width() -> None:
    assert traffic.spans([0, 0], 0) == [(0, 0), (0, 0)]
    assert traffic.spans([1, 1, 1], 3) == [(0, 333), (333, 334), (667, 333)]


def test_decimal_sizes_agree_with_the_figures() -> None:
    assert bytes_decimal(samples.STABLE - samples.FLOOR) == "1.158 GB"


def test_labels_say_what_a_figure_is() -> None:
    """The floor is W less whole granules, not less the budget; a ratio of blocks is not the quotient of two medians."""
    for text in (render(samples.verdict(), "comment"), render(samples.verdict(), "html")):
        assert "Floor (W − capacity), bytes per token" in text
        assert "W − budget" not in text
        for words in ("base, median run", "head, median run", "head / base, mean of blocks", "not the quotient"):
            assert words in text, words
