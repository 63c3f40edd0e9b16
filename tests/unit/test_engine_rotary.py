"""Rotary embeddings on their own, in both domains, against a plain turn of each pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import kernels, ops
from engine.errors import UnsupportedModel
from engine.graph import Node
from engine.lower import Lowering
from engine.plan import Step
from engine.values import Positions, Refusal
from tests.unit.engine_plain import F64, compute, stored, turn


@st.composite
def rotations(draw: st.DrawFn) -> dict[str, Any]:
    size = 2 * draw(st.integers(1, 8))
    rotated = draw(st.sampled_from([0, *range(2, size + 1, 2)]))  # 0: the whole head
    positions = draw(st.integers(1, 12))
    return {
        "size": size,
        "rotated": rotated,
        "heads": draw(st.integers(1, 4)),
        "batch": draw(st.integers(1, 2)),
        "tokens": draw(st.integers(1, 4)),
        "positions": positions,
        "offset": draw(st.integers(0, 3)),
        "wide_tables": draw(st.booleans()),  # tables as wide as half the head though only part of it turns
        "cube": draw(st.booleans()),  # x as [batch, tokens, width], not [batch, heads, tokens, size]
        "interleaved": draw(st.booleans()),
        "ids": draw(st.sampled_from(["each", "offset", "gathered"])),
        "dtype": draw(st.sampled_from(["float32", "float16"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def expected_of(x: NDArray[Any], cos: NDArray[Any], sin: NDArray[Any], c: dict[str, Any]) -> F64:
    """x [batch, tokens, heads, size] turned by tables [batch, tokens, columns], of which the first ones count."""
    half = (c["rotated"] or c["size"]) // 2
    tables = (t[:, :, :half].astype(np.float64) for t in (cos, sin))
    cos64, sin64 = tables
    each = [turn(x[b].astype(np.float64), cos64[b], sin64[b], c["interleaved"]) for b in range(x.shape[0])]
    return np.stack(each)


@settings(max_examples=150, deadline=None)
@given(c=rotations())
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_rotary(domain: str, c: dict[str, Any]) -> None:
    """All or part of each head, neighbours or halves, positions given one by one, by an offset, or as table rows."""
    random, how = np.random.default_rng(c["seed"]), c["ids"]
    if domain and how == "gathered":
        how = "each"  # onnxruntime's operator always takes ids
    if not domain and how == "offset":
        how = "gathered"  # the standard's has no offset
    batch, count = c["batch"], c["tokens"]
    x = random.normal(size=(batch, count, c["heads"], c["size"])).astype(c["dtype"])
    columns = c["size"] // 2 if c["wide_tables"] or not c["rotated"] else c["rotated"] // 2
    if not domain:
        columns = (c["rotated"] or c["size"]) // 2  # the standard asks for tables of just that width
    angles = random.uniform(-3, 3, (c["positions"] + c["offset"] + count, columns))
    cos, sin = np.cos(angles).astype(c["dtype"]), np.sin(angles).astype(c["dtype"])
    at = random.integers(0, len(cos), (batch, count))
    if how == "offset":
        at = np.broadcast_to(c["offset"] + np.arange(count), (batch, count))
    expected = expected_of(x, cos[at], sin[at], c)
    given_x = x.reshape(batch, count, -1) if c["cube"] else x.transpose(0, 2, 1, 3)
    inputs: dict[str, NDArray[Any]] = {"x": np.ascontiguousarray(given_x), "cos": cos, "sin": sin}
    if how == "gathered":
        inputs |= {"cos": cos[at], "sin": sin[at]}
    else:
        inputs["ids"] = np.array([c["offset"]]) if how == "offset" else at
    order = ["x", "ids", "cos", "sin"] if domain else ["x", "cos", "sin", *(["ids"] if "ids" in inputs else [])]
    [y] = compute(
        "RotaryEmbedding",
        inputs,
        wiring=order,
        domain=domain,
        interleaved=int(c["interleaved"]),
        rotary_embedding_dim=c["rotated"],
        num_heads=c["heads"] if c["cube"] else 0,
    )
    found = y.reshape(x.shape) if c["cube"] else y.transpose(0, 2, 1, 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6)
    passed = c["rotated"] or c["size"]
    np.testing.assert_array_equal(found[..., passed:], x[..., passed:].astype(np.float32), "the tail passes")


def test_heads_follow_from_the_tables_where_their_number_is_not_given() -> None:
    """onnxruntime's rule: num_heads 0 and rotary_embedding_dim 0 say that a head is twice a table's width."""
    random = np.random.default_rng(3)
    x, angles = random.normal(size=(1, 2, 24)).astype(np.float32), random.uniform(-3, 3, (5, 4))
    inputs = {"x": x, "ids": np.array([[4, 0]]), "cos": np.cos(angles), "sin": np.sin(angles)}
    inputs = {n: a if n == "ids" else a.astype(np.float32) for n, a in inputs.items()}
    [y] = compute("RotaryEmbedding", inputs)
    c = {"rotated": 8, "size": 8, "interleaved": False}
    cos, sin = (inputs[n][[[4, 0]]] for n in ("cos", "sin"))
    np.testing.assert_allclose(y.reshape(1, 2, 3, 8), expected_of(x.reshape(1, 2, 3, 8), cos, sin, c), atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(length=st.integers(0, 9), tokens=st.integers(1, 4), seed=st.integers(0, 2**32 - 1), interleaved=st.booleans())
def test_positions_that_count_from_the_cached_length(length: int, tokens: int, seed: int, interleaved: bool) -> None:
    """A step finds its positions on the device: the same bits as with the positions written out."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(1, tokens, 16)).astype(np.float32)
    tables = random.normal(size=(2, 13, 2)).astype(np.float32)
    params = {"layout": "tokens", "size": 8, "half": 2, "gathered": False, "interleaved": interleaved}
    made = []
    for where in ({"length": np.array([length])}, {"d": (length + np.arange(tokens))[None]}):
        y = np.zeros_like(x)
        kernels.get("rotary").run({"a": x, "b": tables[0], "c": tables[1], "y": y, **where}, params)
        made.append(y)
    assert made[0].tobytes() == made[1].tobytes()


def rotary_step(op: str, ids: tuple[int, ...], **attributes: Any) -> Step:
    """The step that a rotary node of a decoder becomes."""
    weights = {n: stored(n, np.ones((9, 4), np.float32)) for n in ("cos", "sin")}
    b = Lowering(weights, {"ids": Positions(ids)}, frozenset({"y"}), 3)
    b.make("x", "float16", (1, 3, 32))
    rule = ops.find("com.microsoft", op)
    assert rule is not None
    rule(b, Node("rotary", op, "com.microsoft", ("x", "ids", "cos", "sin"), ("y",), attributes))
    return b.close().steps[0]


def test_rotary_in_sections_is_plain_rotary_for_text() -> None:
    """Text has three equal rows of positions, so whichever row turns a section makes no difference."""
    plain = rotary_step("RotaryEmbedding", (1, 3), num_heads=2, rotary_embedding_dim=8)
    for layout in (0, 1):
        sections = {"mrope_section": [2, 1, 1], "mrope_layout": layout}
        found = rotary_step("MRotaryEmbedding", (3, 1, 3), num_heads=2, rotary_embedding_dim=8, **sections)
        assert (found.kernel, found.params, found.operands) == (plain.kernel, plain.params, plain.operands)
    assert plain.params["half"] == 4 and plain.params["size"] == 16


X, WIDE = (1, 2, 24), (5, 4)


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize(
    ("x", "table", "attributes", "says"),
    [
        (X, WIDE, {"rotary_embedding_dim": 4}, "num_heads"),
        (X, WIDE, {"num_heads": 5}, "5 heads"),
        (X, WIDE, {"num_heads": 2}, "width of 12"),
        (X, WIDE, {"num_heads": 4}, "width of 6"),
        (X, WIDE, {"num_heads": 3, "rotary_embedding_dim": 10}, "width of 10"),
        (X, WIDE, {"num_heads": 3, "rotary_embedding_dim": 3}, "width of 3"),
        (X, (5, 1), {"num_heads": 3, "rotary_embedding_dim": 4}, "width of 4"),
        ((2, 24), WIDE, {"num_heads": 3}, "tables"),
        ((1, 1, 2, 7), WIDE, {}, "width of 7"),
    ],
)
def test_widths_that_do_not_fit_are_refused(
    domain: str, x: tuple[int, ...], table: tuple[int, ...], attributes: dict[str, Any], says: str
) -> None:
    inputs: dict[str, NDArray[Any]] = {n: np.ones(s, np.float32) for n, s in (("x", x), ("cos", table), ("sin", table))}
    inputs["ids"] = np.zeros((1, 2), np.int64)
    order = ["x", "ids", "cos", "sin"] if domain else ["x", "cos", "sin", "ids"]
    with pytest.raises(UnsupportedModel) as caught:
        compute("RotaryEmbedding", inputs, wiring=order, domain=domain, **attributes)
    assert says in caught.value.message


def test_the_standards_operator_does_not_guess_heads() -> None:
    inputs: dict[str, NDArray[Any]] = {"x": np.ones(X, np.float32), "cos": np.ones(WIDE, np.float32)}
    inputs |= {"sin": inputs["cos"], "ids": np.zeros((1, 2), np.int64)}
    with pytest.raises(UnsupportedModel, match="num_heads"):
        compute("RotaryEmbedding", inputs, domain="")


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.zeros((1, 3), np.int64), "[1, 3] are neither [1, 2] nor [1]"),
        (np.zeros(2, np.int64), "[2] are neither"),
        (np.zeros((1, 2), np.float32), "type float32"),
    ],
)
def test_positions_that_do_not_fit_are_refused(domain: str, ids: NDArray[Any], says: str) -> None:
    inputs: dict[str, NDArray[Any]] = {"x": np.ones(X, np.float32), "ids": ids}
    inputs |= {n: np.ones(WIDE, np.float32) for n in ("cos", "sin")}
    order = ["x", "ids", "cos", "sin"] if domain else ["x", "cos", "sin", "ids"]
    with pytest.raises(UnsupportedModel) as caught:
        compute("RotaryEmbedding", inputs, wiring=order, domain=domain, num_heads=3)
    assert says in caught.value.message


def test_a_scale_is_refused() -> None:
    """onnxruntime's kernels know the attribute and leave it out: what an exporter means by one is not known."""
    with pytest.raises(Refusal, match=r"scale = 2.0 is not served"):
        rotary_step("RotaryEmbedding", (1, 3), num_heads=2, rotary_embedding_dim=8, scale=2.0)
    assert rotary_step("RotaryEmbedding", (1, 3), num_heads=2, rotary_embedding_dim=8, scale=1.0).params
