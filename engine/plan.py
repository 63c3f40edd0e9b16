"""A plan is data: the steps of one forward pass, each with its kernel, operands, touches and capture rule.

Simulator, CUDA backend, capture planner, counters and floors all read this one list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.graph import Weight
from engine.symbols import NO_SYMBOLS, Symbols

RefKind = Literal["buffer", "key", "constant", "kv_key", "kv_value", "state", "host", "control"]
Access = Literal["r", "w", "rw"]

SeamReason = Literal[
    "CaptureRecordingFailed",
    "HostControlFlowOrSequence",
    "UnresolvedOutputShape",
    "UnresolvedInputShape",
    "ClassifierDisqualified",
    "KernelNotWarmed",
    "KernelCaptureUnsupported",
]
"""Why a step cannot be recorded; order and names of the reference, onnx-genai section 2.2."""

TARGETS = ("plain", "fused")
"""plain: a step an operator, as the graph has them; fused: what one launch can do is one step."""

CONTROLS: Mapping[str, tuple[str, int]] = {
    "length": ("int64", 1),
    "gap": ("float32", 1),
    "ahead": ("int32", 1),
    "ids": ("int64", 0),
    "routed": ("int32", 0),
}
"""Device-side scalars, as (dtype, elements; 0: the prompt chunk's length). `length` is the count of cached positions,
`ahead` how many tokens of the prompt come after this chunk, `ids` the tokens that go in next, `gap` the distance
between the two best logits (NaN: a logit was not finite), `routed` the experts that the mixtures' steps chose."""


@dataclass(frozen=True, slots=True)
class Ref:
    """One operand: what it names, its element type and shape, and how far into it the view starts.

    `index` numbers a buffer, key, constant, host table, state or layer (kv_key, kv_value); for control it is -1. `name`
    is the same in the plans of all row counts.
    """

    kind: RefKind
    index: int
    dtype: str
    shape: tuple[int, ...]
    name: str = ""
    offset_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Operand:
    """A named argument of a kernel: its Ref and whether the kernel reads or writes it."""

    name: str
    ref: Ref
    access: Access = "r"


@dataclass(frozen=True, slots=True)
class Buffer:
    """An activation: its place in the workspace. Buffers whose lives do not overlap share bytes."""

    index: int
    name: str
    nbytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Host bytes that go to one place in a key."""

    offset_bytes: int
    weight: Weight


@dataclass(frozen=True, slots=True)
class Key:
    """The unit of residency: one weight initialiser, or one expert's share of a bank's initialisers.

    `record` groups codes, scales and zero points of one weight. An expert has `further` pieces and a `label`.
    """

    index: int
    weight: Weight
    record: int
    further: tuple[Piece, ...] = ()
    label: str = ""
    nbytes: int = field(init=False)
    """Size in bytes: of an expert, of all its pieces."""
    span_bytes: int = field(init=False)
    """From the first byte to the last, with what lies between pieces."""

    def __post_init__(self) -> None:
        last = self.further[-1] if self.further else Piece(0, self.weight)
        object.__setattr__(self, "nbytes", sum(piece.weight.nbytes for piece in self.pieces))
        object.__setattr__(self, "span_bytes", last.offset_bytes + last.weight.nbytes)

    @property
    def name(self) -> str:
        """The initialiser's name, or the expert's."""
        return self.label or self.weight.name

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """What is copied to bring the key in."""
        return (Piece(0, self.weight), *self.further)


@dataclass(frozen=True, slots=True)
class Part:
    """One operand of an expert: the bank's operand name, element type, one expert's shape, its place in the key."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A bank whose experts are keys of their own: expert e is key `first_key` + e. Each token chooses `chosen`."""

    first_key: int
    count: int
    chosen: int
    parts: tuple[Part, ...]

    @property
    def keys(self) -> range:
        """All of them."""
        return range(self.first_key, self.first_key + self.count)


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel launch, or one host act where `reason` says why it cannot be recorded.

    `params` are scalars baked into the launch; nothing in them may change from token to token.
    `gather_bytes` are embedding bytes read in place, which are no touch.
    """

    index: int
    node: str
    op: str
    kernel: str
    operands: tuple[Operand, ...]
    params: Mapping[str, Any]
    gather_bytes: int = 0
    reason: SeamReason | None = None
    detail: str = ""
    grows: str = ""
    """An operand whose extent grows from token to token, in words; empty for none. Such a step is never recorded."""
    experts: Experts | None = None
    """Keys that it reads as its tokens' routing has it, beside those among its operands."""
    keys: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Keys that the step reads in every pass: its touches, but for experts. Asked for in every pass, so kept."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", tuple([o.ref.index for o in self.operands if o.ref.kind == "key"]))


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """The KV cache: `layers` layers of keys and values, each [capacity, kv_heads, head_size] in `dtype` (seq-major)."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: str
    token_bytes: int
    """Bytes of one position in one layer's keys (values the same)."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one position over all layers, keys and values."""
        return self.layers * 2 * self.token_bytes


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A recurrent or convolution state: its input's and output's names, and its float32 extents for one sequence."""

    name: str
    present: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return 4 * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass of `rows` tokens of one sequence.

    `workspace_bytes` holds all buffers; `logits` is the float32 row of the last token.
    """

    rows: int
    steps: tuple[Step, ...]
    keys: tuple[Key, ...]
    constants: tuple[Weight, ...]
    hosts: tuple[Weight, ...]
    buffers: tuple[Buffer, ...]
    workspace_bytes: int
    kv: KvGeometry
    states: tuple[StateSpec, ...]
    logits: Ref
    symbols: Symbols = NO_SYMBOLS
    """Which of the graph's symbols grow, and which are pinned."""
    touches: int = field(init=False)
    """Touches of every forward pass: one step reading one key. Experts are touched as routed, and come on top."""
    gather_bytes: int = field(init=False)
    """Embedding bytes that one forward pass reads in place."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "touches", sum(len(s.keys) for s in self.steps))
        object.__setattr__(self, "gather_bytes", sum(s.gather_bytes for s in self.steps))

    @property
    def touched_bytes(self) -> int:
        """Key bytes that every forward pass asks for."""
        return sum(self.keys[k].nbytes for s in self.steps for k in s.keys)

    @property
    def gathers(self) -> Mapping[str, int]:
        """Embedding bytes that one forward pass reads in place, by the table whose rows they are."""
        found: dict[str, int] = {}
        for step in self.steps:
            for table in (o.ref.name for o in step.operands if o.ref.kind == "host" and step.gather_bytes):
                found[table] = found.get(table, 0) + step.gather_bytes
                break  # codes, scales and zero points of one table are one
        return found

    @property
    def weight_bytes(self) -> int:
        """W: bytes of all keys, each counted once."""
        return sum(k.nbytes for k in self.keys)

    @property
    def least_read_bytes(self) -> int:
        """Key bytes that any pass reads, each key once: all of them, but of experts what one token chooses."""
        banks = [step.experts for step in self.steps if step.experts is not None]
        chosen = sum(self.keys[k].nbytes for bank in banks for k in bank.keys[: bank.chosen])
        return self.weight_bytes - sum(self.keys[k].nbytes for bank in banks for k in bank.keys) + chosen

    @property
    def largest_step_bytes(self) -> int:
        """Key bytes of the step that reads the most, of experts as many as one token chooses."""
        return max((sum(self.keys[k].nbytes for k in self.least_keys(s)) for s in self.steps), default=0)

    def least_keys(self, step: Step) -> tuple[int, ...]:
        """Keys that a step cannot do without at once: all of its own, and as many experts as one token chooses."""
        if step.experts is None:
            return step.keys
        return (*step.keys, *step.experts.keys[: step.experts.chosen])
