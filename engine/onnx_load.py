"""Read an ONNX decoder: the graph file in memory, weights memory-mapped, every file checked before anything runs.

One rule for links: after resolving links, a data file must lie inside the resolved model folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import NDArray

from engine.errors import ModelFilesError, UnsupportedModel
from engine.graph import DTYPES, DecoderInfo, Dim, Graph, Node, Value, Weight

LFS_MARK = b"version https://git-lfs.github.com/spec/"
_ELEMENT: dict[int, str] = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.BOOL: "bool",
}


def load(folder: Path) -> Graph:
    """Load the decoder in `folder` (genai_config.json, model.onnx, external data).

    Raises ModelFilesError for a file that is missing, truncated, a Git LFS pointer, unreadable or outside the folder,
    and UnsupportedModel for element types that are not served.
    """
    if not folder.is_dir():
        raise ModelFilesError(
            f"model folder {folder} does not exist", "build one with `assay models build`, or give its path"
        )
    config = _read_config(folder)
    decoder = _section(config, "model", "decoder")
    model = _read_model(_inside(folder, str(decoder.get("filename", "model.onnx")), "genai_config.json"))
    weights = dict(_weights(model.graph, folder))
    nodes = tuple(_node(i, n) for i, n in enumerate(model.graph.node))
    inputs = {v.name: _value(v) for v in model.graph.input if v.name not in weights}
    outputs = {v.name: _value(v) for v in model.graph.output}
    info = _info(config, decoder)
    for name, where in ((info.input_ids, inputs), (info.attention_mask, inputs), (info.logits, outputs)):
        if name not in where:
            raise ModelFilesError(
                f"genai_config.json names {name!r}, which the graph does not have",
                "check that both come from one export",
            )
    return Graph(nodes, weights, inputs, outputs, info, recorded_digest(folder))


def recorded_digest(folder: Path) -> str | None:
    """The model digest that the zoo wrote at build, or None for a model from elsewhere. Raises ModelFilesError."""
    path = folder / "zoo.json"
    if not path.is_file():
        return None
    try:
        digest = json.loads(path.read_text()).get("model_digest")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}", "build the model again") from error
    return digest if isinstance(digest, str) else None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "genai_config.json"
    if not path.is_file():
        raise ModelFilesError(f"{path} is missing", "export the model with its genai_config.json")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}", "export the model again") from error
    if not isinstance(config, dict):
        raise ModelFilesError(f"{path} does not hold an object", "export the model again")
    return config


def _section(config: dict[str, Any], *names: str) -> dict[str, Any]:
    here: Any = config
    for name in names:
        here = here.get(name) if isinstance(here, dict) else None
    if not isinstance(here, dict):
        raise ModelFilesError(f"genai_config.json lacks {'.'.join(names)}", "export the model again")
    return here


def _info(config: dict[str, Any], decoder: dict[str, Any]) -> DecoderInfo:
    model = _section(config, "model")
    inputs, outputs = _section(decoder, "inputs"), _section(decoder, "outputs")
    eos = model.get("eos_token_id", [])
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    try:
        heads = int(decoder["num_attention_heads"])
        return DecoderInfo(
            layers=int(decoder["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(decoder.get("num_key_value_heads", heads)),
            head_size=int(decoder["head_size"]),
            hidden=int(decoder["hidden_size"]),
            vocabulary=int(model["vocab_size"]),
            context_length=int(model["context_length"]),
            eos_ids=tuple(int(i) for i in eos_ids),
            input_ids=str(inputs["input_ids"]),
            attention_mask=str(inputs.get("attention_mask", "attention_mask")),
            past_key=str(inputs["past_key_names"]),
            past_value=str(inputs["past_value_names"]),
            present_key=str(outputs["present_key_names"]),
            present_value=str(outputs["present_value_names"]),
            logits=str(outputs.get("logits", "logits")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelFilesError(f"genai_config.json lacks or misstates {error}", "export the model again") from error


def _read_model(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise ModelFilesError(f"{path} is missing", "export the model again, or fetch the whole folder")
    head = path.open("rb").read(len(LFS_MARK))
    if head == LFS_MARK:
        raise ModelFilesError(f"{path} is a Git LFS pointer, not the file", "run `git lfs pull`")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise ModelFilesError(f"{path} is not a readable ONNX file: {error}", "export the model again") from error
    if not model.graph.node:
        raise ModelFilesError(f"{path} holds no graph", "export the model again")
    return model


def _weights(graph: onnx.GraphProto, folder: Path) -> Iterator[tuple[str, Weight]]:
    maps: dict[Path, NDArray[np.uint8]] = {}
    unserved: list[str] = []
    for tensor in graph.initializer:
        dtype = _ELEMENT.get(tensor.data_type)
        if dtype is None:
            unserved.append(
                f"initialiser {tensor.name}: element type {onnx.TensorProto.DataType.Name(tensor.data_type)}"
            )
            continue
        shape = tuple(int(d) for d in tensor.dims)
        expected = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            data = _external(tensor, folder, expected, maps)
        else:
            data = np.frombuffer(onnx.numpy_helper.to_array(tensor).tobytes(), np.uint8)
        if data.nbytes != expected:
            raise ModelFilesError(
                f"initialiser {tensor.name} has {data.nbytes} bytes where {dtype}{list(shape)} needs {expected}",
                "export the model again",
            )
        yield tensor.name, Weight(tensor.name, dtype, shape, data)
    if unserved:
        raise UnsupportedModel(
            f"{len(unserved)} initialisers are of types not served", "export in another precision", tuple(unserved)
        )


def _external(
    tensor: onnx.TensorProto, folder: Path, expected: int, maps: dict[Path, NDArray[np.uint8]]
) -> NDArray[np.uint8]:
    entries = {e.key: e.value for e in tensor.external_data}
    path = _inside(folder, entries.get("location", ""), f"initialiser {tensor.name}")
    try:
        offset, length = int(entries.get("offset", "0")), int(entries.get("length", str(expected)))
    except ValueError as error:
        raise ModelFilesError(
            f"initialiser {tensor.name}: offset or length is no number", "export the model again"
        ) from error
    if path not in maps:
        maps[path] = _map_file(path)
    size = maps[path].nbytes
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelFilesError(
            f"{path.name} has {size} bytes, but initialiser {tensor.name} needs bytes {offset} to {offset + length}",
            "the file is truncated or belongs to another model: fetch or export it again",
        )
    return maps[path][offset : offset + length]


def _map_file(path: Path) -> NDArray[np.uint8]:
    if not path.is_file():
        raise ModelFilesError(f"data file {path} is missing", "fetch the whole model folder, or export again")
    with path.open("rb") as file:
        if file.read(len(LFS_MARK)) == LFS_MARK:
            raise ModelFilesError(f"{path} is a Git LFS pointer, not the file", "run `git lfs pull`")
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, mode="r"))


def _inside(folder: Path, location: str, owner: str) -> Path:
    root = folder.resolve()
    bad = not location or "\\" in location or "\0" in location or Path(location).is_absolute()
    path = (root / location).resolve() if not bad else root
    if bad or not path.is_relative_to(root) or path == root:
        raise ModelFilesError(
            f"{owner}: data location {location!r} is not a file inside the model folder", "export the model again"
        )
    return path


def _node(index: int, node: onnx.NodeProto) -> Node:
    attributes = {a.name: _attribute(a) for a in node.attribute}
    domain = "" if node.domain == "ai.onnx" else node.domain
    return Node(
        node.name or f"{node.op_type}_{index}", node.op_type, domain, tuple(node.input), tuple(node.output), attributes
    )


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, onnx.TensorProto):
        return onnx.numpy_helper.to_array(value)
    return list(value) if isinstance(value, (list, tuple)) else value


def _value(value: onnx.ValueInfoProto) -> Value:
    kind = value.type.tensor_type
    dims: list[Dim] = [d.dim_param or int(d.dim_value) for d in kind.shape.dim]
    return Value(value.name, _ELEMENT.get(kind.elem_type, f"type {kind.elem_type}"), tuple(dims))
