"""Mixtures of experts: every expert takes all of its tokens in one product."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.oracle.inputs import MICROSOFT, Array, Computed, Inputs, Unserved, rule, sigmoid
from engine.oracle.products import codes, dequantised

Experts = Callable[[int], Array]
"""Weights of one expert in float32, [out, in]."""


@rule("MoE", MICROSOFT)
def _moe(i: Inputs) -> Computed:
    """Weights [E, out, in] as floats; inputs 2 to 5 are fc1, its bias, fc2, its bias."""
    if i.has(6) or i.has(7):
        raise Unserved("a third product")

    def floats(index: int) -> Experts:
        stored = i.stored(index)
        return lambda e: np.asarray(stored[e], np.float32)

    return _mixed(i, floats(2), _bias(i, 3), floats(4), _bias(i, 5))


@rule("QMoE", MICROSOFT)
def _qmoe(i: Inputs) -> Computed:
    """Weights [E, out, in * bits / 8] as codes, with scales by block of `in` or by row."""
    i.only("quant_type", "int")
    i.only("weights_prepacked", -1, 0)
    if any(i.has(n) for n in (8, 9, 10, 13, *range(14, 21))):
        raise Unserved("a third product, router weights or global scales")
    hidden = i.floats(0).shape[-1]
    bits = i.whole("expert_weight_bits", 4)
    inner = i.stored(5).shape[2] * 8 // bits
    wide = 2 if i.node.attributes.get("activation_type") == "swiglu" else 1
    if i.stored(2).shape[1:] != (wide * inner, hidden * bits // 8) or i.stored(5).shape[1] != hidden:
        raise Unserved(f"experts {list(i.stored(2).shape)} and {list(i.stored(5).shape)}, which are not raw rows")
    fc1, fc2 = _coded(i, 2, 3, 11, hidden, bits), _coded(i, 5, 6, 12, inner, bits)
    return _mixed(i, fc1, _bias(i, 4), fc2, _bias(i, 7))


def _coded(i: Inputs, weight: int, scale: int, point: int, width: int, bits: int) -> Experts:
    stored = i.stored(weight)
    experts, out = stored.shape[:2]
    block = i.whole("block_size", 0) or width
    scales = i.stored(scale).reshape(experts, out, -(-width // block))
    points = i.stored(point).reshape(experts, out, -1) if i.has(point) else None

    def floats(e: int) -> Array:
        s = np.asarray(scales[e], np.float32)
        z = np.full(s.shape, 1 << (bits - 1), np.float32)
        if points is not None:
            z = codes(points[e], bits)[:, : s.shape[1]].astype(np.float32)
        q = codes(stored[e], bits)
        spare = s.shape[1] * block - q.shape[1]
        return dequantised(np.pad(q, ((0, 0), (0, spare))), s, z, width)

    return floats


def _bias(i: Inputs, index: int) -> Experts:
    stored = i.stored(index) if i.has(index) else None
    return lambda e: np.zeros(1, np.float32) if stored is None else np.asarray(stored[e], np.float32)


def _mixed(i: Inputs, fc1: Experts, bias1: Experts, fc2: Experts, bias2: Experts) -> Array:
    """Sum over a token's experts of weight * (fc2 act(fc1 x + bias) + bias)."""
    i.only("use_sparse_mixer", 0)
    x = i.floats(0)
    tokens = x.reshape(-1, x.shape[-1])
    logits = i.floats(1).reshape(len(tokens), -1)
    weights = routed(logits, i.whole("k", 1), bool(i.whole("normalize_routing_weights", 0)))
    total = np.zeros_like(tokens)
    for e in range(logits.shape[1]):
        mine = np.flatnonzero(weights[:, e] != 0)  # what is not a number takes part, and shows
        if mine.size:
            inner = _activated(i, tokens[mine] @ fc1(e).T + bias1(e))
            total[mine] += weights[mine, e, None] * (inner @ fc2(e).T + bias2(e))
    return total.reshape(x.shape)


def routed(logits: Array, k: int, normalise: bool) -> Array:
    """Weights [tokens, experts], 0 where not chosen: a softmax over all, kept at the k largest, ties to the lower id.

    Normalised, the kept ones sum to 1. So say the operators' text and onnxruntime's CUDA kernels; on the CPU its QMoE
    always normalises, and both operators give a tie to the higher id.
    """
    chosen = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    kept = np.zeros(logits.shape, bool)
    np.put_along_axis(kept, chosen, np.ones((), bool), 1)
    spread = np.exp(logits - logits.max(1, keepdims=True))
    over = np.where(kept, spread, 0).sum(1, keepdims=True) if normalise else spread.sum(1, keepdims=True)
    return np.where(kept, spread / over, np.float32(0))


def _activated(i: Inputs, x: Array) -> Array:
    kind = i.node.attributes.get("activation_type", "relu")
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "silu":
        return np.asarray(x * sigmoid(x))
    if kind == "gelu":  # every one of onnxruntime's MoE kernels has the tanh form
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))
    if kind == "identity":
        return x
    if kind != "swiglu":
        raise Unserved(f"activation_type = {kind!r}")
    i.only("swiglu_fusion", 1, 2)
    if i.whole("swiglu_fusion", 0) == 1:
        gate, linear = x[:, ::2], x[:, 1::2]
    elif i.whole("swiglu_fusion", 0) == 2:
        gate, linear = np.split(x, 2, axis=1)
    else:
        raise Unserved("swiglu of separate products")
    limit = i.node.attributes.get("swiglu_limit")
    if limit is not None:
        gate, linear = np.minimum(gate, np.float32(limit)), np.clip(linear, -np.float32(limit), np.float32(limit))
    alpha, beta = np.float32(i.number("activation_alpha", 1.0)), np.float32(i.number("activation_beta", 0.0))
    return np.asarray(gate * sigmoid(alpha * gate) * (linear + beta))
