"""How often the judge of time is wrong, by seeded simulation: alarms, slowdowns found, smallest detectable change.

Each sweep has 50 time metrics and the default blocks, 8 that screen and 16 that decide, of base, head and a null arm in
the order that `jobs.order` plans. A run's log time is the metric's own noise, as much again that all metrics of the run
share (both Student t with 3 degrees of freedom, scaled so that each has the named standard deviation), a drift of 5 %
over the sweep, a first run of each block that is 1 % slow, and clocks that ramp up: 5 % slow at the start of the sweep
and of each block, gone with a time constant of two runs. Rows are judged by `jobs.stats`.

    python -m benchmarks.time_decisions [--sweeps 2000] [--seed 7] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import beta

from jobs.model import Missing
from jobs.order import arm_order
from jobs.stats import FALSE_ALARMS, POWER, BlockTimes, Decision, TimeEvidence, decide, screening_blocks

ARMS = ("base", "head", "null")
METRICS = 50
BLOCKS = 24
SIGMAS = (0.005, 0.02, 0.05)
SLOWDOWN = 0.10
DRIFT, FIRST_RUN, RAMP, RAMP_RUNS = 0.05, 0.01, 0.05, 2.0
FREEDOM = 3
BOUND = 0.95

Times = npt.NDArray[np.float64]
"""Log times of one sweep: block, arm, run of the arm in the block, metric."""


@dataclass(frozen=True, slots=True)
class Model:
    """What disturbs a sweep; `sigma` of one run, of log time, own and shared alike."""

    sigma: float
    drift: float = DRIFT
    first_run: float = FIRST_RUN
    ramp: float = RAMP


def main() -> int:
    """Simulate, print a line for each sigma, and write the record where asked. Exit 1 where a bound is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    rows = []
    for sigma in SIGMAS:
        began = time.perf_counter()
        rows.append(measure(Model(sigma), arguments.sweeps, arguments.seed))
        rows[-1]["wall_s"] = round(time.perf_counter() - began, 1)
        print(json.dumps(rows[-1]), flush=True)
    held = [keeps(row) for row in rows]
    record = {"seed": arguments.seed, "sweeps": arguments.sweeps, "metrics": METRICS, "blocks": BLOCKS, "rows": rows}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0 if all(held) else 1


def measure(model: Model, sweeps: int, seed: int) -> dict[str, Any]:
    """Clean sweeps, then one metric of each slowed: rates, and the printed smallest change against the true one."""
    generator = np.random.default_rng([seed, round(model.sigma * 1e6)])
    alarmed, printed, slowed = 0, [], []
    for _ in range(sweeps):
        times = sweep(model, generator)
        decisions = [judged(times, metric) for metric in range(METRICS)]
        alarmed += any(decision.klass in ("WORSE", "BETTER") for decision in decisions)
        printed += [d.pair.smallest_detectable for d in decisions]
        slowed.append(times[..., :1])
    figures = [figure for figure in printed if not isinstance(figure, Missing)]
    smallest = statistics.median(figures)
    true = true_smallest(lambda change: found(slowed, change))
    at = found(slowed, SLOWDOWN)
    return {
        "sigma": model.sigma,
        "clean_sweeps_alarmed": alarmed,
        "alarmed_upper_95": upper(alarmed, sweeps),
        "slowdown_found": at,
        "smallest_printed": smallest,
        "smallest_true": true,
        "printed_by_true": smallest / true,
        "found_at_printed": found(slowed, smallest),
    }


def keeps(row: dict[str, Any]) -> bool:
    """Whether a line keeps what is promised: alarms, slowdowns found at a sigma of 2 % or less, and the figure."""
    quiet = row["alarmed_upper_95"] <= FALSE_ALARMS
    finds = row["sigma"] > 0.02 or row["slowdown_found"] >= BOUND
    return bool(quiet and finds and abs(row["printed_by_true"] - 1) <= 0.2)


def sweep(model: Model, generator: np.random.Generator) -> Times:
    """Log times of a sweep in which no arm differs from another."""
    runs = len(ARMS) * 2
    place = np.arange(BLOCKS * runs).reshape(BLOCKS, runs)
    shared = noise(generator, model.sigma, (BLOCKS, runs, 1))
    own = noise(generator, model.sigma, (BLOCKS, runs, METRICS))
    in_block = np.arange(runs)
    common = np.log1p(model.drift) * generator.choice((-1, 1)) * place / place.max()
    common = common + model.ramp * (np.exp(-place / RAMP_RUNS) + np.exp(-in_block / RAMP_RUNS))
    common = common + model.first_run * (in_block == 0)
    logs = common[..., None] + shared + own
    return np.stack([by_arm(logs[block], block) for block in range(BLOCKS)])


def noise(generator: np.random.Generator, sigma: float, shape: tuple[int, ...]) -> Times:
    """Student t of standard deviation `sigma`: with three degrees of freedom its own variance is 3."""
    drawn: Times = generator.standard_t(FREEDOM, shape) * (sigma / np.sqrt(FREEDOM / (FREEDOM - 2)))
    return drawn


def by_arm(logs: Times, block: int) -> Times:
    """One block's runs in the order of their arms instead of the order in which they ran."""
    order = np.array(arm_order(ARMS, "ABBA", 1, seed="", block=block))
    return np.stack([logs[order == arm] for arm in ARMS])


def judged(times: Times, metric: int, change: float = 0.0) -> Decision:
    """One metric of a sweep, judged, with head slowed by `change`."""
    values = np.exp(times[..., metric])
    values[:, 1] *= 1 + change
    first = screening_blocks(BLOCKS)
    head, null = ([BlockTimes(tuple(b[0]), tuple(b[arm])) for b in values.tolist()] for arm in (1, 2))
    evidence = TimeEvidence(tuple(head[:first]), tuple(head[first:]), tuple(null[first:]), rows=METRICS)
    return decide(evidence, lower_is_better=True)


def found(sweeps: list[Times], change: float) -> float:
    """In which share of sweeps the slowed metric reads WORSE."""
    return sum(judged(times, 0, change).klass == "WORSE" for times in sweeps) / len(sweeps)


def true_smallest(share: Callable[[float], float]) -> float:
    """The slowdown that is found with probability `POWER`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) >= POWER else (middle, high)
    return (low + high) / 2


def upper(count: int, trials: int) -> float:
    """Clopper and Pearson's one-sided upper bound of a share, at 95 %."""
    return 1.0 if count == trials else float(beta.ppf(BOUND, count + 1, trials - count))


if __name__ == "__main__":
    raise SystemExit(main())
