"""Paired ratios: cancellation inside blocks, intervals with known answers, and what too little data may say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.model import Missing
from jobs.stats import MIN_BLOCKS, BlockTimes, PairedRatio, classify, paired_ratio


def blocks(*ratios: float, base: float = 20.0) -> list[BlockTimes]:
    return [BlockTimes((base, base), (base * ratio, base * ratio)) for ratio in ratios]


def number(value: object) -> float:
    assert isinstance(value, float)
    return value


def test_no_common_block_is_not_measured() -> None:
    pair = paired_ratio([BlockTimes((1.0,), ())])
    assert pair.blocks == 0
    assert isinstance(pair.ratio, Missing)
    assert classify(pair, None, lower_is_better=True)[0] == "NOT_MEASURED"


def test_one_block_gives_a_ratio_and_decides_nothing() -> None:
    pair = paired_ratio(blocks(1.5))
    assert number(pair.ratio) == pytest.approx(1.5)
    assert isinstance(pair.low, Missing)
    assert isinstance(pair.smallest_detectable, Missing)
    klass, why = classify(pair, None, lower_is_better=True)
    assert klass == "UNDECIDED"
    assert "1 block:" in why


@pytest.mark.parametrize("count", range(2, MIN_BLOCKS))
def test_too_few_blocks_decide_nothing_however_equal_they_are(count: int) -> None:
    assert classify(paired_ratio(blocks(*[1.5] * count)), None, lower_is_better=True)[0] == "UNDECIDED"


def test_the_interval_is_students_over_the_blocks() -> None:
    """Four blocks with log ratios 0, 0.01, 0.02, 0.03: mean 0.015, standard error 0.0064550, t(3) at 99 % 5.8409."""
    pair = paired_ratio(blocks(*(math.exp(x) for x in (0.0, 0.01, 0.02, 0.03))))
    assert number(pair.ratio) == pytest.approx(math.exp(0.015))
    assert number(pair.low) == pytest.approx(math.exp(0.015 - 5.840909 * 0.0064549722), rel=1e-6)
    assert number(pair.high) == pytest.approx(math.exp(0.015 + 5.840909 * 0.0064549722), rel=1e-6)
    # t(3) at 80 % one-sided is 0.97847
    assert number(pair.smallest_detectable) == pytest.approx(math.expm1((5.840909 + 0.978472) * 0.0064549722), rel=1e-5)


def test_a_linear_drift_cancels_in_a_balanced_block() -> None:
    """ABBA at times 1, 2, 3, 4 per cent of drift: both arms have the same mean up to second order."""
    drift = [20 * 1.01**step for step in range(4)]
    pair = paired_ratio([BlockTimes((drift[0], drift[3]), (drift[1], drift[2]))] * 4)
    assert number(pair.ratio) == pytest.approx(1.0, abs=1e-12)


def test_blocks_on_slow_and_fast_cards_do_not_blur_the_ratio() -> None:
    pair = paired_ratio([b for scale in (10.0, 20.0, 40.0, 80.0) for b in blocks(1.1, base=scale)])
    assert number(pair.low) == pytest.approx(1.1)
    assert classify(pair, None, lower_is_better=True)[0] == "WORSE"


@pytest.mark.parametrize(
    ("ratios", "lower_is_better", "expected"),
    [
        ((1.10, 1.11, 1.09, 1.10), True, "WORSE"),
        ((1.10, 1.11, 1.09, 1.10), False, "BETTER"),
        ((0.90, 0.91, 0.89, 0.90), True, "BETTER"),
        ((0.90, 0.91, 0.89, 0.90), False, "WORSE"),
        ((1.000, 1.001, 0.999, 1.000), True, "SAME"),
        ((1.004, 1.005, 1.005, 1.004), True, "SAME"),  # steady, and too small to matter
        ((0.80, 1.30, 0.95, 1.10), True, "UNDECIDED"),
    ],
)
def test_field_21_direction_decides_what_is_worse(
    ratios: tuple[float, ...], lower_is_better: bool, expected: str
) -> None:
    assert classify(paired_ratio(blocks(*ratios)), None, lower_is_better=lower_is_better)[0] == expected


def test_a_null_arm_that_moves_takes_the_decision_away() -> None:
    pair = paired_ratio(blocks(1.10, 1.11, 1.09, 1.10))
    moved = paired_ratio(blocks(1.05, 1.06, 1.05, 1.06))
    steady = paired_ratio(blocks(1.00, 1.01, 0.99, 1.00))
    assert classify(pair, moved, lower_is_better=True)[0] == "UNDECIDED"
    assert classify(pair, steady, lower_is_better=True) == ("WORSE", "")
    assert "no null arm" in classify(pair, None, lower_is_better=True)[1]


ratio_lists = st.lists(st.floats(0.5, 2.0), min_size=2, max_size=12)


@given(ratios=ratio_lists)
def test_order_of_blocks_changes_nothing(ratios: list[float]) -> None:
    assert paired_ratio(blocks(*ratios)) == paired_ratio(blocks(*reversed(ratios)))


@given(ratios=ratio_lists)
def test_the_interval_holds_the_ratio(ratios: list[float]) -> None:
    pair: PairedRatio = paired_ratio(blocks(*ratios))
    assert number(pair.low) <= number(pair.ratio) <= number(pair.high)
    assert number(pair.smallest_detectable) >= 0
