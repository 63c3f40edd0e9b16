"""`assay db`: bring a store to the newest revision, or see whether it is there."""

from __future__ import annotations

import typer

from jobs import migrate
from jobs.errors import StoreError
from orchestrator.commands.terminal import JsonOption, StoreOption, open_store, say, say_json, settings_for
from orchestrator.settings import STORE_FILE, Settings

MOST_SWEEPS = 2**31 - 1


def add_to(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Look after a store.", no_args_is_help=True)
    group.command("upgrade")(upgrade)
    group.command("check")(check)
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
