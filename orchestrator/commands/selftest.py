"""`assay selftest`: what is planted in the engine is found under its name, and an engine against itself is not."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.errors import SpecError
from orchestrator.commands.terminal import JsonOption, out_folder, say, say_json, say_table
from orchestrator.conclude import make_folder
from orchestrator.lost import Stopped
from orchestrator.selftest.run import Bench, Report, Tried, chosen, selftest
from orchestrator.selftest.stage import Stage
from orchestrator.stop import StopFlag

OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", metavar="WORD", help="those whose name holds this word; may be repeated")
]
KeepOption = Annotated[
    Path | None, typer.Option("--keep", metavar="DIR", help="a new folder for stores and reports, which then stay")
]
TIME = (
    "time: not planted here; of 2,000 seeded sweeps without a change none read WORSE or BETTER, and a slowdown of 10 % "
    "was found in 99.5 % at a noise of 2 % a run (docs/results/time-decisions.md)"
)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("selftest")(run_selftest)


def run_selftest(only: OnlyOption = None, keep: KeepOption = None, as_json: JsonOption = False) -> None:
    """Plant defects in a copy of the engine, run each the whole way on a simulated card, and say what was found."""
    defects, clean = chosen(only or ())
    with StopFlag(polls=True).listening() as stop, _folder(keep) as folder:
        bench = Bench.on(Stage(folder, os.environ, stop))
        try:
            report = selftest(bench, defects, clean, _tell)
        except Stopped:
            sys.stderr.write("stopped; every child is ended\n")
            raise typer.Exit(128 + (stop.number or signal.SIGINT)) from None
    _show(report, as_json)
    raise typer.Exit(0 if report.is_good else 1)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """The folder to work in; a temporary one, unless it is to be kept."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="assay-selftest-") as folder:
            yield Path(folder)
        return
    make_folder(out_folder(keep), ())
    if any(keep.iterdir()):
        raise SpecError(f"--keep {keep} is not empty", "name a new folder")
    yield keep.resolve()


def _tell(one: Tried) -> None:
    sign = "ok" if one.is_right else "ALARM" if one.kind == "clean" else "MISSED"
    sys.stderr.write(f"{sign:<6} {one.seconds:5.1f} s  {one.name}: {one.outcome}\n")


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        say_json(_document(report))
        return
    if report.planted:
        rows = tuple(_row(one, "found" if one.is_right else "MISSED") for one in report.planted)
        say_table("planted", ("defect", "class", "due", "got", "", "what was said"), rows)
        kinds = tuple((kind, f"{found}/{planted}") for kind, found, planted in report.kinds())
        found = len(report.planted) - len(report.missed)
        say("")
        say_table("by class", ("class", "detected/planted"), (*kinds, ("all", f"{found}/{len(report.planted)}")))
    if report.clean:
        rows = tuple(_row(one, "quiet" if one.is_right else "ALARM") for one in report.clean)
        say("")
        say_table("clean, base against itself", ("runs", "class", "due", "got", "", "what was said"), rows)
    say(f"\nfalse alarms: {len(report.alarms)} of {len(report.clean)} A/A runs\n{TIME}")


def _row(one: Tried, word: str) -> tuple[str, ...]:
    said = one.said if len(one.said) <= 80 else f"{one.said[:79]}…"
    return (one.name, one.kind, f"{one.due} {one.due_code}", f"{one.outcome} {one.code}", word, said)


def _document(report: Report) -> dict[str, Any]:
    return {
        "planted": [asdict(one) for one in report.planted],
        "clean": [asdict(one) for one in report.clean],
        "by_class": {kind: {"detected": found, "planted": planted} for kind, found, planted in report.kinds()},
        "false_alarms": len(report.alarms),
        "clean_runs": len(report.clean),
        "time": TIME,
        "good": report.is_good,
    }
