"""`assay engine ...`: the engine's own command line, unchanged."""

from __future__ import annotations

import typer

from engine.__main__ import main


def add_to(app: typer.Typer) -> None:
    """Add the command; all that follows it is the engine's, --help too."""
    app.command(
        "engine",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        add_help_option=False,
    )(engine)


def engine(context: typer.Context) -> None:
    """Measure one run without sweep or store: run --model DIR --prompt TEXT ..."""
    try:
        code = main(context.args, "assay engine")
    except SystemExit as end:  # argparse leaves this way after --help
        code = int(end.code or 0)
    raise typer.Exit(code)
