"""The command `assay`: puts the commands together, and turns every expected error into one line and its exit code."""

from __future__ import annotations

import sys
from typing import cast

import typer

from engine.errors import EngineError
from jobs.errors import JobsError
from orchestrator.cards import ProbeError
from orchestrator.commands import cards, db, engine, models, reports, run, sweeps
from orchestrator.place import HostLost
from orchestrator.version import harness_version

HOST_FAULT = 4
USAGE = 2
# typer names the subclasses only, and has moved the class itself between versions
UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

app = typer.Typer(
    help="Measures GPU regressions of an LLM decode engine and proves token identity.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (run, sweeps, reports, cards, models, db, engine):
    part.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"assay {harness_version()}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version"),
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    sys.exit(call(sys.argv[1:]))


def call(arguments: list[str]) -> int:
    """Run one command line; its exit code. Expected errors are one line on stderr."""
    try:
        code = app(arguments, prog_name="assay", standalone_mode=False)
    except UsageError as exc:
        return _usage(exc)
    except (JobsError, EngineError) as exc:
        return _fail(str(exc), exc.exit_code)
    except (ProbeError, HostLost, OSError) as exc:
        return _fail(str(exc), HOST_FAULT)
    return int(code or 0)


def _usage(exc: BaseException) -> int:
    """A command line that cannot be understood; one without any command gets the help instead of an error."""
    context = getattr(exc, "ctx", None)
    message = str(getattr(exc, "format_message", exc.__str__)())
    if type(exc).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{message}\n" if message else "")
        return USAGE
    path = context.command_path if context is not None else "assay"
    return _fail(f"{message.rstrip('.')} (see {path} --help)", USAGE)


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        sys.stderr.write(f"error: {line}\n")
    return code


if __name__ == "__main__":
    main()
