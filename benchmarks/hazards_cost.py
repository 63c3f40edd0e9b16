"""What the happens-before checker costs: decodes with and without it, in processor time, on this host.

    python -m benchmarks.hazards_cost --model models/smollm2-135m [--model ...] [--out FILE]

Processor time of one thread, so that what else runs on the host does not count; each pair is decoded `--pairs` times
in turns and the least of each taken. Without the checker a device runs everything at once, with it as late as it may.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.sim_decode import host_facts
from engine.commands.hazards import decode
from engine.config import parse_request
from engine.device.book import BookedDevice
from engine.device.hazards import Hazards
from engine.device.plan_only import PlanDevice
from engine.device.schedule import Schedule
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.onnx_load import load
from engine.run import plans_for

SETTINGS: dict[str, dict[str, Any]] = {
    "resident": {},
    "half, lru": {"weight_budget": "50%", "policy": "lru"},
    "half, staging": {"weight_budget": "50%", "policy": "staging"},
}
_LARGE_BYTES = 64 << 20
"""Models below this have small granules, so that their weights span many."""
CACHE = {"kv_layout": "head-major", "kv_min_bucket": 4}


def main() -> int:
    """Measure, print, and write where asked; 1 where the checker costs four times as much or more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", required=True, help="model folder")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the record here as well")
    arguments = parser.parse_args()
    rows = [row for model in arguments.model for row in measure(model.absolute(), arguments.pairs)]
    record = {"measured": datetime.now(UTC).isoformat(timespec="seconds"), "host": host_facts(), "rows": rows}
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return int(any(row["times"] >= 4 for row in rows))


def measure(model: Path, pairs: int) -> list[dict[str, Any]]:
    """A row for each setting, with arithmetic and without."""
    graph = load(model)
    granule = 4096 if sum(weight.data.nbytes for weight in graph.weights.values()) < _LARGE_BYTES else 65536
    rows = []
    for arithmetic in ("full", "none"):
        kind: type[SimDevice | PlanDevice] = SimDevice if arithmetic == "full" else PlanDevice
        for name, setting in SETTINGS.items():
            config = {"granule": granule, **CACHE, **setting}
            asked = {"protocol": 1, "model": str(model), "prompt_ids": [1, 17, 42], "tokens": 8, "generations": 3}
            request = parse_request(
                {**asked, "ignore_eos": True, "device": "sim", "arithmetic": arithmetic, "config": config}
            )
            plans = plans_for(graph, request.prompts, request.config.prefill_chunk)

            def seconds(device: Any, hazards: Hazards | None) -> float:
                start = time.process_time()
                outcome = decode(request, graph, plans, device, hazards)  # noqa: B023 - called within the turn
                assert not outcome.failure
                return time.process_time() - start

            off, on, accesses = [], [], 0
            for _ in range(pairs):
                off.append(seconds(kind(granule_bytes=granule), None))
                hazards, inner = Hazards(), kind(granule_bytes=granule)
                on.append(seconds(checked(inner, hazards), hazards))
                assert hazards.total == 0
                accesses = hazards.accesses
            rows.append(
                {
                    "model": model.name,
                    "arithmetic": arithmetic,
                    "setting": name,
                    "off_s": round(min(off), 3),
                    "on_s": round(min(on), 3),
                    "times": round(min(on) / min(off), 2),
                    "accesses": accesses,
                }
            )
            print(rows[-1], file=sys.stderr)
    return rows


def checked(inner: BookedDevice[Any], hazards: Hazards) -> ScheduledDevice:
    """The device under the checker."""
    return ScheduledDevice(inner, Schedule("late"), hazards)


if __name__ == "__main__":
    sys.exit(main())
