"""The shapes of the files that `waivers:` and `goldens:` name, and what their entries must hold beyond shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from jobs.errors import SpecError
from jobs.outcomes import WAIVABLE
from jobs.reviewed import ANY, MOST_DAYS, TOKENS, Golden, GoldenStream, Waiver
from jobs.spec.checks import known_metric
from jobs.spec.faults import first_of, nearest
from jobs.spec.form import Form, Text, TokenId, Tokens
from jobs.spec.yaml_lines import Path_, Source

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Parsed = TypeVar("Parsed", date, datetime)


class WaiverForm(Form):
    """A finding that is known and accepted until a day. `metric` may be a pattern, `tokens`, or "*" for any."""

    cell: Text
    metric: Text
    class_: Annotated[Text, Field(alias="class")]
    reason: Text
    evidence: Text
    written: Text
    expires: Text
    by: Text


class WaiversForm(Form):
    """The file that `waivers:` names."""

    waivers: tuple[WaiverForm, ...]


class StreamForm(Form):
    """The ids of one sequence, how it stops, and the top-2 gap at each id."""

    ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    stop: Literal["length", "eos"]
    gaps: tuple[Annotated[float, Field(ge=0)], ...] = ()


class GoldenForm(Form):
    """Blessed ids of one cell, as `assay bless` writes them."""

    id: Annotated[str, Field(pattern="^gld_[0-9a-z]{26}$")]
    cell: Text
    model_digest: Text
    prompt_digest: Digest
    tokens: Tokens
    ignore_eos: bool
    card: Text
    streams: Annotated[tuple[StreamForm, ...], Field(min_length=1)]
    reason: Text
    by: Text
    at: Text
    sweep: Text
    arm: Text
    runs: Annotated[tuple[Text, ...], Field(min_length=1)]
    engine_digest: Text
    supersedes: str = ""


class GoldensForm(Form):
    """The file that `goldens:` names."""

    goldens: tuple[GoldenForm, ...]


def waivers_of(form: WaiversForm, source: Source) -> tuple[Waiver, ...]:
    """The waivers of a file. Raises SpecError with the line of the first fault."""
    faults = [fault for index, row in enumerate(form.waivers) for fault in _waiver_faults(row, index, source)]
    if faults:
        raise first_of(faults)
    return tuple(Waiver(**row.model_dump(exclude={"class_"}), outcome=row.class_) for row in form.waivers)


def goldens_of(form: GoldensForm, source: Source) -> tuple[Golden, ...]:
    """The goldens of a file. Raises SpecError with the line of the first fault."""
    faults = [fault for index, row in enumerate(form.goldens) for fault in _golden_faults(form, index, source)]
    if faults:
        raise first_of(faults)
    return tuple(
        Golden(**{**row.model_dump(), "streams": tuple(GoldenStream(**one.model_dump()) for one in row.streams)})
        for row in form.goldens
    )


def _waiver_faults(row: WaiverForm, index: int, source: Source) -> Iterator[SpecError]:
    path: Path_ = ("waivers", index)
    if row.class_ not in WAIVABLE:
        why = f"{row.class_!r} is no class that can be waived"
        yield source.error((*path, "class"), why, nearest(row.class_, WAIVABLE))
    if not any(mark in row.metric for mark in "*?[") and row.metric != TOKENS and not known_metric(row.metric):
        remedy = f"a metric's name, {TOKENS} for findings of ids, or {ANY!r} in quotes"
        yield source.error((*path, "metric"), f"unknown metric {row.metric!r}", remedy)
    for key in ("reason", "evidence", "by"):
        if not getattr(row, key).strip():
            yield source.error((*path, key), f"the waiver gives no {key}", "a waiver without one cannot be reviewed")
    days = []
    for key in ("written", "expires"):
        day = _parsed(getattr(row, key), date.fromisoformat)
        if day is None:
            text = getattr(row, key)
            yield source.error((*path, key), f"{text!r} is no day", "write it as 2026-12-31")
        else:
            days.append(day)
    if len(days) == 2:
        written, expires = days
        if expires < written:
            yield source.error((*path, "expires"), f"it expires on {expires}, before it was written", "mend the days")
        elif expires - written > timedelta(days=MOST_DAYS):
            why = f"it expires on {expires}, more than {MOST_DAYS} days after {written}"
            yield source.error((*path, "expires"), why, f"{written + timedelta(days=MOST_DAYS)} at the latest")


def _golden_faults(form: GoldensForm, index: int, source: Source) -> Iterator[SpecError]:
    row, path = form.goldens[index], ("goldens", index)
    at = _parsed(row.at, datetime.fromisoformat)
    if at is None or at.tzinfo is None:
        yield source.error((*path, "at"), f"{row.at!r} is no time with its zone", "bless it anew")
    if not row.reason.strip():
        yield source.error((*path, "reason"), "the golden gives no reason", "say why these ids are right")
    ids = [one.id for one in form.goldens]
    if row.id in ids[:index]:
        yield source.error((*path, "id"), f"the golden {row.id} stands twice", "remove one")
    before = [one for one in form.goldens[:index] if one.cell == row.cell]
    if before and row.supersedes != before[-1].id:
        why = f"a second golden of cell {row.cell!r} that does not supersede {before[-1].id}"
        yield source.error((*path, "cell"), why, "remove one, or write supersedes")
    for place, stream in enumerate(row.streams):
        if len(stream.ids) > row.tokens:
            why = f"{len(stream.ids)} ids, and tokens is {row.tokens}"
            yield source.error((*path, "streams", place, "ids"), why, "bless it anew")
        if stream.gaps and len(stream.gaps) != len(stream.ids):
            why = f"{len(stream.gaps)} gaps for {len(stream.ids)} ids"
            yield source.error((*path, "streams", place, "gaps"), why, "bless it anew")


def _parsed(text: str, read: Callable[[str], Parsed]) -> Parsed | None:
    try:
        return read(text)
    except ValueError:
        return None
