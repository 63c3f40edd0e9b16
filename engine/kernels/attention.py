"""Grouped-query attention with rotary embedding and the KV cache's write."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.graph import DTYPES
from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import blocks
from engine.kernels.nbits import PROCESSORS

SHORT = 512
"""Positions up to which a query sees its context whole; what lies further goes in parts."""
LEAST = 128
"""Positions of a part, at least."""
_WARPS = 16
_WIDEST = 512
"""Elements of a head up to which the sums of 16 warps fit beside each other."""
_ROOM = 10 << 10
"""Floats that a block shares, of 48 KiB."""


def run_gqa(a: Arrays, p: Params) -> None:
    """Attention of `rows` new positions after `length` cached ones; caches are [capacity, kv_heads, head_size].

    They are read and written through strides: which of the first two comes first in memory is the run's business.
    Order as onnxruntime's GroupQueryAttention: scale, softcap, mask (window counts the query itself), softmax. Sums run
    over the valid positions alone, so neither capacity nor what lies beyond can be felt. `parts` is room on a card.
    """
    heads, kv_heads, d = p["heads"], p["kv_heads"], p["head_size"]
    past = int(a["length"][0])
    q, k, v = _split(a, heads, kv_heads, d)
    rows = q.shape[0]
    keys, values = a["k_cache"], a["v_cache"]
    assert keys.shape[0] >= past + rows, (keys.shape, past, rows)
    if "q_norm" in a:
        q, k = (head_norm(x, a[f"{name}_norm"], p["qk_norm_eps"]) for x, name in ((q, "q"), (k, "k")))
    if "cos" in a:
        far = p["long_above"] is not None and past + rows + int(a["ahead"][0]) > p["long_above"]
        cos, sin = (a["cos_long"], a["sin_long"]) if far else (a["cos"], a["sin"])
        c, s = (t[past : past + rows, None, :].astype(np.float32) for t in (cos, sin))
        q, k = rotate(q, c, s, p["interleaved"]), rotate(k, c, s, p["interleaved"])
    sinks = a["sinks"].astype(np.float32) if "sinks" in a else None
    end = past + rows
    if "k_scale" in a:  # an int8 cache: what is attended to is what was stored
        scales = tuple(_spread(a[n], kv_heads, d) for n in ("k_scale", "v_scale"))
        for cache, new, scale in ((keys, k, scales[0]), (values, v, scales[1])):
            cache[past:end] = np.clip(np.rint(new * _inverse(scale)), -128, 127)
        keys, values = (c[:end] * s for c, s in zip((keys, values), scales, strict=True))
        for new, seen in ((k, keys), (v, values)):  # no code says "not finite": let it show in this step
            seen[past:][~np.isfinite(new)] = np.nan
    else:
        keys[past:end] = k
        values[past:end] = v
    out = a["y"].reshape(rows, heads, d)
    for r in range(rows):
        end = past + r + 1
        start = max(0, end - p["window"]) if p["window"] > 0 else 0
        _attend(q[r], keys[start:end], values[start:end], p["scale"], p["softcap"], sinks, out[r])


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


def head_norm(x: Array, gamma: Array, eps: float) -> Array:
    """RMS norm of each head, [rows, heads, head_size]."""
    mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
    return np.asarray(x / np.sqrt(mean + np.float32(eps)) * gamma.astype(np.float32))


def rotate(x: Array, c: Array, s: Array, interleaved: bool) -> Array:
    """Rotary embedding of the first 2 * c.shape[-1] elements; pairs (i, i + half), or neighbours when interleaved."""
    half = c.shape[-1]
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


def _spread(scale: Array, kv_heads: int, d: int) -> Array:
    wide = scale.astype(np.float32).reshape(-1)
    return wide.reshape(kv_heads, d) if wide.size > 1 else wide


def _inverse(scale: Array) -> Array:
    """What a number is multiplied by before it is rounded to a code, as in onnxruntime; 1 where the scale is 0.

    Dividing instead gives another code where a number lies next to the middle of two.
    """
    return np.float32(1) / np.where(scale == 0, np.float32(1), scale)


def _attend(
    q: Array, keys: Array, values: Array, scale: float, softcap: float, sinks: Array | None, out: Array
) -> None:
    group = q.shape[0] // keys.shape[1]
    k32, v32 = _by_head(keys), _by_head(values)
    scores = np.empty((q.shape[0], keys.shape[0]), np.float32)
    for h in range(q.shape[0]):
        scores[h] = np.dot(k32[h // group], q[h])
    scores *= np.float32(scale)
    if softcap:
        scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
    top = scores.max(axis=1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[:, None] - top)
    scores /= total
    for h in range(q.shape[0]):
        out[h] = np.dot(scores[h], v32[h // group])


def _by_head(cache: Array) -> Array:
    """Each head's positions as a dense matrix of its own: the library's order of a sum may follow the strides."""
    return np.array(cache.transpose(1, 0, 2), np.float32, order="C", copy=True)


@dataclass(frozen=True, slots=True)
class Split:
    """How a long context is shared out: over at most `most` parts, in a block over `teams` of warps of `heads` each."""

    most: int
    teams: int
    heads: int


def split_of(p: Params) -> Split | None:
    """The split of a geometry, None where contexts of any length stay whole: it sets the order of sums, so nothing that
    may differ between two runs of a model has a say in it.
    """
    group, size = p["heads"] // p["kv_heads"], p["head_size"]
    if size > _WIDEST:
        return None
    at_most = min(4, max(1, _ROOM // (_WARPS * size)), _lanes(size)[1])
    teams = _power(blocks(group, at_most))
    most = min(PROCESSORS // p["kv_heads"], _ROOM // (4 * group), 64)
    return Split(most, teams, blocks(group, teams)) if teams <= _WARPS and most > 1 else None


def room(p: Params) -> tuple[int, int] | None:
    """Shape, float32, of what the parts of a context leave before they are joined: sums, highest score and weight."""
    split = split_of(p)
    return None if split is None else (p["heads"] * split.most, p["head_size"] + 2)


def _lanes(size: int) -> tuple[int, int]:
    """Elements of a head that a lane takes, and how many lanes share a position."""
    each = max(8, blocks(size, 256) * 8)
    return each, _power(blocks(size, each))


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << (n - 1).bit_length()


def _may_be_long(refs: Refs, p: Params) -> bool:
    """Whether a query may see more than SHORT positions, of a cache whose capacity is 0 where it is not known: if not,
    the grid and the registers of parts are spared.
    """
    return not (0 < refs["k_cache"].shape[0] <= SHORT or 0 < p["window"] <= SHORT)


def _heads_and_rows(refs: Refs, p: Params) -> Geometry:
    """A block for a head and row, and as many as parts need where they are spread; 16 warps while sums have room."""
    size, split = p["head_size"], split_of(p) if _may_be_long(refs, p) else None
    each, lanes = _lanes(size)
    threads = 32 * _WARPS if size <= _WIDEST else 128
    defines: dict[str, str | int] = {"EACH": each, "LANES": lanes, "THREADS": threads, "SHORT": SHORT, "LEAST": LEAST}
    of_sums = threads // 32 * size
    if split is None:
        defines |= {"SPLITS": 1, "HEADS": 1, "ROOM": of_sums}
    else:
        slots, narrow = _power(split.heads), DTYPES[refs["k_cache"].dtype].itemsize <= 2
        defines |= {"SPLITS": split.most, "TEAMS": split.teams, "HEADS": split.heads, "HEAD_SLOTS": slots}
        defines |= {"AT_ONCE": 2 if narrow and 2 * slots <= lanes else 1}
        defines |= {"ROOM": max(of_sums * split.heads, 4 * p["heads"] // p["kv_heads"] * split.most)}
    if size % each == 0:
        defines["WHOLE_WORDS"] = 1
    if "cos" in refs:
        defines["HALF"] = refs["cos"].shape[1]
    if p["softcap"]:
        defines["SOFTCAP"] = 1
    for name in ("k_scale", "v_scale"):
        if name in refs:
            defines[f"ONE_{name}"] = int(math.prod(refs[name].shape) == 1)
    rows = math.prod(refs["query"].shape[:-1])
    spread = p["kv_heads"] * split.most if split is not None and "parts" in refs else 0
    tickets = p["kv_heads"] if spread else 0
    return Geometry((max(p["heads"], spread), rows), defines=defines, threads=threads, tickets=tickets)


define(KernelDef("gqa", run_gqa, cuda=CudaForm("attention", _heads_and_rows, heads=("attention_parts",))))
