"""Mixtures of experts, quantised and not, against plain float64: routing, ties, activations, blocks and zero points."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.errors import UnsupportedModel
from engine.graph import Weight
from tests.unit.engine_plain import F64, compute, pack, silu, stored

ACTIVATIONS = ("identity", "relu", "silu", "gelu", "swiglu")


def plain_route(logits: F64, k: int, normalise: bool) -> dict[int, float]:
    """Softmax over all experts at the k largest, or over those alone; of equal ones the lower number comes first."""
    chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:k]
    among = chosen if normalise else range(len(logits))
    total = sum(math.exp(logits[e] - logits.max()) for e in among)
    return {e: math.exp(logits[e] - logits.max()) / total for e in chosen}


def plain_activation(x: F64, c: dict[str, Any]) -> F64:
    """The experts' activation on one vector."""
    match c["activation"]:
        case "relu":
            return np.maximum(x, 0)
        case "silu":
            return silu(x)
        case "gelu":
            return np.array([0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) for v in x])
        case "swiglu":
            gate, value = (x[0::2], x[1::2]) if c["fusion"] == 1 else (x[: len(x) // 2], x[len(x) // 2 :])
            if c["limit"] is not None:
                gate, value = np.minimum(gate, c["limit"]), np.clip(value, -c["limit"], c["limit"])
            return np.asarray(gate / (1 + np.exp(-c["alpha"] * gate)) * (value + c["beta"]))
    return x


def plain_experts(x: F64, logits: F64, w1: F64, b1: F64, w2: F64, b2: F64, c: dict[str, Any]) -> F64:
    """Tokens [tokens, hidden] through their experts; w1 [E, rows, hidden], w2 [E, hidden, inner]."""
    y = np.zeros((x.shape[0], w2.shape[1]))
    for t in range(x.shape[0]):
        for e, weight in plain_route(logits[t], c["k"], c["normalise"]).items():
            y[t] += weight * (w2[e] @ plain_activation(w1[e] @ x[t] + b1[e], c) + b2[e])
    return y


@st.composite
def mixtures(draw: st.DrawFn) -> dict[str, Any]:
    experts = draw(st.integers(1, 5))
    return {
        "experts": experts,
        "k": draw(st.integers(1, experts)),
        "hidden": 2 * draw(st.integers(1, 24)),
        "inner": 2 * draw(st.integers(1, 24)),
        "tokens": draw(st.integers(1, 3)),
        "cube": draw(st.booleans()),  # x as [1, tokens, hidden], the router as [tokens, experts]
        "normalise": draw(st.booleans()),
        "activation": draw(st.sampled_from(ACTIVATIONS)),
        "fusion": draw(st.sampled_from([1, 2])),
        "alpha": draw(st.sampled_from([1.0, 1.702])),
        "beta": draw(st.sampled_from([0.0, 1.0])),
        "limit": draw(st.sampled_from([None, 0.5])),
        "bias": draw(st.booleans()),
        "ties": draw(st.booleans()),
        "bits": draw(st.sampled_from([4, 8])),
        "block": draw(st.sampled_from([0, 16, 32])),
        "points": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "float16"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def attributes(c: dict[str, Any]) -> dict[str, Any]:
    """A case's attributes as an exporter writes them."""
    made: dict[str, Any] = {
        "k": c["k"],
        "activation_type": c["activation"],
        "normalize_routing_weights": int(c["normalise"]),
        "activation_alpha": c["alpha"],
        "activation_beta": c["beta"],
    }
    made |= {"swiglu_fusion": c["fusion"]} if c["activation"] == "swiglu" else {}
    return made | ({} if c["limit"] is None else {"swiglu_limit": c["limit"]})


def tokens(c: dict[str, Any]) -> tuple[dict[str, NDArray[Any]], F64, F64]:
    """x and router logits: as inputs, and plain. With ties, logits are whole numbers, equal ones among them."""
    random = np.random.default_rng(c["seed"])
    x = random.normal(size=(c["tokens"], c["hidden"])).astype(c["dtype"])
    logits = random.normal(size=(c["tokens"], c["experts"])).astype(c["dtype"])
    if c["ties"]:
        logits = random.integers(0, 2, logits.shape).astype(c["dtype"])
    given_ = {"x": x[None] if c["cube"] else x, "router": logits}
    return given_, x.astype(np.float64), logits.astype(np.float64)


def biases(c: dict[str, Any], random: np.random.Generator) -> tuple[dict[str, Weight], F64, F64]:
    """Biases of both products: as initialisers, and plain; zeros where the case has none."""
    rows = c["inner"] * (2 if c["activation"] == "swiglu" else 1)
    made = [random.normal(size=(c["experts"], n)).astype(c["dtype"]) for n in (rows, c["hidden"])]
    if not c["bias"]:
        return {}, np.zeros(made[0].shape), np.zeros(made[1].shape)
    weights = {n: stored(n, a) for n, a in zip(("b1", "b2"), made, strict=True)}
    return weights, made[0].astype(np.float64), made[1].astype(np.float64)


def quantised(
    c: dict[str, Any], n: int, rows: int, width: int, random: np.random.Generator
) -> tuple[dict[str, Weight], F64]:
    """One product's experts: initialisers w, s and z with number `n`, and the weights that they stand for."""
    e, bits, block = c["experts"], c["bits"], c["block"] or width
    blocks = -(-width // block)
    codes = random.integers(0, 1 << bits, (e, rows, width), np.uint8)
    scales = (random.uniform(0.2, 1, (e, rows, blocks)) / (1 << bits)).astype(c["dtype"])
    made = {
        f"w{n}": stored(f"w{n}", pack(codes, bits)),
        f"s{n}": stored(f"s{n}", scales if c["block"] else scales[..., 0]),
    }
    points = np.full((e, rows, blocks), 1 << (bits - 1), np.uint8)
    if c["points"] and (c["block"] or bits == 8):
        points = random.integers(0, 1 << bits, points.shape, np.uint8)
        held = pack(points, bits, int(random.integers(0, 16)))
        made[f"z{n}"] = stored(f"z{n}", held if c["block"] else held[..., 0])
    plain = np.zeros((e, rows, width))
    for column in range(width):
        b = column // block
        plain[..., column] = (codes[..., column].astype(np.float64) - points[..., b]) * scales[..., b]
    return made, plain


@settings(max_examples=150, deadline=None)
@given(c=mixtures())
def test_quantised_experts(c: dict[str, Any]) -> None:
    """Widths that are no multiple of the block too: the last block is short, in both products."""
    random = np.random.default_rng(c["seed"] + 1)
    rows = c["inner"] * (2 if c["activation"] == "swiglu" else 1)
    inputs, x, logits = tokens(c)
    first, w1 = quantised(c, 1, rows, c["hidden"], random)
    second, w2 = quantised(c, 2, c["hidden"], c["inner"], random)
    bias, b1, b2 = biases(c, random)
    weights = {**first, **second, **bias}
    names = ["w1", "s1", "b1", "w2", "s2", "b2", "", "", "", "z1", "z2"]
    wiring = ["x", "router", *(n if n in weights else "" for n in names)]
    more = {"expert_weight_bits": c["bits"], "weights_prepacked": 0} | (
        {"block_size": c["block"]} if c["block"] else {}
    )
    [y] = compute("QMoE", inputs, wiring=wiring, weights=weights, **attributes(c), **more)
    expected = plain_experts(x, logits, w1, b1, w2, b2, c)
    assert y.shape == inputs["x"].shape
    np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(c=mixtures())
def test_experts_in_floats(c: dict[str, Any]) -> None:
    random = np.random.default_rng(c["seed"] + 1)
    rows = c["inner"] * (2 if c["activation"] == "swiglu" else 1)
    inputs, x, logits = tokens(c)
    w1 = random.normal(size=(c["experts"], rows, c["hidden"])).astype(c["dtype"])
    w2 = random.normal(size=(c["experts"], c["hidden"], c["inner"])).astype(c["dtype"])
    bias, b1, b2 = biases(c, random)
    weights = {"w1": stored("w1", w1), "w2": stored("w2", w2), **bias}
    wiring = ["x", "router", "w1", "b1" if bias else "", "w2", "b2" if bias else ""]
    [y] = compute("MoE", inputs, wiring=wiring, weights=weights, **attributes(c))
    expected = plain_experts(x, logits, w1.astype(np.float64), b1, w2.astype(np.float64), b2, c)
    size = np.abs(expected).max()
    np.testing.assert_allclose(y.reshape(expected.shape), expected, rtol=1e-4, atol=2e-6 * size + 1e-5)


@pytest.mark.parametrize("normalise", [0, 1])
@pytest.mark.parametrize(
    ("logits", "k", "chosen"),
    [
        ([1, 1, 1, 1], 1, {0}),
        ([1, 1, 1, 1], 2, {0, 1}),
        ([0, 2, 2, 2], 2, {1, 2}),
        ([2, 0, 2, 2], 2, {0, 2}),
        ([-1, -1, 3, -1], 3, {0, 1, 2}),
        ([0.0, -0.0, 1, 1], 3, {0, 2, 3}),
    ],
)
def test_ties_go_to_the_lower_expert(logits: list[float], k: int, chosen: set[int], normalise: int) -> None:
    """Expert e gives 10^e whatever the token: the sum shows who took part and with which weight."""
    gives = np.array([10.0**e for e in range(4)], np.float32)
    weights = {
        "w1": stored("w1", np.zeros((4, 2, 2), np.float32)),
        "b1": stored("b1", np.ones((4, 2), np.float32)),
        "w2": stored("w2", np.repeat(gives, 4).reshape(4, 2, 2) / 2),
    }
    codes = {
        "w1": stored("w1", np.full((4, 2, 2), 128, np.uint8)),  # 128 stands for nothing
        "s1": stored("s1", np.ones((4, 2), np.float32)),
        "b1": weights["b1"],
        "w2": stored("w2", np.full((4, 2, 2), 129, np.uint8)),
        "s2": stored("s2", np.repeat(gives, 2).reshape(4, 2) / 2),
    }
    inputs = {"x": np.ones((1, 2), np.float32), "router": np.array([logits], np.float32)}
    routed: dict[str, Any] = {"k": k, "normalize_routing_weights": normalise}
    [y] = compute("MoE", inputs, wiring=["x", "router", "w1", "b1", "w2"], weights=weights, **routed)
    [q] = compute(
        "QMoE",
        inputs,
        wiring=["x", "router", "w1", "s1", "b1", "w2", "s2"],
        weights=codes,
        expert_weight_bits=8,
        weights_prepacked=0,
        **routed,
    )
    mass = np.exp(np.array(logits))
    total = sum(mass[e] for e in chosen) if normalise else mass.sum()
    for found in (y, q):
        np.testing.assert_allclose(found[0], sum(mass[e] / total * gives[e] for e in chosen), rtol=1e-6)


CASE = {"w1": (2, 8, 16), "s1": (2, 8, 2), "z1": (2, 8, 1), "w2": (2, 32, 4), "s2": (2, 32, 1), "z2": (2, 32, 1)}


def refused(changed: dict[str, Weight | None], **more: Any) -> str:
    """Why two experts of 32 by 8 in 4 bits and blocks of 16 are not served with these initialisers."""
    kinds = {"w": np.uint8, "s": np.float32, "z": np.uint8}
    whole = {n: stored(n, np.ones(s, kinds[n[0]])) for n, s in CASE.items()}
    weights = {n: w for n, w in {**whole, **changed}.items() if w is not None}
    inputs = {"x": np.ones((1, 1, 32), np.float32), "router": np.ones((1, 2), np.float32)}
    names = ["w1", "s1", "", "w2", "s2", "", "", "", "", "z1", "z2"]
    wiring = ["x", "router", *(n if n in weights else "" for n in names)]
    given_ = {"activation_type": "relu", "block_size": 16, **more}
    with pytest.raises(UnsupportedModel) as caught:
        compute("QMoE", inputs, wiring=wiring, weights=weights, **{n: v for n, v in given_.items() if v is not None})
    assert "QMoE" in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("w1", np.ones((2, 8, 16), np.int8), "codes 'w1' are int8"),
        ("w1", np.ones((2, 16, 8), np.uint8), "not in raw rows"),
        ("w2", np.ones((2, 4, 32), np.uint8), "not in raw rows"),
        ("w1", np.ones((8, 16), np.uint8), "not in raw rows"),
        ("s1", np.ones((2, 8, 1), np.float32), "scales 's1'"),
        ("s1", np.ones((2, 8, 2), np.uint8), "scales 's1'"),
        ("z1", np.ones((2, 8, 2), np.uint8), "zero points 'z1'"),
        ("z1", np.ones((2, 8, 1), np.int8), "zero points 'z1'"),
        ("z2", np.ones((2, 32, 1), np.float32), "zero points 'z2'"),
    ],
)
def test_experts_of_sizes_that_do_not_fit_are_refused(name: str, array: NDArray[Any], says: str) -> None:
    assert says in refused({name: stored(name, array)})


@pytest.mark.parametrize(
    ("changed", "more", "says"),
    [
        ({}, {"expert_weight_bits": 2}, "2 bits"),
        ({}, {"fc2_expert_weight_bits": 8}, "fc2_expert_weight_bits = 8 beside expert_weight_bits = 4"),
        ({}, {"fc1_expert_weight_bits": 8}, "fc1_expert_weight_bits = 8 beside expert_weight_bits = 4"),
        ({}, {"quant_type": "fp4"}, "quant_type 'fp4'"),
        ({}, {"weights_prepacked": 1}, "raw int4 and int8 ones are served"),
        ({}, {"use_sparse_mixer": 1}, "sparse mixer"),
        ({}, {"activation_type": "tanh"}, "'tanh'"),
        ({}, {"activation_type": "swiglu"}, "not in raw rows"),
        ({}, {"k": 3}, "3 experts"),
        ({}, {"block_size": -16}, "block_size is -16"),
    ],
)
def test_experts_that_are_not_served_are_refused(changed: dict[str, Any], more: dict[str, Any], says: str) -> None:
    assert says in refused(changed, **more)


def test_square_experts_that_may_be_laid_out_either_way_are_refused() -> None:
    """8 by 8 without a gate: raw rows and a kernel's own layout have one shape, so the exporter must say which."""
    square: dict[str, Weight | None] = {f"w{i}": stored(f"w{i}", np.ones((2, 8, 4), np.uint8)) for i in (1, 2)}
    square |= {f"s{i}": stored(f"s{i}", np.ones((2, 8, 1), np.float32)) for i in (1, 2)}
    square |= {"z1": None, "z2": None}
    for said in ({}, {"weights_prepacked": -1}):
        assert "export with weights_prepacked=0" in refused(square, **said)
    assert "do not fit [1, 1, 32]" in refused(square, weights_prepacked=0), "then only the input is wrong"


def test_zero_points_by_row_in_half_bytes_are_refused() -> None:
    """They are packed along the rows, not along the columns as those by block are."""
    by_row = {n: stored(n, np.ones(s, np.float32)) for n, s in (("s1", (2, 8)), ("s2", (2, 32)))}
    points = {n: stored(n, np.ones(s, np.uint8)) for n, s in (("z1", (2, 4)), ("z2", (2, 16)))}
    assert "zero points by row" in refused({**by_row, **points}, block_size=None)
