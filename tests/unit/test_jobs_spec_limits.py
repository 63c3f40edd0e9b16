"""Sweep files that nobody wrote by hand: too large, too deep, or with values that are not what their tag claims."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.provenance import ArmSource, ModelSource, ResolvedArm, ResolvedModel
from jobs.spec import load, plan
from jobs.spec.yaml_lines import read_lines

SOUND = """\
sweep: sound
models: {toy: {build: tiny}}
prompts: {short: {ids: [1, 2]}}
arms:
  base: {source: installed, config: {policy: lru}}
  head: {source: installed, config: {policy: stable}}
matrix: {weight_budget: ["50%"]}
varies: [policy]
run: {tokens: 8}
"""
SOON_S = 20


class AnyResolver:
    """Takes every model and arm as it is written."""

    def model(self, name: str, source: ModelSource) -> ResolvedModel:
        return ResolvedModel(source.path or Path("/models") / name, "digest")

    def prompt_ids(self, model: ResolvedModel, text: str) -> tuple[int, ...]:
        raise AssertionError

    def arm(self, name: str, source: ArmSource) -> ResolvedArm:
        return ResolvedArm(Path("/trees/x"), "tree")


def refusal(folder: Path, text: str) -> str:
    """What is said of a file that `load` or `plan` must refuse, soon."""
    path = folder / "sweep.yaml"
    path.write_text(text, encoding="utf-8")
    began = time.monotonic()
    with pytest.raises(SpecError) as caught:
        plan(load(path), AnyResolver())
    assert time.monotonic() - began < SOON_S
    told = str(caught.value)
    assert told.startswith(f"{path}:")
    assert len(told) < 10_000
    return told.replace(str(path), "sweep.yaml")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("{short: {ids: [1, 2]}}", "{}", "sweep.yaml:3: prompts is empty (give at least one, or leave the key out)"),
        ("[1, 2]", "[-1]", "sweep.yaml:3: prompts.short.ids[0] is -1 (0 or more is needed)"),
        ("[1, 2]", "[[1]]", "sweep.yaml:3: prompts.short.ids[0]: expected a whole number, got a list"),
        ('{weight_budget: ["50%"]}', "[{a: b}]", "sweep.yaml:7: matrix: expected a mapping (name: value), got a list"),
        (
            '["50%"]',
            "[{a: b}]",
            "sweep.yaml:7: matrix.weight_budget[0]: expected one value (text, a number, true, false or null),"
            " got a mapping",
        ),
    ],
)
def test_one_mistake_is_one_line(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert SOUND.count(old) == 1
    assert refusal(tmp_path, SOUND.replace(old, new)) == told


@pytest.mark.parametrize(
    "value", ["!!int abc", '!!int ""', "!!int ٣", "!!float abc", '!!float ""', "!!bool maybe", "!!null x", "!!int 0x"]
)
def test_a_tag_that_does_not_fit_its_text_is_refused_with_its_line(value: str) -> None:
    with pytest.raises(SpecError, match=r"f\.yaml:2: tag .* does not fit .*without a tag"):
        read_lines(f"a: 1\nb: {value}\n", "f.yaml")


def test_a_tag_that_fits_is_taken() -> None:
    assert read_lines('a: !!int "5"\nb: !!float "1.5"\nc: !!str 5\n', "f").values == {"a": 5, "b": 1.5, "c": "5"}


@pytest.mark.parametrize(
    ("source", "why"),
    [("path:~nosuchuser/x", "home directory"), (f"path:{'a' * 300}", "too long"), (f"path:{'a/' * 2040}", "too long")],
)
def test_a_source_that_can_be_no_path_is_refused_at_its_line(tmp_path: Path, source: str, why: str) -> None:
    told = refusal(tmp_path, SOUND.replace("head: {source: installed", f'head: {{source: "{source}"'))
    assert told.startswith("sweep.yaml:6: the path ")
    assert why in told
    assert len(told) < 300


@pytest.mark.parametrize("text", ["git:" + "a" * 200_000, "path:" + "a/" * 3000])
def test_a_source_without_end_is_refused_at_its_line(tmp_path: Path, text: str) -> None:
    told = refusal(tmp_path, SOUND.replace("head: {source: installed", f'head: {{source: "{text}"'))
    assert told == f"sweep.yaml:6: the source has {len(text)} characters (at most 4096)"


def test_a_model_path_that_is_too_long_is_refused_at_its_line(tmp_path: Path) -> None:
    told = refusal(tmp_path, SOUND.replace("build: tiny", f"path: {'a' * 5000}"))
    assert told.startswith("sweep.yaml:2: the path ")


def test_a_chain_of_arms_is_followed_without_recursion_and_has_an_end(tmp_path: Path) -> None:
    def chained(arms: int) -> str:
        links = [f"  a{i}: {{like: a{i + 1}}}" for i in range(arms - 3)]
        last = f"  a{arms - 3}: {{source: installed, config: {{policy: stable}}}}"
        return SOUND.replace("  head: {source: installed, config: {policy: stable}}", "\n".join([*links, last]))

    path = tmp_path / "sweep.yaml"
    path.write_text(chained(64))
    assert plan(load(path), AnyResolver()).arms[1].config == {"policy": "stable"}
    assert refusal(tmp_path, chained(990)).startswith("sweep.yaml:4: arms has too many entries (at most 64)")


def test_a_large_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    told = refusal(tmp_path, SOUND + "description: " + "x" * 10_000_000 + "\n")
    assert told == "sweep.yaml: the file is larger than 1048576 bytes (split the sweep)"


def test_too_many_values_are_called_that_and_no_alias(tmp_path: Path) -> None:
    told = refusal(tmp_path, SOUND.replace("[1, 2]", f"[{','.join(['1'] * 200_000)}]"))
    assert told == "sweep.yaml:3: the file holds more than 100000 values (split the sweep)"


def test_a_matrix_axis_of_many_values_is_checked_in_time(tmp_path: Path) -> None:
    many = ",".join(map(str, range(1, 60_000)))
    assert "59999 cells" in refusal(tmp_path, SOUND.replace('["50%"]', f"[{many}]"))


def test_no_more_faults_are_told_than_a_person_reads(tmp_path: Path) -> None:
    told = refusal(tmp_path, SOUND.replace("[1, 2]", f"[{','.join(['x'] * 500)}]"))
    assert len(told.splitlines()) == 20


@pytest.mark.parametrize(
    ("limit", "bound"),
    [("run_timeout_s: 1e308", "2592000"), ("queue_timeout_s: 1e9", "2592000"), (f"attempts: {10**30}", "1000")],
)
def test_a_limit_without_end_is_refused(tmp_path: Path, limit: str, bound: str) -> None:
    assert f"({bound} or less is needed)" in refusal(tmp_path, f"{SOUND}limits: {{{limit}}}\n")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "[1, 2]",
            "[1, 64]",
            "sweep.yaml:3: the prompt 'short' has the id 64, and the vocabulary of model 'toy' ends at 63"
            " (take ids of the model's own tokenizer)",
        ),
        (
            "tokens: 8",
            "tokens: 31",
            "sweep.yaml:9: the prompt 'short' and run.tokens need 33 positions, model 'toy' has 32"
            " (ask for fewer tokens, or shorten the prompt)",
        ),
        (
            "tokens: 8}",
            "tokens: 8}\nlocks: [{prompt: short, index: 0, expected: 63,\n  allowed: [1, 64]}]",
            "sweep.yaml:11: a lock has the id 64, and the vocabulary of model 'toy' ends at 63"
            " (no output can hold it: take an id of the model's own tokenizer)",
        ),
        (
            "tokens: 8}",
            "tokens: 8}\nidentity:\n  near_ties: listed\n  ties: [{prompt: short, index: 0, ids: [63, 64], reason: x}]",
            "sweep.yaml:12: a near tie has the id 64, and the vocabulary of model 'toy' ends at 63"
            " (no output can hold it: take an id of the model's own tokenizer)",
        ),
    ],
)
def test_what_the_model_cannot_take_is_refused_before_any_run(tmp_path: Path, old: str, new: str, told: str) -> None:
    """The bounds themselves are taken: 63 is the last id, and 32 positions fit."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/genai_config.json").write_text('{"model": {"vocab_size": 64, "context_length": 32}}')
    text = SOUND.replace("build: tiny", "path: model")
    path = tmp_path / "sweep.yaml"
    path.write_text(text.replace("[1, 2]", "[1, 63]").replace("tokens: 8", "tokens: 30"))
    assert plan(load(path), AnyResolver()).cells[0].prompt_ids == (1, 63)
    assert refusal(tmp_path, text.replace(old, new)) == told


@pytest.mark.parametrize("config", ["", "[]", "{", '{"model": 5}', '{"model": {"vocab_size": "x"}}'])
def test_a_model_that_does_not_say_is_left_to_the_engine(tmp_path: Path, config: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/genai_config.json").write_text(config)
    path = tmp_path / "sweep.yaml"
    path.write_text(SOUND.replace("build: tiny", "path: model").replace("[1, 2]", "[2000000000]"))
    assert plan(load(path), AnyResolver()).cells[0].prompt_ids == (2_000_000_000,)
