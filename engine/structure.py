"""Which caches and states of a graph belong together, by the nodes that read and write them; names decide nothing."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import UnsupportedModel
from engine.graph import CACHE_KINDS, Cache, Dim, Node, Subgraph, Value, Weight
from engine.layer_names import are_crossed, contradictions

MICROSOFT = "com.microsoft"
_CACHED = {(MICROSOFT, "GroupQueryAttention"): 3, (MICROSOFT, "MultiHeadAttention"): 6, ("", "Attention"): 4}
"""Where an operator reads its cached keys, the values being next; outputs 1 and 2 carry them on."""
_CARRIED = {
    ("", "LinearAttention"): 3,
    (MICROSOFT, "LinearAttention"): 3,
    ("", "CausalConvWithState"): 3,
    (MICROSOFT, "CausalConvWithState"): 3,
    (MICROSOFT, "GatedDeltaNet"): 6,
}
"""Where an operator reads its state; output 1 carries it on."""
SHOWN_NAMES = 256
REMEDY = (
    "write genai_config.json with model.decoder.inputs (input_ids, attention_mask, past_key_names, past_value_names), "
    "outputs (logits, present_key_names, present_value_names), head_size and the counts of layers and heads"
)


@dataclass(frozen=True, slots=True)
class Web:
    """A graph as who makes and who reads each name."""

    nodes: Sequence[Node]
    weights: Mapping[str, Weight]
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]
    shapes: Mapping[str, tuple[Dim, ...]]
    """Shapes that the exporter wrote beside inner values: each is a claim, checked when the graph is lowered."""
    makers: Mapping[str, Node]
    readers: Mapping[str, Sequence[tuple[Node, int]]]

    def origin(self, name: str, through: frozenset[str] = frozenset({"Identity"})) -> str:
        """The name that this one repeats."""
        for _ in range(len(self.nodes)):
            node = self.makers.get(name)
            if node is None or node.op not in through:
                break
            name = node.input(0)
        return name

    def stored(self, name: str) -> tuple[int, ...] | None:
        """Shape of the initialiser behind a name, whatever its form; None where none is."""
        name = self.origin(name, frozenset({"Identity", "Cast", "DequantizeLinear"}))
        node = self.makers.get(name)
        if name in self.weights:
            return self.weights[name].shape
        if node is not None and node.op == "Reshape":
            inner, target = self.stored(node.input(0)), self._numbers(node.input(1))
            return None if inner is None or not target else _reshaped(inner, target)
        value = node.attributes.get("value") if node is not None and node.op == "Constant" else None
        return tuple(value.shape) if isinstance(value, np.ndarray) else None

    def _numbers(self, name: str) -> list[int]:
        """Whole numbers that the graph holds under a name; none where it does not."""
        node = self.makers.get(name)
        held = node.attributes.get("value", node.attributes.get("value_ints")) if node is not None else None
        array = self.weights[name].array() if name in self.weights else np.asarray(held)
        return [int(n) for n in array.reshape(-1)] if array.dtype.kind in "iu" else []

    def refuse(self, why: str) -> UnsupportedModel:
        """The refusal of a graph whose names and nodes leave a doubt, with the names."""
        sides = (("inputs", self.inputs), ("outputs", self.outputs))
        shown = "; ".join(f"the graph's {side}: {_listed(list(names))}" for side, names in sides)
        return UnsupportedModel(f"{why}; {shown}", REMEDY)


def web_of(
    nodes: Sequence[Node],
    weights: Mapping[str, Weight],
    inputs: Mapping[str, Value],
    outputs: Mapping[str, Value],
    shapes: Mapping[str, tuple[Dim, ...]],
) -> Web:
    """Makers and readers of every name; what branches of an If read is left out."""
    makers = {name: node for node in nodes for name in node.outputs if name}
    readers: defaultdict[str, list[tuple[Node, int]]] = defaultdict(list)
    for node in nodes:
        for index, name in enumerate(node.inputs):
            readers[name].append((node, index))
    return Web(nodes, weights, inputs, outputs, shapes, makers, readers)


def paired_caches(web: Web) -> tuple[Cache, ...]:
    """Caches in the order of data flow, each named by the places where one attention node reads and writes it.

    Raises UnsupportedModel where a cache is shared or lost, layers do not follow one another, or names contradict.
    """
    found = [(node, cache) for node in web.nodes for cache in _cache_of(web, node)]
    if not found:
        raise web.refuse("no attention node reads cached keys and values from inputs of the graph")
    _once(web, [name for _, c in found for name in (c.past_key, c.past_value)])
    depth = _depths(web, {id(node) for node, _ in found})
    found.sort(key=lambda pair: depth[id(pair[0])])
    if [depth[id(node)] for node, _ in found] != list(range(1, len(found) + 1)):
        raise web.refuse("attention nodes do not follow one another, so that the order of layers is not known")
    caches = tuple(cache for _, cache in found)
    columns = [[getattr(c, kind) for c in caches] for kind in CACHE_KINDS]
    wrong = contradictions(columns)
    pairs = [pair for c in caches for pair in ((c.past_key, c.past_value), (c.present_key, c.present_value))]
    wrong += [f"{k} is used as the key, {v} as the value" for k, v in pairs if are_crossed(k, v)]
    if wrong:
        raise web.refuse(f"the graph contradicts the names of its caches: {wrong[0]}")
    return caches


def paired_states(web: Web, bound: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Past and present names of the states that are not `bound` yet. Raises UnsupportedModel as for caches."""
    found: defaultdict[str, list[tuple[Node, str, str]]] = defaultdict(list)
    for node in web.nodes:
        index = _CARRIED.get((node.domain, node.op))
        past = web.origin(node.input(index)) if index is not None else ""
        if past in web.inputs and past not in bound:
            found[node.op].append((node, past, _goes_out(web, node, 1)))
    _once(web, [past for group in found.values() for _, past, _ in group])
    for group in found.values():
        depth = _depths(web, {id(node) for node, _, _ in group})
        group.sort(key=lambda entry: depth[id(entry[0])])
        wrong = contradictions([[past for _, past, _ in group], [present for _, _, present in group]])
        if wrong:
            raise web.refuse(f"the graph contradicts the names of its states: {wrong[0]}")
    return tuple((past, present) for group in found.values() for _, past, present in group)


def head_geometry(web: Web, caches: Sequence[Cache]) -> tuple[int, int]:
    """Key heads and elements of a head, by the caches' shapes, else by the attention nodes. Raises UnsupportedModel."""
    shapes = [web.inputs[name].shape for c in caches for name in (c.past_key, c.past_value)]
    shapes += [web.outputs[name].shape for c in caches for name in (c.present_key, c.present_value)]
    nodes = [n for n in web.nodes if (n.domain, n.op) in _CACHED]
    heads = {s[1] for s in shapes if len(s) == 4 and isinstance(s[1], int) and s[1] > 0}
    sizes = {s[3] for s in shapes if len(s) == 4 and isinstance(s[3], int) and s[3] > 0}
    heads = heads or {_count(n, "kv_num_heads") for n in nodes} - {0}
    sizes = sizes or {size for n in nodes for size in _head_sizes(web, n)}
    for what, given, key in (("key heads", heads, "num_key_value_heads"), ("head size", sizes, "head_size")):
        if len(given) != 1:
            says = f"says {sorted(given)}" if given else "does not say"
            raise web.refuse(f"{what}: the graph {says} ({key} in genai_config.json would)")
    return heads.pop(), sizes.pop()


def table_rows(web: Web, positions: str) -> int | None:
    """Positions that rotary and position tables hold, the fewest of all; None without tables."""
    cosines = {(MICROSOFT, "GroupQueryAttention"): 7, (MICROSOFT, "RotaryEmbedding"): 2, ("", "RotaryEmbedding"): 1,
               (MICROSOFT, "MRotaryEmbedding"): 2}  # fmt: skip
    rows = []
    for node in web.nodes:
        index = cosines.get((node.domain, node.op))
        counted = positions and node.op == "Gather" and web.origin(node.input(1), _COUNTED) == positions
        if index is not None or counted:
            rows += [shape[0] for shape in _tables(web, node.input(index or 0)) if len(shape) == 2][:1]
    return min(rows, default=None)


_COUNTED = frozenset({"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"})


def _cache_of(web: Web, node: Node) -> Iterator[Cache]:
    first = _CACHED.get((node.domain, node.op))
    if first is None:
        return
    key, value = (web.origin(node.input(index)) for index in (first, first + 1))
    if key in web.inputs or value in web.inputs:
        if key not in web.inputs or value not in web.inputs:
            raise web.refuse(f"{node.name} ({node.full_op}) reads {key!r} and {value!r}, which are not both inputs")
        yield Cache(key, value, _goes_out(web, node, 1), _goes_out(web, node, 2))


def _goes_out(web: Web, node: Node, index: int) -> str:
    """The graph's output that is this output of a node."""
    made = node.output(index)
    found = [name for name in web.outputs if made and web.origin(name) == made]
    if len(found) != 1:
        raise web.refuse(
            f"output {index} of {node.name} ({node.full_op}), which carries on what is cached, is "
            f"{'no output of the graph' if not found else 'several of the outputs'}"
        )
    return found[0]


def _once(web: Web, pasts: Sequence[str]) -> None:
    twice = sorted({name for name in pasts if pasts.count(name) > 1})
    if twice:
        raise web.refuse(f"{_listed(twice)}: read as more than one cache or state")


def _depths(web: Web, members: set[int]) -> dict[int, int]:
    """For each member node, how many members lie on the longest way to it, itself among them."""
    below: dict[str, int] = {}
    depth: dict[int, int] = {}
    for node in web.nodes:
        here = max((below.get(name, 0) for name in node.inputs), default=0) + (id(node) in members)
        depth[id(node)] = here
        below.update((name, here) for name in node.outputs if name)
    return depth


def _head_sizes(web: Web, node: Node) -> Iterator[int]:
    """Elements of a head by the width of what goes in or comes out, where the graph says it."""
    heads = _count(node, "num_heads") or _count(node, "q_num_heads")
    keys = _count(node, "kv_num_heads") or heads
    all_heads = heads if node.input(1) else heads + 2 * keys
    for name, count in ((node.input(0), all_heads), (node.input(1), keys)):
        width = _width(web, name) if name and count else None
        if width is not None and width % count == 0:
            yield width // count


def _count(node: Node, name: str) -> int:
    """An attribute that is a whole number above 0; 0 for any other."""
    value = node.attributes.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _width(web: Web, name: str) -> int | None:
    """Elements in the last axis, as written beside the value or as its product has them."""
    for _ in range(len(web.nodes)):
        last = web.shapes[name][-1:] if name in web.shapes else ()
        if last and isinstance(last[0], int) and last[0] > 0:
            return last[0]
        node = web.makers.get(name)
        if node is None:
            return None
        if node.op == "MatMulNBits":
            return _count(node, "N") or None
        if node.op in ("MatMul", "Gemm"):
            shape = web.stored(node.input(1))
            return None if shape is None or len(shape) != 2 else shape[0 if node.attributes.get("transB") else 1]
        if node.op not in ("Add", "Cast", "Identity", "Mul", "RotaryEmbedding", "MRotaryEmbedding"):
            return None
        name = node.input(1 if web.stored(node.input(0)) is not None else 0)
    return None


def _tables(web: Web, name: str) -> list[tuple[int, ...]]:
    """Shapes of the tables behind a name: one, or the longest of those that an If chooses between."""
    shape = web.stored(name)
    node = web.makers.get(name)
    if shape is not None or node is None or node.op != "If":
        return [] if shape is None else [shape]
    made = [_branch_shape(b, node.outputs.index(name)) for b in node.attributes.values() if isinstance(b, Subgraph)]
    return sorted((s for s in made if s), key=math.prod, reverse=True)


def _branch_shape(branch: Subgraph, index: int) -> tuple[int, ...]:
    name = branch.outputs[index] if index < len(branch.outputs) else ""
    values: dict[str, Any] = {n.output(0): n.attributes.get("value") for n in branch.nodes if n.op == "Constant"}
    if name in branch.weights:
        return branch.weights[name].shape
    return tuple(values[name].shape) if isinstance(values.get(name), np.ndarray) else ()


def _reshaped(shape: tuple[int, ...], target: Sequence[int]) -> tuple[int, ...] | None:
    """Reshape's rule: 0 keeps an extent, -1 takes what is left; None where it cannot be."""
    kept = [shape[i] if n == 0 and i < len(shape) else n for i, n in enumerate(target)]
    known, total = math.prod(n for n in kept if n != -1), math.prod(shape)
    if kept.count(-1) > 1 or min(kept) < -1 or not known or total % known:
        return None
    return tuple(total // known if n == -1 else n for n in kept)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(map(repr, names[:SHOWN_NAMES])) + (f" and {more} more" if more > 0 else "")
