"""Paired ratios in two stages: cancellation, intervals with known answers, and what too little data may say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import nct

from jobs.model import Missing
from jobs.stats import (
    LEAST_PLANNED,
    MIN_BLOCKS,
    MIN_SCREENING,
    BlockTimes,
    Decision,
    PairedRatio,
    TimeEvidence,
    decide,
    paired_ratio,
    screening_blocks,
)

STEADY = (1.10, 1.11, 1.09, 1.10)


def blocks(*ratios: float, base: float = 20.0) -> tuple[BlockTimes, ...]:
    return tuple(BlockTimes((base, base), (base * ratio, base * ratio)) for ratio in ratios)


def decided(
    *ratios: float,
    screen: tuple[float, ...] | None = None,
    null: tuple[float, ...] | None = None,
    rows: int = 1,
    lower_is_better: bool = True,
) -> Decision:
    """Deciding blocks of these ratios; the screening ones are the first of them unless given."""
    control = None if null is None else blocks(*null)
    evidence = TimeEvidence(blocks(*(screen or ratios[:MIN_SCREENING])), blocks(*ratios), control, rows)
    return decide(evidence, lower_is_better=lower_is_better)


def number(value: object) -> float:
    assert isinstance(value, float)
    return value


def test_no_common_block_is_not_measured() -> None:
    empty = (BlockTimes((1.0,), ()),)
    decision = decide(TimeEvidence(empty, empty), lower_is_better=True)
    assert decision.klass == "NOT_MEASURED"
    assert decision.pair.blocks == 0
    assert isinstance(decision.pair.ratio, Missing)


def test_one_block_gives_a_ratio_and_decides_nothing() -> None:
    decision = decide(TimeEvidence((), blocks(1.5)), lower_is_better=True)
    assert number(decision.pair.ratio) == pytest.approx(1.5)
    assert isinstance(decision.pair.low, Missing)
    assert isinstance(decision.pair.smallest_detectable, Missing)
    assert decision.klass == "UNDECIDED"
    assert "1 block:" in decision.why


@pytest.mark.parametrize("count", range(1, MIN_BLOCKS))
def test_too_few_fresh_blocks_decide_nothing_however_equal_they_are(count: int) -> None:
    decision = decided(*[1.5] * count, screen=(1.5,) * 20)
    assert decision.klass == "UNDECIDED"
    assert decision.pair.blocks == 20 + count  # what there is is shown


@pytest.mark.parametrize(("planned", "screening"), [(24, 8), (LEAST_PLANNED, MIN_SCREENING), (5, 1), (1, 0)])
def test_a_third_of_the_blocks_screens(planned: int, screening: int) -> None:
    assert screening_blocks(planned) == screening
    enough = screening >= MIN_SCREENING and planned - screening >= MIN_BLOCKS
    assert enough == (planned >= LEAST_PLANNED)


def test_the_interval_is_students_over_the_blocks() -> None:
    """Four blocks with log ratios 0, 0.01, 0.02, 0.03: mean 0.015, standard error 0.0064550, t(3) at 99 % 5.8409."""
    pair = paired_ratio(blocks(*(math.exp(x) for x in (0.0, 0.01, 0.02, 0.03))))
    assert number(pair.ratio) == pytest.approx(math.exp(0.015))
    assert number(pair.low) == pytest.approx(math.exp(0.015 - 5.840909 * 0.0064549722), rel=1e-6)
    assert number(pair.high) == pytest.approx(math.exp(0.015 + 5.840909 * 0.0064549722), rel=1e-6)


def test_the_smallest_detectable_change_is_found_with_its_probability() -> None:
    """By scipy's noncentral t: a shift so far beyond the floor puts the statistic beyond t(3) at 99 % in 80 %."""
    pair = paired_ratio(blocks(*(math.exp(x) for x in (0.0, 0.01, 0.02, 0.03))), floor=0.01)
    beyond = math.log1p(number(pair.smallest_detectable)) - math.log1p(0.01)
    assert nct.sf(5.840909, 3, beyond / 0.0064549722) == pytest.approx(0.8, abs=1e-6)
    assert number(paired_ratio(blocks(*[1.0] * 4), floor=0.03).smallest_detectable) == pytest.approx(0.03)


def test_the_interval_shares_out_the_rate_of_false_alarms_over_all_rows() -> None:
    """1 % over 50 rows: 0.02 % each, two-sided t(15) of 4.8800; over 1 row t(15) at 99 % is 2.9467."""
    ratios = [math.exp(0.01 * (k % 4)) for k in range(16)]
    one, fifty = decided(*ratios).pair, decided(*ratios, rows=50).pair
    width = math.log(number(fifty.high) / number(fifty.low)) / math.log(number(one.high) / number(one.low))
    assert width == pytest.approx(4.8800 / 2.946713, rel=1e-4)


def test_a_linear_drift_cancels_in_a_balanced_block() -> None:
    """ABBA at times 1, 2, 3, 4 per cent of drift: both arms have the same mean up to second order."""
    drift = [20 * 1.01**step for step in range(4)]
    pair = paired_ratio([BlockTimes((drift[0], drift[3]), (drift[1], drift[2]))] * 4)
    assert number(pair.ratio) == pytest.approx(1.0, abs=1e-12)


def test_blocks_on_slow_and_fast_cards_do_not_blur_the_ratio() -> None:
    each = tuple(b for scale in (10.0, 20.0, 40.0, 80.0) for b in blocks(1.1, base=scale))
    decision = decide(TimeEvidence(each[:2], each), lower_is_better=True)
    assert number(decision.pair.low) == pytest.approx(1.1)
    assert decision.klass == "WORSE"


@pytest.mark.parametrize(
    ("ratios", "lower_is_better", "expected"),
    [
        (STEADY, True, "WORSE"),
        (STEADY, False, "BETTER"),
        ((0.90, 0.91, 0.89, 0.90), True, "BETTER"),
        ((0.90, 0.91, 0.89, 0.90), False, "WORSE"),
        ((1.000, 1.001, 0.999, 1.000), True, "SAME"),
        ((1.004, 1.005, 1.005, 1.004), True, "SAME"),  # steady, and too small to matter
        ((1.012, 1.016, 1.014, 1.010), True, "UNDECIDED"),  # clear of 1, not of the floor
        ((0.80, 1.30, 0.95, 1.10), True, "UNDECIDED"),
    ],
)
def test_field_21_direction_decides_what_is_worse(
    ratios: tuple[float, ...], lower_is_better: bool, expected: str
) -> None:
    assert decided(*ratios, lower_is_better=lower_is_better).klass == expected


@pytest.mark.parametrize("screen", [(1.0, 1.001), (0.90, 0.91), (1.005, 1.006), (1.1,), (1.02, 1.30)])
def test_what_the_screen_did_not_show_is_not_decided(screen: tuple[float, ...]) -> None:
    """Not there, the other way, below the floor, one block, and moved by noise alone."""
    decision = decided(*STEADY, screen=screen)
    assert (decision.klass, decision.pair.blocks) == ("UNDECIDED", 4)
    assert "screen" in decision.why


def test_what_only_the_screen_showed_is_not_decided_either() -> None:
    decision = decided(1.000, 1.001, 0.999, 1.000, screen=(1.5, 1.5))
    assert decision.klass == "SAME"
    assert number(decision.pair.ratio) == pytest.approx(1.0, abs=1e-3)


def test_a_null_arm_that_moves_takes_the_decision_away() -> None:
    assert decided(*STEADY, null=(1.05, 1.06, 1.05, 1.06)).klass == "UNDECIDED"
    steady = decided(*STEADY, null=(1.00, 1.01, 0.99, 1.00))
    assert (steady.klass, steady.why) == ("WORSE", "")
    assert "no null arm" in decided(*STEADY).why


def test_a_null_arm_off_by_less_than_the_floor_is_steady() -> None:
    """A tenth of a per cent, ever the same: clear of 1, and nothing that anybody should act on."""
    assert decided(*STEADY, null=(1.001, 1.001, 1.001, 1.001)).klass == "WORSE"


def test_the_floor_of_a_row_bounds_what_is_found() -> None:
    evidence = TimeEvidence(blocks(*STEADY), blocks(*STEADY), floor=0.2)
    assert decide(evidence, lower_is_better=True).klass == "SAME"


ratio_lists = st.lists(st.floats(0.5, 2.0), min_size=4, max_size=12)


@given(ratios=ratio_lists)
def test_order_of_blocks_changes_nothing(ratios: list[float]) -> None:
    assert decided(*ratios, screen=(1.1, 1.1)) == decided(*reversed(ratios), screen=(1.1, 1.1))


@given(ratios=ratio_lists)
def test_the_interval_holds_the_ratio(ratios: list[float]) -> None:
    pair: PairedRatio = paired_ratio(blocks(*ratios))
    assert number(pair.low) <= number(pair.ratio) <= number(pair.high)
    assert number(pair.smallest_detectable) >= 0


@given(ratios=ratio_lists)
def test_swapping_the_arms_turns_worse_into_better(ratios: list[float]) -> None:
    """The floor, the screen and the interval are the same on both sides."""
    turned = {"WORSE": "BETTER", "BETTER": "WORSE"}
    there, back = decided(*ratios).klass, decided(*(1 / ratio for ratio in ratios)).klass
    assert back == turned.get(there, there)
