"""`engine audit`: decode and read memory back: weights against host bytes, all else against a resident, eager run."""

from __future__ import annotations

import argparse
import json
from typing import Any

from engine import PROTOCOL
from engine.audit.pair import Audit, Report
from engine.commands.ids import add_prompt, prompts_of
from engine.commands.settings import add_settings, settings_of
from engine.config import DEVICES, RunRequest, parse_request
from engine.errors import BadRequest, OutOfMemory
from engine.forced import check_fed
from engine.onnx_load import load
from engine.plain import plain_lines
from engine.run import make_device, plans_for, target_for

DIFFERENT = 1
"""Exit code where something differed, or nothing was checked."""

_SHOWN_KEYS = 4
"""Of keys that differ, how many the text names; the JSON names all."""


def add(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="decode and read memory back: weights against their host bytes, cache, states, logits and ids against a "
        "resident, eager run beside it; exit 1 for a difference, or where nothing was checked",
    )
    parser.set_defaults(command=run)
    parser.add_argument("--model", required=True, help="model folder")
    add_prompt(parser, several=True)
    parser.add_argument("--tokens", type=int, default=32, help="ids to give out in each generation")
    parser.add_argument("--generations", type=int, default=3, help="generations, one after another")
    parser.add_argument(
        "--checksum-every", type=int, default=8, metavar="N", help="read memory back each N steps, and at the last one"
    )
    parser.add_argument("--shadow", action="store_true", help="compare with a resident, eager run beside it")
    parser.add_argument("--device", default="auto", help=f"one of {', '.join(DEVICES)}")
    add_settings(parser, but=("prefix_reuse",))
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Decode under watch, and say what was checked and what differed first."""
    every = arguments.checksum_every
    if every < 1:
        raise BadRequest(f"checksum_every is {every}", "give 1 for every step, or more")
    request = _request(arguments)
    graph = load(request.model)
    for prompt in request.prompts:
        check_fed(graph.info, prompt, [0] * (request.tokens - 1))
    try:
        device = make_device(request)
        plans = plans_for(graph, request.prompts, request.config.prefill_chunk, target_for(request.config, device))
        audit = Audit(request, device, graph, plans, every=every, shadow=arguments.shadow)
        report = audit.run()
        told = _told(arguments, audit, report, device.name)
        if report.at is None:  # what is broken is not taken apart
            audit.close()
    except MemoryError as error:
        raise OutOfMemory(f"the host ran out of memory: {error}", "use a smaller model") from error
    print(json.dumps(told) if arguments.json else plain_lines(_text(told, report)))
    return 0 if told["ok"] else DIFFERENT


def _request(arguments: argparse.Namespace) -> RunRequest:
    first, *further = prompts_of(arguments)
    return parse_request(
        {
            "protocol": PROTOCOL,
            "model": arguments.model,
            "prompt_ids": first,
            "further_prompts": further,
            "tokens": arguments.tokens,
            "generations": arguments.generations,
            "ignore_eos": True,
            "device": arguments.device,
            "config": settings_of(arguments),
        }
    )


def _told(arguments: argparse.Namespace, audit: Audit, report: Report, device: str) -> dict[str, Any]:
    """As engine/schemas/audit.json says."""
    found = [difference.line() for difference in report.found]
    return {
        "ok": report.at is None and bool(audit.weights.keys),
        "model": arguments.model,
        "device": device,
        "shadow": arguments.shadow,
        "checksum_every": arguments.checksum_every,
        "steps": report.steps,
        "checked": dict(audit.counts),
        "ran": dict(audit.ran),
        "checks": report.checks,
        "keys": audit.weights.rows(),
        "difference": None if report.at is None else {**report.at.line(), "found": found},
    }


def _text(told: dict[str, Any], report: Report) -> str:
    checks = told["checks"]
    rows = [
        f"audit: {'clean' if told['ok'] else 'DIFFERENT' if report.at else 'NOTHING CHECKED'} steps={told['steps']} "
        f"checks={len(checks)} shadow={'on' if told['shadow'] else 'off'} device={told['device']}",
        "checked: " + _pairs(told["checked"]),
        "ran: " + _pairs(told["ran"]),
    ]
    if checks:
        last = checks[-1]
        came, went = (sum(len(check[name]) for check in checks) for name in ("entered", "left"))
        rows.append(
            f"resident set: keys={last['resident_keys']} bytes={last['resident_bytes']} entered={came} left={went}"
        )
    if report.at is not None:
        first = told["difference"]
        where = f"generation {first['generation']}, step {first['step']} (position {first['position']})"
        rows.append(f"first difference: {where}")
        causes = [one for one in report.found if one.what == "weights"]
        shown = [one for one in report.found if one not in causes[_SHOWN_KEYS:]]
        rows += [f"  {difference}" for difference in shown]
        rows += [f"  and {len(causes) - _SHOWN_KEYS} more keys"] if len(causes) > _SHOWN_KEYS else []
    return "\n".join(rows)


def _pairs(counts: dict[str, int]) -> str:
    return " ".join(f"{name}={count}" for name, count in counts.items())
