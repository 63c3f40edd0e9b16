"""Derived metrics against the reference's known answers, and zero denominators."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.counters import COUNTERS
from jobs.metrics import METRICS, Sources, derive, expression_names, readings, same_work, upper_median
from jobs.model import Generation, Missing, Reading, RunRecord, SequenceTokens


def generation(index: int = 0, tokens: int = 16, *, warmup: bool = False, step_ns: int = 2_000_000) -> Generation:
    return Generation(
        index=index,
        warmup=warmup,
        ids=(1,) * tokens,
        stop_reason="length",
        prefill_ns=5_000_000,
        step_ns=(step_ns,) * (tokens - 1),
    )


# 867 keys over 16 steps of a dense model; the figures close to the byte in the report that they come from.
SEED: dict[str, Reading] = {
    "hits": 10_864,
    "page_ins": 3_008,
    "bypassed_page_ins": 336,
    "evictions": 2_672,
    "htod_bytes": 37_584_175_104,
    "hit_bytes": 7_870_916_608 * 16 - 37_584_175_104,
    "bypassed_page_in_bytes": 1_048_412_160 * 16,
}
SEED_FACTS: dict[str, int | float | str] = {
    "weight_bytes": 8_330_595_870,
    "capacity_bytes": 7_726_753_178 - 536_870_912 - 50_331_648,
}


def test_the_reference_record_gives_its_known_answers() -> None:
    got = derive(SEED, SEED_FACTS, [generation()])
    assert got["htod_bytes_per_token"] == 2_349_010_944
    assert isinstance(got["htod_bytes_per_token"], int)
    assert got["floor_bytes_per_token"] == 1_191_045_252
    assert got["floor_distance_bytes"] == 1_157_965_692
    rounded = {name: value for name, value in got.items() if isinstance(value, float)}
    assert round(rounded["count_hit_rate"], 4) == 0.7832
    assert round(rounded["byte_hit_rate"], 4) == 0.7016
    assert round(rounded["bypassed_byte_share"], 4) == 0.4463
    assert round(rounded["bypassed_count_share"], 4) == 0.1117
    assert round(rounded["floor_ratio"], 3) == 1.972
    assert got["page_ins_per_token"] == 188


def test_count_and_byte_shares_tell_opposite_stories_here() -> None:
    """11 % of the page-ins carry 45 % of the bytes: both must be there, the count alone hides it."""
    got = derive(SEED, SEED_FACTS, [generation()])
    by_count, by_bytes = got["bypassed_count_share"], got["bypassed_byte_share"]
    assert isinstance(by_count, float)
    assert isinstance(by_bytes, float)
    assert by_bytes > 3 * by_count


@pytest.mark.parametrize(
    ("metric", "counters"),
    [
        ("byte_hit_rate", {"hit_bytes": 0, "htod_bytes": 0}),
        ("count_hit_rate", {"hits": 0, "page_ins": 0}),
        ("bypassed_byte_share", {"bypassed_page_in_bytes": 0, "htod_bytes": 0}),
        ("bypassed_count_share", {"bypassed_page_ins": 0, "page_ins": 0}),
    ],
)
def test_a_zero_denominator_is_missing_and_not_zero(metric: str, counters: dict[str, Reading]) -> None:
    assert isinstance(derive(counters, {}, [generation()])[metric], Missing)


def test_a_resident_run_has_a_floor_of_zero_and_no_ratio() -> None:
    got = derive({"htod_bytes": 0}, {"weight_bytes": 10, "capacity_bytes": 20}, [generation()])
    assert got["floor_bytes_per_token"] == 0
    assert got["floor_distance_bytes"] == 0
    assert got["floor_ratio"] == Missing(missing="the floor is zero")
    assert got["htod_bytes_per_token"] == 0


def test_no_tokens_give_no_rate() -> None:
    empty = Generation(index=0, warmup=False, ids=(), stop_reason=None)
    got = derive(SEED, SEED_FACTS, [empty])
    for name in ("htod_bytes_per_token", "page_ins_per_token", "decode_ms_per_token", "tokens_per_s", "prefill_ms"):
        assert isinstance(got[name], Missing), name


def test_nothing_recorded_gives_nothing() -> None:
    got = derive({}, {}, [])
    assert set(got) == set(METRICS)
    assert all(isinstance(value, Missing) for value in got.values())


def test_warm_ups_are_left_out_of_rates() -> None:
    runs = [generation(0, warmup=True, step_ns=90_000_000), generation(1), generation(2)]
    got = derive({"htod_bytes": 320}, {}, runs)
    assert got["htod_bytes_per_token"] == 10
    assert got["decode_ms_per_token"] == 2.0
    assert got["tokens_per_s"] == 500.0
    assert got["prefill_ms"] == 5.0


def test_decode_skip_leaves_out_leading_tokens() -> None:
    slow_start = Generation(
        index=0,
        warmup=False,
        ids=(1,) * 5,
        stop_reason="length",
        step_ns=(50_000_000, 50_000_000, 2_000_000, 2_000_000),
    )
    assert derive({}, {}, [slow_start], decode_skip=3)["decode_ms_per_token"] == 2.0
    assert derive({}, {}, [slow_start], decode_skip=1)["decode_ms_per_token"] == 26.0
    assert isinstance(derive({}, {}, [slow_start], decode_skip=5)["decode_ms_per_token"], Missing)


def test_the_median_of_an_even_count_is_the_upper_one() -> None:
    assert upper_median([4.0, 1.0, 2.0, 3.0]) == 3.0
    assert upper_median([1.0]) == 1.0


def test_figures_that_are_not_finite_are_no_measurements() -> None:
    record = RunRecord(
        run_id="r",
        attempt_id="a",
        attempt_number=1,
        exit_code=0,
        counters={"htod_bytes": math.nan, "hits": math.inf},
        facts={"weight_bytes": math.inf, "name": "x"},
        generations=(generation(),),
    )
    got = readings(record)
    for name in ("htod_bytes", "hits", "weight_bytes", "htod_bytes_per_token", "byte_hit_rate"):
        assert isinstance(got[name], Missing), name
    assert "name" not in got


def test_every_metric_states_unit_direction_and_meaning() -> None:
    for metric in METRICS.values():
        assert metric.unit, metric.name
        assert metric.meaning, metric.name
        assert not (metric.exact and metric.gating), f"{metric.name}: exact gates are counters, derived ones are shown"


def test_expressions_may_name_counters_metrics_and_facts() -> None:
    names = expression_names()
    assert names >= set(COUNTERS)
    assert {"byte_hit_rate", "weight_bytes"} <= names


def test_figures_per_token_are_over_all_sequences_of_a_batch() -> None:
    """A step reads each weight once however many sequences it serves; real tokens count, of one that stopped too."""
    full = SequenceTokens(ids=(1,) * 16, stop_reason="length")
    batch = generation().model_copy(update={"further": (full, full, full)})
    one, four = derive(SEED, SEED_FACTS, [generation()]), derive(SEED, SEED_FACTS, [batch])
    for name in ("htod_bytes_per_token", "page_ins_per_token", "floor_bytes_per_token", "floor_distance_bytes"):
        assert four[name] * 4 == one[name], name  # type: ignore[operator]
    assert four["decode_ms_per_token"] * 4 == one["decode_ms_per_token"]  # type: ignore[operator]
    assert four["tokens_per_s"] == one["tokens_per_s"] * 4  # type: ignore[operator]
    assert four["floor_ratio"] == one["floor_ratio"]
    stopped = batch.model_copy(update={"further": (full, full, SequenceTokens(ids=(1,) * 8, stop_reason="eos"))})
    assert derive(SEED, SEED_FACTS, [stopped])["page_ins_per_token"] == 3008 / 56


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    steps=st.integers(0, 9),
    decode_skip=st.integers(0, 10),
)
def test_tokens_of_decode_steps_are_those_counted_step_by_step(
    lengths: list[int], steps: int, decode_skip: int
) -> None:
    """A step gives one to each sequence that has an id behind it, and counts as one where it gives none."""
    sequences = [SequenceTokens(ids=(1,) * length, stop_reason="length") for length in lengths]
    given_out = Generation(
        index=0,
        warmup=False,
        ids=sequences[0].ids,
        stop_reason="length",
        further=tuple(sequences[1:]),
        step_ns=tuple(range(1, steps + 1)),
    )
    first = max(0, decode_skip - 1)
    counted = [max(1, sum(length > step + 1 for length in lengths)) for step in range(first, steps)]
    sources = Sources({}, {}, (given_out,), decode_skip, tokens=0)
    assert sources.decoded(given_out) == (sum(range(first + 1, steps + 1)), sum(counted))


@given(
    change=st.sampled_from(
        ["none", "time", "fact", "counter", "clock", "unclocked", "phase", "length", "warmup", "batch"]
    ),
    decode_skip=st.integers(1, 4),
)
def test_readings_taken_over_from_a_run_of_the_same_work_are_the_runs_own(change: str, decode_skip: int) -> None:
    one = RunRecord(
        run_id="r", attempt_id="a", attempt_number=1, exit_code=0, counters={**SEED, "decode_ns": 7},
        facts=SEED_FACTS, generations=(generation(0, warmup=True), generation(1)),
    )  # fmt: skip
    later = one.generations[1]
    changes: dict[str, dict[str, object]] = {
        "none": {},
        "time": {"generations": (one.generations[0], later.model_copy(update={"step_ns": (9_000_000,) * 31}))},
        "fact": {"facts": {**SEED_FACTS, "weight_bytes": 77}},
        "counter": {"counters": {**one.counters, "htod_bytes": 5}},
        "clock": {"counters": {**one.counters, "decode_ns": 8}},
        "unclocked": {"counters": SEED},
        "phase": {"generations": (one.generations[0], later.model_copy(update={"counters": {"decode": {"hits": 1}}}))},
        "length": {"generations": (one.generations[0], later.model_copy(update={"ids": later.ids[:-1]}))},
        "warmup": {"generations": (one.generations[0].model_copy(update={"warmup": False}), later)},
        "batch": {
            "generations": (
                one.generations[0],
                later.model_copy(update={"further": (SequenceTokens(ids=(), stop_reason=None),)}),
            )
        },
    }
    other = one.model_copy(update=changes[change])
    assert same_work(one, other) is (change in ("none", "time", "clock"))
    if same_work(one, other):
        assert readings(other, decode_skip, readings(one, decode_skip)) == readings(other, decode_skip)
