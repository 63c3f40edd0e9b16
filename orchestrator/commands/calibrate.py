"""`assay calibrate`: a sweep's base against itself, through the real path, and the noise kept by card and scenario."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from jobs.calibration import DEFAULT_BLOCKS, against_itself, is_against_itself, measured
from jobs.errors import SpecError
from jobs.noise import Calibration
from jobs.stats import LEAST_PLANNED
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.commands.run import CardsOption, OutFolderOption, SizeOption, run_here
from orchestrator.commands.shown import shown
from orchestrator.commands.sweeps import stored_verdict
from orchestrator.commands.terminal import (
    JsonOption,
    StoreOption,
    open_store,
    say,
    say_json,
    say_table,
    settings_for,
)
from orchestrator.settings import Settings

MOST_BLOCKS = 1000
NOTHING_KNOWN = 3
OUT_FOLDER = Path(".assay/calibration")


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate")(calibrate)


def calibrate(
    sweep: Annotated[
        str, typer.Argument(metavar="SWEEP", help="a sweep file; the id of a calibration goes on with it")
    ],
    blocks: Annotated[
        int, typer.Option("--blocks", metavar="N", help="blocks of each cell", min=LEAST_PLANNED, max=MOST_BLOCKS)
    ] = DEFAULT_BLOCKS,
    size: SizeOption = None,
    store: StoreOption = None,
    out: OutFolderOption = None,
    cards: CardsOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure the noise of a sweep's cells on the cards here: base against base. Later sweeps show it beside times."""
    given = settings_for(store, out or OUT_FOLDER)
    options = given.store_words if out is None else f" --out {shlex.quote(str(out))}{given.store_words}"
    sweep_id = _run(sweep, size, given, cards, blocks, options)
    opened = open_store(given)
    try:
        verdict = stored_verdict(opened, sweep_id, given)
        found = _kept(opened, sweep_id, verdict)
    finally:
        opened.close()
    left_out = {cell.cell: _why(verdict, cell.cell) for cell in verdict.cells if cell.cell not in found}
    _show(sweep_id, verdict, found, left_out, as_json)
    raise typer.Exit(verdict.exit_code or (NOTHING_KNOWN if left_out else 0))


def _run(sweep: str, size: str | None, given: Settings, cards: str, blocks: int, options: str) -> str:
    """Run the A/A sweep of a file, or what is left of one; its id. `options`: with which it is gone on with."""
    by_id = not os.path.exists(sweep)  # noqa: PTH110 - Path.exists raises for a name that is too long
    if by_id:
        opened = open_store(given)
        try:
            row = opened.sweep(sweep)
            if not is_against_itself(opened.manifest(row.id)):
                raise SpecError(f"sweep {row.id} is no calibration", "give a sweep file, or the id of a calibration")
        finally:
            opened.close()
        if row.state == "judged":
            return row.id
    _, sweep_id = run_here(
        sweep,
        given,
        cards,
        lambda sweep_id: f"assay calibrate {sweep_id}{options}",
        resume=by_id,
        size=size,
        change=lambda manifest: against_itself(manifest, blocks),
    )
    return sweep_id


def _kept(store: Store, sweep_id: str, verdict: Verdict) -> dict[str, tuple[Calibration, ...]]:
    """Store the noise of each cell whose A/A is clean; by cell, those that have any."""
    clean = {cell.cell for cell in verdict.cells if cell.exit_code == 0}
    doc = store.judge_input(sweep_id)
    found = {cell.plan.cell: measured(doc, cell) for cell in doc.cells if cell.plan.cell in clean}
    store.write_calibrations(sweep_id, [one for rows in found.values() for one in rows])
    return {cell: rows for cell, rows in found.items() if rows}


def _why(verdict: Verdict, cell: str) -> str:
    """Why a cell has no calibration."""
    blocking = next((one for one in verdict.findings if one.cell == cell and one.exit_code), None)
    return blocking.message if blocking is not None else f"fewer than {LEAST_PLANNED} blocks hold times of both arms"


def _show(
    sweep_id: str,
    verdict: Verdict,
    found: dict[str, tuple[Calibration, ...]],
    left_out: dict[str, str],
    as_json: bool,
) -> None:
    if as_json:
        told = [one.model_dump(mode="json", exclude={"at"}) for rows in found.values() for one in rows]
        say_json({"sweep": sweep_id, "outcome": verdict.outcome, "calibrations": told, "left_out": left_out})
        return
    for cell, rows in found.items():
        headings = ("metric", "card", "blocks", "sigma of a block", f"found in {DEFAULT_BLOCKS} blocks")
        lines = tuple(
            (one.metric, f"{one.card} {one.uuid}", str(one.blocks), f"{one.sigma:.3%}", _least(one)) for one in rows
        )
        say_table(cell, headings, lines)
    for cell, why in left_out.items():
        say(f"not calibrated: {shown(cell)}: {shown(why)}")
    say(f"sweep {sweep_id}: {verdict.outcome}")


def _least(one: Calibration) -> str:
    return "beyond any use" if one.smallest_detectable is None else f"{one.smallest_detectable:+.2%}"
