"""Read an ONNX decoder: the graph file in memory, weights memory-mapped, every file checked before anything runs.

One rule for links: after resolving links, every file must lie inside the resolved model folder.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray

from engine import opsets
from engine.errors import ModelFilesError
from engine.graph import NEWEST, Dim, Graph, Node, Subgraph, Value, Weight, nodes_within, stored_bytes
from engine.model_config import GENAI, graph_path, read_configs
from engine.model_files import AGAIN, inside, read_object, refuse_pointer
from engine.roles import bind_roles
from engine.structure import web_of

_EXTERNAL_KEYS = ("location", "offset", "length", "checksum", "basepath")
"""What the standard has, and onnxruntime's prepacked_0, ... beside them."""
_MOST_BYTES = 2**31 - 1  # of a graph file: protobuf counts in 32 bits, and calls a longer one corrupt
_ELEMENT: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.BOOL: "bool",
    onnx.TensorProto.INT16: "int16",
    onnx.TensorProto.UINT16: "uint16",
    onnx.TensorProto.UINT32: "uint32",
    onnx.TensorProto.UINT64: "uint64",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.INT4: "int4",
    onnx.TensorProto.UINT4: "uint4",
}


def load(folder: Path, *, hollow: bool = False) -> Graph:
    """Load the decoder in `folder`: its configs, its graph, external data; names by config or structure.

    Initialisers of element types that are not served are listed, to be refused with the nodes. Raises ModelFilesError
    for a file that is missing, truncated, a Git LFS pointer, unreadable or outside the folder, and for a folder whose
    weights are still to be made, unless `hollow` says that only their sizes matter; UnsupportedModel where neither
    config nor structure says what is what.
    """
    try:
        return _load(folder, hollow=hollow)
    except OSError as error:
        raise ModelFilesError(
            f"{error.filename or folder} cannot be read: {error.strerror or error}",
            "check the file's name and permissions, or fetch the model folder again",
        ) from error


def _load(folder: Path, *, hollow: bool) -> Graph:
    if not folder.is_dir():
        raise ModelFilesError(
            f"model folder {folder} does not exist", "build one with `assay models build`, or give its path"
        )
    if not hollow and "hollow_bytes" in _recorded(folder):
        raise ModelFilesError(
            f"the weights in {folder} are still to be made", f"run `assay models fill {folder}`, or plan only"
        )
    told = read_configs(folder)
    _check_built_with_config(folder)
    model = _read_model(graph_path(folder, told))
    unserved: dict[str, str] = {}
    constants = _constants(model.graph)
    weights = dict(_weights([*model.graph.initializer, *constants], folder, unserved))
    imports = opsets.imports_of(model)
    moved = {tensor.name for tensor in constants}

    def read(branch: onnx.GraphProto) -> dict[str, Weight]:
        return dict(_weights(branch.initializer, folder, unserved))

    nodes = tuple(n for n in nodes_of(model.graph, imports, read) if n.op != "Constant" or n.output(0) not in moved)
    unserved |= opsets.unserved(imports, nodes) | _own_functions(model, nodes)
    stored = weights.keys() | unserved.keys()
    inputs = {v.name: v for v in map(_value, model.graph.input) if v.name not in stored}
    outputs = {v.name: v for v in map(_value, model.graph.output)}
    shapes = {v.name: v.shape for v in map(_value, model.graph.value_info)}
    info = bind_roles(web_of(nodes, weights, inputs, outputs, shapes), told)
    return Graph(nodes, weights, inputs, outputs, info, recorded_digest(folder), unserved, shapes)


Reader = Callable[[onnx.GraphProto], Mapping[str, Weight]]
"""What gives the initialisers of a branch."""


def nodes_of(graph: onnx.GraphProto, imports: Mapping[str, int], read: Reader | None = None) -> tuple[Node, ...]:
    """A graph's nodes, in the order of the file, each with the version of its domain; without `read`, all is inline."""
    return tuple(_node(i, n, imports, read or weights_of) for i, n in enumerate(graph.node))


def weights_of(graph: onnx.GraphProto) -> dict[str, Weight]:
    """A graph's initialisers, all inline. Raises ModelFilesError for one that lies in another file."""
    weights: dict[str, Weight] = {}
    for tensor in graph.initializer:
        values = np.ascontiguousarray(_values(tensor, f"initialiser {tensor.name!r}"))
        data = values.reshape(-1).view(np.uint8)
        weights[_text(tensor.name)] = Weight(_text(tensor.name), str(values.dtype), values.shape, data)
    return weights


def recorded_digest(folder: Path) -> str | None:
    """The model digest that the zoo wrote at build, or None for a model from elsewhere. Raises ModelFilesError."""
    digest = _recorded(folder).get("model_digest")
    return digest if isinstance(digest, str) else None


def graph_digests(folder: Path) -> tuple[str, str | None]:
    """Hex sha256 of the graph file, and the model digest that the zoo wrote of a build with weights, if it did."""
    path = graph_path(folder, read_configs(folder))
    recorded = None if "hollow_bytes" in _recorded(folder) else recorded_digest(folder)
    return hashlib.sha256(path.read_bytes()).hexdigest(), recorded


def _recorded(folder: Path) -> dict[str, Any]:
    """What the zoo wrote at build; empty for a model from elsewhere."""
    return read_object(folder, "zoo.json", "build the model again") or {}


def _check_built_with_config(folder: Path) -> None:
    """A build of the zoo without its config would be another model under the same digest. Raises ModelFilesError."""
    files = _recorded(folder).get("files")
    listed = isinstance(files, list) and any(isinstance(f, dict) and f.get("name") == GENAI for f in files)
    if listed and not (folder / GENAI).is_file():
        raise ModelFilesError(f"{folder / GENAI} is missing", "fetch the whole folder, or build the model again")


def _own_functions(model: onnx.ModelProto, nodes: Iterable[Node]) -> dict[str, str]:
    """Operators that the model defines itself and has nodes of: its definition takes the place of any rule here."""
    own = {("" if f.domain == "ai.onnx" else f.domain, f.name) for f in model.functions}
    used = {node.full_op for node in nodes_within(nodes) if (node.domain, node.op) in own}
    return {f"function {op}": f"{op} is a function of the model's own: export with functions inlined" for op in used}


def _read_model(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ModelFilesError(f"{path} is missing", "export the model again, or fetch the whole folder")
    refuse_pointer(path)
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ModelFilesError(
            f"{path} has {size} bytes, and protobuf reads {_MOST_BYTES} at most",
            "export again with weights as external data",
        )
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise ModelFilesError(f"{path} is not a readable ONNX file: {error}", AGAIN) from error
    if not model.graph.node:
        raise ModelFilesError(f"{path} holds no graph", AGAIN)
    _check_once(model.graph)
    return model


def _check_once(graph: onnx.GraphProto) -> None:
    """Each name is one value: of two that are called the same, the graph does not say which is read."""
    made = [t.name for t in graph.initializer] + [name for node in graph.node for name in node.output if name]
    seen = set(made)
    if len(seen) < len(made):
        for name in made:
            if name not in seen:
                raise ModelFilesError(f"the graph makes {_text(name)!r} twice", AGAIN)
            seen.remove(name)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _check_once(attribute.g)


def _constants(graph: onnx.GraphProto) -> list[onnx.TensorProto]:
    """Values of Constant nodes, as initialisers: exporters write weights in either form. Single numbers stay nodes."""
    stored = {tensor.name for tensor in graph.initializer}
    found = []
    for node in graph.node:
        values = [a.t for a in node.attribute if a.name == "value" and a.type == onnx.AttributeProto.TENSOR]
        own = node.op_type == "Constant" and node.domain in ("", "ai.onnx") and len(node.output) == 1
        inline = own and len(values) == 1 and values[0].data_location != onnx.TensorProto.EXTERNAL
        if inline and math.prod(values[0].dims) != 1 and node.output[0] not in stored:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(values[0])
            tensor.name = _text(node.output[0])
            found.append(tensor)
    return found


def _weights(
    tensors: Iterable[onnx.TensorProto], folder: Path, unserved: dict[str, str]
) -> Iterator[tuple[str, Weight]]:
    maps: dict[Path, NDArray[np.uint8]] = {}
    for tensor in tensors:
        _text(tensor.name)
        dtype = _ELEMENT.get(tensor.data_type)
        if dtype is None:
            kind = _type_name(tensor.data_type)
            unserved[tensor.name] = f"initialiser {tensor.name}: element type {kind} is not served"
            continue
        shape = tuple(int(d) for d in tensor.dims)
        if any(d < 0 for d in shape):
            raise ModelFilesError(f"initialiser {tensor.name} has the shape {list(shape)}", AGAIN)
        expected = stored_bytes(dtype, math.prod(shape))
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            data = _external(tensor, folder, expected, maps)
        else:
            data = _inline(tensor)
        if data.nbytes != expected:
            raise ModelFilesError(
                f"initialiser {tensor.name} has {data.nbytes} bytes where {dtype}{list(shape)} needs {expected}",
                AGAIN,
            )
        yield tensor.name, Weight(tensor.name, dtype, shape, data)


def _type_name(data_type: int) -> str:
    known = onnx.TensorProto.DataType
    return known.Name(data_type) if data_type in known.values() else f"number {data_type}"


def _inline(tensor: onnx.TensorProto) -> NDArray[np.uint8]:
    if tensor.HasField("raw_data"):
        return np.frombuffer(tensor.raw_data, np.uint8)
    return np.frombuffer(_values(tensor, f"initialiser {tensor.name}").tobytes(), np.uint8)


def _values(tensor: onnx.TensorProto, owner: str) -> NDArray[Any]:
    """A tensor's values out of the graph file alone: no file is opened for it, wherever it says that they lie."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raise ModelFilesError(f"{owner}: its value lies in another file, which only initialisers may", AGAIN)
    try:
        return np.asarray(onnx.numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError) as error:
        raise ModelFilesError(f"{owner}: its values do not fit its type and shape", AGAIN) from error


def _external(
    tensor: onnx.TensorProto, folder: Path, expected: int, maps: dict[Path, NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    entries = {_text(e.key): _text(e.value) for e in tensor.external_data}
    for key in entries:  # a misspelt offset would read other numbers in silence
        if key not in _EXTERNAL_KEYS and not key.startswith("prepacked_"):
            raise ModelFilesError(f"initialiser {tensor.name}: external data has the unknown entry {key!r}", AGAIN)
    if len(entries) != len(tensor.external_data):
        raise ModelFilesError(f"initialiser {tensor.name}: external data has an entry twice", AGAIN)
    path = inside(folder, entries.get("location", ""), f"initialiser {tensor.name}: data ")
    offset, length = (_bytes(tensor, entries.get(key, str(n))) for key, n in (("offset", 0), ("length", expected)))
    if path not in maps:
        maps[path] = _map_file(path)
    size = maps[path].nbytes
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelFilesError(
            f"{path.name} has {size} bytes, but initialiser {tensor.name} needs bytes {offset} to {offset + length}",
            "the file is truncated or belongs to another model: fetch or export it again",
        )
    return maps[path][offset : offset + length]


def _bytes(tensor: onnx.TensorProto, text: str) -> int:
    digits = text.strip()
    if not re.fullmatch(r"-?[0-9]{1,19}", digits):  # int() would take 1_0 and digits of other scripts
        raise ModelFilesError(f"initialiser {tensor.name}: offset or length is no number", AGAIN)
    return int(digits)


def _map_file(path: Path) -> NDArray[np.uint8]:
    if not path.is_file():
        raise ModelFilesError(f"data file {path} is missing", "fetch the whole model folder, or export again")
    refuse_pointer(path)
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def _node(index: int, node: onnx.NodeProto, imports: Mapping[str, int], read: Reader) -> Node:
    name = _text(node.name) or f"{node.op_type}_{index}"
    attributes = {_text(a.name): _attribute(a, name, imports, read) for a in node.attribute}
    domain = "" if node.domain == "ai.onnx" else _text(node.domain)
    inputs, outputs = (tuple(map(_text, names)) for names in (node.input, node.output))
    opset = imports.get(domain, NEWEST)
    return Node(name, _text(node.op_type), domain, inputs, outputs, attributes, opset)


def _attribute(attribute: onnx.AttributeProto, node: str, imports: Mapping[str, int], read: Reader) -> Any:
    try:
        value = onnx.helper.get_attribute_value(attribute)
    except ValueError as error:
        raise ModelFilesError(f"node {node}: attribute {attribute.name!r} cannot be read", AGAIN) from error
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, onnx.GraphProto):
        return _subgraph(value, imports, read)
    if isinstance(value, onnx.TensorProto):
        return _values(value, f"node {node}, attribute {attribute.name!r}")
    return list(value) if isinstance(value, (list, tuple)) else value


def _subgraph(graph: onnx.GraphProto, imports: Mapping[str, int], read: Reader) -> Subgraph:
    """A branch with initialisers of its own."""
    return Subgraph(nodes_of(graph, imports, read), read(graph), tuple(_text(o.name) for o in graph.output))


def _value(value: onnx.ValueInfoProto) -> Value:
    kind = value.type.tensor_type
    dims: list[Dim] = [_text(d.dim_param) or int(d.dim_value) for d in kind.shape.dim]
    return Value(_text(value.name), _ELEMENT.get(kind.elem_type, _type_name(kind.elem_type)), tuple(dims))


def _text(value: str) -> str:
    """A name as text: protobuf hands out bytes where they are no UTF-8."""
    if not isinstance(value, str):
        raise ModelFilesError(f"the graph holds a name that is no text: {value!r}", AGAIN)
    return value
