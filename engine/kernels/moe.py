"""Mixture of experts: routing with a total order, and the experts' two products, one token at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import elementwise, gelu, sigmoid
from engine.kernels.matmul import unpack


def route(logits: Array, k: int, normalise: bool) -> tuple[Array, Array]:
    """The k experts of one token by logit, largest first, ties to the lower index, and their weights.

    So do onnxruntime's CUDA kernels and TopK; its CPU kernels of MoE and QMoE give a tie to the higher index.
    Softmax over all experts, taken at the chosen ones; normalised: softmax over the chosen alone.
    """
    chosen = np.lexsort((np.arange(logits.size), -logits))[:k]
    return chosen, shares(logits, chosen, normalise)


def shares(logits: Array, chosen: Array, normalise: bool) -> Array:
    """The weights of a token's chosen experts."""
    picked = logits[chosen] if normalise else logits
    e = np.exp(picked - logits.max())
    weights = e / e.sum()
    return np.asarray(weights if normalise else weights[chosen])


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
            y[t] = _mixed(a, x[t], chosen, weights, p)


def run_route(a: Arrays, p: Params) -> None:
    """The first half of a mixture's step whose experts are keys of their own: which of them each token chose."""
    chosen = a["routed"]
    logits = a["router"].reshape(len(chosen), -1).astype(np.float32)
    for t in range(len(chosen)):
        chosen[t] = route(logits[t], p["k"], p["normalise"])[0]


def run_experts(a: Arrays, p: Params) -> None:
    """The second half, which finds each expert's parts under their names and its number; y is as `run_moe` has it."""
    x = a["x"].reshape(-1, a["x"].shape[-1]).astype(np.float32)
    logits = a["router"].reshape(x.shape[0], -1).astype(np.float32)
    y = a["y"].reshape(x.shape)
    with np.errstate(over="ignore"):
        for t in range(x.shape[0]):
            chosen = a["routed"][t]
            y[t] = _mixed(a, x[t], chosen, shares(logits[t], chosen, p["normalise"]), p)


def expert_operand(part: str, expert: int) -> str:
    """Name of an expert's own part among the operands of `experts`."""
    return f"{part}@{expert}"


def run_gated_add(a: Arrays, _: Params) -> None:
    """y = a + b * c."""
    a["y"][...] = a["a"].astype(np.float32) + a["b"].astype(np.float32) * a["c"].astype(np.float32)


def expert_outputs(a: Arrays, x: Array, chosen: Array, p: Params) -> Iterator[tuple[Array, Array]]:
    """Of each chosen expert what its activation made of one token, and what its second product made of that."""
    for expert in chosen:
        hidden = activate(_fc(a, "fc1", int(expert), x, p), p)
        yield hidden, _fc(a, "fc2", int(expert), hidden, p)


def _mixed(a: Arrays, x: Array, chosen: Array, weights: Array, p: Params) -> Array:
    """One token's sum over its experts, in the order of the choice."""
    total = np.zeros(x.shape, np.float32)
    for weight, (_, out) in zip(weights, expert_outputs(a, x, chosen, p), strict=True):
        total += np.float32(weight) * out
    return total


def _part(a: Arrays, name: str, expert: int) -> Array | None:
    """An expert's part, out of the bank's or on its own; None where the bank has no such part."""
    return a[name][expert] if name in a else a.get(expert_operand(name, expert))


def _fc(a: Arrays, name: str, expert: int, x: Array, p: Params) -> Array:
    stored, bias = _part(a, name, expert), _part(a, f"{name}_bias", expert)
    assert stored is not None, (name, expert)
    w = _decoded(a, name, stored, expert, x.size, p) if p["bits"] else stored
    product = np.dot(w.astype(np.float32, copy=False), x)
    return np.asarray(product if bias is None else product + bias.astype(np.float32))


def _decoded(a: Arrays, name: str, codes: Array, expert: int, width: int, p: Params) -> Array:
    """One expert's weight, (code - zero point) * scale, [rows, width]: a block of columns, the last perhaps short."""
    bits, rows = p["bits"], codes.shape[0]
    of = np.arange(width) // (p["block"] or width)
    stored, packed = _part(a, f"{name}_scales", expert), _part(a, f"{name}_zero_points", expert)
    assert stored is not None, (name, expert)
    scales = stored.astype(np.float32).reshape(rows, -1)
    points = np.full((1, scales.shape[1]), 1 << (bits - 1), np.float32)
    if packed is not None:
        points = unpack(packed.reshape(rows, 1, -1), bits, scales.shape[1]).astype(np.float32)
    wide = unpack(codes.reshape(rows, 1, -1), bits, width).astype(np.float32)
    return np.asarray((wide - points[:, of]) * scales[:, of])


def _tokens(refs: Refs, p: Params) -> Geometry:
    hidden, rows = refs["x"].shape[-1], refs["fc1"].shape[1]
    inner = rows // 2 if p["activation"] == "swiglu" else rows
    tokens = math.prod(refs["x"].shape[:-1])
    defines = {"HIDDEN": hidden, "ROWS": rows, "INNER": inner, "EXPERTS": refs["fc1"].shape[0]}
    return Geometry((tokens, 1), defines=defines, shared_bytes=4 * (2 * hidden + rows))


def _routes(refs: Refs, _: Params) -> Geometry:
    """A warp a token."""
    tokens = math.prod(refs["routed"].shape[:-1])
    return Geometry((tokens, 1), defines={"EXPERTS": refs["router"].shape[-1]}, threads=32)


ROUTING = "routing"
"""Source of how a token's experts are chosen, for whoever does it."""
define(KernelDef("moe", run_moe, cuda=CudaForm("moe", _tokens, heads=(ROUTING,))))
define(KernelDef("route", run_route, cuda=CudaForm("route", _routes, heads=(ROUTING,))))
define(KernelDef("experts", run_experts, cuda=CudaForm("moe", _tokens, heads=(ROUTING,))))
define(KernelDef("gated_add", run_gated_add, cuda=elementwise("(float)A + (float)B * (float)C")))
