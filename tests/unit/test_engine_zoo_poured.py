"""Poured and skewed models: as large and as finite as any, reproducible, and no other model's bytes change for them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine import zoo
from engine.errors import BadRequest
from engine.onnx_load import load
from engine.zoo.geometries import FORMS, GEOMETRIES, build_geometry
from engine.zoo.seeded import Poured, Source
from tests.unit.engine_rig import run


def build(name: str, folder: Path, **options: object) -> zoo.ModelFacts:
    return zoo.build(name, folder, cache_dir=folder.parent, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["qwen2-small", "qwen2-small-zp", "hybrid-small"])
def poured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> zoo.ModelFacts:
    return build(request.param, tmp_path_factory.mktemp("poured") / "m", poured=True)


def test_a_poured_model_is_whole_by_its_own_digests_and_the_same_each_time(
    poured: zoo.ModelFacts, tmp_path: Path
) -> None:
    assert zoo.check(poured.folder).ok
    assert build(poured.name, tmp_path / "again", poured=True).model_digest == poured.model_digest
    assert build(poured.name, tmp_path / "other", poured=True, seed=5).model_digest != poured.model_digest
    assert build(poured.name, tmp_path / "seeded").model_digest != poured.model_digest


def test_a_hollow_one_is_filled_to_the_same_bytes(poured: zoo.ModelFacts, tmp_path: Path) -> None:
    hollow = build(poured.name, tmp_path / "m", poured=True, hollow=True)
    assert hollow.hollow_bytes and zoo.fill(hollow.folder).model_digest == poured.model_digest


def test_it_decodes_and_its_answers_move(poured: zoo.ModelFacts) -> None:
    outcome = run(poured.folder, prompt_ids=[1, 17, 42, 99], tokens=24, ignore_eos=True)
    assert len(set(outcome.streams[0][0])) > 4, "not one answer for ever"


def test_numbers_are_spread_as_a_seeds_are() -> None:
    for source in (Source(3), Poured(3)):
        weight = source.linear("w", 256, 512, 0.5, asymmetric=True)
        values = weight.values(np.arange(256))
        assert abs(float(values.std()) - 0.5) < 0.02 and abs(float(values.mean())) < 0.02
    rows = Poured(3).linear("w", 4000, 1024, 1.0).codes.rows(np.arange(4000))
    assert len({row.tobytes() for row in rows}) == 4000


def test_rows_are_the_same_in_any_order() -> None:
    tensor = Poured(1).codes("w", (5000, 1000), 1000, symmetric=True)
    at_once = np.concatenate(list(tensor.chunks()))
    some = np.array([4999, 0, 17, 4194])
    assert (tensor.rows(some) == at_once[some]).all() and (at_once & 15).min() > 0


def test_recipes_of_what_was_there_before_are_what_they_were(tmp_path: Path) -> None:
    keys = {
        "qwen2.5-0.5b": "c28ce05b4ac6a566fa615cfe353be4a9a8e120508bdcc1472a2b2371e276201c",
        "35b-a3b": "50250a7925d9534ba27c763cd028fc686cb8c9eb7138e832046b9cb47a8e9421",
    }
    for name, key in keys.items():
        made = build_geometry(name, GEOMETRIES[name].with_layers(4), 1234, tmp_path / name, hollow=True)
        assert made.zoo["recipe_key"] == key


def test_skewed_routers_choose_some_experts_more_often(tmp_path: Path) -> None:
    sizes = {}
    for skew in (0.0, 1.5):
        folder = build("hybrid-small", tmp_path / f"m{skew}", poured=True, skew=skew).folder
        scales = load(folder).weights["model.layers.0.moe.router.MatMul.weight_scales"].data
        sizes[skew] = scales.view(np.float16).astype(np.float32).reshape(16, -1).mean(axis=1)
    assert sizes[0.0].max() / sizes[0.0].min() < 1.5
    assert sizes[1.5].max() / sizes[1.5].min() > 4


def test_what_has_no_router_or_is_made_as_it_is_takes_neither(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no router to skew"):
        build("qwen2-small", tmp_path / "a", skew=1.0)
    with pytest.raises(BadRequest, match="skew 9"):
        build("hybrid-small", tmp_path / "b", skew=9.0)
    for option in ({"poured": True}, {"skew": 1.0}):
        with pytest.raises(BadRequest, match="made as it is"):
            build("tiny", tmp_path / "c", **option)


def test_small_forms_are_named_beside_the_geometries() -> None:
    assert set(FORMS) - set(GEOMETRIES) == {"qwen2-small", "qwen2-small-zp", "hybrid-small"}
    assert set(FORMS) <= set(zoo.MODELS)
