"""Model folders whose config is not there or does not name everything: the same ids, and what decided is said."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from engine import oracle
from engine.__main__ import main
from engine.bind import lower
from engine.errors import ModelFilesError, UnsupportedModel
from engine.graph import CACHE_KINDS
from engine.onnx_load import load
from engine.zoo import check, model_digest
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny, edited, run


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model; tests copy it before they change it."""
    return build_tiny(tmp_path_factory.mktemp("structure"))


ODD = {"input_ids": "tokens", "attention_mask": "keep", "logits": "scores"}


def bare(source: Path, into: Path, names: Mapping[str, str] = ODD) -> Path:
    """The model without any config, its inputs and outputs under other names and in the reverse order."""

    def edit(model: onnx.ModelProto) -> None:
        for node in model.graph.node:
            for side in (node.input, node.output):
                side[:] = [names.get(n, n) for n in side]
        for values in (model.graph.input, model.graph.output):
            for value in values:
                value.name = names.get(value.name, value.name)
                for dim in value.type.tensor_type.shape.dim:
                    if dim.dim_param:
                        dim.dim_param = "past"
            turned = list(values)[::-1]
            del values[:]
            values.extend(turned)

    folder = edited(source, into, edit)
    (folder / "genai_config.json").unlink()
    return folder


def test_field_52_a_folder_without_a_config_gives_the_same_ids_and_gaps(tiny: Path, tmp_path: Path) -> None:
    """Every symbol is "past", on both sides; nothing but the graph says anything."""
    found, expected = run(bare(tiny, tmp_path / "m")), run(tiny)
    assert found.streams == expected.streams
    assert "end ids by nothing: a run ends at its length" in found.facts["bound_by"]
    assert "caches, logits, ids, mask, heads, vocabulary by structure" in found.facts["bound_by"]
    assert "genai_config.json" in expected.facts["bound_by"] and "structure" not in expected.facts["bound_by"]


def test_numbers_come_from_hugging_faces_configs_and_are_in_the_digest(tiny: Path, tmp_path: Path) -> None:
    folder = bare(tiny, tmp_path / "m")
    digests = {model_digest(folder)}
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 100, "eos_token_id": 7}))
    info = load(folder).info
    assert (info.context_length, info.eos_ids) == (100, (7,))
    assert (info.bound_by["context length"], info.bound_by["end ids"]) == ("config.json", "config.json")
    digests.add(model_digest(folder))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    info = load(folder).info
    assert info.eos_ids == (8, 9) and info.bound_by["end ids"] == "generation_config.json"
    digests.add(model_digest(folder))
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 300}, "max_position_embeddings": 1}))
    assert (load(folder).info.vocabulary, load(folder).info.context_length) == (300, len_of_tables(tiny))
    digests.add(model_digest(folder))
    assert len(digests) == 4, "each file that decides something changes the digest"
    (folder / "README.json").write_text("{}")
    assert model_digest(folder) in digests


def len_of_tables(folder: Path) -> int:
    """Positions that the rotary tables hold."""
    return next(w.shape[0] for n, w in load(folder).weights.items() if "cos" in n)


def test_tables_that_are_shorter_than_the_config_says_are_what_was_exported(tiny: Path, tmp_path: Path) -> None:
    folder = bare(tiny, tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 1 << 20}))
    info = load(folder).info
    assert (info.context_length, info.bound_by["context length"]) == (len_of_tables(tiny), "rotary or position tables")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "stop"}', '{"eos_token_id": [true]}'])
def test_hugging_faces_config_that_is_broken_is_refused(tiny: Path, tmp_path: Path, name: str, content: str) -> None:
    folder = bare(tiny, tmp_path / "m")
    (folder / name).write_text(content)
    with pytest.raises(ModelFilesError, match=name):
        load(folder)


def test_a_links_way_out_of_the_folder_is_closed_to_these_configs_too(tiny: Path, tmp_path: Path) -> None:
    folder = bare(tiny, tmp_path / "m")
    (tmp_path / "outside.json").write_text('{"eos_token_id": 5}')
    (folder / "generation_config.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(ModelFilesError, match=r"generation_config\.json"):
        load(folder)


def test_a_graph_under_another_name_is_found_and_two_are_refused(tiny: Path, tmp_path: Path) -> None:
    folder = bare(tiny, tmp_path / "m")
    (folder / "model.onnx").rename(folder / "decoder_with_past.onnx")
    assert load(folder).info.input_ids == "tokens"
    shutil.copy(folder / "decoder_with_past.onnx", folder / "encoder.onnx")
    with pytest.raises(ModelFilesError, match=r"several graphs: decoder_with_past\.onnx, encoder\.onnx"):
        load(folder)


def named_by_config(tiny: Path, into: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """The tiny model with a config in which something is left out or added."""
    folder = shutil.copytree(tiny, into)
    config = json.loads((folder / "genai_config.json").read_text())
    change(config["model"]["decoder"])
    (folder / "genai_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("inputs"),
        lambda d: d.pop("outputs"),
        lambda d: (d.pop("inputs"), d.pop("outputs")),
        lambda d: d["inputs"].pop("past_value_names"),
        lambda d: (d["inputs"].pop("input_ids"), d["outputs"].pop("present_key_names")),
    ],
)
def test_field_52_what_a_config_does_not_name_is_bound_by_structure(
    tiny: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    folder = named_by_config(tiny, tmp_path / "m", change)
    found = load(folder).info
    assert replace(found, bound_by={}) == replace(load(tiny).info, bound_by={})
    assert "structure" in found.bound_by.values()
    assert run(folder).streams == run(tiny).streams


def test_field_52_a_name_that_is_given_must_fit_the_structure(tiny: Path, tmp_path: Path) -> None:
    def cross(d: dict[str, Any]) -> None:
        del d["outputs"]
        d["inputs"]["past_key_names"] = d["inputs"]["past_value_names"]

    with pytest.raises(UnsupportedModel, match="names past_key_names") as caught:
        load(named_by_config(tiny, tmp_path / "m", cross))
    assert "'past_key_values.1.key'" in caught.value.message


def test_plan_and_check_say_what_was_bound_by_what(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = bare(tiny, tmp_path / "m")
    assert main(["plan", "--model", str(folder)]) == 0
    [line] = [row for row in capsys.readouterr().out.splitlines() if row.startswith("bound by: ")]
    assert "by structure" in line and "context length by rotary or position tables" in line
    [finding] = [f for f in check(folder).findings if f.what == "bound by"]
    assert f"bound by: {finding.detail}" == line


@pytest.mark.parametrize("name", ["llama", "gemma", "phi", "qwen"])
def test_field_52_exporters_own_names_are_found_without_the_config(checkout: Path, tmp_path: Path, name: str) -> None:
    """The config's own answer is what the structure gives, whatever the family, its table's form or its states."""
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    for source in sorted(folder.glob(f"{name}*")):
        copy = shutil.copytree(source, tmp_path / source.name)
        told = load(copy).info
        (copy / "genai_config.json").unlink()
        found = load(copy).info
        assert replace(found, eos_ids=(), bound_by={}) == replace(told, eos_ids=(), bound_by={}), source.name


def test_field_52_states_and_positions_of_a_hybrid_by_other_names(checkout: Path, tmp_path: Path) -> None:
    source = checkout.parent / "shared" / "models" / "qwen35-int4-cuda"
    if not source.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    told = load(source).info
    carried = [n for pair in told.states for n in pair] + [getattr(c, k) for c in told.caches for k in CACHE_KINDS]
    names = {name: f"carried_{i}_x" for i, name in enumerate(carried)}
    names |= {"position_ids": "where", "input_ids": "what"}
    folder = bare(source, tmp_path / "m", names)
    found = load(folder)
    assert (found.info.position_ids, found.info.input_ids) == ("where", "what")
    assert found.info.states == tuple((names[a], names[b]) for a, b in told.states)
    benches = [Bench(graph, rows=(4,)) for graph in (load(source), found)]
    for bench in benches:
        bench.prefill(TINY_PROMPT)
        bench.force(5)
    assert benches[0].logits().tobytes() == benches[1].logits().tobytes()


def test_the_oracle_takes_what_structure_bound(tiny: Path, tmp_path: Path) -> None:
    graph = load(bare(tiny, tmp_path / "m"))
    assert oracle.logits(graph, TINY_PROMPT).tobytes() == oracle.logits(load(tiny), TINY_PROMPT).tobytes()
    lower(graph, 1)


def test_a_constant_whose_name_is_no_text_is_refused(tiny: Path, tmp_path: Path) -> None:
    """protobuf hands out such a name and takes no such name back."""

    def edit(model: onnx.ModelProto) -> None:
        values = onnx.numpy_helper.from_array(np.arange(4))
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["odd_name"], value=values))

    folder = edited(tiny, tmp_path / "m", edit)
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content.replace(b"odd_name", b"odd\xfbname"))
    with pytest.raises(ModelFilesError, match="a name that is no text"):
        load(folder)


def test_damaged_graphs_without_a_config_are_refused_and_never_crash(tiny: Path, tmp_path: Path) -> None:
    folder = bare(tiny, tmp_path / "m")
    content, drawn = (folder / "model.onnx").read_bytes(), random.Random(52)
    served = 0
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(drawn.choice((1, 1, 2, 5))):
            damaged[drawn.randrange(len(damaged))] = drawn.randrange(256)
        (folder / "model.onnx").write_bytes(bytes(damaged))
        with suppress(ModelFilesError, UnsupportedModel):
            lower(load(folder), 1)
            served += 1
    assert 0 < served < 60
