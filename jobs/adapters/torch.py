"""PyTorch as an engine: the dense decoder of a graph written out in torch, with the same weights file behind it.

It gets what its users have: weights widened to half precision on a card and to float32 elsewhere, a static cache, one
CUDA graph a step, the greedy choice on the device. It so reads about four times the bytes of 4-bit weights. Half
precision rounds where the engine does not, so that ids part in time where logits are close. The prompt goes in token
by token, so that the time to the first id is no figure of what torch can do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import CannotLoad, UnsupportedModel
from engine.graph import Graph, Node
from engine.onnx_load import load
from jobs.adapters.peer import Asked, Logits, Made, Option, Peer, Scalar, checked_best, library, main

INSTALL = "pip install torch"
LEAST_CAPACITY = 256
SERVED = frozenset(
    {
        *("MatMulNBits", "SkipSimplifiedLayerNormalization", "SimplifiedLayerNormalization", "GroupQueryAttention"),
        *("Sigmoid", "Mul", "Add", "Gather", "GatherBlockQuantized", "Reshape"),
        *("Cast", "Constant", "ReduceSum", "Sub", "Shape"),
    }
)
"""Operators of a dense decoder; what they mean in it is checked node by node."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's nodes: products by their place, the bias of q, k and v, attention, and both norms."""

    products: Mapping[str, Node]
    biases: Mapping[str, str]
    attention: Node
    norms: Mapping[str, Node]


def layers_of(graph: Graph) -> tuple[Layer, ...]:
    """The layers of a dense decoder. Raises UnsupportedModel for whatever is not one, with all reasons."""
    odd = [f"{node.name}: {node.full_op}" for node in graph.nodes if node.op not in SERVED]
    odd += [f"{node.name}: {why}" for node in graph.nodes for why in _unlike(node)]
    if graph.info.states or odd:
        raise UnsupportedModel.because("torch's decoder here", odd or ["states beside the cache"])
    found = []
    for number in range(len(graph.info.caches)):
        path = f"/model/layers.{number}/"
        own = [node for node in graph.nodes if node.name.startswith(path)]
        products = {node.name.removeprefix(path).split("/")[1]: node for node in own if node.op == "MatMulNBits"}
        biases = {n.name.removeprefix(path).split("/")[1]: n.inputs[1] for n in own if n.op == "Add"}
        norms = {n.name.removeprefix(path).split("/")[0]: n for n in own if "LayerNormalization" in n.op}
        attention = next((node for node in own if node.op == "GroupQueryAttention"), None)
        if attention is None or set(norms) != {"input_layernorm", "post_attention_layernorm"}:
            raise UnsupportedModel.because("torch's decoder here", (f"{path}: no layer of attention and two norms",))
        found.append(Layer(products, biases, attention, norms))
    return tuple(found)


def _unlike(node: Node) -> Iterator[str]:
    """What a node asks for that the decoder here does not do."""
    told = node.attributes
    if node.op == "GroupQueryAttention":
        asked = {"rotary_interleaved": 0, "local_window_size": -1, "softcap": 0.0, "do_rotary": 1}
        yield from (f"{name} {told[name]}" for name, plain in asked.items() if told.get(name, plain) != plain)
        if any(node.inputs[9:]):
            yield "further inputs of attention"
    if node.op == "MatMulNBits":
        if told["bits"] not in (4, 8):
            yield f"{told['bits']} bits"
        if any(node.inputs[4:]):
            yield "further inputs of a product"


class TorchDecoder:
    """A dense decoder on one device; the step is a CUDA graph where `capture` says so."""

    def __init__(self, graph: Graph, torch: Any, device: str, dtype: str, capacity: int, *, capture: bool) -> None:
        self.torch, self.device, self.on = torch, device, device
        self._dtype, self._ends = getattr(torch, dtype), graph.info.eos_ids
        self._weights = {weight.name: weight for weight in graph.weights.values()}
        layers = layers_of(graph)
        gqa = layers[0].attention
        self._heads, self._kv_heads = int(gqa.attributes["num_heads"]), int(gqa.attributes["kv_num_heads"])
        self._size, self._scale = graph.info.head_size, float(gqa.attributes["scale"])
        self._cos, self._sin = (self._made(self._array(gqa.inputs[n])[:capacity]) for n in (7, 8))
        embedding = next(node for node in graph.nodes if "embed_tokens/Gather" in node.name)
        head = next(node for node in graph.nodes if node.output(0) == graph.info.logits)
        self._head = self._product(head)
        tied = embedding.op == "GatherBlockQuantized"  # its rows are the head's
        self._table = self._head if tied else self._made(self._array(embedding.inputs[0]))
        self._layers = [self._layer(layer) for layer in layers]
        last = next(node for node in graph.nodes if node.output(0) == head.inputs[0])
        self._norm = self._norm_of(last)
        shape = (len(layers), 2, self._kv_heads, capacity, self._size)
        self._cache = torch.zeros(shape, dtype=self._dtype, device=device)
        self._token = torch.zeros(1, dtype=torch.long, device=device)
        self._position = torch.zeros(1, dtype=torch.long, device=device)
        self._columns = torch.arange(capacity, device=device)
        self._row = torch.zeros((1, graph.info.vocabulary), dtype=self._dtype, device=device)
        self._weights.clear()
        self._advance: Callable[[], None] = self._captured() if capture else self._step
        self.captured = capture
        served: dict[str, Scalar] = {"torch.device": device, "torch.dtype": dtype}
        self.settings: Mapping[str, Scalar] = {**served, **({"capture": capture} if device == "cuda" else {})}

    @property
    def facts(self) -> Mapping[str, int | float | str]:
        """What torch's allocator held on the card at most."""
        if self.on == "cpu":
            return {}
        cuda = self.torch.cuda
        return {"torch_card": cuda.get_device_name(), "torch_peak_allocated_bytes": cuda.max_memory_allocated()}

    def generate(self, prompt: Sequence[int], tokens: int, *, ignore_eos: bool = True) -> Made:
        """One generation. On a card that no end id can stop, steps are asked for ahead and timed by the card's events;
        else each is waited for, by the host's clock.
        """
        ends = () if ignore_eos else self._ends
        with self.torch.inference_mode():
            start = time.perf_counter_ns()
            self._feed(prompt)
            ids = [self._token.clone()]
            self._wait()
            prefill_ns = time.perf_counter_ns() - start
            ahead = self.on == "cuda" and not ends
            chosen, step_ns = self._ahead(ids, tokens) if ahead else self._one_by_one(ids, tokens, ends)
            checked_best(self._row[0].float().cpu().numpy())
        counters = {"captures": 0, "replays": len(step_ns) * self.captured}
        return Made(chosen, prefill_ns, step_ns, chosen[-1] in ends, counters)

    def logits(self, prompt: Sequence[int], forced: Sequence[int]) -> Logits:
        """Logits after the prompt and after each forced id."""
        rows = []
        with self.torch.inference_mode():
            self._feed(prompt)
            rows.append(self._row[0].float().cpu().numpy())
            for token in forced:
                self._token.fill_(token)
                self._advance()
                rows.append(self._row[0].float().cpu().numpy())
        return np.stack(rows)

    def _feed(self, prompt: Sequence[int]) -> None:
        self._position.zero_()
        for token in prompt:
            self._token.fill_(token)
            self._advance()

    def _ahead(self, ids: list[Any], tokens: int) -> tuple[list[int], list[int]]:
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(tokens)]
        events[0].record()
        for event in events[1:]:
            self._advance()
            ids.append(self._token.clone())
            event.record()
        self._wait()
        return [int(one) for one in ids], [round(a.elapsed_time(b) * 1e6) for a, b in pairwise(events)]

    def _one_by_one(self, ids: list[Any], tokens: int, ends: Sequence[int]) -> tuple[list[int], list[int]]:
        chosen, times = [int(ids[0])], list[int]()
        while len(chosen) < tokens and chosen[-1] not in ends:
            start = time.perf_counter_ns()
            self._advance()
            chosen.append(int(self._token))
            times.append(time.perf_counter_ns() - start)
        return chosen, times

    def _wait(self) -> None:
        if self.on == "cuda":
            self.torch.cuda.synchronize()

    def _step(self) -> None:
        """Feed `_token` at `_position`; both are moved on, and `_row` holds the logits."""
        functional, at = self.torch.nn.functional, self._position
        x = self._table[self._token]
        cos, sin = self._cos[at], self._sin[at]
        seen = (self._columns <= at)[None, None, None]
        for number, layer in enumerate(self._layers):
            qkv = functional.linear(self._normed(x, layer["input"]), layer["qkv"], layer["bias"]).view(-1, self._size)
            q, k, v = qkv.split((self._heads, self._kv_heads, self._kv_heads))
            q, k = self._turned(q, cos, sin), self._turned(k, cos, sin)
            keys, values = self._cache[number]
            keys.index_copy_(1, at, k[:, None])
            values.index_copy_(1, at, v[:, None])
            made = functional.scaled_dot_product_attention(
                q[None, :, None], keys[None], values[None], attn_mask=seen, scale=self._scale, enable_gqa=True
            )
            x = x + functional.linear(made.reshape(1, -1), layer["o"])
            gate, up = functional.linear(self._normed(x, layer["post"]), layer["gate_up"]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer["down"])
        self._row.copy_(functional.linear(self._normed(x, self._norm), self._head))
        self._token.copy_(self._row.argmax(dim=-1))
        self._position.add_(1)

    def _captured(self) -> Callable[[], None]:
        """The step as a CUDA graph."""
        torch = self.torch
        with torch.inference_mode():
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
        replay: Callable[[], None] = graph.replay
        return replay

    def _layer(self, layer: Layer) -> dict[str, Any]:
        made = {name: self._product(node) for name, node in layer.products.items()}
        parts = ["qkv_proj"] if "qkv_proj" in made else ["q_proj", "k_proj", "v_proj"]
        biases = [self._made(self._array(layer.biases[name])) for name in parts if name in layer.biases]
        return {
            "qkv": self.torch.cat([made[name] for name in parts]),
            "bias": self.torch.cat(biases) if biases else None,
            "o": made["o_proj"],
            "gate_up": self.torch.cat([made["gate_proj"], made["up_proj"]]),
            "down": made["down_proj"],
            "input": self._norm_of(layer.norms["input_layernorm"]),
            "post": self._norm_of(layer.norms["post_attention_layernorm"]),
        }

    def _product(self, node: Node) -> Any:
        """A weight of codes, widened on the device: [N, K]. Codes are [N, blocks, bytes], the low half first."""
        torch, bits = self.torch, int(node.attributes["bits"])
        codes = self._there(self._array(node.inputs[1]))
        rows, blocks = codes.shape[:2]
        scales = self._made(self._array(node.inputs[2]).reshape(rows, blocks))
        values = _unpacked(torch, codes.reshape(rows, -1), bits).reshape(rows, blocks, -1)
        zero: Any = 1 << bits - 1
        if node.input(3):
            given = self._array(node.inputs[3])
            packed = given.dtype == np.uint8
            points = self._there(given.reshape(rows, -1))
            zero = (_unpacked(torch, points, bits) if packed else points)[:, :blocks, None].to(self._dtype)
        return ((values.to(self._dtype) - zero) * scales[..., None]).reshape(rows, -1)[:, : int(node.attributes["K"])]

    def _norm_of(self, node: Node) -> tuple[Any, float]:
        place = 2 if node.op.startswith("Skip") else 1
        return self._made(self._array(node.inputs[place])), float(node.attributes["epsilon"])

    def _normed(self, x: Any, norm: tuple[Any, float]) -> Any:
        return self.torch.nn.functional.rms_norm(x, x.shape[-1:], *norm)

    def _turned(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return self.torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def _array(self, name: str) -> NDArray[Any]:
        return self._weights[name].array()

    def _there(self, array: NDArray[Any]) -> Any:
        return self.torch.from_numpy(np.array(array)).to(self.device)

    def _made(self, array: NDArray[Any]) -> Any:
        return self._there(array.astype(np.float32)).to(self._dtype)


def _unpacked(torch: Any, packed: Any, bits: int) -> Any:
    """Codes of one byte each."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1)


def opened(asked: Asked) -> TorchDecoder:
    """The decoder that an arm asks for. Raises CannotLoad where torch, or its CUDA, is not there."""
    torch = library("torch", INSTALL)
    device, dtype = place_of(torch, asked)
    capacity = max(LEAST_CAPACITY, 1 << (asked.positions - 1).bit_length())
    capture = device == "cuda" and asked.request.config.capture
    return TorchDecoder(load(asked.request.model), torch, device, dtype, capacity, capture=capture)


def place_of(torch: Any, asked: Asked) -> tuple[str, str]:
    """Where an arm of torch computes, and in which type. Raises CannotLoad where torch finds no card."""
    wanted, dtype = asked.options["device"], asked.options["dtype"]
    device = wanted if wanted != "auto" else "cuda" if asked.on_card else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise CannotLoad(f"torch {torch.__version__} finds no card", "install one with CUDA, or device: cpu")
    if dtype == "auto":
        dtype = "float16" if device == "cuda" else "float32"
    return device, dtype


PEER = Peer(
    name="torch",
    module="jobs.adapters.torch",
    open=opened,
    distributions=("torch",),
    blind="torch does not tell what it copies, allocates or launches in a step",
    counters=("emitted_tokens", "captures", "replays"),
    serves=frozenset({"capture"}),
    options={
        "device": Option("auto", "where it computes; auto: the card where there is one", ("auto", "cuda", "cpu")),
        "dtype": Option(
            "auto",
            "what weights are widened to; auto: float16 on a card, float32 elsewhere",
            ("auto", "float16", "bfloat16", "float32"),
        ),
    },
)

if __name__ == "__main__":
    sys.exit(main(PEER))
