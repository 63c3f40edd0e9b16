"""Norms over trailing axes: mean and root-mean-square, alone and with the residual's sum. Statistics are in float32."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import sigmoid, wide


def run_rms_norm(a: Arrays, p: Params) -> None:
    """y = x * rsqrt(mean(x^2) + eps) * gamma over the last axis."""
    rms(a["x"], a["gamma"], p["eps"], a["y"])


def run_skip_rms_norm(a: Arrays, p: Params) -> None:
    """sum = x + skip (+ bias), rounded to its type; y = norm of the rounded sum."""
    _residual(a)
    rms(a["sum"], a["gamma"], p["eps"], a["y"])


def run_skip_layer_norm(a: Arrays, p: Params) -> None:
    """sum = x + skip (+ bias), rounded to its type; y = layer norm of the rounded sum."""
    _residual(a)
    _mean_norm(a["sum"], a["gamma"], a.get("beta"), p["eps"], a["y"], None, None)


def run_layer_norm(a: Arrays, p: Params) -> None:
    """y = (x - mean) / sqrt(var + eps) * gamma (+ beta) over trailing axes; mean and inverse deviation beside."""
    x = a["a"].reshape(p["rows"], -1)
    y, gamma, beta = a["y"].reshape(p["rows"], -1), a["b"].reshape(-1), a["c"].reshape(-1) if "c" in a else None
    mean = a["y1"].reshape(-1) if "y1" in a else None
    inverse = a["y2"].reshape(-1) if "y2" in a else None
    _mean_norm(x, gamma, beta, p["eps"], y, mean, inverse)


def run_rms_norm_axes(a: Arrays, p: Params) -> None:
    """y = x * rsqrt(mean(x^2) + eps) * gamma over the axes from `axis`."""
    shape = (p["rows"], -1)
    rms(a["a"].reshape(shape), a["b"].reshape(-1), p["eps"], a["y"].reshape(shape))


def run_gated_rms_norm(a: Arrays, p: Params) -> None:
    """y = rms norm of a times gamma b, times silu of the gate c; stretches of gamma's size are normed each."""
    y = np.empty(a["a"].shape, np.float32)
    width = a["b"].size
    rms(a["a"].reshape(-1, width), a["b"].reshape(-1), p["eps"], y.reshape(-1, width))
    gate = wide(a["c"])
    with np.errstate(over="ignore"):
        a["y"][...] = y * (gate * sigmoid(gate)).reshape(y.shape)


def _residual(a: Arrays) -> None:
    total = a["x"].astype(np.float32) + a["skip"].astype(np.float32)
    if "bias" in a:
        total += a["bias"].astype(np.float32)
    a["sum"][...] = total


def rms(x: Array, gamma: Array, eps: float, y: Array) -> None:
    """y = x * rsqrt(mean(x^2) + eps) * gamma over the last axis, row by row."""
    g = gamma.astype(np.float32, copy=False)
    rows = x.reshape(-1, x.shape[-1]).astype(np.float32, copy=False)
    out = y.reshape(-1, y.shape[-1])
    with np.errstate(all="ignore"):
        for r in range(rows.shape[0]):
            row = rows[r]
            mean = np.dot(row, row) / np.float32(row.size)
            # Squares that overflow would give zeros, and zeros give logits that look like numbers: let it show.
            scale = np.float32(1) / np.sqrt(mean + np.float32(eps)) if np.isfinite(mean) else np.float32(np.nan)
            out[r] = row * scale * g


def _mean_norm(
    x: Array, gamma: Array, beta: Array | None, eps: float, y: Array, means: Array | None, inverses: Array | None
) -> None:
    g = gamma.astype(np.float32, copy=False)
    shift = beta.astype(np.float32) if beta is not None else np.float32(0)
    rows = x.reshape(-1, x.shape[-1]).astype(np.float32, copy=False)
    out = y.reshape(-1, y.shape[-1])
    with np.errstate(all="ignore"):
        for r in range(rows.shape[0]):
            mean = rows[r].mean(dtype=np.float32)
            centred = rows[r] - mean
            inverse = np.float32(1) / np.sqrt(np.dot(centred, centred) / np.float32(centred.size) + np.float32(eps))
            out[r] = centred * inverse * g + shift
            if means is not None:
                means[r] = mean
            if inverses is not None:
                inverses[r] = inverse


def _rows(x: str, gamma: str, beta: str = "", gate: str = "") -> Callable[[Refs, Params], Geometry]:
    """A block a row of `x`; the names that the body's X, GAMMA, BETA and GATE stand for."""

    def geometry(refs: Refs, _: Params) -> Geometry:
        width = math.prod(refs[gamma].shape)
        defines = {"X": x, "X_t": f"{x}_t", "GAMMA": gamma}
        defines |= {name: of for name, of in (("BETA", beta), ("GATE", gate)) if of in refs}
        return Geometry((max(1, math.prod(refs[x].shape) // width), 1), {"width": width}, defines)

    return geometry


for _name, _run, _geometry in (
    ("rms_norm", run_rms_norm, _rows("x", "gamma")),
    ("skip_rms_norm", run_skip_rms_norm, _rows("sum", "gamma")),
    ("skip_layer_norm", run_skip_layer_norm, _rows("sum", "gamma", "beta")),
    ("gated_rms_norm", run_gated_rms_norm, _rows("a", "b", gate="c")),
):
    define(KernelDef(_name, _run, cuda=CudaForm("norm", _geometry)))
define(KernelDef("layer_norm", run_layer_norm, cuda=CudaForm("norm", _rows("a", "b", "c"), runtime=("rows",))))
define(KernelDef("rms_norm_axes", run_rms_norm_axes, cuda=CudaForm("norm", _rows("a", "b"), runtime=("rows",))))
