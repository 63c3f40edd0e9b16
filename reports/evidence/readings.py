"""What each run read: counters and metrics side by side, and the time of every step."""

from __future__ import annotations

from collections.abc import Mapping

from jobs.errors import SpecError
from jobs.gates import GATING
from jobs.model import Generation, Reading, RunFact
from reports.blocks import (
    Block,
    Column,
    Details,
    Inlines,
    Listing,
    Name,
    Paragraph,
    ReadingName,
    Section,
    Spark,
    Table,
    Verbatim,
    words,
)
from reports.evidence.runs import Measured, label
from reports.format import NOT_RECORDED, exact, fixed, integer, plural
from reports.traffic import METRICS
from reports.units import unit_of

Shown = Reading | str
Values = Mapping[str, Mapping[str, Shown]]
"""Run id -> name -> what the run read."""

LONGEST_IN_TABLE = 40
"""Characters of a text that a column may hold; longer ones get lines of their own."""


def build(measured: list[Measured], metric: str | None) -> Section:
    """What gates and the figures that every report shows, or one metric by phase.

    Of both tables what differs between runs stands first. Raises SpecError for an unknown metric.
    """
    values: Values = {run.run_id: {**record.facts, **record.counters, **record.metrics} for run, record in measured}
    known = {name for row in values.values() for name in row}
    names = _leading(known, values) if metric is None else [metric]
    if metric is not None and metric not in known:
        near = ", ".join(sorted(name for name in known if metric.split("_")[0] in name)[:5])
        raise SpecError(f"no run of this cell has a reading named {metric}", f"near it: {near or 'none'}")
    blocks: list[Block] = [_reading_table("Readings by run", measured, values, names)] if measured else []
    if metric is not None:
        blocks += [_phases(measured, metric)]
    rest = sorted(known - set(names), key=lambda name: (not _differs(name, values), name))
    texts = [name for name in rest if _is_long(name, values)]
    others: list[Block] = [
        _reading_table("Other readings", measured, values, [name for name in rest if name not in texts])
    ]
    if texts:
        others.append(Listing(tuple(line for name in texts for line in _text_lines(name, measured, values))))
    folded = (Details(words(f"the other {plural(len(rest), 'reading')}"), tuple(others)),)
    summary = words("One row a reading, one column a run." if measured else "No run measured anything.")
    return Section("readings", "Readings by run", summary, tuple(blocks), folded if measured and metric is None else ())


def samples(measured: list[Measured]) -> Section:
    """Time of every generation and every step; nothing is averaged away."""
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
        f"{label(run)} generation {item.number}: {' '.join(map(str, item.step_ns))}"
        for run, record in measured
        for item in record.generations
        if item.step_ns
    )
    folded = [Details(words("each step's time as a line"), tuple(lines))] if lines else []
    if raw:
        folded.append(Details(words("every sample, in nanoseconds"), (Verbatim(raw, "samples in nanoseconds"),)))
    return Section(
        "samples", "Samples", words("Wall time of the one-token steps, all kept."), tuple(blocks), tuple(folded)
    )


def _leading(known: set[str], values: Values) -> list[str]:
    """Gating readings that differ between runs, then the figures of every report, then the other gating readings."""
    gating = sorted(known & GATING, key=lambda name: (not _differs(name, values), name))
    moved = [name for name in gating if _differs(name, values)]
    return list(dict.fromkeys((*moved, *(name for name, _, _ in METRICS), *gating)))


def _differs(name: str, values: Values) -> bool:
    return len({row.get(name) for row in values.values()}) > 1


def _is_long(name: str, values: Values) -> bool:
    return any(
        isinstance(text, str) and len(text) > LONGEST_IN_TABLE for text in (r.get(name) for r in values.values())
    )


def _text_lines(name: str, measured: list[Measured], values: Values) -> list[Inlines]:
    """One line for each text that a reading has, with the runs that gave it."""
    runs: dict[Shown | None, list[str]] = {}
    for run, _ in measured:
        runs.setdefault(values[run.run_id].get(name), []).append(label(run))
    who = {text: "every run" if len(runs) == 1 else ", ".join(labels) for text, labels in runs.items()}
    return [words(Name(name), f" of {who[text]}: {_reading(text, name)}") for text in runs]


def _reading_table(caption: str, measured: list[Measured], values: Values, names: list[str]) -> Table:
    columns = (Column("Reading"), *(Column(label(run), "right") for run, _ in measured))
    rows = tuple(
        (words(ReadingName(name)), *(words(_reading(values[run.run_id].get(name), name)) for run, _ in measured))
        for name in names
    )
    return Table(caption, columns, rows)


def _reading(value: Shown | None, name: str) -> str:
    if value is None:
        return NOT_RECORDED
    return value if isinstance(value, str) else exact(value, unit_of(name))


def _phases(measured: list[Measured], metric: str) -> Block:
    columns = (Column("Run"), Column("Generation", "right"), Column("Phase"), Column("Value", "right"))
    rows = tuple(
        (
            words(label(run)),
            words(str(generation.number)),
            words(phase),
            words(exact(counters[metric], unit_of(metric))),
        )
        for run, record in measured
        for generation in record.generations
        for phase, counters in generation.counters.items()
        if metric in counters
    )
    return Table("By generation and phase", columns, rows) if rows else Paragraph(words("Not recorded by generation."))


def _sample_row(run: RunFact, item: Generation) -> tuple[Inlines, ...]:
    steps = sorted(item.step_ns)
    times = [steps[0], steps[len(steps) // 2], steps[-1]] if steps else []
    shown = [f"{fixed(value / 1e6)} ms" for value in times] or ["none"] * 3
    return (
        words(label(run)),
        words(f"{item.number}{' warm-up' if item.warmup else ''}"),
        words(f"{fixed(item.prefill_ns / 1e6)} ms"),
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
    title = f"{label(run)}, generation {item.number}"
    return Spark(title, points, f"{fixed(low / 1e6)} ms", f"{fixed(high / 1e6)} ms")
