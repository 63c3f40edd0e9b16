"""Llama-family decoders as ONNX, in the form the onnxruntime-genai model builder writes them.

Node names, tensor names, inputs and their order are the builder's (checked against its 0.18.0 output). Weights are
asked for one by one, in graph order, and go to the external data file at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from onnx import ValueInfoProto, helper

from engine.zoo.external import ExternalData, Sink, Values, WrittenFile, write_file
from engine.zoo.graph_builder import (
    BATCH,
    FLOAT,
    FLOAT16,
    INT64,
    MICROSOFT,
    PAST,
    SEQ,
    SEQLENS_K,
    TOTAL,
    TOTAL_LENGTH,
    GraphBuilder,
    Linear,
    Shape,
    Stored,
    node_path,
)
from engine.zoo.quant import F32

MODEL_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"


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
    qkv_bias: bool = False
    """The packed product has a bias, as an Add of its own."""
    half: bool = False
    """Activations, caches and norms in float16, as exports for a card have them; else float32."""

    @property
    def projections(self) -> tuple[tuple[str, int], ...]:
        """Attention input projections and their output widths, in order."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        if self.fused_qkv:
            return (("qkv_proj", query + 2 * key),)
        return (("q_proj", query), ("k_proj", key), ("v_proj", key))


class DecoderWeights(Protocol):
    """Where a decoder's weights come from; each is asked for once."""

    def embedding(self) -> Values:
        """[vocabulary, hidden], rows of an untied embedding."""
        ...

    def norm(self, name: str) -> Values:
        """[hidden]; `name` is `layers.N.input_layernorm`, `layers.N.post_attention_layernorm` or `final_norm`."""
        ...

    def linear(self, name: str) -> Linear:
        """`name` is `layers.N.attn.ROLE_proj`, `layers.N.mlp.ROLE_proj` or `lm_head`."""
        ...

    def bias(self, name: str, width: int) -> Values:
        """[width], of a packed projection."""
        ...


def write_decoder(
    folder: Path, geometry: DecoderGeometry, weights: DecoderWeights, producer_version: str
) -> list[WrittenFile]:
    """Write `model.onnx` and `model.onnx.data` into `folder`; returns both with size and digest."""
    with ExternalData(folder / DATA_FILE) as data:
        model = decoder_model(geometry, weights, data, producer_version)
        written = data.close()
    return [write_file(folder / MODEL_FILE, model), written]


def decoder_model(geometry: DecoderGeometry, weights: DecoderWeights, data: Sink, producer_version: str) -> bytes:
    """The graph file; tensors go to `data` as they come up."""
    return _Decoder(geometry, weights, data).build(producer_version)


def rotary_caches(geometry: DecoderGeometry) -> tuple[F32, F32]:
    """cos and sin [context, head_size/2]."""
    cos, sin = (
        np.concatenate(list(RotaryTable(kind, geometry.context, geometry.head_size, geometry.rope_theta).chunks()))
        for kind in ("cos", "sin")
    )
    return cos, sin


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """cos or sin [positions, width/2]: every step to the angle rounded to fp32, as torch models compute it.

    The functions come from libm in float64: NumPy's vectorised fp32 ones differ between processors in the last bit,
    and the file's digest would with them.
    """

    kind: str
    positions: int
    width: int
    theta: float
    half: bool = False

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32, or float16 rounded from it."""
        return np.dtype(np.float16 if self.half else np.float32)

    @property
    def shape(self) -> tuple[int, int]:
        """A row for each position."""
        return self.positions, self.width // 2

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Rows in order."""
        for start in range(0, self.positions, _ROTARY_ROWS):
            yield self.rows(start, min(start + _ROTARY_ROWS, self.positions))

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows of some positions."""
        half = self.width // 2
        exponents = np.arange(half, dtype=np.float32) / np.float32(half)
        periods = np.array([math.pow(self.theta, float(e)) for e in exponents], np.float32)
        angles = np.arange(start, stop, dtype=np.float32)[:, None] * (np.float32(1) / periods)[None, :]
        function = math.cos if self.kind == "cos" else math.sin
        flat = angles.ravel().tolist()
        return np.fromiter(map(function, flat), np.float32, len(flat)).reshape(angles.shape).astype(self.dtype)


_ROTARY_ROWS = 4096


class _Decoder(GraphBuilder):
    """Builds the graph front to back."""

    def __init__(self, geometry: DecoderGeometry, weights: DecoderWeights, data: Sink) -> None:
        super().__init__(data, geometry.hidden, geometry.rms_epsilon, FLOAT16 if geometry.half else FLOAT)
        self.g = geometry
        self.weights = weights

    def build(self, producer_version: str) -> bytes:
        g = self.g
        self.lengths()
        head = self.store("lm_head", self.weights.linear("lm_head")) if g.tied else None
        skip = self.embed(self.weights.embedding()) if head is None else self.embed_tied(head)
        for kind in ("cos", "sin"):
            self.initialiser(f"{kind}_cache", RotaryTable(kind, g.context, g.head_size, g.rope_theta, g.half))
        branch = ""
        for layer in range(g.layers):
            name = f"layers.{layer}.input_layernorm"
            normed, skip = self.norm(name, self.weights.norm(name), skip, branch)
            branch = self._attention(layer, normed)
            name = f"layers.{layer}.post_attention_layernorm"
            normed, skip = self.norm(name, self.weights.norm(name), skip, branch)
            branch = self._mlp(layer, normed)
        # The exporter calls the last norm by the number of the layer that would follow.
        name = f"layers.{g.layers}.final_norm_layernorm"
        normed, _ = self.norm(name, self.weights.norm("final_norm"), skip, branch, last=True)
        head = head or self.store("lm_head", self.weights.linear("lm_head"))
        self.product(normed, "/lm_head/MatMul", head, "logits")
        return self.close(self._inputs(), self._outputs(), producer_version)

    def _inputs(self) -> list[ValueInfoProto]:
        cache: Shape = [BATCH, self.g.kv_heads, PAST, "kv_cache_dim"]
        kv = [f"past_key_values.{n}.{part}" for part in ("key", "value") for n in range(self.g.layers)]
        return [
            helper.make_tensor_value_info("input_ids", INT64, [BATCH, SEQ]),
            helper.make_tensor_value_info("attention_mask", INT64, [BATCH, TOTAL]),
            *(helper.make_tensor_value_info(name, self.element, cache) for name in kv),
        ]

    def _outputs(self) -> list[ValueInfoProto]:
        cache: Shape = [BATCH, self.g.kv_heads, TOTAL, "kv_cache_dim"]
        kv = [f"present.{n}.{part}" for part in ("key", "value") for n in range(self.g.layers)]
        return [
            helper.make_tensor_value_info("logits", self.element, [BATCH, SEQ, self.g.vocabulary]),
            *(helper.make_tensor_value_info(name, self.element, cache) for name in kv),
        ]

    def _attention(self, layer: int, hidden: str) -> str:
        g, path = self.g, f"layers.{layer}.attn"
        products = [self._projection(hidden, path, role, width) for role, width in g.projections]
        name = f"{node_path(path)}/GroupQueryAttention"
        out = f"{name}/output_0"
        self.node(
            "GroupQueryAttention",
            name,
            [
                *products,
                *([""] * (3 - len(products))),
                f"past_key_values.{layer}.key",
                f"past_key_values.{layer}.value",
                SEQLENS_K,
                TOTAL_LENGTH,
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
        self.values.append(helper.make_tensor_value_info(out, self.element, [BATCH, SEQ, g.heads * g.head_size]))
        return self._linear(out, path, "o_proj")

    def _projection(self, hidden: str, path: str, role: str, width: int) -> str:
        product = self._linear(hidden, path, role)
        if not self.g.qkv_bias:
            return product
        bias = self.initialiser(f"model.{path}.{role}.Add.bias", self.weights.bias(f"{path}.{role}", width))
        return self.simple("Add", f"{node_path(path)}/{role}/Add", [product, bias], [BATCH, SEQ, width])

    def _mlp(self, layer: int, hidden: str) -> str:
        path = f"layers.{layer}.mlp"
        gate = self._linear(hidden, path, "gate_proj")
        up = self._linear(hidden, path, "up_proj")
        return self._linear(self.gated_mlp(layer, self.g.ffn, gate, up), path, "down_proj")

    def _linear(self, hidden: str, path: str, role: str) -> str:
        stored: Stored = self.store(f"model.{path}.{role}", self.weights.linear(f"{path}.{role}"))
        return self.product(hidden, f"{node_path(path)}/{role}/MatMul", stored)
