"""Operators in plain float64, written out from their definitions and not from the kernels, one element at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.conformance import run_nodes
from engine.graph import Node, Weight

F64 = NDArray[np.float64]


def pack(codes: NDArray[np.uint8], bits: int, padding: int = 0) -> NDArray[np.uint8]:
    """Codes [..., n] to bytes, element 0 in the low bits; a last half byte is filled up with `padding`."""
    if bits == 8:
        return codes
    odd = np.full((*codes.shape[:-1], codes.shape[-1] % 2), padding, np.uint8)
    even = np.concatenate([codes, odd], axis=-1)
    packed: NDArray[np.uint8] = (even[..., 0::2] | (even[..., 1::2] << 4)).astype(np.uint8)
    return packed


def launch(name: str, arrays: dict[str, NDArray[Any]], **params: Any) -> None:
    """Run a kernel as a device does: decode the weights, then compute."""
    kernel = kernels.get(name)
    decoded = {} if kernel.decode is None else {"decoded": kernel.decode(arrays, params)}
    kernel.run({**arrays, **decoded}, params)


def stored(name: str, array: NDArray[Any], dtype: str | None = None) -> Weight:
    """An initialiser of these values; int4 and uint4 ones are stored two a byte, whatever the rows."""
    kind = dtype or str(array.dtype)
    if kind in ("int4", "uint4"):
        data = pack((array.reshape(-1).astype(np.int16) & 15).astype(np.uint8), 4, 9)
    else:
        data = np.ascontiguousarray(array.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind))
    return Weight(name, kind, array.shape, data.reshape(-1).view(np.uint8))


def compute(
    op: str,
    inputs: Mapping[str, NDArray[Any]],
    *,
    wiring: Sequence[str] | None = None,
    weights: Mapping[str, Weight] | None = None,
    domain: str = "com.microsoft",
    outputs: int = 1,
    **attributes: Any,
) -> list[NDArray[Any]]:
    """One node, lowered and run on the simulator: `inputs` are activations; `wiring` the names in order, "" absent."""
    names = tuple(wiring if wiring is not None else inputs)
    made = tuple(f"out{i}" for i in range(outputs))
    node = Node("node", op, domain, names, made, attributes)
    return run_nodes((node,), weights or {}, inputs, made)


def turn(x: F64, cos: F64, sin: F64, interleaved: bool) -> F64:
    """Rotary embedding of the first 2 * half columns of [rows, heads, size], pair by pair; the rest passes."""
    half = cos.shape[1]
    out = x.copy()
    for r in range(x.shape[0]):
        for i in range(half):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
            out[r, :, a] = x[r, :, a] * cos[r, i] - x[r, :, b] * sin[r, i]
            out[r, :, b] = x[r, :, a] * sin[r, i] + x[r, :, b] * cos[r, i]
    return out


def attend(query: F64, keys: F64, values: F64, past: int, p: Mapping[str, Any], sinks: F64 | None = None) -> F64:
    """Causal attention of new rows [rows, heads, d] over positions [positions, kv_heads, d], one score at a time."""
    rows, heads, _ = query.shape
    group = heads // keys.shape[1]
    out = np.zeros_like(query)
    for r in range(rows):
        at = past + r
        first = at - p["window"] + 1 if p["window"] > 0 else 0
        seen = range(max(first, 0), at + 1)
        for h in range(heads):
            scores = [float(query[r, h] @ keys[j, h // group]) * p["scale"] for j in seen]
            if p["softcap"]:
                scores = [p["softcap"] * math.tanh(s / p["softcap"]) for s in scores]
            top = max([*scores, *([] if sinks is None else [float(sinks[h])])])
            weights = [math.exp(s - top) for s in scores]
            total = sum(weights) + (0.0 if sinks is None else math.exp(float(sinks[h]) - top))
            out[r, h] = sum(
                (w / total * values[j, h // group] for w, j in zip(weights, seen, strict=True)), 0 * out[r, h]
            )
    return out


def silu(x: F64) -> F64:
    """x * sigmoid(x)."""
    return np.asarray(x / (1 + np.exp(-x)))
