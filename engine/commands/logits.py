"""`engine logits`: what the engine computes for given ids, as arrays in a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from engine import PROTOCOL
from engine.commands.ids import add_forced, add_prompt, forced_of, prompt_of
from engine.commands.settings import add_settings, settings_of
from engine.config import DEVICES, parse_request
from engine.errors import OutOfMemory
from engine.forced import check_fed, force, save
from engine.onnx_load import load
from engine.out_file import check_out
from engine.plain import plain_lines


def add(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "logits", help="feed a prompt in one call and forced ids one by one, and write all logits to a file"
    )
    parser.set_defaults(command=run)
    parser.add_argument("--model", required=True, help="model folder")
    add_prompt(parser)
    add_forced(parser)
    parser.add_argument("--out", required=True, type=Path, help="file for the arrays logits, prompt_ids, forced_ids")
    parser.add_argument("--dtype", choices=("native", "fp32"), default="native", help="fp32: KV cache in float32 too")
    parser.add_argument("--device", default="auto", help=f"one of {', '.join(DEVICES)}")
    add_settings(parser, but=("prefill_chunk", "prefix_reuse", "batch"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Compute, write, and say what was written."""
    check_out(arguments.out)
    prompt, forced = prompt_of(arguments), forced_of(arguments)
    request = parse_request(
        {
            "protocol": PROTOCOL,
            "model": arguments.model,
            "prompt_ids": prompt,
            "tokens": len(forced) + 1,
            "device": arguments.device,
            "config": settings_of(arguments),
        }
    )
    graph = load(request.model)
    check_fed(graph.info, prompt, forced)
    try:
        logits = force(graph, request, forced, wide=arguments.dtype == "fp32")
    except MemoryError as error:
        raise OutOfMemory(f"the host ran out of memory: {error}", "give fewer ids") from error
    save(arguments.out, logits, prompt, forced)
    best = np.sort(logits, axis=1)[:, -2:]
    told = {
        "model": arguments.model,
        "out": str(arguments.out),
        "dtype": arguments.dtype,
        "prompt_rows": len(logits) - len(forced),
        "forced_rows": len(forced),
        "vocabulary": logits.shape[1],
        "largest": float(np.abs(logits).max()),
        "smallest_margin": float((best[:, -1] - best[:, 0]).min()),
    }
    print(json.dumps(told) if arguments.json else plain_lines(_text(told, len(prompt))))
    return 0


def _text(told: dict[str, Any], prompt: int) -> str:
    rows = f"{told['prompt_rows']} rows of the prompt"
    if told["prompt_rows"] < prompt:
        rows = f"the last row of the prompt's {prompt} (this model's head keeps one a call)"
    return (
        f"{told['out']}: logits of {rows} and {told['forced_rows']} forced, {told['vocabulary']} each, float32\n"
        f"largest {told['largest']:.4g}, smallest margin {told['smallest_margin']:.4g}"
    )
