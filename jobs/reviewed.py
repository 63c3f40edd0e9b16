"""What people decided in reviewed files of the repository under test: declared changes, waivers, and goldens with their
provenance.

Waivers and goldens are read at base's commit, so that a change cannot excuse itself. What only the tree under test
holds is proposed: it is shown, and not in force.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Sequence
from datetime import date
from typing import Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from jobs.document import Document

TOKENS = "tokens"
"""What a waiver calls the metric of findings of ids."""

ANY = "*"

MOST_DAYS = 366
"""The longest that a waiver may hold from the day it was written: what needs longer needs looking at again."""


class Expectation(Document):
    """A declared, reviewed change of an exact metric: shown as declared, accepted by the gate.

    `at_most`: the most that it may move by, in its own unit. `self_declared`: read from the tree that the sweep was
    started in, which is the one under test, and not from base's; `added`: that tree has it and base's commit has not,
    so that it is the change's own claim.
    """

    metric: str
    cell: str = "*"
    change: Literal["lower", "higher", "any"] = "any"
    reason: str
    at_most: int | None = None
    self_declared: bool = False
    added: bool = False

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before there were origins and bounds where there is none: stored manifests keep their digests."""
        fields: dict[str, Any] = serialize(self)
        for name in ("at_most", "self_declared", "added"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields


class Waiver(Document):
    """A finding that is known and accepted for a time: its cells, metric and class, and the evidence for that.

    `cell` and `metric` are shell patterns; `outcome` is the finding's own class. `written` and `expires` are days; both
    count.
    """

    cell: str
    metric: str
    outcome: str
    reason: str
    evidence: str
    written: date
    expires: date
    by: str

    @property
    def id(self) -> str:
        """A short name by which a finding tells its waiver: the beginning of its digest."""
        return self.digest()[:12]

    @property
    def words(self) -> str:
        """Its scope in words."""
        metric = "any metric" if self.metric == ANY else self.metric
        return f"{self.outcome} of {metric} in cell {self.cell}"

    def covers(self, cell: str, outcome: str, metric: str) -> bool:
        """Whether a finding is what it is about; one without a metric needs a waiver of any."""
        return (
            outcome == self.outcome
            and fnmatch.fnmatchcase(cell, self.cell)
            and (self.metric == ANY or fnmatch.fnmatchcase(metric, self.metric))
        )

    def standing(self, day: date | None) -> str:
        """Why it is not in force on a day; empty when it is. On a day that nobody knows nothing is."""
        if day is None:
            return "it is not known on which day the sweep was submitted"
        if day < self.written:
            return f"it is dated {self.written}, after the sweep was submitted on {day}"
        return f"it expired on {self.expires}, and the sweep was submitted on {day}" if day > self.expires else ""


class GoldenStream(Document):
    """What one sequence of a batch must give: its ids, how it stops, and the top-2 logit gap seen at each id."""

    ids: tuple[int, ...]
    stop: Literal["length", "eos"]
    gaps: tuple[float, ...] = ()


class Golden(Document):
    """Ids that were blessed for one cell, with where they come from.

    They hold for one model, prompts, length and card model (`card`; of other cards only where the sweep's scope of
    identity leaves cards out). `supersedes` names the golden of the cell that this one replaced.
    """

    id: str
    cell: str
    model_digest: str
    prompt_digest: str
    tokens: int
    ignore_eos: bool
    card: str
    streams: tuple[GoldenStream, ...]
    reason: str
    by: str
    at: str  # UTC, ISO 8601
    sweep: str
    arm: str
    runs: tuple[str, ...]
    engine_digest: str
    supersedes: str = ""


class Reviewed(Document):
    """The waivers and goldens of a sweep: those in base's commit, and those that only the tree under test holds.

    `at`: the commit they were read at; empty where base has none, so that nothing reviewed could be read.
    """

    at: str = ""
    waivers: tuple[Waiver, ...] = ()
    goldens: tuple[Golden, ...] = ()
    proposed_waivers: tuple[Waiver, ...] = ()
    proposed_goldens: tuple[Golden, ...] = ()

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Only what is there."""
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value}

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to apply and nothing to say."""
        return not (self.waivers or self.goldens or self.proposed_waivers or self.proposed_goldens)

    def in_force(self, day: date | None) -> tuple[Waiver, ...]:
        """The waivers that count for a sweep submitted on `day`."""
        return tuple(waiver for waiver in self.waivers if not waiver.standing(day))


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """sha256 of the ids of a cell's prompts, in the order in which its sequences take them."""
    return hashlib.sha256(json.dumps([list(prompt) for prompt in prompts]).encode()).hexdigest()
