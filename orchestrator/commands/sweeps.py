"""`assay status` and `gate`: where sweeps stand, and what the gate says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from jobs.errors import NotJudged
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.commands.shown import shown
from orchestrator.commands.terminal import (
    IdArgument,
    JsonOption,
    StoreOption,
    open_store,
    say,
    say_json,
    say_table,
    settings_for,
)
from orchestrator.settings import Settings

SHOWN_EVENTS = 12


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("gate")(gate)


def status(
    sweep: Annotated[str | None, typer.Argument(metavar="ID", help="one sweep; all of them without it")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the sweeps of a store, or how far one is and why it waits."""
    opened = open_store(settings_for(store))
    try:
        if sweep is None:
            _show_all(opened, as_json)
        else:
            _show_one(opened, opened.resolve_id(sweep, "swp"), as_json)
    finally:
        opened.close()


def gate(sweep: IdArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Print one line and exit as a sweep's verdict says: 0 pass, 1 worse, 3 nothing proven, 4 a fault of the host."""
    given = settings_for(store)
    opened = open_store(given)
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        verdict = stored_verdict(opened, sweep_id, given)
    finally:
        opened.close()
    show_verdict(sweep_id, verdict, as_json)
    raise typer.Exit(verdict.exit_code)


def stored_verdict(store: Store, sweep_id: str, given: Settings) -> Verdict:
    """The verdict of a sweep. Raises NotJudged when it has none yet."""
    verdict = store.verdict(sweep_id)
    if verdict is None:
        left = store.pending(sweep_id)
        raise NotJudged(
            f"sweep {sweep_id} is not judged yet: {left.pending} of {left.runs} runs are pending",
            f"go on with: assay run {sweep_id} --resume{given.store_words}",
        )
    return verdict


def show_verdict(sweep_id: str, verdict: Verdict, as_json: bool) -> None:
    """Print a verdict in one line, or as JSON."""
    if as_json:
        say_json({"sweep": sweep_id, "outcome": verdict.outcome, "exit_code": verdict.exit_code,
                  "headline": verdict.headline, "next_step": verdict.next_step})  # fmt: skip
    else:
        say(f"{verdict.outcome} (exit {verdict.exit_code}): {shown(verdict.headline)}")


def _show_all(store: Store, as_json: bool) -> None:
    rows = store.sweeps()
    counts = {row.id: store.pending(row.id) for row in rows}
    if as_json:
        say_json([{**asdict(row), **asdict(counts[row.id])} for row in rows])
        return
    shown = []
    for row in rows:
        verdict = store.verdict(row.id)
        left = counts[row.id]
        result = f"{verdict.outcome}, exit {verdict.exit_code}" if verdict else "-"
        done = f"{left.complete}/{left.runs}"
        shown.append((row.id, row.name, row.state, done, result, f"{row.created_at:%Y-%m-%d %H:%M} UTC"))
    say_table("sweeps, newest first", ("id", "sweep", "state", "runs", "verdict", "submitted"), tuple(shown))


def _show_one(store: Store, sweep_id: str, as_json: bool) -> None:
    row, left, events = store.sweep(sweep_id), store.pending(sweep_id), store.events(sweep_id)
    if as_json:
        say_json({**asdict(row), **asdict(left), "events": [asdict(event) for event in events]})
        return
    say(f"{row.id} {row.name}: {row.state}")
    say(
        f"runs: {left.complete} complete, {left.pending} pending, {left.exhausted} exhausted of {left.runs}; "
        f"{left.live_attempts} attempts under way, {left.leased_blocks} blocks leased"
    )
    for event in events[-SHOWN_EVENTS:]:
        change = f"{event.frm or 'new'} -> {event.target}" if event.target else event.kind
        say(shown(f"{event.at:%H:%M:%S} {event.subject} {change} {event.message}".rstrip()))
