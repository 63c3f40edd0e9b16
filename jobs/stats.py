"""Time: the ratio of two arms inside blocks, its interval, and the smallest change that could have been seen.

A block holds both arms in balanced order on one card, so what a block shares (card, clocks, heat, a linear drift)
cancels in its ratio. The unit of evidence is therefore the block, never the run or the step: samples inside a run are
correlated. Interval: Student t over the blocks' log ratios. Smallest detectable change: what a two-sided test at this
confidence would find with probability `POWER`, given the spread that the blocks showed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from jobs.model import Missing, Reading
from jobs.verdict import TimeClass

CONFIDENCE = 0.99
POWER = 0.8
MIN_BLOCKS = 4
"""Below four blocks the 99 % multiplier of Student t is 9.9 or more: wider than anything it should decide."""

RELATIVE_FLOOR = 0.01
"""A ratio nearer to 1 than this is no change that anybody should act on."""


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """One metric in one block: one value a run, for each arm."""

    base: tuple[float, ...]
    head: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """head / base over blocks; interval and smallest detectable change need two blocks or more."""

    blocks: int
    ratio: Reading
    low: Reading
    high: Reading
    smallest_detectable: Reading


def paired_ratio(blocks: Sequence[BlockTimes]) -> PairedRatio:
    """Geometric mean of the blocks' ratios with its interval. Values must be positive; empty sides are left out."""
    logs = sorted(_log_ratio(block) for block in blocks if block.base and block.head)
    n = len(logs)
    if n == 0:
        nothing = Missing(missing="no block holds both arms")
        return PairedRatio(0, nothing, nothing, nothing, nothing)
    mean = math.fsum(logs) / n
    if n == 1:
        alone = Missing(missing="one block: no noise can be told from it")
        return PairedRatio(1, math.exp(mean), alone, alone, alone)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / (n - 1) / n)
    wide = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2))
    reach = (wide + float(stdtrit(n - 1, POWER))) * error
    return PairedRatio(
        n,
        math.exp(mean),
        math.exp(mean - wide * error),
        math.exp(mean + wide * error),
        math.expm1(reach) if reach < 700 else Missing(missing="the blocks disagree beyond any use"),
    )


def classify(pair: PairedRatio, null: PairedRatio | None, *, lower_is_better: bool) -> tuple[TimeClass, str]:
    """BETTER, WORSE, SAME or UNDECIDED, and why.

    WORSE or BETTER need an interval clear of 1 and a ratio beyond the floor; SAME an interval within the floor. A null
    arm whose own interval is clear of 1 shows that blocks differ for reasons outside the code: nothing is decided then.
    """
    low, high, ratio = pair.low, pair.high, pair.ratio
    if pair.blocks == 0 or isinstance(ratio, Missing):
        return "NOT_MEASURED", "no block holds both arms"
    if pair.blocks < MIN_BLOCKS or isinstance(low, Missing) or isinstance(high, Missing):
        return "UNDECIDED", f"{pair.blocks} block{'s' * (pair.blocks > 1)}: at least {MIN_BLOCKS} are needed to decide"
    if null and _is_clear_of_one(null):
        return "UNDECIDED", "the null arm, base against itself, moved as well: the host or card is not steady"
    note = "" if null else "no null arm: unsteadiness of the host would not show"
    slower, faster = 1 + RELATIVE_FLOOR, 1 / (1 + RELATIVE_FLOOR)
    if low > 1 and ratio >= slower:
        return ("WORSE" if lower_is_better else "BETTER"), note
    if high < 1 and ratio <= faster:
        return ("BETTER" if lower_is_better else "WORSE"), note
    if low >= faster and high <= slower:
        return "SAME", note
    return "UNDECIDED", f"the interval holds both no change and more than {RELATIVE_FLOOR:.0%}"


def _is_clear_of_one(pair: PairedRatio) -> bool:
    if isinstance(pair.low, Missing) or isinstance(pair.high, Missing):
        return False
    return pair.low > 1 or pair.high < 1


def _log_ratio(block: BlockTimes) -> float:
    return _mean_log(block.head) - _mean_log(block.base)


def _mean_log(values: Sequence[float]) -> float:
    return math.fsum(math.log(value) for value in values) / len(values)
