"""Steps whose experts are keys of their own: which tokens go in one launch, and a launch at the experts' addresses.

The host has to know the choice before the weights are there, so such a step waits for the one that routes. A token is
computed alone, whatever others go in with it, so that a cut between tokens changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.device.base import Launch, Placed
from engine.errors import BadRequest, DeviceFailure
from engine.graph import stored_bytes
from engine.kernels.moe import expert_operand
from engine.plan import Experts, Operand, Ref, Step
from engine.routing import Bank, Choices, check


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
    assert step.experts is not None
    there = dict(zip(wave.experts, addresses, strict=True))
    own = (_rows(p, wave.first, wave.end) for p in placed)
    return Launch(step, (*own, *places(step.experts, there)), wave.sequences, once=True)


def places(experts: Experts, there: Mapping[int, int]) -> Iterator[Placed]:
    """Every part of some experts, by expert and its address."""
    sizes = [stored_bytes(part.dtype, int(np.prod(part.shape, dtype=np.int64))) for part in experts.parts]
    for expert, address in there.items():
        for part, nbytes in zip(experts.parts, sizes, strict=True):
            ref = Ref("key", experts.first_key + expert, part.dtype, part.shape, offset_bytes=part.offset_bytes)
            yield Placed(Operand(expert_operand(part.name, expert), ref), address + part.offset_bytes, nbytes)


def _distinct(choices: Choices) -> tuple[int, ...]:
    return tuple(np.unique(choices).tolist())


def _rows(placed: Placed, first: int, end: int) -> Placed:
    """Some rows of an operand whose last axis is a row."""
    ref = placed.operand.ref
    rows = int(np.prod(ref.shape[:-1]))
    if (first, end) == (0, rows):
        return placed
    each = placed.nbytes // rows
    operand = replace(placed.operand, ref=replace(ref, shape=(end - first, ref.shape[-1])))
    return replace(placed, operand=operand, address=placed.address + first * each, nbytes=(end - first) * each)
