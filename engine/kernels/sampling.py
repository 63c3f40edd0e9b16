"""Greedy choice on the device, and the step's end."""

from __future__ import annotations

import math

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


def run_advance(a: Arrays, p: Params) -> None:
    """length += rows: the only number that grows from token to token."""
    a["length"][0] += p["rows"]


def _last_row(refs: Refs, _: Params) -> Geometry:
    shape = refs["logits"].shape
    return Geometry((1, 1), {"width": shape[-1], "start": math.prod(shape) - shape[-1]}, threads=1024)


define(KernelDef("argmax", run_argmax, cuda=CudaForm("sampling", _last_row)))
define(
    KernelDef(
        "advance", run_advance, cuda=CudaForm("sampling", lambda _, __: Geometry((1, 1), threads=32), runtime=("rows",))
    )
)
