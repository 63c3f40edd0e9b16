"""Attention as the ONNX standard has it (opsets 23 to 25): masks are added, a row without any key gives zeros."""

from __future__ import annotations

import math

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs, Scalar
from engine.kernels.elementwise import wide
from engine.kernels.steps import Shape, broadcast

_NONE = np.float32(-np.inf)


def run_attention(a: Arrays, p: Params) -> None:
    """y = softmax(softcap(scale * q k^T) + bias) v, per head; presents are past and new keys and values together.

    Operands q, k, v, and where given: mask (bool: may attend; else added), past_key, past_value, lengths (valid keys
    per row of the batch). `probe` says which stage of the scores `scores` holds, numbered as in the standard.
    """
    q, k, v = (_heads(wide(a[n]), p[h]) for n, h in (("q", "q_heads"), ("k", "kv_heads"), ("v", "kv_heads")))
    if "past_key" in a:
        k = np.concatenate([wide(a["past_key"]), k], axis=2)
        v = np.concatenate([wide(a["past_value"]), v], axis=2)
    for name, value in (("present_key", k), ("present_value", v)):
        if name in a:
            a[name][...] = value
    batch, heads, rows, _ = q.shape
    group = heads // k.shape[1]
    bias = np.broadcast_to(_bias(a, p, batch, rows, k.shape[2]), (batch, heads, rows, k.shape[2]))
    out = np.empty((batch, heads, rows, v.shape[3]), np.float32)
    root = np.float32(np.sqrt(p["scale"]))
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group], v[b, h // group]
            for r in range(rows):
                raw = np.dot(keys * root, q[b, h, r] * root)
                capped = np.float32(p["softcap"]) * np.tanh(raw / np.float32(p["softcap"])) if p["softcap"] > 0 else raw
                total = capped + bias[b, h, r]
                share = _share(total, bias[b, h, r])
                out[b, h, r] = np.dot(share, values)
                if "scores" in a:
                    a["scores"][b, h, r] = (capped, capped, total, share)[p["probe"]]
    a["y"][...] = out if a["y"].ndim == 4 else out.transpose(0, 2, 1, 3).reshape(a["y"].shape)


def _heads(x: Array, heads: int) -> Array:
    if x.ndim == 4:
        return x
    return x.reshape(x.shape[0], x.shape[1], heads, -1).transpose(0, 2, 1, 3)


def _bias(a: Arrays, p: Params, batch: int, rows: int, keys: int) -> Array:
    """What is added to the scores: the mask, minus infinity where order, window or length forbid."""
    lengths = a["lengths"].reshape(-1) if "lengths" in a else None
    past = a["past_key"].shape[2] if "past_key" in a else 0
    before = np.full(batch, past) if lengths is None else lengths - rows  # keys that precede the first query
    distance = (np.arange(rows)[None, :, None] + before[:, None, None]) - np.arange(keys)[None, None, :]
    allowed = np.ones((batch, rows, keys), np.bool_)
    if p["causal"]:
        allowed &= distance >= 0
    if p["left"] >= 0:
        allowed &= distance <= p["left"]
    if p["right"] >= 0:
        allowed &= -distance <= p["right"]
    if lengths is not None:
        allowed &= (np.arange(keys)[None, :] < lengths[:, None])[:, None]
    bias = np.where(allowed, np.float32(0), _NONE)[:, None]
    if "mask" not in a:
        return np.asarray(bias)
    mask = a["mask"]
    mask = np.where(mask, np.float32(0), _NONE) if mask.dtype == np.bool_ else wide(mask)
    short = keys - mask.shape[-1]
    if short > 0:
        mask = np.concatenate([mask, np.full((*mask.shape[:-1], short), _NONE, np.float32)], axis=-1)
    return np.asarray(bias + mask)


def _share(scores: Array, bias: Array) -> Array:
    if np.isneginf(bias).all():
        return np.zeros_like(scores)
    e = np.exp(scores - scores.max())
    return np.asarray(e / e.sum())


def _split(shape: Shape, heads: int) -> tuple[Shape, Shape]:
    """Extents [batch, heads, tokens, size] and steps of the first three, of either layout."""
    if len(shape) == 4:
        return shape, (math.prod(shape[1:]), shape[2] * shape[3], shape[3])
    batch, tokens, width = shape
    size = width // heads
    return (batch, heads, tokens, size), (tokens * width, size, width)


def _heads_and_rows(refs: Refs, p: Params) -> Geometry:
    (batch, heads, rows, size), q_steps = _split(refs["q"].shape, p["q_heads"])
    (_, _, new, _), k_steps = _split(refs["k"].shape, p["kv_heads"])
    (_, _, _, value_size), v_steps = _split(refs["v"].shape, p["kv_heads"])
    past = refs["past_key"].shape[2] if "past_key" in refs else 0
    keys = past + new
    scalars: dict[str, Scalar] = {"rows": rows, "keys": keys, "past": past, "q_shape": (batch, heads, rows)}
    scalars |= {"q_steps": q_steps, "k_steps": k_steps, "v_steps": v_steps}
    scalars["y_steps"] = _split(refs["y"].shape, p["q_heads"])[1]
    defines = {"SIZE": size, "VALUE_SIZE": value_size}
    if p["softcap"] > 0:
        defines["SOFTCAP"] = 1
    if "mask" in refs:
        mask = refs["mask"].shape
        scalars["mask_keys"] = mask[-1]
        scalars["mask_steps"] = broadcast(mask, (batch, heads, rows, mask[-1]))
        defines |= {"MASK_IS_BOOL": 1} if refs["mask"].dtype == "bool" else {}
    return Geometry((batch * heads, rows), scalars, defines, shared_bytes=4 * keys)


define(KernelDef("attention", run_attention, cuda=CudaForm("scaled_attention", _heads_and_rows)))
