"""How fast the CUDA device decodes a model now, and where a step's time goes: first figures of kernels that are right.

Arms are whole runs in this process, in turns, their first generation left out: resident and captured, launch by launch,
and half of the weights by each policy. Beside them the device's own time of a replayed step, by events, and of each
kernel: every launch of a step recorded CHAIN times in a graph of its own, warm in the cache, summed by kernel.

    python -m benchmarks.cuda_decode --model models/smollm2-135m --out cuda-decode.json        (needs a GPU)
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from engine import PROTOCOL
from engine.config import POLICIES, RunRequest, parse_request
from engine.counters import Tally
from engine.device.cuda import CudaDevice
from engine.device.cuda_driver import bindings, call
from engine.device.cuda_graph import CudaGraph
from engine.onnx_load import load, recorded_digest
from engine.plan import TARGETS
from engine.run import close, execute, plans_for, set_up

ARMS: dict[str, dict[str, Any]] = {
    "resident, captured": {},
    "resident, captured, plain": {"target": "plain"},
    "resident, launched": {"capture": False},
    **{f"half, {policy}": {"weight_budget": "50%", "policy": policy} for policy in POLICIES},
}
PROMPT_IDS = tuple(range(500, 532))
CHAIN, REPEATS = 20, 9
KEPT = ("graph_nodes", "eager_launches", "htod_bytes", "host_syncs", "vmm_calls", "alloc_calls_steady")


def request_for(model: Path, tokens: int, generations: int, config: dict[str, Any], device: str = "cuda") -> RunRequest:
    """A run, on the card unless told, that goes on after the end id."""
    document = {"protocol": PROTOCOL, "model": str(model), "prompt_ids": list(PROMPT_IDS), "tokens": tokens}
    document |= {"generations": generations, "ignore_eos": True, "device": device, "config": config}
    return parse_request(document)


def arm(model: Path, tokens: int, generations: int, config: dict[str, Any], device: str = "cuda") -> dict[str, Any]:
    """One run: tokens a second of its steps by the host's clock, the median of generations, with their range."""
    lines: list[dict[str, Any]] = []
    started = time.perf_counter()
    code = execute(request_for(model, tokens, generations, config, device), lines.append, time.perf_counter_ns)
    seconds = time.perf_counter() - started
    if code:
        return {"exit_code": code, "error": lines[-1]["message"]}
    measured = [line for line in lines if line["type"] == "generation"][1:]
    rates = [len(g["step_ns"]) / sum(g["step_ns"]) * 1e9 for g in measured]
    result = lines[-1]
    return {
        "exit_code": code,
        "tokens_per_s": {"median": median(rates), "least": min(rates), "most": max(rates), "generations": len(rates)},
        "prefill_ms": median(g["prefill_ns"] for g in measured) / 1e6,
        "run_s": seconds,
        "same_ids": len({tuple(g["ids"]) for g in measured}) == 1,
        "ids": measured[0]["ids"],
        "counters": {name: result["counters"].get(name) for name in KEPT},
        "equations_hold": all(e["holds"] for e in result["equations"]),
    }


class Step:
    """A resident decoder past its recording, for what only events see."""

    def __init__(self, model: Path, target: str) -> None:
        self.driver, _ = bindings()
        graph, request = load(model), request_for(model, 160, 1, {})
        self.device = CudaDevice()
        plans = plans_for(graph, request.prompts, 512, target)
        self.plan = plans[1]
        self.setup = set_up(request, self.device, graph, plans, Tally())
        self.decoder = self.setup.decoder
        self.decoder.reset()
        self.decoder.prefill([PROMPT_IDS], 512)
        for _ in range(3):
            self.decoder.step()

    def timed_us(self, graph: Any, replays: int) -> float:
        """Device microseconds of a replay, back to back, the median of REPEATS."""
        start, end = (call(self.driver.cuEventCreate, 0) for _ in range(2))
        taken = []
        for _ in range(REPEATS):
            call(self.driver.cuEventRecord, start, self.device._stream)
            for _ in range(replays):
                self.device.replay(graph)
            call(self.driver.cuEventRecord, end, self.device._stream)
            call(self.driver.cuEventSynchronize, end)
            taken.append(call(self.driver.cuEventElapsedTime, start, end) * 1e3 / replays)
        return float(median(taken))

    def run_us(self, tokens: int) -> float:
        """Device microseconds of a step, over the steps that a run of so many tokens takes after its first one."""
        [recorded] = self.decoder._recorded or []
        assert recorded is not None, "all of a resident step is one graph"
        start, end = (call(self.driver.cuEventCreate, 0) for _ in range(2))
        taken = []
        for _ in range(REPEATS):
            self.decoder.reset()
            self.decoder.prefill([PROMPT_IDS], 512)
            call(self.driver.cuEventRecord, start, self.device._stream)
            for _ in range(tokens - 1):
                self.device.replay(recorded)
            call(self.driver.cuEventRecord, end, self.device._stream)
            call(self.driver.cuEventSynchronize, end)
            taken.append(call(self.driver.cuEventElapsedTime, start, end) * 1e3 / (tokens - 1))
        return float(median(taken))

    def measure(self) -> dict[str, Any]:
        """The whole step, then each of its launches as a chain; the chains leave positions and states behind."""
        [recorded] = self.decoder._recorded or []
        assert isinstance(recorded, CudaGraph), "one segment, all of it captured"
        whole = self.timed_us(recorded, 4)  # few: each replay adds a position
        kernels: dict[str, list[float]] = defaultdict(list)
        for launch in {k: v for k, v in self.decoder._launches.items() if k[0] == 1}.values():
            if launch.step.kernel == "advance":
                continue
            self.device.begin_capture()
            for _ in range(CHAIN):
                self.device.launch(launch)
            kernels[launch.step.kernel].append(self.timed_us(self.device.end_capture(), 2) / CHAIN)
        by_kernel = {
            n: {"launches": len(v), "us": sum(v)} for n, v in sorted(kernels.items(), key=lambda i: -sum(i[1]))
        }
        card = self.device._card
        return {
            "device_us": whole,
            "kernels": by_kernel,
            "steps": len(self.plan.steps),
            "weight_bytes": self.plan.weight_bytes,
            "memory_floor_us": self.plan.weight_bytes / self.device.profile.memory_bytes_per_s * 1e6,
            "graph": dict(recorded.census.types) | {"edges": recorded.census.edges},
            "variants_compiled": card.code.compiled,
            "variants_found": card.code.found,
            "card": {"name": self.device.name, "driver": self.device.driver},
        }


def main() -> int:
    """Measure, write the record, print it short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--generations", type=int, default=6, help="the first is left out")
    parser.add_argument("--arm", action="append", choices=tuple(ARMS), help="only this one; may be given again")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    model = arguments.model.absolute()
    record: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "model": recorded_digest(model)}
    record["steps"] = {}
    for target in TARGETS:
        step = Step(model, target)
        record["steps"][target] = step.measure()
        close(step.setup, {})
    arms = {n: c for n, c in ARMS.items() if not arguments.arm or n in arguments.arm}
    record["arms"] = {n: arm(model, arguments.tokens, arguments.generations, c) for n, c in arms.items()}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for target, made in record["steps"].items():
        print(target, json.dumps(made))
    for name, made in record["arms"].items():
        print(name, {k: v for k, v in made.items() if k != "ids"})
    ids = {tuple(made.get("ids", ())) for made in record["arms"].values()}
    print("all arms give the same ids:", len(ids) == 1)
    return 0 if len(ids) == 1 and all(made["exit_code"] == 0 for made in record["arms"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
