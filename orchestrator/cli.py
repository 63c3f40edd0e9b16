"""The command `assay`: puts the commands together, and turns every expected error into one line and its exit code."""

from __future__ import annotations

import errno
import signal
import sys
import traceback
from importlib import import_module
from types import FrameType
from typing import NoReturn, cast

import typer

from engine.errors import EngineError
from engine.interrupt import Interrupted, exit_code
from jobs.errors import JobsError
from orchestrator.cards import ProbeError
from orchestrator.commands.shown import MOST_OF_AN_ERROR, shown
from orchestrator.commands.streams import READER_GONE, Streams, take_streams
from orchestrator.lost import HostLost
from orchestrator.version import harness_version

HOST_FAULT = 4
USAGE = 2
INTERRUPTS: list[Interrupted] = []
"""What has told this process to end outside of a sweep, which listens for itself."""
VERDICT_COMMANDS = ("run", "resume", "calibrate", "judge", "gate", "submit")
"""Commands whose exit code is a verdict's, and stays so when nobody reads their output."""
OS_REMEDIES = {
    errno.EACCES: "make it accessible, or name another place",
    errno.EPERM: "make it accessible, or name another place",
    errno.EROFS: "it is read-only; name another place",
    errno.ENOENT: "create it, or name another place",
    errno.EEXIST: "remove it, or name another place",
    errno.ENOTDIR: "a folder is needed there; name another place",
    errno.EISDIR: "a file is needed there; name another place",
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.ENAMETOOLONG: "name a shorter one",
}
ENGINE_COMMANDS = ("engine", "models")
"""Commands that end with the engine's own exit codes; those of all others are 0 to 4."""
# typer names the subclasses only, and has moved the class itself between versions
UsageError = cast("type[Exception]", typer.BadParameter.__mro__[1])

PARTS = {
    "run": ("run", "resume"),
    "cluster": ("submit", "scheduler", "cancel", "rerun", "ingest"),
    "sweeps": ("status", "watch", "gate"),
    "judging": ("judge",),
    "reports": ("report", "explain"),
    "history": ("compare", "history"),
    "serve": ("serve",),
    "comment": ("comment",),
    "check": ("check",),
    "reviewed": ("bless", "waive", "retract"),
    "calibrate": ("calibrate",),
    "cards": ("cards",),
    "models": ("models",),
    "db": ("db",),
    "engine": ("engine",),
    "selftest": ("selftest",),
}
"""Module of orchestrator.commands -> the commands that it adds, in the order of the help."""


def application(arguments: list[str]) -> typer.Typer:
    """The application for one command line: only the module of its command is imported, all of them for the help.

    Reading a verdict needs neither the zoo nor the judge's libraries, and those take most of a second to import.
    """
    word = _command(arguments)
    parts = [part for part, commands in PARTS.items() if word in commands] or list(PARTS)
    app = typer.Typer(
        help="Measures GPU regressions of an LLM decode engine and proves token identity.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for part in parts:
        import_module(f"orchestrator.commands.{part}").add_to(app)
    return app


def _command(arguments: list[str]) -> str:
    """The first word of a command line that is no option; empty without one."""
    return next((word for word in arguments if not word.startswith("-")), "")


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"assay {harness_version()}\n")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version"),
) -> None:
    pass


def main() -> None:
    """Entry point of the console script."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, _interrupt)
    arguments = sys.argv[1:]
    command = _command(arguments)
    streams = take_streams(quiet=command != "engine")  # a long run without a reader ends, with a code of its own
    sys.exit(_ended(call(arguments), command, streams))


def _ended(code: int, command: str, streams: Streams) -> int:
    """The exit code once all output is out. A verdict's stands though nobody reads on; of others 0 becomes 141."""
    failure = streams.end()
    if failure is not None:
        code = _fail(_os_words(failure), HOST_FAULT)
    elif streams.out.reader_gone and code == 0 and command not in VERDICT_COMMANDS:
        code = READER_GONE
    streams.end()
    return code


def call(arguments: list[str]) -> int:
    """Run one command line; its exit code. Expected errors are one line on stderr."""
    begun = False
    try:
        command = application(arguments)
        begun = True
        code = command(arguments, prog_name="assay", standalone_mode=False)
    except UsageError as exc:
        return _usage(exc)
    except JobsError as exc:
        return _fail(str(exc), exc.exit_code)
    except EngineError as exc:  # elsewhere 10 to 16 mean nothing: what a sweep names cannot be used, so it is usage
        return _fail(str(exc), exc.exit_code if _command(arguments) in ENGINE_COMMANDS else USAGE)
    except (ProbeError, HostLost) as exc:
        return _fail(str(exc), HOST_FAULT)
    except OSError as exc:
        return _fail(_os_words(exc), HOST_FAULT)
    except typer.Abort:
        return exit_code()
    except KeyboardInterrupt as told:
        return _stopped(told, begun)
    except SystemExit:  # typer leaves with code 1 when a pipe breaks
        return READER_GONE
    except Exception:  # noqa: BLE001 - the process edge: Python's own exit code 1 would read as a regression
        if INTERRUPTS:  # a module whose import Ctrl-C breaks off may fail in words of its own, and lose the reason
            return _stopped(INTERRUPTS[-1], begun)
        traceback.print_exc()
        return _fail("this is a bug in assay; nothing is known about the engine under test", HOST_FAULT)
    if INTERRUPTS:  # typer makes of one that a command does not hear a code without words
        return _stopped(INTERRUPTS[-1], begun)
    return int(code or 0)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    INTERRUPTS.append(Interrupted(number))
    raise INTERRUPTS[-1]


def _stopped(told: KeyboardInterrupt, begun: bool) -> int:
    late, early = "before it was done; what it had stored by then stays", "while it was starting; nothing was begun"
    return _fail(f"stopped {late if begun else early}", exit_code(told))


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
    for line in message.rstrip("\n").split("\n"):
        sys.stderr.write(f"error: {shown(line, MOST_OF_AN_ERROR)}\n")
    return code


def _os_words(error: OSError) -> str:
    """What the system refused, with the file where it names one, and what to do about it."""
    if error.strerror is None:
        return str(error)
    remedy = OS_REMEDIES.get(error.errno or 0)
    if error.filename is None:  # a write into an open file: only a full disk has a remedy without the place
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return error.strerror + (" (free space where the command writes, or name another place)" if full else "")
    return f"{error.filename}: {error.strerror}" + (f" ({remedy})" if remedy else "")


if __name__ == "__main__":
    main()
