"""A decoder as loaded: nodes, weights that stay in their files, and what the exporter said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}


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
        """The values, typed and shaped, without a copy."""
        return self.data.view(DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Value:
    """A graph input or output: element type and dimensions."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """One operator; an empty name among `inputs` or `outputs` means absent. Attributes are plain Python values."""

    name: str
    op: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

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
class DecoderInfo:
    """What genai_config.json says: names, head geometry, end ids. Names with %d take the layer number."""

    layers: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    vocabulary: int
    context_length: int
    eos_ids: tuple[int, ...]
    input_ids: str
    attention_mask: str
    past_key: str
    past_value: str
    present_key: str
    present_value: str
    logits: str


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
