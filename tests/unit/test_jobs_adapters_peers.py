"""Engines that nobody here wrote: what each of them told once is read as it was, and what is here decodes.

tests/recorded holds the lines that each engine's child wrote for one request, the tiny model's prompt, with ROOT in the
place of this checkout: PyTorch's and transformers' on a host that had them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import UnsupportedModel
from engine.onnx_load import load
from engine.zoo import model_digest
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.native_forced import ForceOrder, adjudicate
from jobs.adapters.peer_run import PeerAdapter
from jobs.adapters.registry import PEERS, adapters
from jobs.adapters.torch import layers_of
from jobs.gates import GATING, UNDECLARED
from jobs.model import ArmPlan, CellPlan, Missing, RunSettings
from jobs.near_tie import FollowUp
from jobs.provenance import harness_digest, own_root
from tests.unit.engine_rig import TINY_PROMPT, build_tiny

UUID = "SIM-test-0"
RECORDED = Path(__file__).parents[1] / "recorded"
TOKENS = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def ids_of(tiny: Path) -> tuple[int, ...]:
    return tuple(json.loads((tiny / "zoo.json").read_text())["facts"]["greedy_ids"][:TOKENS])


def arm_of(adapter: str, options: Mapping[str, Any] | None = None, **changes: Any) -> ArmPlan:
    plan = {"source": "installed", "adapter": adapter, "tree_digest": harness_digest(own_root())}
    return ArmPlan(**{**plan, "name": adapter, "role": "variant", "options": dict(options or {}), **changes})


def order_for(model: Path, arm: ArmPlan, **settings: Any) -> RunOrder:
    cell = CellPlan(
        cell="m/p",
        model="m",
        model_path=str(model),
        model_digest=model_digest(model),
        prompt="p",
        prompt_ids=TINY_PROMPT,
        settings=RunSettings(**{"tokens": TOKENS, "generations": 2, "warmups": 1, "ignore_eos": True, **settings}),
        arms=(arm.name,),
    )
    return RunOrder("run_1", "att_1", 1, cell, arm, UUID, 60.0)


def place_in(folder: Path) -> RunPlace:
    folder.mkdir(exist_ok=True)
    environ = {"PATH": "/usr/bin:/bin", "ASSAY_STORE": "postgresql://secret", "GITHUB_TOKEN": "secret"}
    return RunPlace(folder, environ, lambda: "2026-01-01T00:00:00Z")


def run(tmp_path: Path, order: RunOrder, python: str = sys.executable) -> RunResult:
    return PeerAdapter(PEERS[order.arm.adapter], python).run(order, place_in(tmp_path / "scratch"))


def replayed(tmp_path: Path, name: str, changed: Mapping[str, str] | None = None) -> str:
    """A program that stands for Python and says what an engine said once."""
    text = (RECORDED / f"{name}.jsonl").read_text().replace("ROOT", str(own_root()))
    for old, new in (changed or {}).items():
        assert old in text
        text = text.replace(old, new)
    script = tmp_path / "python"
    says = f"import os, sys\nos.write(int(sys.argv[-1]), {text.encode()!r})\n"
    script.write_text(f"#!{sys.executable}\n{says}")
    script.chmod(0o755)
    return str(script)


def test_a_worker_has_each_of_them_and_each_has_a_file_of_lines() -> None:
    assert set(adapters()) == {"native", "command", *PEERS}
    assert {path.stem for path in RECORDED.glob("*.jsonl")} == set(PEERS)


@pytest.mark.parametrize("name", PEERS)
def test_what_an_engine_told_once_is_a_record_with_the_ids_of_ours(tmp_path: Path, tiny: Path, name: str) -> None:
    done = run(tmp_path, order_for(tiny, arm_of(name)), replayed(tmp_path, name))
    assert (done.end, done.reason) == ("measured", "")
    record = done.record
    assert record is not None
    assert [(g.ids, g.warmup) for g in record.generations] == [(ids_of(tiny), n == 0) for n in range(3)]
    assert all(len(g.step_ns) == TOKENS - 1 and min(g.step_ns) > 0 and g.prefill_ns > 0 for g in record.generations)
    assert set(PEERS[name].counters) <= {n for n, value in record.counters.items() if isinstance(value, int)}
    assert record.counters["emitted_tokens"] == 2 * TOKENS
    unseen = GATING - set(PEERS[name].counters)
    assert {record.counters[n] for n in unseen} == {Missing(missing=f"{UNDECLARED}: {PEERS[name].blind}")}
    told = {n.partition(".")[2] for n in record.effective_config if n.startswith(f"{name}.")}
    assert told == {"version", *PEERS[name].options}
    assert (record.device["uuid"], record.device["kind"]) == (UUID, "sim")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({f'"uuid":"{UUID}"': '"uuid":"GPU-other"'}, "provenance: child ran on card GPU-other"),
        ({f'"{own_root()}/jobs': '"/elsewhere/jobs'}, "provenance: the adapter was imported from /elsewhere/jobs"),
        ({'"ids":[194,': '"ids":[512,'}, "id 512 at index 0 of generation 1 is outside the model's vocabulary"),
        ({'"protocol":1': '"protocol":7'}, "child speaks protocol 7"),
    ],
)
def test_what_an_engine_says_of_itself_is_held_against_what_is_known(
    tmp_path: Path, tiny: Path, changed: dict[str, str], says: str
) -> None:
    done = run(tmp_path, order_for(tiny, arm_of("torch")), replayed(tmp_path, "torch", changed))
    assert done.end == "failed" and says in done.reason


def test_onnxruntime_decodes_the_ids_of_ours_from_the_same_file(tmp_path: Path, tiny: Path) -> None:
    done = run(tmp_path, order_for(tiny, arm_of("onnxruntime", {"kv": "host", "threads": 1})))
    assert (done.end, done.reason) == ("measured", "")
    assert done.record is not None
    assert {g.ids for g in done.record.generations} == {ids_of(tiny)}
    served = {name: entry["value"] for name, entry in done.record.effective_config.items()}
    assert (served["onnxruntime.provider"], served["onnxruntime.threads"]) == ("CPUExecutionProvider", 1)
    assert done.record.facts["nodes_by_provider"] == "CPUExecutionProvider 31"


@pytest.mark.parametrize(
    ("adapter", "options", "hidden", "says"),
    [
        ("torch", {}, "torch", "cannot_load: torch cannot be imported: not on this host (pip install torch)"),
        ("onnxruntime", {"provider": "NoSuchProvider"}, "", "not NoSuchProvider"),
        ("onnxruntime", {"plugin": "no_such_plugin"}, "", "no_such_plugin cannot be imported"),
        ("onnxruntime", {}, "onnxruntime", "onnxruntime cannot be imported: not on this host"),
    ],
)
def test_what_is_not_on_the_host_is_a_label_with_its_remedy_and_is_not_tried_again(
    tmp_path: Path, tiny: Path, adapter: str, options: dict[str, str], hidden: str, says: str
) -> None:
    (tmp_path / "hiding").mkdir()
    if hidden:
        (tmp_path / "hiding" / f"{hidden}.py").write_text("raise ImportError('not on this host')")
    arm = arm_of(adapter, options, env={"PYTHONPATH": str(tmp_path / "hiding")})
    done = run(tmp_path, order_for(tiny, arm))
    assert (done.end, done.fault, done.retry) == ("failed", "cannot_load", False)
    assert says in done.reason
    assert done.record is not None and done.record.exit_code == 17 and not done.record.generations


def test_a_model_that_an_engine_does_not_serve_is_named_with_its_nodes(tiny: Path) -> None:
    graph = load(tiny)
    odd = replace(graph.nodes[-1], op="QMoE", name="/model/layers.0/moe")
    with pytest.raises(UnsupportedModel, match=r"/model/layers\.0/moe: com\.microsoft::QMoE"):
        layers_of(replace(graph, nodes=(*graph.nodes, odd)))


def test_a_library_is_forced_along_ids_beside_the_oracle(tmp_path: Path, tiny: Path) -> None:
    base = arm_of("native", name="base", role="base", tree_digest="")
    head = arm_of("onnxruntime")
    ids = ids_of(tiny)[:4]
    asked = FollowUp(
        cell="m/p",
        base="base",
        head="onnxruntime",
        card=UUID,
        prompt_ids=TINY_PROMPT,
        base_ids=ids,
        head_ids=(*ids[:2], ids[2] ^ 1, ids[3]),
        first=2,
    )
    answer = adjudicate(ForceOrder(asked, order_for(tiny, head).cell, base, head, 60.0), place_in(tmp_path / "scratch"))
    assert answer.failure == ""
    assert [(at.index, at.base_id, at.head_id, at.oracle_id) for at in answer.positions] == [
        (n, ids[n], ids[n], ids[n]) for n in (2, 3)
    ]
    assert all(np.isfinite(at.base_error) and at.head_behind == 0 for at in answer.positions)
