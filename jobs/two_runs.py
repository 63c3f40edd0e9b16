"""Two runs side by side, of one sweep or of two: what each was, what each gave, and what cannot be compared and why.

A look and no judgement: it has no interval, no gate and no exit code of its own. Judging is done inside blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jobs.document import Document
from jobs.identity import common_prefix
from jobs.metrics import CLOCKED
from jobs.model import Generation, Missing, Reading, RunRecord
from jobs.redact import as_told
from jobs.settings_served import effective
from jobs.store.rows import StoredRun

CONTEXT = 4
"""Ids shown on each side of the first difference."""

ABSENT = "absent"


class FactRow(Document):
    """Something told of both runs, as text; `absent` where one does not have it."""

    name: str
    left: str
    right: str
    same: bool


class TokenRow(Document):
    """One sequence of one generation in both runs; `first` is the index at which they part, None where they do not."""

    generation: int  # from 0
    sequence: int
    left_length: int
    right_length: int
    left_stop: str | None
    right_stop: str | None
    first: int | None = None
    left_context: tuple[int, ...] = ()  # ids from `context_from` on
    right_context: tuple[int, ...] = ()
    context_from: int = 0

    @property
    def same(self) -> bool:
        """Whether ids and stop are equal."""
        return self.first is None and self.left_stop == self.right_stop


class ReadingRow(Document):
    """A counter or metric of both runs; `delta` is right less left, or why there is none."""

    name: str
    left: Reading
    right: Reading
    delta: Reading


class TwoRuns(Document):
    """The whole comparison. `cannot`: what does not compare like with like, each with its reason."""

    schema_: Literal["assay.two-runs/1"] = "assay.two-runs/1"
    left: str
    right: str
    cannot: tuple[str, ...]
    facts: tuple[FactRow, ...]
    settings: tuple[FactRow, ...]
    tokens: tuple[TokenRow, ...]
    exact: tuple[ReadingRow, ...]
    times: tuple[ReadingRow, ...]

    def written(self) -> dict[str, Any]:
        """As JSON holds it."""
        body = self.model_dump(mode="json")
        return {"schema": body.pop("schema_"), **body}


def compare(left: StoredRun, right: StoredRun) -> TwoRuns:
    """Everything of two runs side by side."""
    mine, theirs = left.fact.record, right.fact.record
    tokens = () if mine is None or theirs is None else tuple(_tokens(mine, theirs))
    rows = () if mine is None or theirs is None else tuple(_readings(mine, theirs))
    return TwoRuns(
        left=left.fact.run_id,
        right=right.fact.run_id,
        cannot=tuple(_cannot(left, right, tokens)),
        facts=_rows(_facts(left), _facts(right)),
        settings=_rows(_settings(left), _settings(right)),
        tokens=tokens,
        exact=tuple(row for row in rows if row.name not in CLOCKED),
        times=tuple(row for row in rows if row.name in CLOCKED),
    )


def _facts(run: StoredRun) -> dict[str, str]:
    fact, record = run.fact, run.fact.record
    told: dict[str, Any] = {
        "sweep": run.sweep.id,
        "sweep name": run.sweep.name,
        "cell": run.plan.cell,
        "arm": fact.arm,
        "source": run.arm.source,
        "commit": run.arm.commit,
        "block and place": f"{fact.block}.{fact.position}",
        "state": fact.state,
        "attempts": ", ".join(f"{one.number} {one.state}" for one in fact.attempts) or "none",
        "harness digest": run.sweep.harness_digest,
        "prompts": run.plan.prompts(run.arm),
    }
    if record is not None:
        certificate = record.certificate
        told |= {
            "exit code": record.exit_code,
            "error": record.error,
            "engine digest": record.engine_digest or None,
            "model digest": record.model_digest or None,
            "card": record.device.get("name"),
            "card uuid": record.device.get("uuid"),
            "driver": record.device.get("driver"),
            "certificate": None if certificate is None else f"{certificate.verdict}, {certificate.grade}",
            "started": record.started_at or None,
        }
    return {name: str(value) for name, value in told.items() if value is not None}


def _settings(run: StoredRun) -> dict[str, str]:
    """As asked of every run, and as served where it told what it served."""
    record = run.fact.record
    served = {} if record is None else {name: effective(value) for name, value in record.effective_config.items()}
    asked = {**run.plan.config, **run.arm.config}
    told = {
        **run.plan.settings.model_dump(mode="json"),
        "adapter": run.arm.adapter,
        **{f"env {name}": value for name, value in run.arm.env.items()},
        **(served or asked),
    }
    return {name: str(value) for name, value in told.items()}


def _rows(left: Mapping[str, str], right: Mapping[str, str]) -> tuple[FactRow, ...]:
    return tuple(
        FactRow(
            name=name,
            left=as_told(name, left.get(name, ABSENT)),
            right=as_told(name, right.get(name, ABSENT)),
            same=name in left and left.get(name) == right.get(name),
        )
        for name in dict.fromkeys((*left, *right))
    )


def _tokens(left: RunRecord, right: RunRecord) -> Iterator[TokenRow]:
    mine, theirs = _by_index(left), _by_index(right)
    for index in sorted(mine.keys() & theirs.keys()):
        pairs = zip(mine[index].sequences, theirs[index].sequences, strict=False)
        for place, (one, other) in enumerate(pairs):
            prefix = common_prefix(one.ids, other.ids)
            start = max(0, prefix - CONTEXT)
            parts = one.ids != other.ids
            shown = slice(start, prefix + CONTEXT) if parts else slice(0)
            yield TokenRow(
                generation=index,
                sequence=place,
                left_length=len(one.ids),
                right_length=len(other.ids),
                left_stop=one.stop_reason,
                right_stop=other.stop_reason,
                first=prefix if parts else None,
                left_context=one.ids[shown],
                right_context=other.ids[shown],
                context_from=start if parts else 0,
            )


def _by_index(record: RunRecord) -> dict[int, Generation]:
    return {one.index: one for one in record.generations}


def _readings(left: RunRecord, right: RunRecord) -> Iterator[ReadingRow]:
    none = Missing(missing="not recorded")
    mine, theirs = ({**one.counters, **one.metrics} for one in (left, right))
    for name in sorted(mine.keys() | theirs.keys()):
        one, other = mine.get(name, none), theirs.get(name, none)
        if isinstance(one, Missing) or isinstance(other, Missing):
            delta: Reading = Missing(missing="one side has no reading")
        else:
            delta = other - one
        yield ReadingRow(name=name, left=one, right=other, delta=delta)


def _cannot(left: StoredRun, right: StoredRun, tokens: tuple[TokenRow, ...]) -> Iterator[str]:
    for run in (left, right):
        if run.fact.retracted:
            yield f"run {run.fact.run_id} is retracted, so nothing of it counts: {run.fact.retracted}"
        if run.fact.record is None:
            why = run.fact.attempts[-1].reason if run.fact.attempts else "it was never tried"
            yield f"run {run.fact.run_id} is {run.fact.state} and measured nothing: {why or 'no reason is recorded'}"
    mine, theirs = left.fact.record, right.fact.record
    if mine is None or theirs is None:
        return
    yield from _of_work(left, right, mine, theirs)
    if any(row.first is not None for row in tokens):
        yield "counters and times: the tokens differ, so from the first difference on the work does"
    if left.sweep.harness_digest != right.sweep.harness_digest:
        yield "all readings: other versions of the harness took them"
    yield from _of_times(left, right, mine, theirs)


def _of_work(left: StoredRun, right: StoredRun, mine: RunRecord, theirs: RunRecord) -> Iterator[str]:
    """Why tokens and counters are of different work."""
    if not mine.model_digest or mine.model_digest != theirs.model_digest:
        yield "tokens, counters and times: the models differ, or one is unknown"
    if left.plan.prompts(left.arm) != right.plan.prompts(right.arm):
        yield "tokens, counters and times: the prompts differ"
    one, other = (run.plan.settings.model_dump(exclude={"device", "decode_skip"}) for run in (left, right))
    for name in one:
        if one[name] != other[name]:
            yield f"counters and times: {name} is {one[name]} and {other[name]}"
    if {gen.index for gen in mine.generations} != {gen.index for gen in theirs.generations}:
        yield "tokens: the runs gave other generations, and only those of both are compared"


def _of_times(left: StoredRun, right: StoredRun, mine: RunRecord, theirs: RunRecord) -> Iterator[str]:
    """Why times do not compare."""
    for key, word in (("kind", "kind of device"), ("uuid", "card"), ("driver", "driver")):
        one, other = mine.device.get(key), theirs.device.get(key)
        if one is None or one != other:
            yield f"times: the {word} is {one or 'unknown'} and {other or 'unknown'}"
    for run, record in ((left, mine), (right, theirs)):
        if record.certificate is None or record.certificate.verdict != "clear":
            said = "unknown" if record.certificate is None else record.certificate.verdict
            yield f"times: the card of {run.fact.run_id} was not certified clear, but {said}"
    if left.fact.block_id != right.fact.block_id:
        yield "times: the runs are of two blocks, so that what drifts between them is not balanced"
