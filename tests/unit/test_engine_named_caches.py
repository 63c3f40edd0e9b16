"""Caches by many names and types: paired by what the config says, in numeric order, or refused with the names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engine.bind import lower
from engine.errors import UnsupportedModel
from engine.graph import CACHE_KINDS, DTYPES, Cache, Graph
from engine.onnx_load import load
from tests.unit.engine_rig import Bench, build_tiny, edited, reconfigured, run
from tests.unit.engine_small import HEAD_SIZE, Small

LAYERS = 12


def decoder(cache: str = "float32") -> Graph:
    """Twelve layers, each with a cache of its own: a swap of two shows in the logits."""
    s = Small(layers=LAYERS, cache=cache)
    x = s.embedded()
    for layer in range(LAYERS):
        x = s.add("Add", x, s.add("Mul", s.attended(x, layer), s.constant(0.1, np.float32)))
    s.head(x)
    return s.graph()


def renamed(graph: Graph, key: str, value: str, new_key: str, new_value: str) -> Graph:
    """The same graph with other names of its caches, its inputs listed as text sorts them: 0, 1, 10, 11, 2."""
    caches = tuple(Cache(*(pattern % n for pattern in (key, value, new_key, new_value))) for n in range(LAYERS))
    pairs = zip(graph.info.caches, caches, strict=True)
    names = {getattr(old, kind): getattr(new, kind) for old, new in pairs for kind in CACHE_KINDS}
    nodes = tuple(
        replace(n, inputs=tuple(names.get(i, i) for i in n.inputs), outputs=tuple(names.get(o, o) for o in n.outputs))
        for n in graph.nodes
    )
    inputs = {names.get(n, n): replace(v, name=names.get(n, n)) for n, v in graph.inputs.items()}
    outputs = {names.get(n, n): v for n, v in graph.outputs.items()}
    info = replace(graph.info, caches=caches)
    return replace(graph, nodes=nodes, inputs=dict(sorted(inputs.items())), outputs=outputs, info=info)


def logits_of(graph: Graph) -> bytes:
    """Of a prompt and two tokens that are fed."""
    bench = Bench(graph, rows=(4,))
    bench.prefill([1, 5, 3, 2])
    made = [bench.prompt_logits(4)]
    for token in (7, 4):
        bench.force(token)
        made.append(bench.logits())
    return b"".join(row.tobytes() for row in made)


@pytest.mark.parametrize(
    "patterns",
    [
        ("past_key_values.%d.key", "past_key_values.%d.value", "present.%d.key", "present.%d.value"),
        ("past_key_%d", "past_value_%d", "present_key_%d", "present_value_%d"),
        ("cache_k_%d", "cache_v_%d", "new_k_%d", "new_v_%d"),
        ("%d.k(in)", "%d.v(in)", "%d.k(out)", "%d.v(out)"),
    ],
    ids=lambda p: str(p[0]),
)
def test_field_52_names_and_the_order_of_inputs_make_no_difference(patterns: tuple[str, str, str, str]) -> None:
    graph = decoder()
    assert logits_of(renamed(graph, *patterns)) == logits_of(graph)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model; tests copy it before they change it."""
    return build_tiny(tmp_path_factory.mktemp("caches"))


def test_field_52_one_symbol_for_past_and_present_lengths_is_no_length(tiny: Path, tmp_path: Path) -> None:
    """Exporters gave both sides the symbol "past", though they differ by one: no length is taken from a symbol."""

    def edit(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            if value.name.startswith(("past", "present")):
                value.type.tensor_type.shape.dim[2].dim_param = "past"

    assert run(edited(tiny, tmp_path / "m", edit)).streams == run(tiny).streams


def crossed(side: str, key: str, value: str) -> Callable[[dict[str, Any]], None]:
    """A config whose names are one another's."""

    def edit(config: dict[str, Any]) -> None:
        names = config["model"]["decoder"][side]
        names[key], names[value] = names[value], names[key]

    return edit


@pytest.mark.parametrize(
    ("side", "key", "value"),
    [("inputs", "past_key_names", "past_value_names"), ("outputs", "present_key_names", "present_value_names")],
)
def test_field_52_crossed_names_are_refused_and_not_mispaired(
    tiny: Path, tmp_path: Path, side: str, key: str, value: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        lower(load(reconfigured(tiny, tmp_path / "m", crossed(side, key, value))), 1)
    assert "one layer's cached" in caught.value.message or "outputs do not carry on" in caught.value.message


def test_field_52_keys_and_values_in_one_tensor_are_refused_with_the_names(tiny: Path, tmp_path: Path) -> None:
    def edit(config: dict[str, Any]) -> None:
        names = config["model"]["decoder"]["inputs"]
        del names["past_key_names"], names["past_value_names"]
        names["past_names"] = "past_%d"

    with pytest.raises(UnsupportedModel, match="hold keys and values in one"):
        load(reconfigured(tiny, tmp_path / "m", edit))

    def both(config: dict[str, Any]) -> None:
        config["model"]["decoder"]["inputs"].update(past_key_names="past_%d", past_value_names="past_%d")

    with pytest.raises(UnsupportedModel) as caught:
        lower(load(reconfigured(tiny, tmp_path / "n", both)), 1)
    assert "'past_key_values.0.key'" in caught.value.message, "the names that are there"


# -- element types


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_field_54_sizes_follow_the_width_of_the_caches_own_type(dtype: str) -> None:
    graph = decoder(dtype)
    bench = Bench(graph, rows=(4,))
    assert bench.plan.kv.dtype == dtype
    assert bench.plan.kv.bytes_per_token == LAYERS * 2 * HEAD_SIZE * DTYPES[dtype].itemsize
    bench.prefill([1, 5, 3, 2])
    wide = Bench(decoder(), rows=(4,))
    wide.prefill([1, 5, 3, 2])
    found, exact = bench.prompt_logits(4), wide.prompt_logits(4)
    allowed = {"float32": 0.0, "float16": 2e-2, "bfloat16": 0.2}[dtype] * np.abs(exact).max()
    assert np.abs(found - exact).max() <= allowed, "read as what it is"
    assert (found.tobytes() != exact.tobytes()) == (dtype != "float32"), "and held as what it is"


@pytest.mark.parametrize(
    "kind", ["UINT8", "INT4", "UINT4", "FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "DOUBLE", "INT16"]
)
def test_field_54_types_that_are_not_served_are_refused_at_load_by_name(tiny: Path, tmp_path: Path, kind: str) -> None:
    """No reading of one type as another: fp8 is not taken for uint8, nor half bytes for bytes."""

    def edit(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            if value.name.startswith(("past", "present")):
                value.type.tensor_type.elem_type = onnx.TensorProto.DataType.Value(kind)

    outcome = run(edited(tiny, tmp_path / "m", edit))
    shown = {"DOUBLE": "float64"}.get(kind, kind if kind.startswith("FLOAT8") else kind.lower())
    assert outcome.code == 12 and f"KV cache of type {shown} is not served" in outcome.error["message"]
    assert outcome.error["counters"].get("device_htod_bytes", 0) == 0
