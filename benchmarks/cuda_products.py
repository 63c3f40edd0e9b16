"""Products with 4-bit weights on a card, at the shapes of the zoo's models: time, and share of measured copy bandwidth.

A chain of one product over and over in a graph, each launch with weights of its own, more bytes in all than four times
the cache; medians of replays by events. Copy bandwidth is of the same process: 4 GiB, bytes read and written.

    python -m benchmarks.cuda_products --out cuda-products.json        (needs a GPU)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from engine.device.base import Launch, Placed
from engine.device.cuda import CudaDevice
from engine.device.cuda_driver import bindings, call
from engine.plan import Operand, Ref, Step

BLOCK = 32
SHAPES = (
    *((896, 896), (1152, 896), (896, 4864), (9728, 896), (151936, 896), (1536, 1536), (17920, 1536), (1536, 8960)),
    *((3584, 3584), (4608, 3584), (3584, 18944), (37888, 3584), (152064, 3584)),
)
"""N and K, gate and up together."""
GATED = frozenset({(9728, 896), (17920, 1536), (37888, 3584)})
ROTATED_BYTES = 260 << 20
LEAST_LAUNCHES, REPEATS, WARM_S = 24, 9, 0.2


class Timer:
    """A device and events on its stream."""

    def __init__(self) -> None:
        self.driver, _ = bindings()
        self.device = CudaDevice()

    def us(self, work: Callable[[], None]) -> list[float]:
        """Device microseconds of REPEATS runs of `work`, after others."""
        start, end = (call(self.driver.cuEventCreate, 0) for _ in range(2))
        taken = []
        until = time.perf_counter() + WARM_S  # an idle card's clock is low
        while time.perf_counter() < until:
            work()
            call(self.driver.cuStreamSynchronize, self.device._stream)
        for _ in range(REPEATS):
            call(self.driver.cuEventRecord, start, self.device._stream)
            work()
            call(self.driver.cuEventRecord, end, self.device._stream)
            call(self.driver.cuEventSynchronize, end)
            taken.append(call(self.driver.cuEventElapsedTime, start, end) * 1e3)
        return taken

    def chained_us(self, launches: Sequence[Launch]) -> list[float]:
        """Device microseconds of a launch, of LEAST_LAUNCHES or more recorded one after another."""
        chain = (list(launches) * -(-LEAST_LAUNCHES // len(launches)))[: max(LEAST_LAUNCHES, len(launches))]
        for launch in launches[:2]:
            self.device.launch(launch)
        self.device.begin_capture()
        for launch in chain:
            self.device.launch(launch)
        graph = self.device.end_capture()
        return [us / len(chain) for us in self.us(lambda: self.device.replay(graph))]

    def copy_bytes_per_s(self) -> float:
        """Bytes read and written by a copy of 4 GiB, over its time."""
        nbytes = 4 << 30
        source, target = (self.device.alloc(nbytes, "copy") for _ in range(2))
        self.device.fill(source, nbytes, 1)
        best = median(self.us(lambda: self.device.copy_within(target, source, nbytes)))
        for address in (source, target):
            self.device.free(address)
        return 2 * nbytes / best * 1e6


def product(n: int, k: int, *, gated: bool) -> Step:
    """A normed product, or a gated pair of half as many rows each."""
    blocks = k // BLOCK
    rows = {"": n // 2, "2": n // 2} if gated else {"": n}
    operands = [Operand("x", Ref("buffer", 0, "float32", (1, k))), Operand("gamma", Ref("key", 0, "float16", (k,)))]
    for end, of in rows.items():
        operands += [
            Operand(f"codes{end}", Ref("key", 1, "uint8", (of, blocks, BLOCK // 2))),
            Operand(f"scales{end}", Ref("key", 2, "float16", (of, blocks))),
        ]
    operands.append(Operand("y", Ref("buffer", 1, "float32", (1, rows[""])), "w"))
    params: dict[str, Any] = {"K": k, "bits": 4, "block": BLOCK, "eps": 1e-6} | {f"N{e}": of for e, of in rows.items()}
    return Step(0, "product", "benchmark", "matmul_nbits", tuple(operands), params | ({"gated": True} if gated else {}))


def nbytes(ref: Ref) -> int:
    """Bytes of an operand."""
    return int(np.prod(ref.shape)) * np.dtype(ref.dtype).itemsize


def measure(timer: Timer, n: int, k: int) -> dict[str, Any]:
    """One shape: bytes of weights and scales, microseconds a launch, bytes a second."""
    device, step = timer.device, product(n, k, gated=(n, k) in GATED)
    device.prepare([step])
    sizes = {o.name: -(-nbytes(o.ref) // 256) * 256 for o in step.operands}
    of_weights = sum(size for name, size in sizes.items() if name[:5] in ("codes", "scale"))
    random = np.random.default_rng(0)
    shared = {}
    for o in step.operands:
        if o.name[:5] not in ("codes", "scale"):
            shared[o.name] = device.alloc(sizes[o.name], o.name)
            values = random.normal(size=o.ref.shape).astype(o.ref.dtype)
            device.copy_in(shared[o.name], values.reshape(-1).view(np.uint8))
    copies = max(2, -(-ROTATED_BYTES // of_weights))
    arena = device.alloc(copies * of_weights, "weights")
    first: dict[str, int] = {}
    at = arena
    for o in step.operands:
        if o.name not in shared:
            first[o.name] = at
            codes = o.name.startswith("codes")
            made = random.integers(0, 256, sizes[o.name], np.uint8) if codes else None
            scales = random.uniform(0.01, 0.02, sizes[o.name] // 2).astype(np.float16).view(np.uint8)
            device.copy_in(at, scales if made is None else made)
            at += sizes[o.name]
    for i in range(1, copies):
        device.copy_within(arena + i * of_weights, arena, of_weights)
    launches = [
        Launch(
            step,
            tuple(
                Placed(o, shared[o.name] if o.name in shared else first[o.name] + i * of_weights, nbytes(o.ref))
                for o in step.operands
            ),
        )
        for i in range(copies)
    ]
    taken = timer.chained_us(launches)
    for address in (arena, *shared.values()):
        device.free(address)
    read = n * k // 2 + n * (k // BLOCK) * 2
    return {"bytes": read, "us": median(taken), "least_us": min(taken), "bytes_per_s": read / median(taken) * 1e6}


def main() -> int:
    """Measure every shape, write the record, print it short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    timer = Timer()
    copy = timer.copy_bytes_per_s()
    made: Mapping[str, dict[str, Any]] = {f"{n}x{k}": measure(timer, n, k) for n, k in SHAPES}
    for row in made.values():
        row["share_of_copy"] = row["bytes_per_s"] / copy
    date = datetime.now(UTC).date().isoformat()
    record = {"date": date, "card": timer.device.name, "copy_bytes_per_s": copy, "products": made}
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"copy {copy / 1e9:.0f} GB/s")
    for shape, row in made.items():
        print(f"{shape:>14} {row['bytes'] / 1e6:8.2f} MB {row['us']:8.2f} us {100 * row['share_of_copy']:5.1f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
