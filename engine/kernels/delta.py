"""Gated delta attention of one sequence as one step: what the target makes of a LinearAttention and its neighbours."""

from __future__ import annotations

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import sigmoid, softplus
from engine.kernels.linear import read_out, step
from engine.kernels.norm import rms

_PARTS = 4
"""Threads that share a column of a head's state."""


def run_delta(a: Arrays, p: Params) -> None:
    """y = silu(gate) * rms norm of what the gated delta rule reads out, a row a token.

    `qkv` [1, tokens, q heads * dk + q heads * dk + heads * dv]: q and k are taken at length 1, q times `scale`.
    log of the decay = c * softplus(a + b), the write's strength = sigmoid(d). state [1, heads, dk, dv] is advanced.
    """
    heads, q_heads = p["kv_heads"], p["q_heads"]
    dk, dv = a["state"].shape[2:]
    rows = a["qkv"].reshape(-1, a["qkv"].shape[-1])
    tokens = rows.shape[0]
    q, k, v = np.split(rows, (q_heads * dk, 2 * q_heads * dk), axis=1)
    q, k = (_unit(x.reshape(tokens, q_heads, dk)) for x in (q, k))
    if "scale" in a:
        q = q * a["scale"].astype(np.float32).reshape(())
    raw = a["a"].reshape(tokens, heads) + a["b"].astype(np.float32)
    decay = a["c"].astype(np.float32) * softplus(raw)
    with np.errstate(over="ignore"):
        write = sigmoid(a["d"].reshape(tokens, heads))
        gate = a["gate"].reshape(tokens, heads, dv)
        open_by = gate * sigmoid(gate)
    out = np.empty((tokens, heads, dv), np.float32)
    state = a["state"][0]
    for t in range(tokens):
        step(state, k[t], v[t].reshape(heads, dv), decay[t, :, None], write[t], "gated_delta")
        out[t] = read_out(state, q[t], heads, p["scale"])
    normed = np.empty_like(out)
    rms(out.reshape(-1, dv), a["gamma"].reshape(-1), p["eps"], normed.reshape(-1, dv))
    a["y"][...] = (normed * open_by).reshape(a["y"].shape)


def _unit(x: Array) -> Array:
    """Vectors of the last axis over their length; zeros for those that have none."""
    length = np.sqrt((x * x).sum(axis=-1, keepdims=True))
    return np.asarray(np.divide(x, length, out=np.zeros_like(x), where=length != 0))


def serves(dk: int, dv: int) -> bool:
    """Whether a block has a head of this size."""
    return dk % 32 == 0 and dv % 32 == 0 and dk <= 256 and dv <= 256


def _heads(refs: Refs, p: Params) -> Geometry:
    dk, dv = refs["state"].shape[2:]
    threads = _PARTS * dv
    defines = {"DK": dk, "DV": dv, "THREADS": threads}
    return Geometry((p["kv_heads"], 1), {"tokens": refs["qkv"].shape[1]}, defines, threads=threads)


define(KernelDef("delta", run_delta, cuda=CudaForm("delta", _heads, early=True)))
