"""Kernels against plain float64 arithmetic, written out from the operators' definitions and not from the kernels."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import kernels
from tests.unit.engine_plain import F64, attend, launch, pack, turn

DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
SPACING = {"float32": 0.0, "float16": 2.0**-24, "bfloat16": 0.0}
"""Between numbers too small for a relative error: what normal products come down to in float16 alone."""
EPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@st.composite
def products(draw: st.DrawFn) -> dict[str, Any]:
    """A MatMulNBits case: odd sizes, any block, any form of zero point, garbage wherever nothing may be read."""
    bits, block = draw(st.sampled_from([4, 8])), draw(st.sampled_from([16, 32, 64, 128, 256]))
    return {
        "N": draw(st.integers(1, 9)),
        "K": draw(st.integers(1, 300)),
        "bits": bits,
        "block": block,
        "rows": draw(st.integers(1, 3)),
        "points": draw(st.sampled_from(["none", "packed", "float"])),
        "bias": draw(st.booleans()),
        "dtype": draw(st.sampled_from(list(DTYPES))),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings(max_examples=150, deadline=None)
@given(case=products())
def test_matmul_nbits(case: dict[str, Any]) -> None:
    n, k, bits, block, dtype = case["N"], case["K"], case["bits"], case["block"], DTYPES[case["dtype"]]
    random = np.random.default_rng(case["seed"])
    blocks, top = -(-k // block), (1 << bits) - 1
    codes = random.integers(0, top + 1, (n, blocks * block), np.uint8, endpoint=False)  # columns beyond K: garbage
    scales = random.uniform(-1, 1, (n, blocks)).astype(dtype)
    x = random.normal(size=(1, case["rows"], k)).astype(dtype)
    arrays: dict[str, NDArray[Any]] = {
        "x": x,
        "codes": pack(codes, bits, 0).reshape(n, blocks, -1),
        "scales": scales,
        "y": np.full((1, case["rows"], n), 99, dtype),
    }
    zero: F64 = np.full((n, blocks), float(1 << (bits - 1)))
    if case["points"] == "packed":
        whole = random.integers(0, top + 1, (n, blocks), np.uint8, endpoint=False)
        arrays["zero_points"] = pack(whole, bits, int(random.integers(0, 16)))
        assert arrays["zero_points"].shape == (n, -(-blocks * bits // 8)), "rows are padded to whole bytes"
        zero = whole.astype(np.float64)
    elif case["points"] == "float":
        arrays["zero_points"] = random.uniform(0, top, (n, blocks)).astype(dtype)
        zero = arrays["zero_points"].astype(np.float64)
    weight: F64 = np.zeros((n, k))
    for row in range(n):
        for column in range(k):
            b = column // block
            weight[row, column] = (float(codes[row, column]) - zero[row, b]) * float(scales[row, b])
    expected = x.astype(np.float64) @ weight.T
    if case["bias"]:
        arrays["bias"] = random.normal(size=n).astype(dtype)
        expected = expected + arrays["bias"].astype(np.float64)
    launch("matmul_nbits", arrays, N=n, K=k, bits=bits, block=block)
    column = np.arange(k) // block  # a kernel may take the zero points' share off a block's sum of codes
    parts: F64 = (codes[:, :k] + zero[:, column]) * np.abs(scales.astype(np.float64))[:, column]
    size = np.abs(x.astype(np.float64)) @ parts.T + np.abs(expected)
    allowed = EPS[case["dtype"]] * np.abs(expected) + k * 2.0**-23 * size + 1e-30 + SPACING[case["dtype"]]
    assert (np.abs(arrays["y"].astype(np.float64) - expected) <= allowed).all()


def test_field_47_zero_points_of_an_odd_number_of_blocks_start_each_row_at_a_byte() -> None:
    """K = 160, block 32: five blocks, three bytes a row; counting nibbles through all rows would shift every second."""
    n, k, block = 3, 160, 32
    points = np.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]], np.uint8)
    arrays: dict[str, NDArray[Any]] = {
        "codes": np.zeros((n, 5, 16), np.uint8),
        "scales": np.ones((n, 5), np.float32),
        "zero_points": pack(points, 4, 0),
    }
    assert arrays["zero_points"].shape == (3, 3)
    kernel = kernels.get("matmul_nbits")
    assert kernel.decode is not None
    decoded = kernel.decode(arrays, {"N": n, "K": k, "bits": 4, "block": block})
    np.testing.assert_array_equal(decoded, -np.repeat(points, 32, axis=1).astype(np.float32))


@pytest.mark.parametrize("blocks", [1, 2, 107])
@pytest.mark.parametrize("block", [16, 512])
def test_field_47_many_blocks_and_large_ones_are_not_zeros(blocks: int, block: int) -> None:
    random = np.random.default_rng(blocks)
    codes = random.integers(0, 256, (2, blocks, block // 2), np.uint8)
    arrays = {"codes": codes, "scales": np.ones((2, blocks), np.float32)}
    kernel = kernels.get("matmul_nbits")
    assert kernel.decode is not None
    decoded = kernel.decode(arrays, {"N": 2, "K": blocks * block, "bits": 4, "block": block})
    flat = codes.reshape(2, -1)
    np.testing.assert_array_equal(decoded[:, 0::2], (flat & 15) - 8.0)
    np.testing.assert_array_equal(decoded[:, 1::2], (flat >> 4) - 8.0)


@pytest.mark.parametrize("fill", [0xFF, 0x00])
def test_a_decode_reads_bytes_and_leaves_them(fill: int) -> None:
    """The decoded array is the kernel's own: changing the bytes afterwards does not change it, nor the reverse."""
    codes, scales = np.full((2, 2, 16), 0x3A, np.uint8), np.ones((2, 2), np.float32)
    kernel = kernels.get("matmul_nbits")
    assert kernel.decode is not None
    decoded = kernel.decode({"codes": codes, "scales": scales}, {"N": 2, "K": 64, "bits": 4, "block": 32})
    before = decoded.copy()
    codes[:] = fill
    np.testing.assert_array_equal(decoded, before)
    weight = np.ones((4, 3), np.float32)
    dense = kernels.get("matmul").decode
    assert dense is not None
    kept = dense({"weight": weight}, {"transposed": False, "N": 3})
    weight[:] = 7
    assert (kept == 1).all()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 20),
    k=st.integers(1, 70),
    dtype=st.sampled_from(list(DTYPES)),
    transposed=st.booleans(),
)
def test_dense_products(seed: int, n: int, k: int, dtype: str, transposed: bool) -> None:
    random = np.random.default_rng(seed)
    x, w = (random.normal(size=s).astype(DTYPES[dtype]) for s in ((1, 2, k), (k, n)))
    y = np.zeros((1, 2, n), DTYPES[dtype])
    lies = np.ascontiguousarray(w.T) if transposed else w
    launch("matmul", {"x": x, "weight": lies, "y": y}, K=k, N=n, transposed=transposed)
    wide_x, wide_w = x.astype(np.float64), w.astype(np.float64)
    allowed = EPS[dtype] * np.abs(wide_x @ wide_w) + k * 2.0**-23 * (np.abs(wide_x) @ np.abs(wide_w)) + 1e-30
    allowed += SPACING[dtype]
    assert (np.abs(y.astype(np.float64) - wide_x @ wide_w) <= allowed).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    width=st.integers(1, 200),
    eps=st.sampled_from([1e-5, 1e-6, 1e-12]),
    dtype=st.sampled_from(list(DTYPES)),
    bias=st.booleans(),
    small=st.booleans(),
)
def test_norms(seed: int, width: int, eps: float, dtype: str, bias: bool, small: bool) -> None:
    """sum = x + skip (+ bias), rounded to its type before the norm reads it; y = sum / rms * gamma."""
    random = np.random.default_rng(seed)
    scale = 1e-4 if small else 3.0
    x, skip = (scale * random.normal(size=(1, 2, width)) for _ in range(2))
    arrays: dict[str, NDArray[Any]] = {
        "x": x.astype(DTYPES[dtype]),
        "skip": skip.astype(DTYPES[dtype]),
        "gamma": random.normal(size=width).astype(DTYPES[dtype]),
        "y": np.zeros((1, 2, width), DTYPES[dtype]),
        "sum": np.zeros((1, 2, width), DTYPES[dtype]),
    }
    if bias:
        arrays["bias"] = (scale * random.normal(size=width)).astype(DTYPES[dtype])
    launch("skip_rms_norm", arrays, eps=eps)
    total = arrays["x"].astype(np.float64) + arrays["skip"].astype(np.float64)
    if bias:
        total = total + arrays["bias"].astype(np.float64)
    np.testing.assert_allclose(arrays["sum"].astype(np.float64), total, rtol=EPS[dtype], atol=4 * 2.0**-23 * scale)
    rounded = arrays["sum"].astype(np.float64)
    gamma = arrays["gamma"].astype(np.float64)
    expected = rounded / np.sqrt((rounded**2).mean(axis=-1, keepdims=True) + eps) * gamma
    np.testing.assert_allclose(arrays["y"].astype(np.float64), expected, rtol=EPS[dtype] + 1e-5, atol=1e-7)
    alone = {**arrays, "x": arrays["sum"], "y": np.zeros_like(arrays["y"])}
    launch("rms_norm", alone, eps=eps)
    assert alone["y"].tobytes() == arrays["y"].tobytes(), "both norms are one"


def test_field_36_squares_that_overflow_give_no_zeros() -> None:
    """1e30 is a number, its square is none in float32; a norm of zeros would go on to a token as if all were well."""
    x, y = np.full((1, 1, 8), 1e30, np.float32), np.zeros((1, 1, 8), np.float32)
    with np.errstate(over="ignore"):
        launch("rms_norm", {"x": x, "gamma": np.ones(8, np.float32), "y": y}, eps=1e-5)
    assert np.isnan(y).all()


def test_element_wise() -> None:
    x = np.array([[-200.0, -1.0, 0.0, 2.0, 100.0]], np.float32)
    for name, other, expected in (
        ("sigmoid", None, 1 / (1 + np.exp(-x.astype(np.float64)))),
        ("mul", x, x.astype(np.float64) ** 2),
        ("add", np.array([1, 2, 3, 4, 5], np.float32), x + np.arange(1, 6)),
    ):
        y = np.zeros_like(x)
        launch(name, {"a": x, "y": y} | ({} if other is None else {"b": other}))
        np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-30)
    half = np.zeros(x.shape, np.float16)
    launch("cast", {"a": x * np.float32(1.0001), "y": half})
    np.testing.assert_array_equal(half, (x * np.float32(1.0001)).astype(np.float16))


@pytest.mark.parametrize("bits", [4, 8])
def test_gathered_rows_of_a_quantised_table(bits: int) -> None:
    random = np.random.default_rng(5)
    rows, width, block = 7, 50, 16  # the last block holds two columns
    codes = random.integers(0, 1 << bits, (rows, width), np.uint8)
    scales = random.normal(size=(rows, 4)).astype(np.float16)
    ids = np.array([[6, 0, 6]])
    y = np.zeros((1, 3, width), np.float16)
    arrays = {"ids": ids, "table": pack(codes, bits, 0), "scales": scales, "y": y}
    launch("gather_block_quantized", arrays, rows=rows, width=width, bits=bits, block=block, packed=True)
    for r, row in enumerate(ids[0]):
        for c in range(width):
            exact = (float(codes[row, c]) - (1 << (bits - 1))) * float(scales[row, c // block])
            assert float(y[0, r, c]) == float(np.float16(exact))


@st.composite
def attentions(draw: st.DrawFn) -> dict[str, Any]:
    """A GQA case; the window is drawn around the number of cached positions, where it begins to bite."""
    past = draw(st.integers(0, 9))
    return {
        "past": past,
        "rows": draw(st.integers(1, 4)),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "head_size": draw(st.sampled_from([8, 16])),
        "packed": draw(st.booleans()),
        "rotary": draw(st.sampled_from([0, 2, 4])),  # half the columns that turn: none, some, all of 8
        "interleaved": draw(st.booleans()),
        "window": draw(st.sampled_from([-1, 1, 2, past, past + 1, past + 2])),
        "softcap": draw(st.sampled_from([0.0, 3.0])),
        "spare": draw(st.integers(0, 5)),
        "dtype": draw(st.sampled_from(["float32", "float16"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


@settings(max_examples=120, deadline=None)
@given(case=attentions())
def test_grouped_query_attention(case: dict[str, Any]) -> None:
    random, dtype = np.random.default_rng(case["seed"]), DTYPES[case["dtype"]]
    past, rows, kv_heads, d = case["past"], case["rows"], case["kv_heads"], case["head_size"]
    heads, total = kv_heads * case["group"], past + rows
    q, k, v = (random.normal(size=(rows, h, d)).astype(dtype) for h in (heads, kv_heads, kv_heads))
    caches = [random.normal(size=(total + case["spare"], kv_heads, d)).astype(dtype) for _ in range(2)]
    for cache in caches:
        cache[past:] = np.nan  # nothing beyond what is cached may be felt
    history = [c[:past].astype(np.float64) for c in caches]
    arrays: dict[str, NDArray[Any]] = {
        "k_cache": caches[0],
        "v_cache": caches[1],
        "length": np.array([past]),
        "y": np.zeros((1, rows, heads * d), dtype),
    }
    if case["packed"]:
        arrays["query"] = np.concatenate([x.reshape(1, rows, -1) for x in (q, k, v)], axis=-1)
    else:
        arrays |= {n: x.reshape(1, rows, -1) for n, x in (("query", q), ("key", k), ("value", v))}
    cos = sin = None
    if case["rotary"]:
        angles = random.uniform(-3, 3, (total + 2, case["rotary"]))
        arrays["cos"], arrays["sin"] = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
        cos, sin = arrays["cos"].astype(np.float64), arrays["sin"].astype(np.float64)
    p = {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_size": d,
        "scale": 1 / math.sqrt(d),
        "softcap": case["softcap"],
        "window": case["window"],
        "interleaved": case["interleaved"],
        "long_above": None,
    }
    launch("gqa", arrays, **p)
    tolerance = 2e-6 if case["dtype"] == "float32" else 4e-3
    new = k.astype(np.float64)
    if cos is not None and sin is not None:
        new = turn(new, cos[past:], sin[past:], case["interleaved"])
    np.testing.assert_allclose(caches[0][past:total].astype(np.float64), new, atol=tolerance, rtol=tolerance)
    np.testing.assert_array_equal(caches[1][past:total], v)
    assert np.isnan(caches[0][total:].astype(np.float32)).all(), "no row beyond the new ones is written"
    keys = np.concatenate([history[0], caches[0][past:total].astype(np.float64)])
    values = np.concatenate([history[1], v.astype(np.float64)])
    query = q.astype(np.float64)
    if cos is not None and sin is not None:
        query = turn(query, cos[past:], sin[past:], case["interleaved"])
    expected = attend(query, keys, values, past, p)
    found = arrays["y"].reshape(rows, heads, d).astype(np.float64)
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize(("positions", "seen"), [(4, 4), (5, 5), (6, 5), (7, 5)])
def test_a_window_of_five_sees_five_keys_the_query_among_them(positions: int, seen: int) -> None:
    """At length W and at W + 1: with equal scores the output is the mean of the values that are seen."""
    past, d = positions - 1, 8
    values = np.arange(positions, dtype=np.float32)
    k_cache, v_cache = np.zeros((positions, 1, d), np.float32), np.zeros((positions, 1, d), np.float32)
    v_cache[:past, 0] = values[:past, None]
    y = np.zeros((1, 1, d), np.float32)
    arrays = {
        "query": np.zeros((1, 1, d), np.float32),
        "key": np.zeros((1, 1, d), np.float32),
        "value": np.full((1, 1, d), values[past], np.float32),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "length": np.array([past]),
        "y": y,
    }
    p = {"heads": 1, "kv_heads": 1, "head_size": d, "scale": 1.0, "softcap": 0.0, "interleaved": False}
    launch("gqa", arrays, **p, window=5)
    np.testing.assert_allclose(y[0, 0], values[-seen:].mean(), rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(2, 6), past=st.integers(0, 5), seed=st.integers(0, 2**32 - 1))
def test_rows_do_not_feel_each_other(rows: int, past: int, seed: int) -> None:
    """One call of many rows and many calls of one row give the same bits, with a larger cache too."""
    random = np.random.default_rng(seed)
    heads, d, total = 4, 16, past + rows
    p = {
        "heads": heads,
        "kv_heads": 2,
        "head_size": d,
        "scale": 0.3,
        "softcap": 0.0,
        "window": -1,
        "interleaved": False,
        "long_above": None,
    }
    query = random.normal(size=(1, rows, (heads + 4) * d)).astype(np.float32)
    history = random.normal(size=(2, total, 2, d)).astype(np.float32)
    tables = random.normal(size=(2, total, d // 2)).astype(np.float32)

    def call(start: int, count: int, capacity: int, caches: NDArray[Any] | None) -> tuple[NDArray[Any], NDArray[Any]]:
        if caches is None:
            caches = np.full((2, capacity, 2, d), np.nan, np.float32)
            caches[:, :past] = history[:, :past]
        y = np.zeros((1, count, heads * d), np.float32)
        arrays = {
            "query": query[:, start : start + count],
            "k_cache": caches[0],
            "v_cache": caches[1],
            "length": np.array([past + start]),
            "cos": tables[0],
            "sin": tables[1],
            "y": y,
        }
        launch("gqa", arrays, **p)
        return y, caches

    whole, _ = call(0, rows, total, None)
    caches, parts = None, []
    for r in range(rows):
        y, caches = call(r, 1, total + 11, caches)
        parts.append(y)
    assert np.concatenate(parts, axis=1).tobytes() == whole.tobytes()
