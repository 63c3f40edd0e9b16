"""The standard's Attention: queries, keys and values in 3-D with head counts, or in 4-D."""

from __future__ import annotations

import math

from engine.graph import Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attention import cached, caches, soft_cap
from engine.ops.attributes import number, whole
from engine.plan import Operand
from engine.values import Past, Refusal, Tensor

_INPUTS = ((3, "mask"), (4, "past_key"), (5, "past_value"), (6, "lengths"))


@op("", "Attention")
def attention(b: Lowering, node: Node) -> None:
    """ai.onnx Attention, opsets 23 to 25. Scores are in float32 whatever the precision asked for the softmax."""
    if any(isinstance(b.value(node.input(i)), Past) for i in (4, 5) if node.input(i)):
        _with_cache(b, node)
        return
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
        "softcap": soft_cap(node),
        "causal": bool(whole(node, "is_causal", 0)),
        "left": whole(node, "left_window_size", -1, least=-1),
        "right": whole(node, "right_window_size", -1, least=-1),
        "probe": whole(node, "qk_matmul_output_mode", 0),
    }
    if not 0 <= params["probe"] <= 3:
        raise Refusal(f"qk_matmul_output_mode = {params['probe']} is not served")
    b.emit(node, "attention", tuple(operands), params)


def _with_cache(b: Lowering, node: Node) -> None:
    """A decoder's own cache: causal attention as GroupQueryAttention has it, over what is cached and what is new."""
    if node.input(3) or node.input(6) or node.output(3):
        raise Refusal(
            "beside a cache, a mask, key lengths or scores as an output are not served: is_causal = 1 alone is"
        )
    if not whole(node, "is_causal", 0):
        raise Refusal("is_causal = 0 is not served beside a cache")
    x = [b.tensor(node, i) for i in range(3)]
    four = len(x[0].shape) == 4
    if {len(t.shape) for t in x} not in ({3}, {4}):
        raise Refusal(f"queries {list(x[0].shape)}, keys {list(x[1].shape)} and values {list(x[2].shape)} do not fit")
    heads = x[0].shape[1] if four else whole(node, "q_num_heads", least=1)
    kv_heads = x[1].shape[1] if four else whole(node, "kv_num_heads", least=1)
    past = cached(b, node, 4)
    assert b.kv is not None, "a past is bound where there is a cache"
    size = b.kv.head_size
    q, k, v = (_token_major(b, node, n, t) for n, t in zip("qkv", x, strict=True)) if four else x
    wide = [(*q.shape[:2], n * size) for n in (heads, kv_heads, kv_heads)]
    if [t.shape for t in (q, k, v)] != wide or kv_heads != b.kv.kv_heads or heads % kv_heads or b.kv.dtype == "int8":
        raise Refusal(
            f"{heads} query and {kv_heads} key heads in {list(x[0].shape)} and {list(x[1].shape)} do not fit a cache "
            f"of {b.kv.kv_heads} heads of {size} in {b.kv.dtype}"
        )
    left = whole(node, "left_window_size", -1, least=-1)
    params = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": size,
        "scale": number(node, "scale", 0.0) or 1 / math.sqrt(size),
        "softcap": soft_cap(node),
        "window": left + 1 if left >= 0 else -1,  # here it counts the query itself
        "interleaved": False,
        "qk_norm_eps": 0.0,
        "long_above": None,
    }
    y = b.make(f"{node.output(0)} by token" if four else node.output(0), q.dtype, q.shape)
    operands = [Operand(n, t.ref) for n, t in (("query", q), ("key", k), ("value", v))]
    b.emit(node, "gqa", (*operands, *caches(b.kv, past), Operand("y", y.ref, "w")), params)
    if four:
        made = Node(node.name, node.op, node.domain, (), node.outputs[:1], {})
        by_token = b.view(y, (*q.shape[:2], heads, size))
        b.apply(made, "transpose", [by_token], {"perm": (0, 2, 1, 3)}, [(q.dtype, x[0].shape)])


def _token_major(b: Lowering, node: Node, name: str, x: Tensor) -> Tensor:
    """[batch, heads, tokens, size] as [batch, tokens, heads * size]."""
    batch, heads, tokens, size = x.shape
    turned = Node(node.name, node.op, node.domain, (), (f"{node.output(0)} {name} by token",), {})
    b.apply(turned, "transpose", [x], {"perm": (0, 2, 1, 3)}, [(x.dtype, (batch, tokens, heads, size))])
    made = b.value(turned.outputs[0])
    assert isinstance(made, Tensor)
    return b.view(made, (batch, tokens, heads * size))
