"""Compute a graph's nodes one after another, as they stand, over all positions of one sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from engine.contrib import beyond
from engine.errors import UnsupportedModel
from engine.graph import Graph, Node, Subgraph, Weight, nodes_within
from engine.oracle import attention, experts, norms, products, recurrent, standard
from engine.oracle.inputs import RULES, Array, Inputs, Picked, Start, Unserved, Value

assert all((attention, experts, norms, products, recurrent, standard))  # imported for the operators that they register

OLDEST_COMPUTED = 13
"""From here on Softmax runs along one axis, and what shapes a result is an input and no attribute."""


class Walk:
    """One sequence through one graph: `prompt` positions in a first call, each later one in a call of its own."""

    def __init__(self, graph: Graph, ids: Sequence[int], prompt: int) -> None:
        self._graph = graph
        self._positions = len(ids)
        self._prompt = prompt
        self._makers = {name: node for node in graph.nodes for name in node.outputs if name}
        self._given = _given(graph, ids)

    def logits(self) -> Array:
        """Logits of every position, float32 [positions, vocabulary]. Raises UnsupportedModel with every reason."""
        name = self._graph.info.logits
        if name not in self._makers:
            raise UnsupportedModel(f"output {name!r} is produced by no node", "export the model with its head")
        nodes = self._needed()
        _check_served(nodes, self._graph.unserved.values())
        values: dict[str, Value] = dict(self._given)
        uses = Counter(name for node in nodes for name in _reads(node))
        for node in nodes:
            self._compute(node, values)
            for read in _reads(node):
                uses[read] -= 1
                if not uses[read]:
                    values.pop(read, None)
        made = values[name]
        if not isinstance(made, np.ndarray) or made.ndim != 3 or made.shape[:2] != (1, self._positions):
            raise UnsupportedModel(f"output {name!r} is not a row of logits for each position")
        if made.shape[2] != self._graph.info.vocabulary:  # hidden states of an export without its head are fewer
            raise UnsupportedModel(
                f"output {name!r} has {made.shape[2]} logits for a vocabulary of {self._graph.info.vocabulary}",
                "export the model with its head, or check vocab_size in genai_config.json",
            )
        return np.asarray(made[0], np.float32)

    def _needed(self) -> list[Node]:
        """The nodes on which the logits depend, in order."""
        wanted = {self._graph.info.logits}
        kept: list[Node] = []
        for node in reversed(self._graph.nodes):
            if not wanted.isdisjoint(node.outputs):
                kept.append(node)
                wanted.update(_reads(node))
        return kept[::-1]

    def _compute(self, node: Node, values: dict[str, Value]) -> None:
        try:
            outputs: Sequence[Value | None]
            if node.op == "If" and not node.domain:
                outputs = self._branch(node, values)
            elif node.op.startswith("Reduce") and self._counts(node.input(0)):
                outputs = [self._largest_position(node)]
            else:
                made = RULES[node.domain, node.op](self._inputs(node, values))
                outputs = made if isinstance(made, tuple) else (made,)
        except Unserved as reason:
            raise _refusal([f"{node.name} ({node.full_op}): {reason}"]) from reason
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
            # NumPy says so of shapes, types and indices that no operator takes together
            raise _refusal([f"{node.name} ({node.full_op}): its inputs do not fit: {error}"]) from error
        for name, value in zip(node.outputs, outputs, strict=False):
            if name and value is not None:
                values[name] = value

    def _inputs(self, node: Node, values: Mapping[str, Value]) -> Inputs:
        return Inputs(node, tuple(self._value(name, values) for name in node.inputs), self._positions)

    def _value(self, name: str, values: Mapping[str, Value]) -> Value | None:
        if not name:
            return None
        if name in values:
            return values[name]
        if name in self._graph.weights:
            return self._graph.weights[name]
        raise Unserved(f"input {name!r} is produced by nothing that is computed here")

    # -- branches

    def _branch(self, node: Node, values: dict[str, Value]) -> list[Value | None]:
        """An If, whose condition may hold in some calls and not in others: then its tables are picked by position."""
        then, other = (node.attributes[name] for name in ("then_branch", "else_branch"))
        holds = self._holds(node.input(0))
        if holds.all() or not holds.any():
            return self._outputs(then if holds.all() else other, values)
        made: list[Value | None] = []
        for above, below in zip(self._outputs(then, values), self._outputs(other, values), strict=True):
            made.append(Picked(_table(above), holds, _table(below)))
        return made

    def _outputs(self, branch: Subgraph, values: Mapping[str, Value]) -> list[Value | None]:
        inner = {**values, **branch.weights}
        for node in branch.nodes:
            self._compute(node, inner)
        return [self._value(name, inner) for name in branch.outputs]

    def _totals(self) -> list[int]:
        """For each position, the total length in the call that feeds it."""
        alone = np.arange(self._prompt, self._positions) + 1
        return [self._prompt] * self._prompt + [int(n) for n in alone]

    def _counts(self, name: str) -> bool:
        """Whether a name stands for the position ids, in whatever integer type."""
        while name in self._makers and self._makers[name].op in ("Cast", "Identity"):
            name = self._makers[name].input(0)
        return name == self._graph.info.position_ids

    def _largest_position(self, node: Node) -> Array:
        """What a reduction makes of the positions in each call: the largest one, repeated for every position."""
        if node.op != "ReduceMax" or node.input(1) or node.attributes.get("axes"):
            raise Unserved("of position ids only the largest of all")
        return np.asarray(self._totals(), np.int64)[None] - 1

    def _holds(self, name: str) -> Array:
        """Whether a condition on the mask's length holds, for each position in the call that feeds it."""
        totals = self._totals()
        answers = {total: bool(np.all(self._at_length(name, total))) for total in set(totals)}
        return np.asarray([answers[total] for total in totals])

    def _at_length(self, name: str, total: int) -> Array:
        """A value that follows from the attention mask alone, for a mask of that length."""
        if name == self._graph.info.attention_mask:
            return np.ones((1, total), np.int64)
        if name in self._graph.weights:
            return self._graph.weights[name].array()
        node = self._makers.get(name)
        if node is None or (node.domain, node.op) not in RULES:
            raise Unserved(f"the condition depends on {name!r}")
        inner = [self._at_length(n, total) if n else None for n in node.inputs]
        made = RULES[node.domain, node.op](Inputs(node, tuple(inner), total))
        value = made[node.outputs.index(name)] if isinstance(made, tuple) else made
        return _table(value)


def _table(value: Value | None) -> Array:
    if isinstance(value, Weight):
        return value.array()
    if not isinstance(value, np.ndarray):
        raise Unserved(f"a branch gives {type(value).__name__}, not a table")
    return value


def _given(graph: Graph, ids: Sequence[int]) -> dict[str, Value]:
    """The graph's inputs: ids, mask and positions of the whole sequence; caches and states that are empty."""
    info = graph.info
    made: dict[str, Value] = {name: Start(name, value.dtype) for name, value in graph.inputs.items()}
    made[info.input_ids] = np.asarray([ids], np.int64)
    if info.attention_mask:
        made[info.attention_mask] = np.ones((1, len(ids)), np.int64)
    if info.position_ids in graph.inputs:
        rows = np.arange(len(ids), dtype=np.int64)
        rank = len(graph.inputs[info.position_ids].shape)
        made[info.position_ids] = np.broadcast_to(rows, (1, len(ids)) if rank == 2 else (3, 1, len(ids)))
    return made


def _reads(node: Node) -> Iterator[str]:
    """Names that a node reads, those inside its branches included."""
    yield from filter(None, node.inputs)
    for branch in node.attributes.values():
        if isinstance(branch, Subgraph):
            own = {name for inner in branch.nodes for name in inner.outputs} | set(branch.weights)
            yield from (name for inner in branch.nodes for name in _reads(inner) if name not in own)
            yield from (name for name in branch.outputs if name not in own)


def _check_served(nodes: Sequence[Node], unserved: Iterable[str]) -> None:
    every = list(nodes_within(nodes))
    known = RULES.keys() | {("", "If")}
    reasons = [f"{n.name} ({n.full_op}): operator is not computed" for n in every if (n.domain, n.op) not in known]
    old = {n.opset for n in every if not n.domain and n.opset < OLDEST_COMPUTED}
    reasons += [f"{n.name} ({n.full_op}): {reason}" for n in every if (reason := beyond(n))]
    reasons += [f"ai.onnx {version} is older than {OLDEST_COMPUTED}, the oldest computed" for version in old]
    reasons += dict.fromkeys(unserved)
    if reasons:
        raise _refusal(reasons)


def _refusal(reasons: list[str]) -> UnsupportedModel:
    return UnsupportedModel.because("the reference does not compute this graph", reasons)
