"""Arms that another engine runs: what a sweep file must say of a program or of a library, and may say of it alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from engine.counters import COUNTERS
from jobs.adapters import kernel
from jobs.adapters.peer import Peer
from jobs.adapters.registry import PEERS, PROGRAMS
from jobs.errors import SpecError
from jobs.gates import GATING
from jobs.reads import UNITS, units_of
from jobs.spec.faults import nearest
from jobs.spec.form import ArmForm, FigureForm, ReadsForm, SweepForm
from jobs.spec.yaml_lines import Path_, Source

KERNEL_AXES = ("model", "prompt", "warmups")
"""Axes that a matrix of kernels may have."""


def check_programs(form: SweepForm, arms: Mapping[str, ArmForm], source: Source) -> Iterator[SpecError]:
    """Every fault of arms that are not native, or should not be; `arms` with what they take from others filled in."""
    for name, arm in arms.items():
        path: Path_ = ("arms", name)
        adapter = arm.adapter or "native"
        if adapter in PEERS:
            yield from _peer(form, arm, PEERS[adapter], path, source)
        elif arm.options is not None:
            remedy = f"those are {', '.join(PEERS)}; what an engine of ours is told stands under config"
            yield source.error((*path, "options"), "options goes with an adapter of another engine's library", remedy)
        if adapter == kernel.NAME:
            yield from _kernel(form, arm, path, source)
        if adapter in PROGRAMS:
            yield from _known(form, arm, path, source)
        elif adapter != "command":
            for key in ("command", "counters", "reads"):
                if getattr(arm, key) is not None:
                    yield source.error((*path, key), f"{key} goes with adapter: command", "add adapter: command")
            continue
        yield from _runs(form, name, arm, path, source)
        yield from _counters(arm, path, source)
        yield from _gating(form, arm, path, source)
        if arm.reads is not None:
            yield from _reads(form, arm, arm.reads, (*path, "reads"), source)


def is_program(arm: ArmForm) -> bool:
    """Whether an arm is run by a command in its own tree."""
    return arm.adapter == "command" or arm.adapter in PROGRAMS


def _runs(form: SweepForm, name: str, arm: ArmForm, path: Path_, source: Source) -> Iterator[SpecError]:
    """What every program needs: a command, and a tree to run in."""
    if arm.command is None or not arm.command.strip():
        yield source.error(path, f"arm {name!r} has no command", 'command: "./bench.sh", run by bash in its tree')
    if arm.source == "installed":
        remedy = "give it a checkout, path or git ref as source"
        yield source.error((*path, "source"), f"arm {name!r} is installed: there is no tree to run in", remedy)
    if form.run.arithmetic == "none":
        remedy = "a plan-only sweep has native arms alone"
        yield source.error((*path, "adapter"), "a program cannot plan alone", remedy)


def _known(form: SweepForm, arm: ArmForm, path: Path_, source: Source) -> Iterator[SpecError]:
    """A program whose output is known brings its own mapping, and tells of no warm-up."""
    for key in ("counters", "reads"):
        if getattr(arm, key) is not None:
            yield source.error((*path, key), f"{arm.adapter} is read as it is known", "remove the key")
    if form.run.warmups:
        remedy = "run: {warmups: 0}, and ask for them in the command"
        yield source.error(("run", "warmups"), f"{arm.adapter} does not print its warm-ups", remedy)


def reads_any_model(arm: ArmForm) -> bool:
    """Whether what runs an arm takes files that no engine of ours would load."""
    peer = PEERS.get(arm.adapter or "native")
    return is_program(arm) or is_kernel(arm) or (peer is not None and peer.any_model)


def is_kernel(arm: ArmForm) -> bool:
    """Whether an arm is asked for kernels alone."""
    return arm.adapter == kernel.NAME


def _kernel(form: SweepForm, arm: ArmForm, path: Path_, source: Source) -> Iterator[SpecError]:
    """A kernel alone has no engine config, nothing to plan and no neighbour of another kind."""
    places: dict[str, Path_] = {name: ("matrix", name) for name in form.matrix if name not in KERNEL_AXES}
    places |= {name: (*path, "config", name) for name in arm.config}
    for name, place in places.items():
        yield source.error(place, f"a kernel alone cannot be given {name}", "remove it: a case's file says all")
    if form.run.arithmetic == "none":
        yield source.error((*path, "adapter"), "a kernel alone cannot be planned", "run: {arithmetic: full}")
    for name, model in form.models.items():
        if model.path is None:
            remedy = "path: FILE, a case such as those of sweeps/kernels"
            yield source.error(("models", name), f"model {name!r} is no kernel's case", remedy)


def _peer(form: SweepForm, arm: ArmForm, peer: Peer, path: Path_, source: Source) -> Iterator[SpecError]:
    """A library is what is installed here; it takes its own options, and few settings of our engine."""
    if arm.source != "installed":
        remedy = "source: installed; another version of it goes by env: {PYTHONPATH: DIR}"
        yield source.error((*path, "source"), f"{peer.name} is a library, and no tree is run", remedy)
    if arm.build is not None:
        yield source.error((*path, "build"), f"{peer.name} is a library: there is nothing to build", "remove the key")
    if form.run.arithmetic == "none":
        yield source.error(
            (*path, "adapter"), f"{peer.name} cannot plan alone", "a plan-only sweep has native arms alone"
        )
    for name, value in (arm.options or {}).items():
        yield from _option(peer, name, value, (*path, "options", name), source)
    places: dict[str, Path_] = {name: ("matrix", name) for name in form.matrix if name not in ("model", "prompt")}
    places |= {name: (*path, "config", name) for name in arm.config}
    for name in places.keys() - peer.serves:
        remedy = "give it to the native arms alone, under their config"
        yield source.error(places[name], f"{peer.name} cannot be given {name}", remedy)
    yield from _gating(form, arm, path, source)


def _option(peer: Peer, name: str, value: object, path: Path_, source: Source) -> Iterator[SpecError]:
    option = peer.options.get(name)
    if option is None:
        yield source.error(path, f"{peer.name} has no option {name!r}", nearest(name, peer.options))
        return
    due = str if option.default is None else type(option.default)
    if type(value) is not due and not (value is None and option.default is None):
        yield source.error(path, f"{name} is {value!r}, and no {_TYPES[due]}", option.meaning)
    elif option.among and value not in option.among:
        yield source.error(path, f"{name} is {value!r}", f"one of {', '.join(option.among)}")


_TYPES = {str: "text", int: "whole number", bool: "true or false"}


def _counters(arm: ArmForm, path: Path_, source: Source) -> Iterator[SpecError]:
    """What a program says it counts: known names."""
    if arm.counters is not None and arm.reads is not None:
        remedy = "those of reads.counters are what it tells; remove the key"
        yield source.error((*path, "counters"), "counters goes without reads", remedy)
    for index, name in enumerate(arm.counters or ()):
        if name not in COUNTERS:
            yield source.error((*path, "counters", index), f"unknown counter {name!r}", nearest(name, COUNTERS))


def _gating(form: SweepForm, arm: ArmForm, path: Path_, source: Source) -> Iterator[SpecError]:
    """Where counters gate, an engine must tell one that can."""
    if form.gate.exact != "off" and not GATING & set(told_counters(arm)):
        remedy = "gate: {exact: off}"
        if arm.adapter == "command":
            remedy = f"list some of {', '.join(sorted(GATING))}, or {remedy}"
        yield source.error(path, "the exact gate is on, and the arm's program tells no counter that gates", remedy)


def told_counters(arm: ArmForm) -> tuple[str, ...]:
    """The counters that a program or a library says it tells."""
    adapter = arm.adapter or "native"
    if adapter == kernel.NAME:
        return kernel.COUNTERS
    if adapter in PEERS:
        return PEERS[adapter].counters
    if adapter in PROGRAMS:
        return PROGRAMS[adapter]
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
