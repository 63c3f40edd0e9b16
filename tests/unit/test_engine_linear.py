"""Linear attention, its gates, the gated delta net and the causal convolution against plain float64 loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import kernels
from engine.errors import UnsupportedModel
from tests.unit.engine_plain import F64, compute, silu, stored

RULES = ("linear", "gated", "delta", "gated_delta")
F32 = NDArray[np.float32]


def plain_linear(
    q: F64, k: F64, v: F64, state: F64, decay: F64 | None, beta: F64 | None, rule: str, scale: float
) -> tuple[F64, F64]:
    """q [B,T,Hq,dk], k [B,T,Hk,dk], v [B,T,Hv,dv], state [B,Hv,dk,dv], decay [B,T,Hv,1 or dk], beta [B,T,Hv]."""
    batch, tokens, q_heads, dk = q.shape
    heads, dv = v.shape[2:]
    of_key, out_heads = heads // k.shape[2], max(q_heads, heads)
    s, y = state.copy(), np.zeros((batch, tokens, out_heads, dv))
    for b in range(batch):
        for t in range(tokens):
            for h in range(heads):
                key = k[b, t, h // of_key]
                for i in range(dk):
                    if decay is not None and rule.startswith("gated"):
                        g = decay[b, t, h]
                        s[b, h, i] *= math.exp(g[i] if len(g) > 1 else g[0])
                for j in range(dv):
                    u = v[b, t, h, j]
                    if beta is not None and rule.endswith("delta"):
                        u = beta[b, t, h] * (u - sum(s[b, h, i, j] * key[i] for i in range(dk)))
                    for i in range(dk):
                        s[b, h, i, j] += key[i] * u
            for o in range(out_heads):
                query, of = q[b, t, o // (out_heads // q_heads)], s[b, o // (out_heads // heads)]
                for j in range(dv):
                    y[b, t, o, j] = scale * sum(of[i, j] * query[i] for i in range(dk))
    return y, s


def wide(x: NDArray[Any]) -> F64:
    """Float64, with heads kept apart."""
    return x.astype(np.float64)


@st.composite
def recurrences(draw: st.DrawFn) -> dict[str, Any]:
    """Heads in the three relations: as many, more queries than values (GQA), more values than queries (inverse)."""
    few, times = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    q_heads, kv_heads = draw(st.sampled_from([(few, few * times), (few * times, few)]))
    return {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "k_heads": min(q_heads, kv_heads),
        "rule": draw(st.sampled_from(RULES)),
        "channels": draw(st.booleans()),  # a decay a key channel, not one a head
        "one_beta": draw(st.booleans()),  # a beta for all heads
        "batch": draw(st.integers(1, 2)),
        "tokens": draw(st.integers(1, 4)),
        "dk": draw(st.integers(1, 5)),
        "dv": draw(st.integers(1, 5)),
        "scale": draw(st.sampled_from([0.0, 1.0, 0.37])),
        "past": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "float16"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def drawn(c: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """The operands of a case, with heads apart: keys of length one, decays below zero, betas between 0 and 1."""
    random = np.random.default_rng(c["seed"])
    batch, tokens, heads, dk = c["batch"], c["tokens"], c["kv_heads"], c["dk"]
    k = random.normal(size=(batch, tokens, c["k_heads"], dk)) + 0.1
    beta = random.uniform(0, 1, (batch, tokens, 1 if c["one_beta"] else heads))
    made = {
        "q": random.normal(size=(batch, tokens, c["q_heads"], dk)),
        "k": k / np.sqrt((k * k).sum(axis=-1, keepdims=True)),
        "v": random.normal(size=(batch, tokens, heads, c["dv"])),
        "state": random.normal(size=(batch, heads, dk, c["dv"]))
        if c["past"]
        else np.zeros((batch, heads, dk, c["dv"])),
        "decay": random.uniform(-2, 0, (batch, tokens, heads, dk if c["channels"] else 1)),
        "beta": beta,
    }
    return {n: x.astype(c["dtype"]) for n, x in made.items()}


@settings(max_examples=120, deadline=None)
@given(c=recurrences())
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_linear_attention(domain: str, c: dict[str, Any]) -> None:
    x = drawn(c)
    gated, delta = c["rule"].startswith("gated"), c["rule"].endswith("delta")
    joined = {n: x[n].reshape(c["batch"], c["tokens"], -1) for n in ("q", "k", "v", "decay", "beta")}
    given_ = {"q": joined["q"], "k": joined["k"], "v": joined["v"]} | ({"state": x["state"]} if c["past"] else {})
    given_ |= ({"decay": joined["decay"]} if gated else {}) | ({"beta": joined["beta"]} if delta else {})
    wiring = ["q", "k", "v", *(n if n in given_ else "" for n in ("state", "decay", "beta"))]
    attributes = {"q_num_heads": c["q_heads"], "kv_num_heads": c["kv_heads"], "update_rule": c["rule"]}
    y, present = compute(
        "LinearAttention", given_, wiring=wiring, domain=domain, outputs=2, scale=c["scale"], **attributes
    )
    beta = np.broadcast_to(wide(x["beta"]), (c["batch"], c["tokens"], c["kv_heads"]))
    scale = c["scale"] or 1 / math.sqrt(c["dk"])
    expected, state = plain_linear(
        wide(x["q"]), wide(x["k"]), wide(x["v"]), wide(x["state"]), wide(x["decay"]), beta, c["rule"], scale
    )
    np.testing.assert_allclose(y, expected.reshape(y.shape), atol=2e-5, rtol=1e-5)
    np.testing.assert_allclose(present, state, atol=2e-5, rtol=1e-5)


def in_place(kernel: str, arrays: dict[str, NDArray[Any]], cut: int, params: dict[str, Any], axis: int = 1) -> bytes:
    """Run a kernel over its tokens in two calls, cut at `cut`, on one state; the bytes of output and state."""
    state = arrays["state"].copy()
    tokens = arrays["y"].shape[axis]
    parts = []
    for start, end in ((0, cut), (cut, tokens)):
        if start == end:
            continue
        here = {n: np.take(a, range(start, end), axis) if n in params["cut"] else a for n, a in arrays.items()}
        here |= {"state": state, "y": np.zeros(np.take(arrays["y"], range(start, end), axis).shape, np.float32)}
        kernels.get(kernel).run(here, params)
        parts.append(here["y"])
    return np.concatenate(parts, axis=axis).tobytes() + state.tobytes()


@settings(max_examples=60, deadline=None)
@given(c=recurrences(), data=st.data())
def test_a_recurrence_cut_at_any_point_is_the_same_bits(c: dict[str, Any], data: st.DataObject) -> None:
    x = {n: a.astype(np.float32) for n, a in drawn(c).items()}
    flat = {n: x[n].reshape(c["batch"], c["tokens"], -1) for n in ("q", "k", "v", "decay", "beta")}
    shape = (c["batch"], c["tokens"], max(c["q_heads"], c["kv_heads"]) * c["dv"])
    params = {**c, "scale": c["scale"] or 1.0, "cut": ("q", "k", "v", "decay", "beta")}
    arrays = {**flat, "state": x["state"], "y": np.zeros(shape, np.float32)}
    cut = data.draw(st.integers(0, c["tokens"]))
    assert in_place("linear_attention", arrays, cut, params) == in_place(
        "linear_attention", arrays, c["tokens"], params
    )


@settings(max_examples=60, deadline=None)
@given(c=recurrences(), l2=st.booleans(), size=st.sampled_from([1.0, 1e-3]), data=st.data())
def test_gated_delta_net(c: dict[str, Any], l2: bool, size: float, data: st.DataObject) -> None:
    """Gates from raw numbers, queries and keys made unit vectors, the state the other way round: against the loop."""
    heads = max(c["q_heads"], c["kv_heads"])
    c = {**c, "q_heads": min(c["q_heads"], c["kv_heads"]), "kv_heads": heads, "one_beta": False, "channels": False}
    c["k_heads"] = c["q_heads"]
    random, x = np.random.default_rng(c["seed"]), {n: a.astype(np.float32) for n, a in drawn(c).items()}
    raw = random.normal(size=(2, c["batch"], c["tokens"], heads)).astype(np.float32)
    fixed = random.normal(size=(2, heads)).astype(np.float32)
    scale = c["scale"] or 1.0
    params = {"l2_norm": l2, "eps": 1e-6, "scale": scale, "cut": ("q", "k", "v", "gate", "beta")}
    state = np.ascontiguousarray(x["state"].transpose(0, 1, 3, 2))
    x |= {n: x[n] * np.float32(size) for n in "qk"}  # at 1e-3 what is added under the root is felt
    arrays = {n: x[n] for n in "qkv"} | {"gate": raw[0], "beta": raw[1], "a_log": fixed[0], "dt_bias": fixed[1]}
    arrays |= {"state": state, "y": np.zeros(x["v"].shape, np.float32)}
    whole = in_place("gated_delta_net", arrays, c["tokens"], params)
    assert in_place("gated_delta_net", arrays, data.draw(st.integers(0, c["tokens"])), params) == whole
    q, k = wide(x["q"]), wide(x["k"])
    if l2:
        q, k = (a / np.sqrt((a * a).sum(axis=-1, keepdims=True) + 1e-6) for a in (q, k))
    decay = -np.exp(wide(fixed[0])) * np.log1p(np.exp(wide(raw[0]) + wide(fixed[1])))
    beta = 1 / (1 + np.exp(-wide(raw[1])))
    expected, after = plain_linear(q, k, wide(x["v"]), wide(x["state"]), decay[..., None], beta, "gated_delta", scale)
    found = np.frombuffer(whole, np.float32)
    np.testing.assert_allclose(found[: expected.size].reshape(expected.shape), expected, atol=5e-5, rtol=1e-4)
    left = found[expected.size :].reshape(state.shape)
    np.testing.assert_allclose(left, after.transpose(0, 1, 3, 2), atol=5e-5, rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(heads=st.integers(1, 6), seed=st.integers(0, 2**32 - 1), far=st.booleans())
def test_gates(heads: int, seed: int, far: bool) -> None:
    """Decay's logarithm = -exp(A) * softplus(a + bias); beta = sigmoid(b); far out nothing overflows."""
    random = np.random.default_rng(seed)
    a, b = (random.normal(size=(1, 3, heads)).astype(np.float32) * (100 if far else 1) for _ in range(2))
    bias, scale = (random.normal(size=heads).astype(np.float32) for _ in range(2))
    weights = {"bias": stored("bias", bias), "scale": stored("scale", -np.exp(scale))}
    decay, beta = compute(
        "LinearAttentionGate", {"a": a, "b": b}, wiring=["a", "bias", "scale", "b"], weights=weights, outputs=2
    )
    softplus = np.logaddexp(0, wide(a) + wide(bias))
    np.testing.assert_allclose(decay, -wide(np.exp(scale)) * softplus, rtol=2e-6, atol=1e-30)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-wide(b))), rtol=2e-6, atol=1e-37)


@settings(max_examples=40, deadline=None)
@given(heads=st.integers(1, 4), size=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_a_gated_norm_is_by_stretches_of_its_scale(heads: int, size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, gate = (random.normal(size=(1, 2, heads * size)).astype(np.float32) for _ in range(2))
    gamma = random.normal(size=size).astype(np.float16)
    weights = {"gamma": stored("gamma", gamma)}
    [y] = compute("GatedRMSNorm", {"x": x, "gate": gate}, wiring=["x", "gamma", "gate"], weights=weights, epsilon=1e-3)
    parts = wide(x).reshape(2, heads, size)
    normed = parts / np.sqrt((parts**2).mean(axis=-1, keepdims=True) + 1e-3) * wide(gamma)
    np.testing.assert_allclose(y, normed.reshape(x.shape) * silu(wide(gate)), rtol=2e-5, atol=1e-6)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "batch": draw(st.integers(1, 2)),
        "channels": draw(st.integers(1, 4)),
        "tokens": draw(st.integers(1, 7)),
        "taps": draw(st.integers(1, 5)),
        "bias": draw(st.booleans()),
        "past": draw(st.booleans()),
        "activation": draw(st.sampled_from(["none", "silu", "swish"])),
        "dtype": draw(st.sampled_from(["float32", "float16"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def plain_convolution(x: F64, w: F64, bias: F64 | None, past: F64, activation: str) -> tuple[F64, F64]:
    batch, channels, tokens = x.shape
    taps = w.shape[2]
    y, left = np.zeros(x.shape), np.zeros((batch, channels, taps - 1))
    for b in range(batch):
        for c in range(channels):
            seen = [*past[b, c], *x[b, c]]
            for t in range(tokens):
                y[b, c, t] = sum(w[c, 0, i] * seen[t + i] for i in range(taps)) + (0 if bias is None else bias[c])
            left[b, c] = seen[len(seen) - taps + 1 :]
    return (y if activation == "none" else silu(y)), left


def convolution(c: dict[str, Any]) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(c["seed"])
    shapes = {
        "x": (c["batch"], c["channels"], c["tokens"]),
        "weight": (c["channels"], 1, c["taps"]),
        "bias": (c["channels"],),
        "state": (c["batch"], c["channels"], c["taps"] - 1),
    }
    return {n: random.normal(size=s).astype(c["dtype"]) for n, s in shapes.items()}


@settings(max_examples=120, deadline=None)
@given(c=convolutions())
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_causal_convolution(domain: str, c: dict[str, Any]) -> None:
    x = convolution(c)
    weights = {"weight": stored("weight", x["weight"]), "bias": stored("bias", x["bias"])}
    inputs = {"x": x["x"]} | ({"state": x["state"]} if c["past"] else {})
    wiring = ["x", "weight", "bias" if c["bias"] else "", "state" if c["past"] else ""]
    y, left = compute(
        "CausalConvWithState",
        inputs,
        wiring=wiring,
        weights=weights,
        domain=domain,
        outputs=2,
        activation=c["activation"],
    )
    past = wide(x["state"]) if c["past"] else np.zeros(x["state"].shape)
    bias = wide(x["bias"]) if c["bias"] else None
    expected, state = plain_convolution(wide(x["x"]), wide(x["weight"]), bias, past, c["activation"])
    np.testing.assert_allclose(y, expected, atol=5e-6, rtol=1e-5)
    np.testing.assert_array_equal(left, state)


@settings(max_examples=60, deadline=None)
@given(c=convolutions(), data=st.data())
def test_a_convolution_cut_at_any_point_is_the_same_bits(c: dict[str, Any], data: st.DataObject) -> None:
    x = {n: a.astype(np.float32) for n, a in convolution(c).items()}
    params = {"activation": c["activation"], "cut": ("x",)}
    arrays = {**x, "y": np.zeros(x["x"].shape, np.float32)}
    cut = data.draw(st.integers(0, c["tokens"]))
    found = in_place("causal_conv", arrays, cut, params, axis=2)
    assert found == in_place("causal_conv", arrays, c["tokens"], params, axis=2)


LINEAR = {"q": (1, 2, 4), "k": (1, 2, 4), "v": (1, 2, 6), "state": (1, 2, 2, 3), "decay": (1, 2, 2), "beta": (1, 2, 2)}


@pytest.mark.parametrize(
    ("changed", "shape", "says"),
    [
        ("decay", (1, 2, 3), "decay [1, 2, 3]"),
        ("decay", (1, 1, 2), "decay [1, 1, 2]"),
        ("beta", (1, 2, 4), "beta [1, 2, 4]"),
        ("k", (1, 2, 6), "3 key heads"),
        ("k", (1, 3, 4), "key [1, 3, 4]"),
        ("v", (1, 1, 6), "value [1, 1, 6]"),
        ("v", (1, 2, 7), "[1, 2, 7]"),
        ("state", (1, 2, 3, 2), "past state [1, 2, 3, 2]"),
        ("state", (1, 2, 2), "past state [1, 2, 2]"),
        ("q", (2, 4), "query [2, 4]"),
        ("k", (1, 2, 0), "[1, 2, 4]"),
    ],
)
def test_linear_attention_of_shapes_that_do_not_fit_is_refused(changed: str, shape: tuple[int, ...], says: str) -> None:
    inputs = {n: np.ones(shape if n == changed else s, np.float32) for n, s in LINEAR.items()}
    with pytest.raises(UnsupportedModel) as caught:
        compute("LinearAttention", inputs, q_num_heads=2, kv_num_heads=2, outputs=2)
    assert says in caught.value.message


@pytest.mark.parametrize("missing", ["decay", "beta"])
def test_a_gated_delta_rule_without_its_gates_is_refused(missing: str) -> None:
    inputs = {n: np.ones(s, np.float32) for n, s in LINEAR.items() if n != missing}
    wiring = [n if n != missing else "" for n in LINEAR]
    with pytest.raises(UnsupportedModel, match=f"needs {missing}"):
        compute("LinearAttention", inputs, wiring=wiring, q_num_heads=2, kv_num_heads=2, outputs=2)


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        (((1, 2, 8), (1, 2, 8), (1, 2, 2)), "gate [1, 2, 2]"),
        (((1, 2, 8), (1, 2, 4), (1, 2, 1)), "[1, 2, 4]"),
    ],
)
def test_a_gated_sum_of_shapes_that_do_not_fit_is_refused(shapes: tuple[tuple[int, ...], ...], says: str) -> None:
    inputs = {n: np.ones(s, np.float32) for n, s in zip("abc", shapes, strict=True)}
    with pytest.raises(UnsupportedModel) as caught:
        compute("GatedAdd", inputs)
    assert says in caught.value.message
