"""Forward passes over the blocks of any decoder that the zoo makes: whole, piece by piece, and with blocks left out.

A block's weights may have to be made from their seed each time they are read, which takes longer than to compute with
them. So what differs only in which block is missing goes through together, and each weight is read once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import numpy as np

from engine.zoo.quant import F64


class Past:
    """Keys and values of one sequence so far, by block."""

    def __init__(self) -> None:
        self.length = 0
        """Positions that went through all blocks."""
        self._held: dict[str, tuple[F64, F64]] = {}

    def joined(self, block: str, key: F64, value: F64) -> tuple[F64, F64]:
        """Keys and values [positions, kv heads, size] with these behind them."""
        if block in self._held:
            held = self._held[block]
            key, value = np.concatenate((held[0], key)), np.concatenate((held[1], value))
        self._held[block] = key, value
        return key, value


class Blocks(Protocol):
    """A decoder between embedding and head."""

    @property
    def names(self) -> list[str]:
        """Its blocks in order."""
        ...

    def added(self, name: str, states: Sequence[F64], past: Past | None) -> list[F64]:
        """What a block adds to each of some states [tokens, hidden]; a past goes with a single one."""
        ...

    def closed(self, state: F64) -> F64:
        """What the head reads."""
        ...


def through(blocks: Blocks, state: F64, *, without: str | None = None, past: Past | None = None) -> F64:
    """Through all blocks but one: [tokens, hidden], each position seeing itself and those before it."""
    for name in blocks.names:
        if name != without:
            state = state + blocks.added(name, [state], past)[0]
    if past is not None:
        past.length += len(state)
    return blocks.closed(state)


def through_without_each(blocks: Blocks, state: F64, left_out: Collection[str]) -> Iterator[tuple[str | None, F64]]:
    """What the head reads with every block there (under None), and with each of some left out; in float16.

    States are rounded as a card does that holds them in float16, from block to block.
    """
    live: dict[str | None, F64] = {None: in_half(state)}
    for name in blocks.names:
        before = live[None]
        made = blocks.added(name, list(live.values()), None)
        live = {of: in_half(x + more) for (of, x), more in zip(live.items(), made, strict=True)}
        if name in left_out:
            live[name] = before
    for of in list(live):
        yield of, blocks.closed(live.pop(of))


def apart(stacked: F64, lengths: Sequence[int]) -> list[F64]:
    """Sequences that stand one after another, as a list."""
    return np.split(stacked, np.cumsum(lengths)[:-1])


def in_half(x: F64) -> F64:
    """Rounded to what float16 holds."""
    return x.astype(np.float16).astype(x.dtype)
