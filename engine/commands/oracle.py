"""`engine oracle`: what a model's own graph says in float32, computed by none of the code that decodes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import oracle
from engine.commands.ids import add_forced, add_prompt, forced_of, prompt_of
from engine.config import check_ids
from engine.errors import BadRequest, OutOfMemory
from engine.forced import check_fed, save
from engine.onnx_load import load
from engine.out_file import check_out


def add(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "oracle", help="the graph itself in float32, teacher-forced: argmax, best logits and margin per position"
    )
    parser.set_defaults(command=run)
    parser.add_argument("--model", required=True, help="model folder")
    add_prompt(parser)
    add_forced(parser)
    parser.add_argument("--top", type=int, default=5, help="how many of the best logits to show")
    parser.add_argument("--out", type=Path, help="file for the arrays logits, prompt_ids, forced_ids")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Compute and print a line for each position."""
    if arguments.out is not None:
        check_out(arguments.out)
    if arguments.top < 1:
        raise BadRequest(f"--top is {arguments.top}", "show at least one")
    prompt, forced = list(check_ids(prompt_of(arguments))), forced_of(arguments)
    graph = load(Path(arguments.model))
    check_fed(graph.info, prompt, forced)
    try:
        rows = oracle.logits(graph, prompt, forced)
    except MemoryError as error:
        raise OutOfMemory(f"the host ran out of memory: {error}", "give fewer ids") from error
    if arguments.out is not None:
        save(arguments.out, rows, prompt, forced)
    readings = list(oracle.read(rows, [*prompt, *forced], arguments.top))
    if arguments.json:
        print(
            json.dumps({"model": arguments.model, "prompt": len(prompt), "positions": [_document(r) for r in readings]})
        )
    else:
        print(_text(readings, len(prompt)))
    return 0


def _document(reading: oracle.Reading) -> dict[str, Any]:
    return {
        "position": reading.position,
        "fed": reading.fed,
        "argmax": reading.argmax,
        "margin": reading.margin,
        "top": [{"id": n, "logit": logit} for n, logit in reading.top],
    }


def _text(readings: Sequence[oracle.Reading], prompt: int) -> str:
    lines = [f"{'position':>8}  {'fed':>6}  {'argmax':>6}  {'margin':>9}  best logits"]
    for r in readings:
        best = "  ".join(f"{n} {logit:.4f}" for n, logit in r.top)
        mark = " " if r.position < prompt else "*"
        margin = "-" if r.margin is None else f"{r.margin:.4f}"
        lines.append(f"{r.position:>8}{mark} {r.fed:>6}  {r.argmax:>6}  {margin:>9}  {best}")
    if len(readings) > prompt:
        lines.append("* forced")
    return "\n".join(lines)
