"""`assay models`: a model of real size as its graph alone, filled later, planned and checked in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.cli import call


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, with caches of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_hollow_model_is_built_checked_planned_and_run_without_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["models", "build", "qwen2.5-7b", "--layers", "3", "--hollow", "--out", "m", "--json"]) == 0
    built = json.loads(capsys.readouterr().out)
    assert built["built"] and built["hollow_bytes"] > 1 << 30 and built["size_bytes"] < 1 << 20
    assert call(["models", "check", "m"]) == 11
    assert "assay models fill m" in capsys.readouterr().out
    assert call(["engine", "plan", "--model", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kv"]["layers"] == 3
    words = ["--model", "m", "--prompt-ids", "1 2", "--tokens", "3", "--weight-budget", "60%"]
    assert call(["engine", "run", *words]) == 11
    assert "assay models fill m" in capsys.readouterr().err
    assert call(["engine", "run", "--plan-only", *words]) == 0
    shown = capsys.readouterr().out
    assert "BROKEN" not in shown and "plan only" in shown


def test_the_text_says_that_weights_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["models", "build", "35b-a3b", "--hollow", "--out", "m"]) == 0
    assert "hollow: 20365498880 bytes of weights are made by `assay models fill`" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code"), [(("build", "tiny", "--layers", "2", "--out", "m"), 10), (("fill", "nowhere"), 11)]
)
def test_what_is_refused_is_one_line(words: tuple[str, ...], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["models", *words]) == code
    shown = capsys.readouterr().err
    assert shown.count("error: ") == 1 and "Traceback" not in shown
