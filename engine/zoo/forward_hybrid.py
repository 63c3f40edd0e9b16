"""A Qwen3.5-MoE decoder in float64, whole sequences at once: the zoo's own reading of a hybrid that it makes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from engine.zoo.forward import Body, attend, gated_mlp, rms_norm, rotate
from engine.zoo.hybrid_geometry import HybridGeometry
from engine.zoo.passes import Past, apart
from engine.zoo.quant import F64


class HybridBody(Body, Protocol):
    """Exact weights by the writer's names; experts by number."""

    def expert(self, name: str, expert: int, x: F64) -> F64:
        """x [tokens, columns] times one expert's weight, transposed."""
        ...


class HybridDecoder:
    """The blocks of a hybrid; `passes.Blocks`."""

    def __init__(self, geometry: HybridGeometry, body: HybridBody) -> None:
        self._g = geometry
        self._body = body

    @property
    def names(self) -> list[str]:
        """layers.N.linear_attn or layers.N.attn, and layers.N.moe, in order."""
        kinds = {n: "attn" if self._g.is_attention(n) else "linear_attn" for n in range(self._g.layers)}
        return [f"layers.{n}.{block}" for n in range(self._g.layers) for block in (kinds[n], "moe")]

    def added(self, name: str, states: Sequence[F64], past: Past | None) -> list[F64]:
        """What a block adds to each of some states [tokens, hidden]; its weights are read once."""
        assert past is None, "a hybrid goes through whole"
        path, kind = name.rsplit(".", 1)
        norm = f"{path}.{'post_attention' if kind == 'moe' else 'input'}_layernorm"
        normed = rms_norm(np.concatenate(states), self._body.vector(norm), self._g.rms_epsilon)
        lengths = [len(state) for state in states]
        if kind == "moe":
            return apart(_experts(self._g, self._body, path, normed), lengths)
        mix = _attention if kind == "attn" else _delta
        return apart(mix(self._g, self._body, name, normed, lengths), lengths)

    def closed(self, state: F64) -> F64:
        """The last norm."""
        return rms_norm(state, self._body.vector("final_norm"), self._g.rms_epsilon)


def _delta(g: HybridGeometry, body: HybridBody, path: str, normed: F64, lengths: list[int]) -> F64:
    """Over sequences of these lengths, one after another."""
    packed = body.product(f"{path}.qkv_proj", normed)
    raw = body.product(f"{path}.a_proj", normed) + body.vector(f"{path}.dt_bias")
    decay = np.exp(body.vector(f"{path}.neg_exp_A") * np.log1p(np.exp(raw)))
    beta = _sigmoid(body.product(f"{path}.b_proj", normed))
    parts = zip(*(apart(x, lengths) for x in (packed, decay, beta)), strict=True)
    out = np.concatenate([_recurrence(g, body, path, *each) for each in parts])
    z = body.product(f"{path}.z_proj", normed)
    gated = rms_norm(out, body.vector(f"{path}.norm"), g.rms_epsilon).reshape(-1, g.states)
    return body.product(f"{path}.out_proj", gated * z * _sigmoid(z))


def _recurrence(g: HybridGeometry, body: HybridBody, path: str, packed: F64, decay: F64, beta: F64) -> F64:
    """S = e^g S, then S += k (x) beta (v - S^T k); read out with q: [tokens, value heads, size]."""
    tokens, size = len(packed), g.state_size
    mixed = _convolve(body, f"{path}.conv1d", packed)
    query, key, value = np.split(mixed, [g.keys, 2 * g.keys], axis=1)
    query, key = (_unit(x.reshape(tokens, g.key_heads, size)) for x in (query, key))
    query = query * float(np.float16(1 / math.sqrt(size)))  # the graph's own constant
    query, key = (np.repeat(x, g.value_heads // g.key_heads, axis=1) for x in (query, key))
    value = value.reshape(tokens, g.value_heads, size)
    state = np.zeros((g.value_heads, size, size))
    out = np.empty((tokens, g.value_heads, size))
    for t in range(tokens):
        state *= decay[t, :, None, None]
        change = beta[t, :, None] * (value[t] - np.einsum("hkv,hk->hv", state, key[t]))
        state += key[t, :, :, None] * change[:, None, :]
        out[t] = np.einsum("hkv,hk->hv", state, query[t])
    return out


def _convolve(body: HybridBody, path: str, x: F64) -> F64:
    """Causal, one filter a channel, from a past of zeros; then silu. x [tokens, channels]."""
    taps = body.vector(f"{path}.weight").reshape(x.shape[1], -1)
    seen = np.concatenate([np.zeros((taps.shape[1] - 1, x.shape[1])), x])
    made = sum(seen[n : n + len(x)] * taps[:, n] for n in range(taps.shape[1])) + body.vector(f"{path}.bias")
    convolved: F64 = made * _sigmoid(made)
    return convolved


def _attention(g: HybridGeometry, body: HybridBody, path: str, normed: F64, lengths: list[int]) -> F64:
    """Over sequences of these lengths, one after another."""
    packed = body.product(f"{path}.qkv_proj", normed)
    mixed = np.concatenate([_attended(g, body, path, each) for each in apart(packed, lengths)])
    gate = packed[:, : 2 * g.queries].reshape(-1, g.heads, 2 * g.head_size)[..., g.head_size :]
    return body.product(f"{path}.o_proj", mixed * _sigmoid(gate.reshape(-1, g.queries)))


def _attended(g: HybridGeometry, body: HybridBody, path: str, packed: F64) -> F64:
    tokens, size = len(packed), g.head_size
    both, key, value = np.split(packed, [2 * g.queries, 2 * g.queries + g.cached], axis=1)
    query = both.reshape(tokens, g.heads, 2 * size)[..., :size]
    query = rms_norm(query, body.vector(f"{path}.q_norm"), g.rms_epsilon)
    key = rms_norm(key.reshape(tokens, g.kv_heads, size), body.vector(f"{path}.k_norm"), g.rms_epsilon)
    query, key = (rotate(x, g.rotary, g.rope_theta) for x in (query, key))
    return attend(query, key, value.reshape(tokens, g.kv_heads, size))


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
