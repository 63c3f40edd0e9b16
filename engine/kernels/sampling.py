"""Greedy choice on the device, and the step's end."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.kernels import Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs


def run_argmax(a: Arrays, _: Params) -> None:
    """ids[0] = index of the largest logit of the last row, ties to the lowest; gap = best minus second best.

    A logit that is not finite makes the gap NaN, whatever was largest.
    """
    row = a["logits"].reshape(-1, a["logits"].shape[-1])[-1].astype(np.float32, copy=False)
    best = int(np.argmax(row))
    a["ids"].reshape(-1)[0] = best
    if not np.isfinite(row).all():
        a["gap"][0] = np.float32(np.nan)
        return
    rest = max((part.max() for part in (row[:best], row[best + 1 :]) if part.size), default=np.float32(-np.inf))
    with np.errstate(over="ignore"):  # two finite logits may lie further apart than float32 reaches
        a["gap"][0] = np.minimum(row[best] - rest, np.finfo(np.float32).max)


def run_rank(a: Arrays, p: Params) -> None:
    """Of each `each` logits of the last row: y = the largest and the second largest, y1 = the index of the largest.

    A logit that is not finite makes the second one NaN.
    """
    row = a["logits"].reshape(-1, a["logits"].shape[-1])[-1].astype(np.float32, copy=False)
    for part, start in enumerate(range(0, row.size, p["each"])):
        own = row[start : start + p["each"]]
        best = int(np.argmax(own))
        rest = np.delete(own, best).max(initial=np.float32(-np.inf))
        a["y"][part] = own[best], rest if np.isfinite(own).all() else np.nan
        a["y1"][part] = start + best


def run_choose(a: Arrays, p: Params) -> None:
    """What `argmax` says of all parts that `rank` made, and the step's end."""
    best = int(np.argmax(a["a"][:, 0]))
    a["ids"].reshape(-1)[0] = a["b"][best]
    if np.isnan(a["a"][:, 1]).any():
        a["gap"][0] = np.float32(np.nan)
    else:
        rest = max(a["a"][best, 1], np.delete(a["a"][:, 0], best).max(initial=np.float32(-np.inf)))
        with np.errstate(over="ignore"):
            a["gap"][0] = np.minimum(a["a"][best, 0] - rest, np.finfo(np.float32).max)
    run_advance(a, p)


def run_advance(a: Arrays, p: Params) -> None:
    """length += rows: the only number that grows from token to token."""
    a["length"][0] += p["rows"]


def ranked(width: int) -> tuple[int, int]:
    """In how many parts so many logits are ranked, about one a multiprocessor, and how long one is."""
    each = max(1024, -(-width // 128))
    return -(-width // each), each


def _last_row(threads: int) -> Callable[[Refs, Params], Geometry]:
    def geometry(refs: Refs, _: Params) -> Geometry:
        shape = refs["logits"].shape
        scalars = {"width": shape[-1], "start": math.prod(shape) - shape[-1]}
        return Geometry((refs["y1"].shape[0] if "y1" in refs else 1, 1), scalars, threads=threads)

    return geometry


def _parts(refs: Refs, _: Params) -> Geometry:
    return Geometry((1, 1), {"parts": refs["b"].shape[0]}, threads=128)


def _alone(_: Refs, __: Params) -> Geometry:
    return Geometry((1, 1), threads=32)


for _name, _run, _geometry, _runtime in (
    ("argmax", run_argmax, _last_row(1024), ()),
    ("rank", run_rank, _last_row(256), ()),
    ("choose", run_choose, _parts, ("rows",)),
    ("advance", run_advance, _alone, ("rows",)),
):
    define(KernelDef(_name, _run, cuda=CudaForm("sampling", _geometry, runtime=_runtime)))
