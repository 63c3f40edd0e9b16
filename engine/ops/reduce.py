"""Reductions, softmax, norms over an axis, and choices of the largest."""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.graph import Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import whole
from engine.ops.movement import axis_of
from engine.values import LengthValue, Mask, Positions, Refusal


def _rule(name: str) -> Callable[[Lowering, Node], None]:
    def rule(b: Lowering, node: Node) -> None:
        if isinstance(b.value(node.input(0)), Mask | LengthValue | Positions):
            _of_length(b, node, name)
            return
        x = b.operand(node, 0)
        given = b.numbers(node, 1) if node.input(1) else node.attributes.get("axes")
        rank = len(x.shape)
        if not given and whole(node, "noop_with_empty_axes", 0):
            b.set(node.output(0), b.value(node.input(0)))
            return
        axes = tuple(sorted(axis_of(a, rank) for a in given)) if given else tuple(range(rank))
        keep = bool(whole(node, "keepdims", 1))
        if name in ("ReduceMax", "ReduceMin", "ReduceMean") and any(x.shape[a] == 0 for a in axes):
            raise Refusal(f"{name} of nothing is not served")
        made = tuple(1 if i in axes else d for i, d in enumerate(x.shape) if keep or i not in axes)
        b.apply(node, name.lower(), [x], {"axes": axes, "keepdims": keep}, [(x.dtype, made)])

    rule.__doc__ = f"{name} over axes."
    return rule


for _name in (
    "ReduceSum",
    "ReduceMean",
    "ReduceMax",
    "ReduceMin",
    "ReduceProd",
    "ReduceL1",
    "ReduceL2",
    "ReduceSumSquare",
):
    op("", _name)(_rule(_name))


@op("", "Softmax")
def softmax(b: Lowering, node: Node) -> None:
    """Softmax along an axis."""
    _softmax(b, node, log=False)


@op("", "LogSoftmax")
def log_softmax(b: Lowering, node: Node) -> None:
    """Logarithm of the softmax along an axis."""
    _softmax(b, node, log=True)


@op("", "LpNormalization")
def lp_normalization(b: Lowering, node: Node) -> None:
    """Over the L1 or L2 norm along an axis."""
    x = b.operand(node, 0)
    p = whole(node, "p", 2)
    if p not in (1, 2) or x.dtype not in ("float16", "bfloat16", "float32", "float64"):
        raise Refusal(f"p = {p} of {x.dtype} is not served")
    b.apply(
        node, "lp_norm", [x], {"axis": axis_of(whole(node, "axis", -1), len(x.shape)), "p": p}, [(x.dtype, x.shape)]
    )


@op("", "ArgMax")
def arg_max(b: Lowering, node: Node) -> None:
    """Index of the largest along an axis."""
    _arg(b, node, smallest=False)


@op("", "ArgMin")
def arg_min(b: Lowering, node: Node) -> None:
    """Index of the smallest along an axis."""
    _arg(b, node, smallest=True)


@op("", "TopK")
def top_k(b: Lowering, node: Node) -> None:
    """The k largest along an axis, best first; ties go to the lower index."""
    x = b.operand(node, 0)
    k = b.numbers(node, 1) if node.input(1) else [whole(node, "k")]
    axis = axis_of(whole(node, "axis", -1), len(x.shape))
    if k is None or len(k) != 1 or not 0 <= k[0] <= x.shape[axis]:
        raise Refusal(f"k = {k} does not fit {list(x.shape)}")
    made = tuple(k[0] if i == axis else d for i, d in enumerate(x.shape))
    params = {"k": k[0], "axis": axis, "largest": bool(whole(node, "largest", 1))}
    b.apply(node, "topk", [x], params, [(x.dtype, made), ("int64", made)])


def _softmax(b: Lowering, node: Node, *, log: bool) -> None:
    x = b.operand(node, 0)
    rank = len(x.shape)
    axis = axis_of(whole(node, "axis", -1 if node.opset >= 13 else 1), rank)
    if node.opset < 13 and math.prod(x.shape[axis + 1 :]) != 1:
        raise Refusal(f"ai.onnx {node.opset} has the axes from {axis} on summed as one, which is not served")
    b.apply(node, "softmax", [x], {"axis": axis, "log": log}, [(x.dtype, x.shape)])


def _arg(b: Lowering, node: Node, *, smallest: bool) -> None:
    x = b.operand(node, 0)
    axis, keep = axis_of(whole(node, "axis", 0), len(x.shape)), bool(whole(node, "keepdims", 1))
    made = tuple(1 if i == axis else d for i, d in enumerate(x.shape) if keep or i != axis)
    last = bool(whole(node, "select_last_index", 0))
    params = {"axis": axis, "keepdims": keep, "last": last, "smallest": smallest}
    b.apply(node, "arg", [x], params, [("int64", made)])


def _of_length(b: Lowering, node: Node, name: str) -> None:
    """The attention mask's sum over its last axis is the total length; the largest position is one less."""
    value = b.value(node.input(0))
    axes = b.numbers(node, 1) if node.input(1) else node.attributes.get("axes")
    if isinstance(value, Mask) and name == "ReduceSum" and axes in ([1], [-1]):
        b.set(node.output(0), LengthValue(0))
    elif isinstance(value, LengthValue) and name in ("ReduceMax", "ReduceMin"):  # of one sequence's, itself
        b.set(node.output(0), value)
    elif isinstance(value, Positions) and name == "ReduceMax" and value.shift is None and not axes:
        b.set(node.output(0), LengthValue(-1))
    else:
        raise Refusal(
            f"{name} over {axes or 'all axes'} of {type(value).__name__} is not served: of the attention mask the sum "
            "over its last axis is, of position ids the largest of all"
        )
