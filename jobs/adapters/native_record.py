"""From the lines of one native child to the record of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from jobs.adapters.base import RunOrder
from jobs.adapters.child import ChildEnd
from jobs.metrics import derive
from jobs.model import Equation, Generation, KeyBytes, Reading, RunRecord, SeamRow

LOG_TAIL_CHARS = 4000
Piece = TypeVar("Piece", bound=BaseModel)


@dataclass(slots=True)
class Stream:
    """A child's lines sorted by type. `fault` names the first line that could not be understood."""

    hello: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
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
                self.hello = line
            case "generation":
                self.generations.append(_build(Generation, line))
            case "result":
                self.seams = tuple(_build(SeamRow, row) for row in line.get("seams", ()))
                self.keys = tuple(_build(KeyBytes, row) for row in line.get("keys", ()))
                self.equations = tuple(_build(Equation, row) for row in line.get("equations", ()))
                self.result = line
            case "error":
                self.error = line
            case _:
                pass  # progress, and kinds that a newer engine may add


def record_of(
    order: RunOrder, end: ChildEnd, stream: Stream, digest: str, started: str, ended: str, error: str | None
) -> RunRecord:
    """The record of a run, complete or not; what was not measured is absent, never zero."""
    hello = stream.hello or {}
    last = stream.result or stream.error or {}
    counters: dict[str, Reading] = dict(last.get("counters", {}))
    facts = {k: v for k, v in dict(last.get("facts", {})).items() if isinstance(v, int | float | str)}
    generations = (*stream.generations, *_in_flight(stream))
    settings = order.cell.settings
    measured = stream.result is not None
    return RunRecord(
        run_id=order.run_id,
        attempt_id=order.attempt_id,
        attempt_number=order.attempt_number,
        exit_code=end.exit_code,
        signal=end.signal,
        error=error,
        engine_digest=digest,
        module_path=str(hello.get("module_path", "")),
        model_digest=str((hello.get("model") or {}).get("digest") or order.cell.model_digest),
        effective_config=dict(hello.get("effective_config", {})),
        device=dict(hello.get("device", {})),
        generations=generations,
        counters=counters,
        metrics=derive(counters, facts, generations, settings.decode_skip) if measured else {},
        facts=facts,
        seams=stream.seams,
        keys=stream.keys,
        equations=stream.equations,
        peak_rss_bytes=last.get("peak_rss_bytes"),
        started_at=started,
        ended_at=ended,
        log_tail=end.log_tail[-LOG_TAIL_CHARS:],
    )


def _in_flight(stream: Stream) -> tuple[Generation, ...]:
    """The generation that an error cut off, if it had begun."""
    ids = (stream.error or {}).get("ids") or ()
    if not ids:
        return ()
    return (Generation(index=len(stream.generations), warmup=False, ids=tuple(ids), stop_reason=None),)


def _build(model: type[Piece], row: Mapping[str, Any]) -> Piece:
    """A document piece from a line; fields that only a newer engine knows are left out."""
    return model.model_validate({k: v for k, v in row.items() if k in model.model_fields})


def _first_fault(exc: Exception) -> str:
    if isinstance(exc, ValidationError):
        first = exc.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(exc)
