"""Llama-family decoders as ONNX, in the form the onnxruntime-genai model builder writes them.

Node names, tensor names, inputs and their order are the builder's (checked against its 0.18.0 output). Weights are
asked for one by one, in graph order, and go to the external data file at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto, helper

from engine.zoo.external import ExternalData, WrittenFile, write_file
from engine.zoo.quant import BLOCK, F32, PackedLinear

MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
MICROSOFT = "com.microsoft"

_FLOAT, _INT32, _INT64, _UINT8 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.UINT8
_BATCH, _SEQ, _PAST, _TOTAL = "batch_size", "sequence_length", "past_sequence_length", "total_sequence_length"
_MASK = "/model/attn_mask_reformat/attn_mask_subgraph"
_ONE, _ONE_AXIS = "/model/constants/INT64/1", "/model/constants/INT64/[1]"
_SEQLENS_K, _TOTAL_LENGTH = f"{_MASK}/Sub/Cast/output_0", f"{_MASK}/Gather/Cast/output_0"


@dataclass(frozen=True, slots=True)
class DecoderGeometry:
    """The sizes that fix a llama decoder's graph; `context` is the number of rotary rows (positions)."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    context: int
    rope_theta: float
    rms_epsilon: float
    tied: bool
    """Embedding and head are one initialiser, read by GatherBlockQuantized and by MatMulNBits."""
    fused_qkv: bool
    """One qkv_proj product feeds GroupQueryAttention, or three."""

    @property
    def projections(self) -> tuple[tuple[str, int], ...]:
        """Attention input projections and their output widths, in order."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        if self.fused_qkv:
            return (("qkv_proj", query + 2 * key),)
        return (("q_proj", query), ("k_proj", key), ("v_proj", key))


class DecoderWeights(Protocol):
    """Where a decoder's weights come from; each is asked for once."""

    def embedding(self) -> F32:
        """[vocabulary, hidden], rows of an untied embedding."""
        ...

    def norm(self, name: str) -> F32:
        """[hidden]; `name` is `layers.N.input_layernorm`, `layers.N.post_attention_layernorm` or `final_norm`."""
        ...

    def linear(self, name: str) -> PackedLinear:
        """`name` is `layers.N.attn.ROLE_proj`, `layers.N.mlp.ROLE_proj` or `lm_head`."""
        ...


def write_decoder(
    folder: Path, geometry: DecoderGeometry, weights: DecoderWeights, producer_version: str
) -> list[WrittenFile]:
    """Write `model.onnx` and `model.onnx.data` into `folder`; returns both with size and digest."""
    with ExternalData(folder / DATA_FILE) as data:
        graph = _Decoder(geometry, weights, data).build()
        written = data.close()
    opsets = [OperatorSetIdProto(domain="", version=22), OperatorSetIdProto(domain=MICROSOFT, version=1)]
    model = ModelProto(
        ir_version=10, producer_name="assay zoo", producer_version=producer_version, opset_import=opsets, graph=graph
    )
    return [write_file(folder / MODEL_FILE, model.SerializeToString(deterministic=True)), written]


def rotary_caches(geometry: DecoderGeometry) -> tuple[F32, F32]:
    """cos and sin [context, head_size/2]: every step to the angle rounded to fp32, as torch models compute it.

    The functions come from libm in float64: NumPy's vectorised fp32 ones differ between processors in the last bit,
    and the file's digest would with them.
    """
    half = geometry.head_size // 2
    exponents = np.arange(half, dtype=np.float32) / np.float32(half)
    periods = np.array([math.pow(geometry.rope_theta, float(e)) for e in exponents], np.float32)
    angles = np.arange(geometry.context, dtype=np.float32)[:, None] * (np.float32(1) / periods)[None, :]
    flat = angles.ravel().tolist()
    cos = np.fromiter(map(math.cos, flat), np.float32, len(flat)).reshape(angles.shape)
    sin = np.fromiter(map(math.sin, flat), np.float32, len(flat)).reshape(angles.shape)
    return cos, sin


@dataclass(frozen=True, slots=True)
class _Stored:
    """A quantised weight whose initialisers stand in the graph; the bytes themselves are gone."""

    tensor: str
    bits: int
    rows: int
    columns: int
    has_zero_points: bool

    @property
    def codes(self) -> str:
        return f"{self.tensor}.MatMul.weight_Q{self.bits}"

    @property
    def scales(self) -> str:
        return f"{self.tensor}.MatMul.weight_scales"

    @property
    def zero_points(self) -> str:
        return f"{self.tensor}.MatMul.weight_zero_points"


class _Decoder:
    """Builds the graph front to back; methods return the names of the values they add."""

    def __init__(self, geometry: DecoderGeometry, weights: DecoderWeights, data: ExternalData) -> None:
        self.g = geometry
        self.weights = weights
        self.data = data
        self.nodes: list[NodeProto] = []
        self.tensors: list[TensorProto] = []
        self.values: list[ValueInfoProto] = []

    def build(self) -> GraphProto:
        g = self.g
        self._lengths()
        head = self._store("lm_head", "lm_head") if g.tied else None
        skip = self._embed(head)
        cos, sin = rotary_caches(g)
        self._initialiser("cos_cache", cos)
        self._initialiser("sin_cache", sin)
        branch = ""
        for layer in range(g.layers):
            normed, skip = self._norm(f"layers.{layer}.input_layernorm", skip, branch)
            branch = self._attention(layer, normed)
            normed, skip = self._norm(f"layers.{layer}.post_attention_layernorm", skip, branch)
            branch = self._mlp(layer, normed)
        # The builder calls the last norm by the number of the layer that would follow.
        normed, _ = self._norm(f"layers.{g.layers}.final_norm_layernorm", skip, branch, last=True)
        self._product(normed, "/lm_head/MatMul", head or self._store("lm_head", "lm_head"), "logits")
        return GraphProto(
            name="main_graph",
            node=self.nodes,
            initializer=self.tensors,
            input=self._inputs(),
            output=self._outputs(),
            value_info=self.values,
        )

    def _inputs(self) -> list[ValueInfoProto]:
        cache: list[str | int] = [_BATCH, self.g.kv_heads, _PAST, "kv_cache_dim"]
        kv = [f"past_key_values.{n}.{part}" for part in ("key", "value") for n in range(self.g.layers)]
        return [
            helper.make_tensor_value_info("input_ids", _INT64, [_BATCH, _SEQ]),
            helper.make_tensor_value_info("attention_mask", _INT64, [_BATCH, _TOTAL]),
            *(helper.make_tensor_value_info(name, _FLOAT, cache) for name in kv),
        ]

    def _outputs(self) -> list[ValueInfoProto]:
        cache: list[str | int] = [_BATCH, self.g.kv_heads, _TOTAL, "kv_cache_dim"]
        kv = [f"present.{n}.{part}" for part in ("key", "value") for n in range(self.g.layers)]
        return [
            helper.make_tensor_value_info("logits", _FLOAT, [_BATCH, _SEQ, self.g.vocabulary]),
            *(helper.make_tensor_value_info(name, _FLOAT, cache) for name in kv),
        ]

    def _lengths(self) -> None:
        """seqlens_k = sum(mask) - 1 and the total length, both int32, from the attention mask."""
        self._constant(_ONE_AXIS, [1])
        self._simple("ReduceSum", f"{_MASK}/ReduceSum", ["attention_mask", _ONE_AXIS], (_INT64, [_BATCH]), keepdims=0)
        self._simple("Sub", f"{_MASK}/Sub", [f"{_MASK}/ReduceSum/output_0", _ONE_AXIS], (_INT64, [_BATCH]))
        self._simple("Cast", f"{_MASK}/Sub/Cast", [f"{_MASK}/Sub/output_0"], (_INT32, [_BATCH]), to=_INT32)
        self._simple("Shape", f"{_MASK}/Shape", ["attention_mask"], (_INT64, [2]))
        self._constant(_ONE, 1)
        self._simple("Gather", f"{_MASK}/Gather", [f"{_MASK}/Shape/output_0", _ONE], (_INT64, []), axis=0)
        self._simple("Cast", f"{_MASK}/Gather/Cast", [f"{_MASK}/Gather/output_0"], (_INT32, []), to=_INT32)

    def _embed(self, head: _Stored | None) -> str:
        shape: tuple[int, list[Any]] = (_FLOAT, [_BATCH, _SEQ, self.g.hidden])
        if head is None:
            self._initialiser("model.embed_tokens.weight", self.weights.embedding())
            table = ["model.embed_tokens.weight", "input_ids"]
            return self._simple("Gather", "/model/embed_tokens/Gather", table, shape)
        # One initialiser, two readers: the head reads it 3-D, the gather wants rows.
        assert not head.has_zero_points, "a tied table with zero points would need them in the gather too"
        rows = [head.rows, head.columns * head.bits // 8]
        flat = f"/model/constants/INT64/[{rows[0]}, {rows[1]}]"
        self._constant(flat, rows)
        table = [
            self._simple("Reshape", "/model/embed_tokens/Reshape", [head.codes, flat], (_UINT8, rows)),
            "input_ids",
        ]
        return self._simple(
            "GatherBlockQuantized",
            "/model/embed_tokens/GatherBlockQuantized",
            [*table, head.scales],
            shape,
            domain=MICROSOFT,
            bits=head.bits,
            block_size=BLOCK,
            gather_axis=0,
            quantize_axis=1,
        )

    def _norm(self, name: str, skip: str, branch: str, *, last: bool = False) -> tuple[str, str]:
        """Norm of skip + branch; returns the normed value and the sum, which is the next skip."""
        weight = f"model.{name}.weight"
        self._initialiser(weight, self.weights.norm("final_norm" if last else name))
        shape: list[str | int] = [_BATCH, _SEQ, self.g.hidden]
        path = _node_path(name)
        out, total = f"{path}/output_0", f"{path}/output_3"
        self.values.append(helper.make_tensor_value_info(out, _FLOAT, shape))
        epsilon = self.g.rms_epsilon
        if not branch:
            op, node = "SimplifiedLayerNormalization", f"{path}/LayerNorm"
            self._node(op, node, [skip, weight], [out], axis=-1, epsilon=epsilon, stash_type=1)
            return out, skip
        outputs = [out] if last else [out, "", "", total]
        if not last:
            self.values.append(helper.make_tensor_value_info(total, _FLOAT, shape))
        op, node = "SkipSimplifiedLayerNormalization", f"{path}/SkipLayerNorm"
        self._node(op, node, [skip, branch, weight], outputs, domain=MICROSOFT, epsilon=epsilon)
        return out, total

    def _attention(self, layer: int, hidden: str) -> str:
        g, path = self.g, f"layers.{layer}.attn"
        products = [self._linear(hidden, path, role) for role, _ in g.projections]
        name = f"{_node_path(path)}/GroupQueryAttention"
        out = f"{name}/output_0"
        self._node(
            "GroupQueryAttention",
            name,
            [
                *products,
                *([""] * (3 - len(products))),
                f"past_key_values.{layer}.key",
                f"past_key_values.{layer}.value",
                _SEQLENS_K,
                _TOTAL_LENGTH,
                "cos_cache",
                "sin_cache",
                *([""] * 3),
            ],
            [out, f"present.{layer}.key", f"present.{layer}.value"],
            domain=MICROSOFT,
            num_heads=g.heads,
            kv_num_heads=g.kv_heads,
            scale=1 / math.sqrt(g.head_size),
            local_window_size=-1,
            softcap=0.0,
            do_rotary=1,
            rotary_interleaved=0,
        )
        self.values.append(helper.make_tensor_value_info(out, _FLOAT, [_BATCH, _SEQ, g.heads * g.head_size]))
        return self._linear(out, path, "o_proj")

    def _mlp(self, layer: int, hidden: str) -> str:
        path = f"layers.{layer}.mlp"
        node = _node_path(path)
        shape: tuple[int, list[Any]] = (_FLOAT, [_BATCH, _SEQ, self.g.ffn])
        gate = self._linear(hidden, path, "gate_proj")
        up = self._linear(hidden, path, "up_proj")
        sigmoid = self._simple("Sigmoid", f"{node}/act_fn/Sigmoid", [gate], shape)
        silu = self._simple("Mul", f"{node}/act_fn/Mul", [gate, sigmoid], shape)
        product = self._simple("Mul", f"{node}/Mul", [silu, up], shape)
        return self._linear(product, path, "down_proj")

    def _linear(self, hidden: str, path: str, role: str) -> str:
        return self._product(
            hidden, f"{_node_path(path)}/{role}/MatMul", self._store(f"model.{path}.{role}", f"{path}.{role}")
        )

    def _product(self, hidden: str, node: str, weight: _Stored, out: str = "") -> str:
        """MatMulNBits; an output named by the caller is a graph output and gets no value_info."""
        inputs = [hidden, weight.codes, weight.scales]
        if weight.has_zero_points:
            inputs.append(weight.zero_points)
        if not out:
            out = f"{node}/output_0"
            self.values.append(helper.make_tensor_value_info(out, _FLOAT, [_BATCH, _SEQ, weight.rows]))
        sizes = {"K": weight.columns, "N": weight.rows, "bits": weight.bits, "block_size": BLOCK}
        self._node("MatMulNBits", f"{node}_Q{weight.bits}", inputs, [out], domain=MICROSOFT, **sizes)
        return out

    def _store(self, tensor: str, name: str) -> _Stored:
        """Ask for a weight, write it, and keep only its shape."""
        linear = self.weights.linear(name)
        stored = _Stored(tensor, linear.bits, linear.rows, linear.columns, linear.zero_points is not None)
        self._initialiser(stored.codes, linear.codes)
        self._initialiser(stored.scales, linear.scales)
        if linear.zero_points is not None:
            self._initialiser(stored.zero_points, linear.zero_points)
        return stored

    def _initialiser(self, name: str, values: Any) -> None:
        tensor = self.data.add(name, values)
        self.tensors.append(tensor)
        self.values.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))

    def _constant(self, name: str, value: int | list[int]) -> None:
        array = np.array(value, np.int64)
        tensor = TensorProto(name=name, data_type=_INT64, dims=array.shape, raw_data=array.tobytes())
        self._node("Constant", name.replace("/constants/", "/constant_nodes/"), [], [name], value=tensor)
        self.values.append(helper.make_tensor_value_info(name, _INT64, list(array.shape)))

    def _simple(
        self, op: str, name: str, inputs: list[str], out: tuple[int, list[Any]], domain: str = "", **attributes: Any
    ) -> str:
        """A node with one output, named after it."""
        value = f"{name}/output_0"
        self._node(op, name, inputs, [value], domain=domain, **attributes)
        self.values.append(helper.make_tensor_value_info(value, out[0], out[1]))
        return value

    def _node(
        self, op: str, name: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any
    ) -> None:
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attributes))


def _node_path(name: str) -> str:
    """The path of a node or value for a weight's name: `layers.0.attn` -> `/model/layers.0/attn`."""
    layers, layer, rest = name.split(".", 2)
    return f"/model/{layers}.{layer}/{rest.replace('.', '/')}"
