"""A head that makes the answer clear: what a decoder with random layers answers after a prompt, chosen beforehand.

Random weights give flat logits, whose near ties flip with the last bit. So the rows of 128 chosen ids, the path, hold
on top of what they are just enough of what the layers make of the position before for that id to win there. What is
added lies across the token's own embedding: it is the layers' doing, and a damaged layer loses it. Where head and
embedding are one table, changing a row changes what the layers see next, so votes are counted anew until they hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.zoo.quant import F64, PackedLinear, dequantise, quantise_int4
from engine.zoo.seeded import CHUNK_BYTES, Ids

SMALLEST_GAP = 0.5
_ENOUGH, _WANTED_GAP = 0.8, 2.0
_COUNTS = 200
_TIED_RATE = 0.3
"""Share of a vote that is cast at once where it moves what the layers see: whole votes chase each other for ever."""
_RIVALS = 8
_CYCLE_LOGIT = 12.0


class Peakable(Protocol):
    """A decoder whose head is still to be made."""

    @property
    def vocabulary(self) -> int:
        """Rows of the head."""
        ...

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one table."""
        ...

    @property
    def blocks(self) -> list[str]:
        """Names of the blocks that may be left out."""
        ...

    def embedded(self, ids: Ids) -> F64:
        """[n, hidden]: embeddings before any vote."""
        ...

    def base(self, ids: Ids) -> F64:
        """[n, hidden]: head rows before any vote, to be multiplied by the head's scale."""
        ...

    def hidden(self, embedded: F64, *, without: str | None = None) -> F64:
        """What the head reads at each position."""
        ...

    def final_norm(self) -> F64:
        """Weight of the last norm."""
        ...


@dataclass(frozen=True, slots=True)
class Peak:
    """The head: a scale for rows as they are, and rows of their own for the ids of the path; with what was measured."""

    scale: float
    path: Ids
    rows: PackedLinear
    gaps: F64
    changed_without: Mapping[str, int]
    """Positions, of all, where another id wins when a block is left out; of all ids only the strongest were asked."""

    @property
    def is_fit(self) -> bool:
        """Whether every answer is clear, and every layer is needed for at least one."""
        needed: dict[str, int] = {}
        for block, changed in self.changed_without.items():
            layer = block.rsplit(".", 1)[0]
            needed[layer] = max(changed, needed.get(layer, 0))
        return bool(self.gaps.min() > SMALLEST_GAP) and all(needed.values())

    def facts(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What zoo.json says of it."""
        return {
            "prompt_ids": list(prompt),
            "greedy_ids": self.path.tolist(),
            "smallest_top2_gap": round(float(self.gaps.min()), 4),
            "smallest_top2_gap_at": int(self.gaps.argmin()),
            "ids_changed_without_at_least": dict(self.changed_without),
        }


def cycle_scale(agreement: float) -> float:
    """The scale, as float16 holds it, that gives the next id of the cycle a clear logit where h . e is `agreement`."""
    return float(np.float16(_CYCLE_LOGIT / agreement))


def peak(model: Peakable, prompt: Sequence[int], path: Ids) -> Peak:
    """Votes for `path` after `prompt`, counted until they hold or can be counted no more.

    A count holds votes against the strongest rivals that were ever seen; all ids are looked through at the start and
    whenever the rivals are beaten.
    """
    ids = np.array([*prompt, *path[:-1]])
    first = len(prompt) - 1
    embedded = model.embedded(ids)
    hidden = model.hidden(embedded)[first:]
    scale = 1.0 if model.tied else cycle_scale(float(np.median((hidden * embedded[first:]).sum(axis=1))))
    rows = scale * model.base(path)
    packed = quantise_int4(rows, asymmetric=False)
    rivals = _strongest(model, hidden, path)
    against = scale * model.base(rivals)
    for _ in range(_COUNTS):
        others = (hidden @ against.T).max(axis=1)
        gaps = _gaps(hidden, dequantise(packed), others)  # as rounded to 4 bits, or votes lost in it were never cast
        if gaps.min() > _ENOUGH:
            found = np.setdiff1d(_strongest(model, hidden, path), rivals)
            if not found.size:
                break
            rivals = np.union1d(rivals, found)
            against = scale * model.base(rivals)
            continue
        votes = _votes(hidden, embedded[first:] * model.final_norm(), _WANTED_GAP - gaps)
        rows = rows + (_TIED_RATE if model.tied else 1.0) * votes
        packed = quantise_int4(rows, asymmetric=False)
        if model.tied:
            embedded[first + 1 :] = dequantise(packed)[:-1]
            hidden = model.hidden(embedded)[first:]
    head = dequantise(packed)
    against = scale * model.base(np.union1d(rivals, _strongest(model, hidden, path)))
    gaps = _gaps(hidden, head, (hidden @ against.T).max(axis=1))
    changed = {}
    for block in model.blocks:
        left = model.hidden(embedded, without=block)[first:]
        changed[block] = int((_gaps(left, head, (left @ against.T).max(axis=1)) < 0).sum())
    return Peak(scale, path, packed, gaps, changed)


def _strongest(model: Peakable, hidden: F64, path: Ids) -> Ids:
    """Ids off the path that come among the first few at any position."""
    best = np.full((len(hidden), _RIVALS), -np.inf)
    names = np.zeros((len(hidden), _RIVALS), np.int64)
    each = max(1, CHUNK_BYTES // hidden.shape[1])
    for start in range(0, model.vocabulary, each):
        ids = np.arange(start, min(start + each, model.vocabulary))
        logits = hidden @ model.base(ids).T
        logits[:, path[(path >= start) & (path < start + ids.size)] - start] = -np.inf
        both, named = np.hstack((best, logits)), np.hstack((names, np.broadcast_to(ids, logits.shape)))
        top = np.argpartition(-both, _RIVALS - 1, axis=1)[:, :_RIVALS]
        best, names = np.take_along_axis(both, top, axis=1), np.take_along_axis(named, top, axis=1)
    return np.unique(names)


def _votes(hidden: F64, tokens: F64, missing: F64) -> F64:
    """What rows lack, in the layers' own: own . hidden is 1, so a vote lifts its logit by its own size."""
    own = hidden - ((hidden * tokens).sum(axis=1) / (tokens * tokens).sum(axis=1))[:, None] * tokens
    votes: F64 = own * (np.maximum(missing, 0) / (own * hidden).sum(axis=1))[:, None]
    return votes


def _gaps(hidden: F64, rows: F64, others: F64) -> F64:
    """[positions]: how far the wanted id, the k-th at position k, stands above the best of all the rest."""
    logits = hidden @ rows.T
    wanted = logits.diagonal().copy()
    np.fill_diagonal(logits, -np.inf)
    gaps: F64 = wanted - np.maximum(logits.max(axis=1), others)
    return gaps
