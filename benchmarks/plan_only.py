"""How long a full-size model takes to be planned and run without arithmetic, and in how much memory.

Each line is a fresh child on a hollow build: import, load, plan, and a generation in which pager, ledger and capture do
all their work and nothing is computed. Times are the planner's own, of this host; no measure of any card.

    python -m benchmarks.plan_only --models DIR [--tokens 32] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.sim_decode import ONE_THREAD, host_facts
from engine.config import POLICIES
from engine.zoo import build
from engine.zoo.geometries import GEOMETRIES
from jobs.provenance import own_root, tree_digest

ARMS: tuple[tuple[str, str | None], ...] = (("lru", None), *((policy, "50%") for policy in POLICIES))
HEAD = (
    "| model | weights | budget | policy | wall s | work s | peak RSS MB | page-ins | read in place "
    "| GB a token over the link | at least | segments |"
)


def main() -> int:
    """Measure, print the table, and write the record where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for hollow builds, kept")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    before = os.getloadavg()
    rows = []
    print(HEAD, "|---" * (HEAD.count("|") - 1) + "|", sep="\n")
    for name in GEOMETRIES:
        folder = build(name, arguments.models / name, hollow=True, cache_dir=arguments.models).folder
        for policy, budget in ARMS:
            row = measure(folder, policy, budget, arguments.tokens)
            rows.append({"model": name, **row})
            print(line_of(rows[-1]), flush=True)
    record = {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine_digest": tree_digest(own_root()),
        "tokens": arguments.tokens,
        "host": host_facts(),
        "load_average": {"before": before, "after": os.getloadavg()},
        "runs": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in record.items() if k != "runs"}))
    return 0 if all(row["exit_code"] == 0 and row["equations_hold"] for row in rows) else 1


def measure(folder: Path, policy: str, budget: str | None, tokens: int) -> dict[str, Any]:
    """One run in a process of its own: wall time from before its start, and the work that it and the system did."""
    words = ["--model", str(folder), "--prompt-ids", "1 17 42 99", "--tokens", str(tokens), "--policy", policy]
    words += [] if budget is None else ["--weight-budget", budget]
    command = [sys.executable, "-P", "-m", "engine", "run", "--plan-only", "--json", *words]
    environ = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(own_root())}
    started = time.perf_counter()
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = [json.loads(line) for line in child.stdout]
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    result = lines[-1]
    facts, counters = result["facts"], result["counters"]
    tokens_out = facts["measured_tokens"]
    return {
        "policy": policy,
        "weight_budget": budget,
        "exit_code": child.returncode,
        "wall_s": round(time.perf_counter() - started, 2),
        "work_s": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_rss_bytes": result["peak_rss_bytes"],
        "weight_bytes": facts["weight_bytes"],
        "page_ins": counters["page_ins"],
        "zero_copy_reads": counters["zero_copy_reads"],
        "htod_bytes_per_token": counters["htod_bytes"] / tokens_out,
        "zero_copy_bytes_per_token": counters["zero_copy_bytes"] / tokens_out,
        "floor_bytes_per_token": facts["floor_bytes_per_token"],
        "segments": counters["segments"],
        "equations_hold": all(equation["holds"] for equation in result["equations"]),
    }


def line_of(row: dict[str, Any]) -> str:
    """A line of the table."""
    cells = (
        row["model"],
        f"{row['weight_bytes'] / 1e9:.2f} GB",
        row["weight_budget"] or "all",
        row["policy"] if row["weight_budget"] else "-",
        row["wall_s"],
        row["work_s"],
        f"{row['peak_rss_bytes'] / 1e6:.0f}",
        row["page_ins"],
        row["zero_copy_reads"],
        f"{(row['htod_bytes_per_token'] + row['zero_copy_bytes_per_token']) / 1e9:.3f}",
        f"{row['floor_bytes_per_token'] / 1e9:.3f}",
        row["segments"],
    )
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    sys.exit(main())
