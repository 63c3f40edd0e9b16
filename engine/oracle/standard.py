"""The standard's plain operators: element-wise, moving, reducing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.oracle.inputs import (
    HALVES,
    MICROSOFT,
    Array,
    Coded,
    Computed,
    Inputs,
    LastRow,
    Unserved,
    rule,
    shape_like,
    sigmoid,
    softplus,
)

_TYPES: dict[int, Any] = {
    1: np.float32, 2: np.uint8, 3: np.int8, 4: np.uint16, 5: np.int16, 6: np.int32, 7: np.int64, 9: np.bool_,
    10: np.float32, 11: np.float64, 12: np.uint32, 13: np.uint64, 16: np.float32,
}  # fmt: skip
"""TensorProto's element types by number; half types are float32 here."""

_erf = np.vectorize(math.erf, otypes=[np.float64])


def _gelu(i: Inputs) -> Array:
    x = i.floats(0) + i.floats(1) if i.has(1) else i.floats(0)
    if i.node.op == "FastGelu" or i.node.attributes.get("approximate", "none") == "tanh":
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        return np.asarray(np.float32(0.5) * x * (1 + np.tanh(inner)))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))), np.float32)


_UNARY: dict[str, Callable[[Array], Any]] = {
    "Abs": np.abs,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Erf": lambda x: _erf(x).astype(x.dtype),
    "Exp": np.exp,
    "Floor": np.floor,
    "Identity": lambda x: x,
    "Log": np.log,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Reciprocal": lambda x: (1 / x).astype(x.dtype),
    "Relu": lambda x: np.maximum(x, 0),
    "Sigmoid": sigmoid,
    "Sign": np.sign,
    "Sin": np.sin,
    "Softplus": softplus,
    "Sqrt": np.sqrt,
    "Tanh": np.tanh,
}
_BINARY: dict[str, Callable[[Array, Array], Any]] = {
    "Add": np.add,
    "And": np.logical_and,
    "Div": lambda x, y: x / y if x.dtype.kind == "f" else np.trunc(x / y).astype(x.dtype),
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Mul": np.multiply,
    "Or": np.logical_or,
    "Pow": lambda x, y: np.power(x, y.astype(x.dtype)),
    "Sub": np.subtract,
    "Xor": np.logical_xor,
}


def _one(function: Callable[[Array], Any]) -> Callable[[Inputs], Computed]:
    return lambda i: np.asarray(function(i[0]))


def _two(function: Callable[[Array, Array], Any]) -> Callable[[Inputs], Computed]:
    return lambda i: np.asarray(function(i[0], i[1]))


for _name, _unary in _UNARY.items():
    rule(_name)(_one(_unary))
for _name, _binary in _BINARY.items():
    rule(_name)(_two(_binary))
rule("Gelu")(_gelu)
rule("Gelu", MICROSOFT)(_gelu)
rule("FastGelu", MICROSOFT)(_gelu)


@rule("QuickGelu", MICROSOFT)
def _quick_gelu(i: Inputs) -> Computed:
    return np.asarray(i.floats(0) * sigmoid(np.float32(i.number("alpha", 1.702)) * i.floats(0)))


@rule("Swish")
def _swish(i: Inputs) -> Computed:
    return np.asarray(i[0] * sigmoid(np.float32(i.number("alpha", 1.0)) * i[0]))


@rule("Min")
def _min(i: Inputs) -> Computed:
    return np.asarray(np.minimum.reduce(np.broadcast_arrays(*(i[n] for n in range(len(i.values))))))


@rule("Max")
def _max(i: Inputs) -> Computed:
    return np.asarray(np.maximum.reduce(np.broadcast_arrays(*(i[n] for n in range(len(i.values))))))


@rule("Clip")
def _clip(i: Inputs) -> Computed:
    x = i[0]
    x = np.maximum(x, i[1]) if i.has(1) else x
    return np.asarray(np.minimum(x, i[2]) if i.has(2) else x)


@rule("Where")
def _where(i: Inputs) -> Computed:
    return np.where(i[0], i[1], i[2])


@rule("Cast")
def _cast(i: Inputs) -> Computed:
    to = i.whole("to", 1)
    if to not in _TYPES:
        raise Unserved(f"to = {to}")
    x = i.stored(0)
    if str(x.dtype) in HALVES and _TYPES[to] is np.float32:
        return x  # it is widened where it is read
    return i[0].astype(_TYPES[to])


@rule("Constant")
def _constant(i: Inputs) -> Computed:
    kinds = {"value": None, "value_int": np.int64, "value_ints": np.int64, "value_float": np.float32}
    for name, dtype in (kinds | {"value_floats": np.float32}).items():
        if name in i.node.attributes:
            return np.asarray(i.node.attributes[name], dtype)
    raise Unserved("constant without a numeric value")


@rule("ConstantOfShape")
def _constant_of_shape(i: Inputs) -> Computed:
    value = np.asarray(i.node.attributes.get("value", np.zeros(1, np.float32))).reshape(-1)
    return np.full(tuple(i.integers(0) or ()), value[0], value.dtype)


@rule("Shape")
def _shape(i: Inputs) -> Computed:
    value = i.value(0)
    extents = value.shape if isinstance(value, Coded) else i.stored(0).shape
    return np.asarray(extents[i.whole("start", 0) : i.node.attributes.get("end")], np.int64)


@rule("Reshape")
def _reshape(i: Inputs) -> Computed:
    x = i.stored(0)
    return x.reshape(shape_like(x.shape, i.integers(1) or [], bool(i.whole("allowzero", 0))))


@rule("Flatten")
def _flatten(i: Inputs) -> Computed:
    x = i.stored(0)
    return x.reshape(math.prod(x.shape[: i.whole("axis", 1)]), -1)


@rule("Squeeze")
def _squeeze(i: Inputs) -> Computed:
    axes = i.integers(1)
    return np.squeeze(i.stored(0), None if axes is None else tuple(axes))


@rule("Unsqueeze")
def _unsqueeze(i: Inputs) -> Computed:
    value = i.value(0)
    if isinstance(value, LastRow) and i.integers(1) == [1]:
        return value.rows
    return np.expand_dims(i.stored(0), tuple(i.integers(1) or ()))


@rule("Transpose")
def _transpose(i: Inputs) -> Computed:
    return np.transpose(i.stored(0), i.node.attributes.get("perm"))


@rule("Expand")
def _expand(i: Inputs) -> Computed:
    x = i[0]
    return np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(i.integers(1) or ())))


@rule("Concat")
def _concat(i: Inputs) -> Computed:
    return np.concatenate([i[n] for n in range(len(i.values))], i.whole("axis", 0))


@rule("Split")
def _split(i: Inputs) -> Computed:
    x, axis, count = i[0], i.whole("axis", 0), len(i.node.outputs)
    sizes = i.integers(1)
    if sizes is None:
        each = -(-x.shape[axis] // count)
        sizes = [each] * (count - 1) + [x.shape[axis] - each * (count - 1)]
    if sum(sizes) != x.shape[axis] or len(sizes) != count:
        raise Unserved(f"sizes {sizes} do not make up {x.shape[axis]}")
    return tuple(np.split(x, np.cumsum(sizes)[:-1], axis))


@rule("Slice")
def _slice(i: Inputs) -> Computed:
    starts, ends = i.integers(1) or [], i.integers(2) or []
    axes, steps = i.integers(3) or list(range(len(starts))), i.integers(4) or [1] * len(starts)
    last = starts == [-1] and axes in ([1], [-2]) and steps == [1]
    if last and i[0].ndim == 3 and ends[0] >= i.positions == i[0].shape[1]:
        return i[0]  # each call's last row alone: the head sees all of them here
    cuts = [slice(None)] * i[0].ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        cuts[axis] = slice(start, end, step)
    return i[0][tuple(cuts)]


@rule("Gather")
def _gather(i: Inputs) -> Computed:
    x, index, axis = i.stored(0), i.stored(1), i.whole("axis", 0)
    if axis == 1 and x.ndim == 3 and x.shape[1] == i.positions and index.ndim == 0 and index == -1:
        return LastRow(x)
    return np.asarray(np.take(x, index, axis))


@rule("GatherElements")
def _gather_elements(i: Inputs) -> Computed:
    return np.take_along_axis(i[0], i[1], i.whole("axis", 0))


@rule("ScatterElements")
def _scatter_elements(i: Inputs) -> Computed:
    i.only("reduction", "none")
    made = i[0].copy()
    np.put_along_axis(made, i[1], i[2], i.whole("axis", 0))
    return made


@rule("TopK")
def _top_k(i: Inputs) -> Computed:
    x, axis = i[0], i.whole("axis", -1)
    order = np.argsort(-x if i.whole("largest", 1) else x, axis=axis, kind="stable")
    chosen = np.take(order, np.arange((i.integers(1) or [1])[0]), axis)
    return np.take_along_axis(x, chosen, axis), chosen.astype(np.int64)


@rule("Softmax")
def _softmax(i: Inputs) -> Computed:
    e = np.exp(i[0] - i[0].max(i.whole("axis", -1), keepdims=True))
    return np.asarray(e / e.sum(i.whole("axis", -1), keepdims=True))


@rule("LogSoftmax")
def _log_softmax(i: Inputs) -> Computed:
    off = i[0] - i[0].max(i.whole("axis", -1), keepdims=True)
    return np.asarray(off - np.log(np.exp(off).sum(i.whole("axis", -1), keepdims=True)))


@rule("Trilu")
def _trilu(i: Inputs) -> Computed:
    k = (i.integers(1) or [0])[0]
    return np.triu(i[0], k) if i.whole("upper", 1) else np.tril(i[0], k)


def _reduce(function: Callable[..., Any]) -> Callable[[Inputs], Computed]:
    def meaning(i: Inputs) -> Computed:
        axes = i.integers(1) if i.has(1) else i.node.attributes.get("axes")
        if not axes and i.whole("noop_with_empty_axes", 0):
            return i[0]
        keep = bool(i.whole("keepdims", 1))
        x = i[0]
        return np.asarray(function(x, axis=tuple(axes) if axes else None, keepdims=keep), x.dtype)

    return meaning


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "L1": lambda x, **how: np.sum(np.abs(x), **how),
    "L2": lambda x, **how: np.sqrt(np.sum(np.square(x), **how)),
    "Max": np.max,
    "Mean": np.mean,
    "Min": np.min,
    "Prod": np.prod,
    "Sum": np.sum,
    "SumSquare": lambda x, **how: np.sum(np.square(x), **how),
}
for _name, _function in _REDUCTIONS.items():
    rule(f"Reduce{_name}")(_reduce(_function))
