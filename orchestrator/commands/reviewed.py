"""`assay bless`, `waive` and `retract`: what people decide about results, each with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from engine.out_file import check_out
from jobs.blessing import golden_of
from jobs.errors import SpecError
from jobs.reviewed import ANY, TOKENS, Waiver
from jobs.spec.faults import parse
from jobs.spec.reviewed_form import GoldensForm, WaiversForm, goldens_of, waivers_of
from jobs.spec.reviewed_write import add_entry, read_list
from jobs.spec.yaml_lines import Source
from jobs.store.rows import new_id
from jobs.verdict import Finding, Verdict
from orchestrator.commands.author import author
from orchestrator.commands.sweeps import stored_verdict
from orchestrator.commands.terminal import (
    IdArgument,
    JsonOption,
    StoreOption,
    now,
    open_store,
    say,
    say_json,
    settings_for,
)
from reports.explain import find_cell

CellArgument = Annotated[str, typer.Argument(metavar="CELL", help="a cell's name or a unique part of it")]
ReasonOption = Annotated[str, typer.Option("--reason", metavar="WHY", help="stands wherever it has an effect")]
ByOption = Annotated[str | None, typer.Option("--by", metavar="WHO", help="who decides (default: git's user here)")]
SHOWN_FINDINGS = 5


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (bless, waive, retract):
        app.command(command.__name__)(command)


def bless(
    sweep: IdArgument,
    cell: CellArgument,
    reason: ReasonOption,
    arm: Annotated[str | None, typer.Option("--arm", metavar="ARM", help="whose ids (default: head's)")] = None,
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="the file of goldens")] = Path("goldens.yaml"),
    by: ByOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the ids of an arm the golden of their cell, in a file that is to be reviewed; it supersedes the last one."""
    given = settings_for(store)
    _require(reason, "the golden", "say why these ids are right")
    check_out(file, "--file")
    held = read_list(file, "goldens")
    known = () if held is None else goldens_of(parse(GoldensForm, held), held)
    opened = open_store(given)
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        verdict = stored_verdict(opened, sweep_id, given)
        doc = opened.judge_input(sweep_id)
        found = find_cell(doc, cell)
        made = golden_of(
            doc,
            verdict,
            found,
            arm,
            golden_id=new_id("gld", now()),
            reason=reason,
            by=by or author(given),
            now=now(),
            supersedes=next((one.id for one in reversed(known) if one.cell == found.plan.cell), ""),
        )
        entry = made.model_dump(mode="json")
        add_entry(file, "goldens", entry if made.supersedes else {k: v for k, v in entry.items() if k != "supersedes"})
        opened.write_golden(made)  # not before the file holds it
    finally:
        opened.close()
    if as_json:
        say_json({"golden": made.id, "file": str(file), **entry})
        return
    old = f"; it supersedes {made.supersedes}" if made.supersedes else ""
    say(f"golden {made.id}: {len(made.streams[0].ids)} ids of {made.arm} in {made.cell}, in {file}{old}")
    say(_in_force("goldens", file, doc.manifest.source_text))


def waive(
    sweep: IdArgument,
    cell: Annotated[str, typer.Argument(metavar="CELL", help="a cell's name, or a pattern over names")],
    outcome: Annotated[str, typer.Option("--class", metavar="CLASS", help="of the finding, such as REGRESSED")],
    metric: Annotated[str, typer.Option("--metric", metavar="NAME", help=f"of the finding; {TOKENS}, or {ANY!r}: any")],
    expires: Annotated[str, typer.Option("--expires", metavar="DAY", help="the last day, as 2026-12-31")],
    evidence: Annotated[str, typer.Option("--evidence", metavar="WHAT", help="where it can be looked up")],
    reason: ReasonOption,
    file: Annotated[Path, typer.Option("--file", metavar="FILE", help="the file of waivers")] = Path("waivers.yaml"),
    by: ByOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Accept a finding of a sweep until a day, in a file that is to be reviewed; it counts once base holds it."""
    given = settings_for(store)
    today = now().date()
    entry = {
        "cell": cell, "metric": metric, "class": outcome, "reason": reason, "evidence": evidence,
        "written": today.isoformat(), "expires": expires, "by": by or author(given),
    }  # fmt: skip
    made = _waiver(entry)
    if made.expires < today:
        raise SpecError(f"--expires {expires} is past: today, UTC, is {today}", "give a day to come")
    check_out(file, "--file")
    held = read_list(file, "waivers")
    if held is not None:
        waivers_of(parse(WaiversForm, held), held)
    opened = open_store(given)
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        verdict = stored_verdict(opened, sweep_id, given)
        text = opened.manifest(sweep_id).source_text
    finally:
        opened.close()
    covered = _covered(verdict, made)
    add_entry(file, "waivers", entry)
    if as_json:
        say_json({"waiver": made.id, "file": str(file), "covers": len(covered), **entry})
        return
    say(f"waiver {made.id} of {made.words} until {expires}, in {file}; it covers {len(covered)} findings of {sweep_id}")
    say(_in_force("waivers", file, text))


def retract(
    subject: Annotated[str, typer.Argument(metavar="ID", help="a run or a sweep, or a unique beginning of one")],
    reason: ReasonOption,
    by: ByOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Mark a run or a sweep as not to be trusted: nothing is deleted, and whatever rests on it is struck out."""
    given = settings_for(store)
    opened = open_store(given)
    try:
        found = opened.resolve_id(subject)
        if not found.startswith(("run_", "swp_")):
            raise SpecError(f"{found} is no run and no sweep", "retract the run, or the whole sweep")
        struck = opened.retract(found, reason, by or author(given))
    finally:
        opened.close()
    if as_json:
        say_json({
            "retracted": struck.id, "sweep": struck.sweep_id, "reason": struck.reason, "goldens": list(struck.goldens),
            "verdicts": [{"verdict": verdict, "sweep": sweep} for verdict, sweep in struck.verdicts],
            "comments": list(struck.comments),
        })  # fmt: skip
        return
    say(f"{struck.id} is retracted: {reason}")
    for verdict, sweep in struck.verdicts:
        say(f"struck out: verdict {verdict} of sweep {sweep}")
    for golden in struck.goldens:
        say(f"struck out: golden {golden}; bless the cell anew")
    for comment in struck.comments:
        say(f"posted before that: a comment at {comment}; post it anew")
    if struck.id.startswith("run_"):
        say(f"judge without it: assay judge {struck.sweep_id}{given.store_words}")


def _require(text: str, what: str, remedy: str) -> None:
    if not text.strip():
        raise SpecError(f"{what} gives no reason", remedy)


def _waiver(entry: dict[str, str]) -> Waiver:
    """The waiver that an entry makes. Raises SpecError for one that its file would be refused for."""
    source = Source("", "", {"waivers": [entry]})
    try:
        (made,) = waivers_of(parse(WaiversForm, source), source)
    except SpecError as error:
        raise SpecError(error.message, error.remedy) from error  # there is no file yet, and no line
    return made


def _covered(verdict: Verdict, waiver: Waiver) -> list[Finding]:
    """The findings of a verdict that a waiver would cover. Raises SpecError where there is none."""
    costly = [one for one in verdict.findings if one.exit_code]
    covered = [one for one in costly if waiver.covers(one.cell, one.outcome, one.subject)]
    if not covered:
        listed = [f"{one.outcome} of {one.subject or ANY!r} in {one.cell}" for one in costly[:SHOWN_FINDINGS]]
        raise SpecError(
            f"the verdict has no finding like that: {waiver.words}",
            f"it has: {'; '.join(listed)}" if listed else "nothing in it costs anything",
        )
    return covered


def _in_force(key: str, file: Path, source_text: str) -> str:
    """What is left to do: it counts once base's commit holds it, and where the sweep file names it."""
    unnamed = "" if f"{key}:" in source_text else f"; name the file in the sweep file: {key}: {file}"
    return f"it counts once base's commit holds it{unnamed}"
