"""Mixture of experts: routing with a total order, and the experts' two products, one token at a time."""

from __future__ import annotations

import math

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import elementwise, gelu, sigmoid
from engine.kernels.matmul import unpack


def route(logits: Array, k: int, normalise: bool) -> tuple[Array, Array]:
    """The k experts of one token by logit, largest first, ties to the lower index, and their weights.

    Softmax over all experts, taken at the chosen ones; normalised: softmax over the chosen alone.
    """
    chosen = np.lexsort((np.arange(logits.size), -logits))[:k]
    picked = logits[chosen] if normalise else logits
    e = np.exp(picked - logits.max())
    weights = e / e.sum()
    return chosen, np.asarray(weights if normalise else weights[chosen])


def activate(x: Array, p: Params) -> Array:
    """The experts' activation; swiglu takes gates and values from even and odd elements (fusion 1) or halves (2)."""
    kind = p["activation"]
    if kind == "swiglu":
        gate, value = (x[0::2], x[1::2]) if p["fusion"] == 1 else np.split(x, 2)
        if p["limit"] is not None:
            limit = np.float32(p["limit"])
            gate, value = np.minimum(gate, limit), np.clip(value, -limit, limit)
        return np.asarray(gate * sigmoid(np.float32(p["alpha"]) * gate) * (value + np.float32(p["beta"])))
    if kind == "silu":
        return np.asarray(x * sigmoid(x))
    if kind == "gelu":
        return gelu(x, "tanh")  # as every one of onnxruntime's MoE kernels has it
    return np.maximum(x, 0) if kind == "relu" else x


def run_moe(a: Arrays, p: Params) -> None:
    """y = sum over a token's experts of weight * (fc2 @ act(fc1 @ x + bias) + bias)."""
    x = a["x"].reshape(-1, a["x"].shape[-1]).astype(np.float32)
    logits = a["router"].reshape(x.shape[0], -1).astype(np.float32)
    y = a["y"].reshape(x.shape)
    with np.errstate(over="ignore"):
        for t in range(x.shape[0]):
            chosen, weights = route(logits[t], p["k"], p["normalise"])
            if "routed" in a:
                a["routed"][t] = chosen
            total = np.zeros(x.shape[1], np.float32)
            for expert, weight in zip(chosen, weights, strict=True):
                hidden = activate(_fc(a, "fc1", int(expert), x[t], p), p)
                total += np.float32(weight) * _fc(a, "fc2", int(expert), hidden, p)
            y[t] = total


def run_gated_add(a: Arrays, _: Params) -> None:
    """y = a + b * c."""
    a["y"][...] = a["a"].astype(np.float32) + a["b"].astype(np.float32) * a["c"].astype(np.float32)


def _fc(a: Arrays, name: str, expert: int, x: Array, p: Params) -> Array:
    w = _decoded(a, name, expert, x.size, p) if p["bits"] else a[name][expert]
    product = np.dot(w.astype(np.float32, copy=False), x)
    return np.asarray(product + a[f"{name}_bias"][expert].astype(np.float32) if f"{name}_bias" in a else product)


def _decoded(a: Arrays, name: str, expert: int, width: int, p: Params) -> Array:
    """One expert's weight, (code - zero point) * scale, [rows, width]: a block of columns, the last perhaps short."""
    bits, codes = p["bits"], a[name][expert]
    rows = codes.shape[0]
    of = np.arange(width) // (p["block"] or width)
    scales = a[f"{name}_scales"][expert].astype(np.float32).reshape(rows, -1)
    points = np.full((1, scales.shape[1]), 1 << (bits - 1), np.float32)
    if f"{name}_zero_points" in a:
        packed = a[f"{name}_zero_points"][expert].reshape(rows, 1, -1)
        points = unpack(packed, bits, scales.shape[1]).astype(np.float32)
    wide = unpack(codes.reshape(rows, 1, -1), bits, width).astype(np.float32)
    return np.asarray((wide - points[:, of]) * scales[:, of])


def _tokens(refs: Refs, p: Params) -> Geometry:
    hidden, rows = refs["x"].shape[-1], refs["fc1"].shape[1]
    inner = rows // 2 if p["activation"] == "swiglu" else rows
    tokens = math.prod(refs["x"].shape[:-1])
    defines = {"HIDDEN": hidden, "ROWS": rows, "INNER": inner, "EXPERTS": refs["fc1"].shape[0]}
    return Geometry((tokens, 1), defines=defines, shared_bytes=4 * (2 * hidden + rows))


define(KernelDef("moe", run_moe, cuda=CudaForm("moe", _tokens)))
define(KernelDef("gated_add", run_gated_add, cuda=elementwise("(float)A + (float)B * (float)C")))
