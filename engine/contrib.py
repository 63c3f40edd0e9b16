"""Operators of onnxruntime: what each takes, as far as it is served. No package lists them for their versions.

A rule reads what it knows of. What a later onnxruntime adds, such as another input of GatedAdd or a limit that holds
after the activation, changes what is computed, and must not be passed over in silence: whatever is not listed here is
refused by name. The lists are onnxruntime 1.32.0's, less what is not served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.graph import Node

MICROSOFT = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Signature:
    """How many inputs and outputs there may be, attributes of any value, and those that may have these values alone."""

    inputs: int
    outputs: int
    free: frozenset[str] = frozenset()
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def _signature(inputs: int, outputs: int, free: str = "", **only: tuple[Any, ...]) -> Signature:
    return Signature(inputs, outputs, frozenset(free.split()), only)


_NORM = "epsilon"
_ROTARY = "interleaved num_heads rotary_embedding_dim scale is_packed_batching"
_EXPERTS = (
    "activation_alpha activation_beta activation_type k normalize_routing_weights swiglu_fusion swiglu_limit "
    "use_sparse_mixer"
)
SIGNATURES: Mapping[tuple[str, str], Signature] = {
    ("", "SimplifiedLayerNormalization"): _signature(2, 2, "axis epsilon stash_type"),
    (MICROSOFT, "CausalConvWithState"): _signature(
        4, 2, "activation ndim dilation channels_last state_window", state_update_capacity=(0,),
        state_channels_last=(-1, 0), state_length=(0,), input_channel_offset=(0,), input_channels=(0,)
    ),
    (MICROSOFT, "FastGelu"): _signature(2, 1),
    (MICROSOFT, "GatedAdd"): _signature(3, 1),
    (MICROSOFT, "GatedDeltaNet"): _signature(
        9, 2, "update_rule gate_activation beta_activation qk_l2_norm scale chunk_size gate_lower_bound",
        state_update_capacity=(0,)
    ),
    (MICROSOFT, "GatedRMSNorm"): _signature(3, 1, _NORM, activation=("silu",)),
    (MICROSOFT, "GatherBlockQuantized"): _signature(4, 1, "bits block_size gather_axis quantize_axis"),
    (MICROSOFT, "Gelu"): _signature(1, 1),
    (MICROSOFT, "GroupQueryAttention"): _signature(
        16, 3, "num_heads kv_num_heads scale softcap do_rotary rotary_interleaved local_window_size "
        "sliding_window_cache qk_norm_epsilon kv_cache_bit_width k_quant_type v_quant_type",
        causal=(1,), smooth_softmax=(0, -1), qk_output=(0,)
    ),
    (MICROSOFT, "LinearAttention"): _signature(
        6, 2, "q_num_heads kv_num_heads update_rule scale chunk_size state_window"
    ),
    (MICROSOFT, "LinearAttentionGate"): _signature(4, 2),
    (MICROSOFT, "MRotaryEmbedding"): _signature(4, 1, f"{_ROTARY} mrope_section mrope_layout"),
    (MICROSOFT, "MatMulNBits"): _signature(6, 1, "K N bits block_size accuracy_level weight_prepacked"),
    (MICROSOFT, "MoE"): _signature(8, 1, _EXPERTS, swiglu_limit_after_activation=(0,)),
    (MICROSOFT, "QMoE"): _signature(
        21, 1, f"{_EXPERTS} expert_weight_bits fc1_expert_weight_bits fc2_expert_weight_bits fc3_expert_weight_bits "
        "block_size quant_type weights_prepacked accuracy_level", swiglu_limit_after_activation=(0,)
    ),
    (MICROSOFT, "QuickGelu"): _signature(1, 1, "alpha"),
    (MICROSOFT, "RotaryEmbedding"): _signature(4, 1, _ROTARY),
    (MICROSOFT, "SkipLayerNormalization"): _signature(5, 4, _NORM),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _signature(4, 4, _NORM),
}  # fmt: skip
"""By domain and operator. An output that is listed may still be refused by the operator's own rule."""


SWITCHES = frozenset({
    "allowzero", "channels_last", "do_rotary", "interleaved", "is_causal", "is_packed_batching", "keepdims",
    "largest", "noop_with_empty_axes", "normalize_routing_weights", "qk_l2_norm", "rotary_interleaved", "saturate",
    "select_last_index", "sliding_window_cache", "sorted", "transA", "transB", "upper", "use_sparse_mixer",
})  # fmt: skip
"""Attributes that are on or off, the standard's too: of any other number runtimes ask whether it is 1, or whether 0."""


def beyond(node: Node) -> str:
    """What a node asks for that nothing here would heed, of onnxruntime's operators above all; "" where nothing is."""
    for name in sorted(SWITCHES & node.attributes.keys()):
        value = node.attributes[name]
        if not isinstance(value, int) or value not in (0, 1):
            return f"{name} = {value!r} is neither 0 nor 1"
    taken = SIGNATURES.get((node.domain, node.op))
    if taken is None:
        return ""
    for name, value in node.attributes.items():
        if name not in taken.free and not any(type(value) is type(v) and value == v for v in taken.only.get(name, ())):
            return f"{name} = {value!r} is not served"
    for what, names, most in (("input", node.inputs, taken.inputs), ("output", node.outputs, taken.outputs)):
        for index, name in enumerate(names[most:], most):
            if name:
                return f"{what} {index} ({name!r}) is not served"
    return ""
