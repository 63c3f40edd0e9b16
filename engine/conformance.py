"""Node conformance: the standard's own cases for every operator the engine claims, run through plan and simulator."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.backend.test.loader import load_model_tests

from engine import ops
from engine.device.base import Launch, Placed
from engine.device.sim import SimDevice
from engine.errors import UnsupportedModel
from engine.graph import DTYPES, Node, Weight
from engine.lower import Lowering, Parts, walk
from engine.onnx_load import nodes_of, weights_of
from engine.opsets import imports_of
from engine.plan import Operand
from engine.values import Const, NotKnown, Tensor, WeightValue

_HALF_ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Spacing of half types, relative: their expected values were rounded at every step, ours once, so two of these may lie
between."""

VERSION = onnx.__version__
"""Of the installed onnx package, whose cases these are."""

Outcome = Literal["passed", "failed", "refused", "not claimed"]


@dataclass(frozen=True, slots=True)
class CaseResult:
    """What became of one case; `ops` are its operators, `why` the difference or the refusal."""

    name: str
    ops: tuple[str, ...]
    outcome: Outcome
    why: str = ""


def run_all() -> list[CaseResult]:
    """Every node case of the installed onnx package."""
    with warnings.catch_warnings():  # the standard's cases reach infinity on purpose while they are made
        warnings.simplefilter("ignore", RuntimeWarning)
        cases = load_model_tests(kind="node")
    return [run_case(case) for case in cases]


def claims() -> list[str]:
    """Every operator that the engine claims, out of the registry: "ai.onnx::Add"."""
    return sorted(f"{domain or 'ai.onnx'}::{name}" for domain, name in ops.served())


def by_op(results: Iterable[CaseResult]) -> dict[str, Counter[str]]:
    """Outcomes counted by operator."""
    table: dict[str, Counter[str]] = {}
    for result in results:
        for name in result.ops:
            table.setdefault(name, Counter())[result.outcome] += 1
    return table


def run_case(case: Any) -> CaseResult:
    """One case: claimed if every operator is served, refused if the engine says so by name, else passed or failed."""
    graph = case.model.graph
    names = tuple(sorted({f"{n.domain or 'ai.onnx'}::{n.op_type}" for n in _all_nodes(graph)}))
    served = ops.served()
    if not all(("" if n.domain == "ai.onnx" else n.domain, n.op_type) in served for n in _all_nodes(graph)):
        return CaseResult(case.name, names, "not claimed")
    try:
        nodes, weights = nodes_of(graph, imports_of(case.model)), weights_of(graph)
        for given, expected in case.data_sets:
            why = _compare(nodes, weights, graph, given, expected, case.rtol, case.atol)
            if why:
                return CaseResult(case.name, names, "failed", why)
    except UnsupportedModel as refusal:
        return CaseResult(case.name, names, "refused", refusal.message)
    return CaseResult(case.name, names, "passed")


def run_nodes(
    nodes: tuple[Node, ...], weights: Mapping[str, Weight], inputs: Mapping[str, NDArray[Any]], outputs: tuple[str, ...]
) -> list[NDArray[Any]]:
    """Lower nodes with these inputs as activations, run the steps on a simulated device, and read the outputs.

    An input that an operator must know at build (a shape, axes) is bound as a known value. Raises UnsupportedModel.
    """
    known: set[str] = set()
    while True:
        b = Lowering(weights, {n: Const(a) for n, a in inputs.items() if n in known}, frozenset(outputs))
        for name, array in inputs.items():
            if name not in known:
                if str(array.dtype) not in DTYPES:
                    raise UnsupportedModel(f"input {name!r} is of type {array.dtype}")
                b.make(name, str(array.dtype), array.shape)
        try:
            walk(b, nodes, stop_at=NotKnown)
        except NotKnown as missing:
            if missing.name in known or missing.name not in inputs:
                raise UnsupportedModel(str(missing)) from missing
            known.add(missing.name)
            continue
        return _execute(b, inputs, known, outputs)


def _execute(
    b: Lowering, inputs: Mapping[str, NDArray[Any]], known: set[str], outputs: tuple[str, ...]
) -> list[NDArray[Any]]:
    parts = b.close()
    device = SimDevice(granule_bytes=4096)
    workspace = device.alloc(max(parts.workspace_bytes, 1), "workspace")
    fixed = {"key": [k.weight for k in parts.keys], "constant": list(parts.constants)}
    addresses = {kind: [_load(device, w) for w in weights] for kind, weights in fixed.items()}
    for name, array in inputs.items():
        value = b.peek(name)
        if name not in known and isinstance(value, Tensor):
            at = workspace + parts.buffers[value.ref.index].offset_bytes
            device.copy_in(at, np.ascontiguousarray(array.astype(DTYPES[value.dtype])))
    for step in parts.steps:
        device.launch(Launch(step, tuple(_place(o, parts, workspace, addresses) for o in step.operands)))
    return [_read(b.value(name), parts, device, workspace) for name in outputs]


def _load(device: SimDevice, weight: Weight) -> int:
    address = device.alloc(max(weight.nbytes, 1), weight.name)
    device.copy_in(address, weight.data)
    return address


def _place(operand: Operand, parts: Parts, workspace: int, addresses: Mapping[str, list[int]]) -> Placed:
    ref = operand.ref
    nbytes = int(np.prod(ref.shape, dtype=np.int64)) * DTYPES[ref.dtype].itemsize
    if ref.kind == "buffer":
        return Placed(operand, workspace + parts.buffers[ref.index].offset_bytes + ref.offset_bytes, nbytes)
    if ref.kind == "host":
        return Placed(operand, 0, nbytes, parts.hosts[ref.index].array())
    if ref.kind not in addresses:
        raise UnsupportedModel(f"operand {operand.name} needs a {ref.kind}, which belongs to a decoder")
    return Placed(operand, addresses[ref.kind][ref.index], nbytes)


def _read(value: Any, parts: Parts, device: SimDevice, workspace: int) -> NDArray[Any]:
    if isinstance(value, Const):
        return value.array
    if isinstance(value, WeightValue):
        return value.weight.array().reshape(value.shape)
    assert isinstance(value, Tensor), value
    ref = value.ref
    dtype = DTYPES[ref.dtype]
    nbytes = int(np.prod(ref.shape, dtype=np.int64)) * dtype.itemsize
    raw = device.copy_out(workspace + parts.buffers[ref.index].offset_bytes + ref.offset_bytes, nbytes)
    return np.frombuffer(raw, dtype).reshape(ref.shape)


def _compare(
    nodes: tuple[Node, ...],
    weights: Mapping[str, Weight],
    graph: onnx.GraphProto,
    given: Iterable[Any],
    expected: Iterable[Any],
    rtol: float,
    atol: float,
) -> str:
    names = (i.name for i in graph.input if i.name not in weights)
    inputs = {name: _array(name, value) for name, value in zip(names, given, strict=False)}
    outputs = tuple(o.name for o in graph.output)
    for name, got, wanted in zip(outputs, run_nodes(nodes, weights, inputs, outputs), expected, strict=True):
        want = _array(name, wanted)
        if got.shape != want.shape:
            return f"{name}: shape {got.shape}, expected {want.shape}"
        rtol = max(rtol, 2 * _HALF_ULP.get(str(want.dtype), 0.0))
        got = got.astype(want.dtype)
        a, w = (x.astype(np.float64) if x.dtype.kind in "fV" or str(x.dtype) == "bfloat16" else x for x in (got, want))
        if not np.allclose(a, w, rtol=rtol, atol=atol, equal_nan=True):
            return f"{name}: largest difference {np.nanmax(np.abs(a.astype(np.float64) - w.astype(np.float64))):.3g}"
    return ""


def _array(name: str, value: Any) -> NDArray[Any]:
    if isinstance(value, onnx.TensorProto):
        return np.asarray(onnx.numpy_helper.to_array(value))
    if not isinstance(value, np.ndarray | np.generic):
        raise UnsupportedModel(f"{name!r} is no tensor")
    return np.asarray(value)


def _all_nodes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    found = []
    for node in graph.node:
        found.append(node)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                found += _all_nodes(attribute.g)
    return found
