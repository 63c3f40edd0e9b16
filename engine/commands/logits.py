"""`engine logits`: what the engine computes for given ids, as arrays in a file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from engine import PROTOCOL
from engine.commands.ids import add_forced, add_prompt, forced_of, prompt_of
from engine.config import DEVICES, POLICIES, parse_request
from engine.errors import OutOfMemory
from engine.forced import check_fed, force, save
from engine.kv_layout import LAYOUTS
from engine.onnx_load import load
from engine.out_file import check_out
from engine.plain import plain_lines

_CONFIG = ("granule", "weight_budget", "vram_limit", "policy", "kv_capacity", "kv_layout", "kv_min_bucket")


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
    parser.add_argument("--granule", type=int, help="granule of the simulated device in bytes, a power of two")
    parser.add_argument("--weight-budget", help='bytes, or a share of all weights such as "50%%"')
    parser.add_argument("--vram-limit", type=int, help="bytes for weights, KV cache and workspace together")
    parser.add_argument("--policy", help=f"one of {', '.join(POLICIES)}")
    parser.add_argument("--capture", choices=("on", "off"), default="on")
    parser.add_argument("--kv-capacity", type=int, help="positions that the KV cache may grow to")
    parser.add_argument("--kv-layout", help=f"one of {', '.join(LAYOUTS)}")
    parser.add_argument("--kv-min-bucket", type=int, help="positions of the smallest KV cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Compute, write, and say what was written."""
    check_out(arguments.out)
    prompt, forced = prompt_of(arguments), forced_of(arguments)
    config = {name: getattr(arguments, name) for name in _CONFIG if getattr(arguments, name) is not None}
    if config.get("weight_budget", "").isdigit():
        config["weight_budget"] = int(config["weight_budget"])
    request = parse_request(
        {
            "protocol": PROTOCOL,
            "model": arguments.model,
            "prompt_ids": prompt,
            "tokens": len(forced) + 1,
            "device": arguments.device,
            "config": {**config, "capture": arguments.capture == "on"},
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
