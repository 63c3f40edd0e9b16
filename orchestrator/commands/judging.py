"""`assay judge`: a sweep judged again from what the store holds."""

from __future__ import annotations

from typing import Any

import typer

from jobs import rejudged
from jobs.errors import NotJudged, StoreError
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.commands.shown import MOST_OF_AN_ERROR, shown
from orchestrator.commands.sweeps import show_verdict, summary
from orchestrator.commands.terminal import (
    IdArgument,
    JsonOption,
    StoreOption,
    open_store,
    say,
    say_json,
    settings_for,
)
from orchestrator.conclude import judge_sweep

SHOWN_CELLS = 20
SHOWN_ROWS = 5


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("judge")(judge)


def judge(sweep: IdArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Judge a sweep from what the store holds, and keep the verdict; exits as the gate says.

    One with runs pending stays open: `assay run ID --resume` goes on with it. An earlier verdict is kept too, and what
    this one says otherwise is shown, cell by cell.
    """
    given = settings_for(store)
    opened = open_store(given)
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        left = opened.pending(sweep_id)
        if left.pending and left.live_attempts:
            raise NotJudged(
                f"sweep {sweep_id} is being run: {left.pending} of {left.runs} runs pending",
                f"wait for it; after a crash go on with: assay run {sweep_id} --resume{given.store_words}",
            )
        before, unread = _verdict_before(opened, sweep_id)
        verdict = judge_sweep(opened, sweep_id)
    finally:
        opened.close()
    since = None if before is None else rejudged.compare(before, verdict)
    if as_json:
        say_json({**summary(sweep_id, verdict), "since": None if since is None else _written(since)})
    else:
        show_verdict(sweep_id, verdict, as_json=False)
        for line in [unread] if unread else [] if since is None else change_lines(since):
            say(shown(line, MOST_OF_AN_ERROR))
    raise typer.Exit(verdict.exit_code)


def _verdict_before(store: Store, sweep_id: str) -> tuple[Verdict | None, str]:
    """The verdict in force, or what is to be said of one that this version cannot read; it is kept all the same."""
    try:
        return store.verdict(sweep_id), ""
    except StoreError as error:
        return None, f"an earlier verdict is kept, and cannot be compared with: {error}"


def _written(since: rejudged.Rejudged) -> dict[str, Any]:
    return {
        "from": {"outcome": since.frm, "exit_code": since.frm_exit, "rules": since.frm_rules},
        "to": {"outcome": since.to, "exit_code": since.to_exit, "rules": since.to_rules},
        "because": since.because,
        "sweep": since.lines,
        "cells": [
            {"cell": cell.cell, "from": cell.frm, "to": cell.to, "why": cell.why, "rows": cell.rows}
            for cell in since.cells
        ],
    }


def change_lines(since: rejudged.Rejudged) -> list[str]:
    """What another verdict says otherwise, a line a cell and a line for each row of it, the first ones of many."""
    if since.because == "neither" and since.is_same:
        return ["The same verdict as before, on the same input by the same rules."]
    because = {
        "rules": f"the rules changed, {since.frm_rules} -> {since.to_rules}, on the same input",
        "input": f"the stored input changed, and the rules, {since.to_rules}, did not",
        "both": f"the rules changed, {since.frm_rules} -> {since.to_rules}, and so did the stored input",
        "neither": f"neither the input nor the rules, {since.to_rules}, changed",
    }[since.because]
    if since.is_same:
        return [f"Every cell as before; the earlier verdict is kept: {because}."]
    frm, to = f"{since.frm} (exit {since.frm_exit})", f"{since.to} (exit {since.to_exit})"
    lines = [f"Before: {frm}, now: {to}; the earlier verdict is kept: {because}."]
    lines += [f"  {line}" for line in since.lines]
    for cell in since.cells[:SHOWN_CELLS]:
        lines.append(f"  {cell.cell}: {cell.frm} -> {cell.to}" + (f"; {cell.why}" if cell.why else ""))
        lines += [f"    {row}" for row in cell.rows[:SHOWN_ROWS]]
        if (hidden := len(cell.rows) - SHOWN_ROWS) > 0:
            lines.append(f"    and {hidden} more rows")
    if (hidden := len(since.cells) - SHOWN_CELLS) > 0:
        lines.append(f"  and {hidden} more cells; --json tells all")
    return lines
