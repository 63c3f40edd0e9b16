"""How fast the simulator decodes a model, and in how much memory: resident, and at half the weights by two policies.

Each arm is a fresh child on one BLAS thread, one after another; the first generation loads and decodes the weights and
is left out of the rate. Figures are the simulator's own, of this host: no measure of any card.

    python -m benchmarks.sim_decode --model models/smollm2-135m [--tokens 32] [--generations 4] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine.onnx_load import recorded_digest
from jobs.provenance import own_root, tree_digest

ARMS: dict[str, dict[str, Any]] = {
    "resident": {},
    "half, stable": {"weight_budget": "50%", "policy": "stable"},
    "half, lru": {"weight_budget": "50%", "policy": "lru"},
}
PROMPT_IDS = (504, 3575, 282, 4649, 314)
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Measure, print the record, and write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--prompt-ids", type=int, nargs="+", default=list(PROMPT_IDS))
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--generations", type=int, default=4, help="the first is left out of the rate")
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    if arguments.generations < 2 or arguments.tokens < 2:
        parser.error("at least 2 generations of 2 tokens: the first generation is left out, and rates need steps")
    record = measure(arguments.model.absolute(), arguments.prompt_ids, arguments.tokens, arguments.generations)
    text = json.dumps(record, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0 if all(arm["exit_code"] == 0 for arm in record["arms"].values()) else 1


def measure(model: Path, prompt_ids: list[int], tokens: int, generations: int) -> dict[str, Any]:
    """The record: one entry an arm, and what it was measured on."""
    load_before = os.getloadavg()
    arms = {}
    for name, config in ARMS.items():
        request = {
            "protocol": 1,
            "model": str(model),
            "prompt_ids": prompt_ids,
            "tokens": tokens,
            "generations": generations,
            "ignore_eos": True,
            "device": "sim",
            "config": config,
        }
        arms[name] = summarise(*run_child(request), config)
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": {"name": model.name, "digest": recorded_digest(model)},
        "engine_digest": tree_digest(own_root()),
        "prompt_ids": prompt_ids,
        "tokens": tokens,
        "generations": generations,
        "blas_threads": 1,
        "host": host_facts(),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "arms": arms,
    }


def run_child(request: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """One run in a process of its own; its exit code and its lines."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "request.json"
        path.write_text(json.dumps(request))
        command = [sys.executable, "-P", "-m", "engine", "run", "--request", str(path), "--json"]
        environ = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(own_root())}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def summarise(code: int, lines: list[dict[str, Any]], config: dict[str, Any]) -> dict[str, Any]:
    """Rates of the generations after the first: the median of each one's own, all of them kept."""
    if code != 0:
        return {"config": config, "exit_code": code, "error": lines[-1] if lines else None}
    measured = [line for line in lines if line["type"] == "generation"]
    result = lines[-1]
    rates = [len(g["step_ns"]) / sum(g["step_ns"]) * 1e9 for g in measured[1:]]
    steps_ms = [ns / 1e6 for g in measured[1:] for ns in g["step_ns"]]
    return {
        "config": config,
        "exit_code": code,
        "tokens_per_s_median": round(median(rates), 2),
        "tokens_per_s": [round(rate, 2) for rate in rates],
        "step_ms": {"median": round(median(steps_ms), 2), "lowest": round(min(steps_ms), 2), "n": len(steps_ms)},
        "first_token_ms": [round(g["prefill_ns"] / 1e6, 1) for g in measured],
        "peak_rss_bytes": result["peak_rss_bytes"],
        "htod_bytes_per_token": result["counters"]["htod_bytes"] / result["facts"]["measured_tokens"],
        "ids_equal": len({tuple(g["ids"]) for g in measured}) == 1,
        "ids": measured[0]["ids"],
    }


def host_facts() -> dict[str, Any]:
    """Processor, memory, kernel, and the libraries that do the arithmetic."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return {
        "processor": _first_value("/proc/cpuinfo", "model name"),
        "cores": os.cpu_count(),
        "memory": _first_value("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": f"{blas['name']} {blas['version']}",
    }


def _first_value(path: str, name: str) -> str | None:
    """Value of the first `name: value` line of a file; None where there is no such file or line."""
    try:
        rows = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((row.partition(":")[2].strip() for row in rows if row.startswith(name)), None)


if __name__ == "__main__":
    sys.exit(main())
