"""The standard's Attention: queries, keys and values in 3-D with head counts, or in 4-D."""

from __future__ import annotations

import math

from engine.graph import Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.plan import Operand
from engine.values import Refusal

_INPUTS = ((3, "mask"), (4, "past_key"), (5, "past_value"), (6, "lengths"))


@op("", "Attention")
def attention(b: Lowering, node: Node) -> None:
    """ai.onnx Attention, opsets 23 to 25. Scores are in float32 whatever the precision asked for the softmax."""
    q, k, v = (b.operand(node, i) for i in range(3))
    three = len(q.shape) == 3
    q_heads = whole(node, "q_num_heads", least=1) if three else q.shape[1]
    kv_heads = whole(node, "kv_num_heads", least=1) if three else k.shape[1]
    if q_heads % kv_heads or len(k.shape) != len(q.shape) or len(v.shape) != len(q.shape):
        raise Refusal(f"{q_heads} query heads do not fit {kv_heads} key heads")
    size = q.shape[-1] // q_heads if three else q.shape[-1]
    value_size = v.shape[-1] // kv_heads if three else v.shape[-1]
    operands = [Operand(n, b.ref(node, i, x)) for i, (n, x) in enumerate((("q", q), ("k", k), ("v", v)))]
    past = 0
    for index, name in _INPUTS:
        if node.input(index):
            given = b.operand(node, index)
            past = given.shape[2] if name == "past_key" else past
            operands.append(Operand(name, b.ref(node, index, given)))
    new = k.shape[1] if three else k.shape[2]
    rows = q.shape[1] if three else q.shape[2]
    total = past + new
    shape = (*q.shape[:2], q_heads * value_size) if three else (*q.shape[:3], value_size)
    made = (
        ("y", shape),
        ("present_key", (q.shape[0], kv_heads, total, size)),
        ("present_value", (q.shape[0], kv_heads, total, value_size)),
        ("scores", (q.shape[0], q_heads, rows, total)),
    )
    for index, (name, extents) in enumerate(made):
        if node.output(index):
            operands.append(Operand(name, b.make(node.output(index), q.dtype, extents).ref, "w"))
    params = {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "scale": number(node, "scale", 0.0) or 1 / math.sqrt(size),
        "softcap": number(node, "softcap", 0.0),
        "causal": bool(whole(node, "is_causal", 0)),
        "left": whole(node, "left_window_size", -1, least=-1),
        "right": whole(node, "right_window_size", -1, least=-1),
        "probe": whole(node, "qk_matmul_output_mode", 0),
    }
    if not 0 <= params["probe"] <= 3:
        raise Refusal(f"qk_matmul_output_mode = {params['probe']} is not served")
    b.emit(node, "attention", tuple(operands), params)
