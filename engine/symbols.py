"""Which symbols of a graph grow from token to token, and which values have them: known at build, from the graph alone.

A step whose operands have an extent that grows must not be recorded: its launch geometry is baked, and goes stale with
the next token. Seeds are the length axes of the caches and of the mask; the closure follows equal extents through
operators that keep them, sizes that are computed from such an extent, and symbols made of others ("past + new").
Query length, batch, heads and head sizes are pinned: symbolic, and the same in every replay (onnx-genai section 2.3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.graph import Dim, Graph, Node

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_CACHED = {"GroupQueryAttention": (3, 4), "MultiHeadAttention": (6, 7), "Attention": (4, 5)}
"""Inputs of an operator that are a layer's caches; outputs 1 and 2 carry them on. They are bound at their capacity."""
_SIZES = frozenset({"Shape", "Size"})
_RESHAPES = {
    **dict.fromkeys(("Reshape", "Expand", "Tile", "Upsample"), (1,)),
    **dict.fromkeys(("ConstantOfShape",), (0,)),
    **dict.fromkeys(("Range",), (0, 1, 2)),
    **dict.fromkeys(("Slice",), (1, 2)),
    **dict.fromkeys(("Pad", "Split"), (1,)),
}
"""Inputs whose numbers decide an extent of the output."""
_ALIGNED = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Min", "Max", "Where", "And", "Or", "Xor", "Not", "Equal"),
        *("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Cast", "Identity", "Sigmoid", "Tanh", "Relu", "Gelu"),
        *("Silu", "Swish", "Softplus", "Softmax", "LogSoftmax", "Erf", "Exp", "Log", "Neg", "Abs", "Sqrt", "Clip"),
        *("Reciprocal", "LpNormalization", "LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"),
        *("CumSum", "RotaryEmbedding", "Trilu", "PRelu", "QuickGelu", "FastGelu", "BiasGelu", "Round", "Floor"),
    }
)
"""Operators whose operands' extents are equal or 1, counted from the last axis."""


@dataclass(frozen=True, slots=True)
class Symbols:
    """`growing`: symbol -> how it is known to grow. `pinned`: symbol -> what it stands for, held by every replay."""

    growing: Mapping[str, str]
    pinned: Mapping[str, str]


NO_SYMBOLS = Symbols({}, {})


def classify(graph: Graph) -> Symbols:
    """The symbols of a graph's values; one that is pinned is never growing, whatever it meets."""
    pinned = _pinned(graph)
    growing = dict(reversed(list(_seeds(graph, pinned))))  # the first cache that has it
    dims = _dims(graph)
    sized: set[str] = set()
    while True:
        before = len(growing) + len(sized)
        for symbol in {d for shape in dims.values() for d in shape if isinstance(d, str)} - growing.keys():
            parts = [w for w in _WORD.findall(symbol) if w in growing]
            if parts and symbol not in pinned:
                growing[symbol] = f"is made of {parts[0]}"
        for node in graph.nodes:
            for symbol, why in _from_node(node, dims, growing, sized):
                if symbol not in pinned:
                    growing.setdefault(symbol, why)
        if len(growing) + len(sized) == before:
            return Symbols(growing, pinned)


def disqualified(graph: Graph, symbols: Symbols) -> dict[str, str]:
    """Node -> the first of its operands that has an extent that grows, in words, with the symbol.

    Caches are exempt, being bound at their capacity with the length in a device counter; so is the mask, which no
    kernel reads: its length is that counter.
    """
    exempt = {graph.info.attention_mask, *_cache_names(graph)}
    dims = _dims(graph)
    found: dict[str, str] = {}
    for node in graph.nodes:
        cached = {node.input(i) for i in _CACHED.get(node.op, ())}
        for name in (*node.inputs, *node.outputs):
            grows = [d for d in dims.get(name, ()) if isinstance(d, str) and d in symbols.growing]
            if grows and name not in exempt | cached:
                found.setdefault(node.name, f"{name} has the extent {grows[0]}, which {symbols.growing[grows[0]]}")
    return found


def _dims(graph: Graph) -> dict[str, Sequence[Dim]]:
    named = {value.name: value.shape for value in (*graph.inputs.values(), *graph.outputs.values())}
    return {**graph.shapes, **named}


def _cache_names(graph: Graph) -> Iterator[str]:
    for cache in graph.info.caches:
        yield from (cache.past_key, cache.past_value, cache.present_key, cache.present_value)


def _pinned(graph: Graph) -> dict[str, str]:
    """Batch and query length as the ids have them; what states have; heads and head size as caches have them."""
    dims = _dims(graph)
    ids = dims.get(graph.info.input_ids, ())
    pinned = {d: what for d, what in zip(ids, ("batch", "query length"), strict=False) if isinstance(d, str)}
    for name in (n for pair in graph.info.states for n in pair):
        pinned |= {d: "of a state" for d in dims.get(name, ()) if isinstance(d, str) and d not in pinned}
    for name in _cache_names(graph):
        shape = dims.get(name, ())
        for axis, d in enumerate(shape):
            if isinstance(d, str) and axis != len(shape) - 2:
                pinned.setdefault(d, "batch, heads or head size")
    return pinned


def _seeds(graph: Graph, pinned: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    dims = _dims(graph)
    for name in _cache_names(graph):
        shape = dims.get(name, ())
        if len(shape) >= 2 and isinstance(shape[-2], str) and shape[-2] not in pinned:
            yield shape[-2], f"is the length of {name}"
    mask = dims.get(graph.info.attention_mask, ())
    if mask and isinstance(mask[-1], str) and mask[-1] not in pinned:
        yield mask[-1], f"is the length of {graph.info.attention_mask}"


def _from_node(
    node: Node, dims: Mapping[str, Sequence[Dim]], growing: Mapping[str, str], sized: set[str]
) -> Iterator[tuple[str, str]]:
    """Symbols that a node shows to grow; names whose numbers come from an extent that grows go into `sized`."""

    def grows(name: str) -> bool:
        return any(isinstance(d, str) and d in growing for d in dims.get(name, ()))

    if node.op in _SIZES:
        if grows(node.input(0)):
            sized.add(node.output(0))
        return
    if node.op in _ALIGNED:
        yield from _equal((dims.get(n, ()) for n in (*node.inputs, *node.outputs) if n), growing, node)
    deciding = {node.input(i) for i in _RESHAPES.get(node.op, ())}
    if sized.intersection(deciding):
        known = {d for n in node.inputs for d in dims.get(n, ())}
        for name in node.outputs:
            yield from (
                (d, f"{node.name} computes") for d in dims.get(name, ()) if isinstance(d, str) and d not in known
            )
    elif sized.intersection(node.inputs):  # arithmetic on a size gives a size
        sized.update(filter(None, node.outputs))


def _equal(shapes: Iterable[Sequence[Dim]], growing: Mapping[str, str], node: Node) -> Iterator[tuple[str, str]]:
    """Symbols at one place, counted from the end, are one extent: where one grows, all do."""
    aligned: dict[int, list[str]] = {}
    for shape in shapes:
        for place, d in enumerate(reversed(shape)):
            if isinstance(d, str):
                aligned.setdefault(place, []).append(d)
    for symbols in aligned.values():
        source = next((s for s in symbols if s in growing), None)
        if source is not None:
            yield from ((s, f"equals {source} in {node.name}") for s in symbols if s not in growing)
