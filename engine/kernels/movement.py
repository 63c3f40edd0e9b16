"""Kernels that move elements without computing."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

import numpy as np

from engine.errors import DeviceFailure
from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, NoForm, Refs, Scalar
from engine.kernels.elementwise import blocks, elementwise
from engine.kernels.steps import Shape, around, merged, rows_first


def run_copy(a: Arrays, _: Params) -> None:
    """y = a, broadcast to y."""
    a["y"][...] = a["a"]


def run_transpose(a: Arrays, p: Params) -> None:
    """y = a with its axes in the order `perm`."""
    a["y"][...] = a["a"].transpose(p["perm"])


def run_concat(a: Arrays, p: Params) -> None:
    """y = all operands one after another along `axis`."""
    a["y"][...] = np.concatenate([a[c] for c in p["letters"]], axis=p["axis"])


def run_slice(a: Arrays, p: Params) -> None:
    """y = a[start:stop:step] on each axis; None: to the end."""
    a["y"][...] = a["a"][tuple(slice(*s) for s in p["slices"])]


def run_split(a: Arrays, p: Params) -> None:
    """y, y1, ... = consecutive parts of a along `axis`, of the `sizes` given."""
    start = 0
    for i, size in enumerate(p["sizes"]):
        part = [slice(None)] * a["a"].ndim
        part[p["axis"]] = slice(start, start + size)
        a[f"y{i or ''}"][...] = a["a"][tuple(part)]
        start += size


def run_gather(a: Arrays, p: Params) -> None:
    """y = elements of a along `axis` at the indices b; negative ones count from the end."""
    a["y"][...] = np.take(a["a"], _from_start(a["b"], a["a"].shape[p["axis"]]), axis=p["axis"])


def run_gather_elements(a: Arrays, p: Params) -> None:
    """y[..., i, ...] = a[..., b[..., i, ...], ...] along `axis`."""
    axis, index = p["axis"], a["b"]
    near = tuple(slice(None) if i == axis else slice(d) for i, d in enumerate(index.shape))  # others may be shorter
    a["y"][...] = np.take_along_axis(a["a"][near], _from_start(index, a["a"].shape[axis]), axis=axis)


def run_scatter_elements(a: Arrays, p: Params) -> None:
    """y = a with c put at the indices b along `axis`; `reduction` none, add, mul, max or min."""
    y = a["y"]
    y[...] = a["a"]
    axis, index = p["axis"], _from_start(a["b"], a["a"].shape[p["axis"]])
    places = list(np.indices(index.shape))
    places[axis] = index
    where = tuple(places)
    match p["reduction"]:
        case "none":
            y[where] = a["c"]
        case "add":
            np.add.at(y, where, a["c"])
        case "mul":
            np.multiply.at(y, where, a["c"])
        case "max":
            np.maximum.at(y, where, a["c"])
        case "min":
            np.minimum.at(y, where, a["c"])


def run_trilu(a: Arrays, p: Params) -> None:
    """y = a with the other side of the k-th diagonal set to zero."""
    a["y"][...] = np.triu(a["a"], p["k"]) if p["upper"] else np.tril(a["a"], p["k"])


def _from_start(index: Array, extent: int) -> Array:
    """Indices from 0. Raises DeviceFailure for one beyond the elements: what lies there is not the tensor's."""
    made = np.where(index < 0, index + extent, index)
    beyond = (made < 0) | (made >= extent)
    if beyond.any():
        raise DeviceFailure(f"index {index[beyond].flat[0]} is out of bounds for {extent} elements")
    return made


def run_positions(a: Arrays, _: Params) -> None:
    """y = positions of the tokens that go in, along its last axis, counted from the cached length."""
    a["y"][...] = np.arange(a["y"].shape[-1]) + int(a["length"][0])


def _strided(steps: Callable[[Shape, Params], tuple[int, Shape]]) -> CudaForm:
    """A move that is a start and steps in a for every index of y."""

    def geometry(refs: Refs, p: Params) -> Geometry:
        to = refs["y"].shape
        start, of = steps(refs["a"].shape, p)
        shape, made = merged(to, of)
        count = math.prod(to)
        scalars: dict[str, Scalar] = {"count": count, "shape": shape, "a_steps": made, "a_start": start}
        return Geometry((blocks(count), 1), scalars, {"EXPRESSION": "A"})

    return CudaForm("elementwise", geometry)


def _transposed(shape: Shape, p: Params) -> tuple[int, Shape]:
    own = rows_first(shape)
    return 0, tuple(own[axis] for axis in p["perm"])


def _sliced(shape: Shape, p: Params) -> tuple[int, Shape]:
    ranges = [range(extent)[slice(*s)] for extent, s in zip(shape, p["slices"], strict=True)]
    own = rows_first(shape)
    start = sum(r.start * step for r, step in zip(ranges, own, strict=True) if len(r))
    return start, tuple(r.step * step for r, step in zip(ranges, own, strict=True))


def _parts(whole: str) -> Callable[[Refs, Params], Geometry]:
    """Concatenation and its reverse: a thread an element of the whole."""

    def geometry(refs: Refs, p: Params) -> Geometry:
        parts = [ref for name, ref in refs.items() if (name[0] == "y") == (whole == "a")]
        types = {ref.dtype for ref in refs.values()}
        if len(types) > 1:
            raise NoForm(f"parts of types {', '.join(sorted(types))}")
        _, extent, inner = around(refs[whole].shape, p["axis"])
        ends = tuple(accumulate(part.shape[p["axis"]] for part in parts))
        count = math.prod(refs[whole].shape)
        scalars: dict[str, Scalar] = {"count": count, "extent": extent, "inner": inner, "ends": ends}
        return Geometry((blocks(count), 1), scalars)

    return geometry


def _gather(refs: Refs, p: Params) -> Geometry:
    _, extent, inner = around(refs["a"].shape, p["axis"])
    count = math.prod(refs["y"].shape)
    scalars: dict[str, Scalar] = {"count": count, "extent": extent, "inner": inner}
    return Geometry((blocks(count), 1), scalars | {"picks": math.prod(refs["b"].shape)})


def _elements(refs: Refs, p: Params) -> Geometry:
    """gather_elements and scatter_elements: indices of their own shape, which may be smaller than a."""
    shape, index = refs["a"].shape, refs["b"].shape
    _, extent, inner = around(shape, p["axis"])
    count = math.prod(refs["y"].shape)
    scalars: dict[str, Scalar] = {"count": count, "extent": extent, "inner": inner}
    scalars |= {"shape": shape, "steps": rows_first(shape), "b_shape": index, "b_steps": rows_first(index)}
    return Geometry((blocks(count), 1), scalars, {"RANK": len(shape)})


def _counted(refs: Refs, _: Params) -> Geometry:
    shape = refs["y"].shape
    count = math.prod(shape)
    scalars = {"count": count, "extent": shape[-1]}
    return Geometry((blocks(count), 1), scalars, {"EXPRESSION": "*length + i % extent"})


def _triangle(refs: Refs, _: Params) -> Geometry:
    shape = refs["y"].shape
    count = math.prod(shape)
    return Geometry((blocks(count), 1), {"count": count, "rows": shape[-2], "columns": shape[-1]})


for _name, _run, _cuda in (
    ("copy", run_copy, elementwise("A")),
    ("positions", run_positions, CudaForm("elementwise", _counted)),
    ("transpose", run_transpose, _strided(_transposed)),
    ("concat", run_concat, CudaForm("movement", _parts("y"))),
    ("slice", run_slice, _strided(_sliced)),
    ("split", run_split, CudaForm("movement", _parts("a"))),
    ("gather", run_gather, CudaForm("movement", _gather, faults=True)),
    ("gather_elements", run_gather_elements, CudaForm("movement", _elements, faults=True)),
    ("scatter_elements", run_scatter_elements, CudaForm("movement", _elements, faults=True)),
    ("trilu", run_trilu, CudaForm("movement", _triangle)),
):
    define(KernelDef(_name, _run, cuda=_cuda))
