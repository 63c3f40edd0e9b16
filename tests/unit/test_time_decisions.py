"""The simulation of time rows: what it plants is there, and its rates hold on fewer sweeps than its record has."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.time_decisions import BLOCKS, METRICS, Model, Times, by_arm, judged, keeps, measure, sweep, upper
from jobs.model import Reading
from jobs.order import arm_order
from jobs.stats import BlockTimes, paired_ratio, screening_blocks


def pairs(times: Times) -> list[BlockTimes]:
    return [BlockTimes(tuple(block[0]), tuple(block[1])) for block in times.tolist()]


def number(reading: Reading) -> float:
    assert isinstance(reading, float)
    return reading


def test_the_default_budget_is_eight_blocks_that_screen_and_sixteen_that_decide() -> None:
    assert (screening_blocks(BLOCKS), BLOCKS - screening_blocks(BLOCKS)) == (8, 16)


def test_each_block_begins_one_arm_further_on() -> None:
    orders = ["".join(arm_order("abn", "ABBA", 1, seed="", block=block)) for block in range(4)]
    assert orders == ["abnnba", "bnaanb", "nabban", "abnnba"]
    assert "".join(arm_order("ab", "ABBA", 2, seed="", block=1)) == "baabbaab"


def test_runs_go_to_the_arm_that_ran_them() -> None:
    """Block 1 runs b n a a n b: its first and last run are head's."""
    logs = np.arange(6.0)[:, None]
    assert by_arm(logs, 1)[:, :, 0].tolist() == [[2.0, 3.0], [0.0, 5.0], [1.0, 4.0]]


def test_noise_has_the_deviation_that_it_is_named_for_and_half_of_a_run_is_shared() -> None:
    model = Model(0.02, drift=0.0, first_run=0.0, ramp=0.0)
    generator = np.random.default_rng(1)
    runs = np.concatenate([sweep(model, generator).reshape(-1, METRICS) for _ in range(100)])
    assert runs.std() == pytest.approx(0.02 * np.sqrt(2), rel=0.1)
    assert np.corrcoef(runs[:, 0], runs[:, 1])[0, 1] == pytest.approx(0.5, abs=0.15)


def test_disturbances_alone_reach_five_and_one_per_cent() -> None:
    quiet = Model(0.0)
    times = sweep(quiet, np.random.default_rng(1))
    assert times.shape == (BLOCKS, 3, 2, METRICS)
    first, second = times[4, 1, :, 0]  # block 4 runs b n a a n b: head's first run begins it
    assert first - second > 0.05
    assert judged(times, 0).klass in ("SAME", "UNDECIDED")


@pytest.mark.parametrize("sigma", [0.005, 0.02])
def test_clean_sweeps_raise_no_alarm_and_a_slowdown_is_found(sigma: float) -> None:
    row = measure(Model(sigma), sweeps=60, seed=3)
    assert row["clean_sweeps_alarmed"] == 0
    assert row["slowdown_found"] >= 0.95
    assert row["printed_by_true"] == pytest.approx(1, abs=0.2)


def test_the_simulation_catches_a_rule_that_looks_at_each_row_by_itself() -> None:
    """All 24 blocks at 99 %, beyond the floor at the point alone: right for one row, wrong for a sweep of fifty."""
    generator = np.random.default_rng(3)
    alarmed = 0
    for _ in range(60):
        times = np.exp(sweep(Model(0.05), generator))
        ratios = (paired_ratio(pairs(times[..., metric])) for metric in range(METRICS))
        alarmed += any(
            not number(r.low) <= 1 <= number(r.high) and not 1 / 1.01 < number(r.ratio) < 1.01 for r in ratios
        )
    assert alarmed / 60 > 0.05


def test_a_record_that_breaks_a_bound_is_told() -> None:
    kept = {"sigma": 0.02, "alarmed_upper_95": 0.0015, "slowdown_found": 0.99, "printed_by_true": 0.9}
    assert keeps(kept)
    assert not keeps({**kept, "alarmed_upper_95": upper(13, 2000)})
    assert not keeps({**kept, "slowdown_found": 0.94})
    assert not keeps({**kept, "printed_by_true": 1.3})


def test_the_bound_is_clopper_and_pearsons() -> None:
    """0 of 2,000: 1 - 0.05 ** (1 / 2000)."""
    assert upper(0, 2000) == pytest.approx(1 - 0.05 ** (1 / 2000))
    assert upper(12, 2000) < 0.01 < upper(13, 2000)
    assert upper(5, 5) == 1.0
