"""Grouped-query attention with the KV cache."""

from __future__ import annotations

import math

from engine.graph import Node
from engine.lower import LengthValue, Lowering, Past, Refusal, WeightValue
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.ops.matmul import FLOATS
from engine.plan import Operand, Ref

_SERVED = {
    "causal": 1,
    "smooth_softmax": 0,
    "qk_output": 0,
    "kv_cache_bit_width": 0,
    "k_quant_type": "NONE",
    "v_quant_type": "NONE",
    "sliding_window_cache": 0,
}
"""Attributes that change what is computed, with the one value that is served: also the default where absent."""


@op("com.microsoft", "GroupQueryAttention")
def group_query_attention(b: Lowering, node: Node) -> None:
    """Causal attention of query head h over kv head h / (heads / kv_heads); keys enter the cache after rotary.

    Query, key and value come apart or packed in input 0. Lengths (inputs 5 and 6) must follow from the mask alone.
    """
    a = node.attributes
    heads, kv_heads = whole(node, "num_heads", least=1), whole(node, "kv_num_heads", least=1)
    for name, served in _SERVED.items():
        if a.get(name, served) != served:
            raise Refusal(f"{name} = {a[name]} is not served")
    if any(node.input(i) for i in range(9, 16)):
        raise Refusal("position ids, bias, sinks, cache scales and Q/K norm are not served")
    head_size = b.kv.head_size
    width = heads * head_size
    past = _past(b, node)
    query = b.tensor(node, 0)
    packed = not node.input(1)
    expected = width + 2 * kv_heads * head_size if packed else width
    if query.shape[-1] != expected or kv_heads != b.kv.kv_heads or heads % kv_heads:
        raise Refusal(f"query {list(query.shape)} does not fit {heads} heads and {kv_heads} kv heads of {head_size}")
    operands = [Operand("query", query.ref)]
    if not packed:
        key, value = b.tensor(node, 1), b.tensor(node, 2)
        if {key.shape, value.shape} != {(*query.shape[:-1], kv_heads * head_size)}:
            raise Refusal(f"key {list(key.shape)} and value {list(value.shape)} are not {kv_heads} of {head_size}")
        operands += [Operand("key", key.ref), Operand("value", value.ref)]
    cache = (0, kv_heads, head_size)  # capacity belongs to the run, not to the plan
    operands += [
        Operand("k_cache", Ref("kv_key", past.layer, b.kv.dtype, cache), "rw"),
        Operand("v_cache", Ref("kv_value", past.layer, b.kv.dtype, cache), "rw"),
        Operand("length", Ref("control", -1, "int64", (1,), "length")),
    ]
    if whole(node, "do_rotary", 0):
        cos, sin = b.weight(node, 7), b.weight(node, 8)
        _check_tables(cos, sin, head_size, b.graph.info.context_length)
        operands += [Operand("cos", b.constant(cos)), Operand("sin", b.constant(sin))]
    y = b.make(node.output(0), query.dtype, (*query.shape[:-1], width))
    operands.append(Operand("y", y.ref, "w"))
    params = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "scale": number(node, "scale", 0.0) or 1 / math.sqrt(head_size),
        "softcap": number(node, "softcap", 0.0),
        "window": whole(node, "local_window_size", -1),
        "interleaved": bool(whole(node, "rotary_interleaved", 0)),
    }
    b.emit(node, "gqa", tuple(operands), params)


def _past(b: Lowering, node: Node) -> Past:
    key, value = b.value(node.input(3)), b.value(node.input(4))
    if not isinstance(key, Past) or key != Past(key.layer, "key") or value != Past(key.layer, "value"):
        raise Refusal("inputs 3 and 4 are not one layer's cached keys and values")
    info = b.graph.info
    if node.output(1) != info.present_key % key.layer or node.output(2) != info.present_value % key.layer:
        raise Refusal(f"outputs {node.outputs[1:3]} are not layer {key.layer}'s present keys and values")
    if b.value(node.input(5)) != LengthValue(-1) or b.value(node.input(6)) != LengthValue(0):
        raise Refusal("sequence lengths do not follow from the attention mask")
    return key


def _check_tables(cos: WeightValue, sin: WeightValue, head_size: int, positions: int) -> None:
    floats = cos.weight.dtype in FLOATS and sin.weight.dtype in FLOATS
    if cos.shape != sin.shape or len(cos.shape) != 2 or cos.shape[1] * 2 > head_size or not floats:
        raise Refusal(f"rotary tables {list(cos.shape)} and {list(sin.shape)} do not fit head size {head_size}")
    if cos.shape[0] < positions:
        raise Refusal(f"rotary tables of {cos.shape[0]} rows end before the context's {positions} positions")
