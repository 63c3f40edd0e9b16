"""Operators of the float32 reference, one by one against the standard's own reference implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from engine.graph import Node
from engine.onnx_load import nodes_of
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
    found = RULES["", op](Inputs(nodes_of(model.graph)[0], tuple(inputs), positions=7))
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
