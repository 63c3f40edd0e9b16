"""Quantised weights beside MatMulNBits: DequantizeLinear before a product, and 4-bit tables that rows come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.bind import lower
from engine.conformance import run_nodes
from engine.errors import UnsupportedModel
from engine.graph import Graph, Node, Weight
from tests.unit.engine_plain import F64, compute, pack, stored
from tests.unit.engine_rig import Bench
from tests.unit.engine_small import MICROSOFT, VOCABULARY, Small

RANGES = {"int4": (-8, 8), "uint4": (0, 16), "int8": (-128, 128), "uint8": (0, 256)}


def drawn(random: np.random.Generator, kind: str, *shape: int) -> NDArray[Any]:
    """Codes of a type, all values possible."""
    return random.integers(*RANGES[kind], shape).astype(np.int16)


def product(
    x: NDArray[Any], weights: dict[str, Weight], points: bool, turned: bool = False, **attributes: Any
) -> NDArray[Any]:
    """x @ DequantizeLinear(codes, scales, points)."""
    inputs = ("codes", "scales", *(["points"] if points else []))
    nodes = [Node("dequantize", "DequantizeLinear", "", inputs, ("w",), attributes)]
    nodes += [Node("turn", "Transpose", "", ("w",), ("t",), {})] if turned else []
    nodes.append(Node("product", "MatMul", "", ("x", "t" if turned else "w"), ("y",), {}))
    [y] = run_nodes(tuple(nodes), weights, {"x": x}, ("y",))
    return y


def stored_form(kind: str, codes: NDArray[Any], points: NDArray[Any], scales: Weight) -> dict[str, Weight]:
    """The three initialisers of a DequantizeLinear."""
    return {"codes": stored("codes", codes, kind), "points": stored("points", points, kind), "scales": scales}


@st.composite
def dequantized(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "kind": draw(st.sampled_from(list(RANGES))),
        "K": draw(st.integers(1, 45)),
        "N": draw(st.integers(1, 9)),
        "rows": draw(st.integers(1, 3)),
        "block": draw(st.sampled_from([1, 2, 7, 16, 32, 64])),
        "axis": draw(st.sampled_from([0, -2])),
        "points": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def close(y: NDArray[Any], x: NDArray[Any], w: F64) -> None:
    """A product in float32 of these very numbers: no half type in between."""
    wide = x.astype(np.float64)
    allowed = (w.shape[0] + 2) * 2.0**-23 * (np.abs(wide) @ np.abs(w)) + 1e-30
    assert (np.abs(y - wide @ w) <= allowed).all()


@settings(max_examples=150, deadline=None)
@given(c=dequantized())
def test_a_product_with_codes_in_blocks(c: dict[str, Any]) -> None:
    """Odd counts end in half a byte, rows begin in one, the last block is short: each code meets its own scale."""
    random = np.random.default_rng(c["seed"])
    k, n, block = c["K"], c["N"], c["block"]
    blocks = -(-k // block)
    codes, points = drawn(random, c["kind"], k, n), drawn(random, c["kind"], blocks, n)
    scales = stored("scales", random.uniform(-1, 1, (blocks, n)), c["dtype"])
    weights = stored_form(c["kind"], codes, points, scales)
    if c["kind"] in ("int4", "uint4"):
        assert weights["codes"].nbytes == -(-k * n // 2)
    x = random.normal(size=(1, c["rows"], k)).astype(np.float32)
    w = np.zeros((k, n))
    for row in range(k):
        for column in range(n):
            zero = points[row // block, column] if c["points"] else 0
            w[row, column] = (float(codes[row, column]) - zero) * float(scales.array()[row // block, column])
    close(product(x, weights, c["points"], axis=c["axis"], block_size=block), x, w)


@settings(max_examples=60, deadline=None)
@given(c=dequantized(), by_axis=st.booleans())
def test_a_product_with_codes_by_column_or_by_tensor(c: dict[str, Any], by_axis: bool) -> None:
    """Without blocks: one scale a column, or one in all. What is known is computed at build, and not in a half type."""
    random = np.random.default_rng(c["seed"])
    k, n = c["K"], c["N"]
    shape = (n,) if by_axis else ()
    codes, points = drawn(random, c["kind"], k, n), drawn(random, c["kind"], *shape)
    scales = stored("scales", random.uniform(0.1, 1, shape), c["dtype"])
    weights = stored_form(c["kind"], codes, points, scales)
    x = random.normal(size=(1, c["rows"], k)).astype(np.float32)
    w = (codes.astype(np.float64) - (points if c["points"] else 0)) * scales.array().astype(np.float64)
    close(product(x, weights, c["points"], axis=1), x, w)


CODES, SCALES = np.ones((4, 3), np.int16), np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("changed", "attributes", "says"),
    [
        ({}, {"axis": 1}, "scales [2, 3]"),
        ({}, {"axis": 0, "block_size": 3}, None),
        ({}, {"axis": 0, "block_size": 1}, "scales [2, 3]"),
        ({"points": stored("points", np.ones((2, 3)), "uint8")}, {"axis": 0}, "zero points uint8"),
        ({"points": stored("points", np.ones((1, 3)), "int4")}, {"axis": 0}, "zero points int4[1, 3]"),
        ({"scales": stored("scales", SCALES, "int8")}, {"axis": 0}, "scales int8"),
        ({"codes": stored("codes", np.ones((4, 3)), "int32")}, {"axis": 0, "points": False}, "codes int32"),
        ({"codes": stored("codes", np.ones((5, 3)), "int4")}, {"axis": 0}, "scales [2, 3] are not [3, 3]"),
        ({"codes": stored("codes", np.ones((4, 6)), "int4"), "scales": stored("scales", np.ones((4, 3), np.float32))},
         {"axis": 1, "points": False}, "along axis 1"),
    ],
)  # fmt: skip
def test_blocks_that_do_not_fit_are_refused(
    changed: dict[str, Weight], attributes: dict[str, Any], says: str | None
) -> None:
    weights = {"codes": stored("codes", CODES, "int4"), "scales": stored("scales", SCALES)}
    weights |= {"points": stored("points", np.ones((2, 3)), "int4"), **changed}
    given_ = {"block_size": 2, **attributes}
    points = given_.pop("points", True)
    x = np.ones((1, 1, weights["codes"].shape[0]), np.float32)
    if says is None:
        assert product(x, weights, points, **given_).shape == (1, 1, 3)
        return
    with pytest.raises(UnsupportedModel) as caught:
        product(x, weights, points, **given_)
    assert says in caught.value.message


def test_codes_in_blocks_that_something_else_reads_are_refused() -> None:
    weights = {"codes": stored("codes", CODES, "int4"), "scales": stored("scales", SCALES)}
    with pytest.raises(UnsupportedModel, match=r"turn \(ai.onnx::Transpose\)"):
        product(np.ones((1, 1, 3), np.float32), weights, False, turned=True, axis=0, block_size=2)


@st.composite
def quantised_tables(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["int4", "uint4", "packed 4", "packed 8"]))
    width = draw(st.integers(1, 40))
    return {
        "kind": kind,
        "width": 2 * width if kind == "packed 4" else width,  # a row of bytes holds an even number of half ones
        "block": draw(st.sampled_from([16, 32])),
        "points": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["float32", "float16"])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def table_of(c: dict[str, Any], random: np.random.Generator) -> tuple[dict[str, Weight], NDArray[np.float32]]:
    """The initialisers of a quantised table, and the numbers that they stand for."""
    width, blocks = c["width"], -(-c["width"] // c["block"])
    packed, bits = c["kind"].startswith("packed"), 8 if c["kind"].endswith("8") else 4
    kind = "uint8" if bits == 8 else "uint4" if packed else c["kind"]
    codes, points = drawn(random, kind, VOCABULARY, width), drawn(random, kind, VOCABULARY, blocks)
    scales = random.uniform(-1, 1, (VOCABULARY, blocks)).astype(c["dtype"])
    if packed:
        parts = (("table", codes, 0), ("points", points, int(random.integers(0, 16))))
        weights = {n: stored(n, pack(a.astype(np.uint8), bits, padding)) for n, a, padding in parts}
    else:
        weights = {n: stored(n, a, kind) for n, a in (("table", codes), ("points", points))}
    weights["scales"] = stored("scales", scales)
    if not c["points"]:
        points = np.full(points.shape, (1 << (bits - 1)) if packed else 0)
    of = np.arange(width) // c["block"]
    return weights, ((codes - points[:, of]).astype(np.float32) * scales[:, of].astype(np.float32)).astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(c=quantised_tables())
def test_rows_of_a_quantised_table_are_those_of_the_table_written_out(c: dict[str, Any]) -> None:
    """A whole decoder over either gives the same bits: typed tables default to zero, packed bytes to the middle."""
    random = np.random.default_rng(c["seed"])
    weights, plain = table_of(c, random)
    found = []
    for quantised in (True, False):
        s = Small(hidden=c["width"], seed=1)
        if quantised:
            s.weights |= weights
            wired = ("table", "input_ids", "scales", *(["points"] if c["points"] else []))
            attributes = {"block_size": c["block"], "bits": 8 if c["kind"] == "packed 8" else 4}
            x = s.add("GatherBlockQuantized", *wired, domain=MICROSOFT, gather_axis=0, quantize_axis=1, **attributes)
        else:
            x = s.add("Gather", s.weight("embedding", plain), "input_ids")
        s.head(s.attended(x))
        bench = Bench(s.graph(), rows=(VOCABULARY,))
        bench.prefill(list(range(VOCABULARY))[::-1])
        found.append(bench.prompt_logits(VOCABULARY))
        bench.force(VOCABULARY - 1)
        found.append(bench.logits())
    assert found[0].tobytes() == found[2].tobytes() and found[1].tobytes() == found[3].tobytes()


def gathered(changed: dict[str, Weight], **attributes: Any) -> Graph:
    """A decoder over a typed int4 table of 12 rows and 33 columns in blocks of 16, with something changed."""
    shapes = {"table": (VOCABULARY, 33), "points": (VOCABULARY, 3)}
    s = Small(hidden=33)
    s.weights |= {n: stored(n, np.ones(shape), "int4") for n, shape in shapes.items()}
    s.weights["scales"] = stored("scales", np.ones((VOCABULARY, 3), np.float32))
    s.weights |= changed
    x = s.add(
        "GatherBlockQuantized",
        *("table", "input_ids", "scales", "points"),
        domain=MICROSOFT,
        **{"block_size": 16, **attributes},
    )
    s.head(s.attended(x))
    return s.graph()


@pytest.mark.parametrize(
    ("name", "array", "kind", "attributes", "says"),
    [
        ("points", np.ones((VOCABULARY, 3)), "int4", {}, None),
        ("points", np.ones((VOCABULARY, 3)), "uint4", {}, "zero points uint4[12, 3]"),
        ("points", np.ones((VOCABULARY, 2)), "int4", {}, "zero points int4[12, 2]"),
        ("points", np.ones((VOCABULARY, 3)), "uint8", {}, "zero points uint8"),
        ("scales", np.ones((VOCABULARY, 2)), "float32", {}, "scales [12, 2]"),
        ("scales", np.ones((VOCABULARY, 3)), "int8", {}, "scales [12, 3]"),
        ("table", np.ones((VOCABULARY - 1, 33)), "int4", {}, "11 rows for a vocabulary of 12"),
        ("table", np.ones((VOCABULARY, 33)), "int8", {}, "table int8"),
        ("table", np.ones((VOCABULARY, 3, 11)), "int4", {}, "table int4[12, 3, 11]"),
        ("points", np.ones((VOCABULARY, 3)), "int4", {"bits": 2}, "2 bits"),
        ("points", np.ones((VOCABULARY, 3)), "int4", {"bits": 8}, "8 bits"),
        ("points", np.ones((VOCABULARY, 3)), "int4", {"gather_axis": 1}, "along the last axis"),
        ("points", np.ones((VOCABULARY, 3)), "int4", {"quantize_axis": 0}, "along the last axis"),
        ("points", np.ones((VOCABULARY, 3)), "int4", {"block_size": 8}, "block_size is 8"),
    ],
)
def test_tables_that_do_not_fit_are_refused(
    name: str, array: NDArray[Any], kind: str, attributes: dict[str, int], says: str | None
) -> None:
    graph = gathered({name: stored(name, array, kind)}, **attributes)
    if says is None:
        assert lower(graph, 1).gather_bytes == 17 + 3 * 4 + 2  # half a byte beyond sixteen, and beyond one
        return
    with pytest.raises(UnsupportedModel) as caught:
        lower(graph, 1)
    assert says in caught.value.message


# -- MatMulNBits as a node


def nbits(changed: dict[str, Weight], **attributes: Any) -> NDArray[Any]:
    """Three columns of 107 blocks of 16 in 4 bits, on ones, with something changed."""
    weights = {
        "codes": stored("codes", np.full((3, 107, 8), 0x99, np.uint8)),
        "scales": stored("scales", np.ones((3, 107), np.float32)),
        **changed,
    }
    given_ = {"K": 107 * 16, "N": 3, "bits": 4, "block_size": 16, **attributes}
    wiring = ("x", "codes", "scales", *(["points"] if "points" in weights else []))
    x = np.ones((1, 1, given_["K"]), np.float32)
    [y] = compute("MatMulNBits", {"x": x}, wiring=wiring, weights=weights, **given_)
    return y


def test_field_47_zero_points_absent_packed_and_in_float_for_107_blocks() -> None:
    """A row of packed ones takes 54 bytes; the formula that has N * 107 / 2 of them in all is off by one and a half."""
    packed = stored("points", np.full((3, 54), 0x77, np.uint8))
    floats = stored("points", np.full((3, 107), 7.5, np.float32))
    for points, each in (({}, 1.0), ({"points": packed}, 2.0), ({"points": floats}, 1.5)):
        np.testing.assert_allclose(nbits(points), 107 * 16 * each)


@pytest.mark.parametrize(
    ("name", "array", "says"),
    [
        ("points", np.ones(161, np.uint8), "zero points 'points' are uint8[161], not 162 elements"),
        ("points", np.ones((3, 53), np.uint8), "not 162 elements"),
        ("points", np.ones((3, 107), np.uint8), "not 162 elements"),
        ("points", np.ones((3, 54), np.float32), "not 162 elements"),
        ("points", np.ones((3, 54), np.int8), "zero points 'points' are int8"),
        ("scales", np.ones((3, 106), np.float32), "scales"),
        ("codes", np.ones((3, 107, 7), np.uint8), "codes"),
    ],
)
def test_field_47_a_tensor_of_the_wrong_size_is_refused(name: str, array: NDArray[Any], says: str) -> None:
    says = says.replace("not 162 elements", "not 321 elements") if array.dtype == np.float32 else says
    with pytest.raises(UnsupportedModel) as caught:
        nbits({name: stored(name, array)})
    assert says in caught.value.message


@pytest.mark.parametrize("bits", [1, 2, 3, 5, 6, 7, 16])
def test_field_47_bits_that_are_not_served_are_refused_and_never_zeros(bits: int) -> None:
    with pytest.raises(UnsupportedModel, match=f"{bits} bits are not served"):
        nbits({}, bits=bits)


@settings(max_examples=60, deadline=None)
@given(
    block=st.sampled_from([16, 32, 64, 128, 256, 512]),
    bits=st.sampled_from([4, 8]),
    k=st.integers(1, 1100),
    n=st.integers(1, 5),
    form=st.sampled_from(["none", "packed", "float"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_field_47_every_block_size_and_form_of_zero_point(
    block: int, bits: int, k: int, n: int, form: str, seed: int
) -> None:
    """From node to result, with garbage behind K and in the half byte that fills a row up."""
    random = np.random.default_rng(seed)
    blocks, top = -(-k // block), (1 << bits) - 1
    codes = random.integers(0, top + 1, (n, blocks * block)).astype(np.uint8)
    scales = random.uniform(-1, 1, (n, blocks)).astype(np.float32)
    zero = np.full((n, blocks), float(1 << (bits - 1)))
    weights = {"scales": stored("scales", scales)}
    weights["codes"] = stored("codes", pack(codes, bits).reshape(n, blocks, block * bits // 8))
    if form == "packed":
        points = random.integers(0, top + 1, (n, blocks)).astype(np.uint8)
        weights["points"], zero = stored("points", pack(points, bits, int(random.integers(16)))), points.astype(float)
    elif form == "float":
        weights["points"] = stored("points", random.uniform(0, top, (n, blocks)).astype(np.float32))
        zero = weights["points"].array().astype(np.float64)
    of = np.arange(k) // block
    w = (codes[:, :k].astype(np.float64) - zero[:, of]) * scales[:, of].astype(np.float64)
    x = random.normal(size=(1, 2, k)).astype(np.float32)
    wiring = ("x", "codes", "scales", *(["points"] if form != "none" else []))
    attributes: dict[str, Any] = {"K": k, "N": n, "bits": bits, "block_size": block}
    [y] = compute("MatMulNBits", {"x": x}, wiring=wiring, weights=weights, **attributes)
    close(y, x, w.T)
