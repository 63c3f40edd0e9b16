"""`assay run`: a sweep from its file to its verdict, on this host."""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from ulid import ULID

from jobs import migrate
from jobs.errors import SpecError, StoreError
from jobs.model import Manifest
from jobs.order import run_order
from jobs.provenance import harness_digest, own_root
from jobs.spec import SweepSpec, load, plan
from jobs.store import Store
from orchestrator.cards import ProbeError
from orchestrator.commands.shown import shown
from orchestrator.commands.terminal import (
    IdArgument,
    JsonOption,
    StoreOption,
    open_store,
    out_folder,
    say,
    say_json,
    say_table,
    settings_for,
)
from orchestrator.conclude import Concluded, judge_sweep, make_folder, withdraw_reports, write_reports
from orchestrator.embedded import cards_of_host, run_embedded
from orchestrator.estimate import Estimate, estimate
from orchestrator.lost import HostLost, Stopped
from orchestrator.progress import SweepProgress
from orchestrator.resolve import DryResolver, LocalResolver
from orchestrator.resume import open_by_id, open_by_manifest
from orchestrator.settings import OUT_FOLDER, Settings
from orchestrator.stop import StopFlag
from orchestrator.summary import tables
from orchestrator.supervise import supervised
from orchestrator.version import harness_version

SweepArgument = Annotated[str, typer.Argument(metavar="SWEEP", help="a sweep file; with --resume also a sweep's id")]
OutFolderOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help=f"folder of the reports (default: {OUT_FOLDER})")
]
CardsOption = Annotated[str, typer.Option("--cards", metavar="auto|N", help="how many cards to use")]
SizeOption = Annotated[
    str | None, typer.Option("--size", metavar="NAME", help="a size that the sweep file names, such as full")
]
ResumeOption = Annotated[bool, typer.Option("--resume", help="go on with this sweep's newest unjudged submission")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="print cells, runs and time, and run nothing")]

CARDS = re.compile("[1-9][0-9]{0,17}")
MOST_CARDS = 1024


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("run")(run)
    app.command("resume")(resume)


def run(
    sweep: SweepArgument,
    size: SizeOption = None,
    store: StoreOption = None,
    out: OutFolderOption = None,
    cards: CardsOption = "auto",
    resume: ResumeOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a sweep here: base and head on the same clear card, then judge, report, and exit as the gate says."""
    given = settings_for(store, out)
    if dry_run:
        _asked(cards)
        _show_plan(sweep, size, given, as_json)
        return
    options = (f" --out {shlex.quote(str(out))}" if out else "") + given.store_words
    sized = f" --size {shlex.quote(size)}" if size else ""
    way_on = f"assay run {shlex.quote(sweep)}{sized} --resume{options}"
    done, sweep_id = run_here(sweep, given, cards, lambda _sweep_id: way_on, resume=resume, size=size)
    _show(done, sweep_id, given, as_json)
    raise typer.Exit(done.verdict.exit_code)


def resume(
    sweep: IdArgument,
    store: StoreOption = None,
    out: OutFolderOption = None,
    cards: CardsOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Go on here with an unjudged sweep: the same as `assay run ID --resume`. A scheduler goes on by itself."""
    run(sweep, None, store, out, cards, resume=True, dry_run=False, as_json=as_json)


def run_here(
    sweep: str,
    given: Settings,
    cards: str,
    way_on: Callable[[str], str],
    *,
    resume: bool = False,
    size: str | None = None,
    change: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> tuple[Concluded, str]:
    """Submit or reopen, run, judge and report; what came of it, and the sweep's id.

    `way_on`: the command that goes on with a sweep, by its id. `change`: what is submitted in place of the file's own.
    """
    out_folder(given.out)
    if not resume:  # which may turn out to name a sweep whose reports these are
        withdraw_reports(given.out)
    asked = _asked(cards)
    with StopFlag().listening() as stop:
        return _run(sweep, size, given, asked, resume, way_on, change, stop)


def _run(
    sweep: str,
    size: str | None,
    given: Settings,
    asked: int | None,
    resume: bool,
    way_on: Callable[[str], str],
    change: Callable[[Manifest], Manifest],
    stop: StopFlag,
) -> tuple[Concluded, str]:
    by_id = resume and not os.path.exists(sweep)  # noqa: PTH110 - Path.exists raises for a name that is too long
    if by_id and size:
        raise SpecError(f"--size {size!r} goes with a sweep file, and {sweep!r} is none", "leave it out with an id")
    spec = None if by_id else load(Path(sweep), size)
    if resume:
        _has_store(given, sweep, spec)
    with_store = open_store(given, migrate=True)
    try:
        make_folder(given.out)
        sweep_id, manifest = _submitted(with_store, sweep, spec, given, resume, change, stop)
        withdraw_reports(given.out)
        _work(with_store, sweep_id, manifest, asked, given, way_on(sweep_id), stop)
        verdict = judge_sweep(with_store, sweep_id)
        return write_reports(with_store, sweep_id, verdict, given.out, given.store_words), sweep_id
    finally:
        with_store.close()


def _asked(cards: str) -> int | None:
    if cards == "auto":
        return None
    if not CARDS.fullmatch(cards):
        remedy = f"give auto, or a whole number from 1 to {MOST_CARDS}"
        raise SpecError(f"--cards {cards!r} is no number of cards", remedy)
    if int(cards) > MOST_CARDS:
        raise SpecError(f"--cards {cards}: no host has as many", f"give auto, or at most {MOST_CARDS}")
    return int(cards)


def _has_store(given: Settings, sweep: str, spec: SweepSpec | None) -> None:
    """Raise SpecError when there is no store to resume from: one must not come into being by that."""
    if migrate.current(given.store_url).current is None:
        what = f"no id begins with {sweep!r}" if spec is None else f"no unjudged sweep {spec.form.sweep!r}"
        remedy = "name the store with --store" if spec is None else "name the store with --store, or leave --resume out"
        raise SpecError(f"{what} in this store: {given.store_shown} is not there or empty", remedy)


def _submitted(
    store: Store,
    sweep: str,
    spec: SweepSpec | None,
    given: Settings,
    resume: bool,
    change: Callable[[Manifest], Manifest],
    stop: StopFlag,
) -> tuple[str, Manifest]:
    """The sweep to work on: a fresh submission, or with `resume` an open one, by its id where there is no file."""
    harness = harness_digest(own_root())
    if spec is None:
        stop.polls = True
        return open_by_id(store, sweep, harness, given.store_words)
    sys.stderr.write("resolving models, prompts and arms\n")
    manifest = change(_planned(spec, given, stop))
    stop.polls = True
    if resume:
        return open_by_manifest(store, manifest, harness, given.store_words), manifest
    return store.submit(manifest, harness, harness_version(), key=f"run-{ULID()}".lower()), manifest


def _planned(spec: SweepSpec, given: Settings, stop: StopFlag) -> Manifest:
    """Resolve, which may build models and arms: either signal ends what is being built, and then this command.

    A dry look comes first: what it refuses must not wait for a build.
    """
    resolver = LocalResolver(given, tell=lambda line: print(shown(line), file=sys.stderr))
    try:
        plan(spec, DryResolver(resolver, []))
        return plan(spec, resolver)
    except (SpecError, OSError) as error:
        _blame_cache(given, error)
        raise
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was submitted\n")
        raise typer.Exit(128 + stop.number) from None


def _blame_cache(given: Settings, error: Exception) -> None:
    """Raise OSError that names the cache when that is what cannot be written: the user gave no folder here."""
    try:
        given.models.mkdir(parents=True, exist_ok=True)
        given.trees.mkdir(parents=True, exist_ok=True)
        writable = all(os.access(place, os.W_OK | os.X_OK) for place in (given.models, given.trees))
        why = "" if writable else os.strerror(errno.EACCES)
    except OSError as cause:
        why = cause.strerror or str(cause)
    if why:
        remedy = "set XDG_CACHE_HOME to a folder that can be"
        raise OSError(errno.EIO, f"the cache {given.cache} cannot be written: {why} ({remedy})") from error


def _work(
    store: Store,
    sweep_id: str,
    manifest: Manifest,
    asked: int | None,
    given: Settings,
    how_to_resume: str,
    stop: StopFlag,
) -> None:
    """Run what is pending. On a stop or a loss say how to go on, and exit."""
    before = store.pending(sweep_id)
    first = manifest.cells[0]  # device and class of cards are the sweep's: all cells have the same
    chosen = cards_of_host(given, asked, first.settings.device, first.card_class, first.card_memory_bytes)
    kind = "simulated card" if chosen[0].simulated else chosen[0].name
    sys.stderr.write(f"sweep {sweep_id}: {before.pending} runs pending, on {len(chosen)} x {kind}\n")

    def drive() -> None:
        with SweepProgress(before.runs, before.runs - before.pending) as progress:
            run_embedded(store, sweep_id, manifest, chosen, given, tell=progress, stop=stop)

    try:
        supervised(drive, stop)
    except (Stopped, KeyboardInterrupt):
        sys.stderr.write(f"stopped; every child is ended. Go on with: {how_to_resume}\n")
        raise typer.Exit(128 + (stop.number or signal.SIGINT)) from None
    except (HostLost, ProbeError, StoreError) as lost:
        raise HostLost(f"{lost} (go on with: {how_to_resume})") from lost


def _show(done: Concluded, sweep_id: str, given: Settings, as_json: bool) -> None:
    verdict = done.verdict
    paths = {"comment": str(done.comment), "page": str(done.page), "verdict": str(done.document)}
    if as_json:
        say_json(
            {
                "sweep": sweep_id,
                "outcome": verdict.outcome,
                "exit_code": verdict.exit_code,
                "headline": verdict.headline,
                "next_step": verdict.next_step,
                "cells": [{"cell": cell.cell, "outcome": cell.outcome} for cell in verdict.cells],
                "store": given.store_shown,
                **paths,
            }
        )
        return
    for table in tables(verdict):
        say_table(table.title, table.headings, table.rows)
        say("".join(f"{line}\n" for line in table.worse))
    say(f"{verdict.outcome}: {shown(verdict.headline)}\nnext: {verdict.next_step}\n")
    say(f"sweep    {sweep_id}")
    for word, path in {**paths, "store": given.store_shown}.items():
        say(f"{word:<8} {path}")


def _show_plan(sweep: str, size: str | None, given: Settings, as_json: bool) -> None:
    """What a sweep would do; builds no model and opens no store for writing."""
    resolver = DryResolver(LocalResolver(given), [])
    manifest = plan(load(Path(sweep), size), resolver)
    expected = estimate(manifest, given.store_url)
    document = _plan_document(manifest, expected, resolver)
    if as_json:
        say_json(document)
        return
    rows = tuple(
        (c["cell"], ", ".join(c["arms"]), str(c["blocks"]), str(c["runs"]), c["time"]) for c in document["cells"]
    )
    say_table(f"{manifest.name}: {manifest.description}", ("cell", "arms", "blocks", "runs", "time"), rows)
    cells = "1 cell" if len(manifest.cells) == 1 else f"{len(manifest.cells)} cells"
    say(f"\n{cells}, {document['runs']} runs, {expected.words}")
    for name in resolver.absent:
        say(f"model {name} is not built yet; the run will build it")
    for name, command in resolver.unbuilt.items():
        say(f"arm {name} is not built yet; the run will build it with: {command}")


def _plan_document(manifest: Manifest, expected: Estimate, resolver: DryResolver) -> dict[str, Any]:
    cells = [
        {
            "cell": cell.cell,
            "arms": list(cell.arms),
            "blocks": cell.blocks,
            "runs": sum(len(run_order(cell, block)) for block in range(cell.blocks)),
            "order": list(run_order(cell, 0)),
            "time": expected.cell_words(cell.cell),
        }
        for cell in manifest.cells
    ]
    return {
        "sweep": manifest.name,
        "cells": cells,
        "runs": sum(int(str(cell["runs"])) for cell in cells),
        "time": expected.words,
        "models_to_build": resolver.absent,
        "arms_to_build": resolver.unbuilt,
        "manifest_digest": manifest.digest(),
    }
