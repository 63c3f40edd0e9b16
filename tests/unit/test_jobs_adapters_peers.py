"""Engines that nobody here wrote: what each of them told once is read as it was, and what is here decodes.

tests/recorded holds the lines that each child wrote for one request, with ROOT in the place of folders: for the
tiny model's prompt, of transformers with those weights in a folder of theirs; of llama.cpp for SmolLM2's own GGUF file.
llama-server.json is what a server of build 11549 (that of the package xllamacpp 2026.10.11549) answered it.
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
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.model_files import AnyModelDigests
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
SMOLLM2_BY_LLAMA_CPP = (7042, 30, 198, 198, 504, 1797, 1918, 553)
"""Five ids are those of the engine here and its oracle; on a CPU llama.cpp rounds activations to 8 bits."""


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
        model_digest=AnyModelDigests()(model),
        prompt="p",
        prompt_ids=TINY_PROMPT,
        settings=RunSettings(**{"tokens": TOKENS, "generations": 2, "warmups": 1, "ignore_eos": True, **settings}),
        arms=(arm.name,),
    )
    return RunOrder("run_1", "att_1", 1, cell, arm, UUID, 60.0)


def gguf(folder: Path) -> Path:
    """A stand-in for a GGUF file, which nothing here reads."""
    (folder / "some.gguf").write_bytes(b"GGUF")
    return folder / "some.gguf"


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
    assert set(adapters()) == {"native", "kernel", "command", "profile_native", *PEERS}
    assert {path.name.removesuffix(".jsonl") for path in RECORDED.glob("*.jsonl")} == set(PEERS)


@pytest.mark.parametrize("name", PEERS)
def test_what_an_engine_told_once_is_a_record_with_the_ids_of_ours(tmp_path: Path, tiny: Path, name: str) -> None:
    model = gguf(tmp_path) if name == "llama.cpp" else tiny
    done = run(tmp_path, order_for(model, arm_of(name)), replayed(tmp_path, name))
    assert (done.end, done.reason) == ("measured", "")
    record = done.record
    assert record is not None
    due = SMOLLM2_BY_LLAMA_CPP if name == "llama.cpp" else ids_of(tiny)
    assert [(g.ids, g.warmup) for g in record.generations] == [(due, n == 0) for n in range(3)]
    assert all(len(g.step_ns) == TOKENS - 1 and min(g.step_ns) > 0 and g.prefill_ns > 0 for g in record.generations)
    assert set(PEERS[name].counters) <= {n for n, value in record.counters.items() if isinstance(value, int)}
    assert record.counters["emitted_tokens"] == 2 * TOKENS
    unseen = GATING - set(PEERS[name].counters)
    assert {record.counters[n] for n in unseen} == {Missing(missing=f"{UNDECLARED}: {PEERS[name].blind}")}
    told = {n.removeprefix(f"{name}.") for n in record.effective_config if n.startswith(f"{name}.")}
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


SERVER = """\
#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

ANSWERS, SEEN = json.load(open({answers!r})), open({seen!r}, "a")


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        SEEN.write(asked + "\\n" if asked else "")
        SEEN.flush()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWERS[self.path]).encode())

    do_POST = do_GET


HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Answers).serve_forever()
"""


def llama(tmp_path: Path, change: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Options of an arm whose server answers as one did, but for what is changed; the GGUF file is a stand-in."""
    answers = json.loads((RECORDED / "llama-server.json").read_text())
    answers["/completion"] |= change or {}
    (tmp_path / "answers").write_text(json.dumps(answers))
    server = tmp_path / "llama-server"
    told = {"python": sys.executable, "answers": str(tmp_path / "answers"), "seen": str(tmp_path / "seen")}
    server.write_text(SERVER.format(**told))
    server.chmod(0o755)
    return {"gguf": str(gguf(tmp_path)), "server": str(server)}


def test_llama_cpp_is_asked_for_greedy_ids_and_its_server_ends_with_the_run(tmp_path: Path, tiny: Path) -> None:
    bench = tmp_path / "bench"
    build: dict[str, Any] = {"build_commit": "8cf427ff", "build_number": 5163, "backends": "CUDA"}
    rows = [{"n_prompt": 0, "n_gen": 8, "samples_ns": [80, 96, 400], **build}, {"n_prompt": 512, "n_gen": 0, **build}]
    bench.write_text(f"#!/bin/sh\ncat <<'end'\n{json.dumps(rows)}\nend\n")
    bench.chmod(0o755)
    options = {**llama(tmp_path), "bench": str(bench)}
    done = run(tmp_path, order_for(tiny, arm_of("llama.cpp", options)))
    assert (done.end, done.leftovers) == ("failed", ()), done.reason
    assert "id 7042 at index 0 of generation 1 is outside the model's vocabulary" in done.reason, "tiny's has 512"
    record = done.record
    assert record is not None
    (generation, *_) = record.generations
    assert generation.ids == SMOLLM2_BY_LLAMA_CPP and generation.prefill_ns == 1_780_721_000
    assert sum(generation.step_ns) == 4_243_314_000 and len(generation.step_ns) == TOKENS - 1
    assert record.facts["bench_ns_per_token"] == 12
    asked = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(asked) == 3
    assert asked[0]["prompt"] == list(TINY_PROMPT) and asked[0]["n_predict"] == TOKENS
    assert (asked[0]["temperature"], asked[0]["cache_prompt"], asked[0]["ignore_eos"]) == (0, False, True)


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        ({"tokens": []}, {}, "unsupported: llama-server gave no id"),
        ({"timings": {}}, {}, "unsupported: llama-server's answer has no 'prompt_ms'"),
        ({}, {"server": "no-such-llama"}, "cannot_load: no program no-such-llama"),
        ({}, {"server": "false"}, "cannot_load: false ended with 1"),
        ({}, {"gguf": "/no/such.gguf"}, "bad_request: /no/such.gguf is no GGUF file"),
    ],
)
def test_a_server_that_does_not_answer_as_one_does_is_named(
    tmp_path: Path, tiny: Path, change: dict[str, Any], options: dict[str, str], says: str
) -> None:
    arm = arm_of("llama.cpp", {**llama(tmp_path, change), **options})
    done = run(tmp_path, order_for(tiny, arm, warmups=0, generations=1))
    assert done.end == "failed" and says in done.reason


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
