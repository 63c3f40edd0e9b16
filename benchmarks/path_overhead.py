"""What the whole path costs a run beyond the engine: `assay run` on a toy, from the first claim to the verdict.

The engine's own time is what it says of itself, prefill and steps of each generation; all else counts as overhead: the
look at the card, the child's start with its imports, reading and planning the model, the record's way into the store,
the judgement. Read from the store, but for the part of it that a child's end alone takes, which its record holds.

    python -m benchmarks.path_overhead [--blocks N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from sqlalchemy import create_engine, text

from benchmarks.sim_decode import host_facts
from jobs.provenance import harness_digest, own_root

SWEEP = """\
sweep: path-overhead
models:
  tiny: {{build: tiny, seed: 7}}
prompts:
  short: {{ids: [1, 2, 3, 4]}}
arms:
  base: {{source: "path:{root}", config: {{policy: lru}}}}
  head: {{source: "path:{root}", config: {{policy: stable}}}}
matrix:
  weight_budget: ["50%"]
  granule: [4096]
varies: [policy]
run: {{device: sim, tokens: 8, generations: 2, ignore_eos: true}}
blocks: {{count: {blocks}}}
witnesses:
  - {{expr: "page_ins > 0"}}
"""


def main() -> None:
    """Measure, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10, help="of four runs each")
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ab-", dir="/tmp") as folder:
        record = measure(Path(folder), arguments.blocks)
    document = json.dumps(record, indent=1)
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n", encoding="utf-8")


def measure(root: Path, blocks: int) -> dict[str, Any]:
    """The record of one sweep on one simulated card."""
    load_before = os.getloadavg()
    environ = {**os.environ, "TMPDIR": str(root), "PYTHONPATH": str(own_root())}
    environ |= {"XDG_CACHE_HOME": f"{root}/cache", "XDG_STATE_HOME": f"{root}/state"}
    (root / "sweep.yaml").write_text(SWEEP.format(root=own_root(), blocks=blocks))
    store = f"sqlite:///{root / 'store.db'}"
    command = [sys.executable, "-P", "-m", "orchestrator.cli", "run", "sweep.yaml", "--store", store, "--cards", "1"]
    begin_s = time.monotonic()
    done = subprocess.run(command, cwd=root, env=environ, check=False, capture_output=True, text=True)
    wall_s = time.monotonic() - begin_s
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "harness_digest": harness_digest(own_root()),
        "command_wall_s": round(wall_s, 1),
        **stored(store),
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "host": host_facts(),
    }


def stored(url: str) -> dict[str, Any]:
    """From the first claim to the verdict, by what took it."""
    engine = create_engine(url)
    with engine.connect() as connection:
        claimed = connection.execute(text("SELECT min(at) FROM event WHERE kind = 'claimed'")).scalar_one()
        judged = connection.execute(text("SELECT min(at) FROM event WHERE target = 'judged'")).scalar_one()
        attempts = connection.execute(
            text("SELECT id, opened_at, closed_at, started_at, ended_at FROM attempt WHERE state = 'measured'")
        ).all()
        prefill_ns = connection.execute(text("SELECT sum(prefill_ns) FROM token_stream")).scalar_one()
        steps = connection.execute(text("SELECT numbers FROM sample WHERE name = 'step_ns'")).scalars().all()
    engine.dispose()
    last_closed = max(seconds(row.closed_at) for row in attempts)
    own_s = (prefill_ns + sum(sum(array("q", numbers)) for numbers in steps)) / 1e9 / len(attempts)
    whole_s = (seconds(judged) - seconds(claimed)) / len(attempts)
    return {
        "runs": len(attempts),
        "claim_to_judged_s_a_run": round(whole_s, 3),
        "engine_own_s_a_run": round(own_s, 3),
        "overhead_s_a_run": round(whole_s - own_s, 3),
        "of_it": {
            "worker_before_the_child_s": middle([seconds(row.started_at) - seconds(row.opened_at) for row in attempts]),
            "child_with_the_engine_s": middle([seconds(row.ended_at) - seconds(row.started_at) for row in attempts]),
            "child_end_to_stored_s": middle([seconds(row.closed_at) - seconds(row.ended_at) for row in attempts]),
            "last_stored_to_judged_s_a_run": round((seconds(judged) - last_closed) / len(attempts), 3),
        },
    }


def middle(values: Sequence[float]) -> float:
    """The median, to the millisecond."""
    return round(median(values), 3)


def seconds(stamp: str) -> float:
    """A time of the store, or of a record, as seconds."""
    found = datetime.fromisoformat(stamp)
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


if __name__ == "__main__":
    main()
