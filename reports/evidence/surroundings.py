"""What stood around each run: certificates of the card, host, build, effective configuration and the log's end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from jobs import timeline
from jobs.model import Certificate, RunRecord
from jobs.redact import redact
from reports.blocks import (
    Block,
    Column,
    Details,
    Inlines,
    KeyValue,
    Name,
    Paragraph,
    Section,
    State,
    Table,
    Verbatim,
    words,
)
from reports.evidence.runs import Measured, label
from reports.format import NOT_RECORDED, bytes_decimal, integer, number, plural
from reports.wording import CERTIFICATES

_LOG_LINES: Final = 40


def certificates(measured: list[Measured]) -> Section:
    """One row a run, and behind a fold what was read before, during and after it."""
    columns = (
        Column("Run"),
        Column("Verdict"),
        Column("Grade"),
        Column("Card"),
        Column("UUID"),
        Column("Driver"),
        Column("Samples", "right"),
        Column("Reasons"),
    )
    table = Table(
        "Certificates by run", columns, tuple(_certificate_row(label(run), item.certificate) for run, item in measured)
    )
    folded = tuple(
        Details(words(f"{label(run)}: before, during, after"), (_probes(item.certificate),))
        for run, item in measured
        if item.certificate is not None
    )
    summary = words("What the card and the host said around each run.")
    return Section("certificates", "Certificates", summary, (table,) if measured else (), folded)


def hosts(measured: list[Measured]) -> Section:
    """Device, engine, digests and every effective setting with its source; runs that share all of it share a fold."""
    groups: dict[tuple[tuple[str, Inlines], ...], list[str]] = {}
    for run, record in measured:
        groups.setdefault(_host(record), []).append(label(run))
    folded = tuple(
        Details(words(f"{', '.join(names)}: device, engine and effective configuration"), (KeyValue(pairs),))
        for pairs, names in groups.items()
    )
    columns = (Column("Run"), Column("Peak host memory", "right"))
    rows = tuple((words(label(run)), words(_peak(record.peak_rss_bytes))) for run, record in measured)
    summary = words(f"{plural(len(groups), 'configuration')} in {plural(len(measured), 'run')}.")
    shown = (Table("Host memory by run", columns, rows),) if rows else ()
    return Section("host", "Host and configuration", summary, shown, folded)


def logs(measured: list[Measured]) -> Section:
    """How runs ended that failed, and the last lines that each printed, secrets taken out."""
    blocks: list[Block] = []
    for run, record in measured:
        if record.error:
            blocks.append(Paragraph(words(f"{label(run)} ended with: {redact(record.error)}"), "warn"))
    folded = tuple(
        Details(
            words(f"{label(run)}: last lines"),
            (Verbatim(tuple(redact(record.log_tail).splitlines()[-_LOG_LINES:]), "log tail"),),
        )
        for run, record in measured
        if record.log_tail.strip()
    )
    count = plural(len(folded), "run") if folded else "No run"
    return Section("logs", "Logs", words(f"{count} printed anything; secrets are taken out."), tuple(blocks), folded)


def _certificate_row(name: str, proof: Certificate | None) -> tuple[Inlines, ...]:
    if proof is None:
        return (words(name), words(State("none", "warn")), *(words("") for _ in range(6)))
    return (
        words(name),
        words(State(proof.verdict, CERTIFICATES[proof.verdict])),
        words(proof.grade),
        words(Name(proof.card)),
        words(Name(proof.uuid)),
        words(proof.driver),
        words(integer(proof.samples)),
        words("; ".join(proof.reasons) or "none"),
    )


def _probes(proof: Certificate) -> KeyValue:
    during = {name: value for name, value in proof.during.items() if name != timeline.FIELD}  # has a picture
    facts = (("before", proof.before), ("during", during), ("after", proof.after))
    spans = tuple(
        (
            f"{number(item.start_s)} s to {number(item.end_s)} s",
            words(item.what if item.pid is None else f"{item.what}, pid {item.pid}"),
        )
        for item in proof.intervals
    )
    return KeyValue((*((when, words(_json(values))) for when, values in facts), *spans))


def _host(record: RunRecord) -> tuple[tuple[str, Inlines], ...]:
    engine = words(Name(record.module_path or "unknown path"), " digest ", Name(record.engine_digest[:12] or "none"))
    pairs = [("device", words(_json(record.device))), ("engine", engine)]
    pairs.append(("model digest", words(Name(record.model_digest[:12] or "none"))))
    settings = sorted(record.effective_config.items())
    return (*pairs, *((name, words(_config(value))) for name, value in settings))


def _peak(size: int | None) -> str:
    return NOT_RECORDED if size is None else bytes_decimal(size)


def _config(value: Any) -> str:
    if isinstance(value, Mapping) and "value" in value:
        reason = f": {value['reason']}" if value.get("reason") else ""
        return redact(f"{_json(value['value'])} (from {value.get('source', 'unknown')}{reason})")
    return _json(value)


def _json(value: Any) -> str:
    return redact(json.dumps(value, sort_keys=True, default=str, ensure_ascii=False))
