"""`engine plan`: what a model's forward pass is made of and cannot cost less than, without running it."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.bind import lower
from engine.commands.settings import add_settings, settings_of
from engine.config import check
from engine.errors import BadRequest
from engine.graph import sources
from engine.kv_layout import growth_copies, layout_floors
from engine.onnx_load import load
from engine.plain import plain_lines
from engine.survey import Setting, survey


def add(commands: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan", help="nodes, bytes, segments and floors of one forward pass, without running it"
    )
    parser.set_defaults(command=run)
    parser.add_argument("--model", required=True, help="model folder; a hollow one will do")
    parser.add_argument("--rows", type=int, default=1, help="tokens that go in: 1 is the decode step")
    add_settings(parser, only=("weight_budget", "policy", "granule", "capture_rules", "experts"))
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Plan, look, and print."""
    if arguments.rows < 1:
        raise BadRequest(f"--rows is {arguments.rows}", "give a whole number from 1")
    checked = check(settings_of(arguments))
    graph = load(Path(arguments.model), hollow=True)
    context = graph.info.context_length
    if context is not None and arguments.rows > context:
        raise BadRequest(f"--rows is {arguments.rows}, the model has {context} positions", "give fewer")
    setting = Setting(checked.weight_budget, checked.policy, checked.granule, checked.capture_rules, checked.experts)
    plan = lower(graph, arguments.rows)
    document = {"model": arguments.model, "digest": graph.digest, "bound_by": dict(graph.info.bound_by)}
    document |= survey(plan, setting)
    granule = document["residency"]["granule_bytes"]
    document["kv_layouts"] = [asdict(f) for f in layout_floors(plan.kv, context, granule)] if context else []
    masked = graph.info.attention_mask in graph.inputs
    document["kv_growths"] = [asdict(g) for g in growth_copies(plan.kv, context, masked=masked)] if context else []
    print(json.dumps(document) if arguments.json else plain_lines(text_of(document)))
    return 0


def text_of(d: dict[str, Any]) -> str:
    """A line for each subject."""
    keys, floors, capture = d["keys"], d["floors"], d["capture"]
    rows = [
        f"plan: rows={d['rows']} steps={d['nodes']['steps']} kernels={len(d['kernels'])}",
        f"bound by: {sources(d['bound_by'])}",
        f"nodes: {_pairs(d['nodes']['by_op'])}",
        f"buffers: {_pairs(d['buffers'])}",
        f"keys: count={keys['count']} weight_bytes={keys['weight_bytes']} "
        f"minimum_budget_bytes={keys['minimum_budget_bytes']}",
        f"largest_key: {keys['largest']['name']} nbytes={keys['largest']['nbytes']}",
        f"widest_step: {keys['widest_step']['node']} nbytes={keys['widest_step']['nbytes']}",
        *(f"duplicate: {c['key']} holds {c['table']} again nbytes={c['nbytes']}" for c in keys["duplicates"]),
        *(f"{name}: {_pairs(d[name])}" for name in ("constants", "hosts", "states", "kv", "pass")),
        f"residency: {_pairs({k: v for k, v in d['residency'].items() if k != 'ring'})}",
        *([f"{d['residency']['policy']}: {_pairs(d['residency']['ring'])}"] if d["residency"]["ring"] else []),
        *_banks(d["experts"]),
    ]
    rows += [f"kv_layout: {_pairs(layout)}" for layout in d["kv_layouts"]]
    rows += [f"kv_growth: {_pairs(growth)}" for growth in d["kv_growths"]]
    if capture is None:
        rows.append("capture: none, only the decode step is captured")
    else:
        rows.append(
            f"capture: segments={capture['segments']} seams={capture['seams']} seam_nodes={capture['seam_nodes']}"
        )
        rows += [
            f"seam_reason: {r['reason']} [{r['path']}] nodes={r['nodes']} {_pairs(r['by_op'])}"
            for r in capture["by_reason"]
        ]
    rows.append(
        f"floors ({floors['profile']}, one pass): "
        f"resident {floors['resident_bytes']} bytes {floors['resident_ms']:.3f} ms, "
        f"streamed {floors['streamed_bytes']} bytes {floors['streamed_ms']:.3f} ms, "
        f"nodes in a graph {floors['nodes_ms']:.3f} ms, launches one by one {floors['launches_ms']:.3f} ms"
    )
    return "\n".join(rows)


def _banks(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each group of banks that are read alike."""
    alike = Counter(json.dumps({k: v for k, v in row.items() if k != "node"}) for row in rows)
    return [f"experts: banks={times} {_pairs(json.loads(row))}" for row, times in alike.items()]


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={'n/a' if value is None else value}" for name, value in values.items())
