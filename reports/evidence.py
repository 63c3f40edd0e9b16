"""What stands behind one cell: its runs in order, readings, samples, tokens, certificates, hosts, logs, commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, Final

from jobs.errors import SpecError
from jobs.model import ArmPlan, CellInput, Generation, JudgeInput, Missing, RunFact, RunRecord
from reports.blocks import (
    Block,
    Column,
    Details,
    Heading,
    KeyValue,
    Name,
    Paragraph,
    Section,
    Spark,
    State,
    Table,
    Verbatim,
    words,
)
from reports.format import NOT_RECORDED, bytes_decimal, exact, integer, number, plural
from reports.redact import redact
from reports.traffic import METRICS
from reports.units import unit_of
from reports.wording import CERTIFICATES

_LOG_LINES: Final = 40
_IDS_A_LINE: Final = 12
Measured = tuple[RunFact, RunRecord]


def sections(doc: JudgeInput, cell: CellInput, metric: str | None) -> tuple[Section, ...]:
    """The evidence of one cell, section by section. Raises SpecError when `metric` is given and no run has it."""
    runs = sorted(cell.runs, key=lambda run: (run.block, run.position))
    measured = [(run, run.record) for run in runs if run.record is not None]
    if metric is not None:
        timed = (_samples(measured),) if unit_of(metric).startswith(("ms", "ns", "tokens/s")) else ()
        return (_runs(runs), _readings(measured, metric), *timed, _reruns(doc, cell))
    return (
        _runs(runs),
        _readings(measured, metric),
        _samples(measured),
        _tokens(measured),
        _certificates(measured),
        _hosts(measured),
        _logs(measured),
        _reruns(doc, cell),
    )


def _runs(runs: list[RunFact]) -> Section:
    columns = (
        Column("Block", "right"),
        Column("Place", "right"),
        Column("Arm"),
        Column("Run"),
        Column("State"),
        Column("Attempts"),
        Column("Exit", "right"),
        Column("Started"),
        Column("Ended"),
    )
    table = Table("Runs in the order they ran", columns, tuple(_run_row(run) for run in runs))
    aside = [
        (
            words(Name(run.run_id)),
            words(str(attempt.number)),
            words(attempt.state),
            words(attempt.reason or "no reason recorded"),
        )
        for run in runs
        for attempt in run.attempts
        if attempt.state != "measured"
    ]
    blocks: list[Block] = [table]
    if aside:
        head = (Column("Run"), Column("Attempt", "right"), Column("State"), Column("Why"))
        blocks.append(Table("Attempts that do not count", head, tuple(aside)))
    complete = sum(run.state == "complete" for run in runs)
    order = " ".join(run.arm for run in runs)
    summary = words(f"{integer(complete)} of {plural(len(runs), 'run')} complete; order of arms: {order}.")
    return Section("runs", "Runs", summary, True, tuple(blocks))


def _run_row(run: RunFact) -> tuple[Any, ...]:
    record = run.record
    state = (
        State("retracted", "bad") if run.retracted else State(run.state, "good" if run.state == "complete" else "warn")
    )
    return (
        words(str(run.block)),
        words(str(run.position)),
        words(run.arm),
        words(Name(run.run_id)),
        words(state, f" ({run.retracted})" if run.retracted else ""),
        words(", ".join(f"{attempt.number} {attempt.state}" for attempt in run.attempts) or "none"),
        words("none" if record is None or record.exit_code is None else str(record.exit_code)),
        words("" if record is None else record.started_at),
        words("" if record is None else record.ended_at),
    )


def _readings(measured: list[Measured], metric: str | None) -> Section:
    values = {run.run_id: {**record.facts, **record.counters, **record.metrics} for run, record in measured}
    names = [name for name, _, _ in METRICS] if metric is None else [metric]
    known = {name for row in values.values() for name in row}
    if metric is not None and metric not in known:
        near = ", ".join(sorted(name for name in known if metric.split("_")[0] in name)[:5])
        raise SpecError(f"no run of this cell has a reading named {metric}", f"near it: {near or 'none'}")
    blocks: list[Block] = [_reading_table("Readings by run", measured, values, names)] if measured else []
    if metric is not None:
        blocks += [_phases(measured, metric)]
    rest = sorted(known - set(names))
    folded = (
        Details(
            words(f"the other {plural(len(rest), 'reading')}"),
            (_reading_table("Other readings", measured, values, rest),),
        ),
    )
    summary = words("One row a reading, one column a run." if measured else "No run measured anything.")
    return Section(
        "readings", "Readings by run", summary, True, tuple(blocks), folded if measured and metric is None else ()
    )


def _reading_table(
    caption: str, measured: list[Measured], values: Mapping[str, Mapping[str, Any]], names: list[str]
) -> Table:
    columns = (Column("Reading"), *(Column(f"{run.arm} {run.block}.{run.position}", "right") for run, _ in measured))
    rows = tuple(
        (words(Name(name)), *(words(_reading(values[run.run_id].get(name), name)) for run, _ in measured))
        for name in names
    )
    return Table(caption, columns, rows)


def _reading(value: Any, name: str) -> str:
    if value is None:
        return NOT_RECORDED
    return value if isinstance(value, str) else exact(value, unit_of(name))


def _phases(measured: list[Measured], metric: str) -> Block:
    columns = (Column("Run"), Column("Generation", "right"), Column("Phase"), Column("Value", "right"))
    rows = tuple(
        (
            words(f"{run.arm} {run.block}.{run.position}"),
            words(str(generation.index)),
            words(phase),
            words(exact(counters[metric], unit_of(metric))),
        )
        for run, record in measured
        for generation in record.generations
        for phase, counters in generation.counters.items()
        if metric in counters
    )
    return Table("By generation and phase", columns, rows) if rows else Paragraph(words("Not recorded by generation."))


def _samples(measured: list[Measured]) -> Section:
    columns = (
        Column("Run"),
        Column("Generation", "right"),
        Column("Prefill", "right"),
        Column("Steps", "right"),
        Column("Fastest", "right"),
        Column("Median", "right"),
        Column("Slowest", "right"),
    )
    rows = tuple(_sample_row(run, item) for run, record in measured for item in record.generations)
    blocks: list[Block] = [Table("Time by generation", columns, rows)] if rows else []
    lines = [_spark(run, item) for run, record in measured for item in record.generations if len(item.step_ns) > 1]
    raw = tuple(
        f"{run.arm} {run.block}.{run.position} generation {item.index}: {' '.join(map(str, item.step_ns))}"
        for run, record in measured
        for item in record.generations
        if item.step_ns
    )
    folded = [Details(words("each step's time as a line"), tuple(lines))] if lines else []
    if raw:
        folded.append(Details(words("every sample, in nanoseconds"), (Verbatim(raw, "samples in nanoseconds"),)))
    return Section(
        "samples", "Samples", words("Wall time of the one-token steps, all kept."), True, tuple(blocks), tuple(folded)
    )


def _sample_row(run: RunFact, item: Generation) -> tuple[Any, ...]:
    steps = sorted(item.step_ns)
    times = [steps[0], steps[len(steps) // 2], steps[-1]] if steps else []
    shown = [f"{number(value / 1e6)} ms" for value in times] or ["none"] * 3
    return (
        words(f"{run.arm} {run.block}.{run.position}"),
        words(f"{item.index}{' warm-up' if item.warmup else ''}"),
        words(f"{number(item.prefill_ns / 1e6)} ms"),
        words(integer(len(steps))),
        *(words(value) for value in shown),
    )


def _spark(run: RunFact, item: Generation) -> Spark:
    low, high = min(item.step_ns), max(item.step_ns)
    span = max(1, high - low)
    last = len(item.step_ns) - 1
    points = tuple(
        (round(1000 * i / last), 950 - round(900 * (value - low) / span)) for i, value in enumerate(item.step_ns)
    )
    label = f"{run.arm} {run.block}.{run.position}, generation {item.index}"
    return Spark(label, points, f"{number(low / 1e6)} ms", f"{number(high / 1e6)} ms")


def _tokens(measured: list[Measured]) -> Section:
    groups: dict[tuple[int, ...], list[str]] = {}
    stops: dict[tuple[int, ...], set[str]] = {}
    for run, record in measured:
        for item in record.generations:
            groups.setdefault(item.ids, []).append(f"{run.arm} {run.block}.{run.position} generation {item.index}")
            stops.setdefault(item.ids, set()).add(item.stop_reason or "cut off")
    if not groups:
        return Section("tokens", "Tokens", words(State("missing", "warn"), " No run gave a token."), True)
    reference = next(iter(groups))
    blocks: list[Block] = []
    for place, (ids, who) in enumerate(groups.items()):
        stopped = " or ".join(sorted(stops[ids]))
        head = f"{plural(len(ids), 'id')}, stop {stopped}: given by {plural(len(who), 'generation')}"
        blocks += [Heading(words(f"List {place + 1}: {head}")), Paragraph(words(", ".join(who)))]
        blocks.append(Verbatim(_diff(reference, ids), f"token ids, list {place + 1}"))
    state = State("one list", "good") if len(groups) == 1 else State(f"{len(groups)} lists", "bad")
    note = (
        " of ids in all generations of all arms."
        if len(groups) == 1
        else " of ids; ids that differ from list 1 are bracketed."
    )
    return Section("tokens", "Tokens", words(state, note), len(groups) > 1, tuple(blocks))


def _diff(reference: tuple[int, ...], ids: tuple[int, ...]) -> tuple[str, ...]:
    lines = []
    for start in range(0, max(len(ids), len(reference)), _IDS_A_LINE):
        marks = []
        for place in range(start, min(start + _IDS_A_LINE, max(len(ids), len(reference)))):
            mine = str(ids[place]) if place < len(ids) else "end"
            theirs = str(reference[place]) if place < len(reference) else "end"
            marks.append(mine if mine == theirs else f"[{mine}]")
        lines.append(f"{start:>6}: {' '.join(marks)}")
    return tuple(lines)


def _certificates(measured: list[Measured]) -> Section:
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
    rows = []
    folded = []
    for run, record in measured:
        name = f"{run.arm} {run.block}.{run.position}"
        if record.certificate is None:
            rows.append((words(name), words(State("none", "warn")), *(words("") for _ in range(6))))
            continue
        proof = record.certificate
        rows.append(
            (
                words(name),
                words(State(proof.verdict, CERTIFICATES[proof.verdict])),
                words(proof.grade),
                words(Name(proof.card)),
                words(Name(proof.uuid)),
                words(proof.driver),
                words(integer(proof.samples)),
                words("; ".join(proof.reasons) or "none"),
            )
        )
        facts = {"before": proof.before, "during": proof.during, "after": proof.after}
        pairs = tuple((when, words(_json(values))) for when, values in facts.items())
        spans = tuple(
            (
                f"{number(item.start_s)} s to {number(item.end_s)} s",
                words(f"{item.what}{'' if item.pid is None else f', pid {item.pid}'}"),
            )
            for item in proof.intervals
        )
        folded.append(Details(words(f"{name}: before, during, after"), (KeyValue((*pairs, *spans)),)))
    return Section(
        "certificates",
        "Certificates",
        words("What the card and the host said around each run."),
        True,
        (Table("Certificates by run", columns, tuple(rows)),) if rows else (),
        tuple(folded),
    )


def _hosts(measured: list[Measured]) -> Section:
    folded = []
    for run, record in measured:
        pairs = [
            ("device", words(_json(record.device))),
            (
                "engine",
                words(
                    Name(record.module_path or "unknown path"), " digest ", Name(record.engine_digest[:12] or "none")
                ),
            ),
            ("model digest", words(Name(record.model_digest[:12] or "none"))),
            (
                "peak host memory",
                words("not recorded" if record.peak_rss_bytes is None else bytes_decimal(record.peak_rss_bytes)),
            ),
        ]
        pairs += [(name, words(_config(value))) for name, value in sorted(record.effective_config.items())]
        folded.append(
            Details(
                words(f"{run.arm} {run.block}.{run.position}: device, engine and effective configuration"),
                (KeyValue(tuple(pairs)),),
            )
        )
    return Section(
        "host", "Host and configuration", words(f"{plural(len(measured), 'run')}."), False, (), tuple(folded)
    )


def _config(value: Any) -> str:
    if isinstance(value, Mapping) and "value" in value:
        return redact(f"{_json(value['value'])} (from {value.get('source', 'unknown')})")
    return _json(value)


def _logs(measured: list[Measured]) -> Section:
    blocks: list[Block] = []
    for run, record in measured:
        if record.error:
            blocks.append(
                Paragraph(words(f"{run.arm} {run.block}.{run.position} ended with: {redact(record.error)}"), "warn")
            )
    folded = tuple(
        Details(
            words(f"{run.arm} {run.block}.{run.position}: last lines"),
            (Verbatim(tuple(redact(record.log_tail).splitlines()[-_LOG_LINES:]), "log tail"),),
        )
        for run, record in measured
        if record.log_tail.strip()
    )
    count = plural(len(folded), "run") if folded else "No run"
    return Section(
        "logs", "Logs", words(f"{count} printed anything; secrets are taken out."), bool(blocks), tuple(blocks), folded
    )


def _reruns(doc: JudgeInput, cell: CellInput) -> Section:
    arms = [arm for arm in doc.manifest.arms if arm.name in cell.plan.arms]
    lines = tuple(f"{rerun_command(arm, cell)}  # {arm.name}" for arm in arms)
    return Section(
        "rerun", "Run it again", words("One run of each arm, by hand."), True, (Verbatim(lines, "commands"),)
    )


def rerun_command(arm: ArmPlan, cell: CellInput) -> str:
    """The shell command that runs one arm of a cell by hand, every value quoted."""
    plan, settings = cell.plan, cell.plan.settings
    config = {**plan.config, **arm.config}
    ids = " ".join(map(str, plan.prompt_ids))
    words_ = ["assay", "engine", "run"]
    if arm.python_path is not None:
        words_ = ["env", f"PYTHONPATH={arm.python_path}", "python", "-P", "-m", "engine", "run"]
    words_ += ["--model", plan.model_path, "--prompt-ids", ids, "--tokens", str(settings.tokens)]
    words_ += [
        "--generations",
        str(settings.generations),
        "--warmups",
        str(settings.warmups),
        "--device",
        settings.device,
    ]
    words_ += ["--ignore-eos"] if settings.ignore_eos else []
    for name, value in sorted(config.items()):
        if value is None:
            continue
        shown = ("on" if value else "off") if isinstance(value, bool) else str(value)
        words_ += [f"--{name.replace('_', '-')}", shown]
    return " ".join(shlex.quote(word) for word in words_)


def _json(value: Any) -> str:
    if isinstance(value, Missing):
        return f"n/a: {value.missing}"
    return redact(json.dumps(value, sort_keys=True, default=str, ensure_ascii=False))
