"""Norms over trailing axes, alone, gated, and with the residual's sum."""

from __future__ import annotations

import math

from engine.graph import Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.ops.movement import axis_of
from engine.plan import Operand
from engine.values import Refusal, Tensor


@op("", "LayerNormalization")
def layer_normalization(b: Lowering, node: Node) -> None:
    """(x - mean) / sqrt(var + eps) * scale (+ bias) over the axes from `axis`; also mean and inverse deviation."""
    x, scale = b.operand(node, 0), b.operand(node, 1)
    axis = axis_of(whole(node, "axis", -1), len(x.shape))
    inputs = [x, scale] + ([b.operand(node, 2)] if node.input(2) else [])
    outer, inner = x.shape[:axis], x.shape[axis:]
    if any(v.shape != inner for v in inputs[1:]):
        raise Refusal(f"scale {list(scale.shape)} does not fit the axes {list(inner)}")
    small = (*outer, *(1 for _ in inner))
    outs = [(x.dtype, x.shape), ("float32", small), ("float32", small)][: len(node.outputs)]
    params = {"rows": math.prod(outer), "eps": number(node, "epsilon", 1e-5)}
    b.apply(node, "layer_norm", inputs, params, outs)


@op("", "RMSNormalization")
def rms_normalization(b: Lowering, node: Node) -> None:
    """x * rsqrt(mean(x^2) + eps) * scale over the axes from `axis`."""
    x, scale = b.operand(node, 0), b.operand(node, 1)
    axis = axis_of(whole(node, "axis", -1), len(x.shape))
    if scale.shape != x.shape[axis:]:
        raise Refusal(f"scale {list(scale.shape)} does not fit the axes {list(x.shape[axis:])}")
    params = {"rows": math.prod(x.shape[:axis]), "eps": number(node, "epsilon", 1e-5)}
    b.apply(node, "rms_norm_axes", [x, scale], params, [(x.dtype, x.shape)])


@op("com.microsoft", "GatedRMSNorm")
def gated_rms_norm(b: Lowering, node: Node) -> None:
    """RMS norm over the last axis, times silu of the gate."""
    x, scale, gate = (b.operand(node, i) for i in range(3))
    if gate.shape != x.shape or x.shape[-1] % max(1, math.prod(scale.shape)):
        raise Refusal(f"shapes {list(x.shape)}, scale {list(scale.shape)}, gate {list(gate.shape)} do not fit")
    params = {"eps": number(node, "epsilon", 1e-5)}
    b.apply(node, "gated_rms_norm", [x, scale, gate], params, [(x.dtype, x.shape)])


@op("com.microsoft", "SkipLayerNormalization")
def skip_layer_normalization(b: Lowering, node: Node) -> None:
    """s = x + skip (+ bias), y = layer norm(s); s is output 3, the next residual."""
    x, skip, gamma = b.tensor(node, 0), b.tensor(node, 1), b.weight(node, 2)
    _fit(node, x, skip, gamma.shape)
    record = b.new_record()
    operands = [Operand("x", x.ref), Operand("skip", skip.ref), Operand("gamma", b.key(gamma, record))]
    for index, name in ((3, "beta"), (4, "bias")):
        if node.input(index):
            more = b.weight(node, index)
            if more.shape != gamma.shape:
                raise Refusal(f"{name} {list(more.shape)} does not fit gamma {list(gamma.shape)}")
            operands.append(Operand(name, b.key(more, record)))
    y, total = b.make(node.output(0), x.dtype, x.shape), b.make(node.output(3), x.dtype, x.shape)
    operands += [Operand("y", y.ref, "w"), Operand("sum", total.ref, "w")]
    b.emit(node, "skip_layer_norm", tuple(operands), {"eps": number(node, "epsilon", 1e-12)})


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
    _fit(node, x, skip, gamma.shape)
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


def _fit(node: Node, x: Tensor, skip: Tensor, gamma: tuple[int, ...]) -> None:
    if x.shape != skip.shape or gamma != x.shape[-1:]:
        raise Refusal(f"shapes {list(x.shape)}, {list(skip.shape)}, gamma {list(gamma)} do not fit")
    if node.output(1) or node.output(2):
        raise Refusal("mean and inverse deviation are not served as outputs")
