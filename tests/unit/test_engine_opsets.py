"""Operator sets: imports in every form, and operators that mean or take something else in another version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from engine.bind import lower
from engine.conformance import run_nodes
from engine.errors import ModelFilesError, UnsupportedModel
from engine.onnx_load import load, nodes_of
from engine.opsets import imports_of
from engine.oracle import logits as reference_logits
from tests.unit.engine_rig import TINY_PROMPT, build_tiny, edited, node, run

MICROSOFT = ("com.microsoft", 1)
Imports = list[tuple[str, int]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model; tests copy it before they change it."""
    return build_tiny(tmp_path_factory.mktemp("opsets"))


def importing(tiny: Path, into: Path, imports: Imports, op: str = "") -> Path:
    """A copy that imports these, its first Sigmoid become another operator where one is given."""

    def edit(model: onnx.ModelProto) -> None:
        del model.opset_import[:]
        model.opset_import.extend(onnx.OperatorSetIdProto(domain=d, version=v) for d, v in imports)
        if op:
            sigmoid = node(model, "layers.0/mlp/act_fn/Sigmoid")
            sigmoid.domain, sigmoid.op_type = op.split("::")

    return edited(tiny, into, edit)


@pytest.mark.parametrize(
    "imports",
    [
        [MICROSOFT, ("", 22)],
        [("ai.onnx", 22), MICROSOFT],
        [MICROSOFT, ("ai.onnx", 21)],
        [("ai.onnx.ml", 3), ("org.example", 7), MICROSOFT, ("", 18)],
        [("", 22), ("ai.onnx", 22), MICROSOFT, MICROSOFT],
    ],
    ids=str,
)
def test_field_51_order_and_spelling_of_imports_make_no_difference(
    tiny: Path, tmp_path: Path, imports: Imports
) -> None:
    assert run(importing(tiny, tmp_path / "m", imports), tokens=2).streams == run(tiny, tokens=2).streams


@pytest.mark.parametrize(
    ("imports", "says"),
    [
        ([], "imports no operator set"),
        ([("", 22), MICROSOFT, ("ai.onnx", 21)], "ai.onnx in versions 22 and 21"),
        ([("com.microsoft", 2), ("", 22), MICROSOFT], "com.microsoft in versions 2 and 1"),
        ([("", 22), MICROSOFT, ("org.example", 1), ("org.example", 2)], "org.example in versions 1 and 2"),
    ],
)
def test_field_51_imports_that_are_missing_or_contradict_are_refused(
    tiny: Path, tmp_path: Path, imports: Imports, says: str
) -> None:
    with pytest.raises(ModelFilesError) as caught:
        load(importing(tiny, tmp_path / "m", imports))
    assert says in caught.value.message and caught.value.remedy


@pytest.mark.parametrize(
    ("imports", "op", "reasons"),
    [
        ([MICROSOFT], "", ["domain ai.onnx is not imported, and nodes are of it"]),
        ([("", 22)], "", ["domain com.microsoft is not imported, and nodes are of it"]),
        ([("", 22), MICROSOFT], "org.example::Sigmoid",
         ["(org.example::Sigmoid): operator is not served", "domain org.example is not imported, and nodes are of it"]),
        ([("", 22)], "::NonZero",
         ["(ai.onnx::NonZero): operator is not served", "domain com.microsoft is not imported, and nodes are of it"]),
        ([("", 6), MICROSOFT], "", ["domain ai.onnx in version 6 is not served"]),
        ([("", 99), MICROSOFT], "", ["domain ai.onnx in version 99 is not served"]),
        ([("", 22), ("com.microsoft", 2)], "", ["domain com.microsoft in version 2 is not served"]),
    ],
)  # fmt: skip
def test_field_51_domains_that_are_not_imported_or_in_another_version_are_named_with_all_else(
    tiny: Path, tmp_path: Path, imports: Imports, op: str, reasons: list[str]
) -> None:
    folder = importing(tiny, tmp_path / "m", imports, op)
    with pytest.raises(UnsupportedModel) as caught:
        lower(load(folder), 1)
    domains = [r for r in caught.value.reasons if r.startswith("domain")]
    for part in reasons:
        assert any(part in reason for reason in caught.value.reasons)
    assert len(domains) == sum(part.startswith("domain") for part in reasons), "a domain is one reason, not one a node"
    assert run(folder, tokens=1).code == 12


def test_a_reference_for_older_operators_is_refused_and_not_guessed(tiny: Path, tmp_path: Path) -> None:
    folder = importing(tiny, tmp_path / "m", [("", 12), MICROSOFT])
    with pytest.raises(UnsupportedModel, match=r"ai\.onnx 12 is older than 13"):
        reference_logits(load(folder), TINY_PROMPT)


# -- operators by version


def of(*shape: int) -> np.ndarray[Any, Any]:
    """Numbers that differ."""
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def ints(*values: int) -> np.ndarray[Any, Any]:
    """An input of whole numbers."""
    return np.asarray(values, np.int64)


Given = list[np.ndarray[Any, Any]]
SERVED: list[tuple[str, int, Given, dict[str, Any], int]] = [
    ("Softmax", 12, [of(5, 7)], {}, 1),
    ("Softmax", 12, [of(2, 3, 7)], {"axis": 2}, 1),
    ("Softmax", 13, [of(2, 3, 7)], {}, 1),
    ("Softmax", 13, [of(2, 3, 7)], {"axis": 1}, 1),
    ("LogSoftmax", 11, [of(2, 3, 7)], {"axis": -1}, 1),
    ("Split", 11, [of(2, 7)], {"axis": 1, "split": [4, 3]}, 2),
    ("Split", 13, [of(2, 7), ints(4, 3)], {"axis": 1}, 2),
    ("Split", 13, [of(2, 8)], {"axis": 1}, 2),
    ("Split", 18, [of(2, 7)], {"axis": 1, "num_outputs": 2}, 2),
    ("ReduceSum", 11, [of(2, 3, 7)], {"axes": [1]}, 1),
    ("ReduceSum", 13, [of(2, 3, 7), ints(1)], {}, 1),
    ("ReduceMean", 17, [of(2, 3, 7)], {"axes": [-1]}, 1),
    ("ReduceMean", 18, [of(2, 3, 7), ints(-1)], {}, 1),
    ("Squeeze", 12, [of(2, 1, 7)], {"axes": [1]}, 1),
    ("Squeeze", 13, [of(2, 1, 7), ints(1)], {}, 1),
    ("Unsqueeze", 12, [of(2, 7)], {"axes": [1]}, 1),
    ("Clip", 10, [of(2, 7)], {"min": -0.5, "max": 0.5}, 1),
    ("Clip", 13, [of(2, 7), np.asarray(-0.5, np.float32)], {}, 1),
    ("Slice", 9, [of(2, 7)], {"starts": [1], "ends": [5], "axes": [1]}, 1),
    ("Slice", 13, [of(2, 7), ints(1), ints(5), ints(1)], {}, 1),
    ("TopK", 9, [of(2, 7)], {"k": 3}, 2),
    ("TopK", 11, [of(2, 7), ints(3)], {}, 2),
    ("LayerNormalization", 17, [of(2, 7), of(7)], {}, 1),
    ("Gelu", 20, [of(2, 7)], {}, 1),
]


def single(op: str, version: int, given: Given, attributes: dict[str, Any], outputs: int) -> onnx.ModelProto:
    """A model of one node."""
    names, made = [f"x{i}" for i in range(len(given))], [f"y{i}" for i in range(outputs)]
    inputs = [
        onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, given, strict=True)
    ]
    results = [onnx.helper.make_empty_tensor_value_info(n) for n in made]
    graph = onnx.helper.make_graph([onnx.helper.make_node(op, names, made, **attributes)], "g", inputs, results)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])


def engine_of(model: onnx.ModelProto, given: Given) -> Given:
    """What the engine makes of it."""
    nodes = nodes_of(model.graph, imports_of(model))
    return run_nodes(nodes, {}, {f"x{i}": a for i, a in enumerate(given)}, tuple(o.name for o in model.graph.output))


@pytest.mark.parametrize("case", SERVED, ids=lambda c: f"{c[0]}-{c[1]}")
def test_field_51_an_operator_means_what_its_version_says(
    case: tuple[str, int, Given, dict[str, Any], int],
) -> None:
    """Against the standard's reference, which follows the imported version."""
    model, given = single(*case), case[2]
    wanted = ReferenceEvaluator(model).run(None, {f"x{i}": a for i, a in enumerate(given)})
    for found, want in zip(engine_of(model, given), wanted, strict=True):
        assert found.shape == want.shape
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_field_51_a_layer_norm_from_before_it_came_to_the_standard_is_onnxruntimes_own() -> None:
    """Builders wrote it into graphs of opset 14; that runtime has it there since opset 1, with the same meaning."""
    given = [of(2, 7), of(7)]
    found, later = (engine_of(single("LayerNormalization", v, given, {}, 1), given)[0] for v in (14, 17))
    np.testing.assert_array_equal(found, later)


def test_field_51_an_older_softmax_runs_over_all_axes_behind_its_own() -> None:
    """The standard's reference overlooks that, so this one is written out: the default is axis 1, not the last."""
    x = of(5, 7, 1)
    [found] = engine_of(single("Softmax", 11, [x], {}, 1), [x])
    np.testing.assert_allclose(found, np.exp(x) / np.exp(x).sum(axis=(1, 2), keepdims=True), rtol=1e-5)


@pytest.mark.parametrize(
    ("op", "version", "given", "attributes", "outputs", "says"),
    [
        ("Softmax", 12, [of(2, 3, 7)], {}, 1, "ai.onnx 12 has the axes from 1 on summed as one"),
        ("LogSoftmax", 11, [of(2, 3, 7)], {"axis": -2}, 1, "ai.onnx 11 has the axes from 1 on summed as one"),
        ("Split", 13, [of(2, 7)], {"axis": 1, "split": [4, 3]}, 2, "ai.onnx 13 has no attribute 'split' here"),
        ("Split", 11, [of(2, 7), ints(4, 3)], {"axis": 1}, 2, "ai.onnx 11 takes 1 to 1 inputs here, not 2"),
        ("Split", 13, [of(2, 7)], {"axis": 1, "num_outputs": 2}, 2, "no attribute 'num_outputs'"),
        ("Split", 13, [of(2, 7)], {"axis": 1}, 2, "7 elements are not 2 equal parts, as ai.onnx 13 has them"),
        ("ReduceSum", 13, [of(2, 7)], {"axes": [1]}, 1, "no attribute 'axes'"),
        ("ReduceSum", 12, [of(2, 7), ints(1)], {}, 1, "takes 1 to 1 inputs"),
        ("ReduceMean", 18, [of(2, 7)], {"axes": [1]}, 1, "no attribute 'axes'"),
        ("ReduceMean", 17, [of(2, 7), ints(1)], {}, 1, "takes 1 to 1 inputs"),
        ("Squeeze", 13, [of(2, 1)], {"axes": [1]}, 1, "no attribute 'axes'"),
        ("Slice", 10, [of(2, 7)], {"starts": [1], "ends": [5]}, 1, "no attribute 'ends'"),
        ("Reshape", 13, [of(2, 7), ints(7, 2)], {"allowzero": 0}, 1, "no attribute 'allowzero'"),
        ("DequantizeLinear", 10, [np.ones((2, 7), np.uint8), of(2)], {"axis": 0}, 1, "no attribute 'axis'"),
        ("RMSNormalization", 22, [of(2, 7), of(7)], {}, 1, "ai.onnx 22 has no such operator"),
        ("Gelu", 19, [of(2, 7)], {}, 1, "ai.onnx 19 has no such operator"),
        ("Softmax", 13, [of(2, 7)], {"axis": 1.0}, 1, "attribute axis is 1.0, not of type int"),
        ("Transpose", 13, [of(2, 7)], {"perm": [1.0, 0.0]}, 1, "attribute perm is [1.0, 0.0], not of type ints"),
    ],
)
def test_field_51_what_another_version_takes_is_refused(
    op: str, version: int, given: Given, attributes: dict[str, Any], outputs: int, says: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        engine_of(single(op, version, given, attributes, outputs), given)
    assert says in caught.value.message and f"ai.onnx::{op}" in caught.value.message
