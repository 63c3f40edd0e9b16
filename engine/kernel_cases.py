"""Kernels alone: a case of operator, shape and type as one step, its operands on a device, and rounds of it timed.

A case is a small JSON file. Weights and cached positions are drawn from the seed, and so is each round's own input, so
that a round's output is that input's, whatever computed it: equal bytes give equal ids. Each round runs its step over
and over in one recording, with copies of the weights in turn where a card's cache would keep them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.device.base import Device, Launch, Placed
from engine.errors import BadRequest, ModelFilesError
from engine.graph import DTYPES
from engine.kernels.attention import room
from engine.kv_layout import Placement
from engine.plan import KvGeometry, Operand, Ref, Step

BLOCK = 32
ALIGNMENT_BYTES = 256
ROTATED_BYTES = 260 << 20
"""Of weights that take turns on a card: more than four times the cache of an H200."""
CHAIN, MOST_COPIES = 64, 512
"""Runs of a step in a round on a card: the host's own part of a round is a few of its microseconds."""
ACTIVATIONS = ("float32", "float16")


@dataclass(frozen=True, slots=True)
class Case:
    """One step. `drawn` is the operand that each round draws anew; `streamed` are those with copies that take turns."""

    step: Step
    drawn: str
    streamed: tuple[str, ...]
    launch_bytes: int
    """Weights or cached positions that one run reads."""
    launch_flops: int
    capacity: int = 0
    """Positions of the cache, where there is one."""


def read_case(path: Path) -> Case:
    """A case's file: {"op": product | gated_product | attention, "dtype": of activations, and the sizes of the op}.

    Raises ModelFilesError for a file that cannot be read, BadRequest for what no case has.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(
            f"{path} is no kernel case: {error}", "a JSON file such as those of sweeps/kernels"
        ) from error
    if not isinstance(told, dict) or told.get("op") not in OPS:
        raise BadRequest(f"{path} names no operator of a case", f"op: one of {', '.join(OPS)}")
    op, dtype = told.pop("op"), told.pop("dtype", "float32")
    names, make = OPS[op]
    if dtype not in ACTIVATIONS:
        raise BadRequest(f"dtype is {dtype!r}", f"one of {', '.join(ACTIVATIONS)}")
    if sorted(told) != sorted(names) or not all(type(size) is int and size > 0 for size in told.values()):
        raise BadRequest(f"{path}: {op} has the sizes {sorted(told)}", f"{', '.join(names)}: whole numbers above zero")
    return make(dtype, **told)


def product(dtype: str, *, N: int, K: int) -> Case:
    """A product with 4-bit codes in blocks of 32."""
    return _product(dtype, N, K, gated=False)


def gated_product(dtype: str, *, N: int, K: int) -> Case:
    """A pair of products, N rows in all, behind a norm and under a gate, as a fused plan has it."""
    return _product(dtype, N, K, gated=True)


def _product(dtype: str, n: int, k: int, *, gated: bool) -> Case:
    if k % BLOCK or (gated and n % 2):
        raise BadRequest(f"a product of {n} x {k}", f"K in whole blocks of {BLOCK}, N even where it is a gated pair")
    blocks, rows = k // BLOCK, {"": n // 2, "2": n // 2} if gated else {"": n}
    operands = [Operand("x", Ref("buffer", 0, dtype, (1, k)))]
    params: dict[str, Any] = {"K": k, "bits": 4, "block": BLOCK} | {f"N{end}": of for end, of in rows.items()}
    if gated:
        operands.append(Operand("gamma", Ref("key", 0, "float16", (k,))))
        params |= {"gated": True, "eps": 1e-6}
    for end, of in rows.items():
        operands += [
            Operand(f"codes{end}", Ref("key", 1, "uint8", (of, blocks, BLOCK // 2))),
            Operand(f"scales{end}", Ref("key", 2, "float16", (of, blocks))),
        ]
    operands.append(Operand("y", Ref("buffer", 1, dtype, (1, rows[""])), "w"))
    step = Step(0, "product", "case", "matmul_nbits", tuple(operands), params)
    streamed = tuple(o.name for o in operands if o.name[:5] in ("codes", "scale"))
    return Case(step, "x", streamed, n * k // 2 + n * blocks * 2, 2 * n * k)


def attention(dtype: str, *, heads: int, kv_heads: int, head_size: int, context: int) -> Case:
    """Rotary attention of one new position over a float16 cache of `context`, itself included."""
    p: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size, "softcap": 0.0, "window": -1}
    p |= {"scale": 1 / math.sqrt(head_size), "interleaved": False, "qk_norm_eps": 1e-6, "long_above": None}
    refs: dict[str, tuple[str, tuple[int, ...]]] = {
        name: (dtype, (1, 1, of * head_size)) for name, of in (("query", heads), ("key", kv_heads), ("value", kv_heads))
    }
    refs |= {"length": ("int64", (1,))} | dict.fromkeys(("cos", "sin"), ("float32", (context, head_size // 2)))
    operands = [Operand(name, Ref("buffer", 0, of, shape, name)) for name, (of, shape) in refs.items()]
    operands += [
        Operand(f"{part[0]}_cache", Ref(f"kv_{part}", 0, "float16", (0, kv_heads, head_size), part), "rw")  # type: ignore[arg-type]
        for part in ("key", "value")
    ]
    operands.append(Operand("y", Ref("buffer", 0, dtype, (1, 1, heads * head_size), "y"), "w"))
    if (shape := room(p)) is not None:
        operands.append(Operand("parts", Ref("buffer", 0, "float32", shape, "parts"), "w"))
    step = Step(0, "attention", "case", "gqa", tuple(operands), p)
    read = 2 * context * kv_heads * head_size * 2
    return Case(step, "query", ("k_cache", "v_cache"), read, 4 * context * heads * head_size, context)


OPS: Mapping[str, tuple[tuple[str, ...], Callable[..., Case]]] = {
    "product": (("N", "K"), product),
    "gated_product": (("N", "K"), gated_product),
    "attention": (("heads", "kv_heads", "head_size", "context"), attention),
}


class Bench:
    """A case's operands on a device, and its recording."""

    def __init__(self, device: Device, case: Case, seed: Sequence[int]) -> None:
        """Draw, place and record. Raises UnsupportedModel where the device has no kernel for it, OutOfMemory."""
        self._device, self._case, self._seed = device, case, list(seed)
        device.prepare([case.step])
        random = np.random.default_rng([*self._seed, 0])
        on_card = device.kind == "cuda"
        each = sum(_whole(self._nbytes(o)) for o in case.step.operands if o.name in case.streamed)
        copies = min(MOST_COPIES, max(2, -(-ROTATED_BYTES // each))) if on_card else 1
        places: dict[str, list[int]] = {}
        for o in case.step.operands:
            nbytes = self._nbytes(o)
            values = self._values(o, random)
            places[o.name] = [
                device.alloc(_whole(nbytes), o.name) for _ in range(copies if o.name in case.streamed else 1)
            ]
            for address in places[o.name]:
                device.copy_in(address, values)
        self._x, self._y = places[case.drawn][0], places["y"][0]
        launches = [
            Launch(
                case.step, tuple(self._placed(o, places[o.name][i % len(places[o.name])]) for o in case.step.operands)
            )
            for i in range(copies)
        ]
        self.runs = max(CHAIN, copies) if on_card else 1
        device.launch(launches[0])
        device.begin_capture()
        for i in range(self.runs):
            device.launch(launches[i % copies])
        self._graph = device.end_capture()

    def rounds(self, count: int, now: Callable[[], int]) -> Iterator[tuple[int, int]]:
        """Of so many rounds the id of the output and the nanoseconds of one run; the same inputs at each call."""
        random = np.random.default_rng([*self._seed, 1])
        (x,) = (o for o in self._case.step.operands if o.name == self._case.drawn)
        (y,) = (o for o in self._case.step.operands if o.name == "y")
        for _ in range(count):
            self._device.copy_in(self._x, self._values(x, random))
            self._device.copy_out(self._x, 1)
            start = now()
            self._device.replay(self._graph)
            self._device.sync(self._device.mark("compute"))
            taken = now() - start
            made = self._device.copy_out(self._y, self._nbytes(y))
            yield int.from_bytes(hashlib.sha256(made).digest()[:4], "big") >> 1, max(1, taken // self.runs)

    def _nbytes(self, operand: Operand) -> int:
        if operand.ref.kind.startswith("kv_"):
            return self._placement(operand).nbytes
        return int(np.prod(operand.ref.shape)) * DTYPES[operand.ref.dtype].itemsize

    def _placement(self, operand: Operand) -> Placement:
        _, kv_heads, size = operand.ref.shape
        token_bytes = kv_heads * size * DTYPES[operand.ref.dtype].itemsize
        return Placement(
            KvGeometry(1, kv_heads, size, operand.ref.dtype, token_bytes), "seq-major", self._case.capacity
        )

    def _placed(self, operand: Operand, address: int) -> Placed:
        cached = operand.ref.kind.startswith("kv_")
        placement = self._placement(operand) if cached else None
        return Placed(operand, address, self._nbytes(operand), placement=placement)

    def _values(self, operand: Operand, random: np.random.Generator) -> Any:
        """Bytes of an operand: numbers that keep the output about as large as its inputs."""
        dtype, count = DTYPES[operand.ref.dtype], self._nbytes(operand) // DTYPES[operand.ref.dtype].itemsize
        if operand.name == "length":
            made: Any = np.full(count, self._case.capacity - 1)
        elif operand.name.startswith("codes"):
            made = random.integers(0, 256, count)
        elif operand.name.startswith("scales"):
            made = random.uniform(0.75, 1.25, count) / (4.6 * math.sqrt(self._case.step.params["K"]))
        elif operand.access == "w":
            made = np.zeros(count)
        else:
            made = random.normal(size=count)
        return made.astype(dtype).view(np.uint8)


def _whole(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
