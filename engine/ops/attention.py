"""Grouped-query attention with the KV cache."""

from __future__ import annotations

import math

from engine.graph import Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.ops.matmul import FLOATS
from engine.ops.rotary import check_start
from engine.plan import KvGeometry, Operand, Ref
from engine.values import ByLength, LengthValue, Past, Positions, Refusal, WeightValue


@op("com.microsoft", "GroupQueryAttention")
def group_query_attention(b: Lowering, node: Node) -> None:
    """Causal attention of query head h over kv head h / (heads / kv_heads); keys enter the cache after rotary.

    Query, key and value come apart or packed in input 0. Lengths (inputs 5 and 6) must follow from the mask alone.
    """
    heads, kv_heads = whole(node, "num_heads", least=1), whole(node, "kv_num_heads", least=1)
    window = whole(node, "local_window_size", -1)
    if not window:
        raise Refusal("local_window_size = 0 leaves a query nothing to see")
    if whole(node, "sliding_window_cache", 0) and window < 1:  # with one, a cache that grows gives the same numbers
        raise Refusal("sliding_window_cache = 1 without a window is not served")
    if node.input(10):
        raise Refusal("a bias is not served")
    if node.input(9) and b.value(node.input(9)) != Positions((1, b.rows)):
        raise Refusal("position ids that do not count from the cached length are not served")
    past = cached(b, node, 3)
    if b.value(node.input(5)) != LengthValue(-1) or b.value(node.input(6)) != LengthValue(0):
        raise Refusal("sequence lengths do not follow from the attention mask")
    assert b.kv is not None, "a past is bound where there is a cache"
    head_size = b.kv.head_size
    width = heads * head_size
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
    operands += caches(b.kv, past)
    threshold = None
    if whole(node, "do_rotary", 0):
        threshold = _rotary(b, node, head_size, operands)
    operands += _extras(b, node, heads, head_size)
    operands += _cache_scales(b, node, kv_heads, head_size)
    y = b.make(node.output(0), query.dtype, (*query.shape[:-1], width))
    operands.append(Operand("y", y.ref, "w"))
    params = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": head_size,
        "scale": number(node, "scale", 0.0) or 1 / math.sqrt(head_size),
        "softcap": soft_cap(node),
        "window": window,
        "interleaved": bool(whole(node, "rotary_interleaved", 0)),
        "qk_norm_eps": number(node, "qk_norm_epsilon", 1e-6),
        "long_above": threshold,
    }
    b.emit(node, "gqa", tuple(operands), params)


def soft_cap(node: Node) -> float:
    """What scores are held below, 0 for nothing. Raises Refusal for one below 0, of which runtimes differ."""
    cap = number(node, "softcap", 0.0)
    if cap < 0:
        raise Refusal(f"softcap = {cap} is below 0")
    return cap


def cached(b: Lowering, node: Node, first: int) -> Past:
    """Inputs `first` and the next as one layer's cached keys and values, which outputs 1 and 2 carry on."""
    key, value = b.value(node.input(first)), b.value(node.input(first + 1))
    if not isinstance(key, Past) or key != Past(key.layer, "key") or value != Past(key.layer, "value"):
        raise Refusal(f"inputs {first} and {first + 1} are not one layer's cached keys and values")
    b.claim(key)
    b.set(node.output(1), key)
    b.set(node.output(2), value)
    return key


def caches(kv: KvGeometry, past: Past) -> list[Operand]:
    """A layer's caches and the count of cached positions, as operands of attention."""
    cache = (0, kv.kv_heads, kv.head_size)  # capacity belongs to the run, not to the plan
    return [
        Operand("k_cache", Ref("kv_key", past.layer, kv.dtype, cache), "rw"),
        Operand("v_cache", Ref("kv_value", past.layer, kv.dtype, cache), "rw"),
        Operand("length", Ref("control", -1, "int64", (1,), "length")),
    ]


def _rotary(b: Lowering, node: Node, head_size: int, operands: list[Operand]) -> int | None:
    """Append the tables; where they depend on the length, both pairs, and the length above which the long one holds."""
    cos, sin = b.value(node.input(7)), b.value(node.input(8))
    positions = b.context_length()
    if isinstance(cos, ByLength) and isinstance(sin, ByLength) and cos.threshold == sin.threshold:
        _check_tables(b, cos.above, sin.above, head_size, positions)
        _check_tables(b, cos.below, sin.below, head_size, min(positions, cos.threshold))
        operands += [Operand("cos", b.constant(cos.below)), Operand("sin", b.constant(sin.below))]
        operands += [Operand("cos_long", b.constant(cos.above)), Operand("sin_long", b.constant(sin.above))]
        operands.append(Operand("ahead", Ref("control", -1, "int32", (1,), "ahead")))  # a prompt is as long as it is
        return cos.threshold
    near, far = b.weight(node, 7), b.weight(node, 8)
    _check_tables(b, near, far, head_size, positions)
    operands += [Operand("cos", b.constant(near)), Operand("sin", b.constant(far))]
    return None


def _extras(b: Lowering, node: Node, heads: int, head_size: int) -> list[Operand]:
    """Sinks per head, and per-head norms of queries and keys before rotary."""
    made: list[Operand] = []
    for index, name, shape in ((11, "sinks", (heads,)), (14, "q_norm", (head_size,)), (15, "k_norm", (head_size,))):
        if node.input(index):
            weight = b.weight(node, index)
            if weight.shape != shape or weight.dtype not in FLOATS:
                raise Refusal(f"{name} {weight.dtype}{list(weight.shape)} is not {list(shape)}")
            made.append(Operand(name, b.key(weight, b.new_record())))
    if bool(node.input(14)) != bool(node.input(15)):
        raise Refusal("only one of the Q and K norms is given")
    return made


_CACHE_ATTRIBUTES = ("k_quant_type", "v_quant_type", "kv_cache_bit_width")


def _cache_scales(b: Lowering, node: Node, kv_heads: int, head_size: int) -> list[Operand]:
    """Scales of an int8 cache, one in all or one a channel; a float cache has none."""
    assert b.kv is not None
    quantised = b.kv.dtype == "int8"
    kinds = [node.attributes.get(n, "NONE") for n in ("k_quant_type", "v_quant_type")]
    if not quantised:
        if kinds != ["NONE", "NONE"] or whole(node, "kv_cache_bit_width", 0):
            given = {n: node.attributes[n] for n in _CACHE_ATTRIBUTES if n in node.attributes}
            raise Refusal(f"a cache of {b.kv.dtype} with {', '.join(f'{n} = {v}' for n, v in given.items())}")
        if node.input(12) or node.input(13):
            raise Refusal(f"cache scales beside a cache of {b.kv.dtype} are not served")
        return []
    if whole(node, "kv_cache_bit_width", 8) != 8 or not set(kinds) <= {"PER_TENSOR", "PER_CHANNEL"}:
        raise Refusal(f"a cache quantised as {kinds} in {node.attributes.get('kv_cache_bit_width')} bits is not served")
    made = []
    for index, name, kind in ((12, "k_scale", kinds[0]), (13, "v_scale", kinds[1])):
        scale = b.weight(node, index)
        expected = 1 if kind == "PER_TENSOR" else kv_heads * head_size
        if math.prod(scale.shape) != expected or scale.dtype not in FLOATS:
            raise Refusal(f"{name} {scale.dtype}{list(scale.shape)} is not {expected} numbers")
        made.append(Operand(name, b.constant(scale)))
    return made


def _check_tables(b: Lowering, cos: WeightValue, sin: WeightValue, head_size: int, positions: int) -> None:
    floats = cos.weight.dtype in FLOATS and sin.weight.dtype in FLOATS
    if cos.shape != sin.shape or len(cos.shape) != 2 or cos.shape[1] * 2 > head_size or not floats:
        raise Refusal(f"rotary tables {list(cos.shape)} and {list(sin.shape)} do not fit head size {head_size}")
    check_start(b, sin)
    if cos.shape[0] < positions:
        raise Refusal(f"rotary tables of {cos.shape[0]} rows end before the context's {positions} positions")
