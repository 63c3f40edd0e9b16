"""Sweep files that are sound: what is read, what is planned, and that the documented example holds every key."""

from __future__ import annotations

import re
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from engine.zoo import DEFAULT_SEED
from jobs.contract import IdentityContract
from jobs.errors import RefError, SpecError
from jobs.model import Gate, Limits, Lock, Manifest, RunSettings
from jobs.order import run_order
from jobs.provenance import ArmSource, ModelSource, ResolvedArm, ResolvedModel
from jobs.spec import load, plan
from jobs.spec.form import (
    ExpectationForm,
    ExpectationsForm,
    GateForm,
    IdentityForm,
    LimitsForm,
    LockForm,
    RunForm,
    SweepForm,
)

SMALL = """\
sweep: small
models: {toy: {build: tiny, seed: 7}}
prompts: {short: {ids: [1, 2]}, long: {text: "one two"}}
arms:
  base: {source: "git:main", config: {policy: lru}}
  null: {like: base}
  head: {source: checkout}
varies: [policy]
run: {tokens: 4}
"""


@dataclass
class FakeResolver:
    """Answers without files or git, and notes what it was asked."""

    asked: list[object] = field(default_factory=list)
    no_such: str | None = None

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        self.asked.append((name, source))
        return ResolvedModel(Path("/models") / name, f"digest of {name}")

    def prompt_ids(self, model: ResolvedModel, text: str) -> tuple[int, ...]:
        return tuple(len(word) for word in text.split())

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        self.asked.append((name, source))
        if source.value == self.no_such:
            raise RefError(f"no such git ref: {source.value!r}", "fetch it first")
        if source.kind == "installed":
            return ResolvedArm(None, "wheel")
        return ResolvedArm(Path("/trees") / source.kind, f"tree of {source.kind}", "c0ffee")


def write(folder: Path, text: str, name: str = "sweep.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def planned(folder: Path, text: str) -> Manifest:
    return plan(load(write(folder, text)), FakeResolver())


def test_cells_are_every_combination_in_the_order_written(tmp_path: Path) -> None:
    axes = 'matrix: {prompt: [long, short], weight_budget: ["50%", null, 4096], capture: [true, false]}\n'
    manifest = planned(tmp_path, SMALL + axes)
    assert [cell.cell for cell in manifest.cells][:4] == [
        "toy/long/weight_budget=50%/capture=on",
        "toy/long/weight_budget=50%/capture=off",
        "toy/long/weight_budget=none/capture=on",
        "toy/long/weight_budget=none/capture=off",
    ]
    assert len({cell.cell for cell in manifest.cells}) == len(manifest.cells) == 12
    assert manifest.cells[1].config == {"weight_budget": "50%", "capture": False}
    assert manifest.cells[0].prompt_ids == (3, 3)
    assert manifest.cells[-1].prompt_ids == (1, 2)
    assert manifest.cells[0].model_path == "/models/toy"
    assert manifest.cells[0].model_digest == "digest of toy"


def test_models_and_prompts_left_out_of_the_matrix_all_count(tmp_path: Path) -> None:
    assert [cell.cell for cell in planned(tmp_path, SMALL).cells] == ["toy/short", "toy/long"]


def test_arms_keep_their_order_roles_and_what_they_take_over(tmp_path: Path) -> None:
    more = SMALL.replace("varies", "  calm: {like: head, role: variant, config: {policy: stable_slot}}\nvaries")
    arms = planned(tmp_path, more).arms
    assert [(arm.name, arm.role) for arm in arms] == [
        ("base", "base"), ("null", "null"), ("head", "head"), ("calm", "variant"),
    ]  # fmt: skip
    base, null, head, calm = arms
    assert (null.source, null.config, null.tree_digest) == (base.source, base.config, base.tree_digest)
    assert (base.source, base.commit, base.python_path) == ("git:main", "c0ffee", "/trees/git")
    assert (head.config, calm.config, calm.source) == ({}, {"policy": "stable_slot"}, "checkout")


def test_an_installed_arm_has_no_tree(tmp_path: Path) -> None:
    arms = planned(tmp_path, SMALL.replace("source: checkout", "source: installed")).arms
    assert arms[-1].python_path is None
    assert arms[-1].tree_digest == "wheel"


def test_folders_count_from_the_sweep_file(tmp_path: Path) -> None:
    text = SMALL.replace("{build: tiny, seed: 7}", "{path: ../models/toy}").replace("checkout", "path:../head")
    resolver = FakeResolver()
    plan(load(write(tmp_path / "sweeps", text)), resolver)
    assert ("toy", ModelSource(path=tmp_path / "models/toy")) in resolver.asked
    assert ("head", ArmSource("path", str(tmp_path / "head"))) in resolver.asked


def test_a_refusal_by_the_resolver_points_at_the_key_that_asked(tmp_path: Path) -> None:
    spec = load(write(tmp_path, SMALL))
    with pytest.raises(RefError, match=r"sweep\.yaml:5: no such git ref: 'main' \(fetch it first\)") as caught:
        plan(spec, FakeResolver(no_such="main"))
    assert caught.value.exit_code == 2


def test_text_without_a_token_is_an_empty_prompt(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"sweep\.yaml:3: the prompt 'long' is empty"):
        planned(tmp_path, SMALL.replace('"one two"', '"  "'))


def test_the_manifest_holds_the_file_and_equal_files_have_equal_digests(tmp_path: Path) -> None:
    one, two = planned(tmp_path / "a", SMALL), planned(tmp_path / "b", SMALL)
    assert one.source_text == SMALL
    assert one.digest() == two.digest()
    assert one.digest() != planned(tmp_path / "c", SMALL.replace("tokens: 4", "tokens: 5")).digest()
    assert Manifest.model_validate_json(one.canonical()) == one


def test_defaults_of_the_file_are_the_documents_defaults() -> None:
    """Two places say them; they may not drift apart."""
    for form, document in ((GateForm, Gate), (IdentityForm, IdentityContract), (LimitsForm, Limits)):
        assert document(**form().model_dump()) == document()
    assert RunSettings(**RunForm(tokens=4).model_dump()) == RunSettings(tokens=4)
    least: dict[str, Any] = {"prompt": "p", "index": 0, "expected": 1}
    assert Lock(**LockForm(**least).model_dump()) == Lock(**least)


def test_the_shipped_sweeps_load(checkout: Path) -> None:
    specs = [load(path) for path in sorted((checkout / "sweeps").glob("*.yaml"))]
    assert {spec.form.sweep for spec in specs} >= {"smollm2-residency", "tiny"}
    for spec in specs:
        assert spec.form.witnesses, f"{spec.form.sweep} would pass without having run what it is about"


def test_the_residency_sweep_asks_what_it_is_named_for(checkout: Path) -> None:
    manifest = plan(load(checkout / "sweeps/smollm2-residency.yaml"), FakeResolver())
    (cell,) = manifest.cells
    assert (cell.cell, cell.prompt_ids) == ("smollm2/capital/weight_budget=50%", (504, 3575, 282, 4649, 314))
    assert [(arm.role, arm.config) for arm in manifest.arms] == [
        ("base", {"policy": "lru"}), ("null", {"policy": "lru"}), ("head", {"policy": "stable"}),
    ]  # fmt: skip
    assert (cell.settings.tokens, cell.settings.generations) == (32, 3)
    assert [witness.expr for witness in cell.witnesses] == ["page_ins > 0"]
    assert run_order(cell, 0) == ("base", "null", "head", "head", "null", "base")


def test_the_tiny_sweep_runs_from_a_wheel(checkout: Path) -> None:
    manifest = plan(load(checkout / "sweeps/tiny.yaml"), FakeResolver())
    assert {arm.source for arm in manifest.arms} == {"installed"}
    assert {cell.config["granule"] for cell in manifest.cells} == {4096}


# ---- the documented example --------------------------------------------------------------------------------------


def yaml_blocks(checkout: Path) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```", (checkout / "docs/sweep-file.md").read_text("utf-8"), re.M | re.S)


def keys_below(annotation: object, value: object) -> set[tuple[str, str]]:
    """Each (form, key) that a document writes down, following the forms' own annotations."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        assert isinstance(value, dict)
        fields = {info.alias or name: info.annotation for name, info in annotation.model_fields.items()}
        own = {(annotation.__name__, key) for key in value}
        return own.union(*(keys_below(fields[key], item) for key, item in value.items()))
    inner = typing.get_args(annotation)
    optional = [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]
    if optional and type(None) in inner and isinstance(value, dict):
        return keys_below(optional[0], value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    forms = [found for one in inner for found in (one, *typing.get_args(one))]
    return set().union(*(keys_below(form, item) for form in forms for item in items if isinstance(item, dict)))


def every_key(form: type[BaseModel]) -> set[tuple[str, str]]:
    found = {(form.__name__, info.alias or name) for name, info in form.model_fields.items()}
    for info in form.model_fields.values():
        waiting: list[object] = [info.annotation]
        while waiting:
            annotation = waiting.pop()
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                found |= every_key(annotation)
            waiting += typing.get_args(annotation)
    return found


def keys_of_adapters(checkout: Path, tmp_path: Path) -> set[tuple[str, str]]:
    """Keys that the sweep files of docs/adapters.md hold, each of which loads."""
    found: set[tuple[str, str]] = set()
    for text in re.findall(r"```yaml\n(.*?)```", (checkout / "docs/adapters.md").read_text(), re.DOTALL):
        found |= keys_below(SweepForm, load(write(tmp_path, text, "adapters.yaml")).source.values)
    return found


def test_the_documented_example_loads_and_holds_every_key(checkout: Path, tmp_path: Path) -> None:
    example, expectations = yaml_blocks(checkout)
    write(tmp_path, expectations, "expected-changes.yaml")
    write(tmp_path, "waivers: []", "waivers.yaml")
    write(tmp_path, "goldens: []", "goldens.yaml")
    spec = load(write(tmp_path, example))
    assert [row.metric for row in spec.disk.expectations] == ["htod_bytes"]
    missing = every_key(SweepForm) - keys_below(SweepForm, spec.source.values) - keys_of_adapters(checkout, tmp_path)
    assert missing == set()
    assert {name for _, name in every_key(ExpectationForm)} - set(re.findall(r"\w+(?=:)", expectations)) == set()
    manifest = plan(spec, FakeResolver())
    assert len(manifest.cells) == 4
    assert manifest.expectations[0].change == "lower"
    assert {cell.prompt: len(cell.locks) for cell in manifest.cells} == {"count": 1, "story": 0}


def test_the_key_check_sees_a_key_that_is_not_documented() -> None:
    """The check above must be able to fail."""
    example = {"sweep": "x", "models": {"m": {"build": "tiny"}}, "expectations": "a.yaml"}
    missing = every_key(SweepForm) - keys_below(SweepForm, example)
    assert {("ModelForm", "seed"), ("ArmForm", "like"), ("CardsForm", "class"), ("LockForm", "margin")} <= missing
    assert ("ModelForm", "build") not in missing
    assert ("ExpectationForm", "reason") in every_key(ExpectationsForm)


def test_documented_defaults_are_the_defaults(checkout: Path) -> None:
    example, _ = yaml_blocks(checkout)
    defaults: dict[str, object] = {}
    for key, info in [
        pair for form in (RunForm, LimitsForm, GateForm, IdentityForm) for pair in form.model_fields.items()
    ]:
        defaults[key] = info.default
    said = dict(re.findall(r"^  (\w+):.*\bdefault ([\w.]+)$", example, re.M))
    assert said.pop("toy") == str(DEFAULT_SEED), "of its seed"
    assert len(said) > 12
    for key, word in said.items():
        if key in defaults:
            value = defaults[key]
            shown = (
                str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
            )
            assert word == str(shown), key


def test_sequences_of_a_batch_take_the_prompts_in_turn(tmp_path: Path) -> None:
    """From the cell's own prompt on; as many as the batch has, and once around at most."""
    manifest = planned(tmp_path, SMALL + "matrix: {batch: [1, 2, 4]}\n")
    given = {cell.cell: (cell.prompt_ids, cell.further_prompts) for cell in manifest.cells}
    assert given == {
        "toy/short/batch=1": ((1, 2), ()),
        "toy/short/batch=2": ((1, 2), ((3, 3),)),
        "toy/short/batch=4": ((1, 2), ((3, 3),)),
        "toy/long/batch=1": ((3, 3), ()),
        "toy/long/batch=2": ((3, 3), ((1, 2),)),
        "toy/long/batch=4": ((3, 3), ((1, 2),)),
    }
    base = manifest.arms[0]
    assert [cell.batch(base) for cell in manifest.cells[:3]] == [1, 2, 4]
    only = planned(tmp_path, SMALL + "matrix: {batch: [3], prompt: [long]}\n")
    assert only.cells[0].further_prompts == (), "a prompt that is not in the matrix is in no batch"


def test_arms_may_differ_in_their_batch(tmp_path: Path) -> None:
    text = SMALL.replace("{source: checkout}", "{source: checkout, config: {batch: 2}}")
    cell = (manifest := planned(tmp_path, text.replace("[policy]", "[policy, batch]"))).cells[0]
    prompts = {arm.name: (cell.batch(arm), cell.prompts(arm)) for arm in manifest.arms}
    assert prompts["base"] == (1, ((1, 2),)) and prompts["head"] == (2, ((1, 2), (3, 3)))
    with pytest.raises(SpecError, match="differs from base in batch"):
        load(write(tmp_path, text))
    bare = planned(tmp_path, SMALL)
    assert all("further_prompts" not in cell.model_dump() for cell in bare.cells), "stored manifests keep their digests"
