"""Qwen3.5-MoE decoders as ONNX: gated delta layers with a full-attention one now and then, experts in every layer.

Node and tensor names, inputs and their order are the exporter's (onnxruntime-genai 0.18.0, LinearAttention form, raw
QMoE rows).
"""

from __future__ import annotations

import math

import numpy as np
from onnx import ValueInfoProto, helper

from engine.zoo.external import Sink
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
    Shape,
    node_path,
)
from engine.zoo.hybrid_geometry import HybridGeometry, HybridWeights
from engine.zoo.quant import BLOCK
from engine.zoo.writer import RotaryTable


def hybrid_model(geometry: HybridGeometry, weights: HybridWeights, data: Sink, producer_version: str) -> bytes:
    """The graph file; tensors go to `data` as they come up."""
    return _Hybrid(geometry, weights, data).build(producer_version)


class _Hybrid(GraphBuilder):
    """Builds the graph front to back."""

    def __init__(self, geometry: HybridGeometry, weights: HybridWeights, data: Sink) -> None:
        super().__init__(data, geometry.hidden, geometry.rms_epsilon, FLOAT16)
        self.g = geometry
        self.weights = weights

    def build(self, producer_version: str) -> bytes:
        g = self.g
        self.lengths()
        skip = self.embed(self.weights.embedding())
        branch = ""
        for layer in range(g.layers):
            name = f"layers.{layer}.input_layernorm"
            normed, skip = self.norm(name, self.weights.norm(name), skip, branch)
            branch = self._attention(layer, normed) if g.is_attention(layer) else self._delta(layer, normed)
            name = f"layers.{layer}.post_attention_layernorm"
            normed, skip = self.norm(name, self.weights.norm(name), skip, branch)
            branch = self._experts(layer, normed)
        name = f"layers.{g.layers}.final_norm_layernorm"
        normed, _ = self.norm(name, self.weights.norm("final_norm"), skip, branch, last=True)
        self.product(normed, "/lm_head/MatMul", self.store("lm_head", self.weights.linear("lm_head")), "logits")
        return self.close(self._inputs(), self._outputs(), producer_version)

    def _inputs(self) -> list[ValueInfoProto]:
        plain: list[tuple[str, int, Shape]] = [
            ("input_ids", INT64, [BATCH, SEQ]),
            ("attention_mask", INT64, [BATCH, TOTAL]),
            ("position_ids", INT64, [3, BATCH, SEQ]),
        ]
        return [helper.make_tensor_value_info(*row) for row in plain] + self._carried("past_key_values", "past", PAST)

    def _outputs(self) -> list[ValueInfoProto]:
        logits = helper.make_tensor_value_info("logits", self.element, [BATCH, SEQ, self.g.vocabulary])
        return [logits, *self._carried("present", "present", TOTAL)]

    def _carried(self, cache: str, state: str, length: str) -> list[ValueInfoProto]:
        g = self.g
        conv: Shape = [BATCH, g.convolved, g.taps - 1]
        recurrent: Shape = [BATCH, g.value_heads, g.state_size, g.state_size]
        kv: Shape = [BATCH, g.kv_heads, length, "kv_cache_dim"]
        named: list[tuple[str, Shape]] = [
            *((f"{cache}.{n}.{part}", kv) for part in ("key", "value") for n in g.attention_layers),
            *((f"{state}.{n}.conv", conv) for n in g.delta_layers),
            *((f"{state}.{n}.recurrent", recurrent) for n in g.delta_layers),
        ]
        return [helper.make_tensor_value_info(name, self.element, shape) for name, shape in named]

    # -- gated delta

    def _delta(self, layer: int, hidden: str) -> str:
        g, path = self.g, f"layers.{layer}.linear_attn"
        node = node_path(path)
        tensor = f"model.{path}"
        qkv = self._linear(hidden, path, "qkv_proj")
        z = self._linear(hidden, path, "z_proj")
        raw = {}
        for role in ("b_proj", "a_proj"):
            weight = self.initialiser(f"{tensor}.{role}.MatMul.weight", self.weights.gate(f"{path}.{role}"))
            raw[role] = self.simple("MatMul", f"{node}/{role}/MatMul", [hidden, weight], [BATCH, SEQ, g.value_heads])
        query, key, value = self._convolved(layer, qkv)
        query, key = (self._unit(node, which, x) for which, x in (("q", query), ("k", key)))
        factor = 1 / math.sqrt(g.state_size)
        scale = self.constant(f"/model/constants/FLOAT16/{factor}", np.float16(factor))
        query = self.simple("Mul", f"{node}/q_scaled/Mul", [query, scale], [BATCH, SEQ, g.keys])
        inputs = [raw["a_proj"], *(self._stored(tensor, path, n) for n in ("dt_bias", "neg_exp_A")), raw["b_proj"]]
        gates = [f"{node}/LinearAttentionGate/output_{n}" for n in range(2)]
        self.node("LinearAttentionGate", f"{node}/LinearAttentionGate", inputs, gates, domain=MICROSOFT)
        self._say(gates, [BATCH, SEQ, g.value_heads])
        out = f"{node}/LinearAttention/output_0"
        self.node(
            "LinearAttention",
            f"{node}/LinearAttention",
            [query, key, value, f"past.{layer}.recurrent", *gates],
            [out, f"present.{layer}.recurrent"],
            domain=MICROSOFT,
            q_num_heads=g.key_heads,
            kv_num_heads=g.value_heads,
            update_rule="gated_delta",
            scale=1.0,
            state_window=0,
        )
        self._say([out], [BATCH, SEQ, g.states])
        weight = self.initialiser(f"{tensor}.norm.weight", self.weights.head_norm(f"{path}.norm", g.state_size))
        normed = self.simple(
            "GatedRMSNorm",
            f"{node}/GatedRMSNorm",
            [out, weight, z],
            [BATCH, SEQ, g.states],
            domain=MICROSOFT,
            epsilon=g.rms_epsilon,
        )
        return self._linear(normed, path, "out_proj")

    def _convolved(self, layer: int, qkv: str) -> list[str]:
        g, path = self.g, f"layers.{layer}.linear_attn"
        node, tensor = node_path(path), f"model.{path}"
        turned: Shape = [BATCH, g.convolved, SEQ]
        x = self.simple("Transpose", f"{node}/qkv_proj/Transpose", [qkv], turned, perm=[0, 2, 1])
        weights = [self._stored(tensor, path, f"conv1d.{n}") for n in ("weight", "bias")]
        out = f"{node}/CausalConvWithState/output_0"
        self.node(
            "CausalConvWithState",
            f"{node}/CausalConvWithState",
            [x, *weights, f"past.{layer}.conv"],
            [out, f"present.{layer}.conv"],
            domain=MICROSOFT,
            ndim=1,
            activation="silu",
            state_window=0,
        )
        self._say([out], turned)
        back = self.simple("Transpose", f"{node}/conv_out/Transpose", [out], [BATCH, SEQ, g.convolved], perm=[0, 2, 1])
        return self._split(f"{node}/split_qkv/Split", back, [g.keys, g.keys, g.states], [BATCH, SEQ])

    def _unit(self, node: str, which: str, x: str) -> str:
        """Each head over its L2 norm."""
        g = self.g
        heads: Shape = [BATCH, SEQ, g.key_heads, g.state_size]
        flat = self._reshape(f"{node}/{which}_l2norm/flat/Reshape", x, [0, 0, g.key_heads, g.state_size], heads)
        unit = self.simple("LpNormalization", f"{node}/{which}_l2norm/LpNormalization", [flat], heads, axis=-1, p=2)
        return self._reshape(f"{node}/{which}_l2norm/unflat/Reshape", unit, [0, 0, g.keys], [BATCH, SEQ, g.keys])

    def _stored(self, tensor: str, path: str, name: str) -> str:
        return self.initialiser(f"{tensor}.{name}", self.weights.delta(f"{path}.{name}"))

    # -- attention

    def _attention(self, layer: int, hidden: str) -> str:
        g, path = self.g, f"layers.{layer}.attn"
        node = node_path(path)
        packed = self._linear(hidden, path, "qkv_proj")
        both, key, value = self._split(
            f"{node}/qkv_proj/Split", packed, [2 * g.queries, g.cached, g.cached], [BATCH, SEQ]
        )
        heads: Shape = [BATCH, SEQ, g.heads, 2 * g.head_size]
        both = self._reshape(f"{node}/q_gate/Reshape", both, [0, 0, g.heads, 2 * g.head_size], heads)
        query, gate = self._split(f"{node}/q_gate/Split", both, [g.head_size, g.head_size], [BATCH, SEQ, g.heads])
        wide: Shape = [BATCH, SEQ, g.queries]
        query = self._reshape(f"{node}/q_proj/Reshape", query, [0, 0, g.queries], wide)
        gate = self._reshape(f"{node}/gate/Reshape", gate, [0, 0, g.queries], wide)
        query = self._turned(path, "q", self._head_norm(path, "q", query, g.queries), g.heads, g.queries)
        key = self._turned(path, "k", self._head_norm(path, "k", key, g.cached), g.kv_heads, g.cached)
        out = f"{node}/GroupQueryAttention/output_0"
        self.node(
            "GroupQueryAttention",
            f"{node}/GroupQueryAttention",
            [
                query,
                key,
                value,
                f"past_key_values.{layer}.key",
                f"past_key_values.{layer}.value",
                SEQLENS_K,
                TOTAL_LENGTH,
                *([""] * 5),
            ],
            [out, f"present.{layer}.key", f"present.{layer}.value"],
            domain=MICROSOFT,
            num_heads=g.heads,
            kv_num_heads=g.kv_heads,
            scale=1 / math.sqrt(g.head_size),
            local_window_size=-1,
            softcap=0.0,
            do_rotary=0,
            rotary_interleaved=0,
        )
        self._say([out], wide)
        open_ = self.simple("Sigmoid", f"{node}/gate/Sigmoid", [gate], wide)
        return self._linear(self.simple("Mul", f"{node}/gate/Mul", [out, open_], wide), path, "o_proj")

    def _head_norm(self, path: str, which: str, x: str, width: int) -> str:
        g, node = self.g, f"{node_path(path)}/{which}_norm"
        count = "num_attention_heads" if which == "q" else "num_key_value_heads"
        heads: Shape = [BATCH, f"{SEQ} * {count}", g.head_size]
        flat = self._reshape(f"{node}/Reshape_1", x, [0, -1, g.head_size], heads)
        weight = f"model.{path}.{which}_norm.layernorm.weight"
        self.initialiser(weight, self.weights.head_norm(f"{path}.{which}_norm", g.head_size))
        normed = self.simple(
            "SimplifiedLayerNormalization",
            f"{node}/SimplifiedLayerNormalization",
            [flat, weight],
            heads,
            epsilon=g.rms_epsilon,
            axis=-1,
            stash_type=1,
        )
        return self._reshape(f"{node}/Reshape_2", normed, [0, -1, width], [BATCH, SEQ, width])

    def _turned(self, path: str, which: str, x: str, heads: int, width: int) -> str:
        """Rotary in float32, between two casts; its tables are the graph's one pair."""
        g, node = self.g, f"{node_path(path)}/{which}_rotary/MRotaryEmbedding"
        shape: Shape = [BATCH, SEQ, width]
        for kind in ("cos", "sin"):
            if not any(t.name == f"{kind}_cache" for t in self.tensors):
                self.initialiser(f"{kind}_cache", RotaryTable(kind, g.context, g.rotary, g.rope_theta))
        x = self.simple("Cast", f"{node}/root_input/Cast", [x], shape, FLOAT, to=FLOAT)
        turned, out = f"{node}/output_0/Cast/output_0", f"{node}/output_0"
        self.node(
            "MRotaryEmbedding",
            node,
            [x, "position_ids", "cos_cache", "sin_cache"],
            [turned],
            domain=MICROSOFT,
            interleaved=0,
            rotary_embedding_dim=g.rotary,
            num_heads=heads,
            mrope_section=g.sections,
            mrope_layout=1,
            is_packed_batching=0,
        )
        self.values.append(helper.make_tensor_value_info(turned, FLOAT, shape))
        self.node("Cast", f"{node}/output_0/Cast", [turned], [out], to=FLOAT16)
        self._say([out], shape)
        return out

    # -- experts

    def _experts(self, layer: int, hidden: str) -> str:
        g, path = self.g, f"layers.{layer}.moe"
        node, tensor = node_path(path), f"model.{path}.experts"
        router = self._linear(hidden, path, "router")
        flat: Shape = [f"{BATCH} * {SEQ}", g.experts]
        router = self._reshape(f"{node}/router/Reshape", router, [-1, g.experts], flat)
        inputs = [hidden, router]
        stored = {
            f"{name}.{part}": self.initialiser(f"{tensor}.{name}.{part}", self.weights.experts(f"{path}.{name}.{part}"))
            for part in ("qweight", "scales", "bias")
            for name in ("gate_up_proj", "down_proj")
        }
        inputs += [stored[f"{n}.{p}"] for n in ("gate_up_proj", "down_proj") for p in ("qweight", "scales", "bias")]
        routed = self.simple(
            "QMoE",
            f"{node}/QMoE",
            [*inputs, *([""] * 6)],
            self.stream,
            domain=MICROSOFT,
            activation_alpha=1.0,
            activation_beta=0.0,
            activation_type="swiglu",
            expert_weight_bits=4,
            k=g.chosen,
            normalize_routing_weights=1,
            swiglu_fusion=1,
            use_sparse_mixer=0,
            block_size=BLOCK,
            weights_prepacked=0,
        )
        mlp = f"layers.{layer}.mlp"
        gate, up = self._linear(hidden, mlp, "gate_proj"), self._linear(hidden, mlp, "up_proj")
        shared = self._linear(self.gated_mlp(layer, g.shared_ffn, gate, up), mlp, "down_proj")
        raw = self._linear(hidden, f"layers.{layer}", "shared_expert_gate")
        opening = f"/model/layers.{layer}/shared_expert_gate"
        open_ = self.simple("Sigmoid", f"{opening}/Sigmoid", [raw], [BATCH, SEQ, 1])
        return self.simple("GatedAdd", f"{node}/GatedAdd", [routed, shared, open_], self.stream, domain=MICROSOFT)

    # -- parts

    def _linear(self, hidden: str, path: str, role: str) -> str:
        stored = self.store(f"model.{path}.{role}", self.weights.linear(f"{path}.{role}"))
        return self.product(hidden, f"{node_path(path)}/{role}/MatMul", stored)

    def _split(self, node: str, x: str, sizes: list[int], lead: Shape) -> list[str]:
        """Parts of the last axis, their sizes in a Constant."""
        outputs = [f"{node}/output_{n}" for n in range(len(sizes))]
        self.node("Split", node, [x, self._sizes(sizes)], outputs, axis=-1)
        for name, size in zip(outputs, sizes, strict=True):
            self._say([name], [*lead, size])
        return outputs

    def _reshape(self, node: str, x: str, target: list[int], shape: Shape) -> str:
        return self.simple("Reshape", node, [x, self._sizes(target)], shape)

    def _sizes(self, sizes: list[int]) -> str:
        return self.constant(f"/model/constants/INT64/{sizes}", sizes)

    def _say(self, names: list[str], shape: Shape) -> None:
        self.values += [helper.make_tensor_value_info(name, self.element, shape) for name in names]
