"""Linear attention with a recurrent state, its gates, and the causal convolution with state.

States are float32 and updated token by token, so that neither how a prompt is cut nor batch can be felt.
"""

from __future__ import annotations

import math

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import blocks, sigmoid, softplus, wide


def run_linear_attention(a: Arrays, p: Params) -> None:
    """Per token and head: decay the state, write k (x) u, read out with q.

    S [batch, kv heads, dk, dv]. linear: S += k v^T. gated: decay first. delta: u = beta * (v - S^T k).
    gated_delta: both. The read-out scale * S^T q takes the updated state. onnx's and
    onnxruntime's LinearAttention.
    """
    q, k, v = (_heads(a[n], p[m]) for n, m in (("q", "q_heads"), ("k", "k_heads"), ("v", "kv_heads")))
    state = _state(a)
    batch, tokens = q.shape[:2]
    decay = wide(a["decay"]).reshape(batch, tokens, p["kv_heads"], -1) if "decay" in a else None
    beta = wide(a["beta"]).reshape(batch, tokens, -1) if "beta" in a else None
    out_heads = max(p["q_heads"], p["kv_heads"])
    y = np.empty((batch, tokens, out_heads, v.shape[-1]), np.float32)
    for b in range(batch):
        for t in range(tokens):
            gate = None if decay is None else decay[b, t]
            write = None if beta is None else beta[b, t]
            step(state[b], k[b, t], v[b, t], gate, write, p["rule"])
            y[b, t] = read_out(state[b], q[b, t], out_heads, p["scale"])
    _store(a, state)
    a["y"][...] = y.reshape(a["y"].shape)


def step(s: Array, k: Array, v: Array, gate: Array | None, beta: Array | None, rule: str) -> None:
    """One token's update of S [kv heads, dk, dv] in place; k [k heads, dk], v [kv heads, dv]."""
    k = np.repeat(k, s.shape[0] // k.shape[0], axis=0)
    if rule in ("gated", "gated_delta"):
        assert gate is not None
        s *= np.exp(gate.astype(np.float32))[..., None] if gate.shape[-1] > 1 else np.exp(gate)[..., None]
    u = v
    if rule in ("delta", "gated_delta"):
        assert beta is not None
        u = beta.reshape(-1, 1) * (v - (s * k[:, :, None]).sum(axis=1))
    s += k[:, :, None] * u[:, None, :]


def read_out(s: Array, q: Array, out_heads: int, scale: float) -> Array:
    """scale * S^T q for each output head; queries or states repeat, whichever are fewer."""
    queries = np.repeat(q, out_heads // q.shape[0], axis=0)
    states = np.repeat(s, out_heads // s.shape[0], axis=0)
    return np.asarray(np.float32(scale) * (states * queries[:, :, None]).sum(axis=1))


def run_linear_gate(a: Arrays, _: Params) -> None:
    """y = neg_exp_a * softplus(a + dt_bias), the decay's logarithm; y1 = sigmoid(b)."""
    a["y"][...] = a["c"].astype(np.float32) * softplus(a["a"].astype(np.float32) + a["b"].astype(np.float32))
    with np.errstate(over="ignore"):
        a["y1"][...] = sigmoid(a["d"].astype(np.float32))


def run_gated_delta_net(a: Arrays, p: Params) -> None:
    """Gated delta rule with its gates inside; the state is [batch, heads, dv, dk], the other way round."""
    q, k, v = (a[n].astype(np.float32) for n in "qkv")
    if p["l2_norm"]:
        q, k = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(p["eps"])) for x in (q, k))
    raw = a["gate"].astype(np.float32) + a["dt_bias"].astype(np.float32)
    decay = -np.exp(a["a_log"].astype(np.float32)) * softplus(raw)
    with np.errstate(over="ignore"):
        beta = sigmoid(a["beta"].astype(np.float32))
    batch, tokens = q.shape[:2]
    heads = v.shape[2]
    for b in range(batch):
        s = np.ascontiguousarray(a["state"][b].transpose(0, 2, 1))
        for t in range(tokens):
            step(s, k[b, t], v[b, t], decay[b, t].reshape(heads, 1), beta[b, t], "gated_delta")
            a["y"][b, t] = read_out(s, q[b, t], heads, p["scale"])
        a["state"][b] = s.transpose(0, 2, 1)


def run_causal_conv(a: Arrays, p: Params) -> None:
    """y[t] = act(bias + sum over taps of w * past-and-now); the state is the last taps - 1 inputs, not activated."""
    x, w = wide(a["x"]), wide(a["weight"])
    _, channels, tokens = x.shape
    taps = w.reshape(channels, -1)
    k = taps.shape[1]
    past = _state(a)
    seen = np.concatenate([past, x], axis=2)
    bias = wide(a["bias"]) if "bias" in a else np.zeros(channels, np.float32)
    y = np.empty(x.shape, np.float32)
    for t in range(tokens):
        y[:, :, t] = (seen[:, :, t : t + k] * taps[None]).sum(axis=2) + bias[None]
    if p["activation"] != "none":
        with np.errstate(over="ignore"):
            y *= sigmoid(y)
    _store(a, seen[:, :, seen.shape[2] - (k - 1) :])
    a["y"][...] = y


def _heads(x: Array, heads: int) -> Array:
    return x.astype(np.float32).reshape(x.shape[0], x.shape[1], heads, -1)


def _state(a: Arrays) -> Array:
    return a["state"].astype(np.float32, copy=True) if "state" in a else a["past"].astype(np.float32)


def _store(a: Arrays, state: Array) -> None:
    if "state" in a:
        a["state"][...] = state
    elif "present" in a:
        a["present"][...] = state


_COLUMNS = 64  # threads of a block, each with a column of a state


def _gates(refs: Refs, _: Params) -> Geometry:
    count = math.prod(refs["a"].shape)
    return Geometry((blocks(count), 1), {"count": count, "width": math.prod(refs["b"].shape)})


def _channels(refs: Refs, _: Params) -> Geometry:
    batch, channels, tokens = refs["x"].shape
    scalars = {"count": batch * channels, "channels": channels, "tokens": tokens}
    taps = {"TAPS": refs["weight"].shape[-1]}
    return Geometry((blocks(batch * channels, _COLUMNS), 1), scalars, taps, threads=_COLUMNS)


def _delta_net(refs: Refs, _: Params) -> Geometry:
    batch, tokens, q_heads, dk = refs["q"].shape
    heads, dv = refs["v"].shape[2:]
    defines = {"DK": dk, "DV": dv, "HEADS": heads, "Q_HEADS": q_heads}
    return Geometry((blocks(dv, _COLUMNS), batch * heads), {"tokens": tokens}, defines, threads=_COLUMNS)


def _recurrent(refs: Refs, p: Params) -> Geometry:
    batch, tokens, width = refs["q"].shape
    dv = refs["v"].shape[-1] // p["kv_heads"]
    defines = {"DK": width // p["q_heads"], "DV": dv}
    if "decay" in refs:
        defines["DECAYS"] = refs["decay"].shape[-1] // p["kv_heads"]
    if "beta" in refs:
        defines["BETAS"] = refs["beta"].shape[-1]
    grid = (blocks(dv, _COLUMNS), batch * p["kv_heads"])
    return Geometry(grid, {"tokens": tokens}, defines, threads=_COLUMNS)


define(KernelDef("linear_attention", run_linear_attention, cuda=CudaForm("linear", _recurrent)))
define(KernelDef("linear_gate", run_linear_gate, cuda=CudaForm("linear", _gates)))
define(KernelDef("gated_delta_net", run_gated_delta_net, cuda=CudaForm("linear", _delta_net)))
define(KernelDef("causal_conv", run_causal_conv, cuda=CudaForm("linear", _channels)))
