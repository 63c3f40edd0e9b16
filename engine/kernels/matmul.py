"""Products of one row at a time with a weight."""

from __future__ import annotations

import numpy as np

from engine.graph import PACKED, unpack_nibbles
from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.elementwise import wide


def decode_dense(a: Arrays, p: Params) -> Array:
    """Weight as float32 [K, N], a view of what lies as [N, K] where it is `transposed`."""
    weight = np.array(a["weight"], dtype=np.float32)  # a copy: the bytes it came from may change under it
    return weight.T if p["transposed"] else weight


def run_dense(a: Arrays, _: Params) -> None:
    """y = x @ weight, row by row."""
    x, y, w = _rows(a["x"]), _rows(a["y"]), a["decoded"]
    for r in range(x.shape[0]):
        y[r] = np.dot(x[r].astype(np.float32, copy=False), w)


def unpack(codes: Array, bits: int, k: int) -> Array:
    """Codes [N, blocks, bytes] to [N, K] uint8; the low nibble comes first, padding beyond K is dropped."""
    flat = codes.reshape(codes.shape[0], -1)
    if bits == 8:
        return flat[:, :k]
    out = np.empty((flat.shape[0], flat.shape[1] * 2), np.uint8)
    np.bitwise_and(flat, 15, out=out[:, 0::2])
    np.right_shift(flat, 4, out=out[:, 1::2])
    return out[:, :k]


def zero_points(points: Array | None, bits: int, n: int, blocks: int) -> Array:
    """Zero points as float32 [N, blocks] or a scalar: packed rows are padded to whole bytes, low nibble first."""
    if points is None:
        return np.float32(1 << (bits - 1)) * np.ones((1, 1), np.float32)
    if points.dtype != np.uint8 or bits == 8:
        return points.astype(np.float32).reshape(n, blocks)
    return unpack(points.reshape(n, 1, -1), 4, blocks).astype(np.float32)


def decode_nbits(a: Arrays, p: Params) -> Array:
    """(code - zero point) * scale, float32 [N, K]; MatMulNBits of onnxruntime's contrib operators."""
    n, k, bits, block = p["N"], p["K"], p["bits"], p["block"]
    blocks = -(-k // block)
    scales = a["scales"].astype(np.float32)
    points = zero_points(a.get("zero_points"), bits, n, blocks)
    w = unpack(a["codes"], bits, k).astype(np.float32)
    if k % block:
        column = np.arange(k) // block
        wide = points if points.shape[1] == 1 else points[:, column]
        return np.asarray((w - wide) * scales[:, column])
    shaped = w.reshape(n, blocks, block)
    shaped -= points[..., None]
    shaped *= scales[..., None]
    return w


def run_nbits(a: Arrays, _: Params) -> None:
    """y = x @ decoded.T (+ bias), row by row."""
    x, y, w = _rows(a["x"]), _rows(a["y"]), a["decoded"]
    bias = a["bias"].astype(np.float32) if "bias" in a else None
    for r in range(x.shape[0]):
        product = np.dot(w, x[r].astype(np.float32, copy=False))
        y[r] = product if bias is None else product + bias


def decode_qdq(a: Arrays, p: Params) -> Array:
    """(code - zero point) * scale, float32 [K, N]: scales and zero points in blocks of `block` rows."""
    row = np.arange(p["K"]) // p["block"]
    n, packed = p["N"], p["type"] in PACKED
    codes = unpack_nibbles(a["codes"], p["type"], p["K"] * n).reshape(-1, n) if packed else a["codes"]
    w = codes.astype(np.float32)
    if "zero_points" in a:
        points = a["zero_points"]
        if packed:
            points = unpack_nibbles(points, p["type"], (row[-1] + 1) * n).reshape(-1, n)
        w -= points.astype(np.float32)[row]
    w *= a["scales"].astype(np.float32)[row]
    return w


def run_batched(a: Arrays, _: Params) -> None:
    """y = a @ b over leading axes, row by row; integers as they are."""
    left, right, y = wide(a["a"]), wide(a["b"]), a["y"]
    if left.dtype.kind != "f" or left.ndim < 2 or right.ndim < 2:
        with np.errstate(over="ignore"):
            y[...] = np.matmul(left, right)
        return
    lead = y.shape[:-2]
    lefts = np.broadcast_to(left, (*lead, *left.shape[-2:]))
    rights = np.broadcast_to(right, (*lead, *right.shape[-2:]))
    for i in np.ndindex(lead):
        for r in range(left.shape[-2]):
            y[i][r] = np.dot(lefts[i][r], rights[i])


def run_gemm(a: Arrays, p: Params) -> None:
    """y = alpha * a @ b (+ beta * c)."""
    left = wide(a["a"]).T if p["turn_a"] else wide(a["a"])
    right = wide(a["b"]).T if p["turn_b"] else wide(a["b"])
    product = left.dtype.type(p["alpha"]) * np.stack([np.dot(row, right) for row in left])
    a["y"][...] = product if "c" not in a else product + left.dtype.type(p["beta"]) * wide(a["c"])


def run_dequantize(a: Arrays, p: Params) -> None:
    """y = (a - zero point) * scale; one scale, one an index of `axis`, or one a block of `axis`."""
    x, scale = a["a"], wide(a["b"])
    points = a["c"].astype(np.float64) if "c" in a else np.zeros((), np.float64)
    if p["block"]:
        at = np.arange(x.shape[p["axis"]]) // p["block"]
        scale = np.take(scale, at, p["axis"])
        points = np.take(points, at, p["axis"]) if points.ndim else points
    elif scale.ndim == 1 and scale.size > 1:
        shape = [-1 if i == p["axis"] else 1 for i in range(x.ndim)]
        scale, points = scale.reshape(shape), points.reshape(shape) if points.ndim else points
    else:
        scale, points = scale.reshape(()), points.reshape(())
    a["y"][...] = (x.astype(np.float64) - points).astype(scale.dtype) * scale


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


define(KernelDef("matmul", run_dense, ("weight",), decode_dense))
define(KernelDef("matmul_nbits", run_nbits, ("codes", "scales", "zero_points"), decode_nbits))
define(KernelDef("matmul_qdq", run_dense, ("codes", "scales", "zero_points"), decode_qdq))
define(KernelDef("batched_matmul", run_batched))
define(KernelDef("gemm", run_gemm))
define(KernelDef("dequantize", run_dequantize))
