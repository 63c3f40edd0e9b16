"""The runs of a cell in the order they ran, their attempts, and the commands that run them again."""

from __future__ import annotations

import json
import shlex

from jobs.adapters.command import request_variables
from jobs.adapters.native import request_document
from jobs.adapters.peer_run import peer_command
from jobs.adapters.registry import PEERS
from jobs.model import ArmPlan, CellInput, JudgeInput, RunFact, RunRecord
from jobs.redact import redact
from reports.blocks import Block, Column, Inlines, Name, Section, State, Struck, Table, Verbatim, words
from reports.format import integer, plural
from reports.traffic import setting

Measured = tuple[RunFact, RunRecord]


def measured(cell: CellInput) -> list[Measured]:
    """The runs that measured something, in the order they ran."""
    return [(run, run.record) for run in _ordered(cell) if run.record is not None]


def label(run: RunFact) -> str:
    """A run's short name: its arm, block and place in the block, and that it counts no more where it was retracted."""
    return f"{run.arm} {run.block}.{run.position}{' (retracted)' if run.retracted else ''}"


def build(cell: CellInput) -> Section:
    """Every run of the cell, and every attempt that does not count."""
    runs = _ordered(cell)
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
        head = (Column("Run"), Column("Attempt", "right"), Column("State"), Column("Why", prose=True))
        blocks.append(Table("Attempts that do not count", head, tuple(aside)))
    complete = sum(run.state == "complete" for run in runs)
    order = " ".join(run.arm for run in runs)
    summary = words(f"{integer(complete)} of {plural(len(runs), 'run')} complete; order of arms: {order}.")
    return Section("runs", "Runs", summary, tuple(blocks))


def reruns(doc: JudgeInput, cell: CellInput) -> Section:
    """A command for each arm."""
    arms = [arm for arm in doc.manifest.arms if arm.name in cell.plan.arms]
    lines = tuple(
        f"# {arm.name}: {arm.unbuilt}" if arm.unbuilt else f"{rerun_command(arm, cell)}  # {arm.name}" for arm in arms
    )
    return Section("rerun", "Run it again", words("One run of each arm, by hand."), (Verbatim(lines, "commands"),))


def rerun_command(arm: ArmPlan, cell: CellInput) -> str:
    """The shell command that runs one arm of a cell by hand, every value quoted."""
    if arm.command:
        return _program_command(arm, cell)
    if arm.adapter in PEERS:
        return _peer_command(arm, cell)
    plan, settings = cell.plan, cell.plan.settings
    config = {**plan.config, **arm.config}
    prompts = [word for ids in plan.prompts(arm) for word in ("--prompt-ids", " ".join(map(str, ids)))]
    words_ = ["assay", "engine", "run"]
    if arm.python_path is not None:
        words_ = ["env", f"PYTHONPATH={arm.python_path}", "python", "-P", "-m", "engine", "run"]
    words_ += ["--model", plan.model_path, *prompts, "--tokens", str(settings.tokens)]
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
        words_ += [f"--{name.replace('_', '-')}", setting(value)]
    return " ".join(shlex.quote(word) for word in words_)


def _program_command(arm: ArmPlan, cell: CellInput) -> str:
    """A program in its tree, its lines on the terminal."""
    asked = request_variables(cell.plan, arm, _card(arm, cell))
    given = {**asked, "ASSAY_SCRATCH": "/tmp", **({} if arm.reads else {"ASSAY_RESULT": "/dev/stdout"})}
    words_ = ["env", f"--chdir={arm.python_path}", *(f"{name}={value}" for name, value in given.items()), *arm.command]
    return redact(" ".join(shlex.quote(word) for word in words_))


def _peer_command(arm: ArmPlan, cell: CellInput) -> str:
    """A library's child, its request on standard input and its lines on the terminal."""
    asked = json.dumps({**request_document(cell.plan, arm, _card(arm, cell)), "options": arm.options})
    env = ["env", *(f"{name}={value}" for name, value in arm.env.items())] if arm.env else []
    child = [*env, *peer_command(PEERS[arm.adapter], "python"), "run", "--request=/dev/stdin", "--result-fd=1"]
    told, ran = (" ".join(shlex.quote(word) for word in words_) for words_ in (["printf", "%s", asked], child))
    return f"{told} | {ran}"


def _card(arm: ArmPlan, cell: CellInput) -> str:
    """The card that an arm ran on, by its first run."""
    cards = (run.record.device.get("uuid") for run in _ordered(cell) if run.record is not None and run.arm == arm.name)
    return str(next(cards, "SIM-0"))


def _ordered(cell: CellInput) -> list[RunFact]:
    return sorted(cell.runs, key=lambda run: (run.block, run.position))


def _run_row(run: RunFact) -> tuple[Inlines, ...]:
    record = run.record
    state = (
        State("retracted", "bad") if run.retracted else State(run.state, "good" if run.state == "complete" else "warn")
    )
    return (
        words(str(run.block)),
        words(str(run.position)),
        words(Struck(run.arm) if run.retracted else run.arm),
        words(Struck(run.run_id) if run.retracted else Name(run.run_id)),
        words(state, f" ({run.retracted})" if run.retracted else ""),
        words(", ".join(f"{attempt.number} {attempt.state}" for attempt in run.attempts) or "none"),
        words("none" if record is None or record.exit_code is None else str(record.exit_code)),
        words("" if record is None else record.started_at),
        words("" if record is None else record.ended_at),
    )
