"""`engine plan`: its document fits its schema, and its numbers are those of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import engine
from engine.__main__ import main
from engine.bind import lower
from engine.device.base import H200
from engine.onnx_load import load
from engine.survey import Setting, survey
from engine.zoo import build
from tests.unit.engine_rig import build_tiny, run

G = 4096
EXPORTED = Path(__file__).parents[3] / "shared" / "models"
SCHEMA = json.loads((Path(engine.__file__).parent / "schemas" / "plan.json").read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("plan"))


def planned(capsys: pytest.CaptureFixture[str], model: Path, *words: str) -> dict[str, Any]:
    """The command's JSON, checked."""
    assert main(["plan", "--model", str(model), "--json", *words]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator(SCHEMA).validate(document)
    return document


@pytest.mark.parametrize("policy", ["stable", "lru", "stable_slot", "size_first"])
@pytest.mark.parametrize("budget", [None, "60%", "100000"])
def test_numbers_are_those_of_a_run(
    tiny: Path, capsys: pytest.CaptureFixture[str], policy: str, budget: str | None
) -> None:
    words = [] if budget is None else ["--weight-budget", budget]
    d = planned(capsys, tiny, "--policy", policy, "--granule", str(G), *words)
    value = int(budget) if budget and budget.isdigit() else budget
    ran = run(tiny, config={"policy": policy, "granule": G, "weight_budget": value})
    facts, counters = ran.facts, ran.counters
    expected = {
        "weight_bytes": d["keys"]["weight_bytes"],
        "keys": d["keys"]["count"],
        "largest_key": d["keys"]["largest"]["name"],
        "largest_key_bytes": d["keys"]["largest"]["nbytes"],
        "largest_step_bytes": d["keys"]["widest_step"]["nbytes"],
        "capacity_bytes": d["residency"]["capacity_bytes"],
        "resident": int(d["residency"]["fits"]),
        "requested_bytes_per_step": d["pass"]["touched_bytes"],
        "touches_per_step": d["pass"]["touches"],
        "floor_bytes_per_token": d["floors"]["streamed_bytes"],
        "gather_bytes_per_token": d["pass"]["gather_bytes"],
        "kv_bytes_per_token": d["kv"]["bytes_per_token"],
        "workspace_bytes": d["buffers"]["workspace_bytes"],
        "plan_steps": d["nodes"]["steps"],
    }
    assert {name: facts[name] for name in expected} == expected
    assert d["residency"]["budget_bytes"] in (None, facts["budget_bytes"])
    seams = ran.result["seams"]
    capture = d["capture"]
    assert (capture["segments"], capture["seams"]) == (counters["segments"], counters["seams"])
    assert capture["seam_nodes"] == len(seams) == sum(row["nodes"] for row in capture["by_reason"])
    assert {row["reason"] for row in capture["by_reason"]} == {seam["reason"] for seam in seams}


def test_floors_follow_from_bytes_and_nodes(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    d = planned(capsys, tiny, "--weight-budget", "60%", "--granule", str(G))
    floors = d["floors"]
    assert floors["profile"] == H200.name
    assert floors["resident_ms"] == pytest.approx(d["pass"]["touched_bytes"] / 4343e9 * 1e3)
    assert floors["streamed_ms"] == pytest.approx(floors["streamed_bytes"] / 55.4e9 * 1e3)
    assert floors["streamed_bytes"] == d["keys"]["weight_bytes"] - d["residency"]["capacity_bytes"] > 0
    assert floors["nodes_ms"] == pytest.approx(d["nodes"]["steps"] * 530 / 1e6)


def test_floors_of_both_kv_layouts_are_what_a_run_commits(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for floor in planned(capsys, tiny, "--granule", str(G))["kv_layouts"]:
        config = {"granule": G, "kv_layout": floor["layout"]}
        asked = {"prompt_ids": [1], "tokens": 1}
        assert run(tiny, **asked, config=config).counters["kv_committed_bytes"] == floor["floor_bytes"]
        fixed = {**config, "kv_capacity": 256, "kv_min_bucket": 256}
        assert run(tiny, **asked, config=fixed).counters["kv_committed_bytes"] == floor["fixed_floor_bytes"]
        whole = run(tiny, prompt_ids=[1], tokens=255, ignore_eos=True, arithmetic="none", config=config)
        assert whole.counters["kv_committed_bytes"] == floor["context_bytes"]


def test_a_prompts_pass_is_not_captured(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, five = planned(capsys, tiny), planned(capsys, tiny, "--rows", "5")
    assert one["capture"] is not None and five["capture"] is None
    assert five["pass"]["kv_written_bytes"] == 5 * one["pass"]["kv_written_bytes"]
    assert five["pass"]["gather_bytes"] == 5 * one["pass"]["gather_bytes"]
    assert five["pass"]["touched_bytes"] == one["pass"]["touched_bytes"]


def test_the_smallest_budget_named_is_the_smallest_that_runs(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    least = planned(capsys, tiny, "--granule", str(G))["keys"]["minimum_budget_bytes"]
    for policy in ("stable", "lru", "stable_slot", "size_first"):
        assert run(tiny, tokens=2, config={"granule": G, "policy": policy, "weight_budget": least}).code == 0
    assert run(tiny, tokens=2, config={"granule": G, "weight_budget": least - 1}).code == 13
    assert main(["plan", "--model", str(tiny), "--granule", str(G), "--weight-budget", str(least - 1)]) == 13


@pytest.mark.parametrize("rows", [1, 3])
def test_of_experts_only_the_chosen_are_read(rows: int) -> None:
    folder = EXPORTED / "qwen35moe-int4raw-cuda"
    if not folder.is_dir():
        pytest.skip("skipped: no ../shared/models")
    plan = lower(load(folder), rows)
    d = survey(plan, Setting())
    banks = sum(plan.keys[k].nbytes for s in plan.steps if s.kernel == "moe" for k in s.keys)
    share = min(4, 2 * rows) / 4  # two of four experts a token
    assert d["pass"]["read_bytes"] == d["pass"]["touched_bytes"] - banks * (1 - share)
    assert d["states"]["count"] == 6 and d["kv"]["layers"] == 1


def test_the_text_has_a_line_for_each_subject(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(tiny), "--weight-budget", "60%", "--granule", str(G)]) == 0
    lines = capsys.readouterr().out.splitlines()
    subjects = [line.split(":")[0].split(" (")[0] for line in lines]
    assert subjects[:7] == ["plan", "bound by", "nodes", "buffers", "keys", "largest_key", "widest_step"]
    assert {"constants", "hosts", "states", "kv", "pass", "residency", "capture", "seam_reason", "floors"} <= {
        *subjects
    }


@pytest.mark.parametrize(
    "words",
    [
        ["--rows", "0"],
        ["--rows", "257"],
        ["--policy", "best"],
        ["--granule", "5000"],
        ["--weight-budget", "0"],
        ["--weight-budget", "half"],
        ["--weight-budget", "²"],
    ],
)
def test_what_cannot_be_planned_is_a_bad_request(
    tiny: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(tiny), *words]) == 10
    assert capsys.readouterr().err.startswith("error: ")


def test_a_growths_copy_is_told_term_by_term(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """qwen2.5-14b from 512 to 1024 positions, as the reference counts it: 196,608 x 512 and a mask of 8 x 512."""
    model = build("qwen2.5-14b-zp", tmp_path / "m", cache_dir=tmp_path, hollow=True).folder
    growths = {(g["layout"], g["from_tokens"]): g for g in planned(capsys, model)["kv_growths"]}
    head = {"layout": "head-major", "from_tokens": 512, "to_tokens": 1024, "kv_bytes": 100_663_296}
    assert growths["head-major", 512] == {**head, "mask_bytes": 4096, "sum_bytes": 100_667_392}
    assert growths["seq-major", 512]["sum_bytes"] == 0
    assert main(["plan", "--model", str(model)]) == 0
    told = "kv_growth: layout=head-major from_tokens=512 to_tokens=1024 kv_bytes=100663296 mask_bytes=4096"
    assert f"{told} sum_bytes=100667392\n" in capsys.readouterr().out
