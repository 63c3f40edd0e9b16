"""Kernels of fused steps against plain float64 arithmetic, written out from the operators that they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kernels import mixture, nbits
from tests.unit.engine_plain import F64, launch, pack

BLOCK = 32
TOLERANCE = 3e-5


def sigmoid(x: F64) -> F64:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-x)))


def normed(x: F64, gamma: F64, eps: float) -> F64:
    """RMS norm of each row."""
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gamma)


def close(found: NDArray[Any], expected: F64) -> None:
    """Within float32's reach of sums this long."""
    assert np.linalg.norm(found - expected) <= TOLERANCE * max(float(np.linalg.norm(expected)), 1e-3)


# -- mixtures


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    """A mixture of odd sizes, with whatever may stand around it."""
    experts = draw(st.integers(1, 40))
    return {
        "experts": experts,
        "k": draw(st.integers(1, min(experts, 8))),
        "tokens": draw(st.integers(1, 3)),
        "hidden": BLOCK * draw(st.integers(1, 9)),
        "inner": BLOCK * draw(st.integers(1, 9)),
        "activation": draw(st.sampled_from(["swiglu", "silu", "gelu", "relu", "identity"])),
        "fusion": draw(st.sampled_from([1, 2])),
        "limit": draw(st.sampled_from([None, 0.5])),
        "alpha": draw(st.sampled_from([1.0, 1.7])),
        "beta": draw(st.sampled_from([0.0, 1.0])),
        "normalise": draw(st.booleans()),
        "ties": draw(st.booleans()),
        "given": {n: draw(st.booleans()) for n in ("points", "bias", "gamma", "other", "residual")},
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def make_mixture(case: dict[str, Any]) -> tuple[dict[str, NDArray[Any]], dict[str, Any], dict[str, F64]]:
    """Operands, parameters, and the experts' weights as plain numbers."""
    random, given_ = np.random.default_rng(case["seed"]), case["given"]
    tokens, hidden, inner, experts = (case[n] for n in ("tokens", "hidden", "inner", "experts"))
    rows = 2 * inner if case["activation"] == "swiglu" else inner
    logits = random.normal(size=(tokens, experts))
    arrays: dict[str, NDArray[Any]] = {
        "x": random.normal(size=(1, tokens, hidden)).astype(np.float32),
        "router": (np.round(logits) if case["ties"] else logits).astype(np.float32),
    }
    plain: dict[str, F64] = {}
    for name, out, width in (("fc1", rows, hidden), ("fc2", hidden, inner)):
        codes = random.integers(0, 16, (experts, out, width), np.uint8)
        scales = random.uniform(-0.1, 0.1, (experts, out, width // BLOCK)).astype(np.float16)
        points = np.full((experts, out, width // BLOCK), 8, np.uint8)
        arrays[name] = pack(codes.reshape(-1, width), 4, 0).reshape(experts, out, -1)
        arrays[f"{name}_scales"] = scales
        if given_["bias"]:
            arrays[f"{name}_bias"] = random.normal(size=(experts, out)).astype(np.float16)
        if given_["points"]:
            points = random.integers(0, 16, points.shape, np.uint8)
            arrays[f"{name}_zero_points"] = pack(points.reshape(-1, width // BLOCK), 4, 0).reshape(experts, out, -1)
        wide = np.repeat(points.astype(np.float64), BLOCK, axis=2)
        plain[name] = (codes - wide) * np.repeat(scales.astype(np.float64), BLOCK, axis=2)
    params = {n: case[n] for n in ("k", "normalise", "activation", "fusion", "alpha", "beta", "limit")}
    params |= {"bits": 4, "block": BLOCK}
    if given_["gamma"]:
        arrays["gamma"] = random.uniform(0.5, 2, hidden).astype(np.float16)
        params["eps"] = 1e-5
    if given_["other"]:
        arrays["other"] = random.normal(size=(1, tokens, hidden)).astype(np.float32)
        arrays["other_gate"] = random.normal(size=(1, tokens, 1)).astype(np.float32)
    if given_["residual"]:
        arrays["residual"] = random.normal(size=(1, tokens, hidden)).astype(np.float32)
    return arrays, params, plain


def expected_mixture(a: dict[str, NDArray[Any]], p: dict[str, Any], plain: dict[str, F64]) -> tuple[NDArray[Any], F64]:
    """The chosen experts of each token, and y."""
    x = a["x"][0].astype(np.float64)
    if "gamma" in a:
        x = normed(x, a["gamma"].astype(np.float64), p["eps"])
    y, routed = np.zeros(x.shape), np.zeros((x.shape[0], p["k"]), np.int32)
    for t, logits in enumerate(a["router"].astype(np.float64)):
        order = sorted(range(logits.size), key=lambda e: (-logits[e], e))[: p["k"]]
        routed[t] = order
        raised = np.exp(logits - logits.max())
        shares = raised[order] / (raised[order].sum() if p["normalise"] else raised.sum())
        for e, share in zip(order, shares, strict=True):
            made = plain["fc1"][e] @ x[t] + (a["fc1_bias"][e].astype(np.float64) if "fc1_bias" in a else 0)
            if p["activation"] == "swiglu":
                gate, value = (made[0::2], made[1::2]) if p["fusion"] == 1 else np.split(made, 2)
                if p["limit"] is not None:
                    gate, value = np.minimum(gate, p["limit"]), np.clip(value, -p["limit"], p["limit"])
                made = gate * sigmoid(p["alpha"] * gate) * (value + p["beta"])
            elif p["activation"] == "silu":
                made = made * sigmoid(made)
            elif p["activation"] == "relu":
                made = np.maximum(made, 0)
            elif p["activation"] == "gelu":
                made = 0.5 * made * (1 + np.tanh(np.sqrt(2 / np.pi) * (made + 0.044715 * made**3)))
            out = plain["fc2"][e] @ made + (a["fc2_bias"][e].astype(np.float64) if "fc2_bias" in a else 0)
            y[t] += share * out
    if "other" in a:
        y += a["other"][0] * sigmoid(a["other_gate"][0].astype(np.float64))
    if "residual" in a:
        y += a["residual"][0]
    return routed, y


@settings(max_examples=60, deadline=None)
@given(case=mixtures())
def test_mixture(case: dict[str, Any]) -> None:
    arrays, params, plain = make_mixture(case)
    k, inner = case["k"], -(-case["inner"] // 128) * 128
    arrays |= {
        "routed": np.full((case["tokens"], k), -1, np.int32),
        "hidden": np.full((case["tokens"], k, inner), 99, np.float32),
        "share": np.full((case["tokens"], k), 99, np.float32),
        "y": np.full(arrays["x"].shape, 99, np.float32),
    }
    launch("mixture", arrays, **params)
    routed, y = expected_mixture(arrays, params, plain)
    np.testing.assert_array_equal(arrays["routed"], routed)
    close(arrays["y"][0], y)
    assert not arrays["hidden"][..., case["inner"] :].any()


def test_a_logit_that_is_none_shows_in_every_output_of_its_token_alone() -> None:
    case = {"experts": 9, "k": 3, "tokens": 2, "hidden": 64, "inner": 32, "activation": "swiglu", "fusion": 2}
    case |= {"limit": None, "alpha": 1.0, "beta": 0.0, "normalise": True, "ties": False, "seed": 5}
    arrays, params, _ = make_mixture(
        {**case, "given": dict.fromkeys(("points", "bias", "gamma", "other", "residual"), False)}
    )
    arrays["router"][1, 4] = np.nan
    arrays |= {"routed": np.full((2, 3), -1, np.int32), "hidden": np.zeros((2, 3, 128), np.float32)}
    arrays |= {"share": np.zeros((2, 3), np.float32), "y": np.zeros((1, 2, 64), np.float32)}
    launch("mixture", arrays, **params)
    assert np.isfinite(arrays["y"][0, 0]).all() and np.isnan(arrays["y"][0, 1]).all()
    assert 4 not in arrays["routed"][1], "numbers come before what is none"


def test_a_mixture_whose_second_product_takes_many_turns_a_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    """130 turns of 128 columns for 25 warps, and blocks that come round again."""
    monkeypatch.setattr(mixture, "PROCESSORS", 1)
    case = {"experts": 5, "k": 5, "tokens": 2, "hidden": 224, "inner": 3328, "activation": "swiglu", "fusion": 1}
    case |= {"limit": None, "alpha": 1.0, "beta": 0.0, "normalise": True, "ties": False, "seed": 8}
    case["given"] = {"points": True, "bias": True, "gamma": True, "other": False, "residual": True}
    arrays, params, plain = make_mixture(case)
    arrays |= {"routed": np.full((2, 5), -1, np.int32), "hidden": np.zeros((2, 5, 3328), np.float32)}
    arrays |= {"share": np.zeros((2, 5), np.float32), "y": np.full((1, 2, 224), 99, np.float32)}
    launch("mixture", arrays, **params)
    close(arrays["y"][0], expected_mixture(arrays, params, plain)[1])


# -- products of 4-bit codes

WIDTHS = (32, 896, 1536, 2048, 2080, 3584, 4864, 8960, 10240, 13824, 18944, 29000)
"""Columns, of every way that warps share them: one to nine turns a warp, whole turns and parts of one."""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("processors", [1, 132])
def test_products_at_every_division_of_columns(
    width: int, many: bool, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With norm, bias, residual and points: one weight, three side by side, a gated pair; rows that fill no tile."""
    monkeypatch.setattr(nbits, "PROCESSORS", processors)
    monkeypatch.setattr(nbits, "MANY_TILES", 1 if many else 1 << 30)
    random = np.random.default_rng(width)
    k, blocks = width, -(-width // BLOCK)
    for form in ("one", "three", "gated"):
        rows = {"one": (100,), "three": (70, 16, 33), "gated": (72, 72)}[form]
        x = random.normal(size=(1, 2, k)).astype(np.float32) * np.where(random.random(k) < 0.01, 100, 1).astype(
            np.float32
        )
        arrays: dict[str, NDArray[Any]] = {"x": x, "gamma": random.uniform(0.5, 2, k).astype(np.float16)}
        plain = []
        for end, n in zip(("", "2", "3"), rows, strict=False):
            codes = random.integers(0, 16, (n, blocks * BLOCK), np.uint8)
            points = random.integers(0, 16, (n, blocks), np.uint8)
            scales = random.uniform(-0.01, 0.01, (n, blocks)).astype(np.float16)
            arrays |= {f"codes{end}": pack(codes, 4, 0).reshape(n, blocks, -1), f"scales{end}": scales}
            arrays[f"zero_points{end}"] = pack(points, 4, 0)
            wide = (codes - np.repeat(points.astype(np.float64), BLOCK, axis=1)) * np.repeat(
                scales.astype(np.float64), BLOCK, axis=1
            )
            plain.append(normed(x[0].astype(np.float64), arrays["gamma"].astype(np.float64), 1e-6) @ wide[:, :k].T)
            if form != "gated":
                arrays[f"bias{end}"] = random.normal(size=n).astype(np.float16)
                plain[-1] = plain[-1] + arrays[f"bias{end}"].astype(np.float64)
        if form == "one":
            arrays["residual"] = random.normal(size=(1, 2, 100)).astype(np.float32)
            plain[0] = plain[0] + arrays["residual"][0]
        if form == "gated":
            plain = [plain[0] * sigmoid(plain[0]) * plain[1]]
        params: dict[str, Any] = {f"N{end}": n for end, n in zip(("", "2", "3"), rows, strict=False)}
        for end, made in zip(("", "2", "3"), plain, strict=False):
            arrays[f"y{end}"] = np.full((1, *made.shape), 99, np.float32)
        gated = {"gated": True} if form == "gated" else {}
        launch("matmul_nbits", arrays, **params, K=k, bits=4, block=BLOCK, eps=1e-6, **gated)
        for end, made in zip(("", "2", "3"), plain, strict=False):
            close(arrays[f"y{end}"][0], made)


# -- gated delta attention


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    groups=st.integers(1, 3),
    q_heads=st.integers(1, 2),
    dk=st.sampled_from([32, 64, 128]),
    dv=st.sampled_from([32, 64, 128]),
    tokens=st.integers(1, 4),
    scaled=st.booleans(),
    still=st.booleans(),
)
def test_delta(seed: int, groups: int, q_heads: int, dk: int, dv: int, tokens: int, scaled: bool, still: bool) -> None:
    random, heads = np.random.default_rng(seed), groups * q_heads

    def normal(*shape: int) -> NDArray[np.float32]:
        return random.normal(size=shape).astype(np.float32)

    arrays: dict[str, NDArray[Any]] = {
        "qkv": normal(1, tokens, 2 * q_heads * dk + heads * dv),
        "a": normal(1, tokens, heads),
        "b": normal(heads),
        "c": -random.uniform(0.1, 2, heads).astype(np.float32),
        "d": normal(1, tokens, heads),
        "state": normal(1, heads, dk, dv),
        "gamma": random.uniform(0.5, 2, dv).astype(np.float16),
        "gate": normal(1, tokens, heads * dv),
        "y": np.full((1, tokens, heads * dv), 99, np.float32),
    }
    if scaled:
        arrays["scale"] = np.asarray(dk**-0.5, np.float16)
    if still:
        arrays["qkv"][:, :, :dk] = 0  # a vector without a length
    s = arrays["state"][0].astype(np.float64)
    expected = np.zeros((tokens, heads, dv))
    a = {n: v.astype(np.float64) for n, v in arrays.items()}
    for t in range(tokens):
        for h in range(heads):
            kh = h // groups
            row = a["qkv"][0, t]
            q, k = row[kh * dk : (kh + 1) * dk], row[(q_heads + kh) * dk : (q_heads + kh + 1) * dk]
            v = row[2 * q_heads * dk + h * dv : 2 * q_heads * dk + (h + 1) * dv]
            q, k = (x / np.linalg.norm(x) if x.any() else x for x in (q, k))
            q = q * (float(arrays["scale"]) if scaled else 1.0)
            s[h] *= np.exp(a["c"][h] * np.log1p(np.exp(a["a"][0, t, h] + a["b"][h])))
            s[h] += np.outer(k, sigmoid(a["d"][0, t, h]) * (v - s[h].T @ k))
            gate = a["gate"][0, t, h * dv : (h + 1) * dv]
            expected[t, h] = normed(1.5 * (s[h].T @ q), a["gamma"], 1e-6) * gate * sigmoid(gate)
    launch("delta", arrays, q_heads=q_heads, kv_heads=heads, scale=1.5, eps=1e-6)
    close(arrays["y"].reshape(expected.shape), expected)
    close(arrays["state"][0], s)


# -- dense products


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.integers(1, 700),
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    rows=st.integers(1, 3),
    gamma=st.booleans(),
    half=st.booleans(),
)
def test_dense_products_of_one_x(seed: int, k: int, widths: list[int], rows: int, gamma: bool, half: bool) -> None:
    random = np.random.default_rng(seed)
    arrays: dict[str, NDArray[Any]] = {"x": random.normal(size=(1, rows, k)).astype(np.float32)}
    params: dict[str, Any] = {"K": k, "transposed": False}
    x = arrays["x"][0].astype(np.float64)
    if gamma:
        arrays["gamma"] = random.uniform(0.5, 2, k).astype(np.float16)
        params["eps"] = 1e-5
        x = normed(x, arrays["gamma"].astype(np.float64), 1e-5)
    expected = {}
    for end, n in zip(("", "2", "3"), widths, strict=False):
        weight = random.normal(size=(k, n)).astype(np.float16 if half else np.float32)
        arrays |= {f"weight{end}": weight, f"y{end}": np.full((1, rows, n), 99, np.float32)}
        params[f"N{end}"] = n
        expected[f"y{end}"] = x @ weight.astype(np.float64)
    launch("matmul", arrays, **params)
    for name, y in expected.items():
        close(arrays[name][0], y)


@pytest.mark.parametrize("gamma", [False, True])
def test_a_rows_sum_does_not_depend_on_its_neighbours(gamma: bool) -> None:
    random = np.random.default_rng(3)
    x, weight = random.normal(size=(1, 4, 96)).astype(np.float32), random.normal(size=(96, 16)).astype(np.float32)
    more: dict[str, Any] = {"gamma": np.ones(96, np.float32)} if gamma else {}

    def made(rows: NDArray[Any]) -> NDArray[Any]:
        y = np.zeros((1, rows.shape[1], 16), np.float32)
        launch("matmul", {"x": rows, "weight": weight, **more, "y": y}, K=96, N=16, transposed=False, eps=1e-5)
        return np.asarray(y[0])

    together = made(x)
    for r in range(4):
        np.testing.assert_array_equal(made(x[:, r : r + 1])[0], together[r])
