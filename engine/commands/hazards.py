"""`engine hazards`: decode under several schedules, every use of memory checked for its order."""

from __future__ import annotations

import argparse
import json
import re
import time
from dataclasses import dataclass
from typing import Any

from engine import PROTOCOL
from engine.commands.ids import add_prompt, prompts_of
from engine.commands.settings import add_settings, settings_of
from engine.config import RunRequest, parse_request
from engine.device.base import Device
from engine.device.book import BookedDevice
from engine.device.hazards import Hazards
from engine.device.plan_only import PlanDevice
from engine.device.schedule import ORDERS, Schedule
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.errors import BadRequest, DeviceFailure, NonFiniteLogits
from engine.forced import check_fed
from engine.generate import Progress, generate
from engine.graph import Graph
from engine.onnx_load import load
from engine.plain import plain_lines
from engine.plan import Plan
from engine.routed import given_for
from engine.run import plans_for, set_up

FOUND = 1
"""Exit code where a schedule had a hazard, changed a token, failed, or checked nothing."""
SCHEDULES = "early,late,random:5"
_SEEDS = re.compile("[1-9][0-9]{0,5}")  # a schedule each
_SAME = {True: "same", False: "DIFFERENT", None: "not computed"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: ids and gaps of each generation and sequence, how long it took, and how it failed."""

    tokens: list[Any]
    seconds: float
    failure: str


def add(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "hazards",
        help="decode under early, late and random schedules of the simulated device, and check the order of every "
        "use of memory; exit 1 for a hazard, another token, a failure, or nothing checked",
    )
    parser.set_defaults(command=run)
    parser.add_argument("--model", required=True, help="model folder")
    add_prompt(parser, several=True)
    parser.add_argument("--tokens", type=int, default=8, help="ids to give out in each generation")
    parser.add_argument("--generations", type=int, default=3, help="generations, one after another")
    parser.add_argument("--schedules", default=SCHEDULES, help="orders to try, joined by commas; random:N is N seeds")
    add_settings(parser, but=("prefix_reuse",))
    parser.add_argument("--plan-only", action="store_true", help="pager, ledger and capture without arithmetic or ids")
    parser.add_argument("--routing", metavar="FILE|seed:N", help="experts that a plan-only run asks for")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Decode once as ever, then under each schedule, and say what differs."""
    schedules = _schedules(arguments.schedules)
    request = _request(arguments)
    graph = load(request.model, hollow=arguments.plan_only)
    for prompt in request.prompts:
        check_fed(graph.info, prompt, [0] * (request.tokens - 1))
    plans = plans_for(graph, request.prompts, request.config.prefill_chunk, request.config.target or "plain")
    plain = decode(request, graph, plans, _inner(request), None)
    found = [_one(request, graph, plans, schedule, plain) for schedule in schedules]
    again = decode(request, graph, plans, _inner(request), None)  # the first one also warms what all share
    plain_seconds = min(plain.seconds, again.seconds)
    for one in found:
        one["cost"] = one["seconds"] / plain_seconds
    told = {"model": arguments.model, "plain_seconds": plain_seconds, "tokens": plain.tokens, "schedules": found}
    print(json.dumps(told) if arguments.json else plain_lines(_text(told)))
    return 0 if all(one["ok"] for one in found) else FOUND


def decode(
    request: RunRequest, graph: Graph, plans: dict[int, Plan], device: Device, hazards: Hazards | None
) -> Outcome:
    """All generations of a request on a device, and everything given back.

    With a checker, a run that breaks off is an outcome; without one it raises.
    """
    generations: list[dict[str, Any]] = []

    def emit(line: dict[str, Any]) -> None:
        if line["type"] == "generation":
            generations.append(line)
        elif hazards is not None:
            hazards.at(line["done"])

    start, failure = time.perf_counter(), ""
    progress = Progress(device=device)
    try:
        setup = set_up(request, device, graph, plans, progress.tally, given_for(request, plans[1]))
        generate(request, emit, time.perf_counter_ns, progress, setup.decoder, graph)
        for part in (setup.decoder, setup.pager, setup.kv, setup.pool):
            part.close()
    except (DeviceFailure, NonFiniteLogits) as error:
        if hazards is None:
            raise
        failure = str(error)
    tokens = [[(s["ids"], s["gaps"]) for s in (g, *g.get("further", ()))] for g in generations]
    return Outcome(tokens, time.perf_counter() - start, failure)


def _one(
    request: RunRequest, graph: Graph, plans: dict[int, Plan], schedule: Schedule, plain: Outcome
) -> dict[str, Any]:
    hazards = Hazards()
    outcome = decode(request, graph, plans, ScheduledDevice(_inner(request), schedule, hazards), hazards)
    computed = request.arithmetic == "full"
    same = outcome.tokens == plain.tokens
    return {
        "schedule": schedule.name,
        "ok": same and not outcome.failure and not hazards.total and hazards.accesses > 0,
        "accesses": hazards.accesses,
        "hazards": hazards.total,
        "same_tokens": same if computed else None,
        "failure": outcome.failure,
        "seconds": outcome.seconds,
        "found": [hazard.line() for hazard in hazards.found],
        "said": [str(hazard) for hazard in hazards.found],
    }


def _inner(request: RunRequest) -> BookedDevice[Any]:
    granule = request.config.granule
    return PlanDevice(granule_bytes=granule) if request.arithmetic == "none" else SimDevice(granule_bytes=granule)


def _schedules(text: str) -> list[Schedule]:
    made: list[Schedule] = []
    for word in text.split(","):
        name, _, count = word.strip().partition(":")
        order = next((o for o in ORDERS if o == name), None)
        if order is None or (count and (order != "random" or not _SEEDS.fullmatch(count))):
            raise BadRequest(f"unknown schedule {word!r}", f"give some of {', '.join(ORDERS)}, random with :N seeds")
        made += [Schedule(order, seed) for seed in range(int(count or 1))]
    return made


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
            "device": "sim",
            "arithmetic": "none" if arguments.plan_only else "full",
            "routing": arguments.routing,
            "config": settings_of(arguments),
        }
    )


def _text(told: dict[str, Any]) -> str:
    rows = [f"plain: {told['plain_seconds']:.2f} s"]
    for one in told["schedules"]:
        rows.append(
            f"{one['schedule']}: {'ok' if one['ok'] else 'NOT OK'} accesses={one['accesses']} hazards={one['hazards']} "
            f"tokens={_SAME[one['same_tokens']]} {one['seconds']:.2f} s, {one['cost']:.1f} x plain"
        )
        rows += [f"  {said}" for said in one["said"]]
        if one["failure"]:
            rows.append(f"  failed: {one['failure']}")
    return "\n".join(rows)
