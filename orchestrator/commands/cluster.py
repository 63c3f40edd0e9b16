"""`assay submit`, `scheduler`, `cancel`, `rerun` and `ingest`: sweeps through a store that schedulers serve."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from ulid import ULID

from jobs.arm_packs import MOST_PACK_BYTES, pack_tree
from jobs.errors import JobsError, SpecError, StoreError
from jobs.model import Manifest
from jobs.provenance import harness_digest, own_root
from jobs.spec import load, plan
from jobs.store import Priority, Store
from orchestrator.commands.author import user
from orchestrator.commands.run import SizeOption
from orchestrator.commands.shown import shown
from orchestrator.commands.sweeps import show_verdict, stored_verdict
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
from orchestrator.outcome import Spool
from orchestrator.resolve import DryResolver, LocalResolver
from orchestrator.settings import Settings
from orchestrator.settle import ingest as ingest_spool
from orchestrator.stop import StopFlag, pause
from orchestrator.version import harness_version

WAIT_S = 2.0
Needed = Annotated[str, typer.Option("--store", metavar="URL", help="the store that the schedulers serve")]


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (submit, scheduler, cancel, rerun, ingest):
        app.command(command.__name__)(command)


def submit(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="a sweep file")],
    store: Needed,
    size: SizeOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="wait for the verdict and exit as it says")] = False,
    priority: Annotated[str, typer.Option("--priority", metavar="pr|nightly", help="gates go first")] = "pr",
    key: Annotated[str, typer.Option("--key", metavar="K", help="the same key again is the same sweep")] = "",
    as_json: JsonOption = False,
) -> None:
    """Put a sweep into a store, for a scheduler to run. Nothing runs here."""
    if priority not in get_args(Priority):
        raise SpecError(f"--priority {priority!r} is no priority", "give pr or nightly")
    given = settings_for(store)
    manifest = _planned(sweep, size, given)
    opened = open_store(given)
    try:
        sweep_id = opened.submit(
            shipped(manifest, opened),
            harness_digest(own_root()),
            harness_version(),
            key=key or f"submit-{ULID()}".lower(),
            priority=cast("Priority", priority),
            to_cards=True,
        )
        if not wait:
            _tell_submitted(opened, sweep_id, given, as_json)
            return
        with StopFlag(polls=True).listening() as stop:
            sys.stderr.write(f"sweep {sweep_id} is submitted; waiting for its verdict\n")
            while opened.sweep(sweep_id).state == "open" and not stop():
                pause(WAIT_S, stop)
        if stop():
            follow = f"assay watch {sweep_id}{given.store_words}; end it: assay cancel {sweep_id}{given.store_words}"
            sys.stderr.write(f"stopped waiting; the sweep stays submitted. Follow it: {follow}\n")
            raise typer.Exit(128 + stop.number)
        verdict = stored_verdict(opened, sweep_id, given)
    finally:
        opened.close()
    show_verdict(sweep_id, verdict, as_json)
    raise typer.Exit(verdict.exit_code)


def _planned(sweep: Path, size: str | None, given: Settings) -> Manifest:
    """Resolve models, prompts and arms here: what a scheduler's nodes run is what this host saw."""
    resolver = LocalResolver(given, tell=lambda line: print(shown(line), file=sys.stderr))
    spec = load(sweep, size)
    plan(spec, DryResolver(resolver, []))
    return plan(spec, resolver)


def shipped(manifest: Manifest, store: Store) -> Manifest:
    """The manifest with each arm's tree put into the store, for nodes that do not share this host's folders.

    One that is too large stays where it is, and that is said.
    """
    packs: dict[str, str] = {}
    for folder in {arm.python_path for arm in manifest.arms if arm.python_path}:
        with tempfile.TemporaryFile() as pack:
            packs[folder] = pack_tree(Path(folder), pack)
            if packs[folder]:
                store.put_pack(packs[folder], pack)
            else:
                limit = f"it packs to more than {MOST_PACK_BYTES >> 20} MiB"
                sys.stderr.write(f"{shown(folder)} is not shipped, for {limit}: every node must have it there\n")
    arms = tuple(arm.model_copy(update={"pack": packs.get(arm.python_path or "", "")}) for arm in manifest.arms)
    return manifest.model_copy(update={"arms": arms})


def _tell_submitted(store: Store, sweep_id: str, given: Settings, as_json: bool) -> None:
    left = store.pending(sweep_id)
    if as_json:
        say_json({"sweep": sweep_id, "runs": left.runs, "pending": left.pending, "store": given.store_shown})
    else:
        say(f"sweep {sweep_id}: {left.pending} of {left.runs} runs pending; follow it: "
            f"assay watch {sweep_id}{given.store_words}")  # fmt: skip


def scheduler(
    address: Annotated[str, typer.Option("--address", metavar="ADDR", help="of a Ray cluster, HOST:PORT or auto")],
    store: Needed,
    once: Annotated[bool, typer.Option("--once", help="end when nothing is open any more")] = False,
) -> None:
    """Serve a store on the cards of a Ray cluster, until stopped: claim, run, judge."""
    from orchestrator.scheduler import schedule

    given = settings_for(store)
    opened = open_store(given)
    try:
        raise typer.Exit(schedule(opened, address, given, once=once))
    finally:
        opened.close()


def cancel(
    sweep: IdArgument,
    store: StoreOption = None,
    reason: Annotated[str, typer.Option("--reason", metavar="WHY", help="stands in the store and the verdict")] = "",
    as_json: JsonOption = False,
) -> None:
    """Give up what is pending of a sweep: what runs is ended, what was measured stays, the rest reads as missing."""
    given = settings_for(store)
    opened = open_store(given)
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        who = user(given)
        cut = opened.cancel(sweep_id, f"cancelled by {who}" + (f": {reason}" if reason.strip() else ""))
        verdict = judge_sweep(opened, sweep_id, final=True)
        left = opened.pending(sweep_id)
    finally:
        opened.close()
    if as_json:
        say_json({"sweep": sweep_id, "cut_off": list(cut), "complete": left.complete, "given_up": left.exhausted,
                  "outcome": verdict.outcome})  # fmt: skip
    else:
        say(f"sweep {sweep_id}: {left.exhausted} runs given up, {left.complete} stay; {verdict.outcome}")


def rerun(
    sweep: IdArgument,
    store: StoreOption = None,
    key: Annotated[str, typer.Option("--key", metavar="K", help="the same key again is the same sweep")] = "",
    as_json: JsonOption = False,
) -> None:
    """Submit a sweep again, as it was: same manifest, new runs. The first one and its verdict stay."""
    given = settings_for(store)
    opened = open_store(given)
    try:
        row = opened.sweep(sweep)
        again = opened.submit(
            opened.manifest(row.id),
            harness_digest(own_root()),
            harness_version(),
            key=key or f"rerun-{ULID()}".lower(),
            request=row.request + 1,
            priority=row.priority,
            to_cards=True,
        )
        if not any(event.kind == "rerun" for event in opened.events(again)):  # the same key again
            opened.log_event(again, "rerun", f"of {row.id}")
        _tell_submitted(opened, again, given, as_json)
    finally:
        opened.close()


def ingest(
    spool: Annotated[Path, typer.Argument(metavar="SPOOL", help="a worker's spool, or a copy of it")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Store outcomes that a worker kept and no scheduler has taken. Each counts once, however often it is given.

    What cannot be stored is named, and does not keep the others from it; the exit code says that there was some.
    """
    if not spool.is_dir():
        raise SpecError(f"{spool} is no spool", "name the folder that holds a folder for each sweep")
    opened = open_store(settings_for(store))
    kept, sweeps, refused = 0, 0, list[JobsError]()
    try:
        held = Spool(spool)
        for sweep_id in held.sweeps():
            try:
                done = ingest_spool(opened, held, opened.sweep(sweep_id).id)
            except SpecError as foreign:
                remedy = "name the store that it was submitted to"
                refused.append(SpecError(f"sweep {sweep_id}: {foreign.message}", remedy))
                continue
            kept, sweeps = kept + done.kept, sweeps + 1
            refused += [StoreError(f"sweep {sweep_id}: {why}", f"it is kept in {file}") for file, why in done.aside]
    finally:
        opened.close()
    faults = [str(one) for one in refused]
    if as_json:
        say_json({"spool": str(spool), "sweeps": sweeps, "outcomes": kept, "faults": faults})
    else:
        say(f"{kept} outcomes of {sweeps} sweeps are stored")
    for fault in faults:
        sys.stderr.write(f"error: {shown(fault)}\n")
    raise typer.Exit(min((one.exit_code for one in refused), default=0))  # 2 before 4, as of several cells
