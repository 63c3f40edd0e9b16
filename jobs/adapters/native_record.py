"""From the lines of one native child to the record of its run.

Lines are read strictly: text is no number and true is no count. A line that is not understood ends the reading and
fails the run, and what was understood before it, or of its counters, is kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.adapters.base import RunOrder
from jobs.adapters.child import ChildEnd
from jobs.adapters.child_line import HIGH, LOW
from jobs.excerpt import first_words
from jobs.metrics import derive
from jobs.model import CellPlan, Equation, Generation, KeyBytes, Missing, Reading, RunRecord, SeamRow, SequenceTokens
from jobs.model_bounds import model_bounds

Piece = TypeVar("Piece", bound=BaseModel)


class Line(BaseModel):
    """A line of the child: what a newer engine adds is left out, what is missing or wrong is a fault."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class HelloDevice(Line):
    """The device that the child says it runs on."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str = ""
    uuid: str


class HelloModel(Line):
    """The model that the child says it read."""

    digest: str | None = None


class Hello(Line):
    """What a child says of itself before it measures."""

    protocol: int
    module_path: str = ""  # of an engine that is imported
    effective_config: dict[str, Any] = {}  # name -> {"value", "source"}, or the bare value
    device: HelloDevice
    model: HelloModel = HelloModel()


class Result(Line):
    """What a child measured, rows apart."""

    counters: dict[str, int | float]
    facts: dict[str, int | float | str] = {}
    peak_rss_bytes: int | None = None


class Error(Line):
    """Why a child ended without a result, and what it had counted so far."""

    code: int
    kind: str
    message: str
    remedy: str = ""
    counters: dict[str, int | float] = {}
    ids: tuple[int, ...] = ()
    further_ids: tuple[tuple[int, ...], ...] = ()


class Fault(Exception):
    """A line that is understood and has no place in the stream."""


@dataclass(slots=True)
class Stream:
    """A child's lines sorted by type. `fault` names the first line that could not be used.

    `salvaged` are the counters that such a line told, each that is no finite 64-bit number as Missing.
    """

    hello: Hello | None = None
    result: Result | None = None
    error: Error | None = None
    generations: list[Generation] = field(default_factory=list)
    seams: tuple[SeamRow, ...] = ()
    keys: tuple[KeyBytes, ...] = ()
    equations: tuple[Equation, ...] = ()
    fault: str | None = None
    salvaged: dict[str, Reading] = field(default_factory=dict)

    @classmethod
    def of(cls, end: ChildEnd) -> Stream:
        """Sort `end`'s lines: one hello before all that is measured, and at the end one of result and error."""
        stream = cls()
        for line in end.lines:
            try:
                stream._take(line)
            except (ValidationError, Fault) as exc:
                stream._spoil(f"line of type {line['type']!r} not understood: {_first_fault(exc)}", line)
                return stream
        if end.bad_line is not None:
            stream._spoil(f"{end.bad_reason}: {first_words(end.bad_line, 80)!r}", end.bad_rest)
        return stream

    def _take(self, line: dict[str, Any]) -> None:
        kind = line["type"]
        if kind in ("generation", "result") and self.hello is None:
            raise Fault("it stands before hello")
        if kind in ("hello", "generation", "result", "error") and (self.result or self.error):
            raise Fault(f"it stands after the {'result' if self.result else 'error'}")
        match kind:
            case "hello":
                if self.hello is not None:
                    raise Fault("a second one")
                self.hello = _build(Hello, line)
            case "generation":
                self.generations.append(self._generation(line))
            case "result":
                self.seams = tuple(_build(SeamRow, row) for row in _rows(line, "seams"))
                self.keys = tuple(_build(KeyBytes, row) for row in _rows(line, "keys"))
                self.equations = tuple(_build(Equation, row) for row in _rows(line, "equations"))
                self.result = _build(Result, line)
            case "error":
                self.error = _build(Error, line)
            case _:
                pass  # progress, and kinds that a newer engine may add

    def _generation(self, line: dict[str, Any]) -> Generation:
        made = _build(Generation, line)
        if made.index in {earlier.index for earlier in self.generations}:
            raise Fault(f"generation {made.number} a second time")
        if self.generations and made.index < self.generations[-1].index:
            raise Fault(f"generation {made.number} stands after generation {self.generations[-1].number}")
        if any(token < 0 for sequence in made.sequences for token in sequence.ids):
            raise Fault("ids: a negative id")
        return made

    def _spoil(self, fault: str, line: Mapping[str, Any]) -> None:
        """Note the fault. What a result or an error told of counters is kept; that it was one is not."""
        self.fault = fault
        told = line.get("counters")
        if line.get("type") in ("result", "error") and isinstance(told, dict) and not (self.result or self.error):
            self.salvaged = {str(name): _salvaged(value) for name, value in told.items()}


def outside_vocabulary(cell: CellPlan, stream: Stream) -> str | None:
    """The first id that the cell's model does not have, in words; None where all are, or its folder does not say."""
    vocabulary = model_bounds(Path(cell.model_path)).vocabulary
    if vocabulary is None:
        return None
    for generation in stream.generations:
        for tokens in generation.sequences:
            for index, token in enumerate(tokens.ids):
                if token >= vocabulary:
                    where = f"at index {index} of generation {generation.number}"
                    return f"id {token} {where} is outside the model's vocabulary, which ends at {vocabulary - 1}"
    return None


@dataclass(frozen=True, slots=True)
class Known:
    """What the parent computed itself: digests of the engine tree and of the model's files."""

    engine_digest: str
    model_digest: str


def record_of(
    order: RunOrder, end: ChildEnd, stream: Stream, known: Known, started: str, ended: str, error: str | None
) -> RunRecord:
    """The record of a run, complete or not; what was not measured is absent, never zero."""
    hello, result = stream.hello, stream.result
    last = result or stream.error
    counters: dict[str, Reading] = dict(last.counters) if last else dict(stream.salvaged)
    facts = dict(result.facts) if result else {}
    generations = (*stream.generations, *_in_flight(stream))
    settings = order.cell.settings
    return RunRecord(
        run_id=order.run_id,
        attempt_id=order.attempt_id,
        attempt_number=order.attempt_number,
        exit_code=end.exit_code,
        signal=end.signal,
        error=error,
        engine_digest=known.engine_digest,
        module_path=hello.module_path if hello else "",
        model_digest=known.model_digest,
        effective_config=dict(hello.effective_config) if hello else {},
        device=hello.device.model_dump() if hello else {},
        generations=generations,
        counters=counters,
        metrics=derive(counters, facts, generations, settings.decode_skip) if result else {},
        facts=facts,
        seams=stream.seams,
        keys=stream.keys,
        equations=stream.equations,
        peak_rss_bytes=result.peak_rss_bytes if result else None,
        started_at=started,
        ended_at=ended,
        log_tail=end.log_tail,
    )


def _in_flight(stream: Stream) -> tuple[Generation, ...]:
    """The generation that an error cut off, if it had begun."""
    if stream.error is None or not stream.error.ids:
        return ()
    further = tuple(SequenceTokens(ids=ids, stop_reason=None) for ids in stream.error.further_ids)
    index = len(stream.generations)
    return (Generation(index=index, warmup=False, ids=stream.error.ids, stop_reason=None, further=further),)


def _rows(line: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    rows = line.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Fault(f"{name}: not a list of rows")
    return rows


def _build(model: type[Piece], row: Mapping[str, Any]) -> Piece:
    """A document piece from a line; fields that only a newer engine knows are left out.

    By way of JSON, whose strict reading takes an array for a tuple and nothing else for anything.
    """
    kept = {name: value for name, value in row.items() if name in model.model_fields}
    return model.model_validate_json(json.dumps(kept), strict=True)


def _salvaged(value: Any) -> Reading:
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and LOW <= value <= HIGH:
        return value
    return Missing(missing=f"the engine wrote {str(value)[:40]!r}, which is no finite 64-bit number")


def _first_fault(exc: Exception) -> str:
    if isinstance(exc, ValidationError):
        first = exc.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(exc)
