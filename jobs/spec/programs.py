"""Arms that are programs of their own: what a sweep file must say of the adapter `command`, and may say of it alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from engine.counters import COUNTERS
from jobs.errors import SpecError
from jobs.gates import GATING
from jobs.reads import UNITS, units_of
from jobs.spec.faults import nearest
from jobs.spec.form import ArmForm, FigureForm, ReadsForm, SweepForm
from jobs.spec.yaml_lines import Path_, Source


def check_programs(form: SweepForm, arms: Mapping[str, ArmForm], source: Source) -> Iterator[SpecError]:
    """Every fault of arms that name a command, or should; `arms` with what they take from others filled in."""
    for name, arm in arms.items():
        path: Path_ = ("arms", name)
        if arm.adapter != "command":
            for key in ("command", "counters", "reads"):
                if getattr(arm, key) is not None:
                    yield source.error((*path, key), f"{key} goes with adapter: command", "add adapter: command")
            continue
        if arm.command is None or not arm.command.strip():
            yield source.error(path, f"arm {name!r} has no command", 'command: "./bench.sh", run by bash in its tree')
        if arm.source == "installed":
            remedy = "give it a checkout, path or git ref as source"
            yield source.error((*path, "source"), f"arm {name!r} is installed: there is no tree to run in", remedy)
        if form.run.arithmetic == "none":
            remedy = "a plan-only sweep has native arms alone"
            yield source.error((*path, "adapter"), "a program cannot plan alone", remedy)
        yield from _counters(form, arm, path, source)
        if arm.reads is not None:
            yield from _reads(form, arm, arm.reads, (*path, "reads"), source)


def _counters(form: SweepForm, arm: ArmForm, path: Path_, source: Source) -> Iterator[SpecError]:
    """What a program says it counts: known names, and one at least that can gate where counters do."""
    if arm.counters is not None and arm.reads is not None:
        remedy = "those of reads.counters are what it tells; remove the key"
        yield source.error((*path, "counters"), "counters goes without reads", remedy)
    for index, name in enumerate(arm.counters or ()):
        if name not in COUNTERS:
            yield source.error((*path, "counters", index), f"unknown counter {name!r}", nearest(name, COUNTERS))
    if form.gate.exact != "off" and not GATING & set(told_counters(arm)):
        remedy = f"list some of {', '.join(sorted(GATING))}, or gate: {{exact: off}}"
        yield source.error(path, "the exact gate is on, and the arm's program tells no counter that gates", remedy)


def told_counters(arm: ArmForm) -> tuple[str, ...]:
    """The counters that a program says it tells."""
    return tuple(arm.reads.counters) if arm.reads is not None else arm.counters or ()


def _reads(form: SweepForm, arm: ArmForm, reads: ReadsForm, path: Path_, source: Source) -> Iterator[SpecError]:
    if reads.format == "text" and reads.generations is not None:
        remedy = "each match of a pattern is a generation; remove the key"
        yield source.error((*path, "generations"), "generations is a path into JSON", remedy)
    if reads.ids is None and form.gate.identity != "off":
        yield source.error(path, "the identity gate is on, and no ids are read", "ids: where they stand")
    batches = [*form.matrix.get("batch", ()), *(a.config.get("batch") for a in form.arms.values())]
    if any(isinstance(batch, int) and batch > 1 for batch in batches):
        remedy = "a program that prints lines of the child protocol can"
        yield source.error(path, "a mapping cannot tell the sequences of a batch apart", remedy)
    for name, figure in reads.counters.items():
        place: Path_ = (*path, "counters", name)
        if name not in COUNTERS:
            yield source.error(place, f"unknown counter {name!r}", nearest(name, COUNTERS))
        elif figure.unit not in units_of(name):
            yield source.error(
                (*place, "unit"),
                f"{name} is counted in {COUNTERS[name].unit}, and cannot be in {figure.unit!r}",
                f"known: {', '.join(units_of(name))}",
            )
    for word in ("prefill", "steps"):
        timed: FigureForm | None = getattr(reads, word)
        if timed is not None and timed.unit not in UNITS["ns"]:
            known = f"known: {', '.join(UNITS['ns'])}"
            yield source.error((*path, word, "unit"), f"{word} is a time, and cannot be in {timed.unit!r}", known)
    if reads.format == "text":
        yield from _patterns(reads, path, source)


def _patterns(reads: ReadsForm, path: Path_, source: Source) -> Iterator[SpecError]:
    """Patterns must be ones, with the one group that holds what is meant."""
    places: list[tuple[Path_, str | None]] = [((*path, word), getattr(reads, word)) for word in ("ids", "stop")]
    figures = {"prefill": reads.prefill, "steps": reads.steps}
    places += [((*path, word, "at"), figure.at) for word, figure in figures.items() if figure is not None]
    places += [((*path, "counters", name, "at"), figure.at) for name, figure in reads.counters.items()]
    places += [((*path, "config", name), at) for name, at in reads.config.items()]
    for place, pattern in places:
        if pattern is None:
            continue
        try:
            groups = re.compile(pattern, re.MULTILINE).groups
        except re.error as error:
            yield source.error(place, f"{pattern!r} is no pattern: {error}", "see Python's re for what one may hold")
            continue
        if groups != 1:
            remedy = "put ( ) around what is meant, and (?: ) around anything else"
            yield source.error(place, f"{pattern!r} has {groups} groups", remedy)
