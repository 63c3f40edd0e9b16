"""The reference: a decoder's logits in float32, teacher-forced, by none of the code that decodes.

It walks the graph as it was loaded, over the whole sequence at once: attention by masks instead of a cache, linear
attention without a state, every product of all rows in one matmul. Of the engine it uses the loaded graph, and the list
of what onnxruntime's operators take: no plan, no kernel, no pager, so that an error in those cannot hide in it. Half
types are widened where they are read, and nothing is rounded to them; weights are widened slab by slab from the
mapping.

What a graph makes depend on the call follows the calls of a decode: the prompt in one, each later token alone. A head
that sees the last row of each call alone is applied to every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.errors import NonFiniteLogits
from engine.graph import Graph
from engine.oracle.walk import Walk


@dataclass(frozen=True, slots=True)
class Reading:
    """What follows one position: `top` holds the largest logits as (id, logit), ties to the lower id.

    `margin` is the distance between the two largest, None for a vocabulary of one.
    """

    position: int
    fed: int
    top: tuple[tuple[int, float], ...]
    margin: float | None

    @property
    def argmax(self) -> int:
        """The id that greedy decoding takes."""
        return self.top[0][0]


def logits(graph: Graph, prompt: Sequence[int], forced: Sequence[int] = ()) -> NDArray[np.float32]:
    """Logits after every position of prompt and forced ids, float32 [positions, vocabulary].

    Raises UnsupportedModel with every operator that is not computed, or the first attribute, and NonFiniteLogits.
    """
    with np.errstate(over="ignore"):
        made = Walk(graph, (*prompt, *forced), len(prompt)).logits()
    bad = np.flatnonzero(~np.isfinite(made).all(axis=1))
    if bad.size:
        raise NonFiniteLogits(f"logits at position {bad[0]} are not finite", "the model's numbers cannot be used")
    return made


def read(rows: NDArray[np.float32], ids: Sequence[int], top: int) -> Iterator[Reading]:
    """The best of each row, `top` of them; `ids` are what was fed."""
    for position, (fed, row) in enumerate(zip(ids, rows, strict=True)):
        order = np.argsort(-row, kind="stable")[: max(top, 2)]
        margin = float(row[order[0]] - row[order[1]]) if row.size > 1 else None
        best = tuple((int(n), float(row[n])) for n in order[:top])
        yield Reading(position, int(fed), best, margin)
