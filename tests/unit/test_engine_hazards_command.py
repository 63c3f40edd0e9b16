"""`engine hazards`: what it prints, and the exit code of each end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.hazards_cost import measure
from engine.__main__ import main
from engine.device.base import Fetch
from engine.device.hazards import Hazards
from engine.device.scheduled import ScheduledDevice
from tests.unit.engine_rig import build_tiny

HALF = ["--weight-budget", "50%", "--policy", "lru", "--granule", "4096", "--capture", "off"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("command"))


def ended(model: Path, *words: str) -> int:
    """The exit code of a short run."""
    own = ["--model", str(model), "--prompt-ids", "1 17 42 99", "--tokens", "4", "--generations", "2"]
    return main(["hazards", *own, *words])


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON object."""
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_a_clean_decode_says_what_was_checked(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(tiny, *HALF, "--json") == 0
    document = told(capsys)
    names = ["early", "late", *(f"random:{seed}" for seed in range(5))]
    assert [one["schedule"] for one in document["schedules"]] == names
    assert len({one["accesses"] for one in document["schedules"]} - {0}) == 1
    for one in document["schedules"]:
        assert (one["ok"], one["hazards"], one["same_tokens"], one["failure"], one["found"]) == (True, 0, True, "", [])
        assert one["cost"] > 0
    assert [len(ids) for [[ids, _]] in document["tokens"]] == [4, 4]


def test_a_clean_decode_in_words(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(tiny, "--schedules", "late,random") == 0
    plain, late, drawn = capsys.readouterr().out.splitlines()
    assert plain.startswith("plain: ")
    assert late.startswith("late: ok accesses=") and "hazards=0 tokens=same" in late
    assert drawn.startswith("random:0: ok ")


def test_a_hazard_is_exit_1_with_both_accesses(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScheduledDevice, "drain", lambda self: None)
    assert ended(tiny, *HALF, "--schedules", "late", "--json") == 1
    [late] = told(capsys)["schedules"]
    assert not late["ok"] and late["hazards"] > 0 and late["failure"]
    first = late["found"][0]
    assert first["kind"] == "memory taken away under use" and first["missing"] == "a wait of the host"
    assert first["second"]["verb"] == "unmap" and {"key", "step", "generation"} <= first["first"].keys()
    assert ended(tiny, *HALF, "--schedules", "late") == 1
    assert "late: NOT OK" in capsys.readouterr().out


def test_a_run_that_checked_nothing_is_exit_1(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("work", "out", "poison"):
        monkeypatch.setattr(Hazards, name, lambda self, *_, **__: None)
    assert ended(tiny, "--schedules", "late") == 1


def test_other_tokens_are_exit_1(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ScheduledDevice, "poison", lambda self, *_: None)
    fetched = ScheduledDevice.fetched

    def other(self: ScheduledDevice, fetch: Fetch) -> bytes:
        raw = fetched(self, fetch)
        return bytes([raw[0] ^ 1, *raw[1:]])  # the gap's last bit

    monkeypatch.setattr(ScheduledDevice, "fetched", other)
    assert ended(tiny, "--schedules", "early") == 1
    assert "hazards=0 tokens=DIFFERENT" in capsys.readouterr().out


def test_without_arithmetic_the_order_alone_is_checked(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(tiny, *HALF, "--plan-only", "--schedules", "late") == 0
    assert "tokens=not computed" in capsys.readouterr().out


def test_a_prompt_of_one_without_arithmetic_is_a_decode_step_that_has_not_run_when_it_is_counted(tiny: Path) -> None:
    words = ["--prompt-ids", "5", "--tokens", "3", "--plan-only", "--schedules", "early,late"]
    assert main(["hazards", "--model", str(tiny), *words]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--schedules", "later"], "unknown schedule 'later'"),
        (["--schedules", "late:2"], "unknown schedule 'late:2'"),
        (["--schedules", "random:0"], "unknown schedule 'random:0'"),
        (["--schedules", "random:1000000"], "unknown schedule 'random:1000000'"),
        (["--kv-capacity", "257"], "kv_capacity 257 is above the 256 positions"),
        (["--tokens", "100000"], "do not fit the model's"),
        (["--weight-budget", "half"], "weight_budget is 'half'"),
    ],
)
def test_what_cannot_be_asked_is_exit_10(
    tiny: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert ended(tiny, *words) == 10
    assert said in capsys.readouterr().err


def test_the_checker_costs_less_than_four_times_a_run_without_it(tiny: Path, checkout: Path) -> None:
    """Processor time, the best of pairs in turns; and so it was on every model of the record in docs/results."""
    record = json.loads((checkout / "docs/results/hazards-cost.json").read_text())
    assert {row["model"] for row in record["rows"]} > {"smollm2-135m"}
    for rows in (record["rows"], measure(tiny, 3)):
        assert {row["setting"] for row in rows} == {"resident", "half, lru", "half, staging"}
        assert all(0 < row["times"] < 4 and row["accesses"] > 1000 for row in rows), rows
