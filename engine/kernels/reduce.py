"""Reductions over axes: half types are summed in float32 and rounded once; the order depends on the extents alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import blocks, wide
from engine.kernels.steps import around, merged, rows_first

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "reducesum": np.sum,
    "reducemean": np.mean,
    "reducemax": np.max,
    "reducemin": np.min,
    "reduceprod": np.prod,
    "reducel1": lambda x, **k: np.sum(np.abs(x), **k),
    "reducel2": lambda x, **k: np.sqrt(np.sum(x * x, **k)),
    "reducesumsquare": lambda x, **k: np.sum(x * x, **k),
}


def _reduction(function: Callable[..., Any]) -> Callable[[Arrays, Params], None]:
    def run(a: Arrays, p: Params) -> None:
        with np.errstate(all="ignore"):
            a["y"][...] = function(wide(a["a"]), axis=p["axes"], keepdims=p["keepdims"])

    return run


def softmax(x: Array, axis: int) -> Array:
    """exp(x - max) / sum, along one axis."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(e / e.sum(axis=axis, keepdims=True))


def run_softmax(a: Arrays, p: Params) -> None:
    """y = softmax of a along `axis`; `log`: its logarithm."""
    x = wide(a["a"])
    with np.errstate(all="ignore"):
        if p["log"]:
            shifted = x - x.max(axis=p["axis"], keepdims=True)
            a["y"][...] = shifted - np.log(np.exp(shifted).sum(axis=p["axis"], keepdims=True))
        else:
            a["y"][...] = softmax(x, p["axis"])


def run_lp_norm(a: Arrays, p: Params) -> None:
    """y = a over its L1 or L2 norm along `axis`; where the norm is 0, 0."""
    x = wide(a["a"])
    norm = (
        np.abs(x).sum(axis=p["axis"], keepdims=True) if p["p"] == 1 else np.sqrt((x * x).sum(p["axis"], keepdims=True))
    )
    a["y"][...] = np.divide(x, norm, out=np.zeros_like(x), where=norm != 0)


def run_arg(a: Arrays, p: Params) -> None:
    """y = index of the largest (or smallest) along `axis`; ties go to the first, or to the last where asked."""
    x = wide(a["a"])
    pick = np.argmin if p["smallest"] else np.argmax
    if p["last"]:
        found = x.shape[p["axis"]] - 1 - pick(np.flip(x, p["axis"]), axis=p["axis"])
    else:
        found = pick(x, axis=p["axis"])
    a["y"][...] = np.expand_dims(found, p["axis"]) if p["keepdims"] else found


def run_topk(a: Arrays, p: Params) -> None:
    """y, y1 = the k largest (or smallest) along `axis` and their indices, best first, ties to the lower index."""
    x = wide(a["a"])
    key = -x if p["largest"] and x.dtype.kind == "f" else (x if not p["largest"] else -x.astype(np.int64))
    order = np.argsort(key, axis=p["axis"], kind="stable")
    order = np.take(order, np.arange(p["k"]), axis=p["axis"])
    a["y"][...] = np.take_along_axis(a["a"], order, axis=p["axis"])
    a["y1"][...] = order


_CUDA = {
    "reducesum": ("add", "v", "x", 0),
    "reducemean": ("add", "v", "x / (sum_t)depth", 0),
    "reducemax": ("larger", "v", "x", 0),
    "reducemin": ("smaller", "v", "x", 0),
    "reduceprod": ("multiply", "v", "x", 1),
    "reducel1": ("add", "(v < 0 ? -v : v)", "x", 0),
    "reducel2": ("add", "v * v", "root(x)", 0),
    "reducesumsquare": ("add", "v * v", "x", 0),
}
"""How two are joined, what an element v adds, what is made of the end x, and what nothing gives."""
_LINES = 8  # warps of a block, each with a line of its own


def _over_axes(name: str) -> CudaForm:
    def geometry(refs: Refs, p: Params) -> Geometry:
        shape, own = refs["a"].shape, rows_first(refs["a"].shape)
        kept = [i for i in range(len(shape)) if i not in p["axes"]]
        over = [i for i in range(len(shape)) if i in p["axes"]]
        outer, steps = merged(tuple(shape[i] for i in kept), tuple(own[i] for i in kept))
        deep, deep_steps = merged(tuple(shape[i] for i in over), tuple(own[i] for i in over))
        count, depth = math.prod(outer), math.prod(deep)
        join, term, last, empty = _CUDA[name]
        return Geometry(
            (blocks(count, _LINES), 1),
            {"count": count, "depth": depth, "shape": outer, "steps": steps, "deep": deep, "deep_steps": deep_steps},
            {"REDUCE": join, "TERM": term, "LAST": last, "EMPTY": empty},
        )

    return CudaForm("reduce", geometry)


def _lines(refs: Refs, p: Params) -> Geometry:
    """A warp a line along one axis."""
    outer, depth, inner = around(refs["a"].shape, p["axis"])
    return Geometry((blocks(outer * inner, _LINES), 1), {"count": outer * inner, "depth": depth, "inner": inner})


for _name, _function in REDUCTIONS.items():
    define(KernelDef(_name, _reduction(_function), cuda=_over_axes(_name)))
for _name, _run in (("softmax", run_softmax), ("lp_norm", run_lp_norm), ("arg", run_arg), ("topk", run_topk)):
    define(KernelDef(_name, _run, cuda=CudaForm("reduce", _lines)))
