"""Products of one row at a time with a weight."""

from __future__ import annotations

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define


def decode_dense(a: Arrays, _: Params) -> Array:
    """Weight [K, N] as float32."""
    return np.array(a["weight"], dtype=np.float32)  # a copy: the bytes it came from may change under it


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


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


define(KernelDef("matmul", run_dense, ("weight",), decode_dense))
define(KernelDef("matmul_nbits", run_nbits, ("codes", "scales", "zero_points"), decode_nbits))
