"""A llama decoder in float64, whole sequences at once: the zoo's own reading of a model it makes.

Used while building (choosing and measuring a seeded model), never while serving.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from engine.zoo.passes import Past, apart, through
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


class Decoder:
    """The blocks of a llama or qwen2 decoder; `passes.Blocks`."""

    def __init__(self, geometry: DecoderGeometry, body: Body) -> None:
        self._g = geometry
        self._body = body

    @property
    def names(self) -> list[str]:
        """layers.N.attn and layers.N.mlp, in order."""
        return [f"layers.{n}.{block}" for n in range(self._g.layers) for block in ("attn", "mlp")]

    def added(self, name: str, states: Sequence[F64], past: Past | None) -> list[F64]:
        """What a block adds to each of some states [tokens, hidden]; its weights are read once."""
        layer, kind = name.rsplit(".", 1)
        norm = f"{layer}.{'input' if kind == 'attn' else 'post_attention'}_layernorm"
        normed = rms_norm(np.concatenate(states), self._body.vector(norm), self._g.rms_epsilon)
        if kind == "mlp":
            made = gated_mlp(self._body, name, normed)
        else:
            made = _attention(self._g, self._body, name, normed, [len(state) for state in states], past)
        return apart(made, [len(state) for state in states])

    def closed(self, state: F64) -> F64:
        """The last norm."""
        return rms_norm(state, self._body.vector("final_norm"), self._g.rms_epsilon)


def final_hidden(g: DecoderGeometry, body: Body, state: F64, *, without: str | None = None) -> F64:
    """Normed states [tokens, hidden] that the head would read, each position seeing itself and those before it.

    `state` are the tokens' embeddings; `without` leaves one block out (`layers.N.attn` or `layers.N.mlp`), as if its
    weights were gone.
    """
    return through(Decoder(g, body), state, without=without)


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
    """Causal attention of the last tokens; query [tokens, heads, size], key and value [all so far, kv heads, size]."""
    tokens, heads, size = query.shape
    key, value = (np.repeat(x, heads // x.shape[1], axis=1) for x in (key, value))
    scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
    scores = np.where(np.tri(tokens, len(key), len(key) - tokens, dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    mixed: F64 = np.einsum("hqk,khd->qhd", shares, value).reshape(tokens, heads * size)
    return mixed


def rotate(heads: F64, width: int, theta: float, *, half: bool = False, first: int = 0) -> F64:
    """Rotary over half-apart pairs (i, i + width/2) of the first `width` elements; [tokens, heads, size].

    The tokens stand at positions from `first` on.
    """
    end = first + len(heads)
    tables = (RotaryTable(kind, end, width, theta, half).rows(first, end) for kind in ("cos", "sin"))
    cos, sin = (table.astype(np.float64)[:, None, :] for table in tables)
    left, right = np.split(heads[..., :width], 2, axis=-1)
    turned = np.concatenate((left * cos - right * sin, right * cos + left * sin), axis=-1)
    return np.concatenate((turned, heads[..., width:]), axis=-1)


def _attention(g: DecoderGeometry, body: Body, path: str, normed: F64, lengths: list[int], past: Past | None) -> F64:
    """Over sequences of these lengths, one after another; a past is of the only one."""
    size = g.head_size
    packed = np.concatenate([body.product(f"{path}.{role}", normed) for role, _ in g.projections], axis=1)
    if g.qkv_bias:
        packed += np.concatenate([body.vector(f"{path}.{role}.bias") for role, _ in g.projections])
    mixed = []
    for each in apart(packed, lengths):
        query, key, value = np.split(each, [g.heads * size, (g.heads + g.kv_heads) * size], axis=1)
        first = past.length if past is not None else 0
        query = rotate(query.reshape(-1, g.heads, size), size, g.rope_theta, half=g.half, first=first)
        key = rotate(key.reshape(-1, g.kv_heads, size), size, g.rope_theta, half=g.half, first=first)
        value = value.reshape(-1, g.kv_heads, size)
        mixed.append(attend(query, *(past.joined(path, key, value) if past is not None else (key, value))))
    return body.product(f"{path}.o_proj", np.concatenate(mixed))
