"""`assay compare` and `history`: two runs side by side, and a series over sweeps. Both show, and neither judges."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs import two_runs
from jobs.store import HISTORY_SWEEPS
from orchestrator.commands.terminal import JsonOption, StoreOption, open_store, say, say_json, settings_for
from reports import history as shown_series
from reports import two_runs as shown_runs

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="a run's id or a unique beginning of it")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("compare")(compare)
    app.command("history")(history)


def compare(left: RunArgument, right: RunArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Show two runs side by side, of one sweep or of two: settings, card, digests, tokens, counters, times."""
    opened = open_store(settings_for(store))
    try:
        runs = [opened.run(opened.resolve_id(one, "run")) for one in (left, right)]
    finally:
        opened.close()
    found = two_runs.compare(*runs)
    if as_json:
        say_json(found.written())
        return
    say(shown_runs.render(found))


def history(
    series: Annotated[
        str, typer.Argument(metavar="SERIES", help="a counter's or metric's name, or a series' id (ser_...)")
    ],
    cell: Annotated[str | None, typer.Option("--cell", help="only scenarios whose name holds this")] = None,
    arm: Annotated[str | None, typer.Option("--arm", help="only this arm, such as head")] = None,
    last: Annotated[int, typer.Option("--last", min=1, max=10_000, help="of the newest sweeps")] = HISTORY_SWEEPS,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a counter or metric of a scenario over sweeps, with the points where it changed: advice, and no verdict."""
    opened = open_store(settings_for(store))
    try:
        found = opened.histories(series, cell=cell, arm=arm, last=last)
    finally:
        opened.close()
    if as_json:
        say_json([one.written() for one in found])
        return
    say("\n".join(map(shown_series.render, found)))
