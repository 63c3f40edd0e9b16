"""Products of one row at a time with a weight."""

from __future__ import annotations

import math

import numpy as np

from engine.graph import DTYPES, PACKED, unpack_nibbles
from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import THREADS, CudaForm, Geometry, Refs, Scalar
from engine.kernels.elementwise import blocks, wide
from engine.kernels.norm import rms
from engine.kernels.steps import around, broadcast, merged, rows_first

MOST = ("", "2", "3")
"""What the names of a weight's operands, parameter N and output end in: products of one x may be one step."""


def ends(p: Params) -> list[str]:
    """The endings of a product's weights."""
    return [end for end in MOST if f"N{end}" in p]


def decode_dense(a: Arrays, p: Params) -> Array:
    """Weight as float32 [K, N], a view of what lies as [N, K] where it is `transposed`; weights side by side."""
    made = [np.array(a[f"weight{end}"], dtype=np.float32) for end in ends(p)]  # copies: their bytes may change
    weight = made[0] if len(made) == 1 else np.concatenate(made, axis=1)
    return weight.T if p["transposed"] else weight


def run_dense(a: Arrays, p: Params) -> None:
    """y = x @ weight, row by row, x normed first where there is a gamma; a weight's columns go to its own y."""
    x, w = _rows(a["x"]), a["decoded"]
    if "gamma" in a:
        normed = np.empty(x.shape, np.float32)
        rms(x, a["gamma"], p["eps"], normed)
        x = normed
    outputs = [_rows(a[f"y{end}"]) for end in ends(p)]
    for r in range(x.shape[0]):
        product, start = np.dot(x[r].astype(np.float32, copy=False), w), 0
        for y in outputs:
            y[r] = product[start : start + y.shape[1]]
            start += y.shape[1]


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


_OUTPUTS = 32  # a block makes of a product with codes
_COLUMNS = 8  # a block makes of a dense product
_LINES = 8  # warps of a block, each with an output of its own


def _dense(refs: Refs, p: Params) -> Geometry:
    rows = math.prod(refs["x"].shape[:-1])
    if "codes" in refs or p["transposed"]:
        return Geometry((blocks(p["N"], _OUTPUTS if "codes" in refs else _LINES), rows))
    widths = [p[f"N{end}"] for end in ends(p)]
    defines: dict[str, str | int] = {"THREADS": THREADS}
    element = DTYPES[refs["weight"].dtype].itemsize
    if all(n % _COLUMNS == 0 for n in widths) and _COLUMNS * element % 16 == 0:
        defines["WHOLE_ROWS"] = 1
    return Geometry((sum(blocks(n, _COLUMNS) for n in widths), rows), defines=defines)


def _contract(refs: Refs, p: Params) -> Geometry:
    """Both products of any two tensors: gemm says how its matrices are turned."""
    a, b = refs["a"].shape, refs["b"].shape
    a, b = (1, *a) if len(a) == 1 else a, (*b, 1) if len(b) == 1 else b
    turn_a, turn_b = p.get("turn_a", False), p.get("turn_b", False)
    lead = np.broadcast_shapes(a[:-2], b[:-2])
    depth, m = (a[-2], a[-1]) if turn_a else (a[-1], a[-2])
    n = b[-2] if turn_b else b[-1]
    steps_a, steps_b = rows_first(a), rows_first(b)
    deep_a, row_a = steps_a[-2:] if turn_a else steps_a[:-3:-1]
    deep_b, column_b = steps_b[:-3:-1] if turn_b else steps_b[-2:]
    to = (*lead, m, n)
    given = [
        (*broadcast(a, (*lead, *a[-2:]))[:-2], row_a, 0),
        (*broadcast(b, (*lead, *b[-2:]))[:-2], 0, column_b),
    ]
    if "c" in refs:
        given.append(broadcast(refs["c"].shape, to))
    shape, *steps = merged(to, *given)
    count = math.prod(to)
    scalars: dict[str, Scalar] = {"count": count, "depth": depth, "a_deep": deep_a, "b_deep": deep_b, "shape": shape}
    scalars |= {f"{name}_steps": of for name, of in zip("abc", steps, strict=False)}
    return Geometry((blocks(count, _LINES), 1), scalars)


def _dequantize(refs: Refs, p: Params) -> Geometry:
    x, scale = refs["a"].shape, refs["b"].shape
    count = math.prod(x)
    if p["block"] or (len(scale) == 1 and math.prod(scale) > 1):
        _, extent, inner = around(x, p["axis"])
    else:
        extent, inner = 1, 1
    one = math.prod(scale) == 1 and not p["block"]
    scalars: dict[str, Scalar] = {"count": count, "extent": extent, "inner": inner}
    return Geometry((blocks(count), 1), scalars, {"ONE_SCALE": int(one)})


_WEIGHTS = tuple(f"weight{end}" for end in MOST)
_DENSE = CudaForm("matmul", _dense, early=True)
define(KernelDef("matmul", run_dense, _WEIGHTS, decode_dense, _DENSE))
define(KernelDef("matmul_qdq", run_dense, ("codes", "scales", "zero_points"), decode_qdq, _DENSE))
define(KernelDef("batched_matmul", run_batched, cuda=CudaForm("contract", _contract)))
define(KernelDef("gemm", run_gemm, cuda=CudaForm("contract", _contract)))
define(KernelDef("dequantize", run_dequantize, cuda=CudaForm("dequantize", _dequantize)))
