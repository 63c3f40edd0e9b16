"""Decoders made from a seed: where a graph's weights come from, and what a float64 forward pass reads of them.

The table of an untied embedding holds quarters, which float16 and 4 bits both hold exactly; the head's rows are that
table's rows in another order, so that each id is answered by the next one of a long cycle. A tied table is random, and
its last norm has both signs, or every id would answer itself. Votes come on top (`peaked`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import BadRequest
from engine.zoo import forward, forward_hybrid
from engine.zoo.hybrid_geometry import HybridGeometry
from engine.zoo.passes import Blocks, Past, in_half, through, through_without_each
from engine.zoo.peaked import Peak, cycle_scale, peak
from engine.zoo.quant import BLOCK, F64
from engine.zoo.seeded import Held, Ids, Poured, Seeded, SeededLinear, Source, filled, mapped
from engine.zoo.writer import DecoderGeometry

PROMPT_IDS = (1, 17, 42, 99)
PATH_IDS = 128
SPECIAL_IDS = 3
"""The last ids of the vocabulary: pad, bos and eos."""
_QKV_GAIN, _O_GAIN, _MLP_GAIN, _ROUTER_GAIN = 2.0, 1.0, 1.1, 5.0
"""Output deviation of a product per unit of input; as in `tiny`, where attention and MLP both decide. A router
this sharp gives the last chosen expert next to nothing: which one that is, float16 may change in 40 layers."""
_QUARTER = 0.25
_LOGIT_DEVIATION = 3.0
_USUAL_AGREEMENT = 0.3
"""Of the last state with the token's embedding, per element, where nobody has measured it."""
_DRAWS = 4


class SeededHead:
    """Embedding and head of a seed; `votes` says what the head is, once it is known."""

    def __init__(self, source: Source, vocabulary: int, hidden: int, *, tied: bool, asymmetric: bool) -> None:
        self.vocabulary, self.tied = vocabulary, tied
        self._hidden = hidden
        self._asymmetric = asymmetric
        self._source = source
        self.votes: Callable[[], Peak | None] = lambda: None
        deviation = _LOGIT_DEVIATION / math.sqrt(hidden)
        self._table = source.linear("table", vocabulary, hidden, deviation)

    @property
    def base_table(self) -> SeededLinear:
        """A tied table before any vote."""
        return self._table

    def embedding(self) -> Seeded:
        """The untied table, float16."""
        return mapped(self._table.codes, np.float16, _quarters, self._hidden)

    def embedded(self, ids: Ids) -> F64:
        """Rows before any vote."""
        rows = self._table.values(ids) if self.tied else self.embedding().rows(ids)
        return rows.astype(np.float64)

    def base(self, ids: Ids) -> F64:
        """Head rows before any vote, at scale 1."""
        return self.embedded(ids if self.tied else self._previous[ids])

    def linear(self) -> SeededLinear:
        """The head, votes and all; they are asked for when the first row is."""
        codes, scales = self._table.codes, self._table.scales
        return SeededLinear(
            self.vocabulary,
            self._hidden,
            Seeded(codes.dtype, codes.shape, codes.row, self._codes),
            Seeded(scales.dtype, scales.shape, scales.row, self._scales),
            _eights(self.vocabulary, self._hidden // BLOCK) if self._asymmetric else None,
        )

    def path(self, draw: int, tokens: int) -> Ids:
        """Ids of one draw, none of them special or in the prompt."""
        order = self._order(f"path {draw}")
        free = order[(order < self.vocabulary - SPECIAL_IDS) & ~np.isin(order, PROMPT_IDS)]
        return free[:tokens]

    def _codes(self, ids: Ids) -> Any:
        rows = self._table.codes.rows(ids if self.tied else self._previous[ids])
        return self._patched(ids, rows, lambda peak, at: peak.rows.codes[at].reshape(len(at), rows.shape[1]))

    def _scales(self, ids: Ids) -> Any:
        votes = self.votes()
        if self.tied:
            rows = self._table.scales.rows(ids)
        else:
            scale = votes.scale if votes is not None else cycle_scale(_USUAL_AGREEMENT * self._hidden)
            rows = np.full((ids.size, self._hidden // BLOCK), scale * _QUARTER, np.float16)
        return self._patched(ids, rows, lambda peak, at: peak.rows.scales[at])

    def _patched(self, ids: Ids, rows: Any, voted: Callable[[Peak, Ids], Any]) -> Any:
        votes = self.votes()
        if votes is not None:
            at = np.flatnonzero(np.isin(ids, votes.path))
            order = np.argsort(votes.path)
            rows[at] = voted(votes, order[np.searchsorted(votes.path, ids[at], sorter=order)])
        return rows

    @cached_property
    def _previous(self) -> Ids:
        """Of each id, the one before it on the cycle."""
        order = self._order("cycle")
        previous = np.empty_like(order)
        previous[np.roll(order, -1)] = order
        return previous

    def _order(self, name: str) -> Ids:
        """All ids in an order of their own."""
        drawn = self._source.uniform(name, (self.vocabulary, 1), 0.0, 1.0, np.float64)
        return np.argsort(drawn.rows(np.arange(self.vocabulary))[:, 0], kind="stable")


class SeededBody(ABC):
    """What all decoders of a seed share: norms, projections, the head, and how it is peaked."""

    def __init__(
        self,
        geometry: DecoderGeometry | HybridGeometry,
        seed: int,
        *,
        tied: bool,
        asymmetric: bool,
        peaked: bool,
        poured: bool,
    ) -> None:
        self._hidden_size = geometry.hidden
        self._context = geometry.context
        self._asymmetric = asymmetric
        self._poured = poured
        self.source = Poured(seed) if poured else Source(seed)
        self.head = SeededHead(self.source, geometry.vocabulary, geometry.hidden, tied=tied, asymmetric=asymmetric)
        if peaked:
            self.head.votes = lambda: self.peak

    @property
    def vocabulary(self) -> int:
        """Rows of the head."""
        return self.head.vocabulary

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one table."""
        return self.head.tied

    @abstractmethod
    def blocks(self, body: Any) -> Blocks:
        """The blocks between embedding and head, on these weights in one of their forms."""

    @property
    def block_names(self) -> list[str]:
        """Names of the blocks that may be left out."""
        return self.blocks(self).names

    def hidden(self, embedded: F64) -> F64:
        """What the head reads at each position."""
        return through(self.blocks(self), embedded)

    def hidden_in_turn(self) -> Callable[[F64], F64]:
        """What the head reads at positions that are given piece by piece; weights are kept in memory."""
        blocks, past = self.blocks(_HeldBody(self)), Past()
        return lambda embedded: through(blocks, embedded, past=past)

    def hidden_without_each(self, embedded: F64, left_out: Collection[str]) -> Iterator[tuple[str | None, F64]]:
        """What the head reads in float16, with all blocks (None) and without each of some."""
        return through_without_each(self.blocks(_HalfBody(self)), embedded, left_out)

    def table(self) -> Held:
        """Head rows before any vote, at scale 1, of a tied table."""
        return Held(self.head.base_table)

    @abstractmethod
    def shape(self, name: str) -> tuple[int, int, float]:
        """Rows, columns and gain of a projection."""

    def embedding(self) -> Seeded:
        """The untied table."""
        return self.head.embedding()

    def embedded(self, ids: Ids) -> F64:
        """Embeddings before any vote."""
        return self.head.embedded(ids)

    def base(self, ids: Ids) -> F64:
        """Head rows before any vote."""
        return self.head.base(ids)

    def final_norm(self) -> F64:
        """Weight of the last norm."""
        return self.vector("final_norm")

    def norm(self, name: str) -> Seeded:
        """A norm's weight; the last one's has both signs where the table is tied."""
        made = self.source.uniform(name, (self._hidden_size,), 0.83, 1.17, np.float16)
        if name != "final_norm" or not self.tied:
            return made
        signs = self.source.uniform("final_norm signs", made.shape, -1.0, 1.0, np.float64)
        return Seeded(
            made.dtype,
            made.shape,
            made.row,
            lambda ids: np.copysign(made.rows(ids), signs.rows(ids)).astype(np.float16),
        )

    def linear(self, name: str) -> SeededLinear:
        """A projection, or the head."""
        if name == "lm_head" and self._poured and not self.tied:  # no cycle: each layer has its say in every answer
            deviation = _LOGIT_DEVIATION / math.sqrt(self._hidden_size)
            return self.source.linear(name, self.vocabulary, self._hidden_size, deviation, asymmetric=self._asymmetric)
        if name == "lm_head":
            return self.head.linear()
        rows, columns, gain = self.shape(name)
        return self.source.linear(name, rows, columns, gain / math.sqrt(columns), asymmetric=self._asymmetric)

    def vector(self, name: str) -> F64:
        """A norm's weight, exact."""
        return flat(self.norm(name))

    def product(self, name: str, x: NDArray[Any]) -> NDArray[Any]:
        """x times a projection, transposed."""
        return self.linear(name).product(x)

    @cached_property
    def peak(self) -> Peak:
        """The votes of the first draw that is fit. Raises BadRequest where none is."""
        tokens = min(PATH_IDS, self._context - len(PROMPT_IDS), self.vocabulary - SPECIAL_IDS - len(PROMPT_IDS))
        for draw in range(_DRAWS):
            made = peak(self, PROMPT_IDS, self.head.path(draw, tokens))
            if made.is_fit:
                return made
        raise BadRequest(
            f"none of {_DRAWS} draws makes every answer clear and every layer needed",
            "pass another --seed, or leave the head random with --no-peak",
        )


class SeededDecoder(SeededBody):
    """Weights of a llama or qwen2 decoder; `DecoderWeights` and `forward.Body`."""

    def __init__(
        self,
        geometry: DecoderGeometry,
        seed: int,
        *,
        asymmetric: bool = False,
        peaked: bool = True,
        poured: bool = False,
    ) -> None:
        super().__init__(geometry, seed, tied=geometry.tied, asymmetric=asymmetric, peaked=peaked, poured=poured)
        self._g = geometry

    def blocks(self, body: Any) -> Blocks:
        """Attention and MLP of each layer."""
        return forward.Decoder(self._g, body)

    def bias(self, name: str, width: int) -> Seeded:
        """Of a packed projection."""
        return self.source.uniform(f"{name}.bias", (width,), -0.35, 0.35, np.float16)

    def vector(self, name: str) -> F64:
        """A norm's weight, or a bias."""
        if not name.endswith(".bias"):
            return super().vector(name)
        projection = name.removesuffix(".bias")
        return flat(self.bias(projection, self.shape(projection)[0]))

    def shape(self, name: str) -> tuple[int, int, float]:
        """Rows, columns and gain of a projection."""
        g, role = self._g, name.rsplit(".", 1)[1]
        if role == "o_proj":
            return g.hidden, g.heads * g.head_size, _O_GAIN
        if role == "down_proj":
            return g.hidden, g.ffn, _MLP_GAIN
        if role in ("gate_proj", "up_proj"):
            return g.ffn, g.hidden, _MLP_GAIN
        return dict(g.projections)[role], g.hidden, _QKV_GAIN


class SeededHybrid(SeededBody):
    """Weights of a Qwen3.5-MoE decoder; `HybridWeights` and `forward_hybrid.HybridBody`."""

    def __init__(
        self,
        geometry: HybridGeometry,
        seed: int,
        *,
        peaked: bool = True,
        poured: bool = False,
        skew: float = 0.0,
    ) -> None:
        super().__init__(geometry, seed, tied=False, asymmetric=False, peaked=peaked, poured=poured)
        self._g = geometry
        self._skew = skew

    def linear(self, name: str) -> SeededLinear:
        """A projection, or the head; rows of a router differ in size where it is skewed."""
        made = super().linear(name)
        if not self._skew or not name.endswith("moe.router"):
            return made
        sizes = np.exp(self._skew * flat(self.source.uniform(f"{name} skew", (made.rows,), -1.0, 1.0, np.float64)))
        scales = made.scales
        larger = lambda ids: (scales.rows(ids) * sizes[ids, None]).astype(np.float16)  # noqa: E731
        return replace(made, scales=replace(scales, make=larger))

    def blocks(self, body: Any) -> Blocks:
        """A mixer and experts of each layer."""
        return forward_hybrid.HybridDecoder(self._g, body)

    def shape(self, name: str) -> tuple[int, int, float]:
        """Rows, columns and gain of a projection."""
        g = self._g
        return {
            "attn.qkv_proj": (2 * g.queries + 2 * g.cached, g.hidden, _QKV_GAIN),
            "attn.o_proj": (g.hidden, g.queries, 2 * _O_GAIN),
            "linear_attn.qkv_proj": (g.convolved, g.hidden, _QKV_GAIN),
            "linear_attn.z_proj": (g.states, g.hidden, _QKV_GAIN),
            "linear_attn.out_proj": (g.hidden, g.states, _O_GAIN),
            "moe.router": (g.experts, g.hidden, _ROUTER_GAIN),
            "mlp.gate_proj": (g.shared_ffn, g.hidden, _MLP_GAIN),
            "mlp.up_proj": (g.shared_ffn, g.hidden, _MLP_GAIN),
            "mlp.down_proj": (g.hidden, g.shared_ffn, _MLP_GAIN),
            "shared_expert_gate": (1, g.hidden, 1.0),
        }[name.split(".", 2)[2]]

    def head_norm(self, name: str, size: int) -> Seeded:
        """[size]: norm of a head."""
        return self.source.uniform(name, (size,), 0.83, 1.17, np.float16)

    def gate(self, name: str) -> Seeded:
        """[hidden, value heads]: a small dense product."""
        bound = math.sqrt(3 / self._g.hidden)
        return self.source.uniform(name, (self._g.hidden, self._g.value_heads), -bound, bound, np.float16)

    def delta(self, name: str) -> Seeded:
        """Filters and gates of a gated delta layer."""
        g = self._g
        match name.rsplit(".", 1)[1]:
            case "weight":
                return self.source.uniform(name, (g.convolved, 1, g.taps), -0.9, 0.9, np.float16)
            case "dt_bias":
                return self.source.uniform(name, (g.value_heads,), -3.0, 0.0, np.float32)
            case "neg_exp_A":
                return self.source.uniform(name, (g.value_heads,), -4.0, -0.25, np.float32)
        return self.source.uniform(name, (g.convolved,), -0.1, 0.1, np.float16)

    def experts(self, name: str) -> Seeded:
        """Codes, scales or biases of all experts; Qwen has no biases, and the exporter writes zeros."""
        g = self._g
        path, kind = name.rsplit(".", 1)
        rows, columns = (2 * g.ffn, g.hidden) if path.endswith("gate_up_proj") else (g.hidden, g.ffn)
        if kind == "qweight":
            return self.source.codes(path, (g.experts, rows, columns // 2), columns // 2, symmetric=True)
        if kind == "scales":
            return self.source.scales(path, (g.experts, rows, columns // BLOCK), _MLP_GAIN / math.sqrt(columns))
        return filled((g.experts, rows), 0.0, np.float16)

    def vector(self, name: str) -> F64:
        """A norm's weight, a filter, a bias or a gate's constant."""
        role = name.rsplit(".", 1)[1] if "." in name else name
        if role in ("norm", "q_norm", "k_norm"):
            return flat(self.head_norm(name, self._g.state_size if role == "norm" else self._g.head_size))
        return flat(self.delta(name)) if "linear_attn" in name else super().vector(name)

    def product(self, name: str, x: NDArray[Any]) -> NDArray[Any]:
        """x times a projection, transposed."""
        if name.endswith(("a_proj", "b_proj")):
            weight = self.gate(name)
            return np.asarray(x @ np.concatenate(list(weight.chunks())).astype(x.dtype))
        return super().product(name, x)

    def expert(self, name: str, expert: int, x: NDArray[Any]) -> NDArray[Any]:
        """x times one expert's weight, transposed."""
        codes, scales = (self.experts(f"{name}.{part}") for part in ("qweight", "scales"))
        rows, columns = codes.shape[1], codes.row * 2
        start = expert * rows

        def of(tensor: Seeded) -> Seeded:
            return Seeded(tensor.dtype, (rows, tensor.row), tensor.row, lambda ids: tensor.rows(ids + start))

        return SeededLinear(rows, columns, of(codes), of(scales)).product(x)


class _HeldBody:
    """A decoder's weights kept in memory, each from its first use on: four bytes a weight."""

    def __init__(self, body: SeededBody) -> None:
        self._body = body
        self._held: dict[str, Held] = {}
        self.vector = cache(body.vector)

    def product(self, name: str, x: F64) -> F64:
        """x times a projection, transposed."""
        if name not in self._held:
            self._held[name] = Held(self._body.linear(name))
        return self._held[name].product(x)


class _HalfBody:
    """A decoder's weights as a card computes with them: float16 into each product and out of it, sums in float32."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self.vector = body.vector

    def product(self, name: str, x: F64) -> F64:
        """x times a projection, transposed."""
        return in_half(self._body.product(name, in_half(x).astype(np.float32)).astype(np.float64))

    def expert(self, name: str, expert: int, x: F64) -> F64:
        """x times one expert's weight, transposed."""
        return in_half(self._body.expert(name, expert, in_half(x).astype(np.float32)).astype(np.float64))


def flat(tensor: Seeded) -> F64:
    """All of a small tensor, exact, as one row."""
    return np.concatenate([chunk.reshape(-1) for chunk in tensor.chunks()]).astype(np.float64)


def _quarters(codes: Any) -> Any:
    return _QUARTERS[codes].view(np.float16).reshape(codes.shape[0], -1)


def _quarters_of_bytes() -> Any:
    bytes_ = np.arange(256)
    pairs = np.stack((bytes_ & 15, bytes_ >> 4), axis=-1).astype(np.float16)
    return ((pairs - 8) * np.float16(_QUARTER)).view(np.uint32).reshape(-1)


_QUARTERS = _quarters_of_bytes()
"""Of each byte of two codes, less 8 and in quarters, both halves."""


def _eights(rows: int, blocks: int) -> Seeded:
    """Zero points of 8 for codes that were made without any."""
    made = filled((rows, -(-blocks // 2)), 0x88, np.uint8)
    if blocks % 2 == 0:
        return made
    last = np.full(made.row, 0x88, np.uint8)
    last[-1] = 0x08
    return Seeded(made.dtype, made.shape, made.row, lambda ids: np.tile(last, (ids.size, 1)))
