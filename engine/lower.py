"""Lower a decoder graph to a plan: walk the nodes once, each op says which steps it becomes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import ops
from engine.errors import UnsupportedModel
from engine.graph import DTYPES, Graph, Node, Weight
from engine.plan import Buffer, Key, KvGeometry, Operand, Plan, Ref, SeamReason, Step

ALIGNMENT_BYTES = 256


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation: a view of a buffer."""

    ref: Ref

    @property
    def shape(self) -> tuple[int, ...]:
        """Its concrete shape; batch is 1, the query length is the plan's rows."""
        return self.ref.shape

    @property
    def dtype(self) -> str:
        """Its element type."""
        return self.ref.dtype


@dataclass(frozen=True, slots=True)
class WeightValue:
    """An initialiser, perhaps seen through a Reshape: same bytes, same key."""

    weight: Weight
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LengthValue:
    """A number that depends on the sequence's total length alone: total + `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class MaskShape:
    """Shape of the attention mask, [1, total]."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The attention mask itself: all ones, so its sum is the total length."""


@dataclass(frozen=True, slots=True)
class Ids:
    """The token ids that go in."""


@dataclass(frozen=True, slots=True)
class Const:
    """A value known at build."""

    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class Past:
    """A layer's cached keys or values."""

    layer: int
    what: str  # "key" or "value"


LoweredValue = Tensor | WeightValue | LengthValue | MaskShape | Mask | Ids | Const | Past


class Refusal(Exception):
    """An op's reason for not serving a node; collected, so that all reasons come at once."""


class Lowering:
    """The plan in the making: values by name, steps so far. Ops read values, make buffers and emit steps."""

    def __init__(self, graph: Graph, rows: int) -> None:
        self.graph = graph
        self.rows = rows
        self.kv = _kv_geometry(graph)
        self._values: dict[str, LoweredValue] = {}
        self._steps: list[Step] = []
        self._keys: dict[str, Key] = {}
        self._constants: dict[str, Weight] = {}
        self._buffer_bytes: list[tuple[str, int]] = []
        self._logit_chain = _logit_chain(graph)
        info = graph.info
        self._values[info.input_ids] = Ids()
        self._values[info.attention_mask] = Mask()
        for layer in range(self.kv.layers):
            self._values[info.past_key % layer] = Past(layer, "key")
            self._values[info.past_value % layer] = Past(layer, "value")

    def value(self, name: str) -> LoweredValue:
        """The lowered value of a name. Raises Refusal for names that nothing produced."""
        if name in self.graph.weights and name not in self._values:
            weight = self.graph.weights[name]
            self._values[name] = WeightValue(weight, weight.shape)
        if name not in self._values:
            raise Refusal(f"input {name!r} is produced by nothing that is served")
        return self._values[name]

    def set(self, name: str, value: LoweredValue) -> None:
        """Bind a name to its value."""
        self._values[name] = value

    def tensor(self, node: Node, index: int) -> Tensor:
        """Input `index` as an activation. Raises Refusal otherwise."""
        value = self.value(node.input(index))
        if not isinstance(value, Tensor):
            raise Refusal(f"input {index} ({node.input(index)!r}) is not an activation")
        return value

    def weight(self, node: Node, index: int) -> WeightValue:
        """Input `index` as an initialiser. Raises Refusal otherwise."""
        value = self.value(node.input(index))
        if not isinstance(value, WeightValue):
            raise Refusal(f"input {index} ({node.input(index)!r}) is not an initialiser")
        return value

    def logit_rows(self, node: Node, x: Tensor) -> Tensor:
        """`x` cut to its last row where the node leads to the logits alone: only they are needed."""
        if node.output(0) not in self._logit_chain or x.shape[-2] == 1:
            return x
        width = x.shape[-1]
        skip = (x.shape[-2] - 1) * width * DTYPES[x.dtype].itemsize
        ref = x.ref
        return Tensor(Ref(ref.kind, ref.index, ref.dtype, (1, 1, width), ref.name, ref.offset_bytes + skip))

    def make(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A new activation of that shape, bound to `name`."""
        index = len(self._buffer_bytes)
        nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        self._buffer_bytes.append((name, nbytes))
        made = Tensor(Ref("buffer", index, dtype, shape, name))
        if name:
            self.set(name, made)
        return made

    def key(self, value: WeightValue, record: int) -> Ref:
        """The residency key of an initialiser; one key however often it is used."""
        weight = value.weight
        key = self._keys.setdefault(weight.name, Key(len(self._keys), weight, record))
        return Ref("key", key.index, weight.dtype, value.shape, weight.name)

    def new_record(self) -> int:
        """Number for the keys of one weight."""
        return len(self._steps)

    def constant(self, value: WeightValue) -> Ref:
        """A table that is loaded once and stays, such as rotary cos and sin: no residency key."""
        names = list(self._constants)
        if value.weight.name not in self._constants:
            self._constants[value.weight.name] = value.weight
            names.append(value.weight.name)
        return Ref("constant", names.index(value.weight.name), value.weight.dtype, value.shape, value.weight.name)

    def host(self, value: WeightValue) -> Ref:
        """An initialiser read in place from host memory, row by row."""
        return Ref("host", -1, value.weight.dtype, value.shape, value.weight.name)

    def emit(
        self,
        node: Node,
        kernel: str,
        operands: tuple[Operand, ...],
        params: Mapping[str, Any],
        *,
        gather_bytes: int = 0,
        reason: SeamReason | None = None,
        detail: str = "",
    ) -> None:
        """Append a step."""
        step = Step(
            len(self._steps), node.name, node.full_op, kernel, operands, dict(params), gather_bytes, reason, detail
        )
        self._steps.append(step)

    def finish(self) -> Plan:
        """Close the plan with argmax and the length's advance; place the buffers."""
        logits = self._values.get(self.graph.info.logits)
        if not isinstance(logits, Tensor):
            raise UnsupportedModel(
                f"output {self.graph.info.logits!r} is produced by nothing that is served", "check genai_config.json"
            )
        if logits.shape[-1] > self.graph.info.vocabulary:
            raise UnsupportedModel(
                f"output {self.graph.info.logits!r} has {logits.shape[-1]} logits for a vocabulary of "
                f"{self.graph.info.vocabulary}",
                "check vocab_size in genai_config.json",
            )
        tail = Node("argmax", "ArgMax", "assay", (), (), {})
        ids = Ref("control", -1, "int64", (1,), "ids")
        gap = Ref("control", -1, "float32", (1,), "gap")
        length = Ref("control", -1, "int64", (1,), "length")
        self.emit(
            tail, "argmax", (Operand("logits", logits.ref), Operand("ids", ids, "w"), Operand("gap", gap, "w")), {}
        )
        advance = Node("advance", "Advance", "assay", (), (), {})
        self.emit(advance, "advance", (Operand("length", length, "rw"),), {"rows": self.rows})
        buffers, workspace = _place(self._buffer_bytes, self._steps)
        return Plan(
            self.rows,
            tuple(self._steps),
            tuple(self._keys.values()),
            tuple(self._constants.values()),
            buffers,
            workspace,
            self.kv,
            logits.ref,
        )


def lower(graph: Graph, rows: int) -> Plan:
    """Plan of one forward pass of `rows` tokens (1 for decode).

    Raises UnsupportedModel with every reason at once, by node and op.
    """
    rules = [(node, ops.find(node.domain, node.op)) for node in graph.nodes]
    _refuse([f"{n.name} ({n.full_op}): operator is not served" for n, rule in rules if rule is None])
    building = Lowering(graph, rows)
    reasons: list[str] = []
    missing: set[str] = set()
    for node, rule in rules:
        assert rule is not None
        try:
            rule(building, node)
        except Refusal as refusal:
            if not missing.intersection(node.inputs):  # behind a refused node every consumer would complain as well
                reasons.append(f"{node.name} ({node.full_op}): {refusal}")
            missing.update(filter(None, node.outputs))
    _refuse(reasons)
    return building.finish()


def _refuse(reasons: list[str]) -> None:
    if reasons:
        shown = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
        raise UnsupportedModel(f"the graph is not served: {shown}", "export with other options", tuple(reasons))


def _logit_chain(graph: Graph) -> frozenset[str]:
    """Names from which the logits follow by element-wise ops alone, and which nothing else uses."""
    producers = {o: n for n in graph.nodes for o in n.outputs if o}
    uses: dict[str, int] = {}
    for node in graph.nodes:
        for name in node.inputs:
            uses[name] = uses.get(name, 0) + 1
    chain = {graph.info.logits}
    here = graph.info.logits
    while here in producers and producers[here].op == "Cast" and uses.get(producers[here].input(0), 0) == 1:
        here = producers[here].input(0)
        chain.add(here)
    return frozenset(chain)


def _kv_geometry(graph: Graph) -> KvGeometry:
    info = graph.info
    pattern = re.compile(re.escape(info.past_key).replace("%d", r"(\d+)"))
    layers = sorted(int(m.group(1)) for m in map(pattern.fullmatch, graph.inputs) if m)
    if layers != list(range(info.layers)):
        raise UnsupportedModel(
            f"cached keys named {info.past_key!r} are layers {layers}, where num_hidden_layers is {info.layers}",
            "layers must run from 0 without gaps; check genai_config.json",
        )
    named = ((info.past_value, graph.inputs), (info.present_key, graph.outputs), (info.present_value, graph.outputs))
    absent = [pattern % layer for pattern, where in named for layer in layers if pattern % layer not in where]
    if absent:
        raise UnsupportedModel(f"the graph has no {', '.join(map(repr, absent))}", "check genai_config.json")
    first = graph.inputs[info.past_key % 0]
    if first.dtype not in ("float32", "float16", "bfloat16"):
        raise UnsupportedModel(f"KV cache of type {first.dtype} is not served", "export with a float KV cache")
    token_bytes = info.kv_heads * info.head_size * DTYPES[first.dtype].itemsize
    return KvGeometry(len(layers), info.kv_heads, info.head_size, first.dtype, token_bytes)


def _place(sizes: list[tuple[str, int]], steps: list[Step]) -> tuple[tuple[Buffer, ...], int]:
    """First-fit offsets in one workspace: buffers share bytes when their lives, in steps, do not overlap."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step in steps:
        for operand in step.operands:
            if operand.ref.kind == "buffer":
                first.setdefault(operand.ref.index, step.index)
                last[operand.ref.index] = step.index
    placed: list[tuple[int, int, int]] = []  # offset, end, buffer index, in order of offset
    buffers: list[Buffer] = []
    total = 0
    for index, (name, nbytes) in enumerate(sizes):
        size = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offset = 0
        for start, end, other in placed:
            alive = last.get(other, 0) >= first.get(index, 0) and first.get(other, 0) <= last.get(index, 0)
            if alive and start < offset + size and offset < end:
                offset = end
        placed.append((offset, offset + size, index))
        placed.sort()
        buffers.append(Buffer(index, name, nbytes, offset))
        total = max(total, offset + size)
    return tuple(buffers), total
