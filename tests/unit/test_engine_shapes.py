"""Operators given shapes and types that do not hold together: refused by name at load, never found out by a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.bind import lower
from engine.errors import DeviceFailure, UnsupportedModel
from engine.graph import Weight
from tests.unit.engine_plain import compute, stored
from tests.unit.engine_small import HIDDEN, VOCABULARY, Small


def of(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Ones."""
    return np.ones(shape, dtype)


CASES: dict[str, tuple[str, dict[str, NDArray[Any]], dict[str, Any], str]] = {
    "indices in floats": ("Gather", {"x": of(3), "i": of(1)}, {}, "indices are of type float32"),
    "elements by floats": ("GatherElements", {"x": of(3), "i": of(1)}, {}, "type float32"),
    "elements of another rank": ("GatherElements", {"x": of(3, 2), "i": of(1, dtype=np.int64)}, {}, "indices [1]"),
    "elements beyond": ("GatherElements", {"x": of(3, 2), "i": of(1, 3, dtype=np.int64)}, {}, "indices [1, 3]"),
    "scattered too few": (
        "ScatterElements",
        {"x": of(3, 2), "i": of(2, 2, dtype=np.int64), "u": of(2, 1)},
        {},
        "updates float32[2, 1]",
    ),
    "scattered of a type": (
        "ScatterElements",
        {"x": of(3), "i": of(1, dtype=np.int64), "u": of(1, dtype=np.int32)},
        {},
        "updates int32[1]",
    ),
    "no matrices": ("Gemm", {"a": of(1, 2, 3), "b": of(3, 4)}, {}, "no matrices"),
    "inner extents": ("Gemm", {"a": of(2, 3), "b": of(4, 3)}, {}, "do not fit"),
    "types of a product": ("Gemm", {"a": of(2, 3), "b": of(3, 4, dtype=np.int32)}, {}, "do not fit"),
    "what is added": ("Gemm", {"a": of(2, 3), "b": of(3, 4), "c": of(3, 1)}, {}, "do not broadcast"),
    "what is added is larger": ("Gemm", {"a": of(1, 3), "b": of(3, 4), "c": of(2, 4)}, {}, "C [2, 4]"),
    "scales by axis": ("DequantizeLinear", {"x": of(3, 2, dtype=np.uint8), "s": of(3)}, {"axis": 1}, "[3] are not [2]"),
    "scales in whole numbers": (
        "DequantizeLinear",
        {"x": of(3, dtype=np.uint8), "s": of(1, dtype=np.int32)},
        {},
        "scales int32",
    ),
    "zero points": (
        "DequantizeLinear",
        {"x": of(3, 2, dtype=np.uint8), "s": of(2), "z": of(3, dtype=np.uint8)},
        {"axis": 1},
        "[3] are not [2]",
    ),
    "blocks": (
        "DequantizeLinear",
        {"x": of(4, 2, dtype=np.uint8), "s": of(3, 2)},
        {"axis": 0, "block_size": 2},
        "[3, 2] are not [2, 2]",
    ),
    "axes named twice": (
        "Unsqueeze",
        {"x": of(2), "axes": np.asarray([0, 0], np.int64)},
        {},
        "name one twice",
    ),
    "bounds by element": ("Clip", {"x": of(2), "l": of(2)}, {}, "no single numbers"),
    "a norm of whole numbers": ("LpNormalization", {"x": of(3, dtype=np.uint8)}, {}, "uint8"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_hold_together_is_refused(name: str) -> None:
    op, inputs, attributes, says = CASES[name]
    with pytest.raises(UnsupportedModel) as caught:
        compute(op, inputs, domain="", **attributes)
    assert says in caught.value.message and f"ai.onnx::{op}" in caught.value.message


@pytest.mark.parametrize(
    ("op", "weights", "says"),
    [
        ("Gather", {"a": stored("a", of(3)), "b": stored("b", of(1, dtype=np.int64) * 5)}, "index 5 is out of bounds"),
        ("MatMul", {"a": stored("a", of(2, 3), "int4"), "b": stored("b", of(3, 2), "int4")}, "int4"),
        ("ReduceSum", {"a": stored("a", of(2, 3), "uint4")}, "uint4"),
    ],
)
def test_what_is_known_at_build_and_does_not_fit_is_refused(op: str, weights: dict[str, Weight], says: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        compute(op, {}, wiring=list(weights), weights=weights, domain="")
    assert says in caught.value.message


def test_an_index_beyond_the_elements_ends_the_step() -> None:
    """Found by the step that reads it, as it comes out of the data: nothing else may be read in its place."""
    for op, index in (("Gather", of(1, dtype=np.int64) * 3), ("GatherElements", of(1, dtype=np.int64) * -4)):
        with pytest.raises(DeviceFailure, match=f"index {index[0]} is out of bounds for 3 elements"):
            compute(op, {"x": of(3), "i": index}, domain="")


@pytest.mark.parametrize(("op", "kind"), [("Pow", np.float32), ("Gather", np.int64)])
def test_half_bytes_are_not_taken_for_bytes(op: str, kind: Any) -> None:
    """An int4 initialiser beside an activation would be read as its packed bytes."""
    weights = {"w": stored("w", of(2, 3), "int4")}
    wiring = ["w", "x"] if op == "Gather" else ["x", "w"]
    with pytest.raises(UnsupportedModel, match="elements of type int4 are not served"):
        compute(op, {"x": of(2, 3, dtype=kind)}, wiring=wiring, weights=weights, domain="")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), axis=st.integers(0, 2), seed=st.integers(0, 2**32 - 1))
def test_elements_are_gathered_at_fewer_places_than_there_are(data: st.DataObject, axis: int, seed: int) -> None:
    """Indices may be shorter than the data along the other axes; negative ones count from the end."""
    random = np.random.default_rng(seed)
    shape = tuple(data.draw(st.integers(1, 4)) for _ in range(3))
    less = tuple(data.draw(st.integers(1, 5 if i == axis else d)) for i, d in enumerate(shape))
    x, index = random.normal(size=shape).astype(np.float32), random.integers(-shape[axis], shape[axis], less)
    [y] = compute("GatherElements", {"x": x, "i": index}, domain="", axis=axis)
    for at in np.ndindex(less):
        of_x = tuple(int(index[at]) if i == axis else n for i, n in enumerate(at))
        assert y[at] == x[of_x]


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        ((1, -1, 3, VOCABULARY // 3), 1, "not a row of logits for each token"),
        ((VOCABULARY, -1, 1), 1, "not a row of logits for each token"),
        ((-1,), 1, None),
        ((1, -1, VOCABULARY), 7, "int64[1, 1, 12]"),
    ],
)
def test_logits_that_are_no_rows_are_refused(shape: tuple[int, ...], dtype: int, says: str | None) -> None:
    s = Small()
    x = s.add("MatMul", s.attended(s.embedded()), s.drawn("head", HIDDEN, VOCABULARY))
    made = s.add("Reshape", x, s.constant(list(shape)))
    s.add("Cast", made, outputs=("logits",), to=dtype)
    if says is None:
        assert lower(s.graph(), 1).logits.shape == (VOCABULARY,)
        return
    with pytest.raises(UnsupportedModel) as caught:
        lower(s.graph(), 1)
    assert says in caught.value.message
