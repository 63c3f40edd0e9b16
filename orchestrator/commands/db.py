"""`assay db`: bring a store to the newest revision or see whether it is there; carry a sweep to another store."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from engine.out_file import check_out
from jobs import migrate
from jobs.errors import SpecError, StoreError
from orchestrator.commands.terminal import IdArgument, JsonOption, StoreOption, open_store, say, say_json, settings_for
from orchestrator.settings import STORE_FILE, Settings

MOST_SWEEPS = 2**31 - 1


def add_to(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Look after a store.", no_args_is_help=True)
    group.command("upgrade")(upgrade)
    group.command("check")(check)
    group.command("export")(export)
    group.command("import")(import_)
    app.add_typer(group, name="db")


def upgrade(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Create a store, or bring it to the newest revision."""
    given = settings_for(store)
    if store is None:
        (given.cwd / STORE_FILE).parent.mkdir(parents=True, exist_ok=True)
    before = migrate.current(given.store_url)
    after = migrate.upgrade(given.store_url)
    if as_json:
        copy = None if after.backup is None else str(after.backup)
        say_json({"store": given.store_shown, "before": before.current, "after": after.current, "backup": copy})
    elif before.is_current:
        say(f"{given.store_shown} is at the newest revision, {after.current}")
    else:
        kept = f"; as it was: {after.backup}" if after.backup else ""
        say(f"{given.store_shown}: {before.current or 'empty'} -> {after.current}{kept}")


def check(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Succeed only if a store exists, is at the newest revision, and every sweep in it can be read."""
    given = settings_for(store)
    state = migrate.check(given.store_url)
    sweeps = _read_all(given)
    if as_json:
        say_json({"store": given.store_shown, "revision": state.current, "sweeps": sweeps})
    else:
        say(f"{given.store_shown} is at the newest revision, {state.current}; {sweeps} sweeps can be read")


def _need_replaceable(file: Path) -> None:
    """What stands there is replaced if it may be an export: a store, or anything else, is not."""
    if not file.is_file():
        return
    with file.open("rb") as found:
        if found.read(2) not in (b"", b"\x1f\x8b"):
            raise SpecError(f"FILE {file} holds something that is no export", "name another file, or remove that one")


def export(
    sweep: IdArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the file to write, replaced whole")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a judged sweep, with all that was measured, judged and retracted of it, into one file for another store."""
    check_out(file, "FILE")
    _need_replaceable(file)
    draft = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    opened = open_store(settings_for(store))
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        try:
            with draft.open("xb") as out:
                made = opened.export_sweep(sweep_id, out)
            draft.replace(file)
        except OSError as error:  # which names the draft
            raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        draft.unlink(missing_ok=True)
        opened.close()
    if as_json:
        say_json({"file": str(file), **asdict(made), "rows": made.rows})
        return
    say(f"{file}: sweep {sweep_id}, {made.rows} rows, {file.stat().st_size} bytes, sha256 {made.digest}")
    if made.rests_on:
        say(f"it rests on {', '.join(made.rests_on)}: export them too, and import them first")


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="what `assay db export` wrote")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take in a sweep that another store exported; the same file once more changes nothing."""
    given = settings_for(store)
    opened = open_store(given, migrate=store is None)
    try:
        made = opened.import_sweep(file)
    finally:
        opened.close()
    if as_json:
        say_json({"store": given.store_shown, **asdict(made)})
        return
    done = "was there already, as it is in the file" if made.was_there else f"imported, {made.rows} rows"
    say(f"sweep {made.sweep_id}: {done}; sha256 {made.digest}")
    if made.absent:
        say(f"it rests on {', '.join(made.absent)}, not in this store: what is retracted there is not told here")


def _read_all(given: Settings) -> int:
    """How many sweeps there are, each read as judge and reports do. Raises StoreError that names the first broken."""
    opened = open_store(given)
    try:
        rows = opened.sweeps(MOST_SWEEPS)
        for row in rows:
            try:
                opened.judge_input(row.id)
                opened.verdict(row.id)
                opened.events(row.id)
            except StoreError as error:
                raise StoreError(f"sweep {row.id}: {error.message}", error.remedy) from error
    finally:
        opened.close()
    return len(rows)
