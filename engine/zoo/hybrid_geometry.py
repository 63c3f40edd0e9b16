"""The sizes of a Qwen3.5-MoE decoder, and where its weights come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.zoo.external import Values
from engine.zoo.graph_builder import Linear


@dataclass(frozen=True, slots=True)
class HybridGeometry:
    """The sizes that fix the graph. `heads` and `head_size` are the full-attention layers', `ffn` is an expert's."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    rotary: int
    """Elements of a head that turn."""
    key_heads: int
    value_heads: int
    state_size: int
    """Size of a key head and of a value head of the gated delta layers."""
    taps: int
    ffn: int
    shared_ffn: int
    experts: int
    chosen: int
    vocabulary: int
    context: int
    rope_theta: float
    rms_epsilon: float
    attention_every: int = 4

    def is_attention(self, layer: int) -> bool:
        """Every so many layers; a build too short for that ends with one, since a decoder has a KV cache."""
        return (layer + 1) % self.attention_every == 0 or (
            self.layers < self.attention_every and layer + 1 == self.layers
        )

    @property
    def attention_layers(self) -> list[int]:
        """Numbers of the full-attention layers."""
        return [n for n in range(self.layers) if self.is_attention(n)]

    @property
    def delta_layers(self) -> list[int]:
        """Numbers of the gated delta layers."""
        return [n for n in range(self.layers) if not self.is_attention(n)]

    @property
    def keys(self) -> int:
        """Width of the delta layers' queries, and of their keys."""
        return self.key_heads * self.state_size

    @property
    def states(self) -> int:
        """Width of their values."""
        return self.value_heads * self.state_size

    @property
    def convolved(self) -> int:
        """Channels of the causal convolution: queries, keys, values."""
        return 2 * self.keys + self.states

    @property
    def queries(self) -> int:
        """Width of an attention layer's queries, and of its gate."""
        return self.heads * self.head_size

    @property
    def cached(self) -> int:
        """Width of its keys, and of its values."""
        return self.kv_heads * self.head_size

    @property
    def sections(self) -> list[int]:
        """Pairs that each of the three position rows turns."""
        half, parts = self.rotary // 2, 3
        return [half // parts + (n < half % parts) for n in range(parts)]


class HybridWeights(Protocol):
    """Where the weights come from; each is asked for once, by the exporter's name without `model.` and endings."""

    def embedding(self) -> Values: ...
    def norm(self, name: str) -> Values: ...
    def linear(self, name: str) -> Linear: ...
    def head_norm(self, name: str, size: int) -> Values: ...
    def gate(self, name: str) -> Values: ...
    def delta(self, name: str) -> Values: ...
    def experts(self, name: str) -> Values: ...
