"""Which symbols grow and which are pinned, by closure over made-up graphs; what touches a growing one stays eager."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest

from engine.bind import lower
from engine.capture import cut
from engine.graph import Cache, DecoderInfo, Dim, Graph, Node, Value
from engine.onnx_load import load
from engine.symbols import classify, disqualified
from tests.unit.engine_rig import build_tiny, run

SHAPES: dict[str, tuple[Dim, ...]] = {"past_k": ("batch", 2, "past", 64), "present_k": ("batch", 2, "total", 64)}


def graph(nodes: Sequence[tuple[str, str, list[str], list[str]]], shapes: dict[str, tuple[Dim, ...]]) -> Graph:
    """Ids [batch, seq], a mask [batch, mask], one layer's keys as cache; nodes as (name, op, inputs, outputs)."""
    inputs = {"ids": ("batch", "seq"), "mask": ("batch", "mask"), "past_k": SHAPES["past_k"]}
    info = DecoderInfo(
        2, 64, 100, None, (), "ids", "mask", "logits", (Cache("past_k", "past_k", "present_k", "present_k"),)
    )
    return Graph(
        tuple(Node(name, op, "", tuple(i), tuple(o), {}) for name, op, i, o in nodes),
        {},
        {name: Value(name, "float32", shape) for name, shape in inputs.items()},
        {"present_k": Value("present_k", "float32", SHAPES["present_k"])},
        info,
        None,
        {},
        shapes,
    )


def test_the_length_axes_of_caches_and_mask_grow_and_the_query_does_not() -> None:
    found = classify(graph([], {}))
    assert set(found.growing) == {"past", "total", "mask"}
    assert found.pinned == {"batch": "batch", "seq": "query length"}
    assert found.growing["total"] == "is the length of present_k"


def test_a_pinned_step_is_recorded_whatever_symbols_it_has() -> None:
    """The one-token step of a hybrid: [batch, seq, 16, 128] has two symbols, and both are held."""
    g = graph([("norm", "Mul", ["x", "x"], ["y"])], {"x": ("batch", "seq", 16, 128), "y": ("batch", "seq", 16, 128)})
    assert disqualified(g, classify(g)) == {}


def test_heads_and_tokens_of_one_place_are_told_apart_by_their_symbols() -> None:
    """[32, 128] could be heads or tokens: the shape does not say, the symbol does."""
    nodes = [("heads", "Mul", ["h", "h"], ["hy"]), ("tokens", "Mul", ["t", "t"], ["ty"])]
    g = graph(nodes, {"h": ("heads", 128), "hy": ("heads", 128), "t": ("total", 128), "ty": ("total", 128)})
    assert disqualified(g, classify(g)) == {"tokens": "t has the extent total, which is the length of present_k"}


def test_an_equal_extent_grows_with_the_other_in_both_directions() -> None:
    for known, minted in (("x", "y"), ("y", "x")):
        g = graph([("add", "Add", ["x"], ["y"])], {known: ("batch", "total"), minted: ("batch", "n_1")})
        assert classify(g).growing["n_1"] == "equals total in add"


def test_extents_are_equal_from_the_last_axis_as_broadcasting_has_it() -> None:
    g = graph([("add", "Add", ["x", "m"], ["y"])], {"x": ("batch", 4, "seq", "n_1"), "m": ("total",), "y": ()})
    found = classify(g).growing
    assert "n_1" in found and "seq" not in found


def test_a_size_computed_from_a_growing_extent_makes_what_is_shaped_by_it_grow() -> None:
    nodes = [
        ("shape", "Shape", ["mask"], ["s"]),
        ("pick", "Gather", ["s", "one"], ["n"]),
        ("double", "Mul", ["n", "two"], ["n2"]),
        ("range", "Range", ["zero", "n2", "one"], ["r"]),
        ("use", "Cos", ["r"], ["c"]),
    ]
    g = graph(nodes, {"r": ("arange",), "c": ("arange",)})
    assert classify(g).growing["arange"] == "range computes"
    assert set(disqualified(g, classify(g))) == {"range", "use"}


def test_a_size_of_what_is_pinned_makes_nothing_grow() -> None:
    nodes = [("shape", "Shape", ["ids"], ["s"]), ("expand", "Expand", ["x", "s"], ["y"])]
    g = graph(nodes, {"x": (1, 1), "y": ("batch", "minted")})
    assert "minted" not in classify(g).growing


def test_a_symbol_made_of_a_growing_one_grows_and_one_of_pinned_ones_does_not() -> None:
    g = graph([], {"a": ("past + seq", 8), "b": ("batch * seq", 8), "c": ("seq * num_heads", 8)})
    assert classify(g).growing["past + seq"] == "is made of past"
    assert not {"batch * seq", "seq * num_heads"} & set(classify(g).growing)


def test_a_pinned_symbol_stays_pinned_whatever_it_is_said_to_equal() -> None:
    g = graph(
        [("add", "Add", ["x", "m"], ["y"])], {"x": ("batch", "seq"), "m": ("batch", "total"), "y": ("batch", "seq")}
    )
    assert "seq" not in classify(g).growing
    assert set(disqualified(g, classify(g))) == {"add"}, "its operand m grows all the same"


def test_attention_is_recorded_though_its_caches_grow_and_not_where_another_operand_does() -> None:
    inputs = ["q", "k", "v", "past_k", "past_v"]
    shapes: dict[str, tuple[Dim, ...]] = {"q": ("batch", "seq", 128), "past_v": ("batch", 2, "past", 64)}
    g = graph([("attn", "GroupQueryAttention", inputs, ["y", "present_k"])], shapes)
    assert disqualified(g, classify(g)) == {}
    biased = graph(
        [("attn", "GroupQueryAttention", [*inputs, "bias"], ["y"])], {**shapes, "bias": (1, 2, "seq", "total")}
    )
    assert set(disqualified(biased, classify(biased))) == {"attn"}


@pytest.fixture(scope="module")
def claims_growth(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The tiny model, and the same with one product said to have an extent that grows."""
    plain = build_tiny(tmp_path_factory.mktemp("plain"))
    folder = tmp_path_factory.mktemp("claims") / "tiny"
    shutil.copytree(plain, folder)
    (folder / "zoo.json").unlink()
    path = folder / "model.onnx"
    model = onnx.load(str(path), load_external_data=False)
    product = next(n for n in model.graph.node if n.op_type == "Mul")
    said = [v for v in model.graph.value_info if v.name != product.output[0]]
    del model.graph.value_info[:]
    total = "total_sequence_length"
    model.graph.value_info.extend(
        [*said, onnx.helper.make_tensor_value_info(product.output[0], 1, ["batch_size", total, 128])]
    )
    path.write_bytes(model.SerializeToString())
    return plain, folder


def test_what_touches_a_growing_symbol_runs_eagerly_with_the_same_tokens(claims_growth: tuple[Path, Path]) -> None:
    plain, folder = claims_growth
    seams = cut(lower(load(folder), 1), lambda _: True).seams
    assert seams and {s.reason for s in seams} == {"ClassifierDisqualified"}
    assert all("total_sequence_length" in s.detail and s.path == "eager-device-seam" for s in seams)
    before, after = run(plain, generations=2), run(folder, generations=2)
    assert after.streams == before.streams
    assert (before.counters["segments"], after.counters["segments"]) == (1, len(seams))
    assert after.broken_equations() == []


def test_every_plan_says_what_grows_and_what_is_pinned(claims_growth: tuple[Path, Path]) -> None:
    found = lower(load(claims_growth[0]), 1).symbols
    assert set(found.growing) == {"past_sequence_length", "total_sequence_length"}
    assert {"batch_size", "sequence_length"} <= set(found.pinned)
