"""Element-wise operators on activations."""

from __future__ import annotations

import numpy as np

from engine.graph import Node
from engine.lower import Const, LengthValue, Lowering, Refusal, Tensor, WeightValue
from engine.ops import op
from engine.ops.attributes import whole
from engine.plan import Operand

_CAST = {1: "float32", 10: "float16", 16: "bfloat16"}
_INTEGERS = (6, 7)  # TensorProto INT32, INT64


@op("", "Mul")
def mul(b: Lowering, node: Node) -> None:
    """Product of two activations of one shape."""
    _binary(b, node, "mul")


@op("", "Add")
def add(b: Lowering, node: Node) -> None:
    """Sum of two activations of one shape, or of an activation and a bias over the last axis."""
    _binary(b, node, "add")


@op("", "Sigmoid")
def sigmoid(b: Lowering, node: Node) -> None:
    """1 / (1 + exp(-x))."""
    x = b.tensor(node, 0)
    y = b.make(node.output(0), x.dtype, x.shape)
    b.emit(node, "sigmoid", (Operand("x", x.ref), Operand("y", y.ref, "w")), {})


@op("", "Cast")
def cast(b: Lowering, node: Node) -> None:
    """Another float type for an activation; a length stays a length in any integer type."""
    value = b.value(node.input(0))
    to = whole(node, "to")
    if isinstance(value, LengthValue) and to in _INTEGERS:
        b.set(node.output(0), value)
        return
    if isinstance(value, Const) and to in _INTEGERS:
        b.set(node.output(0), Const(value.array.astype(np.int64)))
        return
    if not isinstance(value, Tensor) or to not in _CAST:
        raise Refusal(f"cast to type {to} of {type(value).__name__} is not served")
    if _CAST[to] == value.dtype:
        b.set(node.output(0), value)
        return
    y = b.make(node.output(0), _CAST[to], value.shape)
    b.emit(node, "cast", (Operand("x", value.ref), Operand("y", y.ref, "w")), {})


def _binary(b: Lowering, node: Node, kernel: str) -> None:
    left, right = b.value(node.input(0)), b.value(node.input(1))
    if isinstance(left, WeightValue):
        left, right = right, left
    if not isinstance(left, Tensor):
        raise Refusal(f"neither input is an activation: {type(left).__name__}, {type(right).__name__}")
    if isinstance(right, Tensor) and right.shape == left.shape:
        other = right.ref
    elif isinstance(right, WeightValue) and right.shape == left.shape[-1:]:
        other = b.key(right, b.new_record())
    else:
        raise Refusal(f"input {node.input(1)!r} does not have the shape {list(left.shape)}")
    if other.dtype != left.dtype:
        raise Refusal(f"types {left.dtype} and {other.dtype} differ")
    y = b.make(node.output(0), left.dtype, left.shape)
    b.emit(node, kernel, (Operand("x", left.ref), Operand("other", other), Operand("y", y.ref, "w")), {})
