"""`assay compare` and `history`: two runs side by side, and a series over sweeps. Both show, and neither judges."""

from __future__ import annotations

from typing import Annotated

import typer

from jobs import two_runs
from orchestrator.commands.terminal import JsonOption, StoreOption, open_store, say, say_json, settings_for
from reports import two_runs as shown_runs

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="a run's id or a unique beginning of it")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("compare")(compare)


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
