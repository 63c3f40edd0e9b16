"""Grouped-query attention beyond the plain form: windows, sinks, head norms, long tables, and a cache of int8."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper

from engine import kernels, oracle  # noqa: F401 - the rules
from engine.graph import Node
from engine.oracle.inputs import MICROSOFT, RULES, Inputs, Start
from tests.unit.engine_plain import F64, attend, turn

D = 8


@st.composite
def attentions(draw: st.DrawFn) -> dict[str, Any]:
    """A case; windows and the long tables' threshold lie around the lengths at which they begin to bite."""
    past, rows = draw(st.integers(0, 9)), draw(st.integers(1, 4))
    total = past + rows
    return {
        "past": past,
        "rows": rows,
        "kv_heads": draw(st.integers(1, 2)),
        "group": draw(st.integers(1, 3)),
        "half": draw(st.sampled_from([0, 2, 4])),  # columns of the tables; 0: no rotary
        "interleaved": draw(st.booleans()),
        "window": draw(st.sampled_from([-1, 1, past, past + 1, total - 1, total, total + 1])),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "sinks": draw(st.booleans()),
        "norms": draw(st.booleans()),
        "ahead": draw(st.integers(0, 2)),  # tokens of the prompt that are still to come
        "long": draw(st.sampled_from([None, total - 1, total, total + 1, past, past + 1])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def arrays_of(c: dict[str, Any], random: np.random.Generator) -> dict[str, NDArray[Any]]:
    """New queries, keys and values, and whatever the case has beside them; caches are the caller's."""
    heads, total = c["kv_heads"] * c["group"], c["past"] + c["rows"]
    made: dict[str, NDArray[Any]] = {
        n: random.normal(size=(1, c["rows"], h * D)).astype(np.float32)
        for n, h in (("query", heads), ("key", c["kv_heads"]), ("value", c["kv_heads"]))
    }
    made["ahead"] = np.array([c["ahead"]], np.int32)
    made |= {"length": np.array([c["past"]]), "y": np.zeros((1, c["rows"], heads * D), np.float32)}
    if c["sinks"]:
        made["sinks"] = random.normal(size=heads).astype(np.float16) * 3
    if c["norms"]:
        made |= {n: random.normal(size=D).astype(np.float16) for n in ("q_norm", "k_norm")}
    if c["half"]:
        for suffix in ("", "_long") if c["long"] is not None else ("",):
            angles = random.uniform(-3, 3, (total + 1, c["half"]))
            made |= {
                "cos" + suffix: np.cos(angles).astype(np.float32),
                "sin" + suffix: np.sin(angles).astype(np.float32),
            }
    return made


def params_of(c: dict[str, Any]) -> dict[str, Any]:
    """The step's scalars."""
    return {
        "heads": c["kv_heads"] * c["group"],
        "kv_heads": c["kv_heads"],
        "head_size": D,
        "scale": 1 / math.sqrt(D),
        "softcap": c["softcap"],
        "window": c["window"],
        "interleaved": c["interleaved"],
        "qk_norm_eps": 1e-6,
        "long_above": c["long"],
    }


def turned(c: dict[str, Any], a: dict[str, NDArray[Any]], name: str, norm: str) -> F64:
    """New queries or keys as they meet: normed head by head, then turned by the tables that this length takes."""
    x: F64 = a[name].astype(np.float64).reshape(c["rows"], -1, D)
    if c["norms"]:
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * a[norm].astype(np.float64)
    if not c["half"]:
        return x
    suffix = "_long" if c["long"] is not None and c["past"] + c["rows"] + c["ahead"] > c["long"] else ""
    cos, sin = (a[n + suffix][c["past"] :].astype(np.float64) for n in ("cos", "sin"))
    return turn(x, cos, sin, c["interleaved"])


def cached(c: dict[str, Any], random: np.random.Generator, dtype: str) -> list[NDArray[Any]]:
    """Two caches with room to spare; beyond what is cached lies what must not be felt."""
    shape = (c["past"] + c["rows"] + 2, c["kv_heads"], D)
    if dtype == "int8":
        return [random.integers(-128, 128, shape).astype(np.int8) for _ in range(2)]
    made = [random.normal(size=shape).astype(dtype) for _ in range(2)]
    for cache in made:
        cache[c["past"] :] = np.nan
    return made


@settings(max_examples=200, deadline=None)
@given(c=attentions())
def test_windows_sinks_norms_and_long_tables(c: dict[str, Any]) -> None:
    random = np.random.default_rng(c["seed"])
    a, (k_cache, v_cache) = arrays_of(c, random), cached(c, random, "float32")
    past, total = c["past"], c["past"] + c["rows"]
    history = [x[:past].astype(np.float64) for x in (k_cache, v_cache)]
    kernels.get("gqa").run({**a, "k_cache": k_cache, "v_cache": v_cache}, params_of(c))
    query, key = turned(c, a, "query", "q_norm"), turned(c, a, "key", "k_norm")
    np.testing.assert_allclose(k_cache[past:total], key, rtol=1e-5, atol=2e-6)
    keys = np.concatenate([history[0], key])
    values = np.concatenate([history[1], a["value"].astype(np.float64).reshape(c["rows"], -1, D)])
    sinks = a["sinks"].astype(np.float64) if c["sinks"] else None
    expected = attend(query, keys, values, past, params_of(c), sinks)
    np.testing.assert_allclose(a["y"].reshape(expected.shape), expected, rtol=2e-5, atol=5e-6)
    assert np.isnan(k_cache[total:]).all() and np.isnan(v_cache[total:]).all()


@settings(max_examples=120, deadline=None)
@given(c=attentions(), channels=st.booleans(), narrow=st.booleans())
def test_a_cache_of_int8(c: dict[str, Any], channels: bool, narrow: bool) -> None:
    """What goes in is rounded to the nearest code and held at the ends; what is attended to is what was stored."""
    random = np.random.default_rng(c["seed"])
    a, (k_cache, v_cache) = arrays_of(c, random), cached(c, random, "int8")
    past, total, shape = c["past"], c["past"] + c["rows"], (c["kv_heads"], D)
    before = k_cache.copy(), v_cache.copy()
    size = 0.004 if narrow else 0.04  # narrow: many values lie beyond the last code
    scales = [random.uniform(size / 2, size, shape if channels else (1,)).astype(np.float32) for _ in range(2)]
    stored_scales = {n: s.reshape(-1) for n, s in zip(("k_scale", "v_scale"), scales, strict=True)}
    kernels.get("gqa").run({**a, "k_cache": k_cache, "v_cache": v_cache, **stored_scales}, params_of(c))
    key, value = turned(c, a, "key", "k_norm"), a["value"].astype(np.float64).reshape(c["rows"], -1, D)
    for cache, old, new, scale in zip((k_cache, v_cache), before, (key, value), scales, strict=True):
        exact = np.clip(new / scale.astype(np.float64), -128, 127)
        assert (np.abs(cache[past:total] - exact) <= 0.5 + 1e-3).all(), "the nearest code"
        np.testing.assert_array_equal(cache[:past], old[:past])
        np.testing.assert_array_equal(cache[total:], old[total:])
    keys, values = (x[:total].astype(np.float64) * s for x, s in zip((k_cache, v_cache), scales, strict=True))
    sinks = a["sinks"].astype(np.float64) if c["sinks"] else None
    expected = attend(turned(c, a, "query", "q_norm"), keys, values, past, params_of(c), sinks)
    np.testing.assert_allclose(a["y"].reshape(expected.shape), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("channels", [False, True])
def test_codes_next_to_the_middle_of_two_are_those_of_onnxruntime(channels: bool) -> None:
    """It multiplies by the reciprocal of the scale: dividing gives another code for some of these.

    With one position the softmax is 1, so that what comes out are the stored values themselves.
    """
    random = np.random.default_rng(11)
    size = 64
    scale = random.uniform(0.01, 0.04, size if channels else 1).astype(np.float32)
    key, value = (((random.integers(-99, 99, size) + np.float32(0.5)) * scale).astype(np.float32) for _ in range(2))
    assert (np.rint(value / scale) != np.rint(value * (1 / scale))).any()
    if channels:
        scale[0], value[0] = 0, 5.3  # no scale yet: the code is the number itself, and it is read as 0
    kind = "PER_CHANNEL" if channels else "PER_TENSOR"
    given: dict[str, Any] = {"num_heads": 1, "kv_num_heads": 1}
    given |= {"k_quant_type": kind, "v_quant_type": kind, "kv_cache_bit_width": 8}
    whole = [1, 1, size]
    types = {"q": (TensorProto.FLOAT, whole), "k": (TensorProto.FLOAT, whole), "v": (TensorProto.FLOAT, whole)}
    types |= {n: (TensorProto.INT8, [1, 1, 0, size]) for n in ("pk", "pv")}
    types |= {"last": (TensorProto.INT32, [1]), "total": (TensorProto.INT32, [])}
    types |= {n: (TensorProto.FLOAT, list(scale.shape)) for n in ("ks", "vs")}
    inputs = ["q", "k", "v", "pk", "pv", "last", "total", "", "", "", "", "", "ks", "vs"]
    outputs = {"y": (TensorProto.FLOAT, whole)} | {n: (TensorProto.INT8, [1, 1, 1, size]) for n in ("ck", "cv")}
    node = helper.make_node("GroupQueryAttention", inputs, list(outputs), domain=MICROSOFT, **given)
    ins, outs = ([helper.make_tensor_value_info(n, *t) for n, t in side.items()] for side in (types, outputs))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    model = helper.make_model(helper.make_graph([node], "one", ins, outs), opset_imports=opsets, ir_version=10)
    key, value, empty = key.reshape(1, 1, size), value.reshape(1, 1, size), np.zeros((1, 1, 0, size), np.int8)
    feeds = {"q": key, "k": key, "v": value, "pk": empty, "pv": empty, "ks": scale, "vs": scale}
    feeds |= {"last": np.zeros(1, np.int32), "total": np.array(1, np.int32)}
    y, k_codes, v_codes = onnxruntime.InferenceSession(model.SerializeToString()).run(None, feeds)

    caches: list[NDArray[Any]] = [np.zeros((1, 1, size), np.int8) for _ in range(2)]
    a: dict[str, NDArray[Any]] = {"query": key, "key": key, "value": value, "y": np.zeros_like(key)}
    a |= {"length": np.zeros(1, np.int64), "k_scale": scale, "v_scale": scale}
    a |= dict(zip(("k_cache", "v_cache"), caches, strict=True))
    p = {"heads": 1, "kv_heads": 1, "head_size": size, "scale": 0.125, "window": -1, "softcap": 0.0}
    kernels.get("gqa").run(a, {**p, "interleaved": False, "long_above": None, "qk_norm_eps": 0.0})
    for found, told in zip(caches, (k_codes, v_codes), strict=True):
        np.testing.assert_array_equal(found.reshape(-1), told.reshape(-1))
    np.testing.assert_array_equal(a["y"], y)

    starts = (Start("pk", "int8"), Start("pv", "int8"))
    values = (key, key, value, *starts, np.zeros(1, np.int32), np.array(1, np.int32))
    node_of_ours = Node("gqa", "GroupQueryAttention", MICROSOFT, (), ("y", "", ""), given)
    told = RULES[MICROSOFT, "GroupQueryAttention"](Inputs(node_of_ours, (*values, *(None,) * 5, scale, scale), 1))
    assert isinstance(told, tuple)
    np.testing.assert_array_equal(np.asarray(told[0]), y)


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_field_36_what_is_not_finite_shows_through_a_cache_of_int8(name: str, number: float) -> None:
    """No code stands for it: it must not come out as if it were a number, that is as the last code."""
    c: dict[str, Any] = {"past": 2, "rows": 2, "kv_heads": 1, "group": 2, "half": 0, "interleaved": False, "window": -1}
    c |= {"softcap": 0.0, "sinks": False, "norms": False, "long": None, "ahead": 0}
    random = np.random.default_rng(1)
    a, caches = arrays_of(c, random), cached(c, random, "int8")
    a[name][0, 1, 3] = number
    scales = {n: np.ones(1, np.float32) for n in ("k_scale", "v_scale")}
    with np.errstate(all="ignore"):
        kernels.get("gqa").run({**a, "k_cache": caches[0], "v_cache": caches[1], **scales}, params_of(c))
    assert not np.isfinite(a["y"][0, 1]).all()


@settings(max_examples=60, deadline=None)
@given(c=attentions(), int8=st.booleans())
def test_rows_in_one_call_and_one_by_one_are_the_same_bits(c: dict[str, Any], int8: bool) -> None:
    random = np.random.default_rng(c["seed"])
    a, caches = arrays_of(c, random), cached(c, random, "int8" if int8 else "float16")
    scales = {n: np.full(1, 0.03, np.float32) for n in ("k_scale", "v_scale")} if int8 else {}
    whole = [x.copy() for x in caches]
    kernels.get("gqa").run({**a, "k_cache": whole[0], "v_cache": whole[1], **scales}, params_of(c))
    parts = [x.copy() for x in caches]
    rows = []
    for r in range(c["rows"]):
        one = {n: x[:, r : r + 1] if n in ("query", "key", "value") else x for n, x in a.items()}
        one |= {"y": np.zeros_like(a["y"][:, :1]), "length": np.array([c["past"] + r])}
        one["ahead"] = np.array([c["ahead"] + c["rows"] - r - 1], np.int32)
        kernels.get("gqa").run({**one, "k_cache": parts[0], "v_cache": parts[1], **scales}, params_of(c))
        rows.append(one["y"])
    assert np.concatenate(rows, axis=1).tobytes() == a["y"].tobytes()
    assert [x.tobytes() for x in parts] == [x.tobytes() for x in whole]


@settings(max_examples=60, deadline=None)
@given(
    c=attentions(),
    dtype=st.sampled_from(["float32", "float16", "int8"]),
    wide=st.integers(0, 40),
    shift=st.integers(0, 3),
)
def test_strides_and_capacity_of_a_cache_are_not_felt(c: dict[str, Any], dtype: str, wide: int, shift: int) -> None:
    """Positions first or heads first, in a range of any capacity that starts anywhere: one list of bits."""
    random = np.random.default_rng(c["seed"])
    a, caches = arrays_of(c, random), cached(c, random, dtype)
    scales = {n: np.full(1, 0.03, np.float32) for n in ("k_scale", "v_scale")} if dtype == "int8" else {}
    capacity, kv_heads, _ = caches[0].shape
    heads_first = []
    for cache in caches:
        flat = np.zeros(shift + (capacity + wide) * kv_heads * D, cache.dtype)
        view = flat[shift:].reshape(kv_heads, capacity + wide, D).transpose(1, 0, 2)
        view[:capacity] = cache
        heads_first.append(view)
    found = []
    for k_cache, v_cache in (caches, heads_first):
        y = np.zeros_like(a["y"])
        kernels.get("gqa").run({**a, "y": y, "k_cache": k_cache, "v_cache": v_cache, **scales}, params_of(c))
        found.append(y.tobytes())
    assert found[0] == found[1]
    for here, there in zip(caches, heads_first, strict=True):
        assert here.tobytes() == there[:capacity].tobytes()


@pytest.mark.parametrize(("window", "length"), [(1, 1), (1, 2), (1, 3), (4, 3), (4, 4), (4, 5), (4, 6)])
def test_windows_at_their_own_length_and_one_more(window: int, length: int) -> None:
    """W keys are seen, the query's own among them, at lengths W - 1 to W + 2; a sink takes its share of the weight."""
    values = np.arange(1.0, length + 1)
    caches = np.zeros((2, length, 1, D), np.float32)
    caches[1, :, 0] = values[:, None]
    for sink in (None, 0.0, -100.0):
        y = np.zeros((1, 1, D), np.float32)
        arrays: dict[str, NDArray[Any]] = {n: np.zeros((1, 1, D), np.float32) for n in ("query", "key")}
        arrays |= {"value": np.full((1, 1, D), values[-1], np.float32), "k_cache": caches[0], "v_cache": caches[1]}
        arrays |= {"length": np.array([length - 1]), "y": y}
        arrays |= {} if sink is None else {"sinks": np.array([sink], np.float32)}
        c = {"kv_heads": 1, "group": 1, "softcap": 0.0, "window": window, "interleaved": False, "long": None}
        kernels.get("gqa").run(arrays, params_of(c))
        seen = values[-window:]
        share = len(seen) + (0.0 if sink is None else math.exp(sink))
        np.testing.assert_allclose(y[0, 0], seen.sum() / share, rtol=1e-6)
