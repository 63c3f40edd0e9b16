"""`engine kernel`: one kernel alone, timed in rounds, with an id of each round's output; the child protocol's lines."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import engine
from engine.config import RunRequest, read_request
from engine.errors import BadRequest, EngineError
from engine.interrupt import end_with
from engine.journal import Collected, Emit, to_fd
from engine.kernel_cases import Bench, read_case
from engine.run import make_device


def add(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "kernel", help="time one kernel alone, as a request says: its model is a case's file, its tokens are rounds"
    )
    parser.set_defaults(command=run)
    parser.add_argument("--request", type=Path, required=True, help="request file")
    parser.add_argument("--result-fd", type=int, help="write JSON lines to this file descriptor, else print them")
    parser.add_argument("--control-fd", type=int, help="end when this file descriptor closes")


def run(arguments: argparse.Namespace) -> int:
    """Time the case of a request; lines as those of a run. Raises what they tell as an error, too."""
    if arguments.control_fd is not None:
        end_with(arguments.control_fd)
    collected = Collected()
    emit: Emit = collected if arguments.result_fd is None else to_fd(arguments.result_fd)
    try:
        _measure(read_request(arguments.request), emit)
    except EngineError as error:
        line = {"type": "error", "code": error.exit_code, "kind": error.kind}
        emit({**line, "message": error.message, "remedy": error.remedy})
        raise
    finally:
        for line in collected.lines:
            sys.stdout.write(json.dumps(line) + "\n")
    return 0


def _measure(request: RunRequest, emit: Emit) -> None:
    if request.given:
        names = ", ".join(sorted(request.given))
        raise BadRequest(f"a kernel alone is given {names}", "leave config and the matrix's settings out")
    case = read_case(request.model)
    device = make_device(request)
    emit(_hello(request, device))
    bench = Bench(device, case, request.prompt_ids)
    for index in range(request.warmups + request.generations):
        before = device.tally.read()
        ids, taken = zip(*bench.rounds(request.tokens, time.perf_counter_ns), strict=True)
        emit(
            {
                "type": "generation",
                "index": index,
                "warmup": index < request.warmups,
                "ids": list(ids),
                "stop_reason": "length",
                "prefill_ns": taken[0],
                "step_ns": list(taken[1:]),
            }
        )
    kernels = int(device.tally.since(before).get("kernel_runs", 0)) // (request.tokens * bench.runs)
    emitted = request.tokens * request.generations
    counters = {"emitted_tokens": emitted, "step_kernels": kernels, "launch_bytes": case.launch_bytes}
    emit({"type": "result", "counters": {**counters, "launch_flops": case.launch_flops}, "facts": {"runs": bench.runs}})


def _hello(request: RunRequest, device: Any) -> dict[str, Any]:
    return {
        "type": "hello",
        "protocol": engine.PROTOCOL,
        "pid": os.getpid(),
        "module_path": str(Path(engine.__file__).absolute()),
        "version": engine.__version__,
        "effective_config": {},
        "device": {"kind": device.kind, "name": device.name, "uuid": device.uuid, "driver": device.driver},
        "model": {"path": str(request.model), "digest": hashlib.sha256(request.model.read_bytes()).hexdigest()},
    }
