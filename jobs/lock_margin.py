"""Margin bands of locks: how far the oracle's best id stands above its second, at one index of base's own ids.

A lock's id says what was chosen; its margin says how clear the choice is, by the float32 reference and not by whoever
is judged. A margin below the band is a coin that may fall the other way with the next reordered sum, one above it
another context or another model than the lock was written for: the band has two sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jobs.inquiry import Inquiry, target_of
from jobs.judge_arm import ArmEvidence
from jobs.model import CellPlan, Lock
from jobs.near_tie import Adjudication, FollowUp, not_what_ran


@dataclass(frozen=True, slots=True)
class MarginFault:
    """A lock whose band is broken, or (`is_open`) whose margin is not known."""

    lock: Lock
    message: str
    is_open: bool


def faults(plan: CellPlan, base: ArmEvidence, inquiry: Inquiry) -> Iterator[MarginFault]:
    """Each lock of a cell with a band that the oracle's margin is not in. What is not answered yet is asked."""
    for lock in plan.locks:
        if lock.margin is None or lock.prompt != plan.prompt:
            continue
        question = _question(plan, base, lock)
        if question is None:
            yield MarginFault(lock, f"{base.name} gave no id at index {lock.index}, so the lock has no margin", True)
            continue
        answer, why = inquiry.answer(question)
        if answer is None or answer.failure:
            why = why or f"the oracle could not be asked ({answer.failure if answer else ''})"
            yield MarginFault(lock, f"the margin of the lock at index {lock.index} is not known: {why}", True)
        elif fault := _fault(lock, base.name, answer):
            yield MarginFault(lock, *fault)


def _question(plan: CellPlan, base: ArmEvidence, lock: Lock) -> FollowUp | None:
    """Base's first ids up to the lock's index, to be fed to base and the oracle; None where it gave fewer."""
    record = base.records()[0]
    given = min(record.generations, key=lambda generation: generation.index, default=None)
    if given is None or len(given.ids) <= lock.index:
        return None
    ids, target = given.ids[: lock.index + 1], target_of(record)
    return FollowUp(
        kind="lock",
        cell=plan.cell,
        base=base.name,
        head=base.name,
        card=str(record.device.get("uuid") or ""),
        prompt_ids=plan.prompt_ids,
        base_ids=ids,
        head_ids=ids,
        first=lock.index,
        base_target=target,
        head_target=target,
    )


def _fault(lock: Lock, base: str, answer: Adjudication) -> tuple[str, bool] | None:
    """What the answer has against a lock, and whether that leaves it open."""
    if contradiction := not_what_ran(answer):
        return f"the margin of the lock at index {lock.index} is not known: {contradiction}", True
    [at] = answer.positions
    assert lock.margin is not None
    low, high = lock.margin
    accepted = sorted({lock.expected, *lock.allowed})
    if at.oracle_id not in accepted:
        wanted = " or ".join(map(str, accepted))
        return f"the oracle, fed {base}'s ids, chooses id {at.oracle_id} at index {at.index}, locked is {wanted}", False
    if at.oracle_margin is None:
        return f"the margin of the lock at index {lock.index} is not known: the answer holds none", True
    if not low <= at.oracle_margin <= high:
        side = "below" if at.oracle_margin < low else "above"
        margin = f"{at.oracle_margin:.4g} between the oracle's best id and its second"
        return f"{margin} at index {at.index}, {side} the lock's band of {low:g} to {high:g}", False
    return None
