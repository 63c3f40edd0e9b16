"""Exact metrics: zero rules, directions, what is absent; rows of an arm pair; time rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from engine.counters import COUNTERS
from jobs.compare import (
    MeasuredArm,
    MeasuredRun,
    Standing,
    TimePlan,
    differing,
    exact_rows,
    measured_arm,
    time_rows,
    varying,
)
from jobs.gates import EXACT, GATING, exact_metric, matching, rule
from jobs.metrics import NOT_RECORDED, readings
from jobs.model import Generation, Missing, Reading, RunRecord
from jobs.reviewed import Expectation
from jobs.verdict import MetricRow, TimeRow

HTOD = exact_metric("htod_bytes")
HITS = exact_metric("hits")
NAN = Missing(missing="not finite: nan")


@pytest.mark.parametrize(
    ("base", "head", "klass", "delta", "note"),
    [
        (0, 0, "same", 0, ""),
        (0.0, -0.0, "same", 0, ""),
        (5, 5, "same", 0, ""),
        (0, 5, "regressed", 5, "new non-zero"),
        (5, 0, "improved", -5, "now zero"),
        (5, 7, "regressed", 2, ""),
        (7, 5, "improved", -2, ""),
        (2**62, 2**62 + 1, "regressed", 1, ""),  # one byte of 4 EB: integers, never floats
    ],
)
def test_field_20_zero_and_exact_integers(base: int, head: int, klass: str, delta: int, note: str) -> None:
    ruling = rule(HTOD, base, head)
    assert (ruling.klass, ruling.delta, ruling.note) == (klass, delta, note)


@pytest.mark.parametrize(
    ("base", "head", "klass"),
    [
        (NOT_RECORDED, NOT_RECORDED, "not_recorded"),
        (NOT_RECORDED, 5, "new"),
        (NOT_RECORDED, 0, "new"),
        (5, NOT_RECORDED, "vanished"),
        (0, NOT_RECORDED, "vanished"),
        (NAN, 5, "not_recorded"),
        (5, NAN, "not_recorded"),
        (NAN, NAN, "not_recorded"),
        (Missing(missing="varies: 1..2"), 5, "varies"),
        (5, Missing(missing="varies: 1..2"), "varies"),
    ],
)
def test_field_20_what_is_absent_is_said_and_never_equal(base: Reading, head: Reading, klass: str) -> None:
    ruling = rule(HTOD, base, head)
    assert ruling.klass == klass
    assert isinstance(ruling.delta, Missing)


def test_field_21_each_gating_metric_has_a_direction_and_no_other_gates() -> None:
    assert all(EXACT[name].direction == "lower" for name in GATING)
    assert {name for name, metric in EXACT.items() if metric.gating} == set(GATING)
    assert rule(HITS, 5, 50).klass == "neutral"
    assert rule(exact_metric("hit_bytes"), 50, 5).klass == "neutral"  # has a direction, and does not gate
    assert rule(exact_metric("a_counter_of_tomorrow"), 1, 2).klass == "neutral"


def test_clock_counters_are_not_exact() -> None:
    assert not {name for name, counter in COUNTERS.items() if counter.scope == "clock"} & set(EXACT)


@pytest.mark.parametrize(
    ("change", "head", "klass"),
    [("any", 9, "declared"), ("higher", 9, "declared"), ("lower", 9, "regressed"), ("lower", 1, "declared")],
)
def test_a_declared_change_is_accepted_only_in_its_direction(change: str, head: int, klass: str) -> None:
    declared = Expectation.model_validate({"metric": "htod_bytes", "change": change, "reason": "smaller ring"})
    ruling = rule(HTOD, 5, head, declared)
    assert ruling.klass == klass
    assert ("smaller ring" if klass == "declared" else "declared lower, went higher") in ruling.note


@pytest.mark.parametrize("name", ["htod_bytes_per_token", "page_ins", "byte_hit_rate"])
def test_what_does_not_gate_is_not_accepted_but_told(name: str) -> None:
    """Such as base's commit may still declare: the row must not name the outcome, nor pass for a gain."""
    ruling = rule(exact_metric(name), 5, 9, Expectation(metric=name, change="higher", reason="x"))
    assert (ruling.klass, ruling.note) == (
        "neutral",
        f"declared, and {name} does not gate, so there is nothing to accept",
    )


def test_a_lost_capture_can_be_declared_though_its_counter_does_not_gate_else() -> None:
    lost = Expectation(metric="replays", change="lower", reason="eager for now")
    assert rule(exact_metric("replays"), 5, 0, lost).klass == "declared"
    assert rule(exact_metric("replays"), 5, 4, lost).klass == "neutral"
    assert rule(exact_metric("replays"), 5, 0, lost, capture_varies=True).klass == "neutral"


def test_a_declared_change_that_did_not_happen_is_said() -> None:
    assert "did not happen" in rule(HTOD, 5, 5, Expectation(metric="htod_bytes", reason="x")).note


def test_a_declaration_covers_the_cells_that_it_names() -> None:
    declared = Expectation(metric="htod_bytes", cell="smollm2/*/capture=off", reason="x")
    assert matching([declared], "htod_bytes", "smollm2/capital/capture=off") is declared
    assert matching([declared], "htod_bytes", "smollm2/capital/capture=on") is None
    assert matching([declared], "segments", "smollm2/capital/capture=off") is None


# ---- rows --------------------------------------------------------------------------------------------------------


def run(
    name: str, number: int, counters: Mapping[str, Reading], *, block: int = 0, step_ns: int = 20_000_000
) -> MeasuredRun:
    record = RunRecord(
        run_id=f"{name}_{block}_{number}",
        attempt_id=f"a_{name}_{block}_{number}",
        attempt_number=1,
        exit_code=0,
        counters=dict(counters),
        generations=(
            Generation(
                index=0, warmup=False, ids=(1, 2, 3), stop_reason="length", prefill_ns=9_000_000, step_ns=(step_ns,) * 2
            ),
        ),
    )
    return MeasuredRun(record.run_id, block, record, readings(record))


def arm(name: str, *counters: Mapping[str, Reading], step_ns: int = 20_000_000, blocks: int = 1) -> MeasuredArm:
    return measured_arm(
        name,
        [run(name, n, c, block=b, step_ns=step_ns) for b in range(blocks) for n, c in enumerate(counters)],
    )


def by_name(rows: tuple[MetricRow, ...]) -> dict[str, MetricRow]:
    return {row.metric: row for row in rows}


def test_rows_put_gating_metrics_first_and_carry_their_runs() -> None:
    rows = exact_rows(
        arm("base", {"htod_bytes": 9, "hits": 1}), arm("head", {"htod_bytes": 6, "hits": 4}), "c", (), Standing()
    )
    assert [row.gating for row in rows] == sorted((row.gating for row in rows), reverse=True)
    assert {row.metric for row in rows} >= GATING
    row = by_name(rows)["htod_bytes"]
    assert (row.base, row.head, row.delta, row.klass, row.unit) == (9, 6, -3, "improved", "bytes")
    assert row.run_ids == ("base_0_0", "head_0_0")
    assert by_name(rows)["htod_bytes_per_token"].klass == "neutral"
    assert by_name(rows)["segments"].klass == "not_recorded"


def test_a_counter_that_no_registry_knows_is_shown_and_does_not_gate() -> None:
    row = by_name(exact_rows(arm("base", {"odd": 1}), arm("head", {"odd": 2}), "c", (), Standing()))["odd"]
    assert (row.klass, row.gating, row.direction) == ("neutral", False, "neutral")


def test_a_metric_that_does_not_repeat_inside_an_arm_has_no_value() -> None:
    head = arm("head", {"htod_bytes": 6, "hits": 2}, {"htod_bytes": 8, "hits": 2})
    assert head.value("htod_bytes") == Missing(missing="varies: 6..8")
    assert set(varying(head)) == {"htod_bytes", "htod_bytes_per_token", "link_bytes_per_token"}
    rows = exact_rows(arm("base", {"htod_bytes": 9}), head, "c", (), Standing())
    assert by_name(rows)["htod_bytes"].klass == "varies"


def test_a_metric_that_only_some_runs_record_varies_too() -> None:
    assert varying(arm("head", {"htod_bytes": 6}, {}))["htod_bytes"].missing.startswith("varies: 6 in some runs")


def test_times_differ_from_run_to_run_and_are_no_variation() -> None:
    both = measured_arm("base", [run("base", 0, {}, step_ns=20_000_000), run("base", 1, {}, step_ns=30_000_000)])
    assert varying(both) == {}
    assert both.value("decode_ms_per_token") == 25.0
    assert both.value("tokens_per_s") == pytest.approx(1000 / 25.0)  # one figure, not a second median beside it


@pytest.mark.parametrize(
    ("standing", "klass", "note"),
    [
        (Standing(), "improved", ""),
        (Standing(different_work=True), "neutral", "different work"),
        (Standing(near_tie=True), "neutral", "no gain is claimed"),
        (Standing(unjudged="not judged: a witness is unmet"), "neutral", "not judged"),
    ],
)
def test_nothing_improves_where_the_work_differs_or_never_ran(standing: Standing, klass: str, note: str) -> None:
    rows = exact_rows(arm("base", {"htod_bytes": 9}), arm("head", {"htod_bytes": 6}), "c", (), standing)
    row = by_name(rows)["htod_bytes"]
    assert row.klass == klass
    assert note in row.note


@pytest.mark.parametrize("standing", [Standing(different_work=True), Standing(near_tie=True)], ids=["work", "tie"])
def test_more_bytes_stay_a_regression_even_where_the_tokens_differ(standing: Standing) -> None:
    rows = exact_rows(arm("base", {"htod_bytes": 6}), arm("head", {"htod_bytes": 9}), "c", (), standing)
    assert by_name(rows)["htod_bytes"].klass == "regressed"


def test_arms_of_one_build_are_compared_in_what_gates() -> None:
    base, null = arm("base", {"htod_bytes": 6, "hits": 1}), arm("null", {"htod_bytes": 7, "hits": 2})
    assert differing(base, null) == {"htod_bytes": (6, 7)}
    assert differing(base, base) == {}


def time_row(rows: tuple[TimeRow, ...], name: str = "decode_ms_per_token") -> TimeRow:
    return next(row for row in rows if row.metric == name)


SIX = TimePlan(6)
"""Blocks enough to decide: two that screen, four that decide."""


def test_time_is_undecided_in_one_block_and_says_so() -> None:
    row = time_row(time_rows(arm("base", {}), arm("head", {}, step_ns=40_000_000), None, TimePlan(1), Standing()))
    assert row.klass == "UNDECIDED"
    assert row.ratio == pytest.approx(2.0)
    assert "1 block" in row.note
    assert isinstance(row.null_ratio, Missing)


def test_time_worse_over_blocks_with_both_reciprocal_rows() -> None:
    base, head = arm("base", {}, {}, blocks=6), arm("head", {}, {}, step_ns=24_000_000, blocks=6)
    rows = time_rows(base, head, base, SIX, Standing())
    assert time_row(rows).klass == "WORSE"
    assert time_row(rows, "tokens_per_s").klass == "WORSE"  # fewer is worse there
    assert time_row(rows, "prefill_ms").klass == "SAME"
    assert time_row(rows).null_ratio == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("standing", "klass"),
    [
        (Standing(different_work=True), "DIFFERENT_WORK"),
        (Standing(unjudged="x"), "UNDECIDED"),
        (Standing(different_work=True, unjudged="x"), "DIFFERENT_WORK"),
    ],
)
def test_time_is_no_claim_where_the_tokens_differ(standing: Standing, klass: str) -> None:
    base, head = arm("base", {}, blocks=6), arm("head", {}, step_ns=10_000_000, blocks=6)
    assert {row.klass for row in time_rows(base, head, base, SIX, standing)} == {klass}


def test_after_a_near_tie_a_faster_head_is_no_gain_and_a_slower_one_is_worse() -> None:
    base, tie = arm("base", {}, blocks=6), Standing(near_tie=True)
    faster = time_row(time_rows(base, arm("head", {}, step_ns=10_000_000, blocks=6), base, SIX, tie))
    assert faster.klass == "DIFFERENT_WORK" and "no gain is claimed" in faster.note
    assert time_row(time_rows(base, arm("head", {}, step_ns=24_000_000, blocks=6), base, SIX, tie)).klass == "WORSE"
    assert time_row(time_rows(base, base, base, SIX, tie)).klass == "SAME"


def test_a_difference_below_a_microsecond_is_none() -> None:
    base, head = arm("base", {}, step_ns=10_000, blocks=6), arm("head", {}, step_ns=10_900, blocks=6)
    assert time_row(time_rows(base, head, base, SIX, Standing())).klass == "SAME"


def test_untimed_runs_are_not_measured() -> None:
    base = arm("base", {}, step_ns=0)
    row = time_row(time_rows(base, base, None, TimePlan(1), Standing()))
    assert row.klass == "NOT_MEASURED"
    assert not any(isinstance(v, float) and math.isnan(v) for v in (row.ratio, row.low, row.high))


def test_the_first_blocks_screen_and_the_others_alone_are_shown() -> None:
    """Head is 30 % slower in the blocks that decide and 50 % in those that screen: only the former is the figure."""
    steps = [30_000_000] * 2 + [26_000_000] * 4
    head = measured_arm("head", [run("head", 0, {}, block=b, step_ns=step) for b, step in enumerate(steps)])
    row = time_row(time_rows(arm("base", {}, blocks=6), head, arm("null", {}, blocks=6), SIX, Standing()))
    assert (row.klass, row.blocks) == ("WORSE", 4)
    assert row.ratio == pytest.approx(1.3)


def test_a_block_that_was_planned_to_screen_never_decides() -> None:
    """Blocks 0 and 1 of six are lost: four are left, all fresh, and none of them may screen."""
    base = measured_arm("base", [run("base", 0, {}, block=b) for b in range(2, 6)])
    head = measured_arm("head", [run("head", 0, {}, block=b, step_ns=24_000_000) for b in range(2, 6)])
    row = time_row(time_rows(base, head, None, SIX, Standing()))
    assert (row.klass, row.blocks) == ("UNDECIDED", 4)
    assert "screen" in row.note


def test_the_more_rows_a_sweep_has_the_wider_is_each_interval() -> None:
    steps = [24_000_000 + 100_000 * (b % 3) for b in range(24)]
    head = measured_arm("head", [run("head", 0, {}, block=b, step_ns=step) for b, step in enumerate(steps)])
    one, many = (
        time_row(time_rows(arm("base", {}, blocks=24), head, None, TimePlan(24, rows), Standing())) for rows in (1, 500)
    )
    figures = (many.low, one.low, one.ratio, one.smallest_detectable, many.smallest_detectable)
    many_low, one_low, ratio, one_smallest, many_smallest = (f for f in figures if not isinstance(f, Missing))
    assert 1.19 < many_low < one_low < ratio
    assert 0.01 < one_smallest < many_smallest
