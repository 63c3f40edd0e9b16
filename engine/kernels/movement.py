"""Kernels that move elements without computing."""

from __future__ import annotations

import numpy as np

from engine.errors import DeviceFailure
from engine.kernels import Array, Arrays, KernelDef, Params, define


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


for _name, _run in (
    ("copy", run_copy),
    ("positions", run_positions),
    ("transpose", run_transpose),
    ("concat", run_concat),
    ("slice", run_slice),
    ("split", run_split),
    ("gather", run_gather),
    ("gather_elements", run_gather_elements),
    ("scatter_elements", run_scatter_elements),
    ("trilu", run_trilu),
):
    define(KernelDef(_name, _run))
