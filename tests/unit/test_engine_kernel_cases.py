"""Kernels alone: what a case is, what its ids say of a kernel, and the lines that a round becomes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import PROTOCOL, kernels
from engine.__main__ import main
from engine.device.sim import SimDevice
from engine.errors import BadRequest, EngineError, ModelFilesError
from engine.kernel_cases import Bench, Case, read_case
from jobs.adapters import kernel
from jobs.adapters.base import RunOrder, RunPlace
from jobs.model import ArmPlan, CellPlan, Missing, RunSettings
from jobs.provenance import own_root, tree_digest

PRODUCT = {"op": "product", "dtype": "float32", "N": 32, "K": 64}
CASES = sorted(Path(__file__).parents[2].glob("sweeps/kernels/*.json"))


def case_file(folder: Path, **told: Any) -> Path:
    path = folder / "case.json"
    path.write_text(json.dumps(told))
    return path


def ids(case: Case, seed: int = 1, rounds: int = 3) -> list[int]:
    ticks = count(0, 1000)
    return [made for made, taken in Bench(SimDevice(), case, [seed]).rounds(rounds, lambda: next(ticks)) if taken > 0]


@pytest.fixture
def product(tmp_path: Path) -> Case:
    return read_case(case_file(tmp_path, **PRODUCT))


def test_bytes_and_operations_are_those_of_the_shape(tmp_path: Path, product: Case) -> None:
    """32 x 64 codes of half a byte and a float16 scale for each 32; a cache of 160 positions, keys and values."""
    assert (product.launch_bytes, product.launch_flops) == (1024 + 128, 4096)
    sizes = {"heads": 4, "kv_heads": 2, "head_size": 64, "context": 160}
    attention = read_case(case_file(tmp_path, op="attention", **sizes))
    assert (attention.launch_bytes, attention.launch_flops) == (2 * 160 * 2 * 64 * 2, 4 * 160 * 4 * 64)


def test_each_round_has_an_input_of_its_own_and_the_same_one_each_time(product: Case) -> None:
    first = ids(product)
    assert first == ids(product) and len(set(first)) == 3
    assert not set(first) & set(ids(product, seed=2))
    bench = Bench(SimDevice(), product, [1])
    ticks = count()
    again = [[made for made, _ in bench.rounds(3, lambda: next(ticks))] for _ in range(2)]
    assert again == [first, first], "generations of one run"


def test_an_id_is_of_what_the_kernel_computes(product: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one element is another id."""
    right = ids(product)
    sound = kernels.get("matmul_nbits").run

    def off_by_a_bit(arrays: Any, params: Any) -> None:
        sound(arrays, params)
        arrays["y"].reshape(-1)[-1] = np.nextafter(arrays["y"].reshape(-1)[-1], np.float32(9))

    changed = replace(kernels.get("matmul_nbits"), run=off_by_a_bit)
    monkeypatch.setitem(kernels._KERNELS, "matmul_nbits", changed)
    kernels.get.cache_clear()
    try:
        assert not set(ids(product)) & set(right)
    finally:
        kernels.get.cache_clear()


@pytest.mark.parametrize("path", [path for path in CASES if "small" in path.name], ids=lambda path: path.stem)
def test_each_small_case_runs(path: Path) -> None:
    assert len(set(ids(read_case(path)))) == 3


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_each_case_is_named_for_what_it_is(path: Path) -> None:
    case = read_case(path)
    dtype = next(o.ref.dtype for o in case.step.operands if o.name == case.drawn)
    assert path.stem.endswith({"float32": "f32", "float16": "f16"}[dtype])
    assert path.stem.startswith({"matmul_nbits": ("product", "gated"), "gqa": ("attention",)}[case.step.kernel])


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({**PRODUCT, "op": "softmax"}, "names no operator"),
        ({**PRODUCT, "dtype": "int8"}, "dtype is 'int8'"),
        ({**PRODUCT, "M": 1}, "has the sizes"),
        ({**PRODUCT, "N": 0}, "above zero"),
        ({**PRODUCT, "N": True}, "above zero"),
        ({**PRODUCT, "K": 40}, "whole blocks of 32"),
        ({**PRODUCT, "op": "gated_product", "N": 33}, "even where it is a gated pair"),
    ],
)
def test_what_is_no_case_is_refused(tmp_path: Path, told: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_case(case_file(tmp_path, **told))
    assert says in f"{caught.value.message} {caught.value.remedy}"


@pytest.mark.parametrize("text", ["{", "", None])
def test_a_file_that_cannot_be_read_is_none(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "case.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ModelFilesError, match="no kernel case"):
        read_case(path)


def told(folder: Path, capsys: pytest.CaptureFixture[str], **changes: Any) -> tuple[int, list[dict[str, Any]], str]:
    request = {"protocol": PROTOCOL, "model": str(case_file(folder, **PRODUCT)), "prompt_ids": [1], "tokens": 3}
    (folder / "request.json").write_text(json.dumps({**request, "device": "sim", **changes}))
    code = main(["kernel", "--request", str(folder / "request.json")])
    said = capsys.readouterr()
    return code, [json.loads(line) for line in said.out.splitlines()], said.err


def test_the_command_speaks_as_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = told(tmp_path, capsys, generations=2, warmups=1)
    assert code == 0 and [line["type"] for line in lines] == ["hello", *["generation"] * 3, "result"]
    assert [line["warmup"] for line in lines[1:4]] == [True, False, False]
    assert all(len(line["ids"]) == 3 and len(line["step_ns"]) == 2 and line["prefill_ns"] > 0 for line in lines[1:4])
    assert lines[1]["ids"] == lines[2]["ids"] == lines[3]["ids"]
    counters = {"emitted_tokens": 6, "step_kernels": 1, "launch_bytes": 1152, "launch_flops": 4096}
    assert lines[-1]["counters"] == counters


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [({"config": {"policy": "lru"}}, 10, "is given policy"), ({"model": "/nowhere/case.json"}, 11, "no kernel case")],
)
def test_the_command_tells_why_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], code: int, says: str
) -> None:
    exit_code, lines, said = told(tmp_path, capsys, **changes)
    assert exit_code == code == lines[-1]["code"]
    assert lines[-1]["type"] == "error" and says in lines[-1]["message"] and says in said


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the engine."""
    shutil.copytree(own_root() / "engine", tmp_path / "arm/engine", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "arm"


def test_the_adapter_makes_a_record_of_the_arms_own_tree(tmp_path: Path, tree: Path) -> None:
    path = case_file(tmp_path, **PRODUCT)
    arm = ArmPlan(
        name="head", role="head", source="path", adapter=kernel.NAME, tree_digest=tree_digest(tree),
        python_path=str(tree),
    )  # fmt: skip
    cell = CellPlan(
        cell="m/p", kind="kernel", model="m", model_path=str(path), model_digest="", prompt="p", prompt_ids=(1,),
        settings=RunSettings(tokens=4, generations=2, device="sim"), arms=("head",),
    )  # fmt: skip
    place = RunPlace(tmp_path, {"PATH": "/usr/bin:/bin"}, lambda: "2026-01-01T00:00:00Z")
    done = kernel.adapter().run(RunOrder("run_1", "att_1", 1, cell, arm, "SIM-test-0", 60.0), place)
    assert (done.end, done.reason) == ("measured", ""), done
    assert done.record is not None and Path(done.record.module_path).is_relative_to(tree)
    assert list(done.record.generations[0].ids) == ids(read_case(path), rounds=4)
    assert done.record.counters["launch_bytes"] == 1152
    why = done.record.counters["htod_bytes"]
    assert isinstance(why, Missing) and "one kernel alone" in why.missing


@pytest.mark.gpu
@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_each_case_runs_on_the_card_and_repeats(path: Path) -> None:
    from engine.device.cuda import CudaDevice

    case, ticks = read_case(path), count()
    try:
        bench = Bench(CudaDevice(), case, [1])
    except EngineError as error:
        pytest.fail(f"{path.stem}: {error.message}")
    first, second = ([made for made, _ in bench.rounds(4, lambda: next(ticks))] for _ in range(2))
    assert first == second and len(set(first)) == 4
