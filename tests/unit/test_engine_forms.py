"""One decoder in the forms in which exporters write it: the same plan and the same tokens in each."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engine.bind import lower
from engine.capture import cut
from engine.errors import UnsupportedModel
from engine.onnx_load import load
from engine.plan import Plan
from tests.unit.engine_rig import build_tiny, edited, node, run, set_attribute

Edit = Callable[[onnx.ModelProto], None]
BIAS = "model.layers.0.mlp.gate_proj.MatMul.bias"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model, with a dense product, a bias of its own node and a number that is multiplied by."""
    below = tmp_path_factory.mktemp("forms")
    return edited(build_tiny(below), below / "mixed", _mixed)


def _mixed(model: onnx.ModelProto) -> None:
    gate = node(model, "layers.0/mlp/gate_proj/MatMul_Q4")
    out = gate.output[0]
    rows = np.random.default_rng(5).normal(size=(256, 256)).astype(np.float32) / 16
    more = {"turn": rows, BIAS: rows[0], "factor": np.asarray(0.5, np.float32), "one": np.asarray([2], np.float32)}
    for name, values in more.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    gate.output[0] = "gate.0"
    at = list(model.graph.node).index(gate) + 1
    ops = [("MatMul", "turn"), ("Add", BIAS), ("Mul", "factor"), ("Mul", "one")]
    for i, (op, name) in enumerate(ops):
        made = out if i == len(ops) - 1 else f"gate.{i + 1}"
        model.graph.node.insert(at + i, onnx.helper.make_node(op, [f"gate.{i}", name], [made], name=f"gate/{op}{i}"))


def as_constants(folder: Path) -> Edit:
    """Every initialiser becomes a Constant node before all others."""
    graph = load(folder)

    def edit(model: onnx.ModelProto) -> None:
        nodes = []
        for tensor in model.graph.initializer:
            value = onnx.TensorProto(data_type=tensor.data_type, dims=list(tensor.dims))
            value.raw_data = graph.weights[tensor.name].data.tobytes()
            nodes.append(onnx.helper.make_node("Constant", [], [tensor.name], name=f"c.{tensor.name}", value=value))
        nodes += list(model.graph.node)
        del model.graph.initializer[:], model.graph.node[:]
        model.graph.node.extend(nodes)

    return edit


def repeated_as_inputs(folder: Path) -> Edit:
    """Every initialiser is listed among the inputs as well."""

    def edit(model: onnx.ModelProto) -> None:
        for t in model.graph.initializer:
            model.graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))

    return edit


def shown(plan: Plan) -> dict[str, Any]:
    """What must not depend on the form."""
    segments = cut(plan, lambda _: True).segments
    return {
        "keys": [(k.name, k.nbytes, k.record) for k in plan.keys],
        "hosts": [w.name for w in plan.hosts],
        "constants": [(w.name, w.nbytes) for w in plan.constants],
        "steps": [(s.node, s.op, s.kernel, s.keys, s.params, s.reason) for s in plan.steps],
        "segments": [([s.index for s in segment.steps], segment.captured, segment.keys) for segment in segments],
        "workspace": plan.workspace_bytes,
    }


@pytest.mark.parametrize("form", [as_constants, repeated_as_inputs])
def test_field_48_the_form_of_weights_changes_nothing(tiny: Path, tmp_path: Path, form: Callable[[Path], Edit]) -> None:
    folder = edited(tiny, tmp_path / "m", form(tiny))
    assert not set(load(folder).inputs) - set(load(tiny).inputs), "nothing more is asked of the user"
    for rows in (1, 3):
        assert shown(lower(load(folder), rows)) == shown(lower(load(tiny), rows))
    paged = {"config": {"weight_budget": "60%", "granule": 4096, "policy": "lru"}}
    one, other = run(folder, **paged), run(tiny, **paged)
    assert one.streams == other.streams and one.facts == other.facts
    assert one.result["keys"] == other.result["keys"] and one.result["seams"] == other.result["seams"]
    timeless = {n: v for n, v in one.counters.items() if not n.endswith("_ns")}
    assert timeless == {n: v for n, v in other.counters.items() if not n.endswith("_ns")}


@pytest.mark.parametrize("form", ["initialiser", "constant", "input"])
def test_field_48_split_sizes_come_from_any_form(tiny: Path, tmp_path: Path, form: str) -> None:
    """Sizes of a Split are known at build whatever form they have, so the step asks the host for nothing."""

    def edit(model: onnx.ModelProto) -> None:
        mul = node(model, "layers.0/mlp/Mul")
        sizes = onnx.numpy_helper.from_array(np.asarray([100, 156], np.int64), "sizes")
        split = onnx.helper.make_node("Split", [mul.output[0], "sizes"], ["left", "right"], name="split", axis=-1)
        joined = onnx.helper.make_node("Concat", ["left", "right"], ["whole"], name="concat", axis=-1)
        node(model, "layers.0/mlp/down_proj/MatMul_Q4").input[0] = "whole"
        at = list(model.graph.node).index(mul) + 1
        model.graph.node.insert(at, joined)
        model.graph.node.insert(at, split)
        if form == "constant":
            model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["sizes"], name="c", value=sizes))
        else:
            model.graph.initializer.append(sizes)
        if form == "input":
            model.graph.input.append(onnx.helper.make_tensor_value_info("sizes", onnx.TensorProto.INT64, [2]))

    folder = edited(tiny, tmp_path / "m", edit)
    outcome = run(folder)
    assert outcome.streams == run(tiny).streams
    assert [s for s in outcome.result["seams"] if s["node"] == "split"] == []
    assert "sizes" not in {k["key"] for k in outcome.result["keys"]}


# -- merged decoders, and initialisers without data


def merged(model: onnx.ModelProto) -> None:
    """Both branches of a merged decoder, chosen by an input of the user's."""
    model.graph.input.append(onnx.helper.make_tensor_value_info("use_cache_branch", onnx.TensorProto.BOOL, [1]))
    sigmoid = node(model, "layers.0/mlp/act_fn/Sigmoid")
    branches = {}
    for name in ("then_branch", "else_branch"):
        inner = onnx.helper.make_node("Sigmoid", [sigmoid.input[0]], [f"{name}.y"], name=name)
        out = onnx.helper.make_empty_tensor_value_info(f"{name}.y")
        branches[name] = onnx.helper.make_graph([inner], name, [], [out])
    sigmoid.op_type, sigmoid.input[0] = "If", "use_cache_branch"
    for name, branch in branches.items():
        set_attribute(sigmoid, name, branch)


def test_field_50_the_flag_of_a_merged_decoder_is_named(tiny: Path, tmp_path: Path) -> None:
    folder = edited(tiny, tmp_path / "m", merged)
    with pytest.raises(UnsupportedModel) as caught:
        lower(load(folder), 1)
    assert "graph input 'use_cache_branch' is not served: export a plain text decoder" in caught.value.reasons
    assert run(folder).code == 12


@pytest.mark.parametrize("external", [False, True])
def test_field_50_an_initialiser_without_elements_is_mapped_and_copied_by_nobody(
    tiny: Path, tmp_path: Path, external: bool
) -> None:
    """Some exporters write "absent" as a tensor of shape [0]."""

    def edit(model: onnx.ModelProto) -> None:
        spare = onnx.TensorProto(name="spare", data_type=onnx.TensorProto.FLOAT, dims=[0], raw_data=b"")
        if external:
            spare.ClearField("raw_data")
            spare.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", "model.onnx.data"), ("offset", "0"), ("length", "0")):
                spare.external_data.add(key=key, value=value)
        model.graph.initializer.append(spare)

    folder = edited(tiny, tmp_path / "m", edit)
    assert load(folder).weights["spare"].nbytes == 0
    outcome = run(folder)
    assert outcome.streams == run(tiny).streams
    assert all(k["nbytes"] for k in outcome.result["keys"])


def test_field_50_a_bias_of_no_elements_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        spare = onnx.TensorProto(name="spare", data_type=onnx.TensorProto.FLOAT, dims=[0], raw_data=b"")
        model.graph.initializer.append(spare)
        gate = node(model, "layers.1/mlp/gate_proj/MatMul_Q4")
        gate.input.extend([""] * (5 - len(gate.input)) + ["spare"])

    with pytest.raises(UnsupportedModel, match=r"bias 'spare' are float32\[0\], not 256 elements"):
        lower(load(edited(tiny, tmp_path / "m", edit)), 1)


@pytest.mark.parametrize("kind", ["FLOAT", "INT4", "UINT4"])
@pytest.mark.parametrize("place", ["file", "inline", "outside"])
def test_field_48_a_branch_has_weights_of_its_own_in_the_file_or_inline(
    tiny: Path, tmp_path: Path, kind: str, place: str
) -> None:
    """The same bytes in a branch and in the graph give the same tokens; half bytes are not taken for bytes."""
    floats = np.linspace(0.5, 1, 256, dtype=np.float32)
    data = floats.tobytes() if kind == "FLOAT" else np.arange(128, dtype=np.uint8).tobytes()

    def edit(branched: bool) -> Edit:
        def act(model: onnx.ModelProto) -> None:
            mul = node(model, "layers.0/mlp/Mul")
            weight = onnx.TensorProto(name="own", data_type=onnx.TensorProto.DataType.Value(kind), dims=[256])
            if branched and place != "inline":
                weight.data_location = onnx.TensorProto.EXTERNAL
                weight.external_data.add(key="location", value="own.data" if place == "file" else "../own.data")
            else:
                weight.raw_data = data
            scale = onnx.numpy_helper.from_array(np.asarray(0.125, np.float32), "own_scale")
            wide = onnx.helper.make_node("DequantizeLinear", ["own", "own_scale"], ["wide"], name="wide")
            inner = [] if kind == "FLOAT" else [wide]
            by = "own" if kind == "FLOAT" else "wide"
            inner.append(onnx.helper.make_node("Mul", ["product", by], ["scaled"], name="scaled"))
            stored = [weight] if kind == "FLOAT" else [weight, scale]
            made, mul.output[0] = mul.output[0], "product"
            at = list(model.graph.node).index(mul) + 1
            if not branched:
                inner[-1].output[0] = made
                model.graph.initializer.extend(stored)
                for n in reversed(inner):
                    model.graph.node.insert(at, n)
                return
            out = onnx.helper.make_empty_tensor_value_info("scaled")
            branch = onnx.helper.make_graph(inner, "b", [], [out], initializer=stored)
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(True), "yes"))
            chosen = onnx.helper.make_node("If", ["yes"], [made], name="if", then_branch=branch, else_branch=branch)
            model.graph.node.insert(at, chosen)

        return act

    folder = edited(tiny, tmp_path / "m", edit(True))
    (folder / "own.data").write_bytes(data)
    if place == "outside":
        assert run(folder).code == 11 and "own" in run(folder).error["message"]
        return
    assert run(folder).streams == run(edited(tiny, tmp_path / "n", edit(False))).streams


# -- sizes


def test_field_45_two_gigabytes_in_one_tensor_and_four_thousand_small_ones_inline(tiny: Path, tmp_path: Path) -> None:
    """Nothing serialises the whole: 2.2 GB lie in a sparse file, and the small ones are read where they stand."""
    big = 2_200_000_000

    def edit(model: onnx.ModelProto) -> None:
        for i in range(4000):
            values = np.full(8, i, np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(values, f"small.{i}"))
        tensor = onnx.TensorProto(name="big", data_type=onnx.TensorProto.UINT8, dims=[big])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="big.data")
        tensor.external_data.add(key="offset", value=str(5 << 30))
        model.graph.initializer.append(tensor)

    folder = edited(tiny, tmp_path / "m", edit)
    with (folder / "big.data").open("wb") as file:
        file.truncate((5 << 30) + big)  # a hole: it takes no room
    graph = load(folder)
    assert graph.weights["big"].nbytes == big and graph.weights["small.3999"].array()[0] == 3999
    outcome = run(folder)
    assert outcome.streams == run(tiny).streams
    os.truncate(folder / "big.data", (5 << 30) + big - 1)
    assert "big" in run(folder).error["message"]


def test_field_45_a_graph_file_beyond_what_protobuf_reads_is_refused_unread(tiny: Path, tmp_path: Path) -> None:
    """Weights inline of more than 2 GiB: the size is said, with what to do, before any of it is in memory."""
    folder = edited(tiny, tmp_path / "m", lambda _: None)
    os.truncate(folder / "model.onnx", 2**31)  # the rest is a hole
    tracemalloc.start()
    outcome = run(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert outcome.code == 11 and peak < 100e6
    assert f"{folder / 'model.onnx'} has 2147483648 bytes" in outcome.error["message"]
    assert "external data" in outcome.error["remedy"]


def test_field_44_two_models_that_share_a_data_name(tiny: Path, tmp_path: Path) -> None:
    """The second export overwrote the first one's data: sizes no longer fit, which is said before anything runs."""
    folder = edited(tiny, tmp_path / "m", lambda _: None)
    (folder / "model.onnx.data").write_bytes(b"another model's weights" * 1000)
    outcome = run(folder)
    assert outcome.code == 11 and outcome.error["counters"].get("vmm_calls", 0) == 0
    assert "model.onnx.data has 23000 bytes, but initialiser" in outcome.error["message"]
    assert "belongs to another model" in outcome.error["remedy"]
