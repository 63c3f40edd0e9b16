"""`assay cards`: the cards of this host, and whether each is clear."""

from __future__ import annotations

import psutil
import typer

from orchestrator.cards import CardProbe, ProbeError
from orchestrator.clear import ClearPolicy, judge
from orchestrator.commands.terminal import JsonOption, say, say_json, say_table, settings_for
from orchestrator.nvml import NvmlProbe


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cards")(cards)


def cards(as_json: JsonOption = False) -> None:
    """List this host's cards: clear, or not and why."""
    try:
        probe: CardProbe = NvmlProbe()
    except ProbeError as exc:
        if as_json:
            say_json({"cards": [], "why_none": str(exc), "host": settings_for().host})
        else:
            say(f"no card on this host: {exc}\nsweeps run on simulated cards here")
        return
    visible = frozenset(psutil.pids())
    rows, documents = [], []
    for card in probe.cards():
        snapshot = probe.snapshot(card.uuid)
        verdict = judge(snapshot, ClearPolicy(), "before", visible=visible)
        why = "; ".join(verdict.reasons)
        rows.append((str(card.index), card.name, card.uuid, card.driver, verdict.verdict, why))
        documents.append(
            {"index": card.index, "name": card.name, "uuid": card.uuid, "driver": card.driver,
             "verdict": verdict.verdict, "grade": verdict.grade, "reasons": list(verdict.reasons),
             "snapshot": snapshot.document()}
        )  # fmt: skip
    probe.close()
    if as_json:
        say_json({"cards": documents, "host": settings_for().host})
    else:
        say_table("cards", ("index", "card", "uuid", "driver", "state", "why"), tuple(rows))
