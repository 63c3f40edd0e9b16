"""Rotary embedding on its own."""

from __future__ import annotations

import math

import numpy as np

from engine.kernels import Arrays, KernelDef, Params, define
from engine.kernels.attention import rotate
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import blocks


def run_rotary(a: Arrays, p: Params) -> None:
    """y = a turned by cos b and sin c at each token's position, over the first 2 * half elements of each head.

    Tokens are the axis `tokens`; the tables are rows by position, or one row a token where `gathered`. Positions are
    operand d, or count from the cached length; `shift` is what is added to them where the whole
    prompt's length is above `long_above`, and what where it is not.
    """
    x = a["a"]
    batch = x.shape[0]
    if p["layout"] == "tokens":  # [batch, tokens, heads * size]
        heads = x.reshape(batch, x.shape[1], -1, p["size"])
    else:  # [batch, heads, tokens, size]
        heads = x.transpose(0, 2, 1, 3)
    tokens = heads.shape[1]
    cos, sin = (a[n].astype(np.float32) for n in "bc")
    if not p["gathered"]:
        if "length" in a:
            at = np.arange(tokens)[None] + int(a["length"][0])
            if "shift" in p:
                above, below = p["shift"]
                at += above if int(a["length"][0]) + tokens + int(a["ahead"][0]) > p["long_above"] else below
        else:
            at = a["d"] if a["d"].ndim == 2 else a["d"].reshape(-1)[:1][:, None] + np.arange(tokens)[None]
        cos, sin = cos[at], sin[at]
    half = p["half"]
    turned = rotate(heads.astype(np.float32), cos[..., None, :half], sin[..., None, :half], p["interleaved"])
    a["y"][...] = turned.reshape(x.shape) if p["layout"] == "tokens" else turned.transpose(0, 2, 1, 3)


def _each(refs: Refs, p: Params) -> Geometry:
    shape, table = refs["a"].shape, refs["b"].shape
    by_tokens = p["layout"] == "tokens"
    tokens = shape[1] if by_tokens else shape[2]
    count = math.prod(shape)
    heads = shape[2] // p["size"] if by_tokens else shape[1]
    scalars = {"count": count, "n_heads": heads, "tokens": tokens, "table_width": table[-1]}
    scalars["b_batch"] = int(len(table) == 3 and table[0] > 1)
    one = "d" in refs and len(refs["d"].shape) != 2
    defines = {"ONE_POSITION": int(one)}
    if "shift" in p:
        defines |= dict(zip(("SHIFT_ABOVE", "SHIFT_BELOW"), p["shift"], strict=True))
    return Geometry((blocks(count), 1), scalars, defines)


define(KernelDef("rotary", run_rotary, cuda=CudaForm("rotary", _each)))
