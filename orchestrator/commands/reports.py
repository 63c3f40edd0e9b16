"""`assay report` and `explain`: a verdict in every form, and any cell down to its samples."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from jobs.errors import SpecError
from jobs.redact import redacted
from orchestrator.commands.sweeps import stored_verdict
from orchestrator.commands.terminal import (
    IdArgument,
    JsonOption,
    OutOption,
    StoreOption,
    open_store,
    out_file,
    out_folder,
    say,
    say_json,
    settings_for,
)
from orchestrator.conclude import make_folder, write_site
from reports import schema
from reports.explain import explain as explain_cell
from reports.explain import find_cell
from reports.render import LimitTooSmall, render
from reports.render.site import INDEX


class Form(StrEnum):
    """What a report can be."""

    comment = "comment"
    html = "html"
    json = "json"
    junit = "junit"
    text = "text"


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("report")(report)
    app.command("explain")(explain)


def _schema(wanted: bool) -> None:
    if wanted:
        say(schema.published())
        raise typer.Exit


SchemaOption = Annotated[
    bool,
    typer.Option("--schema", callback=_schema, is_eager=True, help="print the JSON Schema of the JSON form, and end"),
]


def report(
    sweep: IdArgument,
    form: Annotated[Form, typer.Option("--format", help="which form")] = Form.text,
    out: OutOption = None,
    limit: Annotated[
        int | None, typer.Option("--limit", metavar="CHARS", help="most characters of a comment (default: 65536)")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
    _schema: SchemaOption = False,
) -> None:
    """Render a sweep's verdict: a PR comment, a page (with --out, a folder of pages), JSON, JUnit XML or text."""
    form = Form.json if as_json else form
    out = out_folder(out) if form is Form.html and out is not None else out_file(out)
    given = settings_for(store)
    opened = open_store(given)
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        verdict = stored_verdict(opened, sweep_id, given)
        if form is Form.html and out is not None:
            make_folder(out, (INDEX,))
            say(str(write_site(opened, sweep_id, verdict, out, given.store_words)))
            return
    finally:
        opened.close()
    try:
        text = render(verdict, form.value, limit=limit, store=given.store_words)
    except LimitTooSmall as exc:
        raise SpecError(str(exc)) from exc
    _give(text, out)


def explain(
    sweep: IdArgument,
    cell: Annotated[str, typer.Argument(metavar="CELL", help="a cell's name or a unique part of it")],
    metric: Annotated[str | None, typer.Option("--metric", help="only this counter or metric")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Go from a cell to its runs, samples, certificates, log tails, tokens and the command that reruns it."""
    given = settings_for(store)
    opened = open_store(given)
    try:
        sweep_id = opened.resolve_id(sweep, "swp")
        verdict, doc = stored_verdict(opened, sweep_id, given), opened.judge_input(sweep_id)
    finally:
        opened.close()
    if as_json:
        found = find_cell(doc, cell)
        judged = [row for row in verdict.cells if row.cell == found.plan.cell]
        say_json(
            {
                "input": redacted(found.model_dump(mode="json")),
                "verdict": judged[0].model_dump(mode="json") if judged else None,
            }
        )
        return
    say(explain_cell(verdict, doc, cell, metric))


def _give(text: str, out: Path | None) -> None:
    if out is None:
        say(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    say(str(out))
