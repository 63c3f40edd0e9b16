"""Block-quantised weights: GGUF's blocks keep their values, and MatMulNBits reads what is packed here."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import onnxruntime as ort
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from engine.errors import UnsupportedModel
from engine.zoo.quant import (
    F32,
    U8,
    PackedLinear,
    dequantise,
    pack_zero_points,
    quantise_int4,
    repack_q4_1,
    repack_q8_0,
    unpermute_rotary_rows,
)

Q4_1 = gguf.GGMLQuantizationType.Q4_1
Q8_0 = gguf.GGMLQuantizationType.Q8_0


def q4_1_blocks(seed: int, rows: int, columns: int) -> U8:
    """Random Q4_1 rows with arbitrary codes, and scales and minima of either sign."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, columns // 32, 20), np.uint8)
    header = random.uniform(0.01, 0.2, (rows, columns // 32, 2)) * random.choice([-1, 1], (rows, columns // 32, 2))
    blocks[:, :, :4] = header.astype("<f2").view(np.uint8)
    return blocks.reshape(rows, -1)


@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_q4_1_keeps_its_values(seed: int, blocks: int) -> None:
    rows = q4_1_blocks(seed, 6, 32 * blocks)
    expected = dequantize(rows, Q4_1)
    got = dequantise(repack_q4_1(rows))
    assert got.shape == expected.shape == (6, 32 * blocks)
    # -m/d is rounded once to fp32 and multiplied back by d; gguf's own d*q + m rounds too.
    assert np.abs(got - expected).max() <= 3e-7 * np.abs(expected).max()


def test_q4_1_zero_points_are_floats_of_minus_m_over_d() -> None:
    rows = q4_1_blocks(7, 3, 64)
    linear = repack_q4_1(rows)
    header = rows.reshape(3, 2, 20)[:, :, :4].copy().view("<f2").astype(np.float32)
    assert linear.bits == 4
    assert linear.codes.shape == (3, 2, 16)
    assert linear.zero_points is not None
    assert linear.scales.dtype == linear.zero_points.dtype == np.float32
    np.testing.assert_array_equal(linear.scales, header[:, :, 0])
    np.testing.assert_array_equal(linear.zero_points, -header[:, :, 1] / header[:, :, 0])


def test_a_q4_1_block_without_scale_is_refused() -> None:
    rows = q4_1_blocks(7, 2, 64).reshape(2, 2, 20)
    rows[1, 0, 0:2] = 0
    with pytest.raises(UnsupportedModel, match="scale 0"):
        repack_q4_1(rows.reshape(2, -1))


@given(seed=st.integers(0, 2**32 - 1), blocks=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_q8_0_is_exact(seed: int, blocks: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.integers(0, 256, (4, blocks, 34), np.uint8)
    rows[:, :, :2] = random.uniform(-2, 2, (4, blocks, 1)).astype("<f2").view(np.uint8)
    rows = rows.reshape(4, -1)
    linear = repack_q8_0(rows)
    assert linear.zero_points is None
    assert linear.codes.shape == (4, blocks, 32)
    np.testing.assert_array_equal(dequantise(linear).astype(np.float32), dequantize(rows, Q8_0))


def permute(rows: NDArray[np.generic], heads: int) -> NDArray[np.generic]:
    """What a GGUF converter does to Q and K rows."""
    count = rows.shape[0]
    return rows.reshape(heads, 2, count // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize(("heads", "head_size"), [(9, 64), (3, 64), (2, 8)])
def test_rotary_rows_are_put_back(heads: int, head_size: int) -> None:
    rows = np.arange(heads * head_size * 5, dtype=np.uint32).reshape(heads * head_size, 5)
    assert (permute(rows, heads) != rows).any()
    np.testing.assert_array_equal(unpermute_rotary_rows(permute(rows, heads), heads), rows)


def test_interleaved_rotary_on_stored_rows_is_half_apart_rotary_on_ours() -> None:
    random = np.random.default_rng(3)
    heads, size = 2, 16
    stored = random.normal(size=heads * size)
    angle = random.uniform(0, 6, size // 2)
    pairs = stored.reshape(heads, size // 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)
    first, second = np.split(unpermute_rotary_rows(stored, heads).reshape(heads, size), 2, axis=1)
    np.testing.assert_allclose((first + 1j * second) * np.exp(1j * angle), turned)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_int4_is_within_half_a_step(asymmetric: bool) -> None:
    weight = np.random.default_rng(5).normal(size=(8, 96)) + 0.3
    linear = quantise_int4(weight, asymmetric=asymmetric)
    error = np.abs(dequantise(linear) - weight).reshape(8, 3, 32)
    # Half a step, but for the ends: the scale is rounded to fp16 (2**-11) and the zero point to an integer.
    assert (error <= 0.51 * linear.scales[:, :, None] * (2 if asymmetric else 1)).all()
    if asymmetric:
        assert linear.zero_points is not None
        assert linear.zero_points.shape == (8, 2)
        assert linear.zero_points.dtype == np.uint8


def test_an_all_zero_block_stays_zero() -> None:
    for asymmetric in (False, True):
        assert not dequantise(quantise_int4(np.zeros((2, 32)), asymmetric=asymmetric)).any()


def test_packed_zero_points_put_the_first_in_the_low_nibble_and_pad_rows() -> None:
    packed = pack_zero_points(np.array([[1, 2, 3], [15, 0, 7]], np.uint8))
    np.testing.assert_array_equal(packed, [[0x21, 0x03], [0x0F, 0x07]])


def matmul_nbits(linear: PackedLinear, x: F32) -> F32:
    """The product by onnxruntime, which is nobody's opinion here but the exporter's own runtime."""
    weights: dict[str, NDArray[Any]] = {"B": linear.codes, "scales": linear.scales}
    if linear.zero_points is not None:
        weights["zero_points"] = linear.zero_points
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.uint8): TensorProto.UINT8}
    node = helper.make_node(
        "MatMulNBits",
        ["A", *weights],
        ["Y"],
        domain="com.microsoft",
        K=linear.columns,
        N=linear.rows,
        bits=linear.bits,
        block_size=32,
    )
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("A", TensorProto.FLOAT, list(x.shape))],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [x.shape[0], linear.rows])],
        [helper.make_tensor(n, kinds[v.dtype], v.shape, v.tobytes(), raw=True) for n, v in weights.items()],
    )
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 22), helper.make_opsetid("com.microsoft", 1)]
    )
    model.ir_version = 10
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: F32 = session.run(None, {"A": x})[0]
    return result


@pytest.mark.parametrize("form", ["q4_1", "q8_0", "int4", "int4 packed zero points"])
def test_onnxruntime_reads_every_form_as_we_do(form: str) -> None:
    random = np.random.default_rng(11)
    weight = random.normal(size=(16, 96)).astype(np.float32)
    linear = {
        "q4_1": lambda: repack_q4_1(quantize(weight, Q4_1)),
        "q8_0": lambda: repack_q8_0(quantize(weight, Q8_0)),
        "int4": lambda: quantise_int4(weight.astype(np.float64), asymmetric=False),
        "int4 packed zero points": lambda: quantise_int4(weight.astype(np.float64), asymmetric=True),
    }[form]()
    x = random.normal(size=(3, 96)).astype(np.float32)
    np.testing.assert_allclose(matmul_nbits(linear, x), x @ dequantise(linear).T, atol=2e-5)
