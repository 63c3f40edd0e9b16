"""From the lines of one native child to the record of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.adapters.base import RunOrder
from jobs.adapters.child import ChildEnd
from jobs.metrics import derive
from jobs.model import Equation, Generation, KeyBytes, Reading, RunRecord, SeamRow

LOG_TAIL_CHARS = 4000
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
    module_path: str
    effective_config: dict[str, dict[str, Any]] = {}
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


@dataclass(slots=True)
class Stream:
    """A child's lines sorted by type. `fault` names the first line that could not be understood."""

    hello: Hello | None = None
    result: Result | None = None
    error: Error | None = None
    generations: list[Generation] = field(default_factory=list)
    seams: tuple[SeamRow, ...] = ()
    keys: tuple[KeyBytes, ...] = ()
    equations: tuple[Equation, ...] = ()
    fault: str | None = None

    @classmethod
    def of(cls, end: ChildEnd) -> Stream:
        """Sort `end`'s lines; exactly one of result and error may end a stream."""
        stream = cls()
        for line in end.lines:
            try:
                stream._take(line)
            except (ValidationError, TypeError, ValueError) as exc:
                stream.fault = f"line of type {line.get('type')!r} not understood: {_first_fault(exc)}"
                break
        if stream.result is not None and stream.error is not None:
            stream.fault = "the stream holds a result and an error"
        if end.bad_line is not None and stream.result is None:
            stream.fault = stream.fault or f"not a JSON line: {end.bad_line[:80]!r}"
        return stream

    def _take(self, line: dict[str, Any]) -> None:
        match line["type"]:
            case "hello":
                self.hello = Hello.model_validate(line)
            case "generation":
                self.generations.append(_build(Generation, line))
            case "result":
                self.seams = tuple(_build(SeamRow, row) for row in line.get("seams", ()))
                self.keys = tuple(_build(KeyBytes, row) for row in line.get("keys", ()))
                self.equations = tuple(_build(Equation, row) for row in line.get("equations", ()))
                self.result = Result.model_validate(line)
            case "error":
                self.error = Error.model_validate(line)
            case _:
                pass  # progress, and kinds that a newer engine may add


def record_of(
    order: RunOrder, end: ChildEnd, stream: Stream, digest: str, started: str, ended: str, error: str | None
) -> RunRecord:
    """The record of a run, complete or not; what was not measured is absent, never zero."""
    hello, result = stream.hello, stream.result
    last = result or stream.error
    counters: dict[str, Reading] = dict(last.counters) if last else {}
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
        engine_digest=digest,
        module_path=hello.module_path if hello else "",
        model_digest=(hello.model.digest if hello else None) or order.cell.model_digest,
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
        log_tail=end.log_tail[-LOG_TAIL_CHARS:],
    )


def _in_flight(stream: Stream) -> tuple[Generation, ...]:
    """The generation that an error cut off, if it had begun."""
    if stream.error is None or not stream.error.ids:
        return ()
    return (Generation(index=len(stream.generations), warmup=False, ids=stream.error.ids, stop_reason=None),)


def _build(model: type[Piece], row: Mapping[str, Any]) -> Piece:
    """A document piece from a line; fields that only a newer engine knows are left out."""
    return model.model_validate({k: v for k, v in row.items() if k in model.model_fields})


def _first_fault(exc: Exception) -> str:
    if isinstance(exc, ValidationError):
        first = exc.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(exc)
