"""Attention over the whole sequence at once, by masks: no cache is kept."""

from __future__ import annotations

import math

import numpy as np

from engine.oracle.inputs import HALVES, MICROSOFT, Array, Computed, Inputs, Picked, Unserved, rule
from engine.oracle.norms import rms


@rule("GroupQueryAttention", MICROSOFT)
def _group_query_attention(i: Inputs) -> Computed:
    """onnxruntime's order: norm, rotary, scale, softcap, mask, softmax; a window counts the query itself."""
    i.only("causal", 1)
    i.only("qk_output", 0)
    if i.has(10):
        raise Unserved("a bias as an input")
    if i.has(9) and not np.array_equal(i.stored(9), np.arange(i.positions)[None]):
        raise Unserved("position ids that do not count up from 0")
    _check_lengths(i)
    heads, kv_heads = i.whole("num_heads", 0), i.whole("kv_num_heads", 0)
    q, k, v = _heads(i, heads, kv_heads)
    if i.has(14):
        eps = i.number("qk_norm_epsilon", 1e-6)
        q, k = rms(q, i.floats(14), eps), rms(k, i.floats(15), eps)
    if i.whole("do_rotary", 0):
        cos, sin = (_rows(i, n, np.arange(i.positions))[:, None] for n in (7, 8))
        if not isinstance(i.value(8), Picked):
            _check_one_table(i.stored(8))
        interleaved = bool(i.whole("rotary_interleaved", 0))
        q, k = turned(q, cos, sin, interleaved), turned(k, cos, sin, interleaved)
    k, v = _as_cached(i, k, 3, "k_quant_type"), _as_cached(i, v, 4, "v_quant_type")
    out = np.empty_like(q)
    group = heads // kv_heads
    for h in range(kv_heads):
        mine = slice(h * group, (h + 1) * group)
        out[:, mine] = _attended(i, q[:, mine], k[:, h], v[:, h], mine)
    return out.reshape(1, i.positions, -1), i.start(3), i.start(4)


@rule("Attention")
def _attention(i: Inputs) -> Computed:
    """The standard's over a decoder's cache, in causal order; keys may be [tokens, heads * size] or heads first."""
    i.only("is_causal", 1)
    i.only("left_window_size", -1)
    if i.has(3) or i.has(6):
        raise Unserved("a mask or key lengths beside a cache")
    x = [i.floats(n)[0] for n in range(3)]
    four = x[0].ndim == 3
    if four:
        q, k, v = (t.transpose(1, 0, 2) for t in x)
    else:
        counts = (i.whole("q_num_heads", 0), i.whole("kv_num_heads", 0), i.whole("kv_num_heads", 0))
        q, k, v = (t.reshape(i.positions, n, -1) for t, n in zip(x, counts, strict=True))
    out, group = np.empty_like(q), q.shape[1] // k.shape[1]
    for h in range(k.shape[1]):
        mine = slice(h * group, (h + 1) * group)
        out[:, mine] = _attended(i, q[:, mine], k[:, h], v[:, h], mine)
    made = out.transpose(1, 0, 2)[None] if four else out.reshape(1, i.positions, -1)
    return made, i.start(4), i.start(5)


def _check_lengths(i: Inputs) -> None:
    for index in (3, 4):
        i.start(index)
    lengths = [int(i.stored(index).reshape(-1)[0]) for index in (5, 6)]
    if lengths != [i.positions - 1, i.positions]:
        raise Unserved(f"lengths {lengths} for {i.positions} positions of one sequence")


def _heads(i: Inputs, heads: int, kv_heads: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values as [positions, heads, size], packed side by side or apart."""
    query = i.floats(0)
    if i.has(1):
        parts = (query, i.floats(1), i.floats(2))
        counts = (heads, kv_heads, kv_heads)
        q, k, v = (x.reshape(i.positions, n, -1) for x, n in zip(parts, counts, strict=True))
        return q, k, v
    all_heads = query.reshape(i.positions, heads + 2 * kv_heads, -1)
    return all_heads[:, :heads], all_heads[:, heads : heads + kv_heads], all_heads[:, heads + kv_heads :]


def _attended(i: Inputs, q: Array, k: Array, v: Array, heads: slice) -> Array:
    """softmax(mask(softcap(scale * q k^T))) v of the query heads over one kv head; [positions, heads, size]."""
    scale = i.number("scale", 0.0) or 1 / math.sqrt(q.shape[-1])
    scores = np.matmul(q.transpose(1, 0, 2), k.T) * np.float32(scale)
    cap = i.number("softcap", 0.0)
    if cap < 0 or not i.whole("local_window_size", -1):
        raise Unserved("softcap below 0 or local_window_size = 0")
    if cap:
        scores = np.float32(cap) * np.tanh(scores / np.float32(cap))
    row, column = np.ogrid[: i.positions, : i.positions]
    seen = column <= row
    window = i.whole("local_window_size", -1)
    if window > 0:
        seen &= row - column < window
    scores = np.where(seen, scores, np.float32(-np.inf))
    sinks = i.floats(11)[heads] if i.has(11) else np.zeros(q.shape[1], np.float32)
    with_sink = i.has(11) or bool(i.whole("smooth_softmax", 0))
    sink = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    if with_sink:  # one more column, which takes weight and gives no value
        scores = np.concatenate([scores, sink], axis=2)
    weights = np.exp(scores - scores.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    return np.asarray(np.matmul(weights[..., : i.positions], v).transpose(1, 0, 2))


def _as_cached(i: Inputs, x: Array, past: int, kind: str) -> Array:
    """What the cache holds of [positions, kv heads, size]: itself, or the nearest int8 code times its scale."""
    dtype = i.start(past).dtype
    if dtype in ("float32", *HALVES):
        i.only(kind, "NONE")
        return x
    i.only(kind, "NONE", "PER_TENSOR", "PER_CHANNEL")
    i.only("kv_cache_bit_width", 8)
    if dtype != "int8" or not i.has(past + 9):
        raise Unserved(f"a cache of {dtype} with {kind} = {i.node.attributes.get(kind)!r}")
    scale = i.floats(past + 9)
    scale = scale.reshape(()) if scale.size == 1 else scale.reshape(x.shape[1:])
    inverse = np.float32(1) / np.where(scale == 0, np.float32(1), scale)  # onnxruntime multiplies by it
    return np.asarray(np.clip(np.round(x * inverse), -128, 127) * scale, np.float32)


@rule("RotaryEmbedding")
def _rotary(i: Inputs) -> Computed:
    """The standard's: (x, cos, sin, ids); without ids the tables hold a row for each token."""
    if not i.has(3):
        return _rotated(i, i.floats(1)[0], i.floats(2)[0])
    ids = i.stored(3).reshape(-1)
    return _rotated(i, _rows(i, 1, ids), _rows(i, 2, ids))


@rule("RotaryEmbedding", MICROSOFT)
def _ms_rotary(i: Inputs) -> Computed:
    """onnxruntime's: (x, ids, cos, sin); a single id is where the rows begin to count."""
    i.only("is_packed_batching", 0)
    ids = i.stored(1).reshape(-1)
    if i.stored(1).shape == (1,):
        ids = ids[0] + np.arange(i.positions)
    return _rotated(i, _rows(i, 2, ids), _rows(i, 3, ids))


@rule("MRotaryEmbedding", MICROSOFT)
def _m_rotary(i: Inputs) -> Computed:
    """Three rows of positions, which are the same in text, so that sections make no difference."""
    i.only("is_packed_batching", 0)
    ids = i.stored(1).reshape(3, -1)
    if (ids != ids[0]).any():
        raise Unserved("three rows of positions that differ")
    return _rotated(i, _rows(i, 2, ids[0]), _rows(i, 3, ids[0]))


def _rows(i: Inputs, index: int, positions: Array) -> Array:
    """Rows of a rotary table by position; where it is one of two tables, each row out of its own."""
    value = i.value(index)
    if not isinstance(value, Picked):
        return np.asarray(i.stored(index)[positions], np.float32)
    made = np.empty((len(positions), value.above.shape[1]), np.float32)
    for table, mine in ((value.above, value.pick), (value.below, ~value.pick)):
        made[mine] = table[positions[mine]]
    return made


def _check_one_table(table: Array) -> None:
    """Refuse two tables in one, the second for longer sequences: the graph does not say from which length on."""
    again = np.flatnonzero((table[1:] == table[0]).all(axis=1)) + 1
    if 0 < again.size < len(table) - 1:
        raise Unserved(f"a rotary table that starts anew at row {again[0]}")


def _rotated(i: Inputs, cos: Array, sin: Array) -> Array:
    """Rotary embedding of x [1, tokens, width] or [1, heads, tokens, size]; tables [tokens, half]."""
    x = i.floats(0)
    width, heads = i.whole("rotary_embedding_dim", 0), i.whole("num_heads", 0)
    i.only("scale", 1.0)
    if x.shape[0] != 1:
        raise Unserved(f"a batch of {x.shape[0]}")
    if x.ndim == 3:
        size = x.shape[-1] // heads if heads else 2 * cos.shape[1]
        tokens = x[0].reshape(x.shape[1], -1, size)
    else:
        tokens = x[0].transpose(1, 0, 2)
    half = width // 2 or min(cos.shape[1], tokens.shape[-1] // 2)
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    made = turned(tokens, cos, sin, bool(i.whole("interleaved", 0)))
    return made.reshape(x.shape) if x.ndim == 3 else made.transpose(1, 0, 2)[None]


def turned(x: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Pairs of the first 2 * half elements turned as complex numbers; the rest passes."""
    half = cos.shape[-1]
    if interleaved:
        pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
    else:
        pairs = x[..., : 2 * half].reshape(*x.shape[:-1], 2, half).swapaxes(-1, -2)
    z = (pairs[..., 0] + 1j * pairs[..., 1]) * (cos + 1j * sin)
    both = np.stack([z.real, z.imag], axis=-1 if interleaved else -2)
    head = both.reshape(*x.shape[:-1], 2 * half)
    return np.concatenate([head, x[..., 2 * half :]], axis=-1).astype(np.float32)
