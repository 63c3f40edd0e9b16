"""Root-mean-square norms, alone and with the residual's sum."""

from __future__ import annotations

from engine.graph import Node
from engine.lower import Lowering, Refusal
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.plan import Operand


@op("", "SimplifiedLayerNormalization")
def simplified_layer_norm(b: Lowering, node: Node) -> None:
    """y = x * rsqrt(mean(x^2) + eps) * gamma over the last axis."""
    x, gamma = b.tensor(node, 0), b.weight(node, 1)
    if whole(node, "axis", -1) not in (-1, len(x.shape) - 1):
        raise Refusal(f"axis {node.attributes['axis']} is not the last")
    if gamma.shape != x.shape[-1:]:
        raise Refusal(f"gamma {list(gamma.shape)} does not fit input {list(x.shape)}")
    if any(node.outputs[1:]):
        raise Refusal("outputs beyond the first are not served")
    y = b.make(node.output(0), x.dtype, x.shape)
    operands = (Operand("x", x.ref), Operand("gamma", b.key(gamma, b.new_record())), Operand("y", y.ref, "w"))
    b.emit(node, "rms_norm", operands, {"eps": number(node, "epsilon", 1e-5)})


@op("com.microsoft", "SkipSimplifiedLayerNormalization")
def skip_simplified_layer_norm(b: Lowering, node: Node) -> None:
    """s = x + skip (+ bias), y = norm(s); s is output 3, the next residual."""
    x, skip, gamma = b.tensor(node, 0), b.tensor(node, 1), b.weight(node, 2)
    if x.shape != skip.shape or gamma.shape != x.shape[-1:]:
        raise Refusal(f"shapes {list(x.shape)}, {list(skip.shape)}, gamma {list(gamma.shape)} do not fit")
    if node.output(1) or node.output(2):
        raise Refusal("mean and inverse deviation are not served as outputs")
    record = b.new_record()
    operands = [Operand("x", x.ref), Operand("skip", skip.ref), Operand("gamma", b.key(gamma, record))]
    if node.input(3):
        bias = b.weight(node, 3)
        if bias.shape != gamma.shape:
            raise Refusal(f"bias {list(bias.shape)} does not fit gamma {list(gamma.shape)}")
        operands.append(Operand("bias", b.key(bias, record)))
    y = b.make(node.output(0), x.dtype, x.shape)
    total = b.make(node.output(3), x.dtype, x.shape)
    operands += [Operand("y", y.ref, "w"), Operand("sum", total.ref, "w")]
    b.emit(node, "skip_rms_norm", tuple(operands), {"eps": number(node, "epsilon", 1e-12)})
