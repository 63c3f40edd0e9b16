"""Settings that the engine takes alone and not together: refused at planning, at the line that asks for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import BadRequest
from jobs.errors import SpecError
from jobs.provenance import ModelSource, ResolvedModel
from jobs.spec import load, plan
from tests.unit.test_jobs_spec import FakeResolver, write

SOUND = """\
sweep: together
models: {toy: {build: tiny}}
prompts: {short: {ids: [1, 2]}, long: {ids: [1, 2, 3, 4, 5]}}
arms:
  base: {source: checkout, config: {policy: lru}}
  null: {like: base}
  head: {source: checkout, config: {policy: stable}}
matrix:
  weight_budget: ["50%"]
varies: [policy]
run: {tokens: 4}
"""

REUSE = "prefix_reuse without a warm-up"
CASES = {
    "of one arm": ("policy: stable}", "prefix_reuse: true}", 7, REUSE, "1 warm-up"),
    "taken over by like": ("policy: lru}", "policy: lru, prefix_reuse: true}", 5, REUSE, "1 warm-up"),
    "of the matrix": ("matrix:", "matrix:\n  prefix_reuse: [false, true]", 9, REUSE, "1 warm-up"),
    "too few positions": (
        "matrix:",
        "matrix:\n  kv_capacity: [16,\n    7]",
        10,
        "kv_capacity 7 is below the 8",
        "raise",
    ),
    "without effect": (
        "matrix:",
        "matrix:\n  hot_experts: [sweep.yaml]",
        9,
        "hot_experts has no effect",
        "stable_slot",
    ),
    "no such file": (
        "policy: stable}",
        "policy: stable_slot, hot_experts: gone.json}",
        7,
        "hot_experts: no file",
        "--routing-out",
    ),
}


def refused(folder: Path, text: str, resolver: FakeResolver) -> SpecError:
    with pytest.raises(SpecError) as caught:
        plan(load(write(folder, text)), resolver)
    return caught.value


@pytest.mark.parametrize("case", CASES)
def test_what_the_engine_does_not_take_together_is_refused_at_its_line(tmp_path: Path, case: str) -> None:
    old, new, line, message, remedy = CASES[case]
    text = SOUND.replace("varies: [policy]", "varies: [policy, prefix_reuse, hot_experts]")
    if case == "not on a card":
        text = text.replace("policy: stable}", "policy: staging}")
    if case == "of the matrix":
        text = text.replace("varies: [policy, prefix_reuse,", "varies: [policy,")
    if case == "without effect":
        text = text.replace(", hot_experts]", "]")
    assert text.count(old) == 1, "the case no longer fits the file"
    resolver = FakeResolver()
    error = refused(tmp_path, text.replace(old, new), resolver)
    assert (error.line, error.exit_code) == (line, 2), str(error)
    assert message in error.message and remedy in error.remedy
    assert not error.others, "one mistake is told once, however many cells and arms it spoils"
    assert resolver.asked == [("toy", ModelSource(build="tiny"))], "no arm may be built for a sweep that is refused"


def test_several_are_told_at_once_with_the_arm_and_the_cell(tmp_path: Path) -> None:
    text = SOUND.replace("policy: lru}", "policy: lru, kv_capacity: 6}").replace(
        "policy: stable}", "prefix_reuse: true}"
    )
    text = text.replace("varies: [policy]", "varies: [policy, prefix_reuse, kv_capacity]")
    lines = str(refused(tmp_path, text, FakeResolver())).splitlines()
    assert [line.split(": ")[0].rpartition(":")[2] for line in lines] == ["5", "7"]
    assert "arm 'base' in cell toy/long/weight_budget=50%: kv_capacity 6" in lines[0]


def test_what_is_sound_together_is_planned(tmp_path: Path) -> None:
    """A file that a setting names counts from the sweep's folder, for a child runs elsewhere."""
    text = SOUND.replace("{tokens: 4}", "{tokens: 4, warmups: 1}").replace(
        "varies: [policy]", "varies: [policy, hot_experts]"
    )
    text = text.replace("policy: stable}", "policy: stable_slot, hot_experts: hot.json}")
    text = text.replace("matrix:", "matrix:\n  prefix_reuse: [true]")
    (tmp_path / "hot.json").write_text("{}")
    manifest = plan(load(write(tmp_path, text)), FakeResolver())
    assert manifest.arms[-1].config["hot_experts"] == str(tmp_path / "hot.json")
    axis = SOUND.replace("config: {policy: lru}", "config: {policy: stable_slot}").replace(
        "[policy]", "[prefill_chunk]"
    )
    axis = axis.replace("policy: stable}", "policy: stable_slot, prefill_chunk: 1}")
    axis = axis.replace("matrix:", "matrix:\n  hot_experts: [hot.json, null]")
    cells = plan(load(write(tmp_path, axis)), FakeResolver()).cells
    assert [cell.config["hot_experts"] for cell in cells[:2]] == [str(tmp_path / "hot.json"), None]
    assert cells[0].cell == "toy/short/hot_experts=hot.json/weight_budget=50%"


def test_a_model_that_cannot_be_built_so_is_refused_at_its_line(tmp_path: Path) -> None:
    class Refusing(FakeResolver):
        def model(self, name: str, source: ModelSource) -> ResolvedModel:
            raise BadRequest("tiny is made as it is", "build another")

    error = refused(tmp_path, SOUND, Refusing())
    assert str(error).endswith("sweep.yaml:2: tiny is made as it is (build another)")
