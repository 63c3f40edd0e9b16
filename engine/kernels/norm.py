"""Root-mean-square norms."""

from __future__ import annotations

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define


def run_rms_norm(a: Arrays, p: Params) -> None:
    """y = x * rsqrt(mean(x^2) + eps) * gamma over the last axis."""
    _norm(a["x"], a["gamma"], p["eps"], a["y"])


def run_skip_rms_norm(a: Arrays, p: Params) -> None:
    """sum = x + skip (+ bias), rounded to its type; y = norm of the rounded sum."""
    total = a["x"].astype(np.float32) + a["skip"].astype(np.float32)
    if "bias" in a:
        total += a["bias"].astype(np.float32)
    a["sum"][...] = total
    _norm(a["sum"], a["gamma"], p["eps"], a["y"])


def _norm(x: Array, gamma: Array, eps: float, y: Array) -> None:
    g = gamma.astype(np.float32, copy=False)
    wide = x.reshape(-1, x.shape[-1]).astype(np.float32, copy=False)
    out = y.reshape(-1, y.shape[-1])
    for r in range(wide.shape[0]):
        row = wide[r]
        mean = np.dot(row, row) / np.float32(row.size)
        # Squares that overflow would give zeros, and zeros give logits that look like numbers: let it show.
        scale = np.float32(1) / np.sqrt(mean + np.float32(eps)) if np.isfinite(mean) else np.float32(np.nan)
        out[r] = row * scale * g


define(KernelDef("rms_norm", run_rms_norm))
define(KernelDef("skip_rms_norm", run_skip_rms_norm))
