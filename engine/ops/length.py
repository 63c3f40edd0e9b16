"""Length arithmetic and shape plumbing: folded at build, since only one device counter grows in decode.

The exporter derives the total length twice, from the mask's sum and from its shape; both become one number.
"""

from __future__ import annotations

import math

import numpy as np

from engine.graph import Node
from engine.lower import Const, LengthValue, Lowering, Mask, MaskShape, Refusal, Tensor, WeightValue
from engine.ops import op
from engine.plan import Ref


@op("", "Constant")
def constant(b: Lowering, node: Node) -> None:
    """A value written in the graph."""
    for name in ("value", "value_int", "value_ints", "value_float", "value_floats"):
        if name in node.attributes:
            array = np.asarray(node.attributes[name])
            if array.dtype.kind in "biuf":
                b.set(node.output(0), Const(array))
                return
    raise Refusal("constant without a numeric value")


@op("", "Shape")
def shape(b: Lowering, node: Node) -> None:
    """Shape of the attention mask."""
    if not isinstance(b.value(node.input(0)), Mask):
        raise Refusal("only the attention mask's shape is served")
    b.set(node.output(0), MaskShape())


@op("", "ReduceSum")
def reduce_sum(b: Lowering, node: Node) -> None:
    """Sum of the attention mask over its last axis: the total length."""
    axes = b.value(node.input(1)) if node.input(1) else Const(np.array([1]))
    if not isinstance(b.value(node.input(0)), Mask) or not isinstance(axes, Const):
        raise Refusal("only the attention mask's sum is served")
    if axes.array.reshape(-1).tolist() not in ([1], [-1]):
        raise Refusal(f"axes {axes.array.tolist()} are not the mask's last")
    b.set(node.output(0), LengthValue(0))


@op("", "Sub")
def sub(b: Lowering, node: Node) -> None:
    """A length less a constant."""
    left, right = b.value(node.input(0)), b.value(node.input(1))
    if not isinstance(left, LengthValue) or not isinstance(right, Const) or right.array.size != 1:
        raise Refusal("only a length less a constant is served")
    b.set(node.output(0), LengthValue(left.offset - int(right.array.reshape(-1)[0])))


@op("", "Reshape")
def reshape(b: Lowering, node: Node) -> None:
    """Another shape for the same bytes: of an initialiser (one key) or of an activation (no copy)."""
    value, target = b.value(node.input(0)), b.value(node.input(1))
    if not isinstance(target, (Const, WeightValue)):
        raise Refusal("the target shape is not known at build")
    wanted = target.array if isinstance(target, Const) else target.weight.array()
    if wanted.dtype.kind not in "iu":
        raise Refusal(f"the target shape is of type {wanted.dtype}")
    if isinstance(value, WeightValue):
        b.set(node.output(0), WeightValue(value.weight, _resolve(value.shape, wanted.reshape(-1).tolist())))
    elif isinstance(value, Tensor):
        ref = value.ref
        made = _resolve(value.shape, wanted.reshape(-1).tolist())
        b.set(node.output(0), Tensor(Ref(ref.kind, ref.index, ref.dtype, made, ref.name, ref.offset_bytes)))
    else:
        raise Refusal(f"reshape of {type(value).__name__} is not served")


def _resolve(shape: tuple[int, ...], target: list[int]) -> tuple[int, ...]:
    made = [shape[i] if d == 0 and i < len(shape) else d for i, d in enumerate(target)]
    total = math.prod(shape)
    if made.count(-1) > 1 or any(d < -1 for d in made):
        raise Refusal(f"{target} is no shape to take")
    if -1 in made:
        known = math.prod(d for d in made if d != -1)
        made[made.index(-1)] = total // known if known else 0
    if math.prod(made) != total:
        raise Refusal(f"shape {list(shape)} cannot become {target}")
    return tuple(made)
