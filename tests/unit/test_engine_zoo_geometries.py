"""Decoders at the sizes of real models: the exporter's own form, clear answers in few layers, and hollow folders."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engine import zoo
from engine.bind import lower
from engine.errors import BadRequest, ModelFilesError
from engine.onnx_load import load
from engine.survey import Setting, survey
from engine.zoo.geometries import GEOMETRIES, Form, build_geometry
from engine.zoo.hybrid_geometry import HybridGeometry
from engine.zoo.seeded_weights import PATH_IDS, PROMPT_IDS
from tests.unit.engine_rig import initializer, run, write_array

EXPORTED = Path(__file__).parents[3] / "shared" / "models"
SMALL = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 256, "vocabulary": 512, "context": 256}
DENSE = {**SMALL, "head_size": 64}
HYBRIDS = {**SMALL, "hidden": 128, "head_size": 32, "rotary": 8, "key_heads": 2, "value_heads": 4, "state_size": 32,
           "ffn": 64, "shared_ffn": 64, "experts": 8, "chosen": 2}  # fmt: skip


def small(name: str, **changes: Any) -> Form:
    """A geometry at a width that a test can afford."""
    form = GEOMETRIES[name]
    sizes = HYBRIDS if isinstance(form.geometry, HybridGeometry) else DENSE
    return replace(form, geometry=replace(form.geometry, **{**sizes, **changes}))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, zoo.ModelFacts]:
    """Two layers of each geometry, narrow."""
    folder = tmp_path_factory.mktemp("geometries")
    return {name: build_geometry(name, small(name), 5, folder / name) for name in GEOMETRIES}


# -- form


def nodes(graph: onnx.GraphProto) -> dict[str, Any]:
    """Nodes by name, as plain data."""
    described = {}
    for node in graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if "value" in attributes:
            value = attributes["value"]
            attributes["value"] = (value.data_type, onnx.numpy_helper.to_array(value).tolist())
        described[node.name] = (node.domain, node.op_type, list(node.input), list(node.output), attributes)
    return described


def shapes(values: Any) -> dict[str, Any]:
    """Types and extents by name; the exporter says of every constant that it has none, which is wrong."""
    return {
        v.name: (v.type.tensor_type.elem_type, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
        for v in values
        if "/constants/" not in v.name
    }


def sample(name: str) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """What the exporter wrote."""
    folder = EXPORTED / name
    if not folder.is_dir():
        pytest.skip("skipped: no ../shared/models")
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    return model, json.loads((folder / "genai_config.json").read_text())


SAMPLE = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 2, "head_size": 32, "ffn": 256, "vocabulary": 512,
          "context": 256}  # fmt: skip
SAMPLE_HYBRID = {**SAMPLE, "layers": 4, "rotary": 8, "key_heads": 2, "value_heads": 4, "state_size": 32, "ffn": 64,
                 "shared_ffn": 64, "experts": 4, "chosen": 2}  # fmt: skip


@pytest.mark.parametrize(
    ("geometry", "exported"),
    [
        ("qwen2.5-7b", "qwen2-int4-cuda"),
        ("llama-3.2-1b", "llama-tied-int4-cuda"),
        ("35b-a3b", "qwen35moe-int4raw-cuda"),
    ],
)
def test_graphs_are_the_exporters_own(geometry: str, exported: str, tmp_path: Path) -> None:
    theirs, config = sample(exported)
    form = small(geometry, **(SAMPLE_HYBRID if geometry == "35b-a3b" else SAMPLE))
    epsilon = next(a.f for n in theirs.graph.node for a in n.attribute if a.name == "epsilon")
    form = replace(form, geometry=replace(form.geometry, rms_epsilon=epsilon))
    facts = build_geometry("sample", form, 1, tmp_path / "ours", hollow=True)
    ours = onnx.load(facts.folder / "model.onnx", load_external_data=False)
    assert nodes(ours.graph) == nodes(theirs.graph)
    assert [*ours.graph.input, *ours.graph.output] == [*theirs.graph.input, *theirs.graph.output]
    kinds = {t.name: (t.data_type, list(t.dims)) for t in theirs.graph.initializer}
    assert {t.name: (t.data_type, list(t.dims)) for t in ours.graph.initializer} == kinds
    assert shapes(ours.graph.value_info) == shapes(theirs.graph.value_info)
    assert (ours.ir_version, list(ours.opset_import)) == (theirs.ir_version, list(theirs.opset_import))
    written = json.loads((facts.folder / "genai_config.json").read_text())
    for ids in ("bos_token_id", "eos_token_id", "pad_token_id"):
        written["model"].pop(ids), config["model"].pop(ids)
    assert written == config


def test_zero_points_stand_beside_scales(built: dict[str, zoo.ModelFacts]) -> None:
    model = onnx.load(built["qwen2.5-14b-zp"].folder / "model.onnx", load_external_data=False)
    products = [n for n in model.graph.node if n.op_type == "MatMulNBits"]
    assert len(products) == 2 * 5 + 1
    for node in products:
        codes, scales, points = (initializer(model, name) for name in list(node.input)[1:])
        assert points.name == scales.name.replace("_scales", "_zero_points")
        assert list(points.dims) == [codes.dims[0], -(-codes.dims[1] // 2)]


def test_full_size_graphs_are_made_at_once(tmp_path: Path) -> None:
    started = time.process_time()
    for name, info in ((n, zoo.MODELS[n].info) for n in GEOMETRIES):
        facts = zoo.build(name, tmp_path / name, hollow=True, cache_dir=tmp_path)
        assert facts.hollow_bytes is not None
        assert abs(facts.hollow_bytes - info.size_bytes) < 0.01 * info.size_bytes
        assert sum(path.stat().st_blocks for path in facts.folder.iterdir()) * 512 < 2 << 20
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("name", "keys", "kv_bytes_per_token"),
    [
        ("qwen2.5-0.5b", 24 * 13 + 3, 12_288),
        ("qwen2.5-1.5b", 28 * 13 + 3, 28_672),
        ("qwen2.5-7b", 28 * 13 + 3, 57_344),
        ("qwen2.5-14b-zp", 48 * 18 + 4, 196_608),
        ("llama-3.2-1b", 16 * 12 + 3, 32_768),
        ("35b-a3b", 1173, 20_480),
    ],
)
def test_full_size_plans_have_the_sizes_of_the_models(
    name: str, keys: int, kv_bytes_per_token: int, tmp_path: Path
) -> None:
    facts = zoo.build(name, tmp_path / name, hollow=True, cache_dir=tmp_path)
    d = survey(lower(load(facts.folder, hollow=True), 1), Setting())
    assert d["keys"]["count"] == keys
    assert d["kv"]["bytes_per_token"] == kv_bytes_per_token
    assert d["capture"]["segments"] == 1 and d["residency"]["fits"]
    if name == "qwen2.5-14b-zp":
        assert 8.0e9 < d["keys"]["weight_bytes"] < 8.3e9
    if name == "35b-a3b":
        assert d["states"]["count"] == 60 and d["kv"]["layers"] == 10
        model = onnx.load(facts.folder / "model.onnx", load_external_data=False)
        assert sum("[2048, 2048, 4096]" in " ".join(n.input) for n in model.graph.node if n.op_type == "Split") == 30
        assert d["pass"]["read_bytes"] < 0.1 * d["pass"]["touched_bytes"]


# -- answers


@pytest.mark.parametrize("name", list(GEOMETRIES))
def test_the_engine_gives_the_ids_that_the_zoo_foresaw(name: str, built: dict[str, zoo.ModelFacts]) -> None:
    facts = built[name].zoo["facts"]
    ran = run(
        built[name].folder, prompt_ids=list(PROMPT_IDS), tokens=PATH_IDS, ignore_eos=True, config={"granule": 4096}
    )
    ids, gaps = ran.streams[0]
    assert ids == facts["greedy_ids"] and len(set(ids)) == PATH_IDS
    assert min(gaps) == pytest.approx(facts["smallest_top2_gap"], abs=0.05)  # the engine rounds its cache to float16
    assert facts["peaked"] and facts["smallest_top2_gap"] > 0.5
    assert all(facts["ids_changed_without_at_least"].values())
    assert facts["smallest_gap_beyond_float16"] > 0
    assert ran.counters["segments"] == 1 and not ran.broken_equations()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("name", ["qwen2.5-7b", "llama-3.2-1b", "35b-a3b"])
def test_a_layer_that_is_spoilt_shows(name: str, layer: int, built: dict[str, zoo.ModelFacts], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(built[name].folder, tmp_path / "spoilt"))
    stored = onnx.load(folder / "model.onnx", load_external_data=False).graph.initializer
    ending = "_proj.MatMul.weight_scales"
    scales = sorted(t.name for t in stored if t.name.startswith(f"model.layers.{layer}.") and t.name.endswith(ending))
    write_array(folder, scales[0], np.zeros_like)
    ids, _ = run(folder, prompt_ids=list(PROMPT_IDS), tokens=PATH_IDS, ignore_eos=True).streams[0]
    assert ids != built[name].zoo["facts"]["greedy_ids"], scales[0]


def test_a_seed_decides(tmp_path: Path, built: dict[str, zoo.ModelFacts]) -> None:
    form = small("qwen2.5-7b")
    again, other = (build_geometry("qwen2.5-7b", form, seed, tmp_path / str(seed)) for seed in (5, 6))
    assert again.model_digest == built["qwen2.5-7b"].model_digest != other.model_digest
    assert again.zoo == built["qwen2.5-7b"].zoo
    assert other.zoo["facts"]["greedy_ids"] != again.zoo["facts"]["greedy_ids"]


DEEP = {"qwen2.5-0.5b": 24, "llama-3.2-1b": 16, "qwen2.5-7b": 28}


@pytest.mark.parametrize(
    "name", [name if n == 0 else pytest.param(name, marks=pytest.mark.slow) for n, name in enumerate(DEEP)]
)
def test_a_deep_head_is_clearer_than_float16_blurs_it_and_needs_every_layer(name: str, tmp_path: Path) -> None:
    form = small(name, layers=DEEP[name], vocabulary=4096)
    deep = build_geometry(name, form, 5, tmp_path / "deep")
    facts = deep.zoo["facts"]
    ran = run(deep.folder, prompt_ids=list(PROMPT_IDS), tokens=PATH_IDS, ignore_eos=True, config={"granule": 4096})
    ids, gaps = ran.streams[0]
    assert ids == facts["greedy_ids"] and len(set(ids)) == PATH_IDS
    assert facts["smallest_top2_gap"] > 0.5 and facts["smallest_gap_beyond_float16"] > 0
    blur = facts["largest_gap_change_in_float16"]
    assert min(gaps) == pytest.approx(facts["smallest_top2_gap"], abs=max(0.05, blur)) and 0 < blur < 2
    changed = facts["ids_changed_without_at_least"]
    layers = [sum(n for block, n in changed.items() if block.startswith(f"layers.{i}.")) for i in range(DEEP[name])]
    assert all(layers) and len(changed) == 2 * DEEP[name]


def test_a_head_is_left_random_where_that_is_asked(tmp_path: Path) -> None:
    form = replace(small("qwen2.5-7b", layers=5, hidden=128), peaked=False)
    facts = build_geometry("qwen2.5-7b", form, 5, tmp_path / "flat")
    assert facts.zoo["facts"]["peaked"] is False and "greedy_ids" not in facts.zoo["facts"]
    assert run(facts.folder, prompt_ids=list(PROMPT_IDS), tokens=4).code == 0
    with pytest.raises(BadRequest, match="another build"):
        build_geometry("qwen2.5-7b", replace(form, peaked=True), 5, facts.folder)


def test_a_short_hybrid_ends_with_attention() -> None:
    g = GEOMETRIES["35b-a3b"].geometry
    assert isinstance(g, HybridGeometry)
    assert g.attention_layers == [*range(3, 40, 4)] and len(g.delta_layers) == 30
    assert (replace(g, layers=2).attention_layers, replace(g, layers=4).attention_layers) == ([1], [3])
    assert replace(g, layers=6).attention_layers == [3]
    assert (g.sections, g.keys, g.states, g.convolved) == ([11, 11, 10], 2048, 4096, 8192)


# -- hollow folders


@pytest.fixture
def hollow(tmp_path: Path) -> zoo.ModelFacts:
    """Two narrow layers without weights."""
    return build_geometry("qwen2.5-7b", small("qwen2.5-7b"), 5, tmp_path / "hollow", hollow=True)


def test_a_hollow_folder_plans_and_never_computes(hollow: zoo.ModelFacts) -> None:
    with pytest.raises(ModelFilesError, match="still to be made"):
        load(hollow.folder)
    refused = run(hollow.folder, prompt_ids=list(PROMPT_IDS))
    assert refused.code == 11 and "models fill" in refused.error["remedy"]
    planned = run(
        hollow.folder, prompt_ids=list(PROMPT_IDS), arithmetic="none", config={"weight_budget": "60%", "granule": 4096}
    )
    assert planned.code == 0 and not planned.broken_equations() and planned.counters["page_ins"] > 0
    report = zoo.check(hollow.folder)
    assert not report.ok and [f.what for f in report.findings if f.state is not zoo.State.OK] == ["weights"]


def test_filling_gives_the_whole_build(hollow: zoo.ModelFacts, built: dict[str, zoo.ModelFacts]) -> None:
    whole = built["qwen2.5-7b"]
    assert hollow.model_digest != whole.model_digest
    filled = zoo.fill(hollow.folder)
    assert (filled.model_digest, filled.zoo, filled.built) == (whole.model_digest, whole.zoo, True)
    assert sorted(p.name for p in hollow.folder.iterdir()) == sorted(p.name for p in whole.folder.iterdir())
    assert zoo.check(hollow.folder).ok
    assert not zoo.fill(hollow.folder).built  # and once more is nothing


def test_a_whole_build_over_a_hollow_one_fills_it_and_the_other_way_leaves_it(hollow: zoo.ModelFacts) -> None:
    form = small("qwen2.5-7b")
    again = build_geometry("qwen2.5-7b", form, 5, hollow.folder, hollow=True)
    assert not again.built and again.hollow_bytes is not None
    assert build_geometry("qwen2.5-7b", form, 5, hollow.folder).hollow_bytes is None
    assert build_geometry("qwen2.5-7b", form, 5, hollow.folder, hollow=True).hollow_bytes is None


def test_what_is_not_filled(hollow: zoo.ModelFacts, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="no zoo build"):
        zoo.fill(tmp_path)
    tiny = zoo.build("tiny", tmp_path / "tiny", cache_dir=tmp_path).folder
    with pytest.raises(ModelFilesError, match="no model with weights from a seed"):
        zoo.fill(tiny)
    path = hollow.folder / "zoo.json"
    recorded = json.loads(path.read_text())
    path.write_text(json.dumps({**recorded, "options": {**recorded["options"], "seed": 6}}))
    with pytest.raises(ModelFilesError, match="another version"):
        zoo.fill(hollow.folder)
    path.write_text(json.dumps(recorded))
    graph = hollow.folder / "model.onnx"
    graph.write_bytes(graph.read_bytes() + b"\0")
    with pytest.raises(ModelFilesError, match="not what its recipe gives"):
        zoo.fill(hollow.folder)
    assert not [p for p in hollow.folder.iterdir() if p.name.startswith(".")]
    with pytest.raises(ModelFilesError, match="still to be made"):
        load(hollow.folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiny", {"layers": 2}),
        ("tiny", {"hollow": True}),
        ("smollm2-135m", {"layers": 2}),
        ("tiny", {"peaked": False}),
        ("qwen2.5-7b", {"layers": 0}),
        ("qwen2.5-7b", {"seed": -1}),
        ("qwen2.5-7b", {"source": Path("x")}),
    ],
)
def test_what_cannot_be_built(name: str, words: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadRequest):
        zoo.build(name, tmp_path / "out", cache_dir=tmp_path, **words)
    assert not (tmp_path / "out").exists()


# -- full size


def test_a_full_size_7b_loads_and_runs_plan_only_in_little_time_and_memory(tmp_path: Path) -> None:
    folder = zoo.build("qwen2.5-7b", tmp_path / "7b", hollow=True, cache_dir=tmp_path).folder
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["--model", str(folder), "--prompt-ids", "1 17 42 99", "--tokens", "16", "--weight-budget", "50%", "--json"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "engine", "run", "--plan-only", *words],
        env={**os.environ, "PYTHONPATH": str(Path(zoo.__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["facts"]["weight_bytes"] == 3_977_702_400
    assert all(e["holds"] for e in result["equations"]) and result["counters"]["page_ins"] > 0
    assert result["peak_rss_bytes"] < 500 << 20
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (
        after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 10
    )  # seconds of work, however busy the host
