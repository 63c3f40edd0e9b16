"""`assay calibrate` on the command line: what it refuses, and what it makes of a sweep that was measured."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import SpecError
from orchestrator.cli import call
from orchestrator.commands import calibrate
from tests.unit.stored_documents import Put, itself, opened, put

pytest_plugins = ("tests.unit.orchestrator_stored",)


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert call(list(words)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0]


def test_a_calibration_that_was_measured_is_kept_by_its_id(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(itself(documents, 6))
    assert call(["calibrate", sweep_id, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["metric"] for row in told["calibrations"]} == {"decode_ms_per_token", "tokens_per_s", "prefill_ms"}
    assert told["left_out"] == {}
    assert call(["calibrate", sweep_id]) == 0
    assert "found in 24 blocks" in capsys.readouterr().out
    with opened(here) as store:
        later = put(store, documents.sweep(), "later")
        assert len(store.judge_input(later).calibrations) == 3, "kept once, however often it is asked for"


@pytest.mark.parametrize(
    ("blocks", "head", "why", "code"),
    [
        (5, {}, "fewer than 6 blocks hold times of both arms", 3),
        (6, {"changes": {"segments": 2}}, "segments rose by 1", 1),
    ],
)
def test_a_cell_without_a_clean_a_a_is_named_and_costs_a_code(
    stored: Put,
    documents: Any,
    capsys: pytest.CaptureFixture[str],
    blocks: int,
    head: dict[str, Any],
    why: str,
    code: int,
) -> None:
    sweep_id = stored(itself(documents, blocks, **head))
    assert call(["calibrate", sweep_id]) == code
    out = capsys.readouterr().out
    assert "not calibrated: smollm2/capital/weight_budget=50%: " in out and why in out


@pytest.mark.parametrize("more", [[], ["--store", "sqlite:///here.db"], ["--out", "a folder"]])
def test_a_calibration_that_was_stopped_is_gone_on_with_as_it_was_begun(
    here: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """The way on that a stop names has every option that says where things are."""
    ways: list[str] = []

    def stopped(*_given: Any, **_more: Any) -> Any:
        ways.append(_given[3]("swp_1"))
        raise SpecError("stopped here", "")

    monkeypatch.setattr(calibrate, "run_here", stopped)
    (here / "gate.yaml").write_text("")
    assert call(["calibrate", "gate.yaml", *more]) == 2
    assert [shlex.split(way) for way in ways] == [["assay", "calibrate", "swp_1", *more]]


def test_what_cannot_be_calibrated_is_said(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    other = stored(documents.sweep())
    assert f"sweep {other} is no calibration" in failed(capsys, "calibrate", other)
    assert "no id begins with 'nowhere.yaml'" in failed(capsys, "calibrate", "nowhere.yaml")
    assert "--blocks" in failed(capsys, "calibrate", other, "--blocks", "5")
    (here / "broken.yaml").write_text("sweep: [\n")
    assert "broken.yaml:2: " in failed(capsys, "calibrate", "broken.yaml")
