"""Hybrid decoders: linear attention, gated delta net, causal convolution. States live in place, one buffer each."""

from __future__ import annotations

import math

import numpy as np

from engine.graph import DTYPES, Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.plan import Operand
from engine.values import Const, Refusal, State

RULES = ("linear", "gated", "delta", "gated_delta")
_DELTA_NET = (
    ("update_rule", "gated_delta", "gated_delta"),
    ("gate_activation", "none", "qwen"),
    ("beta_activation", "none", "sigmoid"),
)
"""Of GatedDeltaNet: an attribute, what it is where absent, and the value that is served."""


@op("", "LinearAttention")
def linear_attention(b: Lowering, node: Node) -> None:
    """ai.onnx 27."""
    _linear_attention(b, node)


@op("com.microsoft", "LinearAttention")
def ms_linear_attention(b: Lowering, node: Node) -> None:
    """onnxruntime's; more value heads than query heads are allowed."""
    _linear_attention(b, node)


@op("com.microsoft", "LinearAttentionGate")
def linear_attention_gate(b: Lowering, node: Node) -> None:
    """(a, dt_bias, -exp(A_log), b) to the decay's logarithm and beta."""
    a, bias, scale, raw = (b.operand(node, i) for i in range(4))
    if a.shape[-1:] != bias.shape or bias.shape != scale.shape or a.shape != raw.shape:
        raise Refusal(f"shapes {list(a.shape)}, {list(bias.shape)}, {list(scale.shape)} do not fit")
    b.apply(node, "linear_gate", [a, bias, scale, raw], {}, [(a.dtype, a.shape), (raw.dtype, raw.shape)])


@op("com.microsoft", "GatedDeltaNet")
def gated_delta_net(b: Lowering, node: Node) -> None:
    """Queries, keys and values [batch, tokens, heads, size], raw gates, and a state [batch, heads, dv, dk]."""
    if node.input(3):
        raise Refusal("packed sequences are not served")
    for name, absent, served in _DELTA_NET:
        if node.attributes.get(name, absent) != served:
            raise Refusal(f"{name} = {node.attributes.get(name, absent)!r} is not served: {served!r} is")
    q, k, v = (b.tensor(node, i) for i in range(3))
    state = b.value(node.input(6))
    if {len(x.shape) for x in (q, k, v)} != {4} or q.shape != k.shape or q.shape[:2] != v.shape[:2]:
        raise Refusal(f"queries {list(q.shape)} and keys {list(k.shape)} do not fit values {list(v.shape)}")
    if not isinstance(state, State) or state.shape[1:] != (v.shape[2], v.shape[3], k.shape[3]):
        raise Refusal(f"the state does not fit values {list(v.shape)} and keys {list(k.shape)}")
    if not q.shape[2] or v.shape[2] % q.shape[2]:
        raise Refusal(f"queries {list(q.shape)} and keys {list(k.shape)} do not fit values {list(v.shape)}")
    gates = []
    for index, name, shape in ((4, "gate", v.shape[:3]), (5, "beta", v.shape[:3]), (7, "a_log", v.shape[2:3]),
                               (8, "dt_bias", v.shape[2:3])):  # fmt: skip
        x = b.operand(node, index)
        _need(name, x.shape, shape)
        gates.append(Operand(name, b.ref(node, index, x)))
    y = b.make(node.output(0), v.dtype, v.shape)
    operands = [Operand("q", q.ref), Operand("k", k.ref), Operand("v", v.ref), *gates]
    operands += [Operand("state", b.state(state), "rw"), Operand("y", y.ref, "w")]
    scale = number(node, "scale", 0.0) or 1 / math.sqrt(k.shape[3])
    params = {"l2_norm": bool(whole(node, "qk_l2_norm", 0)), "eps": 1e-6, "scale": scale}
    b.set(node.output(1), state)
    b.emit(node, "gated_delta_net", tuple(operands), params)


@op("", "CausalConvWithState")
def causal_conv(b: Lowering, node: Node) -> None:
    """ai.onnx 27."""
    _causal_conv(b, node)


@op("com.microsoft", "CausalConvWithState")
def ms_causal_conv(b: Lowering, node: Node) -> None:
    """onnxruntime's."""
    for name, value in (("ndim", 1), ("dilation", 1), ("channels_last", 0), ("state_window", 0)):
        if whole(node, name, value) != value:
            raise Refusal(f"{name} = {node.attributes[name]} is not served")
    _causal_conv(b, node)


@op("com.microsoft", "GatedAdd")
def gated_add(b: Lowering, node: Node) -> None:
    """a + b * sigmoid-ed gate c, given as it is."""
    a, other, gate = (b.operand(node, i) for i in range(3))
    _need("summand", other.shape, a.shape)
    _need("gate", gate.shape, (*a.shape[:-1], 1), a.shape)
    b.apply(node, "gated_add", [a, other, gate], {}, [(a.dtype, a.shape)])


def _linear_attention(b: Lowering, node: Node) -> None:
    rule = node.attributes.get("update_rule", "gated_delta")
    if rule not in RULES:
        raise Refusal(f"update rule {rule!r} is not served")
    if whole(node, "state_window", 0):
        raise Refusal(f"state_window = {node.attributes['state_window']} is not served: export with state_window=0")
    q, k, v = (b.operand(node, i) for i in range(3))
    q_heads, kv_heads = whole(node, "q_num_heads", least=1), whole(node, "kv_num_heads", least=1)
    for name, x in (("query", q), ("key", k), ("value", v)):
        if len(x.shape) != 3 or x.shape[:2] != q.shape[:2]:
            raise Refusal(f"{name} {list(x.shape)} is not one of [batch, tokens, width] with the query {list(q.shape)}")
    past = b.value(node.input(3)) if node.input(3) else None
    if isinstance(past, State):
        dk, dv = past.shape[-2:]
    else:
        dk, dv = q.shape[-1] // q_heads, v.shape[-1] // kv_heads
    if not dk or q.shape[-1] != q_heads * dk or v.shape[-1] != kv_heads * dv or not k.shape[-1] or k.shape[-1] % dk:
        raise Refusal(f"queries {list(q.shape)} and values {list(v.shape)} do not fit states of {dk} x {dv}")
    if max(q_heads, kv_heads) % min(q_heads, kv_heads) or kv_heads % (k.shape[-1] // dk):
        raise Refusal(f"{q_heads} query heads, {k.shape[-1] // dk} key heads and {kv_heads} value heads do not fit")
    operands = [Operand(n, b.ref(node, i, x)) for i, (n, x) in enumerate((("q", q), ("k", k), ("v", v)))]
    gates = ((4, "decay", rule in ("gated", "gated_delta"), kv_heads * dk), (5, "beta", "delta" in rule, 1))
    for index, name, used, other in gates:  # one a head, or: decay one a key channel, beta one for all heads
        if used and not node.input(index):
            raise Refusal(f"rule {rule} needs {name}")
        if used:
            x = b.operand(node, index)
            _need(name, x.shape, (*q.shape[:2], kv_heads), (*q.shape[:2], other))
            operands.append(Operand(name, b.ref(node, index, x)))
    shape = (*q.shape[:2], max(q_heads, kv_heads) * dv)
    _with_state(b, node, 3, 1, (q.shape[0], kv_heads, dk, dv), operands, q.dtype)
    operands.append(Operand("y", b.make(node.output(0), q.dtype, shape).ref, "w"))
    params = {
        "q_heads": q_heads,
        "k_heads": k.shape[-1] // dk,
        "kv_heads": kv_heads,
        "rule": rule,
        "scale": number(node, "scale", 0.0) or 1 / math.sqrt(dk),
    }
    b.emit(node, "linear_attention", tuple(operands), params)


def _causal_conv(b: Lowering, node: Node) -> None:
    activation = node.attributes.get("activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise Refusal(f"activation {activation!r} is not served")
    x, w = b.operand(node, 0), b.operand(node, 1)
    if len(x.shape) != 3 or w.shape[:2] != (x.shape[1], 1) or len(w.shape) != 3:
        raise Refusal(f"weight {list(w.shape)} does not fit input {list(x.shape)}")
    operands = [Operand("x", b.ref(node, 0, x)), Operand("weight", b.ref(node, 1, w))]
    if node.input(2):
        bias = b.operand(node, 2)
        _need("bias", bias.shape, x.shape[1:2])
        operands.append(Operand("bias", b.ref(node, 2, bias)))
    _with_state(b, node, 3, 1, (x.shape[0], x.shape[1], w.shape[2] - 1), operands, x.dtype)
    operands.append(Operand("y", b.make(node.output(0), x.dtype, x.shape).ref, "w"))
    b.emit(node, "causal_conv", tuple(operands), {"activation": activation})


def _need(name: str, shape: tuple[int, ...], *served: tuple[int, ...]) -> None:
    if shape not in served:
        raise Refusal(f"{name} {list(shape)} is not {' or '.join(str(list(s)) for s in served)}")


def _with_state(
    b: Lowering,
    node: Node,
    past: int,
    present: int,
    shape: tuple[int, ...],
    operands: list[Operand],
    dtype: str,
) -> None:
    """Bind the state in place where it is one; else a past that is read (zeros where absent) and a present written."""
    value = b.value(node.input(past)) if node.input(past) else Const(np.zeros(shape, DTYPES[dtype]))
    if isinstance(value, State):
        if value.shape != shape:
            raise Refusal(f"state {list(value.shape)} is not {list(shape)}")
        operands.append(Operand("state", b.state(value), "rw"))
        b.set(node.output(present), value)
        return
    given = value if isinstance(value, Const) else b.operand(node, past)
    if given.shape != shape:
        raise Refusal(f"past state {list(given.shape)} is not {list(shape)}")
    operands.append(Operand("past", b.ref(node, past, given)))
    if node.output(present):
        operands.append(Operand("present", b.make(node.output(present), given.dtype, shape).ref, "w"))
