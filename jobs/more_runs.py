"""Runs beyond those that were planned at submission, which the judge asks for before it answers.

They are stored as runs of their cell like all others, so that every figure leads back to one: base again behind the
planned runs of a block that base has had, and whole blocks behind the planned ones. Which they are follows from the
plan alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from jobs.document import Document
from jobs.model import CellPlan, RunFact
from jobs.order import runs_of_arm

BASE_AGAIN = 4
"""How often base runs again, and how often it must have run for nobody to ask: fewer runs may all agree by chance."""


class BaseAgain(Document):
    """Base alone, further times, on the card of a block that it has had: does it repeat itself?"""

    kind: Literal["base"] = "base"
    cell: str
    arm: str
    card: str  # by UUID
    block: int
    runs: int = BASE_AGAIN


class FreshBlocks(Document):
    """Whole blocks of all arms, to decide on figures that no screen has seen."""

    kind: Literal["blocks"] = "blocks"
    cell: str
    first: int
    count: int


MoreRuns = Annotated[BaseAgain | FreshBlocks, Field(discriminator="kind")]


class RunPlace(NamedTuple):
    """Where a run stands in its cell."""

    block: int
    position: int


def is_again(plan: CellPlan, run: RunFact | RunPlace) -> bool:
    """Whether a run is one of base again: behind the balanced order of its block, so that its times are of no pair."""
    return run.position >= planned_runs(plan)


def is_fresh(plan: CellPlan, run: RunFact | RunPlace) -> bool:
    """Whether a run is of a block that was asked for."""
    return run.block >= plan.blocks


def given(plan: CellPlan, runs: Iterable[RunFact | RunPlace]) -> Iterator[str]:
    """Kinds of further runs that a cell was given already, each once."""
    runs = tuple(runs)
    if any(is_again(plan, run) for run in runs):
        yield "base"
    if any(is_fresh(plan, run) for run in runs):
        yield "blocks"


def planned_runs(plan: CellPlan) -> int:
    """Runs of one block in its balanced order."""
    return len(plan.arms) * runs_of_arm(plan.order, plan.repeats)


def expected(plan: CellPlan, further: Collection[str], *, is_base: bool) -> int:
    """Runs that there must be of one arm, those of the `further` kinds that the cell was given among them."""
    blocks = plan.blocks + (plan.fresh_blocks if "blocks" in further else 0)
    again = BASE_AGAIN if is_base and "base" in further else 0
    return blocks * runs_of_arm(plan.order, plan.repeats) + again
