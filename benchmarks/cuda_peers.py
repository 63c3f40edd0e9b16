"""The engine and PyTorch in turns on one card, on the same weights: a dense decoder of the zoo, one token at a time.

PyTorch gets what its users have: weights widened to half precision, a static cache, one CUDA graph a step, the greedy
choice on the device. It reads four times the bytes. Beside the ratio stands parity: how many ids agree before the first
that does not, both fed their own; half precision rounds where the engine does not, so that they part in time.

    python -m benchmarks.cuda_peers --model models/qwen2.5-0.5b --out cuda-peers.json        (needs a GPU and torch)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.cuda_decode import PROMPT_IDS, arm
from engine.graph import Graph
from engine.onnx_load import load, recorded_digest

ROUNDS, TOKENS = 5, 128
CAPACITY = 256


class TorchDecoder:
    """Qwen2-like layers in torch: RMS norms, grouped-query attention with biases and rotary halves, SwiGLU."""

    def __init__(self, graph: Graph, torch: Any) -> None:
        self.torch = torch
        gqa = next(n.attributes for n in graph.nodes if n.op == "GroupQueryAttention")
        norm = next(n.attributes for n in graph.nodes if n.op == "SkipSimplifiedLayerNormalization")
        self.heads, self.kv_heads = int(gqa["num_heads"]), int(gqa["kv_num_heads"])
        self.size, self.scale, self.eps = graph.info.head_size, float(gqa["scale"]), float(norm["epsilon"])
        self.weights = {w.name: w.array() for w in graph.weights.values()}
        self.cos, self.sin = (self._half(self.weights[f"{n}_cache"][:CAPACITY]) for n in ("cos", "sin"))
        self.table = self._half(self._embedding())
        layers = sum(n.endswith("attn.qkv_proj.MatMul.weight_Q4") for n in self.weights)
        self.layers = [self._layer(f"model.layers.{n}") for n in range(layers)]
        last = next(n for n in self.weights if n.startswith(f"model.layers.{layers}.") and "norm" in n)
        self.norm, self.head = self._half(self.weights[last]), self._product("lm_head")
        shape = (layers, 2, self.kv_heads, CAPACITY, self.size)
        self.cache = torch.zeros(shape, dtype=torch.float16, device="cuda")
        self.token = torch.zeros(1, dtype=torch.long, device="cuda")
        self.position = torch.zeros(1, dtype=torch.long, device="cuda")
        self.columns = torch.arange(CAPACITY, device="cuda")
        self.weights.clear()

    def step(self) -> None:
        """Feed `token` at `position`; both are moved on."""
        torch, at = self.torch, self.position
        x = self.table[self.token]
        cos, sin = self.cos[at], self.sin[at]
        seen = (self.columns <= at)[None, None, None]
        for n, layer in enumerate(self.layers):
            h = torch.nn.functional.rms_norm(x, x.shape[-1:], layer["input_layernorm"], self.eps)
            qkv = torch.nn.functional.linear(h, layer["qkv"], layer["bias"]).view(-1, self.size)
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads))
            q, k = self._turned(q, cos, sin), self._turned(k, cos, sin)
            keys, values = self.cache[n]
            keys.index_copy_(1, at, k[:, None])
            values.index_copy_(1, at, v[:, None])
            made = torch.nn.functional.scaled_dot_product_attention(
                q[None, :, None], keys[None], values[None], attn_mask=seen, scale=self.scale, enable_gqa=True
            )
            x = x + torch.nn.functional.linear(made.reshape(1, -1), layer["o"])
            h = torch.nn.functional.rms_norm(x, x.shape[-1:], layer["post_attention_layernorm"], self.eps)
            gate, up = torch.nn.functional.linear(h, layer["gate_up"]).chunk(2, dim=-1)
            x = x + torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, layer["down"])
        h = torch.nn.functional.rms_norm(x, x.shape[-1:], self.norm, self.eps)
        self.token.copy_(torch.nn.functional.linear(h, self.head).argmax(dim=-1))
        self.position.add_(1)

    def generate(self, replay: Callable[[], None]) -> tuple[list[int], float]:
        """TOKENS ids after the prompt, which goes in token by token; tokens a second of those that follow the first."""
        self.position.zero_()
        for token in PROMPT_IDS:
            self.token.fill_(token)
            replay()
        ids: list[Any] = [self.token.clone()]
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(TOKENS - 1):
            replay()
            ids.append(self.token.clone())
        self.torch.cuda.synchronize()
        taken = time.perf_counter() - start
        return [int(i) for i in ids], (TOKENS - 1) / taken

    def captured(self) -> Callable[[], None]:
        """The step as a CUDA graph."""
        torch = self.torch
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        replay: Callable[[], None] = graph.replay
        return replay

    def _layer(self, path: str) -> dict[str, Any]:
        torch = self.torch
        gate_up = torch.cat([self._product(f"{path}.mlp.{n}_proj") for n in ("gate", "up")])
        norms = {
            n: self._half(self.weights[f"{path}.{n}.weight"]) for n in ("input_layernorm", "post_attention_layernorm")
        }
        return {
            "qkv": self._product(f"{path}.attn.qkv_proj"),
            "bias": self._half(self.weights[f"{path}.attn.qkv_proj.Add.bias"]),
            "o": self._product(f"{path}.attn.o_proj"),
            "gate_up": gate_up,
            "down": self._product(f"{path}.mlp.down_proj"),
            **norms,
        }

    def _product(self, path: str) -> Any:
        """A weight of 4-bit codes, widened on the device: half [N, K]."""
        return self._wide(self.weights[f"{path}.MatMul.weight_Q4"], self.weights[f"{path}.MatMul.weight_scales"])

    def _wide(self, codes: NDArray[Any], scales: NDArray[Any]) -> Any:
        torch = self.torch
        packed = torch.from_numpy(codes.copy()).cuda()
        values = torch.stack((packed & 15, packed >> 4), dim=-1).reshape(*packed.shape[:2], -1).to(torch.int8) - 8
        return (values * self._half(scales)[..., None]).reshape(packed.shape[0], -1)

    def _embedding(self) -> NDArray[Any]:
        found = [w for n, w in self.weights.items() if "embed_tokens" in n and w.ndim == 2 and w.dtype == np.float16]
        if found:
            return found[0]
        wide: NDArray[Any] = self._product("lm_head").cpu().numpy()  # tied: rows of the head
        return wide

    def _half(self, array: NDArray[Any]) -> Any:
        return self.torch.from_numpy(np.array(array, np.float16)).cuda()

    def _turned(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return self.torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many ids are the same before the first that is not."""
    return next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))


def main() -> int:
    """Measure in turns, write the record, print it short."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch: Any = import_module("torch")  # not of this project: whoever measures beside it has it
    model = arguments.model.absolute()
    with torch.inference_mode():
        decoder = TorchDecoder(load(model), torch)
        replay = decoder.captured()
        ours: list[dict[str, Any]] = []
        theirs: list[tuple[list[int], float]] = []
        for _ in range(ROUNDS):
            ours.append(arm(model, TOKENS, 2, {}))
            theirs.append(decoder.generate(replay))
    rates = [run["tokens_per_s"]["median"] for run in ours], [rate for _, rate in theirs]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "model": recorded_digest(model),
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(),
        "engine_tokens_per_s": rates[0],
        "torch_tokens_per_s": rates[1],
        "ratio": median(rates[0]) / median(rates[1]),
        "ids_before_the_first_that_differs": agreeing(ours[0]["ids"], theirs[0][0]),
        "torch_repeats_itself": len({tuple(one) for one, _ in theirs}) == 1,
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
