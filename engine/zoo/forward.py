"""A llama decoder in float64, whole sequences at once: the zoo's own reading of a model it makes.

Used while building (choosing and measuring a seeded model), never while serving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from engine.zoo.quant import F64
from engine.zoo.writer import DecoderGeometry, rotary_caches


def final_hidden(g: DecoderGeometry, weights: Mapping[str, F64], ids: list[int], *, without: str | None = None) -> F64:
    """Normed states [len(ids), hidden] that the head would read, each position seeing itself and those before it.

    `weights` holds exact values by the writer's names, plus `embedding`; `without` leaves one block out
    (`layers.N.attn` or `layers.N.mlp`), as if its weights were gone.
    """
    state = weights["embedding"][ids]
    for layer in range(g.layers):
        path = f"layers.{layer}"
        if without != f"{path}.attn":
            normed = _rms_norm(state, weights[f"{path}.input_layernorm"], g.rms_epsilon)
            state = state + _attention(g, weights, f"{path}.attn", normed)
        if without != f"{path}.mlp":
            normed = _rms_norm(state, weights[f"{path}.post_attention_layernorm"], g.rms_epsilon)
            gate = normed @ weights[f"{path}.mlp.gate_proj"].T
            up = normed @ weights[f"{path}.mlp.up_proj"].T
            state = state + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{path}.mlp.down_proj"].T
    return _rms_norm(state, weights["final_norm"], g.rms_epsilon)


def _rms_norm(state: F64, weight: F64, epsilon: float) -> F64:
    normed: F64 = state / np.sqrt((state * state).mean(axis=-1, keepdims=True) + epsilon) * weight
    return normed


def _attention(g: DecoderGeometry, weights: Mapping[str, F64], path: str, normed: F64) -> F64:
    tokens, size = len(normed), g.head_size
    packed = np.concatenate([normed @ weights[f"{path}.{role}"].T for role, _ in g.projections], axis=1)
    query, key, value = np.split(packed, [g.heads * size, (g.heads + g.kv_heads) * size], axis=1)
    cos, sin = (cache[:tokens].astype(np.float64) for cache in rotary_caches(g))
    query = _rotate(query.reshape(tokens, g.heads, size), cos, sin)
    key = np.repeat(_rotate(key.reshape(tokens, g.kv_heads, size), cos, sin), g.heads // g.kv_heads, axis=1)
    value = np.repeat(value.reshape(tokens, g.kv_heads, size), g.heads // g.kv_heads, axis=1)
    scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed: F64 = np.einsum("hqk,khd->qhd", shares, value).reshape(tokens, g.heads * size)
    return mixed @ weights[f"{path}.o_proj"].T


def _rotate(heads: F64, cos: F64, sin: F64) -> F64:
    """Rotary over half-apart pairs (i, i + D/2); [tokens, heads, D]."""
    first, second = np.split(heads, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
