"""Steps whose experts are keys of their own: which tokens go in one launch, and a launch at the experts' addresses.

The host has to know the choice before the weights are there, so such a step waits for the one that routes. A token is
computed alone, whatever others go in with it, so that a cut between tokens changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from engine.device.base import Launch, Placed
from engine.errors import BadRequest, DeviceFailure
from engine.graph import stored_bytes
from engine.kernels.moe import expert_operand
from engine.plan import Experts, Operand, Ref, Step
from engine.routing import Bank, Choices, check, routed


@dataclass(frozen=True, slots=True)
class Wave:
    """Rows [first, end) of these sequences, and the experts that any of them chose, ascending."""

    sequences: tuple[int, ...]
    first: int
    end: int
    experts: tuple[int, ...]


def waves(chosen: Mapping[int, Choices], can_hold: Callable[[Sequence[int]], bool]) -> Iterator[Wave]:
    """All tokens in one launch where their experts can stand at once; else as many neighbours as that holds for.

    `chosen` has each sequence's choices, [rows, chosen]; one token's experts always fit.
    """
    rows = len(next(iter(chosen.values())))
    everything = _distinct(np.concatenate(list(chosen.values())))
    if can_hold(everything):
        yield Wave(tuple(chosen), 0, rows, everything)
        return
    for sequence, own in chosen.items():
        first, held = 0, _distinct(own[:1])
        for row in range(1, rows):
            more = _distinct(own[first : row + 1])
            if not can_hold(more):
                yield Wave((sequence,), first, row, held)
                first, more = row, _distinct(own[row : row + 1])
            held = more
        yield Wave((sequence,), first, rows, held)


def check_choices(chosen: Mapping[int, Choices], bank: Bank) -> None:
    """Raises DeviceFailure for what is no choice of the bank's experts."""
    try:
        check(np.concatenate(list(chosen.values())), (bank,), "the pass")
    except BadRequest as error:
        raise DeviceFailure(error.message, "its routing cannot be used") from error


def launch_of(step: Step, placed: Sequence[Placed], wave: Wave, addresses: Sequence[int]) -> Launch:
    """The step for a wave; `placed` are its operands for all rows, `addresses` where the wave's experts stand."""
    choice, experts = routed(step), step.experts
    assert experts is not None and choice is not None
    there = dict(zip(wave.experts, addresses, strict=True))
    rows = choice.ref.shape[0]
    if (wave.first, wave.end) != (0, rows):
        placed = [_cut(p, wave, rows) for p in placed]
        step = replace(step, operands=tuple(p.operand for p in placed))
    return Launch(step, (*placed, *places(experts, there)), wave.sequences, once=True)


def places(experts: Experts, there: Mapping[int, int]) -> Iterator[Placed]:
    """Every part of some experts, by expert and its address."""
    for expert, address in there.items():
        for operand, nbytes in _parts(experts, expert):
            yield Placed(operand, address + operand.ref.offset_bytes, nbytes)


def addresses_of(experts: Experts, placed: Iterable[Placed]) -> list[int]:
    """Where each expert of a bank starts, from what `places` made of some of them; 0 for the others."""
    starts = [0] * experts.count
    for p in placed:
        starts[p.operand.ref.index - experts.first_key] = p.address - p.operand.ref.offset_bytes
    return starts


@lru_cache(maxsize=1 << 14)
def _parts(experts: Experts, expert: int) -> tuple[tuple[Operand, int], ...]:
    """An expert's operands and their bytes: the same ones for each token that chooses it."""
    made = []
    for part in experts.parts:
        ref = Ref("key", experts.first_key + expert, part.dtype, part.shape, offset_bytes=part.offset_bytes)
        made.append((Operand(expert_operand(part.name, expert), ref), stored_bytes(part.dtype, math.prod(part.shape))))
    return tuple(made)


def _distinct(choices: Choices) -> tuple[int, ...]:
    return tuple(np.unique(choices).tolist())


def _cut(placed: Placed, wave: Wave, rows: int) -> Placed:
    """A wave's share of an operand of so many tokens, one after another; a norm's factors are all tokens'."""
    ref = placed.operand.ref
    if placed.operand.name == "gamma":
        return placed
    tokens = next(n for n in range(1, len(ref.shape) + 1) if math.prod(ref.shape[:n]) == rows)
    each, count = placed.nbytes // rows, wave.end - wave.first
    operand = replace(placed.operand, ref=replace(ref, shape=(count, *ref.shape[tokens:])))
    return replace(placed, operand=operand, address=placed.address + wave.first * each, nbytes=count * each)
