"""Make a plan from nodes: walk them once, each op says which steps it becomes; what is known is computed at build."""

from __future__ import annotations

import hashlib
import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import kernels, ops, opsets
from engine.errors import DeviceFailure, UnsupportedModel
from engine.fuse import fuse
from engine.graph import DTYPES, PACKED, DecoderInfo, Node, Weight
from engine.plan import Buffer, Key, KvGeometry, Operand, Ref, SeamReason, StateSpec, Step
from engine.values import (
    Absent,
    Const,
    LoweredValue,
    NotKnown,
    Past,
    Positions,
    Refusal,
    State,
    Tensor,
    Transposed,
    WeightValue,
)

ALIGNMENT_BYTES = 256


def wide(dtype: str) -> str:
    """The type in which an activation is kept: float32 for half types, which live in weights and KV cache alone.

    So a step rounds to a half type where it writes the KV cache and nowhere else, and logits are float32.
    """
    return "float32" if dtype in ("float16", "bfloat16") else dtype


_LETTERS = "abcdefghijklmnopq"
_MOVES = frozenset({"concat", "copy", "gather", "gather_elements", "slice", "split", "transpose", "trilu"})
"""Kernels that compute nothing: weights that they rearrange at build keep their half type."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Steps, keys, constants, host tables, placed buffers, and the workspace's bytes."""

    steps: tuple[Step, ...]
    keys: tuple[Key, ...]
    constants: tuple[Weight, ...]
    hosts: tuple[Weight, ...]
    buffers: tuple[Buffer, ...]
    workspace_bytes: int


class Lowering:
    """The plan in the making: values by name, steps so far. Ops read values, make buffers and emit steps."""

    def __init__(
        self, weights: Mapping[str, Weight], values: Mapping[str, LoweredValue], keep: frozenset[str], rows: int = 1
    ) -> None:
        self.weights = weights
        self.rows = rows
        self.info: DecoderInfo | None = None
        self.kv: KvGeometry | None = None
        self.states: tuple[StateSpec, ...] = ()
        self.logit_chain: frozenset[str] = frozenset()
        self.checked_tables: set[Weight] = set()
        self._values: dict[str, LoweredValue] = dict(values)
        self._routed_bytes = 0
        self._copies: dict[str, WeightValue] = {}
        self._keep = keep
        self._claimed: set[Past | State] = set()
        self._steps: list[Step] = []
        self._keys: dict[str, Key] = {}
        self._constants: dict[str, Weight] = {}
        self._hosts: dict[str, Weight] = {}
        self._buffer_bytes: list[tuple[str, int]] = []

    # -- reading values

    def value(self, name: str) -> LoweredValue:
        """The lowered value of a name. Raises Absent for names that nothing produced, Refusal for none at all."""
        if not name:
            raise Refusal("an input that it needs is not given")
        if name not in self._values and name in self.weights:
            weight = self.weights[name]
            single = weight.dtype in DTYPES and math.prod(weight.shape) == 1  # a number, in either form: no key
            self._values[name] = Const(weight.array()) if single else WeightValue(weight, weight.shape)
        if name not in self._values:
            raise Absent(name)
        value = self._values[name]
        if not isinstance(value, Transposed):
            return value
        if name not in self._copies:
            turned = Const(value.held.weight.array().reshape(value.held.shape).T)
            self._copies[name] = self.promote(name, turned)
        return self._copies[name]

    def peek(self, name: str) -> LoweredValue | None:
        """The value of a name as it was set, or None where nothing produced it."""
        return self._values.get(name)

    def turned(self, name: str) -> WeightValue | None:
        """The initialiser [N, K] behind a name that stands for it transposed; None for other names."""
        value = self._values.get(name)
        return value.held if isinstance(value, Transposed) else None

    def set(self, name: str, value: LoweredValue) -> None:
        """Bind a name to its value; "" is no name."""
        if name:
            self._values[name] = value

    def tensor(self, node: Node, index: int) -> Tensor:
        """Input `index` as an activation. Raises Refusal otherwise."""
        value = self.value(node.input(index))
        if not isinstance(value, Tensor):
            raise Refusal(f"input {index} ({node.input(index)!r}) is not an activation")
        return value

    def weight(self, node: Node, index: int) -> WeightValue:
        """Input `index` as an initialiser; a Constant node's value is one too. Raises Refusal otherwise."""
        value = self.value(node.input(index))
        if isinstance(value, Const):
            value = self.promote(node.input(index), value)
            self._values[node.input(index)] = value
        if not isinstance(value, WeightValue):
            raise Refusal(f"input {index} ({node.input(index)!r}) is not an initialiser")
        return value

    def known(self, node: Node, index: int) -> NDArray[Any]:
        """Input `index` as an array known at build. Raises NotKnown otherwise."""
        value = self.value(node.input(index))
        if isinstance(value, Const):
            return value.array
        if isinstance(value, WeightValue):
            return value.weight.array().reshape(value.shape)
        raise NotKnown(node.input(index))

    def numbers(self, node: Node, index: int) -> list[int] | None:
        """Input `index` as whole numbers known at build, or None where it is absent."""
        if not node.input(index):
            return None
        array = self.known(node, index)
        if array.dtype.kind not in "iu":
            raise Refusal(f"input {index} ({node.input(index)!r}) is of type {array.dtype}, not whole numbers")
        return [int(n) for n in array.reshape(-1)]

    def operand(self, node: Node, index: int) -> Tensor | WeightValue | Const:
        """Input `index` as anything with elements; positions become an activation. Raises Refusal otherwise."""
        value = self.value(node.input(index))
        if isinstance(value, Positions):
            value = self._counted(value)
        if not isinstance(value, Tensor | WeightValue | Const):
            raise Refusal(f"input {index} ({node.input(index)!r}) is {type(value).__name__}, not a tensor")
        return value

    def _counted(self, value: Positions) -> Tensor:
        """Positions as numbers in a buffer, written by one step of the plan. Raises Refusal for moved ones."""
        if value.shift is not None:
            raise Refusal("positions moved by what the length decides serve as rotary positions alone")
        name = f"positions {list(value.shape)}"
        made = self.peek(name)
        if not isinstance(made, Tensor):
            made = self.make(name, "int64", value.shape)
            length = Operand("length", Ref("control", -1, "int64", (1,), "length"))
            self.emit(
                Node(name, "Positions", "assay", (), (), {}), "positions", (length, Operand("y", made.ref, "w")), {}
            )
        return made

    def context_length(self) -> int:
        """Positions that tables must hold, 0 without a decoder. Raises Refusal where nothing says how many."""
        if self.info is not None and self.info.context_length is None:
            raise Refusal("positions that its tables must hold are not known: write genai_config.json with them")
        return self.info.context_length or 0 if self.info is not None else 0

    # -- making steps

    def apply(
        self,
        node: Node,
        kernel: str,
        inputs: Sequence[Tensor | WeightValue | Const],
        params: Mapping[str, Any],
        outputs: Sequence[tuple[str, tuple[int, ...]]],
    ) -> None:
        """Run a kernel with operands a, b, ... into y, y1, ...: the node's outputs, of the types and shapes given.

        Where every input is known, the kernel's NumPy reference runs now and the result is known as well.
        """
        for dtype, _ in outputs:
            if dtype not in DTYPES:
                raise Refusal(f"elements of type {dtype} are not served here")
        if all(isinstance(v, Const | WeightValue) for v in inputs):
            self._fold(node, kernel, inputs, params, outputs)
            return
        packed = [v for v in inputs if v.dtype in PACKED]
        if packed:
            raise Refusal(f"elements of type {packed[0].dtype} are not served here")
        operands = [Operand(_LETTERS[i], self.ref(node, i, v)) for i, v in enumerate(inputs)]
        for i, (dtype, shape) in enumerate(outputs):
            operands.append(Operand(f"y{i or ''}", self.make(node.output(i), dtype, shape).ref, "w"))
        self.emit(node, kernel, tuple(operands), params)

    def ref(self, node: Node, index: int, value: Tensor | WeightValue | Const) -> Ref:
        """An operand's Ref: activations as they are, initialisers as keys, small known values as constants."""
        if isinstance(value, Tensor):
            return value.ref
        if isinstance(value, WeightValue):
            return self.key(value, self.new_record())
        content = hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.array.tobytes()).hexdigest()[:16]
        return self.constant(self.promote(f"constant {content}", value))  # one name for one content, in every plan

    def make(self, name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        """A new activation of that shape, bound to `name`; half types are kept as float32 between kernels."""
        made = Tensor(self._buffer(name, wide(dtype), shape))
        self.set(name, made)
        return made

    def _buffer(self, name: str, dtype: str, shape: tuple[int, ...]) -> Ref:
        nbytes = int(np.prod(shape, dtype=np.int64)) * DTYPES[dtype].itemsize
        self._buffer_bytes.append((name, nbytes))
        return Ref("buffer", len(self._buffer_bytes) - 1, dtype, shape, name)

    def view(self, value: Tensor, shape: tuple[int, ...], offset_bytes: int = 0) -> Tensor:
        """The same bytes in another shape, from `offset_bytes` on."""
        ref = value.ref
        return Tensor(Ref(ref.kind, ref.index, ref.dtype, shape, ref.name, ref.offset_bytes + offset_bytes))

    def key(self, value: WeightValue, record: int) -> Ref:
        """The residency key of an initialiser; one key however often it is used."""
        weight = value.weight
        key = self._keys.setdefault(weight.name, Key(len(self._keys), weight, record))
        if weight.dtype in PACKED:  # the device holds the packed bytes; their kernel knows the element type
            return Ref("key", key.index, "uint8", (weight.nbytes,), weight.name)
        return Ref("key", key.index, weight.dtype, value.shape, weight.name)

    def new_record(self) -> int:
        """Number for the keys of one weight."""
        return len(self._steps)

    def constant(self, value: WeightValue) -> Ref:
        """A table that is loaded once and stays, such as rotary cos and sin: no residency key."""
        weight = value.weight
        self._constants.setdefault(weight.name, weight)
        index = list(self._constants).index(weight.name)
        return Ref("constant", index, weight.dtype, value.shape, weight.name)

    def host(self, value: WeightValue) -> Ref:
        """An initialiser read in place from host memory, row by row."""
        weight = value.weight
        self._hosts.setdefault(weight.name, weight)
        return Ref("host", list(self._hosts).index(weight.name), weight.dtype, value.shape, weight.name)

    def claim(self, value: Past | State) -> None:
        """One node advances a cache or a state in place. Raises Refusal for a second one, which would read too far."""
        if value in self._claimed:
            raise Refusal("its cache or state is another node's already")
        self._claimed.add(value)

    def state(self, value: State) -> Ref:
        """A state's own buffer: read and written in place."""
        self.claim(value)
        return Ref("state", value.index, "float32", value.shape, self.states[value.index].name)

    def routed(self, tokens: int, chosen: int) -> Ref:
        """Room in the control block for the experts that a mixture's step chooses."""
        ref = Ref("control", -1, "int32", (tokens, chosen), "routed", self._routed_bytes)
        self._routed_bytes += 4 * tokens * chosen
        return ref

    def logit_rows(self, node: Node, x: Tensor) -> Tensor:
        """`x` cut to its last row where the node leads to the logits alone: only they are needed."""
        if node.output(0) not in self.logit_chain or x.shape[-2] == 1:
            return x
        width = x.shape[-1]
        return self.view(x, (1, 1, width), (x.shape[-2] - 1) * width * DTYPES[x.dtype].itemsize)

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

    def close(self, target: str = "plain") -> Parts:
        """What a plan is made of, for a target."""
        kept = {v.ref.index for n, v in self._values.items() if n in self._keep and isinstance(v, Tensor)}
        context = self.info.context_length if self.info is not None else None
        steps = fuse(self._steps, kept, self._buffer, context) if target == "fused" else tuple(self._steps)
        gone = _used(self._steps) - _used(steps)  # what lay between steps that are one now
        sizes = [(name, 0 if i in gone else nbytes) for i, (name, nbytes) in enumerate(self._buffer_bytes)]
        buffers, workspace = _place(sizes, steps, kept)
        return Parts(
            steps,
            tuple(self._keys.values()),
            tuple(self._constants.values()),
            tuple(self._hosts.values()),
            buffers,
            workspace,
        )

    def promote(self, name: str, value: Const) -> WeightValue:
        """A value known at build as an initialiser of that name."""
        array = np.ascontiguousarray(value.array).reshape(value.array.shape)
        dtype = str(array.dtype)
        if dtype not in DTYPES:
            raise Refusal(f"{name!r} is of type {dtype}")
        return WeightValue(Weight(name, dtype, value.shape, array.reshape(-1).view(np.uint8)), value.shape)

    def _fold(
        self,
        node: Node,
        kernel: str,
        inputs: Sequence[Tensor | WeightValue | Const],
        params: Mapping[str, Any],
        outputs: Sequence[tuple[str, tuple[int, ...]]],
    ) -> None:
        arrays: dict[str, NDArray[Any]] = {}
        for letter, value in zip(_LETTERS, inputs, strict=False):
            assert isinstance(value, Const | WeightValue)
            arrays[letter] = value.array if isinstance(value, Const) else value.weight.array().reshape(value.shape)
        for i, (dtype, shape) in enumerate(outputs):
            arrays[f"y{i or ''}"] = np.empty(shape, DTYPES[dtype if kernel in _MOVES else wide(dtype)])
        try:
            kernels.get(kernel).run(arrays, params)
        except (DeviceFailure, IndexError, TypeError, ValueError) as error:  # values of the graph that do not fit
            raise Refusal(f"what is known at build does not fit together: {error}") from error
        heavy = any(isinstance(v, WeightValue) for v in inputs)
        for i in range(len(outputs)):
            made = Const(arrays[f"y{i or ''}"])
            self.set(node.output(i), self.promote(node.output(i), made) if heavy and node.output(i) else made)


def walk(
    b: Lowering,
    nodes: Sequence[Node],
    *,
    unbound: Mapping[str, str] | None = None,
    stop_at: type[Refusal] | None = None,
) -> None:
    """Lower nodes in order. Raises UnsupportedModel with every reason at once, by node and op; `stop_at` at once.

    `unbound` are inputs that are not served, with the reason for each, by name.
    """
    reasons: list[str] = []
    missing = set(unbound or ())
    for node in nodes:
        rule = ops.find(node.domain, node.op)
        try:
            if rule is None:
                raise Refusal("operator is not served")
            opsets.check(node)
            rule(b, node)
        except Refusal as refusal:
            if stop_at is not None and isinstance(refusal, stop_at):
                raise
            # Behind a refused node every consumer would complain as well.
            if not (isinstance(refusal, Absent) and refusal.name in missing):
                reasons.append(f"{node.name} ({node.full_op}): {refusal}")
            missing.update(filter(None, node.outputs))
        except UnsupportedModel as of_branch:
            reasons += of_branch.reasons
            missing.update(filter(None, node.outputs))
    _refuse([*reasons, *dict.fromkeys((unbound or {}).values())])


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise UnsupportedModel.because("the graph is not served", reasons)


def _used(steps: Sequence[Step]) -> set[int]:
    return {o.ref.index for step in steps for o in step.operands if o.ref.kind == "buffer"}


def _place(sizes: list[tuple[str, int]], steps: Sequence[Step], kept: set[int]) -> tuple[tuple[Buffer, ...], int]:
    """First-fit offsets in one workspace: buffers share bytes when their lives, in steps, do not overlap.

    What no step writes is an input and lives from the start; what is `kept` lives to the end.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step in steps:
        for operand in step.operands:
            if operand.ref.kind == "buffer":
                first.setdefault(operand.ref.index, step.index if operand.access == "w" else 0)
                last[operand.ref.index] = step.index
    for index in kept:
        first.setdefault(index, 0)
        last[index] = len(steps)
    earliest = [first.get(index, 0) for index in range(len(sizes))]  # of this buffer and all that come after it
    for index in range(len(sizes) - 2, -1, -1):
        earliest[index] = min(earliest[index], earliest[index + 1])
    placed: list[tuple[int, int, int]] = []  # offset, end, buffer index, in order of offset
    buffers: list[Buffer] = []
    total = 0
    for index, (name, nbytes) in enumerate(sizes):
        size = -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offset, begins, ends = 0, first.get(index, 0), last.get(index, 0)
        placed = [one for one in placed if last.get(one[2], 0) >= earliest[index]]
        for start, end, other in placed:
            alive = last.get(other, 0) >= begins and first.get(other, 0) <= ends
            if alive and start < offset + size and offset < end:
                offset = end
        insort(placed, (offset, offset + size, index))
        buffers.append(Buffer(index, name, nbytes, offset))
        total = max(total, offset + size)
    return tuple(buffers), total
