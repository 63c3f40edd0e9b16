"""A mixture of experts with 4-bit codes as two products, the chosen experts' first ones and then their second ones.

What the target makes of a step `moe` and the additions behind it: `hidden` and `share` are scratch between the two. Of
experts that are keys of their own it is `mixture_experts`, behind a step that routes.
"""

from __future__ import annotations

import math

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, NoForm, Refs
from engine.kernels.elementwise import blocks, sigmoid
from engine.kernels.moe import ROUTING, expert_outputs, route, shares
from engine.kernels.nbits import PROCESSORS, ROOM_BYTES, depth, division, tiled
from engine.kernels.norm import rms

TURN = 128
"""Columns that a warp takes at a time: an expert's activations begin at a multiple of it."""
_TURNS_EACH = ((12, 1), (31, 2), (64, 4))
_MOST_ROWS = 65_535  # of a grid's second dimension
_MOST_CHOSEN = 32  # a lane each
_HEADS = (ROUTING, "mixture")


def padded(inner: int) -> int:
    """Columns of an expert's activations, with zeros behind the last."""
    return blocks(inner, TURN) * TURN


def run_mixture(a: Arrays, p: Params) -> None:
    """y as `run_moe` has it, with what is added; `hidden` is each expert's activations times its share, [k, padded]."""
    logits = _logits(a)
    with np.errstate(over="ignore"):
        for t, own in enumerate(logits):
            a["routed"][t], a["share"][t] = route(own, p["k"], p["normalise"])
    _mix(a, p)


def run_mixture_experts(a: Arrays, p: Params) -> None:
    """The same of the experts that `routed` names, whose parts go by name and number."""
    with np.errstate(over="ignore"):
        for t, own in enumerate(_logits(a)):
            a["share"][t] = shares(own, a["routed"][t], p["normalise"])
    _mix(a, p)


def _logits(a: Arrays) -> Array:
    return np.asarray(a["router"].reshape(a["routed"].shape[0], -1).astype(np.float32))


def _mix(a: Arrays, p: Params) -> None:
    """Both products, of experts and shares that stand, and what is added to them."""
    x = a["x"].reshape(-1, a["x"].shape[-1]).astype(np.float32)
    if "gamma" in a:
        rms(a["x"], a["gamma"], p["eps"], x)
    y = a["y"].reshape(x.shape)
    a["hidden"][...] = 0
    with np.errstate(over="ignore"):
        for t in range(x.shape[0]):
            total = np.zeros(x.shape[1], np.float32)
            outputs = expert_outputs(a, x[t], a["routed"][t], p)
            for n, (weight, (hidden, out)) in enumerate(zip(a["share"][t], outputs, strict=True)):
                a["hidden"][t, n, : hidden.size] = weight * hidden
                total += weight * out
            y[t] = total
        if "other" in a:
            gates = sigmoid(a["other_gate"].astype(np.float32)).reshape(-1, 1)
            y += a["other"].reshape(y.shape) * gates
    if "residual" in a:
        y += a["residual"].reshape(y.shape)


def _sizes(refs: Refs, p: Params) -> tuple[int, int, bool]:
    rows, gated = refs["fc1"].shape[1], p["activation"] == "swiglu"
    return refs["x"].shape[-1], rows // 2 if gated else rows, gated


def _defines(refs: Refs, p: Params, side: str, k: int, n: int) -> dict[str, str | int]:
    hidden, inner, gated = _sizes(refs, p)
    of = "fc1" if side == "UP" else "fc2"
    made: dict[str, str | int] = {side: 1, "P_K": k, "P_N": n, "P_gated": int(gated and side == "UP")}
    made |= {"ROW_K": hidden if side == "UP" else inner, "EXPERTS": refs["fc1"].shape[0], "PADDED": padded(inner)}
    if f"{of}_zero_points" in refs:
        made["POINTS_PACKED"] = 1
    source = refs["x" if side == "UP" else "hidden"]
    if k % 8 == 0 and source.offset_bytes % 16 == 0:
        made["BY_EIGHT"] = 1
    return made


def _up(refs: Refs, p: Params) -> Geometry:
    """A row of blocks for each expert of a token."""
    hidden, inner, gated = _sizes(refs, p)
    rows = math.prod(refs["x"].shape[:-1]) * p["k"]
    return _launch(refs, p, "UP", hidden, inner, 8 if gated else 16, rows, p["k"])


def _down(refs: Refs, p: Params) -> Geometry:
    """A row of blocks for a token."""
    hidden, inner, _ = _sizes(refs, p)
    rows = math.prod(refs["x"].shape[:-1])
    return _launch(refs, p, "DOWN", p["k"] * padded(inner), hidden, 16, rows, 1)


def _launch(refs: Refs, p: Params, side: str, k: int, n: int, tile_rows: int, rows: int, rows_a_token: int) -> Geometry:
    if rows > _MOST_ROWS:
        raise NoForm(f"{rows} rows at once, {_MOST_ROWS} is the most: use a smaller prefill_chunk")
    warps, each = division(blocks(k, TURN), _TURNS_EACH)
    tiles = 2 if side == "DOWN" and n >= 32 and warps >= 2 else 1
    defines = _defines(refs, p, side, k, n) | {"TILES": tiles, "DEPTH": depth(each), "THREADS": 32 * warps}
    resident = max(1, 40 // warps)
    at_once = min(blocks(n, tile_rows * tiles), max(1, PROCESSORS * resident // rows_a_token))
    return Geometry((at_once, rows), defines=defines, threads=32 * warps, shared_bytes=ROOM_BYTES * warps * each)


def serves(p: Params) -> bool:
    """Whether tensor cores take the experts' codes as they lie."""
    return tiled(p) and p["block"] > 0 and p["k"] <= _MOST_CHOSEN


for _name, _run in (("mixture", run_mixture), ("mixture_experts", run_mixture_experts)):
    define(
        KernelDef(
            _name,
            _run,
            cuda=CudaForm("nbits", _up, early=True, heads=_HEADS),
            behind=CudaForm("nbits", _down, early=True, heads=_HEADS),
        )
    )
