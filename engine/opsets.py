"""Operator sets: the version of each domain that a graph is written for, and what that version says of its nodes.

An operator of the standard may mean something else in another version (Softmax before 13, Split before 18), or take as
an attribute what later became an input. So each node carries the version that its graph imports, and must be a node of
that version: attributes of the names and types, inputs and outputs of the number that the standard's schema lists.
Operators of onnxruntime have no schemas in the package: `engine.contrib` lists what they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import onnx

from engine import contrib
from engine.errors import ModelFilesError
from engine.graph import NEWEST, Node, Subgraph, nodes_within
from engine.values import Refusal

OLDEST_SERVED = 7
"""Before, element-wise operators broadcast by attributes of their own."""
_MICROSOFT = 1
"""The only version that com.microsoft ever had."""
_AHEAD = {"LayerNormalization": 17}
"""Operators that onnxruntime has in the default domain from opset 1 on, and where the standard has them from."""
_TYPES: Mapping[str, tuple[type, ...]] = {"FLOAT": (float,), "INT": (int,), "STRING": (str,), "GRAPH": (Subgraph,)}
_ITEMS: Mapping[str, type] = {"FLOATS": float, "INTS": int, "STRINGS": bytes}


def imports_of(model: onnx.ModelProto) -> dict[str, int]:
    """Versions by domain, the default domain as "". Raises ModelFilesError for none, or for two of one domain."""
    found: dict[str, int] = {}
    for entry in model.opset_import:
        domain = "" if entry.domain == "ai.onnx" else entry.domain
        if found.setdefault(domain, entry.version) != entry.version:
            raise ModelFilesError(
                f"the graph imports {domain or 'ai.onnx'} in versions {found[domain]} and {entry.version}",
                "export the model again",
            )
    if not found:
        raise ModelFilesError("the graph imports no operator set", "export the model again")
    return found


def unserved(imports: Mapping[str, int], nodes: Iterable[Node]) -> dict[str, str]:
    """Domains that nodes are of and that the graph does not import, or not in a version served: a reason for each."""
    reasons: dict[str, str] = {}
    for domain in dict.fromkeys(node.domain for node in nodes_within(nodes)):
        version, shown = imports.get(domain), domain or "ai.onnx"
        if version is None:
            reasons[f"domain {shown}"] = f"domain {shown} is not imported, and nodes are of it"
        elif not domain and not OLDEST_SERVED <= version <= onnx.defs.onnx_opset_version():
            served = f"{OLDEST_SERVED} to {onnx.defs.onnx_opset_version()}"
            reasons[f"domain {shown}"] = f"domain {shown} in version {version} is not served: {served} are"
        elif domain == "com.microsoft" and version != _MICROSOFT:
            reasons[f"domain {shown}"] = f"domain {shown} in version {version} is not served: {_MICROSOFT} is"
    return reasons


def check(node: Node) -> None:
    """Raises Refusal where a node of the standard is none of its version, or one of onnxruntime asks for more."""
    if beyond := contrib.beyond(node):
        raise Refusal(beyond)
    if node.domain or not _has(node.op):
        return  # SimplifiedLayerNormalization stands in the default domain and in no standard
    schema = _schema(node.op, max(node.opset, _AHEAD.get(node.op, 0)))
    if schema is None:
        raise Refusal(f"ai.onnx {node.opset} has no such operator")
    version = f"ai.onnx {node.opset}" if node.opset != NEWEST else "ai.onnx"
    for name, value in node.attributes.items():
        if name not in schema.attributes:
            raise Refusal(f"{version} has no attribute {name!r} here")
        kind = str(schema.attributes[name].type).rpartition(".")[2]
        if not _fits(value, kind):
            raise Refusal(f"attribute {name} is {value!r}, not of type {kind.lower()}")
    for what, names, least, most in (
        ("inputs", node.inputs, schema.min_input, schema.max_input),
        ("outputs", node.outputs, schema.min_output, schema.max_output),
    ):
        given = len(_without_end(names))
        if given > most or len(names) < least:
            raise Refusal(f"{version} takes {least} to {most} {what} here, not {given}")


def _fits(value: Any, kind: str) -> bool:
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind])
    if kind in _ITEMS:
        return isinstance(value, list) and all(isinstance(v, _ITEMS[kind]) for v in value)
    return value is not None


def _without_end(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names up to the last that is not empty: absent ones at the end are none at all."""
    while names and not names[-1]:
        names = names[:-1]
    return names


@cache
def _has(op: str) -> bool:
    return bool(onnx.defs.has(op))


@cache
def _schema(op: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op, max(1, min(version, onnx.defs.onnx_opset_version())), "")
    except onnx.defs.SchemaError:
        return None
