"""A Qwen3.5-MoE decoder in float64, whole sequences at once: the zoo's own reading of a hybrid that it makes."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from engine.zoo.forward import Body, attend, gated_mlp, rms_norm, rotate
from engine.zoo.hybrid_geometry import HybridGeometry
from engine.zoo.quant import F64


class HybridBody(Body, Protocol):
    """Exact weights by the writer's names; experts by number."""

    def expert(self, name: str, expert: int, x: F64) -> F64:
        """x [tokens, columns] times one expert's weight, transposed."""
        ...


def final_hidden(g: HybridGeometry, body: HybridBody, state: F64, *, without: str | None = None) -> F64:
    """Normed states [tokens, hidden] that the head would read, each position seeing itself and those before it.

    `state` are the tokens' embeddings; `without` leaves one block out (`layers.N.linear_attn`, `layers.N.attn` or
    `layers.N.moe`), as if its weights were gone.
    """
    for layer in range(g.layers):
        path = f"layers.{layer}"
        kind = "attn" if g.is_attention(layer) else "linear_attn"
        if without != f"{path}.{kind}":
            normed = rms_norm(state, body.vector(f"{path}.input_layernorm"), g.rms_epsilon)
            mix = _attention if kind == "attn" else _delta
            state = state + mix(g, body, f"{path}.{kind}", normed)
        if without != f"{path}.moe":
            normed = rms_norm(state, body.vector(f"{path}.post_attention_layernorm"), g.rms_epsilon)
            state = state + _experts(g, body, path, normed)
    return rms_norm(state, body.vector("final_norm"), g.rms_epsilon)


def _delta(g: HybridGeometry, body: HybridBody, path: str, normed: F64) -> F64:
    """S = e^g S, then S += k (x) beta (v - S^T k); read out with q."""
    tokens, size = len(normed), g.state_size
    mixed = _convolve(body, f"{path}.conv1d", body.product(f"{path}.qkv_proj", normed))
    query, key, value = np.split(mixed, [g.keys, 2 * g.keys], axis=1)
    query, key = (_unit(x.reshape(tokens, g.key_heads, size)) for x in (query, key))
    query = query * float(np.float16(1 / math.sqrt(size)))  # the graph's own constant
    query, key = (np.repeat(x, g.value_heads // g.key_heads, axis=1) for x in (query, key))
    value = value.reshape(tokens, g.value_heads, size)
    raw = body.product(f"{path}.a_proj", normed) + body.vector(f"{path}.dt_bias")
    decay = np.exp(body.vector(f"{path}.neg_exp_A") * np.log1p(np.exp(raw)))
    beta = _sigmoid(body.product(f"{path}.b_proj", normed))
    state = np.zeros((g.value_heads, size, size))
    out = np.empty((tokens, g.value_heads, size))
    for t in range(tokens):
        state *= decay[t, :, None, None]
        change = beta[t, :, None] * (value[t] - np.einsum("hkv,hk->hv", state, key[t]))
        state += key[t, :, :, None] * change[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, query[t])
    z = body.product(f"{path}.z_proj", normed)
    normed = rms_norm(out, body.vector(f"{path}.norm"), g.rms_epsilon).reshape(tokens, g.states)
    return body.product(f"{path}.out_proj", normed * z * _sigmoid(z))


def _convolve(body: HybridBody, path: str, x: F64) -> F64:
    """Causal, one filter a channel, from a past of zeros; then silu. x [tokens, channels]."""
    taps = body.vector(f"{path}.weight").reshape(x.shape[1], -1)
    seen = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), x])
    made = sum(seen[n : n + len(x)] * taps[:, n] for n in range(taps.shape[1])) + body.vector(f"{path}.bias")
    convolved: F64 = made * _sigmoid(made)
    return convolved


def _attention(g: HybridGeometry, body: HybridBody, path: str, normed: F64) -> F64:
    tokens, size = len(normed), g.head_size
    both, key, value = np.split(
        body.product(f"{path}.qkv_proj", normed), [2 * g.queries, 2 * g.queries + g.cached], axis=1
    )
    query, gate = np.split(both.reshape(tokens, g.heads, 2 * size), 2, axis=-1)
    query = rms_norm(query, body.vector(f"{path}.q_norm"), g.rms_epsilon)
    key = rms_norm(key.reshape(tokens, g.kv_heads, size), body.vector(f"{path}.k_norm"), g.rms_epsilon)
    query, key = (rotate(x, g.rotary, g.rope_theta) for x in (query, key))
    mixed = attend(query, key, value.reshape(tokens, g.kv_heads, size))
    return body.product(f"{path}.o_proj", mixed * _sigmoid(gate.reshape(tokens, g.queries)))


def _experts(g: HybridGeometry, body: HybridBody, path: str, normed: F64) -> F64:
    """Softmax over the chosen experts alone, plus the shared one by its gate."""
    logits = body.product(f"{path}.moe.router", normed)
    order = np.argsort(-logits, axis=1, kind="stable")[:, : g.chosen]  # ties to the lower number
    shares = np.exp(np.take_along_axis(logits, order, axis=1) - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    out = np.zeros_like(normed)
    for expert in np.unique(order):
        tokens, slots = np.nonzero(order == expert)
        both = body.expert(f"{path}.moe.gate_up_proj", int(expert), normed[tokens])
        gate, up = both[:, 0::2], both[:, 1::2]
        down = body.expert(f"{path}.moe.down_proj", int(expert), gate * _sigmoid(gate) * up)
        out[tokens] += shares[tokens, slots, None] * down
    shared = gated_mlp(body, f"{path}.mlp", normed)
    opened: F64 = out + shared * _sigmoid(body.product(f"{path}.shared_expert_gate", normed))
    return opened


def _unit(x: F64) -> F64:
    unit: F64 = x / np.sqrt((x * x).sum(axis=-1, keepdims=True))
    return unit


def _sigmoid(x: F64) -> F64:
    opened: F64 = 1 / (1 + np.exp(-x))
    return opened
