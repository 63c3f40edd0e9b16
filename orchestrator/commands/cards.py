"""`assay cards`: the cards of this host or of a cluster, and whether each is clear."""

from __future__ import annotations

from dataclasses import asdict

import psutil
import typer

from orchestrator.cards import CardProbe, ProbeError
from orchestrator.clear import ClearPolicy, judge
from orchestrator.commands.terminal import (
    JsonOption,
    StoreOption,
    open_store,
    say,
    say_json,
    say_table,
    settings_for,
)
from orchestrator.nvml import NvmlProbe


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("cards")(cards)


def cards(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """List this host's cards, or with --store those that its schedulers serve: clear, or not and why."""
    if store is not None:
        _of_cluster(store, as_json)
        return
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


def _of_cluster(store: str, as_json: bool) -> None:
    """Cards as their schedulers last saw them: clear, busy with what, unknown and why, drained and until when."""
    opened = open_store(settings_for(store))
    try:
        found = opened.cards()
    finally:
        opened.close()
    if as_json:
        say_json({"cards": [asdict(row) for row in found]})
        return
    if not found:
        say("no scheduler has served this store yet")
        return
    rows = tuple(
        (row.host, row.name, f"{row.memory_bytes / 2**30:.1f} GiB" if row.memory_bytes else "-", row.uuid,
         row.state, f"{row.since:%Y-%m-%d %H:%M:%S}",
         f"{row.until:%H:%M:%S}" if row.until else "-", row.reason or "-")
        for row in found
    )  # fmt: skip
    say_table("cards, times in UTC", ("host", "card", "memory", "uuid", "state", "since", "until", "why"), rows)
