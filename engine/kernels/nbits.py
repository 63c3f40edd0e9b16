"""Products of one row at a time with weights of 4- or 8-bit codes, and what may be done in the same step.

Beside its first weight a step may have a second and a third, of as many columns, for the same x: outputs side by side,
or a gated pair. x may be normed first (`gamma`), and what is made may have a bias and a residual added.
"""

from __future__ import annotations

import math

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import blocks, sigmoid
from engine.kernels.matmul import MOST, ends, unpack, zero_points
from engine.kernels.norm import rms


def decode_nbits(a: Arrays, p: Params) -> Array:
    """(code - zero point) * scale, float32 [N, K], weight under weight; MatMulNBits of onnxruntime's operators."""
    made = [_decode_one(a, p, end) for end in ends(p)]
    return made[0] if len(made) == 1 else np.concatenate(made)


def _decode_one(a: Arrays, p: Params, end: str) -> Array:
    n, k, bits, block = p[f"N{end}"], p["K"], p["bits"], p["block"]
    blocks = -(-k // block)
    scales = a[f"scales{end}"].astype(np.float32)
    points = zero_points(a.get(f"zero_points{end}"), bits, n, blocks)
    w = unpack(a[f"codes{end}"], bits, k).astype(np.float32)
    if k % block:
        column = np.arange(k) // block
        wide = points if points.shape[1] == 1 else points[:, column]
        return np.asarray((w - wide) * scales[:, column])
    shaped = w.reshape(n, blocks, block)
    shaped -= points[..., None]
    shaped *= scales[..., None]
    return w


def run_nbits(a: Arrays, p: Params) -> None:
    """y = x @ decoded.T (+ bias) (+ residual), row by row, x normed first where there is a gamma; or, of a gated pair,
    silu of the first product times the second.
    """
    x, w = a["x"].reshape(-1, a["x"].shape[-1]), a["decoded"]
    if "gamma" in a:
        normed = np.empty(x.shape, np.float32)
        rms(x, a["gamma"], p["eps"], normed)
        x = normed
    outputs = [(end, a[f"y{end}"].reshape(x.shape[0], -1)) for end in ends(p) if not (end and p.get("gated"))]
    with np.errstate(over="ignore", invalid="ignore"):
        for r in range(x.shape[0]):
            product = np.dot(w, x[r].astype(np.float32, copy=False))
            if p.get("gated"):
                gate = product[: p["N"]]
                product = gate * sigmoid(gate) * product[p["N"] :]
            start = 0
            for end, y in outputs:
                made = product[start : start + y.shape[1]]
                for more in (a.get(f"bias{end}"), a["residual"].reshape(y.shape)[r] if "residual" in a else None):
                    if more is not None:
                        made = made + more.astype(np.float32)
                y[r] = made
                start += y.shape[1]


_LINES = 8  # warps of a block, each with an output of its own, where codes are taken word by word
_WARPS = 28  # at most, of a block that takes tiles
TURNS_EACH = ((12, 1), *((_WARPS * each, each) for each in (2, 4, 8)))
"""Up to so many turns, a warp takes so many."""
MANY_TILES = 2048
"""From so many tiles on, warps that take a turn each and two tiles at a time keep the memory busiest."""
ROOM_BYTES = 544
"""Of shared memory, for x in one turn."""
PROCESSORS = 132


def division(turns: int, turns_each: tuple[tuple[int, int], ...] = TURNS_EACH) -> tuple[int, int]:
    """Warps that share so many turns of 128 columns, and turns of each: with them goes the order of sums."""
    each = next((each for most, each in turns_each if turns <= most), blocks(turns, _WARPS))
    return blocks(turns, each), each


def depth(each: int) -> int:
    """Turns that a warp asks for before it uses the first; they must divide those that it takes."""
    return each if each <= 4 else 1


def tiled(p: Params) -> bool:
    """Whether tensor cores take a weight's codes as they lie; only then may a step have more than one weight."""
    return bool(p["bits"] == 4 and p["block"] % 32 == 0)


def _nbits(refs: Refs, p: Params) -> Geometry:
    """How warps share the columns follows from K, and from whether rows are many; rows of a block change no sum.

    The numbers are those that were fastest on one NVIDIA H200 (docs/results/cuda-table-h200.json).
    """
    rows_of_x = math.prod(refs["x"].shape[:-1])
    packed = "zero_points" in refs and refs["zero_points"].dtype == "uint8"
    defines: dict[str, str | int] = {"POINTS_PACKED": 1} if packed else {}
    if not tiled(p):
        return Geometry((blocks(p["N"], _LINES), rows_of_x), defines=defines)
    rows = [p["N"]] if p.get("gated") else [p[f"N{end}"] for end in ends(p)]
    tile_rows = 8 if p.get("gated") else 16
    tiles = sum(blocks(n, tile_rows) for n in rows)
    turns = blocks(p["K"], 128)
    warps, each = (turns, 1) if tiles >= MANY_TILES and 16 < turns <= _WARPS else division(turns)
    if p["K"] % 8 == 0 and refs["x"].offset_bytes % 16 == 0:
        defines["BY_EIGHT"] = 1
    most = most_tiles(warps, each, tiles)
    of_group = max(t for t in (1, 2, 4) if t == 1 or (t <= most and 16 * t <= min(rows)))
    warps = max(warps, of_group * 16 // 32)
    defines |= {"TILES": of_group, "DEPTH": depth(each), "THREADS": 32 * warps}
    groups = sum(blocks(n, tile_rows * of_group) for n in rows)
    resident = max(1, min(28 // warps, (56 if each == 1 else 40) // (warps * of_group)))
    at_once = min(groups, PROCESSORS * resident)
    return Geometry((at_once, rows_of_x), defines=defines, threads=32 * warps, shared_bytes=ROOM_BYTES * warps * each)


def most_tiles(warps: int, each: int, tiles: int) -> int:
    """How many of a step's tiles a block takes at a time, at most: as measured, shape by shape (docs/cuda.md)."""
    if each >= 4:
        return 2 if each > 4 else 1
    if each == 2:
        if warps > 14:
            return 2 if tiles >= 128 else 1
        if warps > 8:
            return 4 if tiles >= 512 else 1
        return 4 if tiles <= 256 else 2
    if tiles < 512:
        return 2 if tiles <= 64 else 4 if tiles <= 128 else 1
    return 2 if tiles >= MANY_TILES or warps > 7 else 4


_WEIGHTS = tuple(f"{part}{end}" for end in MOST for part in ("codes", "scales", "zero_points"))
define(KernelDef("matmul_nbits", run_nbits, _WEIGHTS, decode_nbits, CudaForm("nbits", _nbits, early=True)))
