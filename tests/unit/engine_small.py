"""A decoder of one layer, built node by node in code: what a test wants to be different is passed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.graph import Cache, DecoderInfo, Graph, Node, Subgraph, Value, Weight
from tests.unit.engine_plain import stored

VOCABULARY, HIDDEN, HEADS, HEAD_SIZE, CONTEXT = 12, 16, 2, 8, 24
MICROSOFT = "com.microsoft"


class Small:
    """Embedding, attention with one kv head, head: 12 ids, 16 wide, 24 positions. Nodes are added in order."""

    def __init__(self, *, cache: str = "float32", layers: int = 1, hidden: int = HIDDEN, seed: int = 0) -> None:
        self.hidden = hidden
        self.random = np.random.default_rng(seed)
        self.nodes: list[Node] = []
        self.weights: dict[str, Weight] = {}
        self.layers = layers
        self.inputs = {n: Value(n, "int64", ("batch", n)) for n in ("input_ids", "attention_mask")}
        for layer in range(layers):
            for what in ("key", "value"):
                name = f"past.{layer}.{what}"
                self.inputs[name] = Value(name, cache, ("batch", 1, "past", HEAD_SIZE))

    def add(
        self, op: str, *inputs: str, domain: str = "", outputs: tuple[str, ...] | None = None, **attributes: Any
    ) -> str:
        """Add a node; the name of its first output."""
        made = outputs if outputs is not None else (f"{op}.{len(self.nodes)}",)
        self.nodes.append(Node(f"{op}.{len(self.nodes)}", op, domain, inputs, made, attributes))
        return made[0]

    def weight(self, name: str, array: NDArray[Any], dtype: str | None = None) -> str:
        """An initialiser; its name."""
        self.weights[name] = stored(name, array, dtype)
        return name

    def drawn(self, name: str, *shape: int) -> str:
        """An initialiser of random float32 numbers."""
        return self.weight(name, self.random.normal(size=shape).astype(np.float32))

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """A Constant node."""
        return self.add("Constant", value=np.asarray(value, dtype))

    def embedded(self) -> str:
        """Rows of a float table by id."""
        return self.add("Gather", self.drawn("embedding", VOCABULARY, self.hidden), "input_ids")

    def total(self) -> str:
        """The total length, as exporters take it from the mask."""
        return self.add("Gather", self.add("Shape", "attention_mask"), self.constant(1))

    def lengths(self) -> tuple[str, str]:
        """What attention asks for: each sequence's length less one, and the total."""
        summed = self.add("ReduceSum", "attention_mask", self.constant([1]), keepdims=0)
        less = self.add("Cast", self.add("Sub", summed, self.constant(1)), to=6)
        return less, self.add("Cast", self.total(), to=6)

    def attended(self, x: str, layer: int = 0, more: Mapping[int, str] | None = None, **attributes: Any) -> str:
        """Packed projection and attention; `more` are further inputs by number."""
        packed = self.add("MatMul", x, self.drawn(f"qkv.{layer}", self.hidden, (HEADS + 2) * HEAD_SIZE))
        wired = {0: packed, 3: f"past.{layer}.key", 4: f"past.{layer}.value", **(more or {})}
        wired[5], wired[6] = self.lengths()
        inputs = tuple(wired.get(i, "") for i in range(max(wired) + 1))
        outputs = (f"attended.{layer}", f"present.{layer}.key", f"present.{layer}.value")
        given = {"num_heads": HEADS, "kv_num_heads": 1, **attributes}
        return self.add("GroupQueryAttention", *inputs, domain=MICROSOFT, outputs=outputs, **given)

    def head(self, x: str) -> str:
        """Logits."""
        return self.add("MatMul", x, self.drawn("head", HEADS * HEAD_SIZE, VOCABULARY), outputs=("logits",))

    def graph(self) -> Graph:
        """The decoder."""
        presents = [f"present.{layer}.{what}" for layer in range(self.layers) for what in ("key", "value")]
        outputs = {n: Value(n, "float32", ()) for n in ("logits", *presents)}
        info = DecoderInfo(
            kv_heads=1,
            head_size=HEAD_SIZE,
            vocabulary=VOCABULARY,
            context_length=CONTEXT,
            eos_ids=(),
            input_ids="input_ids",
            attention_mask="attention_mask",
            logits="logits",
            caches=tuple(Cache(*(f"{kind}.{layer}.{what}" for kind in ("past", "present") for what in ("key", "value")))
                         for layer in range(self.layers)),
            position_ids="position_ids",
        )  # fmt: skip
        return Graph(tuple(self.nodes), self.weights, self.inputs, outputs, info, None)


def branch(outputs: Mapping[str, NDArray[Any]], *, as_weights: bool) -> Subgraph:
    """A branch of an If that gives these values under these names, from Constant nodes or from its own initialisers."""
    names = tuple(outputs)
    if as_weights:
        return Subgraph((), {n: stored(n, a) for n, a in outputs.items()}, names)
    nodes = tuple(Node(f"c.{n}", "Constant", "", (), (n,), {"value": a}) for n, a in outputs.items())
    return Subgraph(nodes, {}, names)
