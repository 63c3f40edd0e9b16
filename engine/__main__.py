"""The engine's own command line: `python -P -m engine run ...`; it runs alone on a GPU host."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine import PROTOCOL, one_thread  # noqa: F401 - before what imports NumPy
from engine.commands import audit, conformance, hazards, kernel, logits, oracle, plan
from engine.commands.ids import add_prompt, prompts_of
from engine.commands.settings import add_settings, settings_of
from engine.config import DEVICES, RunRequest, parse_request, read_request
from engine.errors import SHOWN_REASONS, BadRequest, EngineError
from engine.interrupt import ABANDONED, end_with, ended_by_signals
from engine.journal import Collected, Emit, to_fd
from engine.plain import plain, plain_lines
from engine.run import execute
from engine.show import show
from engine.tokens import Tokens


def main(argv: list[str] | None = None, program: str = "python -P -m engine") -> int:
    """Run one command; the exit code. Expected errors are one line on stderr.

    `program` is what the user called, as help and errors name it.
    """
    try:
        arguments = _parser(program).parse_args(argv)
        with ended_by_signals(tells=arguments.command is not _run):  # which says so in a line of its own
            code: int = arguments.command(arguments)
        sys.stdout.flush()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        _tell_more(getattr(error, "reasons", ()))
        return error.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter fails to flush at exit
        print("error: whoever read this run's output is gone", file=sys.stderr)
        return ABANDONED
    return code


class _Help(argparse.HelpFormatter):
    """Says the default of each option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        is_told = (
            isinstance(default, str | int) and not isinstance(default, bool) and default not in ("", argparse.SUPPRESS)
        )
        return f"{action.help} (default: %(default)s)" if action.help and is_told else action.help


class _Parser(argparse.ArgumentParser):
    """Usage errors are bad requests, with the same exit code as any other."""

    def __init__(self, **words: Any) -> None:
        super().__init__(formatter_class=_Help, **words)

    def error(self, message: str) -> NoReturn:
        raise BadRequest(message, f"see `{self.prog} --help`")


def _parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=program, description="Decode an ONNX model and count everything it did.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    run = commands.add_parser("run", help="generate greedily and print ids, counters, floors and equations")
    run.set_defaults(command=_run)
    run.add_argument("--request", type=Path, help="request file; replaces every option below but the fds and --json")
    run.add_argument("--result-fd", type=int, help="write JSON lines to this file descriptor")
    run.add_argument("--control-fd", type=int, help="end when this file descriptor closes")
    run.add_argument("--model", help="model folder")
    add_prompt(run, several=True)
    run.add_argument("--tokens", type=int, default=32, help="ids to give out in each generation")
    run.add_argument("--generations", type=int, default=1, help="measured generations, one after another")
    run.add_argument("--warmups", type=int, default=0, help="generations before them, kept apart")
    run.add_argument("--ignore-eos", action="store_true", help="go on past an end id")
    run.add_argument("--device", default="auto", help=f"one of {', '.join(DEVICES)}")
    add_settings(run)
    run.add_argument("--plan-only", action="store_true", help="pager, ledger and capture without arithmetic or ids")
    run.add_argument("--routing", metavar="FILE|seed:N", help="experts that a plan-only run asks for")
    run.add_argument("--routing-out", metavar="FILE", help="record the experts that a full run asks for")
    run.add_argument("--log-capture", action="store_true", help="say each decision of the capture planner on stderr")
    run.add_argument("--json", action="store_true", help="print the JSON lines")
    for command in (plan, logits, oracle, hazards, audit, conformance, kernel):
        command.add(commands)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    for name in ("result_fd", "control_fd"):
        _check_fd(name, getattr(arguments, name))
    if arguments.control_fd is not None:
        end_with(arguments.control_fd)
    collected = Collected()
    emit: Emit = collected if arguments.result_fd is None else to_fd(arguments.result_fd)
    try:
        request = read_request(arguments.request) if arguments.request else _from_options(arguments)
    except EngineError as error:
        if arguments.result_fd is not None:
            line = {"type": "error", "code": error.exit_code, "kind": error.kind}
            emit({**line, "message": error.message, "remedy": error.remedy})
        raise
    try:
        return execute(request, emit, time.perf_counter_ns)
    finally:
        if collected.lines:
            _print(collected.lines, request, arguments.json)
            sys.stdout.flush()


def _print(lines: list[dict[str, Any]], request: RunRequest, as_json: bool) -> None:
    if as_json:
        for line in lines:
            print(json.dumps(line))
    else:
        print(plain_lines(show(lines, lambda ids: _text(request.model, ids))))
    for line in lines:
        if line["type"] == "capture":
            print(f"capture: {plain(line['decision'])}", file=sys.stderr)
        if line["type"] == "error":
            remedy = f" ({line['remedy']})" if line["remedy"] else ""
            print(f"error: {line['message']}{remedy}", file=sys.stderr)
            _tell_more(line.get("reasons", ()))


def _tell_more(reasons: Sequence[str]) -> None:
    """Those of an unsupported model's reasons that its message only counts, a line each."""
    for reason in reasons[SHOWN_REASONS:]:
        print(f"  {plain(reason)}", file=sys.stderr)


def _text(model: Path, ids: list[int]) -> str | None:
    try:
        return Tokens(model).decode(ids)
    except EngineError:
        return None  # a model without a tokenizer still has ids


def _from_options(arguments: argparse.Namespace) -> RunRequest:
    if not arguments.model:
        raise BadRequest("--model is missing", "give the model's folder")
    first, *further = prompts_of(arguments)
    return parse_request(
        {
            "protocol": PROTOCOL,
            "model": arguments.model,
            "prompt_ids": first,
            "further_prompts": further,
            "tokens": arguments.tokens,
            "generations": arguments.generations,
            "warmups": arguments.warmups,
            "ignore_eos": arguments.ignore_eos,
            "device": arguments.device,
            "arithmetic": "none" if arguments.plan_only else "full",
            "routing": arguments.routing,
            "routing_out": arguments.routing_out,
            "log_capture": arguments.log_capture,
            "config": settings_of(arguments),
        }
    )


def _check_fd(name: str, fd: int | None) -> None:
    if fd is None:
        return
    try:
        os.fstat(fd)
    except (OSError, OverflowError) as error:
        raise BadRequest(f"--{name.replace('_', '-')} {fd} is not open", "give a file descriptor to inherit") from error


if __name__ == "__main__":
    sys.exit(main())
