"""A decoder as loaded: nodes, weights that stay in their files, and what the exporter said about it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Dim = int | str
"""A dimension: a number, or the name of a symbol."""

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "int16": np.dtype(np.int16),
    "uint16": np.dtype(np.uint16),
    "int32": np.dtype(np.int32),
    "uint32": np.dtype(np.uint32),
    "int64": np.dtype(np.int64),
    "uint64": np.dtype(np.uint64),
    "float64": np.dtype(np.float64),
    "bool": np.dtype(np.bool_),
}


PACKED = ("int4", "uint4")
"""Element types stored two a byte, the first in the low half."""


def stored_bytes(dtype: str, elements: int) -> int:
    """Bytes that so many elements take in a file."""
    return -(-elements // 2) if dtype in PACKED else elements * DTYPES[dtype].itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """An initialiser: `data` is its bytes, a view of the memory-mapped file (or of the graph file when inline)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(self.data.nbytes)

    def array(self) -> NDArray[Any]:
        """The values, typed and shaped, without a copy; packed ones are unpacked to a byte each."""
        if self.dtype in PACKED:
            return unpack_nibbles(self.data, self.dtype, math.prod(self.shape)).reshape(self.shape)
        return self.data.view(DTYPES[self.dtype]).reshape(self.shape)


def unpack_nibbles(packed: NDArray[np.uint8], dtype: str, elements: int) -> NDArray[Any]:
    """Two elements a byte, the low half first, as int8 or uint8."""
    out = np.empty(packed.size * 2, np.uint8)
    out[0::2] = packed.reshape(-1) & 15
    out[1::2] = packed.reshape(-1) >> 4
    if dtype == "uint4":
        return out[:elements]
    return np.asarray(((out ^ 8).astype(np.int8) - 8)[:elements])


@dataclass(frozen=True, slots=True)
class Value:
    """A graph input or output: element type and dimensions."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


NEWEST = 2**31 - 1
"""The version of a node that is written for whatever its operator means today."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operator; an empty name among `inputs` or `outputs` means absent. Attributes are plain Python values.

    `opset` is the version of its domain that the graph imports.
    """

    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int = NEWEST

    @property
    def full_op(self) -> str:
        """Domain and operator, as reports show it: "com.microsoft::MatMulNBits"."""
        return f"{self.domain or 'ai.onnx'}::{self.op}"

    def input(self, index: int) -> str:
        """Name of input `index`, or "" where absent."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def output(self, index: int) -> str:
        """Name of output `index`, or "" where absent."""
        return self.outputs[index] if index < len(self.outputs) else ""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A branch of an If: its nodes, its own initialisers, and its outputs' names; other names are the outer graph's."""

    nodes: tuple[Node, ...]
    weights: Mapping[str, Weight]
    outputs: tuple[str, ...]


def nodes_within(nodes: Iterable[Node]) -> Iterator[Node]:
    """Nodes, each with those of its branches behind it."""
    for node in nodes:
        yield node
        for value in node.attributes.values():
            if isinstance(value, Subgraph):
                yield from nodes_within(value.nodes)


@dataclass(frozen=True, slots=True)
class Cache:
    """Names of one layer's cached keys and values, as they go in and as they come out."""

    past_key: str
    past_value: str
    present_key: str
    present_value: str


CACHE_KINDS = ("past_key", "past_value", "present_key", "present_value")


@dataclass(frozen=True, slots=True)
class DecoderInfo:
    """What is what, as configs say or structure shows: head geometry, sizes, names; "" where the graph has no such."""

    kv_heads: int
    head_size: int
    vocabulary: int
    context_length: int | None
    """Positions that prompt and new tokens may take; None where nothing says, so that what is asked decides."""
    eos_ids: tuple[int, ...]
    input_ids: str
    attention_mask: str
    logits: str
    caches: tuple[Cache, ...]
    """In the order of layers."""
    position_ids: str = ""
    states: tuple[tuple[str, str], ...] = ()
    """Past and present names of convolution and recurrent states."""
    bound_by: Mapping[str, str] = field(default_factory=dict)
    """What decided each of these, for people: "ids" by "genai_config.json", "caches" by "structure"."""


def sources(bound_by: Mapping[str, str]) -> str:
    """What decided a decoder's names and sizes, in one line: the subjects of each source together."""
    subjects: dict[str, list[str]] = {}
    for subject, source in bound_by.items():
        subjects.setdefault(source, []).append(subject)
    return "; ".join(f"{', '.join(names)} by {source}" for source, names in subjects.items())


@dataclass(frozen=True, slots=True)
class Graph:
    """A decoder: nodes in topological order, weights by name, inputs and outputs, and the exporter's description."""

    nodes: tuple[Node, ...]
    weights: Mapping[str, Weight]
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    info: DecoderInfo
    digest: str | None
    """The model digest written at build, where there is one."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Initialisers of element types that are not served, each with the reason: they are not among the weights."""
    shapes: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    """Shapes that the exporter wrote beside inner values: claims, in which symbols are worth most."""
