"""Time: the ratio of two arms inside blocks, decided in two stages, with its interval and smallest detectable change.

A block holds both arms in balanced order on one card, so what a block shares (card, clocks, heat, a linear drift)
cancels in its ratio. The unit of evidence is therefore the block, never the run or the step: samples inside a run are
correlated. The first blocks screen, the others alone decide, so that no figure is used twice. Interval: Student t over
the deciding blocks' log ratios, at a level shared out over all time rows of a sweep (Bonferroni, which holds however
the rows hang together). `benchmarks.time_decisions` measures what this finds, and finds in error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from scipy.special import nctdtrinc, stdtrit

from jobs.model import Missing, Reading
from jobs.verdict import TimeClass

FALSE_ALARMS = 0.01
"""The largest share of sweeps without any change in which some time row may read BETTER or WORSE."""

CONFIDENCE = 0.99
"""Of the interval of what is looked at by itself: a null arm, or blocks too few to decide."""

POWER = 0.8
SCREEN_CONFIDENCE = 0.9
SCREENING_SHARE = 3
"""One block in three screens: 8 of the default 24, and 16 decide."""

MIN_SCREENING = 2
MIN_BLOCKS = 4
"""Below four deciding blocks the 99 % multiplier of Student t is 9.9 or more: wider than anything it should decide."""

LEAST_PLANNED = 6
"""The fewest blocks of which `MIN_SCREENING` screen and `MIN_BLOCKS` decide."""

RELATIVE_FLOOR = 0.01
"""A ratio nearer to 1 than this is no change that anybody should act on."""

BEYOND_USE = "the blocks disagree beyond any use"
AWAITS = "the blocks that screen moved, and fresh ones alone may decide"

LOG_LIMIT = 700.0
"""Beyond it an exponential leaves the range of a float."""


_NOTHING = Missing(missing="no block holds both arms")
_ALONE = Missing(missing="one block: no noise can be told from it")
_BEYOND = Missing(missing=BEYOND_USE)


class BlockTimes(NamedTuple):
    """One metric in one block: one value a run, for each arm."""

    base: tuple[float, ...]
    head: tuple[float, ...]


class PairedRatio(NamedTuple):
    """head / base over blocks; interval and smallest detectable change need two blocks or more."""

    blocks: int
    ratio: Reading
    low: Reading
    high: Reading
    smallest_detectable: Reading


@dataclass(frozen=True, slots=True)
class TimeEvidence:
    """One metric of two arms: blocks that screen, fresh blocks that decide, and base's null arm in the latter.

    `null` is None where the sweep has no null arm. `rows`: how many time rows the sweep compares in all. `floor`: the
    relative change below which there is nothing to find.
    """

    screening: tuple[BlockTimes, ...]
    deciding: tuple[BlockTimes, ...]
    null: tuple[BlockTimes, ...] | None = None
    rows: int = 1
    floor: float = RELATIVE_FLOOR


@dataclass(frozen=True, slots=True)
class ClockedBlocks:
    """One metric of two arms with the clock that it ran at, run by run: time, time times clock, and clock."""

    times: tuple[BlockTimes, ...]
    cycles: tuple[BlockTimes, ...]
    clocks: tuple[BlockTimes, ...]


@dataclass(frozen=True, slots=True)
class Decision:
    """What the evidence comes to and why; `pair` is of the deciding blocks, or of all where they are too few."""

    klass: TimeClass
    why: str
    pair: PairedRatio
    null: PairedRatio | None


def screening_blocks(planned: int) -> int:
    """How many of a cell's first blocks screen; the others decide."""
    return planned // SCREENING_SHARE


def decide(evidence: TimeEvidence, *, lower_is_better: bool) -> Decision:
    """BETTER, WORSE, SAME or UNDECIDED.

    WORSE and BETTER need the whole interval of the deciding blocks beyond the floor and screening blocks that moved the
    same way; SAME needs the whole interval within the floor. A null arm beyond the floor shows that blocks differ for
    reasons outside the code: nothing is decided then.
    """
    screen, fresh = evidence.screening, evidence.deciding
    floor = evidence.floor
    null = None if evidence.null is None else paired_ratio(evidence.null, floor=floor)
    pair = paired_ratio(fresh, confidence=1 - FALSE_ALARMS / evidence.rows, floor=floor)
    if pair.blocks < MIN_BLOCKS:
        every = paired_ratio((*screen, *fresh), floor=floor)
        if every.blocks == 0:
            return Decision("NOT_MEASURED", "no block holds both arms", every, null)
        return Decision("UNDECIDED", _too_few(every.blocks), every, null)
    if null and _way(null, floor):
        return Decision("UNDECIDED", "the null arm, base against itself, moved as well", pair, null)
    note = "" if null else "no null arm: unsteadiness of the host would not show"
    if null and isinstance(null.low, Missing):
        few = f"{null.blocks} block{'s' * (null.blocks != 1)}"
        note = f"the null arm gave times in {few} of those that decide: unsteadiness of the host would not show"
    way = _way(pair, floor)
    if way and _screened(screen, floor) != way:
        return Decision("UNDECIDED", "the blocks that screen did not show it", pair, null)
    if way:
        return Decision("WORSE" if (way > 0) == lower_is_better else "BETTER", note, pair, null)
    if _within(pair, floor):
        return Decision("SAME", note, pair, null)
    return Decision("UNDECIDED", f"the interval holds changes both below and above {floor:.2g}", pair, null)


def screen(evidence: TimeEvidence, *, lower_is_better: bool) -> Decision:
    """What the blocks that screen come to where none has been run yet to decide: SAME or UNDECIDED, never an alarm.

    SAME needs the whole interval within the floor. `why` is `AWAITS` where they moved, so that fresh blocks should be
    run.
    """
    pair = paired_ratio(evidence.screening, confidence=1 - FALSE_ALARMS / evidence.rows, floor=evidence.floor)
    if pair.blocks == 0:
        return Decision("NOT_MEASURED", "no block holds both arms", pair, None)
    if way := _screened(evidence.screening, evidence.floor):
        slower = (way > 0) == lower_is_better
        return Decision("UNDECIDED", f"{AWAITS}: it seems {'slower' if slower else 'faster'}", pair, None)
    if _within(pair, evidence.floor):
        return Decision("SAME", "", pair, None)
    return Decision("UNDECIDED", "the blocks that screen show nothing that fresh ones should decide", pair, None)


def clock_effect(clocked: ClockedBlocks, floor: float) -> str:
    """Why a difference in time is one of the clock alone, in words; empty where it is not.

    The clock's own ratio must lie beyond the floor, the other way than the time's, while that of the cycles (time times
    clock) does not and is at most half as far from 1: a clock that merely wavers excuses nobody.
    """
    time, cycles, clock = (
        paired_ratio(blocks, floor=floor) for blocks in (clocked.times, clocked.cycles, clocked.clocks)
    )
    ratios = [pair.ratio for pair in (time, cycles, clock) if not isinstance(pair.ratio, Missing)]
    if len(ratios) < 3 or clock.blocks < time.blocks:
        return ""
    way = 1 if ratios[0] > 1 else -1
    stands = _way(cycles, floor) == 0 and abs(math.log(ratios[1])) <= abs(math.log(ratios[0])) / 2
    if _way(clock, floor) != -way or not stands:
        return ""
    told = f"{ratios[0]:.4g} times the time at {ratios[2]:.4g} times the SM clock is {ratios[1]:.4g} times the cycles"
    return f"a clock effect: {told}"


def paired_ratio(
    blocks: Sequence[BlockTimes], *, confidence: float = CONFIDENCE, floor: float = RELATIVE_FLOOR
) -> PairedRatio:
    """Geometric mean of the blocks' ratios with its interval. Values must be positive; empty sides are left out.

    The smallest detectable change is the slowdown whose interval lies beyond `floor` with probability `POWER`, by the
    noncentral t distribution and the spread that the blocks showed.
    """
    logs = sorted(_log_ratio(block) for block in blocks if block.base and block.head)
    n = len(logs)
    if n == 0:
        return PairedRatio(0, _NOTHING, _NOTHING, _NOTHING, _NOTHING)
    mean = math.fsum(logs) / n
    if n == 1:
        return PairedRatio(1, math.exp(mean), _ALONE, _ALONE, _ALONE)
    error = _deviation(logs) / math.sqrt(n)
    wide = _wide(n, confidence)
    return PairedRatio(
        n,
        math.exp(mean),
        math.exp(mean - wide * error),
        math.exp(mean + wide * error) if mean + wide * error < LOG_LIMIT else _BEYOND,
        _detectable(error, n, wide, floor),
    )


def spread(blocks: Sequence[BlockTimes]) -> float | None:
    """Standard deviation of the log ratios of blocks that hold both arms; None below two of them."""
    logs = sorted(_log_ratio(block) for block in blocks if block.base and block.head)
    return _deviation(logs) if len(logs) > 1 else None


def detectable(sigma: float, blocks: int, *, rows: int = 1, floor: float = RELATIVE_FLOOR) -> Reading:
    """The slowdown that so many deciding blocks find with probability `POWER`, by the spread of their log ratios.

    `rows`: how many time rows the sweep compares in all.
    """
    return _detectable(sigma / math.sqrt(blocks), blocks, _wide(blocks, 1 - FALSE_ALARMS / rows), floor)


def _wide(n: int, confidence: float) -> float:
    """Half the width of an interval over `n` blocks, in standard errors: Student's t."""
    return float(stdtrit(n - 1, 0.5 + confidence / 2))


def _detectable(error: float, n: int, wide: float, floor: float) -> Reading:
    reach = math.log1p(floor) + float(nctdtrinc(n - 1, 1 - POWER, wide)) * error
    return math.expm1(reach) if reach < LOG_LIMIT else _BEYOND


def _deviation(logs: Sequence[float]) -> float:
    mean = math.fsum(logs) / len(logs)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / (len(logs) - 1))


def _screened(screening: Sequence[BlockTimes], floor: float) -> int:
    """Which way the first blocks moved: 1 slower, -1 faster, 0 not so that it is worth deciding."""
    pair = paired_ratio(screening, confidence=SCREEN_CONFIDENCE)
    if pair.blocks < MIN_SCREENING or isinstance(pair.ratio, Missing):
        return 0
    return _way(pair, 0.0) if not 1 / (1 + floor) < pair.ratio < 1 + floor else 0


def _way(pair: PairedRatio, floor: float) -> int:
    """1 where the whole interval is above the floor, -1 where it is below, else 0."""
    if not isinstance(pair.low, Missing) and pair.low > 1 + floor:
        return 1
    return -1 if not isinstance(pair.high, Missing) and pair.high < 1 / (1 + floor) else 0


def _within(pair: PairedRatio, floor: float) -> bool:
    if isinstance(pair.low, Missing) or isinstance(pair.high, Missing):
        return False
    return pair.low >= 1 / (1 + floor) and pair.high <= 1 + floor


def _too_few(blocks: int) -> str:
    return f"{blocks} block{'s' * (blocks > 1)}: at least {LEAST_PLANNED} are needed to screen and to decide"


def _log_ratio(block: BlockTimes) -> float:
    return _mean_log(block.head) - _mean_log(block.base)


def _mean_log(values: Sequence[float]) -> float:
    return math.fsum(math.log(value) for value in values) / len(values)
