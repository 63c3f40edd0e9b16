"""Operators of the float32 reference, one by one: against the standard's own reference, and by their definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from engine.graph import Node
from engine.onnx_load import nodes_of
from engine.oracle.experts import routed
from engine.oracle.inputs import MICROSOFT, RULES, Coded, Inputs, Start

I64 = np.int64
Case = tuple[str, dict[str, Any], list[NDArray[Any] | None], int]


def single(op: str, attributes: dict[str, Any], inputs: list[NDArray[Any] | None], outputs: int = 1) -> None:
    """Hold one operator's meaning here against onnx.reference."""
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    made = onnx.helper.make_node(op, names, [f"y{i}" for i in range(outputs)], **attributes)
    given = {name: x for name, x in zip(names, inputs, strict=True) if x is not None}
    typed = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in given.items()
    ]
    untyped = [onnx.helper.make_tensor_value_info(name, 0, None) for name in made.output]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([made], op, typed, untyped),
        opset_imports=[onnx.helper.make_opsetid("", onnx.defs.onnx_opset_version())],
    )
    wanted = ReferenceEvaluator(model).run(None, given)
    found = RULES["", op](Inputs(nodes_of(model.graph, {})[0], tuple(inputs), positions=7))
    found = found if isinstance(found, tuple) else (found,)
    for got, want in zip(found, wanted, strict=False):
        if got is not None:
            got = got.floats() if isinstance(got, Coded) else got
            np.testing.assert_allclose(np.asarray(got), want, rtol=2e-5, atol=2e-6, err_msg=op)


def draw(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    """Numbers of a normal distribution."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


SINGLE: list[Case] = [
    ("RMSNormalization", {"axis": -1, "epsilon": 1e-6}, [draw(2, 7, 8), draw(8)], 1),
    ("LayerNormalization", {"axis": -1, "epsilon": 1e-6}, [draw(2, 7, 8), draw(8), draw(8, seed=1)], 1),
    ("LpNormalization", {"axis": -1, "p": 2}, [draw(7, 8)], 1),
    ("Gelu", {"approximate": "tanh"}, [draw(7, 8)], 1),
    ("Gelu", {}, [draw(7, 8)], 1),
    ("Softmax", {"axis": 1}, [draw(7, 8)], 1),
    ("TopK", {"axis": -1}, [np.asarray([[1, 3, 3, 2], [5, 5, 5, 5]], np.float32), np.asarray([3], I64)], 2),
    ("Split", {"axis": -1}, [draw(2, 7, 8), np.asarray([2, 5, 1], I64)], 3),
    ("Split", {"axis": -1, "num_outputs": 3}, [draw(2, 7, 8)], 3),
    (
        "Slice",
        {},
        [draw(7, 8), np.asarray([-1], I64), np.asarray([-9], I64), np.asarray([1], I64), np.asarray([-2], I64)],
        1,
    ),
    ("Gather", {"axis": 1}, [draw(2, 7, 8), np.asarray([[6, -7], [0, 3]], I64)], 1),
    ("GatherElements", {"axis": 1}, [draw(2, 7), np.asarray([[6, 0], [0, 3]], I64)], 1),
    ("ScatterElements", {"axis": 1}, [draw(2, 7), np.asarray([[6, 0], [1, 3]], I64), draw(2, 2)], 1),
    ("Reshape", {}, [draw(2, 7, 8), np.asarray([0, -1, 4], I64)], 1),
    ("ReduceSum", {"keepdims": 0}, [draw(2, 7, 8), np.asarray([1], I64)], 1),
    ("Clip", {}, [draw(7, 8), np.asarray(-0.5, np.float32), None], 1),
    ("Pow", {}, [np.abs(draw(7, 8)), np.asarray([2], np.int32)], 1),
    ("Gemm", {"transB": 1, "alpha": 0.5}, [draw(7, 8), draw(5, 8), draw(5)], 1),
    (
        "DequantizeLinear",
        {"axis": 0, "block_size": 4},
        [np.arange(24, dtype=np.uint8).reshape(8, 3), draw(2, 3), None],
        1,
    ),
    (
        "RotaryEmbedding",
        {"num_heads": 3},
        [draw(1, 7, 24), draw(20, 4), draw(20, 4, seed=1), np.arange(7)[None] + 3],
        1,
    ),
    ("RotaryEmbedding", {"interleaved": 1}, [draw(1, 3, 7, 8), draw(1, 7, 4), draw(1, 7, 4, seed=1)], 1),
    (
        "RotaryEmbedding",
        {"num_heads": 3, "rotary_embedding_dim": 4},
        [draw(1, 7, 24), draw(20, 2), draw(20, 2, seed=1), np.arange(7)[None]],
        1,
    ),
    ("CausalConvWithState", {"activation": "silu"}, [draw(1, 6, 7), draw(6, 1, 4), draw(6)], 1),
    ("CausalConvWithState", {}, [draw(1, 6, 2), draw(6, 1, 4)], 1),
    (
        "LinearAttention",
        {"update_rule": "linear", "q_num_heads": 4, "kv_num_heads": 2},
        [draw(1, 7, 16), draw(1, 7, 8), draw(1, 7, 10)],
        1,
    ),
]


@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case[0])
def test_one_operator_against_the_standards_reference(
    case: Case,
) -> None:
    single(*case)


@pytest.mark.parametrize("channels", [1, 4], ids=["a head", "a channel"])
@pytest.mark.parametrize("update", ["gated", "delta", "gated_delta"])
def test_linear_attention_without_a_state_is_the_recurrence(update: str, channels: int) -> None:
    heads, tokens = 2, 7
    decay = -np.abs(draw(1, tokens, heads * channels))
    beta = 1 / (1 + np.exp(-draw(1, tokens, heads, seed=2)))
    inputs: list[NDArray[Any] | None] = [
        draw(1, tokens, heads * 4),
        draw(1, tokens, heads * 4, seed=1),
        draw(1, tokens, heads * 5),
    ]
    inputs += [None, decay if "gated" in update else None, beta.astype(np.float32) if "delta" in update else None]
    single("LinearAttention", {"update_rule": update, "q_num_heads": heads, "kv_num_heads": heads}, inputs)


@pytest.mark.parametrize(("cap", "window"), [(0.0, -1), (3.0, -1), (0.0, 3), (2.0, 1)])
def test_grouped_attention_is_the_standards_causal_attention(cap: float, window: int) -> None:
    tokens, heads, kv_heads, size = 7, 4, 2, 8
    q, k, v = draw(1, tokens, heads * size), draw(1, tokens, kv_heads * size), draw(1, tokens, kv_heads * size, seed=1)
    attention = onnx.helper.make_node(
        "Attention",
        ["q", "k", "v"],
        ["y"],
        is_causal=1,
        q_num_heads=heads,
        kv_num_heads=kv_heads,
        left_window_size=window - 1 if window > 0 else -1,
        softcap=cap,
        scale=0.4,
    )
    (wanted,) = ReferenceEvaluator(attention).run(None, {"q": q, "k": k, "v": v})
    attributes = {
        "num_heads": heads,
        "kv_num_heads": kv_heads,
        "local_window_size": window,
        "softcap": cap,
        "scale": 0.4,
    }
    gqa = Node("gqa", "GroupQueryAttention", MICROSOFT, (), ("y", "", ""), attributes)
    lengths = np.asarray([tokens - 1], np.int32), np.asarray(tokens, np.int32)
    empty = Start("past", "float32")
    found = RULES[MICROSOFT, "GroupQueryAttention"](Inputs(gqa, (q, k, v, empty, empty, *lengths), tokens))
    assert isinstance(found, tuple) and isinstance(found[0], np.ndarray)
    np.testing.assert_allclose(found[0], np.asarray(wanted), rtol=2e-5, atol=2e-6)


# -- onnxruntime's own operators, element by element


def nibble(row: NDArray[np.uint8], index: int, bits: int) -> int:
    """Code `index` of a packed row, low bits first."""
    return int(row[index * bits // 8]) >> (index * bits % 8) & ((1 << bits) - 1)


def bytes_of(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    """Any bytes: padding holds garbage too."""
    return np.random.default_rng([seed, *shape]).integers(0, 256, shape, dtype=np.uint8)


def meaning(op: str, attributes: dict[str, Any], *values: Any) -> NDArray[Any]:
    """What the reference computes for one operator of onnxruntime."""
    node = Node(op, op, MICROSOFT, tuple(f"x{i}" for i in range(len(values))), ("y",), attributes)
    found = RULES[MICROSOFT, op](Inputs(node, values, positions=3))
    assert isinstance(found, np.ndarray)
    return found


@pytest.mark.parametrize("points", ["none", "packed", "float", "by group"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("k", "block"), [(32, 16), (41, 16), (5, 16)])
def test_a_quantised_product_by_its_definition(bits: int, k: int, block: int, points: str) -> None:
    n, blocks = 5, -(-k // block)
    codes, scales = bytes_of(n, blocks, block * bits // 8), draw(n, blocks)
    packed, floats = bytes_of(n, -(-blocks * bits // 8), seed=1), draw(n, blocks, seed=1)
    groups = np.random.default_rng(k).integers(0, blocks, k).astype(np.int32)
    x = draw(1, 3, k)
    wanted = np.zeros((3, n))
    for row in range(n):
        for column in range(k):
            b = groups[column] if points == "by group" else column // block
            zeros = {"packed": nibble(packed[row], b, bits), "float": floats[row, b]}
            code = nibble(codes[row].reshape(-1), column, bits)
            weight = (code - zeros.get(points, 1 << (bits - 1))) * scales[row, b]
            wanted[:, row] += x[0, :, column] * weight
    given = {"packed": packed, "float": floats}.get(points)
    attributes = {"K": k, "N": n, "bits": bits, "block_size": block}
    found = meaning("MatMulNBits", attributes, x, codes, scales, given, groups if points == "by group" else None)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("with_points", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [0, 16])
def test_quantised_experts_by_their_definition(bits: int, block: int, with_points: bool) -> None:
    experts, hidden, inner, tokens, k = 3, 32, 16, 3, 2
    shapes = {"fc1": (2 * inner, hidden), "fc2": (hidden, inner)}
    codes = {name: bytes_of(experts, out, wide * bits // 8) for name, (out, wide) in shapes.items()}
    blocks = {name: wide // (block or wide) for name, (_, wide) in shapes.items()}
    scales = {n: np.abs(draw(experts, shapes[n][0], blocks[n])) / 50 for n in shapes}
    points = {n: bytes_of(experts, shapes[n][0], -(-blocks[n] * bits // 8), seed=2) for n in shapes}
    bias = {n: draw(experts, shapes[n][0]) for n in shapes}

    def weight(name: str, e: int) -> NDArray[np.float64]:
        out, wide = shapes[name]
        made = np.zeros((out, wide))
        for row in range(out):
            for column in range(wide):
                b = column // (block or wide)
                zero = nibble(points[name][e, row], b, bits) if with_points else 1 << (bits - 1)
                made[row, column] = (nibble(codes[name][e, row], column, bits) - zero) * scales[name][e, row, b]
        return made

    x, logits = draw(1, tokens, hidden), draw(tokens, experts, seed=3)
    wanted = np.zeros((tokens, hidden))
    for t in range(tokens):
        best = sorted(range(experts), key=lambda e: (-logits[t, e], e))[:k]
        total = sum(np.exp(logits[t, e]) for e in best)
        for e in best:
            both = weight("fc1", e) @ x[0, t] + bias["fc1"][e]
            gate, linear = np.minimum(both[::2], 7), np.clip(both[1::2], -7, 7)
            act = gate / (1 + np.exp(-1.702 * gate)) * (linear + 1)
            wanted[t] += np.exp(logits[t, e]) / total * (weight("fc2", e) @ act + bias["fc2"][e])
    attributes: dict[str, Any] = {
        "k": k,
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "swiglu_limit": 7.0,
        "activation_alpha": 1.702,
        "activation_beta": 1.0,
        "normalize_routing_weights": 1,
        "expert_weight_bits": bits,
        "block_size": block,
    }
    given = [x, logits, codes["fc1"], scales["fc1"], bias["fc1"], codes["fc2"], scales["fc2"], bias["fc2"]]
    given += [None] * 3 + ([points["fc1"], points["fc2"]] if with_points else [])
    found = meaning("QMoE", attributes, *given)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "act"),
    [
        ("relu", lambda x: max(x, 0.0)),
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("identity", lambda x: x),
        ("gelu", lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
    ],
)
def test_activations_of_experts_by_their_definition(kind: str, act: Callable[[float], float]) -> None:
    x, one, two = draw(1, 3, 4), draw(1, 6, 4, seed=1), draw(1, 4, 6, seed=2)
    wanted = [two[0] @ np.asarray([act(float(v)) for v in one[0] @ row]) for row in x[0]]
    found = meaning("MoE", {"k": 1, "activation_type": kind}, x, np.zeros((3, 1), np.float32), one, None, two)
    np.testing.assert_allclose(found[0], np.asarray(wanted), rtol=1e-4, atol=1e-5)


def test_experts_of_equal_logits_are_taken_in_order_and_routing_may_stay_unnormalised() -> None:
    logits = np.asarray([[1, 1, 1, 0], [0, 2, 2, 2]], np.float32)
    assert (routed(logits, 2, normalise=True) > 0).tolist() == [[True, True, False, False], [False, True, True, False]]
    spread = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(routed(logits, 2, normalise=False)[0, :2], spread[0, :2], rtol=1e-6)
    np.testing.assert_allclose(routed(logits, 2, normalise=True)[0, :2], [0.5, 0.5], rtol=1e-6)


@pytest.mark.parametrize("with_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_table_by_its_definition(bits: int, with_points: bool) -> None:
    rows, width, block = 6, 40, 16
    blocks = -(-width // block)
    table, scales = bytes_of(rows, width * bits // 8), draw(rows, blocks)
    points, ids = bytes_of(rows, -(-blocks * bits // 8), seed=1), np.asarray([[4, 0, 4]])
    wanted = np.zeros((3, width))
    for t, row in enumerate(ids[0]):
        for column in range(width):
            zero = nibble(points[row], column // block, bits) if with_points else 1 << (bits - 1)
            wanted[t, column] = (nibble(table[row], column, bits) - zero) * scales[row, column // block]
    attributes = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    found = meaning("GatherBlockQuantized", attributes, table, ids, scales, points if with_points else None)
    np.testing.assert_allclose(found[0], wanted, rtol=1e-5)


def test_sinks_take_weight_and_give_no_value() -> None:
    size, tokens = 8, 3
    q, k, v = draw(1, tokens, size), draw(1, tokens, size, seed=1), draw(1, tokens, size, seed=2)
    sink = np.asarray([0.7], np.float32)
    empty, lengths = Start("past", "float32"), (np.asarray([tokens - 1]), np.asarray(tokens))
    node = Node("gqa", "GroupQueryAttention", MICROSOFT, (), ("y",), {"num_heads": 1, "kv_num_heads": 1, "scale": 0.5})
    values = (q, k, v, empty, empty, *lengths, None, None, None, None, sink)
    found = RULES[MICROSOFT, "GroupQueryAttention"](Inputs(node, values, tokens))
    assert isinstance(found, tuple) and isinstance(found[0], np.ndarray)
    for t in range(tokens):
        weights = [np.exp(0.5 * q[0, t] @ k[0, s]) for s in range(t + 1)]
        wanted = sum(w * v[0, s] for s, w in enumerate(weights)) / (sum(weights) + np.exp(0.7))
        np.testing.assert_allclose(found[0][0, t], wanted, rtol=1e-5)
