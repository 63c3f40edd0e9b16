"""A batch: sequences side by side, each with its own stretch of memory at a fixed stride, sharing weights and steps.

Nothing is padded: a sequence has its own length, and its arithmetic is that of the sequence alone.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.device.base import Fetch
from engine.paging.policy import aligned
from engine.plan import Plan
from engine.routing import routed_bytes

Prompts = Sequence[Sequence[int]]

CHOICE = struct.Struct("<f4xq")
"""What a pass leaves in a control block at `GAP_OFFSET`: gap and, past `ahead`, the chosen id; one copy brings both."""
GAP_OFFSET, AHEAD_OFFSET, IDS_OFFSET = 8, 12, 16
CONTROL_OFFSETS: Mapping[str, int] = {"length": 0, "gap": GAP_OFFSET, "ahead": AHEAD_OFFSET, "ids": IDS_OFFSET}
"""A control block: length (eight bytes), gap and ahead (four each), ids (eight each), chosen experts (four each)."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward pass that was asked for: what it chose is on its way. `lengths` are its sequences' after it."""

    plan: Plan
    lengths: Mapping[int, int]
    choice: Fetch


@dataclass(frozen=True, slots=True)
class Emitted:
    """One token: its id and the gap between the two best logits."""

    token: int
    gap: float


@dataclass(frozen=True, slots=True)
class Spread:
    """Bytes that every sequence of a batch has of one thing, and from where to where they lie."""

    nbytes: int
    sequences: int

    @property
    def stride(self) -> int:
        """Bytes from one sequence's part to the next one's."""
        return aligned(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all parts, those between them included: of one sequence, its own alone."""
        return self.stride * (self.sequences - 1) + self.nbytes


@dataclass(frozen=True, slots=True)
class Part:
    """A forward pass of a prompt: `ids` by sequence, as many for each; `ahead` says how many each has still to come."""

    sequences: tuple[int, ...]
    ids: tuple[tuple[int, ...], ...]
    ahead: tuple[int, ...]


def control(plans: Mapping[int, Plan], sequences: int) -> Spread:
    """Control blocks, for prompt chunks of as many tokens as the largest plan takes."""
    return Spread(routed_offset(plans) + max(map(routed_bytes, plans.values())), sequences)


def routed_offset(plans: Mapping[int, Plan]) -> int:
    """Where chosen experts start in a control block."""
    return IDS_OFFSET + 8 * max(plans)


def workspace(plans: Mapping[int, Plan], sequences: int) -> Spread:
    """Activations: of a sequence, what the largest plan needs."""
    return Spread(max(p.workspace_bytes for p in plans.values()), sequences)


def states(plans: Mapping[int, Plan], sequences: int) -> list[Spread]:
    """Recurrent and convolution states, in the plans' order."""
    return [Spread(s.nbytes, sequences) for s in plans[1].states]


def fixed_bytes(plans: Mapping[int, Plan], sequences: int) -> int:
    """Device memory of a decoder beside weights and KV cache: control, workspace, states, tables."""
    spreads = [control(plans, sequences), workspace(plans, sequences), *states(plans, sequences)]
    tables = {c.name: c.nbytes for p in plans.values() for c in p.constants}
    return sum(s.total_bytes for s in spreads) + sum(tables.values())


def parts(prompts: Prompts, chunk: int) -> Iterator[Part]:
    """Prompts in chunks of at most `chunk` tokens; sequences whose next chunk is as long go in together."""
    for start in range(0, max(map(len, prompts)), chunk):
        groups: dict[int, list[int]] = {}
        for sequence, prompt in enumerate(prompts):
            if rows := len(prompt[start : start + chunk]):
                groups.setdefault(rows, []).append(sequence)
        for rows, group in groups.items():
            ids = tuple(tuple(prompts[s][start : start + rows]) for s in group)
            yield Part(tuple(group), ids, tuple(len(prompts[s]) - start - rows for s in group))


def chunk_rows(prompts: Prompts, chunk: int) -> set[int]:
    """Sizes of all chunks that `parts` gives."""
    return {len(part.ids[0]) for part in parts(prompts, chunk)}
