"""onnxruntime as a peer: the ids that are known, where its nodes ran, and no failure that is a slow result."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from benchmarks.cuda_peers_ort import Asked, Peer, compared, measured, ran, share_of
from engine.zoo.geometries import GEOMETRIES, build_geometry
from jobs.adapters.onnxruntime import OrtDecoder, Provider
from tests.unit.engine_rig import TINY_PROMPT, build_tiny

CPU = "CPUExecutionProvider"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def record_of(
    model: Path, *, plugin: str | None = None, timeout_s: float = TIMEOUT_S, tokens: int = 6
) -> dict[str, Any]:
    asked = Asked(model, CPU if plugin is None else None, plugin, "provider", tokens)
    peer = Peer(asked, timeout_s)
    try:
        return measured(peer, asked, "sim")
    finally:
        peer.end()


def plugin(folder: Path, body: str) -> str:
    """A module as a plugin's wheel has one, whose path is what `body` gives; its name."""
    lines = ["import os, time", "REGISTRATION_NAME = 'broken'", "def get_library_path():", f"    {body}"]
    (folder / "broken_plugin.py").write_text("\n".join(lines))
    return "broken_plugin"


def test_tiny_decodes_its_known_ids_and_each_node_of_each_step_is_told_of(tiny: Path, tmp_path: Path) -> None:
    decoder = OrtDecoder(onnxruntime, tiny, Provider(CPU), "provider", tmp_path / "profile")
    made = decoder.generate(TINY_PROMPT, 128)
    assert made.ids == json.loads((tiny / "zoo.json").read_text())["facts"]["greedy_ids"]
    assert len(made.step_ns) == 127 and min(made.step_ns) > 0
    assert decoder.kv_found_on == ["cpu"]
    assert {name: (ops["MatMulNBits"], ops["GroupQueryAttention"]) for name, ops in decoder.assigned().items()} == {
        CPU: (11, 2)
    }
    steps = ran(Path(decoder.session.end_profiling()))
    assert set(steps) == {CPU}
    assert (steps[CPU]["operators"]["MatMulNBits"], steps[CPU]["operators"]["GroupQueryAttention"]) == (11, 2)
    assert steps[CPU]["runs"] == 127 * steps[CPU]["nodes"]
    assert steps[CPU]["us"] > 0


def test_a_decoder_for_a_card_agrees_with_the_engine_and_its_figure_is_named(tmp_path: Path) -> None:
    form = GEOMETRIES["qwen2.5-0.5b"]
    sizes: dict[str, Any] = {"layers": 1, "hidden": 128, "heads": 2, "kv_heads": 1, "ffn": 128}
    sizes |= {"vocabulary": 1024, "context": 256}
    small = replace(form, geometry=replace(form.geometry, **sizes), peaked=False)
    record = record_of(build_geometry("qwen2.5-0.5b", small, 5, tmp_path / "small").folder)
    assert record["label"] == "ran", record
    assert record["ids_before_the_first_that_differs"] == 6
    assert (record["figure_of"], record["ran_on_provider"], record["assigned_as_profiled"]) == (CPU, "all", True)
    assert len(record["ort_tokens_per_s"]) == 5
    assert record["ort_repeats_itself"]
    assert (record["engine_tokens_per_s"], record["ratio"]) == (None, None)


def test_a_fallback_is_not_a_figure_of_the_provider_that_was_asked_for() -> None:
    node: dict[str, Any] = {"nodes": 1}
    assert share_of("cuda_ep", {CPU: node}) == "none"
    assert share_of("cuda_ep", {CPU: node, "cuda_ep": node}) == "some"
    assert share_of("cuda_ep", {"cuda_ep": node}) == "all"
    ours = [{"tokens_per_s": {"median": 90.0}, "ids": [1, 2, 3]}]
    theirs = [([1, 2, 4], 30.0), ([1, 2, 4], 45.0), ([1, 2, 4], 60.0)]
    assert compared(ours, theirs, rated=True, given=True)["ratio"] == 2.0
    found = compared(ours, theirs, rated=True, given=False)
    assert (found["ratio"], found["ort_median"], found["ids_before_the_first_that_differs"]) == (None, 45.0, 2)


@pytest.mark.parametrize(
    ("body", "timeout_s", "error"),
    [
        ("return __file__", TIMEOUT_S, "broken_plugin.py"),  # no library: onnxruntime's own words
        ("os._exit(7)", TIMEOUT_S, "its process ended with 7"),
        ("time.sleep(600)", 1, "no answer in 1 s"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_a_label_with_the_errors_text(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, timeout_s: float, error: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    record = record_of(tiny, plugin=plugin(tmp_path, body), timeout_s=timeout_s)
    assert record["label"] == "cannot load"
    assert error in record["error"]
    assert record["ort_tokens_per_s"] == []


def test_what_fails_in_a_session_keeps_what_the_session_said(tiny: Path) -> None:
    """The benchmarks' prompt has ids that the tiny model's table has not."""
    record = record_of(tiny)
    assert record["label"] == "cannot run"
    assert "Gather" in record["error"]
    assert record["assigned"][CPU]["MatMulNBits"] == 11
    assert "figure_of" not in record
