"""What every decoder graph is written from: nodes, initialisers and value shapes in the exporter's names and order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto, helper

from engine.zoo.external import Sink, Values
from engine.zoo.quant import BLOCK

MICROSOFT = "com.microsoft"
FLOAT, FLOAT16, INT32, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT32, TensorProto.INT64
UINT8 = TensorProto.UINT8
BATCH, SEQ, PAST, TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"

_MASK = "/model/attn_mask_reformat/attn_mask_subgraph"
_ONE, _ONE_AXIS = "/model/constants/INT64/1", "/model/constants/INT64/[1]"
SEQLENS_K, TOTAL_LENGTH = f"{_MASK}/Sub/Cast/output_0", f"{_MASK}/Gather/Cast/output_0"

Shape = list[str | int]


class Linear(Protocol):
    """A block-quantised weight of N rows and K columns, made or yet to be made; see `quant.PackedLinear`."""

    @property
    def bits(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def codes(self) -> Values: ...
    @property
    def scales(self) -> Values: ...
    @property
    def zero_points(self) -> Values | None: ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A quantised weight whose initialisers stand in the graph; the bytes themselves are gone."""

    tensor: str
    bits: int
    rows: int
    columns: int
    has_zero_points: bool

    @property
    def codes(self) -> str:
        """Name of the codes' initialiser."""
        return f"{self.tensor}.MatMul.weight_Q{self.bits}"

    @property
    def scales(self) -> str:
        """Name of the scales'."""
        return f"{self.tensor}.MatMul.weight_scales"

    @property
    def zero_points(self) -> str:
        """Name of the zero points'."""
        return f"{self.tensor}.MatMul.weight_zero_points"


class GraphBuilder:
    """Adds to a graph front to back; methods return the names of the values they add.

    `element` is the type of activations and caches: FLOAT, or FLOAT16 as exports for a card have it.
    """

    def __init__(self, data: Sink, hidden: int, epsilon: float, element: int) -> None:
        self._data = data
        self._epsilon = epsilon
        self.element = element
        self.stream: Shape = [BATCH, SEQ, hidden]
        self.nodes: list[NodeProto] = []
        self.tensors: list[TensorProto] = []
        self.values: list[ValueInfoProto] = []
        self._constants: set[str] = set()

    def lengths(self) -> None:
        """seqlens_k = sum(mask) - 1 and the total length, both int32, from the attention mask."""
        self.constant(_ONE_AXIS, [1])
        self.simple("ReduceSum", f"{_MASK}/ReduceSum", ["attention_mask", _ONE_AXIS], [BATCH], INT64, keepdims=0)
        self.simple("Sub", f"{_MASK}/Sub", [f"{_MASK}/ReduceSum/output_0", _ONE_AXIS], [BATCH], INT64)
        self.simple("Cast", f"{_MASK}/Sub/Cast", [f"{_MASK}/Sub/output_0"], [BATCH], INT32, to=INT32)
        self.simple("Shape", f"{_MASK}/Shape", ["attention_mask"], [2], INT64)
        self.constant(_ONE, 1)
        self.simple("Gather", f"{_MASK}/Gather", [f"{_MASK}/Shape/output_0", _ONE], [], INT64, axis=0)
        self.simple("Cast", f"{_MASK}/Gather/Cast", [f"{_MASK}/Gather/output_0"], [], INT32, to=INT32)

    def embed(self, table: Values) -> str:
        """Rows of a table of its own."""
        self.initialiser("model.embed_tokens.weight", table)
        return self.simple(
            "Gather", "/model/embed_tokens/Gather", ["model.embed_tokens.weight", "input_ids"], self.stream
        )

    def embed_tied(self, head: Stored) -> str:
        """Rows of the head's own table: one initialiser, two readers; the head reads it 3-D, the gather wants rows."""
        assert not head.has_zero_points, "a tied table with zero points would need them in the gather too"
        rows = [head.rows, head.columns * head.bits // 8]
        flat = self.constant(f"/model/constants/INT64/[{rows[0]}, {rows[1]}]", rows)
        table = self.simple("Reshape", "/model/embed_tokens/Reshape", [head.codes, flat], [*rows], UINT8)
        return self.simple(
            "GatherBlockQuantized",
            "/model/embed_tokens/GatherBlockQuantized",
            [table, "input_ids", head.scales],
            self.stream,
            domain=MICROSOFT,
            bits=head.bits,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )

    def norm(self, name: str, gamma: Values, skip: str, branch: str, *, last: bool = False) -> tuple[str, str]:
        """Norm of skip + branch; returns the normed value and the sum, which is the next skip."""
        weight = f"model.{name}.weight"
        self.initialiser(weight, gamma)
        path = node_path(name)
        out, total = f"{path}/output_0", f"{path}/output_3"
        self.values.append(helper.make_tensor_value_info(out, self.element, self.stream))
        epsilon = self._epsilon
        if not branch:
            op, node = "SimplifiedLayerNormalization", f"{path}/LayerNorm"
            self.node(op, node, [skip, weight], [out], axis=-1, epsilon=epsilon, stash_type=1)
            return out, skip
        outputs = [out] if last else [out, "", "", total]
        if not last:
            self.values.append(helper.make_tensor_value_info(total, self.element, self.stream))
        op, node = "SkipSimplifiedLayerNormalization", f"{path}/SkipLayerNorm"
        self.node(op, node, [skip, branch, weight], outputs, domain=MICROSOFT, epsilon=epsilon)
        return out, total

    def gated_mlp(self, layer: int, ffn: int, gate: str, up: str) -> str:
        """silu(gate) * up, as Sigmoid and two products."""
        node = node_path(f"layers.{layer}.mlp")
        shape: Shape = [BATCH, SEQ, ffn]
        sigmoid = self.simple("Sigmoid", f"{node}/act_fn/Sigmoid", [gate], shape)
        silu = self.simple("Mul", f"{node}/act_fn/Mul", [gate, sigmoid], shape)
        return self.simple("Mul", f"{node}/Mul", [silu, up], shape)

    def store(self, tensor: str, linear: Linear) -> Stored:
        """Write a weight's initialisers and keep only its shape."""
        stored = Stored(tensor, linear.bits, linear.rows, linear.columns, linear.zero_points is not None)
        self.initialiser(stored.codes, linear.codes)
        self.initialiser(stored.scales, linear.scales)
        if linear.zero_points is not None:
            self.initialiser(stored.zero_points, linear.zero_points)
        return stored

    def product(self, hidden: str, node: str, weight: Stored, out: str = "") -> str:
        """MatMulNBits; an output named by the caller is a graph output and gets no value_info."""
        inputs = [hidden, weight.codes, weight.scales]
        if weight.has_zero_points:
            inputs.append(weight.zero_points)
        if not out:
            out = f"{node}/output_0"
            self.values.append(helper.make_tensor_value_info(out, self.element, [BATCH, SEQ, weight.rows]))
        sizes = {"K": weight.columns, "N": weight.rows, "bits": weight.bits, "block_size": BLOCK}
        self.node("MatMulNBits", f"{node}_Q{weight.bits}", inputs, [out], domain=MICROSOFT, **sizes)
        return out

    def initialiser(self, name: str, values: Values) -> str:
        """One tensor of the external data file."""
        tensor = self._data.add(name, values)
        self.tensors.append(tensor)
        self.values.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
        return name

    def constant(self, name: str, value: int | list[int] | np.float16) -> str:
        """A Constant node; one node for each distinct value, however often it is asked for."""
        if name in self._constants:
            return name
        self._constants.add(name)
        array = np.asarray(value) if isinstance(value, np.float16) else np.array(value, np.int64)
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=array.shape, raw_data=array.tobytes())
        self.node("Constant", name.replace("/constants/", "/constant_nodes/"), [], [name], value=tensor)
        self.values.append(helper.make_tensor_value_info(name, kind, list(array.shape)))
        return name

    def simple(
        self,
        op: str,
        name: str,
        inputs: list[str],
        shape: Shape,
        kind: int | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> str:
        """A node with one output, named after it; `kind` is its element type, an activation's unless given."""
        value = f"{name}/output_0"
        self.node(op, name, inputs, [value], domain=domain, **attributes)
        self.values.append(helper.make_tensor_value_info(value, self.element if kind is None else kind, shape))
        return value

    def node(
        self, op: str, name: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any
    ) -> None:
        """A node; its outputs' shapes are for the caller to say."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))

    def close(self, inputs: list[ValueInfoProto], outputs: list[ValueInfoProto], producer_version: str) -> bytes:
        """The model file."""
        graph = GraphProto(
            name="main_graph",
            node=self.nodes,
            initializer=self.tensors,
            input=inputs,
            output=outputs,
            value_info=self.values,
        )
        opsets = [OperatorSetIdProto(domain="", version=22), OperatorSetIdProto(domain=MICROSOFT, version=1)]
        model = ModelProto(
            ir_version=10,
            producer_name="assay zoo",
            producer_version=producer_version,
            opset_import=opsets,
            graph=graph,
        )
        serialised: bytes = model.SerializeToString(deterministic=True)
        return serialised


def node_path(name: str) -> str:
    """The path of a node or value for a weight's name: `layers.0.attn` -> `/model/layers.0/attn`."""
    layers, layer, *rest = name.split(".")
    return "/".join((f"/model/{layers}.{layer}", *rest))
