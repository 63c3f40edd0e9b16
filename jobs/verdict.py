"""The verdict document: the one object behind every comment, page, table and exit code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from jobs.document import Document
from jobs.model import ArmPlan, Equation, KeyBytes, Reading, SeamRow, Stamp
from jobs.noise import Calibration
from jobs.reviewed import TOKENS

IdentityClass = Literal[
    "IDENTICAL",
    "SHORT",
    "LONG",
    "NEAR_TIE",
    "VIOLATION",
    "UNADJUDICATED",
    "NONDETERMINISTIC",
    "VACUOUS",
    "NOT_COMPARABLE",
    "MISSING",
]
MetricClass = Literal[
    "same", "improved", "regressed", "neutral", "declared", "new", "vanished", "not_recorded", "varies"
]
TimeClass = Literal[
    "BETTER", "WORSE", "SAME", "UNDECIDED", "DIFFERENT_WORK", "THROTTLED_OUT", "NO_VALID_SAMPLE", "NOT_MEASURED"
]
Outcome = Literal[
    "PASS",
    "IMPROVED",
    "DECLARED",
    "WAIVED",
    "NEAR_TIE",
    "VIOLATION",
    "SHORT",
    "LONG",
    "UNADJUDICATED",
    "NONDETERMINISTIC",
    "REGRESSED",
    "NOT_AS_DECLARED",
    "BUILD_FAILED",
    "CANNOT_LOAD",
    "BROKEN_INVARIANT",
    "VACUOUS",
    "NOT_COMPARABLE",
    "CONTAMINATED",
    "MISSING",
    "TIME_WORSE",
    "INFRASTRUCTURE",
    "RETRACTED",
]


class Finding(Document):
    """One thing to know, with what it does to the exit code (0 when it only advises).

    `log` is the end of what a program printed, where that is what tells; `share` ranks findings of one outcome. One
    that is waived has the outcome WAIVED, with its own in `was` and its waiver's id.
    """

    outcome: Outcome
    cell: str
    arm: str = ""
    message: str
    remedy: str = ""
    exit_code: int
    gate: Literal["identity", "exact", "time", "infrastructure"]
    run_ids: tuple[str, ...] = ()
    log: str = ""
    share: float | None = None  # of a figure that moved: (head - base) / base; absent without a figure or a base of 0
    metric: str = ""  # which figure moved; empty where it is none
    was: Outcome | None = None
    waiver: str = ""

    @property
    def subject(self) -> str:
        """What a waiver calls the metric that it is about: of ids, their own word; empty where it is none."""
        return self.metric or (TOKENS if self.gate == "identity" else "")

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before shares, metrics and waivers were told where there is none."""
        fields: dict[str, Any] = serialize(self)
        if self.share is None:
            fields.pop("share", None)
        for name in ("metric", "was", "waiver"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields


class IdentityRow(Document):
    """One comparison of token streams: two arms, or two generations or runs of one arm."""

    klass: IdentityClass = Field(alias="class")
    left: str  # "base" or "head gen 2 run 1"
    right: str
    what: Literal["pair", "self", "null", "golden"]
    compared: int  # ids compared
    common_prefix: int
    left_length: int
    right_length: int
    left_stop: str | None = None
    right_stop: str | None = None
    first_difference: int | None = None
    left_id: int | None = None
    right_id: int | None = None
    left_gap: float | None = None
    right_gap: float | None = None
    generation: int | None = None  # index within the run, from 0, at which it differs; texts count from 1
    sequence: int | None = None  # of a batch, counted alike; absent where each generation has but one
    left_context: tuple[int, ...] = ()  # ids around the difference
    right_context: tuple[int, ...] = ()
    run_ids: tuple[str, ...] = ()
    note: str = ""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    @property
    def place(self) -> str:
        """Where it differs, counted from 1: the generation, and of a batch the sequence; empty where nowhere."""
        if self.generation is None:
            return ""
        generation = f"generation {self.generation + 1}"
        return generation if self.sequence is None else f"{generation}, sequence {self.sequence + 1}"

    @model_serializer(mode="wrap")
    def _without_absent_sequence(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before there were batches where there is one sequence: stored verdicts keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if self.sequence is None:
            fields.pop("sequence", None)
        return fields


class WitnessRow(Document):
    """A witness as evaluated on one arm's runs."""

    expr: str
    arm: str
    holds: bool
    values: dict[str, Reading] = {}


class InvariantRow(Document):
    """An invariant or engine equation as evaluated on one arm's runs; `checked` counts evaluations."""

    name: str
    arm: str
    holds: bool
    checked: int
    worst: Equation | None = None
    note: str = ""


class MetricRow(Document):
    """An exact metric of two arms: integers compared as integers; ratios shown, never gating."""

    metric: str
    unit: str
    direction: Literal["lower", "higher", "neutral"]
    gating: bool
    base: Reading
    head: Reading
    delta: Reading
    klass: MetricClass = Field(alias="class")
    run_ids: tuple[str, ...] = ()
    note: str = ""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)


class TimeRow(Document):
    """A time metric of two arms: ratio head/base inside blocks, with its noise."""

    metric: str
    unit: str
    base_median: Reading
    head_median: Reading
    ratio: Reading
    low: Reading  # interval of the ratio
    high: Reading
    null_ratio: Reading
    blocks: int
    smallest_detectable: Reading
    klass: TimeClass = Field(alias="class")
    run_ids: tuple[str, ...] = ()
    note: str = ""
    calibrated: Calibration | None = None  # the noise that is known of it, from an earlier A/A sweep

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    @model_serializer(mode="wrap")
    def _without_absent_noise(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before noise was calibrated where none is known."""
        fields: dict[str, Any] = serialize(self)
        if self.calibrated is None:
            fields.pop("calibrated", None)
        return fields


class SetAside(Document):
    """An attempt that does not count, and why."""

    cell: str
    arm: str
    run_id: str
    attempt_id: str
    state: str
    reason: str


class ReviewedRow(Document):
    """An entry of a reviewed file and what came of it: in which cells it was used, or why it was not."""

    kind: Literal["expectation", "waiver", "golden"]
    state: Literal["used", "unused", "expired", "not in force", "retracted"]
    scope: str
    reason: str
    id: str = ""
    by: str = ""
    evidence: str = ""
    until: str = ""
    cells: tuple[str, ...] = ()
    why: str = ""


class Retraction(Document):
    """Something that a verdict rests on and that is not to be trusted any more; `cell` empty: all cells rest on it."""

    kind: Literal["sweep", "run", "golden"]
    id: str
    cell: str = ""
    reason: str
    at: str  # UTC, ISO 8601

    @property
    def words(self) -> str:
        """In words: what is retracted, and why."""
        return f"The {self.kind} {self.id} is retracted: {self.reason}"


class StruckOut(Document):
    """What a verdict said before something that it rests on was retracted."""

    outcome: Outcome
    exit_code: int
    headline: str
    why: tuple[Retraction, ...]


class LossRow(Document):
    """What an arm of a cell lost to its card: attempts set aside as contaminated, runs kept without their times."""

    arm: str
    attempts: int
    contaminated: int
    throttled: int

    @property
    def lost(self) -> int:
        """Attempts that gave no time, or nothing at all, because of the card."""
        return self.contaminated + self.throttled


class ArmView(Document):
    """One arm of a cell, as shown: its medians and facts."""

    arm: str
    role: str
    source: str
    commit: str | None = None
    engine_digest: str = ""
    config: dict[str, str | int | float | bool | None] = {}
    runs_expected: int
    runs_complete: int
    values: dict[str, Reading] = {}  # every counter and metric: the arm's one value, or Missing("varies ...")
    facts: dict[str, int | float | str] = {}
    seams: tuple[SeamRow, ...] = ()
    top_keys: tuple[KeyBytes, ...] = ()  # those of the most bytes over the link, largest first
    crossings: tuple[int, int] = (0, 0)  # of all keys over the link: how often, and bytes
    card: str = ""
    uuid: str = ""
    certificates: dict[str, int] = {}  # verdict -> count
    stop_reasons: dict[str, int] = {}
    sm_clock_mhz: tuple[float, float] | None = None  # medians of its runs, the least and the most

    @model_serializer(mode="wrap")
    def _without_absent_clock(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before clocks were told where none is known: stored verdicts keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if self.sm_clock_mhz is None:
            fields.pop("sm_clock_mhz", None)
        return fields

    @field_validator("top_keys", mode="before")
    @classmethod
    def _without_older_rows(cls, rows: Any) -> Any:
        """Verdicts of before whole rows were kept hold names with two figures each: those are left out."""
        return [row for row in rows if isinstance(row, dict | KeyBytes)]


Arm = TypeVar("Arm", ArmPlan, ArmView)


def tested_arms(arms: Sequence[Arm]) -> list[Arm]:
    """Arms whose figures are judged against base's: the heads, or the variants where there is none."""
    return [arm for arm in arms if arm.role == "head"] or [arm for arm in arms if arm.role == "variant"]


def about(arm: str) -> str:
    """How the note of a row begins that is of one of several arms under test."""
    return f"arm {arm}"


class CellVerdict(Document):
    """One cell, judged."""

    cell: str
    outcome: Outcome
    exit_code: int
    model: str
    prompt: str
    arms: tuple[ArmView, ...]
    identity: tuple[IdentityRow, ...] = ()
    witnesses: tuple[WitnessRow, ...] = ()
    invariants: tuple[InvariantRow, ...] = ()
    exact: tuple[MetricRow, ...] = ()
    time: tuple[TimeRow, ...] = ()
    losses: tuple[LossRow, ...] = ()  # of each arm; none where no arm lost anything
    notes: tuple[str, ...] = ()

    @model_serializer(mode="wrap")
    def _without_absent_losses(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before losses were told where there is none: stored verdicts keep their digests."""
        fields: dict[str, Any] = serialize(self)
        if not self.losses:
            fields.pop("losses", None)
        return fields


class Verdict(Document):
    """The judged answer for a sweep."""

    schema_: Literal["assay.verdict/1"] = Field("assay.verdict/1", alias="schema")
    sweep: str
    outcome: Outcome
    exit_code: int
    headline: str  # one sentence: what happened
    next_step: str  # one sentence: what to do
    findings: tuple[Finding, ...] = ()  # worst first; empty on a clean pass
    cells: tuple[CellVerdict, ...] = ()
    set_aside: tuple[SetAside, ...] = ()
    blind_spots: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()  # what makes the comparison itself doubtful, whatever its outcome
    notes: tuple[str, ...] = ()  # on the sweep as a whole
    reviewed: tuple[ReviewedRow, ...] = ()  # every entry of the reviewed files, used or not
    cells_expected: int
    cells_judged: int
    varies: tuple[str, ...] = ()
    gate: dict[str, str] = {}
    time_false_alarms: float | None = None  # the most sweeps without a change, as a share, that show one in time
    input_digest: str
    stamp: Stamp
    struck: StruckOut | None = None  # never stored: put on when it is read

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, serialize_by_alias=True)

    def canonical(self) -> str:
        """As any document's, written row by row: whole, a sweep of ten thousand cells would take gigabytes."""
        rows = ([one.canonical() for one in self.cells], [one.canonical() for one in self.findings])
        return "".join(woven(self.frame(), *rows))

    def frame(self) -> str:
        """The text of what stands around cells and findings."""
        return Document.canonical(self.model_copy(update={"cells": (), "findings": ()}))

    def of_ids(self) -> dict[tuple[str, str], list[Finding]]:
        """What was found of ids, worst first, by cell and arm: also a broken lock, which no comparison shows."""
        found: dict[tuple[str, str], list[Finding]] = {}
        for finding in self.findings:
            if finding.gate == "identity":
                found.setdefault((finding.cell, finding.arm), []).append(finding)
        return found

    @model_serializer(mode="wrap")
    def _without_absent_fields(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written as before sweeps had notes, warnings or a rate of false alarms where there is none."""
        fields: dict[str, Any] = serialize(self)
        for name in ("notes", "warnings", "reviewed", "time_false_alarms", "struck"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields


def woven(frame: str, cells: Iterable[str], findings: Iterable[str]) -> Iterator[str]:
    """The canonical text of a verdict in pieces: its frame with the texts of cells and findings put in."""
    before, rest = frame.split('"cells":[]', 1)
    between, after = rest.split('"findings":[]', 1)
    yield before
    yield from _listed("cells", cells)
    yield between
    yield from _listed("findings", findings)
    yield after


def _listed(name: str, texts: Iterable[str]) -> Iterator[str]:
    mark = f'"{name}":['
    for text in texts:
        yield mark
        yield text
        mark = ","
    yield "]" if mark == "," else f"{mark}]"
