"""Grouped-query attention with rotary embedding and the KV cache's write."""

from __future__ import annotations

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define


def run_gqa(a: Arrays, p: Params) -> None:
    """Attention of `rows` new positions after `length` cached ones; caches are [capacity, kv_heads, head_size].

    Order as onnxruntime's GroupQueryAttention: scale, softcap, mask (window counts the query itself), softmax. Sums run
    over the valid positions alone, so neither capacity nor what lies beyond can be felt.
    """
    heads, kv_heads, d = p["heads"], p["kv_heads"], p["head_size"]
    past = int(a["length"][0])
    q, k, v = _split(a, heads, kv_heads, d)
    rows = q.shape[0]
    keys, values = a["k_cache"], a["v_cache"]
    assert keys.shape[0] >= past + rows, (keys.shape, past, rows)
    if "cos" in a:
        q, k = (_rotate(x, a["cos"], a["sin"], past, p["interleaved"]) for x in (q, k))
    keys[past : past + rows] = k
    values[past : past + rows] = v
    out = a["y"].reshape(rows, heads, d)
    for r in range(rows):
        end = past + r + 1
        start = max(0, end - p["window"]) if p["window"] > 0 else 0
        _attend(q[r], keys[start:end], values[start:end], p["scale"], p["softcap"], out[r])


def _split(a: Arrays, heads: int, kv_heads: int, d: int) -> tuple[Array, Array, Array]:
    query = a["query"].reshape(-1, a["query"].shape[-1])
    if "key" in a:
        parts = (query, a["key"], a["value"])
    else:
        parts = (
            query[:, : heads * d],
            query[:, heads * d : (heads + kv_heads) * d],
            query[:, (heads + kv_heads) * d :],
        )
    q, k, v = (np.asarray(x, dtype=np.float32).reshape(query.shape[0], -1, d) for x in parts)
    return q, k, v


def _rotate(x: Array, cos: Array, sin: Array, past: int, interleaved: bool) -> Array:
    half = cos.shape[1]
    c, s = (t[past : past + x.shape[0], None, :].astype(np.float32) for t in (cos, sin))
    turned = x.copy()
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        turned[..., 0 : 2 * half : 2] = first * c - second * s
        turned[..., 1 : 2 * half : 2] = first * s + second * c
        return turned
    first, second = x[..., :half], x[..., half : 2 * half]
    turned[..., :half] = first * c - second * s
    turned[..., half : 2 * half] = first * s + second * c
    return turned


def _attend(q: Array, keys: Array, values: Array, scale: float, softcap: float, out: Array) -> None:
    group = q.shape[0] // keys.shape[1]
    k32, v32 = (x.astype(np.float32, copy=False) for x in (keys, values))
    scores = np.empty((q.shape[0], keys.shape[0]), np.float32)
    for h in range(q.shape[0]):
        scores[h] = np.dot(k32[:, h // group], q[h])
    scores *= np.float32(scale)
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=1, keepdims=True)
    for h in range(q.shape[0]):
        out[h] = np.dot(scores[h], v32[:, h // group])


define(KernelDef("gqa", run_gqa))
