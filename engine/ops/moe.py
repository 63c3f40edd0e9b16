"""Mixture of experts, quantised and not. One initialiser holds all experts."""

from __future__ import annotations

import math
from typing import Any

from engine.graph import DTYPES, Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.ops.matmul import FLOATS, shaped
from engine.plan import Operand
from engine.routing import ROUTED
from engine.values import Refusal, Tensor, WeightValue

_ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "identity")


@op("com.microsoft", "QMoE")
def qmoe(b: Lowering, node: Node) -> None:
    """Experts as codes [E, out, in * bits / 8] with scales by block or by row; semantics of onnxruntime's contrib op.

    Weights laid out for one kernel beforehand look like others; their shapes tell, and they are refused.
    """
    if any(node.input(i) for i in (8, 9, 10, 13, *range(14, 21))):
        raise Refusal("a third product, router weights and global scales are not served")
    kind, prepacked = node.attributes.get("quant_type", "int"), node.attributes.get("weights_prepacked", 0)
    if kind != "int" or prepacked not in (0, -1):
        raise Refusal(
            f"experts of quant_type {kind!r}, weights_prepacked = {prepacked}: raw int4 and int8 ones are served, "
            "export with qmoe_weights_prepacked=0 and moe_quant_type=int4 or int8"
        )
    bits = whole(node, "expert_weight_bits", 4)
    if bits not in (4, 8):
        raise Refusal(f"{bits} bits are not served")
    for name in ("fc1_expert_weight_bits", "fc2_expert_weight_bits"):
        if whole(node, name, bits) != bits:
            raise Refusal(f"{name} = {node.attributes[name]} beside expert_weight_bits = {bits} is not served")
    block = whole(node, "block_size", 0, least=0)
    fc1, fc2 = b.weight(node, 2), b.weight(node, 5)
    rows, hidden = (w.shape[1] if len(w.shape) == 3 else 0 for w in (fc1, fc2))
    inner = rows // 2 if node.attributes.get("activation_type") == "swiglu" else rows
    raw = (*fc1.shape[:1], rows, hidden * bits // 8), (*fc1.shape[:1], hidden, inner * bits // 8)
    both = rows == inner == hidden and node.attributes.get("weights_prepacked") != 0  # squares look alike either way
    if (fc1.shape, fc2.shape) != raw or hidden * bits % 8 or inner * bits % 8 or both:
        raise Refusal(
            f"experts {list(fc1.shape)} and {list(fc2.shape)} are not in raw rows: export with weights_prepacked=0"
        )
    x, router = b.tensor(node, 0), b.tensor(node, 1)
    params, experts = _params(b, node, x, router, bits)
    if (x.shape[-1], experts) != (hidden, fc1.shape[0]):
        raise Refusal(f"{fc1.shape[0]} experts of {hidden} do not fit {list(x.shape)} and router {list(router.shape)}")
    if (node.input(11) or node.input(12)) and not block and bits < 8:
        raise Refusal(f"zero points by row in {bits} bits are not served")
    record = b.new_record()
    operands = [Operand("x", x.ref), Operand("router", router.ref)]
    for name, weight, scale, bias, points, width in (("fc1", 2, 3, 4, 11, hidden), ("fc2", 5, 6, 7, 12, inner)):
        codes, scales = b.weight(node, weight), b.weight(node, scale)
        blocks = -(-width // block) if block else 1
        out = codes.shape[1]
        _need(codes, experts * out * width * bits // 8, "codes", ("uint8",))
        _need(scales, experts * out * blocks, "scales")
        by_expert = shaped(b.key(scales, record), (experts, out, blocks))
        operands += [Operand(name, b.key(codes, record)), Operand(f"{name}_scales", by_expert)]
        operands += _bias(b, node, bias, f"{name}_bias", (experts, out), record)
        if node.input(points):
            zero = b.weight(node, points)
            _need(zero, experts * out * -(-blocks * bits // 8), "zero points", ("uint8",))
            by_expert = shaped(b.key(zero, record), (experts, out, -(-blocks * bits // 8)))
            operands.append(Operand(f"{name}_zero_points", by_expert))
    params["block"] = block
    y = b.make(node.output(0), x.dtype, x.shape)
    operands += _routed(b, x, params)
    b.emit(node, "moe", (*operands, Operand("y", y.ref, "w")), params)


@op("com.microsoft", "MoE")
def moe(b: Lowering, node: Node) -> None:
    """Experts as floats: fc1 [E, out, hidden], fc2 [E, hidden, inner]."""
    if any(node.input(i) for i in (6, 7)):
        raise Refusal("a third product is not served")
    x, router = b.tensor(node, 0), b.tensor(node, 1)
    params, _ = _params(b, node, x, router, 0)
    fc1, fc2 = b.weight(node, 2), b.weight(node, 4)
    hidden, experts = x.shape[-1], router.shape[-1]
    rows = fc1.shape[1] if len(fc1.shape) == 3 else 0
    inner = rows // 2 if params["activation"] == "swiglu" else rows
    if (fc1.shape, fc2.shape) != ((experts, rows, hidden), (experts, hidden, inner)):
        raise Refusal(f"experts {list(fc1.shape)} and {list(fc2.shape)} do not fit {experts} experts of {hidden}")
    record = b.new_record()
    operands = [Operand("x", x.ref), Operand("router", router.ref)]
    for name, weight, bias, out, width in (("fc1", 2, 3, rows, hidden), ("fc2", 4, 5, hidden, inner)):
        _need(b.weight(node, weight), experts * out * width, "experts")
        operands.append(Operand(name, b.key(b.weight(node, weight), record)))
        operands += _bias(b, node, bias, f"{name}_bias", (experts, out), record)
    y = b.make(node.output(0), x.dtype, x.shape)
    operands += _routed(b, x, params)
    b.emit(node, "moe", (*operands, Operand("y", y.ref, "w")), params)


def _routed(b: Lowering, x: Tensor, params: dict[str, Any]) -> list[Operand]:
    """Where a decoder's step leaves the experts that it chose."""
    return [Operand(ROUTED, b.routed(math.prod(x.shape[:-1]), params["k"]), "w")] if b.info is not None else []


def _params(b: Lowering, node: Node, x: Tensor, router: Tensor, bits: int) -> tuple[dict[str, Any], int]:
    activation = node.attributes.get("activation_type", "relu")
    fusion = whole(node, "swiglu_fusion", 0)
    if activation not in _ACTIVATIONS or whole(node, "use_sparse_mixer", 0):
        raise Refusal(f"activation {activation!r} or a sparse mixer is not served")
    if activation == "swiglu" and fusion not in (1, 2):
        raise Refusal(f"swiglu_fusion = {fusion} is not served")
    tokens = 1
    for extent in x.shape[:-1]:
        tokens *= extent
    k, experts = whole(node, "k", 1), router.shape[-1]
    if not 1 <= k <= experts or tokens * experts != _elements(router):
        raise Refusal(f"router {list(router.shape)} does not choose {k} experts for {tokens} tokens")
    limit = node.attributes.get("swiglu_limit")
    return {
        "k": k,
        "normalise": bool(whole(node, "normalize_routing_weights", 0)),
        "activation": activation,
        "fusion": fusion,
        "alpha": number(node, "activation_alpha", 1.0),
        "beta": number(node, "activation_beta", 0.0),
        "limit": None if limit is None else float(limit),
        "bits": bits,
    }, experts


def _elements(x: Tensor) -> int:
    total = 1
    for extent in x.shape:
        total *= extent
    return total


def _bias(b: Lowering, node: Node, index: int, name: str, shape: tuple[int, int], record: int) -> list[Operand]:
    if not node.input(index):
        return []
    bias = b.weight(node, index)
    _need(bias, shape[0] * shape[1], "bias")
    return [Operand(name, shaped(b.key(bias, record), shape))]


def _need(value: WeightValue, elements: int, what: str, dtypes: tuple[str, ...] = FLOATS) -> None:
    if value.dtype not in dtypes or value.weight.nbytes != elements * DTYPES[value.dtype].itemsize:
        raise Refusal(f"{what} {value.weight.name!r} are {value.dtype}{list(value.shape)}, not {elements} elements")
