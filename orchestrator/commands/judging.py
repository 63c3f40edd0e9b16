"""`assay judge`: a sweep judged again from what the store holds."""

from __future__ import annotations

import typer

from jobs.errors import NotJudged
from orchestrator.commands.sweeps import show_verdict
from orchestrator.commands.terminal import IdArgument, JsonOption, StoreOption, open_store, settings_for
from orchestrator.conclude import judge_sweep


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("judge")(judge)


def judge(sweep: IdArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Judge a sweep from what the store holds, and keep the verdict; exits as the gate says.

    One with runs pending stays open: `assay run ID --resume` goes on with it.
    """
    opened = open_store(settings_for(store))
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        left = opened.pending(sweep_id)
        if left.pending and left.live_attempts:
            raise NotJudged(f"sweep {sweep_id} is being run: {left.pending} of {left.runs} runs pending", "wait for it")
        verdict = judge_sweep(opened, sweep_id)
    finally:
        opened.close()
    show_verdict(sweep_id, verdict, as_json)
    raise typer.Exit(verdict.exit_code)
