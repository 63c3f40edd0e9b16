"""A head that makes the answer clear: what a decoder with random layers answers after a prompt, chosen beforehand.

Random weights give flat logits, whose near ties flip with the last bit. So the rows of 128 chosen ids, the path, hold
on top of what they are just enough of what the layers make of the position before for that id to win there. What is
added lies across the token's own embedding: it is the layers' doing, and a damaged layer loses it. Since the path is
known, all its positions go through the layers at once. Only where head and embedding are one table, a row changes what
the layers see next, and positions go through one by one, each with the rows of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from engine.zoo.passes import in_half
from engine.zoo.quant import F64, PackedLinear, dequantise, quantise_int4
from engine.zoo.seeded import CHUNK_BYTES, Held, Ids

SMALLEST_GAP = 0.5
_ENOUGH, _MORE = 0.8, 1.2
"""Gaps that will do, and how much beyond is voted for, since rounding to 4 bits takes some of it."""
_ATTEMPTS, _CLEAR_OF_ERROR = 3, 1.25
_COUNTS = 200
_RIVALS = 8
_CYCLE_LOGIT = 12.0
_FEW_POSITIONS = 16
"""Positions at which each block is left out; all of them, if no id changes there."""


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
    def block_names(self) -> list[str]:
        """Names of the blocks that may be left out: layers.N. and a kind."""
        ...

    def embedded(self, ids: Ids) -> F64:
        """[n, hidden]: embeddings before any vote."""
        ...

    def base(self, ids: Ids) -> F64:
        """[n, hidden]: head rows before any vote, to be multiplied by the head's scale."""
        ...

    def hidden(self, embedded: F64) -> F64:
        """What the head reads at each position."""
        ...

    def hidden_in_turn(self) -> Callable[[F64], F64]:
        """The same of positions that are given piece by piece."""
        ...

    def hidden_without_each(self, embedded: F64, left_out: Collection[str]) -> Iterator[tuple[str | None, F64]]:
        """What the head reads in float16, with all blocks (None) and without each of some."""
        ...

    def table(self) -> Held:
        """A tied table before any vote."""
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
    changes: F64
    """[positions]: how much each gap changes where activations are float16."""
    changed_without: Mapping[str, int]
    """Positions, of all or of the first few, where another id wins in float16 when a block is left out; of all ids
    only the strongest were asked."""

    @property
    def is_fit(self) -> bool:
        """Whether every answer is clearer than float16 can blur it, and every layer is needed for at least one."""
        clear = np.maximum(SMALLEST_GAP, self.changes)
        return bool((self.gaps > clear).all()) and not _idle(self.changed_without)

    def facts(self, prompt: Sequence[int]) -> dict[str, Any]:
        """What zoo.json says of it."""
        return {
            "prompt_ids": list(prompt),
            "greedy_ids": self.path.tolist(),
            "smallest_top2_gap": round(float(self.gaps.min()), 4),
            "smallest_top2_gap_at": int(self.gaps.argmin()),
            "largest_gap_change_in_float16": round(float(self.changes.max()), 4),
            "smallest_gap_beyond_float16": round(float((self.gaps - self.changes).min()), 4),
            "ids_changed_without_at_least": dict(self.changed_without),
        }


def cycle_scale(agreement: float) -> float:
    """The scale, as float16 holds it, that gives the next id of the cycle a clear logit where h . e is `agreement`."""
    return float(np.float16(_CYCLE_LOGIT / agreement))


def peak(model: Peakable, prompt: Sequence[int], path: Ids) -> Peak:
    """Votes for `path` after `prompt`, counted until they hold or can be counted no more.

    Where float16 changes a gap by more than all of it, votes are counted again for more than that there.
    """
    embedded = model.embedded(np.array([*prompt, *path[:-1]]))
    first = len(prompt) - 1
    scale, enough = 1.0, np.full(len(path), _ENOUGH)
    if not model.tied:  # then votes change nothing of what the layers see
        hidden, half = model.hidden(embedded)[first:], _in_float16(model, embedded)[first:]
        scale = cycle_scale(float(np.median((hidden * embedded[first:]).sum(axis=1))))
    for _ in range(_ATTEMPTS):
        if model.tied:
            hidden, packed = _in_turn(model, embedded, first, path, enough)
            half = _in_float16(model, embedded)[first:]
        else:
            packed = _at_once(model, scale, hidden, embedded[first:], path, enough)
        head = dequantise(packed)
        against = scale * model.base(_strongest(model, hidden, path))
        gaps, blurred = (_gaps(x, head, (x @ against.T).max(axis=1)) for x in (hidden, half))
        changes = np.abs(blurred - gaps)
        if (gaps > changes).all():
            break
        enough = np.maximum(enough, _CLEAR_OF_ERROR * changes)
    changed = dict.fromkeys(model.block_names, 0)
    for count in (min(_FEW_POSITIONS, len(path)), len(path)):
        idle = _idle(changed)
        left_out = [name for name in changed if _layer(name) in idle]
        for name, left in model.hidden_without_each(embedded[: first + count], left_out) if left_out else ():
            if name is not None:
                left = in_half(left[first:])
                changed[name] = int((_gaps(left, head, (left @ against.T).max(axis=1)) < 0).sum())
    return Peak(scale, path, packed, gaps, changes, changed)


def _in_float16(model: Peakable, embedded: F64) -> F64:
    return in_half(next(hidden for _, hidden in model.hidden_without_each(embedded, ())))


def _at_once(model: Peakable, scale: float, hidden: F64, tokens: F64, path: Ids, enough: F64) -> PackedLinear:
    """Rows of the path, given what the layers make of it.

    A count holds votes against the strongest rivals that were ever seen; all ids are looked through at the start and
    whenever the rivals are beaten.
    """
    rows = scale * model.base(path)
    packed = quantise_int4(rows, asymmetric=False)
    rivals = _strongest(model, hidden, path)
    against = scale * model.base(rivals)
    for _ in range(_COUNTS):
        others = (hidden @ against.T).max(axis=1)
        gaps = _gaps(hidden, dequantise(packed), others)  # as rounded to 4 bits, or votes lost in it were never cast
        if (gaps > enough).all():
            found = np.setdiff1d(_strongest(model, hidden, path), rivals)
            if not found.size:
                break
            rivals = np.union1d(rivals, found)
            against = scale * model.base(rivals)
            continue
        rows = rows + _votes(hidden, tokens * model.final_norm(), enough + _MORE - gaps)
        packed = quantise_int4(rows, asymmetric=False)
    return packed


def _in_turn(model: Peakable, embedded: F64, first: int, path: Ids, enough: F64) -> tuple[F64, PackedLinear]:
    """States along the path, and its rows, of a tied table; `embedded` gets the rows as they come to be."""
    feed, table = model.hidden_in_turn(), model.table()
    hidden = np.empty((len(path), embedded.shape[1]))
    base, rows = model.base(path), np.empty((len(path), embedded.shape[1]))
    most = np.empty(len(path))  # what a later id may reach at each position
    packed = []
    state = feed(embedded[: first + 1])[-1]
    for k, token in enumerate(path):
        hidden[k] = state
        logits = table.product(state[None])[0]
        logits[path[:k]] = rows[:k] @ state
        logits[token] = -np.inf
        tokens = (embedded[first + k] * model.final_norm())[None]
        packed.append(_voted(base[k], state, tokens, float(logits.max() + enough[k]), hidden[:k], most[:k]))
        rows[k] = dequantise(packed[k])[0]
        most[k] = rows[k] @ state - enough[k]
        if k + 1 < len(path):
            embedded[first + k + 1] = rows[k]
            state = feed(rows[k : k + 1])[-1]
    codes, scales = (np.concatenate([getattr(row, part) for row in packed]) for part in ("codes", "scales"))
    return hidden, PackedLinear(4, codes, scales)


def _voted(base: F64, state: F64, across: F64, least: float, before: F64, most: F64) -> PackedLinear:
    """A row whose logit is above `least` at `state`, and not above `most` at the states before."""
    wanted = least + _MORE
    packed = quantise_int4(base[None], asymmetric=False)
    for _ in range(_COUNTS):
        basis, _ = np.linalg.qr(across.T)
        own = state - basis @ (basis.T @ state)
        row = base + own * (max(wanted - float(base @ state), 0.0) / float(own @ state))
        packed = quantise_int4(row[None], asymmetric=False)
        held = dequantise(packed)[0]
        over = before @ held > most
        short = least - held @ state
        if over.any():
            across = np.concatenate((across, before[over]))
            before, most = before[~over], most[~over]
        elif short <= 0:
            break
        wanted += max(float(short), 0.0)
    return packed


def _idle(changed: Mapping[str, int]) -> list[str]:
    """Layers without which nothing changed."""
    layers = dict.fromkeys(_layer(name) for name in changed)
    return [layer for layer in layers if not any(n for name, n in changed.items() if _layer(name) == layer)]


def _layer(block: str) -> str:
    return block.rsplit(".", 1)[0]


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
