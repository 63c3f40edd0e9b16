"""The zoo's geometries on a card: tokens a second captured and launched one by one, and 14B streamed under a limit.

Weights are poured (`assay models build --poured`). Of each geometry: a step by the device's clock and the host's, its
nodes, what chains of its kernels take, and whether both arms give the same ids and gaps, bit by bit. Of the streamed
one: each policy's time a token over the larger of what the link and the resident step take.

    python -m benchmarks.cuda_table --folder FOLDER --out cuda-table.json        (needs a GPU, and 40 GB of disk)
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cuda_decode import Step, request_for
from engine.device.base import H200
from engine.run import close, execute
from engine.zoo import build

GEOMETRIES = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "35b-a3b")
STREAMED, LIMIT_BYTES = "qwen2.5-14b-zp", 7_726_753_178
POLICIES = ("staging", "zero_copy", "stable")
TOKENS, FEW_TOKENS, GENERATIONS = 128, 24, 6
KEPT = (
    *("segments", "seams", "graph_nodes", "eager_launches", "host_syncs", "vmm_calls_steady", "alloc_calls_steady"),
    *("htod_bytes", "zero_copy_bytes", "page_ins", "evictions"),
)


def arm(model: Path, config: dict[str, Any], tokens: int = TOKENS) -> dict[str, Any]:
    """One run: what its steps take by the host's clock, generation by generation, the first left out."""
    lines: list[dict[str, Any]] = []
    started = time.perf_counter()
    code = execute(request_for(model, tokens, GENERATIONS, config), lines.append, time.perf_counter_ns)
    if code:
        return {"exit_code": code, "error": lines[-1]["message"]}
    first, *measured = [line for line in lines if line["type"] == "generation"]
    steps_us = [sum(g["step_ns"]) / len(g["step_ns"]) / 1e3 for g in measured]
    result = lines[-1]
    return {
        "exit_code": 0,
        "step_us": {"median": median(steps_us), "all": steps_us},
        "tokens_per_s": 1e6 / median(steps_us),
        "first_token_ms": median(g["prefill_ns"] for g in measured) / 1e6,
        "run_s": time.perf_counter() - started,
        "ids": first["ids"],
        "gaps": first["gaps"],
        "same_in_every_generation": all((g["ids"], g["gaps"]) == (first["ids"], first["gaps"]) for g in measured),
        "equations_hold": all(e["holds"] for e in result["equations"]),
        "counters": {name: result["counters"].get(name) for name in KEPT},
        "facts": {n: v for n, v in result["facts"].items() if n.endswith("_bytes") or n == "staged_bytes_per_step"},
    }


def same(arms: dict[str, dict[str, Any]], tokens: int) -> bool:
    """Whether arms that ran gave the same ids with the same gaps, as far as the shortest went."""
    ran = [made for made in arms.values() if not made["exit_code"]]
    return len({(tuple(m["ids"][:tokens]), tuple(m["gaps"][:tokens])) for m in ran}) == 1


def measure(model: Path) -> dict[str, Any]:
    """One geometry, resident."""
    step = Step(model, "fused")
    run_us = step.run_us(TOKENS)
    device = step.measure() | {"run_us": run_us}
    close(step.setup, {})
    del step
    arms = {"captured": arm(model, {}), "launched": arm(model, {"capture": False})}
    made: dict[str, Any] = {"step": device, "arms": arms, "bit_equal": same(arms, TOKENS)}
    if not arms["captured"]["exit_code"]:
        host = arms["captured"]["step_us"]["median"] - run_us
        made["host_share"] = max(0.0, host) / arms["captured"]["step_us"]["median"]
    return made


def stream(model: Path) -> dict[str, Any]:
    """The streamed geometry: resident, then under the limit by each policy."""
    arms = {"resident": arm(model, {})}
    for policy in POLICIES:
        few = FEW_TOKENS if policy == "stable" else TOKENS
        arms[policy] = arm(model, {"vram_limit": LIMIT_BYTES, "policy": policy}, few)
    resident_us = arms["resident"]["step_us"]["median"]
    for name in POLICIES:
        made = arms[name]
        streamed = made["facts"].get("staged_bytes_per_step", 0) if not made["exit_code"] else 0
        if streamed:
            floor_us = max(resident_us, streamed / H200.link_bytes_per_s * 1e6)
            made["over_floor"] = made["step_us"]["median"] / floor_us
    return {"limit_bytes": LIMIT_BYTES, "arms": arms, "bit_equal": same(arms, FEW_TOKENS)}


def main() -> int:
    """Measure, write the record, print it short; 1 where arms differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where models are poured, or stand already")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", help="a geometry; may be given again")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "geometries": {}}
    fine = True
    for name in (*GEOMETRIES, STREAMED):
        if arguments.only and name not in arguments.only:
            continue
        model = arguments.folder / name
        if not model.is_dir():
            build(name, model, poured=True, cache_dir=arguments.folder)
        made = stream(model) if name == STREAMED else measure(model)
        record["geometries"][name] = made
        fine &= made["bit_equal"]
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(name, "bit-equal" if made["bit_equal"] else "ARMS DIFFER", flush=True)
        if "step" in made:
            print(f"  device {made['step']['device_us']:.0f} us, host's share {made.get('host_share', 0):.1%}")
        for of, run in made["arms"].items():
            if run["exit_code"]:
                print(f"  {of}: exit {run['exit_code']}: {run['error']}")
                continue
            over = f", {run['over_floor']:.3f} x the floor" if "over_floor" in run else ""
            counted = {n: v for n, v in run["counters"].items() if v}
            print(
                f"  {of}: {run['tokens_per_s']:.1f} tokens/s, {run['step_us']['median']:.0f} us{over} {counted}",
                flush=True,
            )
    return 0 if fine else 1


if __name__ == "__main__":
    raise SystemExit(main())
