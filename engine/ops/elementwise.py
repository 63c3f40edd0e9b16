"""Element-wise operators, with broadcasting; arithmetic on lengths folds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.graph import DTYPES, Node
from engine.lower import Lowering, wide
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.ops.lengths import folded
from engine.values import (
    Const,
    LengthValue,
    Mask,
    Positions,
    Refusal,
    Switched,
    Tensor,
    Transposed,
    WeightValue,
)

CASTS = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool", 10: "float16",
    11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
"""Element types of TensorProto that are served, by number."""

_COMPARE = ("Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual")
_UNARY = (
    "Neg",
    "Abs",
    "Sqrt",
    "Exp",
    "Log",
    "Reciprocal",
    "Sign",
    "Floor",
    "Ceil",
    "Tanh",
    "Sin",
    "Cos",
    "Not",
    "Relu",
)
_BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor")

_COUNTS = (LengthValue, Switched, Positions, Mask)
"""Values that stay what they are in any integer type."""

Operand = Tensor | WeightValue | Const


def _unary(name: str) -> Callable[[Lowering, Node], None]:
    def rule(b: Lowering, node: Node) -> None:
        x = b.operand(node, 0)
        b.apply(node, name.lower(), [x], {}, [(_served(x), x.shape)])

    rule.__doc__ = f"{name}, element by element."
    return rule


def _binary(name: str) -> Callable[[Lowering, Node], None]:
    def rule(b: Lowering, node: Node) -> None:
        if folded(b, node):
            return
        left, right = b.operand(node, 0), b.operand(node, 1)
        if wide(left.dtype) != wide(right.dtype) and name != "Pow":
            raise Refusal(f"types {left.dtype} and {right.dtype} differ")
        made = "bool" if name in _COMPARE else _served(left)
        b.apply(node, name.lower(), [left, right], {}, [(made, broadcast(left.shape, right.shape))])

    rule.__doc__ = f"{name} of two tensors, broadcast."
    return rule


for _name in (*_UNARY, "Erf", "Sigmoid", "Softplus"):
    op("", _name)(_unary(_name))
for _name in (*_BINARY, *_COMPARE):
    op("", _name)(_binary(_name))


@op("", "Min")
def minimum(b: Lowering, node: Node) -> None:
    """Smallest of any number of tensors."""
    _variadic(b, node, "min")


@op("", "Max")
def maximum(b: Lowering, node: Node) -> None:
    """Largest of any number of tensors."""
    _variadic(b, node, "max")


@op("", "Where")
def where(b: Lowering, node: Node) -> None:
    """b where a, else c."""
    test, yes, no = (b.operand(node, i) for i in range(3))
    shape = broadcast(broadcast(test.shape, yes.shape), no.shape)
    b.apply(node, "where", [test, yes, no], {}, [(_served(yes), shape)])


@op("", "Clip")
def clip(b: Lowering, node: Node) -> None:
    """a held between an optional lower and an optional upper bound."""
    x = b.operand(node, 0)
    given = [(which, b.operand(node, i)) for i, which in ((1, "l"), (2, "h")) if node.input(i)]
    for name, which in (("min", "l"), ("max", "h")):  # opsets before 11 had them as attributes
        if name in node.attributes:
            given.append((which, Const(np.asarray(node.attributes[name], DTYPES[_served(x)]))))
    if any(math.prod(bound.shape) != 1 or len(bound.shape) > 1 for _, bound in given):
        raise Refusal(f"bounds of shape {[list(bound.shape) for _, bound in given]} are no single numbers")
    params = {"bounds": "".join(which for which, _ in given)}
    b.apply(node, "clip", [x, *(bound for _, bound in given)], params, [(_served(x), x.shape)])


@op("", "Gelu")
def gelu(b: Lowering, node: Node) -> None:
    """Gaussian error linear unit."""
    x = b.operand(node, 0)
    how = node.attributes.get("approximate", "none")
    if how not in ("none", "tanh"):
        raise Refusal(f"approximate = {how!r} is not served")
    b.apply(node, "gelu", [x], {"approximate": how}, [(_served(x), x.shape)])


@op("com.microsoft", "Gelu")
def ms_gelu(b: Lowering, node: Node) -> None:
    """The exact form."""
    x = b.operand(node, 0)
    b.apply(node, "gelu", [x], {"approximate": "none"}, [(_served(x), x.shape)])


@op("com.microsoft", "FastGelu")
def fast_gelu(b: Lowering, node: Node) -> None:
    """The tanh form, without a bias."""
    if node.input(1):
        raise Refusal("a bias is not served")
    x = b.operand(node, 0)
    b.apply(node, "gelu", [x], {"approximate": "tanh"}, [(_served(x), x.shape)])


@op("", "Swish")
def swish(b: Lowering, node: Node) -> None:
    """a * sigmoid(alpha * a)."""
    x = b.operand(node, 0)
    b.apply(node, "swish", [x], {"alpha": number(node, "alpha", 1.0)}, [(_served(x), x.shape)])


@op("com.microsoft", "QuickGelu")
def quick_gelu(b: Lowering, node: Node) -> None:
    """a * sigmoid(alpha * a), alpha 1.702 unless given."""
    x = b.operand(node, 0)
    b.apply(node, "swish", [x], {"alpha": number(node, "alpha", 1.702)}, [(_served(x), x.shape)])


@op("", "Cast")
def cast(b: Lowering, node: Node) -> None:
    """Another element type; a length or a position stays one in any integer type, a half weight one in float32."""
    to = CASTS.get(whole(node, "to"))
    if to is None:
        raise Refusal(f"cast to type {node.attributes['to']} is not served")
    held = b.turned(node.input(0))
    if held is not None and wide(held.dtype) == to:  # exact, and what kernels do with it anyway
        b.set(node.output(0), Transposed(held))
        return
    value = b.value(node.input(0))
    if isinstance(value, _COUNTS) and to in ("int32", "int64"):
        b.set(node.output(0), value)
        return
    if isinstance(value, LengthValue | Switched | Mask):
        raise Refusal(f"cast to type {node.attributes['to']} of a length or of the attention mask is not served")
    x = b.operand(node, 0)
    if (isinstance(x, Tensor) and x.dtype == wide(to)) or (isinstance(x, WeightValue) and wide(x.dtype) == to):
        b.set(node.output(0), x)
        return
    b.apply(node, "cast", [x], {}, [(to, x.shape)])


def broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that two shapes broadcast to. Raises Refusal where they do not."""
    try:
        return tuple(np.broadcast_shapes(left, right))
    except ValueError as error:
        raise Refusal(f"shapes {list(left)} and {list(right)} do not broadcast") from error


def _served(x: Operand) -> str:
    if x.dtype not in DTYPES:
        raise Refusal(f"type {x.dtype} is not served")
    return x.dtype


def _variadic(b: Lowering, node: Node, kernel: str) -> None:
    values = [b.operand(node, i) for i in range(len(node.inputs))]
    if not values:
        raise Refusal("there is nothing to compare")
    here: Operand = values[0]
    if len(values) == 1:
        b.set(node.output(0), here)
        return
    for i, other in enumerate(values[1:], 1):
        last = i == len(values) - 1
        name = node.output(0) if last else f"{node.output(0)}.{i}"
        part = Node(node.name, node.op, node.domain, node.inputs, (name,), {})
        b.apply(part, kernel, [here, other], {}, [(_served(here), broadcast(here.shape, other.shape))])
        made = b.value(name)
        assert isinstance(made, Tensor | WeightValue | Const)
        here = made
