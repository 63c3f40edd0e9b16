"""Numbers that the sequence's length decides: arithmetic on them is done here, at build, and no step computes it."""

from __future__ import annotations

import operator
from collections.abc import Callable

from engine.graph import Node
from engine.lower import Lowering
from engine.values import LengthValue, Positions, Refusal, Switched

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {"Add": operator.add, "Sub": operator.sub, "Mul": operator.mul}
_ABOVE = {"Greater": (0, 1, 0), "GreaterOrEqual": (-1, 1, 0), "Less": (-1, 0, 1), "LessOrEqual": (0, 0, 1)}
"""Of `total compared with n`: what n is moved by to be a threshold, then the answer above it and up to it."""
_MIRRORED = {"Greater": "Less", "GreaterOrEqual": "LessOrEqual", "Less": "Greater", "LessOrEqual": "GreaterOrEqual"}


def folded(b: Lowering, node: Node) -> bool:
    """Whether a node of two inputs computes with lengths; then its value is bound. Raises Refusal where it cannot be.

    Served: a length or a number switched by one, with a number known at build; and positions moved by a switched one.
    """
    left, right = b.value(node.input(0)), b.value(node.input(1))
    if isinstance(right, Positions) and isinstance(left, Switched):
        left, right = right, left
    if isinstance(left, Positions) and isinstance(right, Switched) and node.op == "Add" and left.shift is None:
        b.set(node.output(0), Positions(left.shape, right))
        return True
    if isinstance(left, LengthValue | Switched):
        b.set(node.output(0), _with_number(left, node.op, _number(b, node, 1)))
        return True
    if isinstance(right, LengthValue | Switched):
        number = _number(b, node, 0)
        if node.op in ("Add", "Mul"):
            b.set(node.output(0), _with_number(right, node.op, number))
        else:
            b.set(node.output(0), _with_number(right, _MIRRORED.get(node.op, ""), number))
        return True
    return False


def _number(b: Lowering, node: Node, index: int) -> int:
    numbers = b.numbers(node, index)
    if numbers is None or len(numbers) != 1:
        raise Refusal(f"a length with {numbers} is not served: one number is")
    return numbers[0]


def _with_number(value: LengthValue | Switched, op: str, number: int) -> LengthValue | Switched:
    arithmetic = _ARITHMETIC.get(op)
    if isinstance(value, Switched):
        if arithmetic is not None:
            return Switched(value.threshold, arithmetic(value.above, number), arithmetic(value.below, number))
    elif op in ("Add", "Sub"):
        return LengthValue(_ARITHMETIC[op](value.offset, number))
    elif op in _ABOVE:
        moved, above, below = _ABOVE[op]
        return Switched(number - value.offset + moved, above, below)
    raise Refusal("this arithmetic on a length is not served")
