"""`assay status`, `watch` and `gate`: where sweeps stand, why they wait, and what the gate says."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from jobs.errors import NotJudged
from jobs.store import Queue, Store
from jobs.verdict import Verdict
from orchestrator.commands.shown import shown
from orchestrator.commands.terminal import (
    IdArgument,
    JsonOption,
    StoreOption,
    now,
    open_store,
    say,
    say_json,
    say_table,
    settings_for,
)
from orchestrator.settings import Settings
from orchestrator.stop import StopFlag, pause

SHOWN_EVENTS = 12
SHOWN_WAITS = 20


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("status")(status)
    app.command("watch")(watch)
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


def watch(
    sweep: Annotated[str | None, typer.Argument(metavar="ID", help="one sweep; all of them without it")] = None,
    once: Annotated[bool, typer.Option("--once", help="say it once and end")] = False,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.5, max=3600.0)] = 2.0,
    store: StoreOption = None,
) -> None:
    """Follow the queue: runs done, blocks running, why each other block waits; ends when nothing is open.

    A line that stays as it was is not said again.
    """
    opened = open_store(settings_for(store))
    try:
        sweep_id = None if sweep is None else opened.resolve_id(sweep, "swp")
        said: set[str] = set()
        with StopFlag(polls=True).listening() as stop:
            while not stop():
                queue = opened.queue(sweep_id)
                lines = [*_progress(opened, sweep_id), *waiting_lines(queue)]
                for line in lines:
                    if line not in said:
                        say(f"{now():%H:%M:%S} {line}")
                said = set(lines)
                if once or not _is_open(opened, sweep_id):
                    return
                pause(every, stop)
        raise typer.Exit(128 + stop.number)  # the usual way to leave it, and nothing that it began
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
        say_json(summary(sweep_id, verdict))
    else:
        say(f"{verdict.outcome} (exit {verdict.exit_code}): {shown(verdict.headline)}")


def summary(sweep_id: str, verdict: Verdict) -> dict[str, Any]:
    """A verdict in a few words."""
    return {"sweep": sweep_id, "outcome": verdict.outcome, "exit_code": verdict.exit_code,
            "headline": verdict.headline, "next_step": verdict.next_step}  # fmt: skip


def _show_all(store: Store, as_json: bool) -> None:
    rows = store.sweeps()
    ids = [row.id for row in rows]
    counts, verdicts = store.progress(ids), store.outcomes(ids)
    if as_json:
        say_json([{**asdict(row), **asdict(counts[row.id])} for row in rows])
        return
    shown = []
    for row in rows:
        left, verdict = counts[row.id], verdicts.get(row.id)
        result = f"{verdict[0]}, exit {verdict[1]}" if verdict else "-"
        done = f"{left.complete}/{left.runs}"
        shown.append((row.id, row.name, row.state, done, result, f"{row.created_at:%Y-%m-%d %H:%M} UTC"))
    say_table("sweeps, newest first", ("id", "sweep", "state", "runs", "verdict", "submitted"), tuple(shown))


def _show_one(store: Store, sweep_id: str, as_json: bool) -> None:
    row, left, queue = store.sweep(sweep_id), store.pending(sweep_id), store.queue(sweep_id)
    events = store.last_events(sweep_id, SHOWN_EVENTS)
    if as_json:
        waiting = [asdict(one) for one in queue.waiting]
        say_json({**asdict(row), **asdict(left), "waiting": waiting, "events": [asdict(event) for event in events]})
        return
    say(f"{row.id} {row.name}: {row.state}")
    if row.retracted_reason is not None:
        say(shown(f"retracted {row.retracted_at:%Y-%m-%d %H:%M} UTC: {row.retracted_reason}"))
    say(
        f"runs: {left.complete} complete, {left.pending} pending, {left.exhausted} exhausted of {left.runs}; "
        f"{left.live_attempts} attempts under way, {left.leased_blocks} blocks leased"
    )
    for line in waiting_lines(queue):
        say(line)
    for event in events:
        change = f"{event.frm or 'new'} -> {event.target}" if event.target else event.kind
        say(shown(f"{event.at:%H:%M:%S} {event.subject} {change} {event.message}".rstrip()))


def _progress(store: Store, sweep_id: str | None) -> list[str]:
    """A line for each sweep that is looked at: how far it is, and its verdict once it has one."""
    rows = [row for row in store.sweeps() if row.state == "open"] if sweep_id is None else [store.sweep(sweep_id)]
    ids = [row.id for row in rows]
    lines, counts, verdicts = [], store.progress(ids), store.outcomes(ids)
    for row in rows:
        left, verdict = counts[row.id], verdicts.get(row.id)
        told = f": {verdict[0]}, exit {verdict[1]}" if verdict and row.state == "judged" else ""
        lines.append(
            shown(f"{row.id} {row.name}: {left.complete + left.exhausted}/{left.runs} runs, {row.state}{told}")
        )
    return lines


def _is_open(store: Store, sweep_id: str | None) -> bool:
    if sweep_id is not None:
        return store.sweep(sweep_id).state == "open"
    return any(row.state == "open" for row in store.sweeps())


def waiting_lines(queue: Queue) -> list[str]:
    """Why each block waits that does, the first ones of the queue; `--json` tells all."""
    lines = []
    for one in queue.waiting[:SHOWN_WAITS]:
        blocks = f"block {one.number}" if one.blocks == 1 else f"{one.blocks} blocks from block {one.number}"
        lines.append(shown(f"waits: {one.sweep_id} {one.cell}, {blocks}: {one.reason}"))
    hidden = sum(one.blocks for one in queue.waiting[SHOWN_WAITS:])
    return [*lines, f"waits: {hidden} more blocks"] if hidden else lines
