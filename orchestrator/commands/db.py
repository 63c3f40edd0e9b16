"""`assay db`: bring a store to the newest revision, or see whether it is there."""

from __future__ import annotations

import typer

from jobs import migrate
from orchestrator.commands.terminal import JsonOption, StoreOption, say, say_json, settings_for
from orchestrator.settings import STORE_FILE


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
        say_json({"store": given.store_url, "before": before.current, "after": after.current})
    elif before.is_current:
        say(f"{given.store_url} is at the newest revision, {after.current}")
    else:
        say(f"{given.store_url}: {before.current or 'empty'} -> {after.current}")


def check(store: StoreOption = None, as_json: JsonOption = False) -> None:
    """Succeed only if a store exists and is at the newest revision."""
    given = settings_for(store)
    state = migrate.check(given.store_url)
    if as_json:
        say_json({"store": given.store_url, "revision": state.current})
    else:
        say(f"{given.store_url} is at the newest revision, {state.current}")
