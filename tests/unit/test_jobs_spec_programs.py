"""What a sweep file must say of arms that are programs, and what it may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import pytest

from jobs.errors import SpecError
from jobs.provenance import SHELL, ArmSource, ModelSource
from jobs.spec import load, plan
from tests.unit.test_jobs_spec import FakeResolver, write

T = TypeVar("T")
SWEEP = """\
sweep: theirs
models: {{m: {{path: m.gguf}}}}
prompts: {{p: {{ids: [1, 2]}}}}
arms:
  base: {{source: "git:main", {base}}}
  head: {{like: base, source: checkout{head}}}
run: {{tokens: 4}}
{more}
"""
SPEAKS = "adapter: command, command: ./b, counters: [htod_bytes]"
READS = "adapter: command, command: ./b, reads: {{format: {format}, ids: '{ids}', {more}}}"
COUNTED = "counters: {{htod_bytes: {{at: n, unit: {unit}}}}}"


def spec_of(tmp_path: Path, base: str, head: str = "", more: str = "") -> Path:
    (tmp_path / "sweep.yaml").write_text(SWEEP.format(base=base, head=head, more=more))
    return tmp_path / "sweep.yaml"


def asked_of(resolver: FakeResolver, kind: type[T]) -> list[T]:
    """What a resolver was asked of one kind."""
    return [thing for told in resolver.asked if isinstance(told, tuple) for thing in told if isinstance(thing, kind)]


def test_a_program_is_planned_with_its_tree_and_any_model(tmp_path: Path) -> None:
    resolver = FakeResolver()
    base, head = plan(load(spec_of(tmp_path, SPEAKS)), resolver).arms
    assert (base.adapter, base.command, base.counters) == ("command", (*SHELL, "./b"), ("htod_bytes",))
    assert head.command == base.command, "like takes it over"
    trees, models = asked_of(resolver, ArmSource), asked_of(resolver, ModelSource)
    assert len(trees) == 2 and all(tree.program for tree in trees)
    assert [model.any_files for model in models] == [True]


def test_an_arm_of_ours_among_them_needs_a_model_of_ours(tmp_path: Path) -> None:
    resolver = FakeResolver()
    path = spec_of(tmp_path, SPEAKS, more="varies: [program]")
    path.write_text(path.read_text().replace("  head: {like: base, source: checkout", "  head: {source: checkout"))
    plan(load(path), resolver)
    assert [model.any_files for model in asked_of(resolver, ModelSource)] == [False]


def test_a_mapping_is_planned_as_it_is_written(tmp_path: Path) -> None:
    more = COUNTED.format(unit="MiB") + ", steps: {at: itl, unit: us}"
    base, _ = plan(load(spec_of(tmp_path, READS.format(format="json", ids="t", more=more))), FakeResolver()).arms
    assert base.counters == ("htod_bytes",)
    assert base.reads is not None and base.reads.steps is not None
    assert (base.reads.counters["htod_bytes"].unit, base.reads.steps.at) == ("MiB", "itl")


@pytest.mark.parametrize(
    ("base", "head", "more", "says"),
    [
        ("command: ./b", "", "", "command goes with adapter: command"),
        ("counters: [hits]", "", "", "counters goes with adapter: command"),
        ("adapter: command, counters: [htod_bytes]", "", "", "arm 'base' has no command"),
        ("adapter: command, command: ' ', counters: [htod_bytes]", "", "", "arm 'base' has no command"),
        ("adapter: command, command: ./b", "", "", "tells no counter that gates"),
        ("adapter: command, command: ./b, counters: [hits]", "", "", "tells no counter that gates"),
        ("adapter: command, command: ./b, counters: [htod_byte]", "", "", "unknown counter 'htod_byte'"),
        (SPEAKS, ", command: ./c", "", "arm 'head' differs from base in program"),
        (SPEAKS, ", counters: [segments]", "", "arm 'head' differs from base in program"),
        (SPEAKS + ", reads: {format: json, ids: t}", "", "", "counters goes without reads"),
        (READS.format(format="json", ids="t", more=COUNTED.format(unit="ms")), "", "", "cannot be in 'ms'"),
        (READS.format(format="json", ids="t", more="prefill: {at: a, unit: MiB}"), "", "", "prefill is a time"),
        (READS.format(format="text", ids="t", more=COUNTED.format(unit="B")), "", "", "'t' has 0 groups"),
        (READS.format(format="text", ids="(t", more=COUNTED.format(unit="B")), "", "", "is no pattern"),
        (READS.format(format="text", ids="(t)", more="generations: g"), "", "", "generations is a path into JSON"),
        ("adapter: command, command: ./b, reads: {format: json}", "", "", "no ids are read"),
        (
            READS.format(format="json", ids="t", more=COUNTED.format(unit="B")),
            "",
            "matrix: {batch: [2]}",
            "batch apart",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, base: str, head: str, more: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(spec_of(tmp_path, base, head, more))
    told = [str(error) for error in (caught.value, *caught.value.others)]
    assert any(re.search(re.escape(says), text) for text in told), told


def test_a_program_cannot_plan_alone(tmp_path: Path) -> None:
    path = spec_of(tmp_path, SPEAKS, more="gate: {identity: off, time: off}")
    path.write_text(path.read_text().replace("{tokens: 4}", "{tokens: 4, device: sim, arithmetic: none}"))
    with pytest.raises(SpecError, match="a program cannot plan alone"):
        load(path)


def test_an_installed_program_is_refused(tmp_path: Path) -> None:
    path = spec_of(tmp_path, SPEAKS)
    path.write_text(path.read_text().replace("source: checkout", "source: installed"))
    with pytest.raises(SpecError, match="there is no tree to run in"):
        load(path)


def test_tokens_alone_need_no_counter(tmp_path: Path) -> None:
    base, _ = plan(
        load(spec_of(tmp_path, "adapter: command, command: ./b", more="gate: {exact: off}")), FakeResolver()
    ).arms
    assert base.counters == ()


def test_another_program_on_purpose_is_said(tmp_path: Path) -> None:
    manifest = plan(load(spec_of(tmp_path, SPEAKS, ", command: ./c", "varies: [program]")), FakeResolver())
    assert manifest.arms[1].command[-1] == "./c"


# ---- libraries ---------------------------------------------------------------------------------------------------

PEERS = """\
sweep: theirs
models: {{m: {{build: tiny}}}}
prompts: {{p: {{ids: [1, 2]}}}}
arms:
  base: {{source: installed}}
  other: {{source: {source}, adapter: {adapter}{more}}}
varies: [program]
gate: {{exact: {exact}}}
run: {{tokens: 4}}
{end}
"""


def peers(tmp_path: Path, **told: str) -> Path:
    known = {"source": "installed", "adapter": "onnxruntime", "more": "", "exact": "off", "end": ""}
    (tmp_path / "sweep.yaml").write_text(PEERS.format(**{**known, **told}))
    return tmp_path / "sweep.yaml"


def test_a_library_is_planned_with_its_options_and_what_it_tells(tmp_path: Path) -> None:
    resolver = FakeResolver()
    manifest = plan(load(peers(tmp_path, more=", options: {kv: host, threads: 2}")), resolver)
    base, other = manifest.arms
    assert (other.adapter, other.options) == ("onnxruntime", {"kv": "host", "threads": 2})
    assert other.counters == ("emitted_tokens",)
    assert "options" not in base.model_dump(), "a manifest without libraries is written as before"
    assert [tree.peer for tree in asked_of(resolver, ArmSource)] == [False, True]
    assert [model.any_files for model in asked_of(resolver, ModelSource)] == [False]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"adapter": "onnxruntim"}, "unknown adapter 'onnxruntim'"),
        ({"source": "checkout"}, "onnxruntime is a library, and no tree is run"),
        ({"more": ", options: {provder: x}"}, "onnxruntime has no option 'provder'"),
        ({"more": ", options: {threads: many}"}, "threads is 'many', and no whole number"),
        ({"more": ", options: {kv: nowhere}"}, "kv is 'nowhere'"),
        ({"more": ", options: {plugin: 3}"}, "plugin is 3, and no text"),
        ({"more": ", config: {weight_budget: 50%}"}, "onnxruntime cannot be given weight_budget"),
        ({"end": "matrix: {capture: [true, false]}"}, "onnxruntime cannot be given capture"),
        ({"more": ", command: ./b"}, "command goes with adapter: command"),
        ({"more": ", build: {command: make, outputs: [b]}"}, "onnxruntime is a library: there is nothing to build"),
        ({"exact": "block"}, "tells no counter that gates"),
        ({"adapter": "native", "more": ", options: {kv: host}"}, "options goes with an adapter of another engine"),
    ],
)
def test_what_a_library_cannot_be_told_is_refused(tmp_path: Path, told: dict[str, str], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        load(peers(tmp_path, **told))
    found = [str(error) for error in (caught.value, *caught.value.others)]
    assert any(says in text for text in found), found


def test_a_library_takes_what_it_serves(tmp_path: Path) -> None:
    path = peers(tmp_path, adapter="torch", end="matrix: {capture: [true, false]}")
    assert len(plan(load(path), FakeResolver()).cells) == 2


KERNEL = """\
sweep: kernels
models: {one: {path: case.json}}
prompts: {seed: {ids: [1]}}
arms:
  base: {source: checkout, adapter: kernel}
  head: {like: base}
run: {tokens: 4}
"""


def test_arms_of_kernels_alone_make_cells_of_that_kind(tmp_path: Path) -> None:
    (tmp_path / "case.json").write_text("{}")
    manifest = plan(load(write(tmp_path, KERNEL)), FakeResolver())
    assert [cell.kind for cell in manifest.cells] == ["kernel"]
    assert manifest.arms[0].counters == ("emitted_tokens", "step_kernels", "launch_bytes", "launch_flops")


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("run: {tokens: 4}", "run: {tokens: 4}\nmatrix: {policy: [lru]}", 8, "cannot be given policy"),
        ("adapter: kernel}", "adapter: kernel, config: {batch: 2}}", 5, "cannot be given batch"),
        ("{path: case.json}", "{build: tiny}", 2, "is no kernel's case"),
        ("tokens: 4}", "tokens: 4, arithmetic: none, device: sim}\ngate: {identity: off, time: off}", 5, "be planned"),
    ],
)
def test_what_a_kernel_alone_cannot_be_given_is_refused(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load(write(tmp_path, KERNEL.replace(old, new)))
    assert says in str(caught.value) and f"sweep.yaml:{line}:" in str(caught.value)
