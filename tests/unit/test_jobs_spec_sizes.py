"""Sizes of a sweep, axes of a run, drawn prompts, witnesses of some cells; each shipped sweep in each of its sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.model import Manifest
from jobs.provenance import ModelSource
from jobs.spec import load, plan
from jobs.spec.planning import drawn_ids
from jobs.spec.sizes import size_names
from jobs.spec.yaml_lines import read_file
from tests.unit.test_jobs_spec import FakeResolver, write

SIZED = """\
sweep: sized
models: {toy: {build: tiny, seed: 7}}
prompts: {short: {ids: [1, 2]}}
arms:
  base: {source: checkout, config: {policy: lru}}
  head: {like: base, config: {policy: stable}}
matrix: {weight_budget: ["50%"], granule: [4096]}
varies: [policy]
run: {tokens: 4}
locks:
  - {prompt: short, index: 0, expected: 5}
sizes:
  full:
    models: {toy: {build: 35b-a3b, seed: , poured: true}}
    matrix: {granule: , weight_budget: ["75%", "90%"]}
    run: {generations: 1}
    locks:
  brief:
    like: full
    sweep: a-glance
    matrix: {weight_budget: ["75%"]}
"""


def sized(folder: Path, size: str | None, text: str = SIZED) -> tuple[Manifest, FakeResolver]:
    resolver = FakeResolver()
    return plan(load(write(folder, text), size), resolver), resolver


def test_a_size_is_laid_over_the_rest_of_the_file(tmp_path: Path) -> None:
    manifest, resolver = sized(tmp_path, "full")
    assert manifest.name == "sized-full"
    assert resolver.asked[0] == ("toy", ModelSource(build="35b-a3b", poured=True))
    assert [cell.config for cell in manifest.cells] == [{"weight_budget": "75%"}, {"weight_budget": "90%"}]
    settings = manifest.cells[0].settings
    assert (settings.tokens, settings.generations, manifest.cells[0].locks) == (4, 1, ())
    assert manifest.source_text == SIZED


def test_without_a_size_nothing_of_any_is_in_force(tmp_path: Path) -> None:
    manifest, resolver = sized(tmp_path, None)
    assert manifest.name == "sized" and resolver.asked[0] == ("toy", ModelSource(build="tiny", seed=7))
    assert [cell.config for cell in manifest.cells] == [{"weight_budget": "50%", "granule": 4096}]
    assert manifest.cells[0].settings.generations == 3 and len(manifest.cells[0].locks) == 1


def test_a_size_may_be_like_another(tmp_path: Path) -> None:
    manifest, resolver = sized(tmp_path, "brief")
    assert manifest.name == "a-glance" and resolver.asked[0] == ("toy", ModelSource(build="35b-a3b", poured=True))
    assert [cell.config for cell in manifest.cells] == [{"weight_budget": "75%"}]
    assert manifest.cells[0].settings.generations == 1


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("generations: 1", "generations: some", 16, "run.generations: expected a whole number"),
        ('"75%", "90%"', '"75%", "0%"', 15, "weight_budget is '0%'"),
        ("build: 35b-a3b, seed: ", "build: 35b-a3b, hollow: true, seed: ", 14, "is hollow"),
        ("like: full", "like: ful", 19, "no size 'ful' (did you mean 'full'?)"),
        ("like: full", "like: brief", 19, "is like itself"),
        ("  full:\n", "  full:\n    sizes: {}\n", 14, "unknown key 'sizes'"),
        (
            "  brief:\n    like: full\n    sweep: a-glance\n    matrix: {",
            "  brief: [{",
            18,
            "expected a mapping of keys",
        ),
    ],
)
def test_every_size_is_checked_and_its_faults_have_its_lines(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    """Without any size asked for, too."""
    text = SIZED.replace(old, new)
    text = text.replace('"75%"]}\n', '"75%"]}]\n') if new.endswith("[{") else text
    assert text != SIZED
    with pytest.raises(SpecError) as caught:
        load(write(tmp_path, text))
    assert says in str(caught.value) and f"sweep.yaml:{line}:" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "remedy"), [(SIZED, "did you mean 'full'"), (SIZED.partition("sizes:")[0], "one size")]
)
def test_a_size_that_is_not_there_is_refused(tmp_path: Path, text: str, remedy: str) -> None:
    with pytest.raises(SpecError, match="no size 'fulls'") as caught:
        load(write(tmp_path, text), "fulls")
    assert remedy in str(caught.value)


def test_warm_ups_may_be_an_axis(tmp_path: Path) -> None:
    manifest, _ = sized(tmp_path, None, SIZED.replace("granule: [4096]}", "granule: [4096], warmups: [0, 2]}"))
    assert [(cell.cell.rpartition("/")[2], cell.settings.warmups) for cell in manifest.cells] == [
        ("warmups=0", 0),
        ("warmups=2", 2),
    ]
    assert all("warmups" not in cell.config for cell in manifest.cells), "it is no engine config"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("run: {tokens: 4}", "run: {tokens: 4, warmups: 1}", "'warmups' is also in the matrix"),
        ("warmups: [0]", "warmups: [-1]", "warmups is -1"),
        ("warmups: [0]", "warmups: [true]", "warmups is True"),
        ("warmups: [0]", "warmups: [0, 0]", "stands twice"),
    ],
)
def test_warm_ups_that_cannot_be_are_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = SIZED.replace("granule: [4096]}", "granule: [4096], warmups: [0]}").replace(old, new)
    with pytest.raises(SpecError) as caught:
        load(write(tmp_path, text))
    assert says in str(caught.value)


def test_a_prompt_by_length_is_the_same_everywhere_and_of_the_vocabulary() -> None:
    drawn = drawn_ids("long", 500, 1000)
    assert drawn == drawn_ids("long", 500, 1000) and len(drawn) == 500 and min(drawn) >= 0 and max(drawn) < 1000
    assert drawn[:20] != drawn_ids("short", 20, 1000) and len(set(drawn)) > 300
    assert drawn[:3] == (279, 85, 115)
    assert drawn_ids("long", 3, None) == (0, 0, 0), "before the model is there"


def test_a_witness_holds_in_the_cells_that_it_names(tmp_path: Path) -> None:
    asked = 'witnesses: [{expr: "replays > 0", where: {capture: true}}, {expr: "page_ins > 0"}]\nlocks:'
    text = SIZED.replace("granule: [4096]}", "capture: [true, false]}").replace("locks:", asked, 1)
    manifest, _ = sized(tmp_path, None, text.partition("sizes:")[0])
    assert [[row.expr for row in cell.witnesses] for cell in manifest.cells] == [
        ["replays > 0", "page_ins > 0"],
        ["page_ins > 0"],
    ]


@pytest.mark.parametrize(
    ("where", "says"), [("{captured: 1}", "no axis 'captured'"), ("{granule: 8192}", "granule is never 8192")]
)
def test_a_witness_of_no_cell_is_refused(tmp_path: Path, where: str, says: str) -> None:
    text = SIZED.partition("sizes:")[0] + f'witnesses: [{{expr: "page_ins > 0", where: {where}}}]\n'
    with pytest.raises(SpecError) as caught:
        load(write(tmp_path, text))
    assert says in str(caught.value)


SHIPPED = {
    "residency": {None, "full", "brief"},
    "capture": {None, "full"},
    "addresses": {None, "full"},
    "kv-batch": {None, "full"},
    "ladder": {None, "full"},
    "experts": {None, "full", "brief"},
}
KERNELS: set[str | None] = {None, "full", "brief"}


@pytest.mark.parametrize(
    ("name", "size"), [(n, size) for n, sizes in SHIPPED.items() for size in sorted(sizes, key=str)]
)
def test_each_shipped_sweep_plans_in_each_size(checkout: Path, name: str, size: str | None) -> None:
    """Small models without a card, whole geometries on one; each with witnesses, invariants and tokens that gate."""
    path = checkout / f"sweeps/{name}.yaml"
    assert {None, *size_names(read_file(path, ""))} == SHIPPED[name]
    resolver = FakeResolver()
    manifest = plan(load(path, size), resolver)
    models = [part for one in resolver.asked if isinstance(one, tuple) for part in one if isinstance(part, ModelSource)]
    assert models and all(model.poured == (size is not None) for model in models)
    assert all((model.build or "").endswith(("small", "small-zp")) == (size is None) for model in models)
    assert manifest.gate.identity == "block"
    for cell in manifest.cells:
        assert cell.witnesses and cell.invariants
        assert cell.settings.arithmetic == "full" and cell.settings.device == "auto"
        assert ("granule" in cell.config) == (size is None and name not in ("capture", "ladder"))


@pytest.mark.parametrize("size", sorted(KERNELS, key=str))
def test_the_sweep_of_kernels_plans_in_each_size(checkout: Path, size: str | None) -> None:
    path = checkout / "sweeps/kernels.yaml"
    assert {None, *size_names(read_file(path, ""))} == KERNELS
    manifest = plan(load(path, size), FakeResolver())
    assert {cell.kind for cell in manifest.cells} == {"kernel"} and len(manifest.cells) == (8 if size else 4)
    assert all(cell.witnesses and cell.invariants for cell in manifest.cells)
    assert all(("small" in str(source.path)) is (size is None) for source in cases(path, size))


def cases(path: Path, size: str | None) -> list[ModelSource]:
    resolver = FakeResolver()
    plan(load(path, size), resolver)
    found = [part for one in resolver.asked if isinstance(one, tuple) for part in one if isinstance(part, ModelSource)]
    assert found and all(source.path is not None and source.path.is_file() and source.any_files for source in found)
    return found
