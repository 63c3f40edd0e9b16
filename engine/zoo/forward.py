"""A llama decoder in float64, whole sequences at once: the zoo's own reading of a model it makes.

Used while building (choosing and measuring a seeded model), never while serving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from engine.zoo.quant import F64
from engine.zoo.writer import DecoderGeometry, RotaryTable


class Body(Protocol):
    """Exact weights by the writer's names."""

    def vector(self, name: str) -> F64:
        """A norm's weight, or a bias."""
        ...

    def product(self, name: str, x: F64) -> F64:
        """x [tokens, columns] times a weight [rows, columns], transposed."""
        ...


class Held:
    """A body whose weights are all in memory."""

    def __init__(self, values: Mapping[str, F64]) -> None:
        self._values = values

    def vector(self, name: str) -> F64:
        """A norm's weight."""
        return self._values[name]

    def product(self, name: str, x: F64) -> F64:
        """x times a weight, transposed."""
        return x @ self._values[name].T


def final_hidden(g: DecoderGeometry, body: Body, state: F64, *, without: str | None = None) -> F64:
    """Normed states [tokens, hidden] that the head would read, each position seeing itself and those before it.

    `state` are the tokens' embeddings; `without` leaves one block out (`layers.N.attn` or `layers.N.mlp`), as if its
    weights were gone.
    """
    for layer in range(g.layers):
        path = f"layers.{layer}"
        if without != f"{path}.attn":
            normed = rms_norm(state, body.vector(f"{path}.input_layernorm"), g.rms_epsilon)
            state = state + _attention(g, body, f"{path}.attn", normed)
        if without != f"{path}.mlp":
            normed = rms_norm(state, body.vector(f"{path}.post_attention_layernorm"), g.rms_epsilon)
            state = state + gated_mlp(body, f"{path}.mlp", normed)
    return rms_norm(state, body.vector("final_norm"), g.rms_epsilon)


def rms_norm(state: F64, weight: F64, epsilon: float) -> F64:
    """RMS norm over the last axis."""
    normed: F64 = state / np.sqrt((state * state).mean(axis=-1, keepdims=True) + epsilon) * weight
    return normed


def gated_mlp(body: Body, path: str, normed: F64) -> F64:
    """down(silu(gate) * up)."""
    gate = body.product(f"{path}.gate_proj", normed)
    up = body.product(f"{path}.up_proj", normed)
    return body.product(f"{path}.down_proj", gate / (1 + np.exp(-gate)) * up)


def attend(query: F64, key: F64, value: F64) -> F64:
    """Causal attention; query [tokens, heads, size], key and value [tokens, kv heads, size]; [tokens, heads * size]."""
    tokens, heads, size = query.shape
    key, value = (np.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
    scores = np.where(np.tri(tokens, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed: F64 = np.einsum("hqk,khd->qhd", shares, value).reshape(tokens, heads * size)
    return mixed


def rotate(heads: F64, width: int, theta: float, *, half: bool = False) -> F64:
    """Rotary over half-apart pairs (i, i + width/2) of the first `width` elements; [tokens, heads, size]."""
    tables = (RotaryTable(kind, len(heads), width, theta, half).rows(0, len(heads)) for kind in ("cos", "sin"))
    cos, sin = (table.astype(np.float64)[:, None, :] for table in tables)
    first, second = np.split(heads[..., :width], 2, axis=-1)
    turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return np.concatenate((turned, heads[..., width:]), axis=-1)


def _attention(g: DecoderGeometry, body: Body, path: str, normed: F64) -> F64:
    tokens, size = len(normed), g.head_size
    packed = np.concatenate([body.product(f"{path}.{role}", normed) for role, _ in g.projections], axis=1)
    if g.qkv_bias:
        packed += np.concatenate([body.vector(f"{path}.{role}.bias") for role, _ in g.projections])
    query, key, value = np.split(packed, [g.heads * size, (g.heads + g.kv_heads) * size], axis=1)
    query = rotate(query.reshape(tokens, g.heads, size), size, g.rope_theta, half=g.half)
    key = rotate(key.reshape(tokens, g.kv_heads, size), size, g.rope_theta, half=g.half)
    return body.product(f"{path}.o_proj", attend(query, key, value.reshape(tokens, g.kv_heads, size)))
