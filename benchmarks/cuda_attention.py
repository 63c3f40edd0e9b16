"""Attention of one new position on a card, by length of the context: time, and share of measured copy bandwidth.

A chain of launches in a graph, each with keys and values of its own, more bytes in all than four times the cache;
medians of replays by events. `us` is with room for parts, which spreads a long context over blocks, `together_us`
without: there one block of each kv head goes through all parts, and a short context has the smaller grid.

    python -m benchmarks.cuda_attention --out cuda-attention.json        (needs a GPU)
"""

from __future__ import annotations

import argparse
import json
import math
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.cuda_products import ROTATED_BYTES, Timer, nbytes
from engine.device.base import Launch, Placed
from engine.kernels.attention import room
from engine.kv_layout import LAYOUTS, Placement
from engine.plan import KvGeometry, Operand, Ref, Step

GEOMETRIES = {"0.5B": (14, 2, 64), "1.5B": (12, 2, 128), "7B": (28, 4, 128), "35B": (16, 2, 256)}
"""Heads, kv heads and head size; caches are float16."""
CONTEXTS = (160, 512, 1024, 4096, 8192, 32768)
"""Positions that the new one sees, itself included."""


def attention(heads: int, kv_heads: int, size: int, context: int, *, parts: bool) -> Step:
    """Rotary attention of one row."""
    p: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_size": size, "scale": 1 / math.sqrt(size)}
    p |= {"softcap": 0.0, "window": -1, "interleaved": False, "qk_norm_eps": 1e-6, "long_above": None}
    refs: dict[str, tuple[str, tuple[int, ...]]] = {
        n: ("float32", (1, 1, of * size)) for n, of in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    }
    refs |= {
        "length": ("int64", (1,)),
        "cos": ("float32", (context, size // 2)),
        "sin": ("float32", (context, size // 2)),
    }
    operands = [Operand(n, Ref("buffer", 0, dtype, shape, n)) for n, (dtype, shape) in refs.items()]
    operands += [
        Operand("k_cache", Ref("kv_key", 0, "float16", (0, kv_heads, size), "k_cache"), "rw"),
        Operand("v_cache", Ref("kv_value", 0, "float16", (0, kv_heads, size), "v_cache"), "rw"),
        Operand("y", Ref("buffer", 0, "float32", (1, 1, heads * size), "y"), "w"),
    ]
    if parts and (shape := room(p)) is not None:
        operands.append(Operand("parts", Ref("buffer", 0, "float32", shape, "parts"), "w"))
    return Step(0, "attention", "benchmark", "gqa", tuple(operands), p)


def measure(timer: Timer, geometry: tuple[int, int, int], context: int, layout: str, *, parts: bool) -> list[float]:
    """Microseconds a launch, of each replay."""
    device, step = timer.device, attention(*geometry, context, parts=parts)
    _, kv_heads, size = geometry
    device.prepare([step])
    placement = Placement(KvGeometry(1, kv_heads, size, "float16", kv_heads * size * 2), layout, context)
    random = np.random.default_rng(0)
    shared: dict[str, int] = {}
    for o in step.operands:
        if o.name not in ("k_cache", "v_cache"):
            shared[o.name] = device.alloc(nbytes(o.ref), o.name)
            values = random.uniform(-1, 1, o.ref.shape).astype(o.ref.dtype)
            values = np.array([context - 1]) if o.name == "length" else values
            device.copy_in(shared[o.name], values.reshape(-1).view(np.uint8))
    each = -(-placement.nbytes // 256) * 256
    copies = max(2, -(-ROTATED_BYTES // (2 * each)))
    arena = device.alloc(copies * 2 * each, "keys and values")
    cached = random.normal(size=each // 2).astype(np.float16).view(np.uint8)
    for i in range(2 * copies):
        device.copy_in(arena + i * each, cached)

    def placed(o: Operand, copy: int) -> Placed:
        if o.name in shared:
            return Placed(o, shared[o.name], nbytes(o.ref))
        start = arena + (2 * copy + (o.name == "v_cache")) * each
        return Placed(o, start, placement.nbytes, placement=placement)

    launches = [Launch(step, tuple(placed(o, i) for o in step.operands)) for i in range(copies)]
    taken = timer.chained_us(launches)
    for address in (arena, *shared.values()):
        device.free(address)
    return taken


def main() -> int:
    """Measure every geometry and context, write the record, print it short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layout", choices=LAYOUTS, default="seq-major")
    arguments = parser.parse_args()
    timer = Timer()
    copy = timer.copy_bytes_per_s()
    print(f"copy {copy / 1e9:.0f} GB/s")
    rows: dict[str, dict[str, Any]] = {}
    for name, geometry in GEOMETRIES.items():
        for context in CONTEXTS:
            spread, together = (
                measure(timer, geometry, context, arguments.layout, parts=parts) for parts in (True, False)
            )
            read = 2 * context * geometry[1] * geometry[2] * 2
            share = read / median(spread) * 1e6 / copy
            row = {"bytes": read, "us": median(spread), "least_us": min(spread), "share_of_copy": share}
            rows[f"{name} {context}"] = row | {"together_us": median(together)}
            print(
                f"{name:>5} {context:6} {read / 1e6:7.2f} MB {median(spread):8.2f} us {100 * share:5.1f} %"
                f"   together {median(together):8.2f} us",
                flush=True,
            )
    date = datetime.now(UTC).date().isoformat()
    record = {"date": date, "card": timer.device.name, "layout": arguments.layout, "copy_bytes_per_s": copy}
    arguments.out.write_text(json.dumps(record | {"attention": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
