"""What all commands share: options, where output goes, how a store is opened."""

from __future__ import annotations

import io
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from jobs.errors import SpecError
from jobs.store import Store
from orchestrator.commands.shown import shown, shown_lines
from orchestrator.settings import STORE_FILE, Settings, settings

StoreOption = Annotated[
    str | None, typer.Option("--store", metavar="URL", help=f"store: a URL or an SQLite file (default: {STORE_FILE})")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON")]
OutOption = Annotated[Path | None, typer.Option("--out", metavar="PATH", help="write there instead of printing")]
IdArgument = Annotated[str, typer.Argument(metavar="ID", help="a sweep's id or a unique beginning of it")]


WIDEST = 100_000
"""Columns that no table fills."""


def settings_for(store: str | None = None, out: Path | None = None) -> Settings:
    """Settings of this process."""
    return settings(os.environ, store=store, out=out)


def open_store(given: Settings, *, migrate: bool = False) -> Store:
    """The store, for reading unless `migrate`. Raises StoreError with a remedy."""
    if migrate and given.store_url == f"sqlite:///{given.cwd / STORE_FILE}":
        (given.cwd / STORE_FILE).parent.mkdir(parents=True, exist_ok=True)  # ours; any other folder is the user's
    store = Store.open(given.store_url, now, migrate=migrate)
    store.follow_server_time()
    return store


def out_file(out: Path | None) -> Path | None:
    """The file that --out names. Raises SpecError for a folder."""
    if out is not None and out.is_dir():
        raise SpecError(f"--out {out} is a folder", "name the file to write")
    return out


def out_folder(out: Path) -> Path:
    """The folder that --out names, which need not exist. Raises SpecError when a file stands there or above it."""
    for place in (out, *out.parents):
        if os.path.lexists(place):
            if not place.is_dir():
                raise SpecError(f"--out {out}: {place} is no folder", "name the folder to write into")
            break
    return out


def now() -> datetime:
    """The time, aware."""
    return datetime.now(UTC)


def say(text: str) -> None:
    """Print plain text on stdout; controls of a terminal that came with it are escaped."""
    text = shown_lines(text)
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def say_json(document: Any) -> None:
    """Print a JSON document on stdout."""
    say(json.dumps(document, indent=2, sort_keys=True, default=str, allow_nan=False))


def say_table(title: str, headings: tuple[str, ...], rows: tuple[tuple[str, ...], ...]) -> None:
    """Print a table on stdout, whole: where a terminal is too narrow for it, a line for each cell of each row."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(shown(title)), title_justify="left", header_style="bold", show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(shown(cell)) for cell in row))
    plain = Console(width=WIDEST, file=io.StringIO(), highlight=False)
    with plain.capture() as drawn:
        plain.print(table)
    widest = max(map(len, drawn.get().splitlines()))
    console = Console(width=None if sys.stdout.isatty() else widest, highlight=False)
    if widest <= console.width:
        console.print(table)
        return
    say(title)
    broad = max(map(len, headings))
    for row in rows:
        cells = zip(headings, row, strict=True)
        say("".join(f"  {heading:<{broad}}  {shown(cell)}\n" for heading, cell in cells) + "\n")
