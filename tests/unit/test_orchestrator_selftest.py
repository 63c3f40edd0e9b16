"""The self-test: its defects fit this engine and are found the whole way, and a miss or an alarm is told as one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.errors import SpecError
from jobs.provenance import own_root
from jobs.verdict import Outcome
from orchestrator.cli import call
from orchestrator.commands import selftest as command
from orchestrator.selftest.defects import CLEAN, DEFECTS, Defect, Patch
from orchestrator.selftest.run import Bench, Report, Tried, chosen, selftest
from orchestrator.selftest.stage import Stage

NAMED: dict[str, Defect] = {defect.name: defect for defect in DEFECTS}
INERT = (Patch("generate.py", '"""Generations of a run:', '"""All generations of a run:'),)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench.on(Stage(tmp_path / "stage", os.environ))


def page(checkout: Path) -> str:
    return (checkout / "docs/selftest.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("defect", [d for d in DEFECTS if d.patches], ids=lambda defect: defect.name)
def test_a_planted_defect_fits_the_engine_and_is_one(defect: Defect, tmp_path: Path) -> None:
    for patch in defect.patches:
        file = tmp_path / patch.file
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            file.write_bytes((own_root() / "engine" / patch.file).read_bytes())
        before = file.read_text()
        patch.apply(tmp_path)
        assert file.read_text() != before
        compile(file.read_text(), str(file), "exec")


def test_a_defect_of_another_engine_is_refused(bench: Bench) -> None:
    gone = replace(NAMED["early stop"], patches=(Patch("generate.py", "no such line", ""),))
    with pytest.raises(SpecError, match=re.escape("generate.py holds 0 times what a planted defect replaces")):
        bench.plant(gone)


def test_the_page_lists_what_is_planted_and_what_is_due(checkout: Path) -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \| `(\w+)` \| (\d) \|$", page(checkout), re.MULTILINE)
    assert [(name, kind, outcome, int(code)) for name, kind, _, outcome, code in rows] == [
        (d.name, d.kind, d.outcome, d.exit_code) for d in DEFECTS
    ]
    assert re.findall(r"^- (.*)$", page(checkout).partition("## Clean runs")[2], re.MULTILINE) == list(CLEAN)


def test_rates_of_time_are_cited_as_they_were_measured(checkout: Path) -> None:
    measured: dict[str, Any] = json.loads((checkout / "docs/results/time-decisions.json").read_text())
    row = next(row for row in measured["rows"] if row["sigma"] == 0.02)
    assert (measured["sweeps"], row["clean_sweeps_alarmed"], row["slowdown_found"]) == (2000, 0, 0.995)
    assert "2,000 seeded sweeps" in command.TIME and "99.5 %" in command.TIME


@pytest.mark.timeout(240)
def test_some_of_it_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("early stop", "double-counted", "stale head", "missing cell", "all resident, captured")
    told = [word for name in words for word in ("--only", name)]
    assert call(["selftest", *told, "--keep", str(tmp_path / "kept"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row["name"]: (row["outcome"], row["code"]) for row in document["planted"]} == {
        "early stop": ("SHORT", 1),
        "double-counted bytes": ("BROKEN_INVARIANT", 1),
        "stale head": ("INFRASTRUCTURE", 4),
        "missing cell": ("MISSING", 3),
    }
    assert (document["false_alarms"], document["clean_runs"], document["good"]) == (0, 1, True)
    assert document["by_class"]["bytes"] == {"detected": 1, "planted": 1}
    assert "SHORT" in (tmp_path / "kept/early-stop/comment.md").read_text()


@pytest.mark.timeout(120)
def test_a_defect_that_does_nothing_is_missed(bench: Bench) -> None:
    """Else the self-test would pass whatever the judge says."""
    report = selftest(bench, [replace(NAMED["early stop"], patches=INERT)], [])
    assert (report.missed[0].outcome, report.is_good) == ("PASS", False)
    assert list(report.kinds()) == [("length", 0, 1)]


@pytest.mark.timeout(120)
def test_a_verdict_of_the_right_class_for_another_reason_is_a_miss(bench: Bench) -> None:
    report = selftest(bench, [replace(NAMED["early stop"], says="stops after 4")], [])
    assert report.missed[0].outcome == "SHORT" and not report.is_good


@pytest.mark.timeout(120)
def test_a_clean_run_that_is_found_fault_with_is_an_alarm(bench: Bench) -> None:
    for patch in NAMED["a race"].patches:
        patch.apply(bench.engine / "engine")
    report = selftest(bench, [], ["all resident, captured"])
    assert report.alarms[0].outcome == "NONDETERMINISTIC" and not report.is_good


@pytest.mark.parametrize("is_good", [True, False])
def test_the_exit_code_says_whether_all_was_found(
    is_good: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome: Outcome = "SHORT" if is_good else "PASS"
    tried = Tried("early stop", "length", "SHORT", 1, outcome, int(is_good), "stops", is_good, 1.0)
    monkeypatch.setattr(command, "selftest", lambda *_: Report((tried,)))
    assert call(["selftest"]) == (0 if is_good else 1)
    shown = capsys.readouterr().out
    assert ("MISSED" in shown) is not is_good
    assert f"{int(is_good)}/1" in shown and "false alarms: 0 of 0 A/A runs" in shown


def test_a_word_that_names_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["selftest", "--only", "late stop"]) == 2
    assert "nothing in the self-test is named 'late stop'" in capsys.readouterr().err


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("")
    assert call(["selftest", "--only", "early stop", "--keep", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_all_are_chosen_without_a_word() -> None:
    defects, clean = chosen(())
    assert (defects, clean) == (DEFECTS, tuple(CLEAN))
    assert len(NAMED) == len(DEFECTS) and not NAMED.keys() & CLEAN.keys()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_of_it_the_whole_way(bench: Bench) -> None:
    report = selftest(bench, *chosen(()))
    assert report.is_good, [(one.name, one.outcome, one.said) for one in (*report.missed, *report.alarms)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_runs_from_the_wheel_alone(checkout: Path, tmp_path: Path) -> None:
    """In a folder that is no checkout, and with nothing of one on the path."""
    build = "import hatchling.build as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-P", "-c", build, str(tmp_path)], cwd=checkout, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    here = tmp_path / "here"
    here.mkdir()
    words = ("selftest", "--only", "wrong router ties", "--only", "a mixture, all resident", "--json")
    start = "import sys, orchestrator.cli as c; print(c.__file__, file=sys.stderr); c.main()"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "site"), "HOME": str(here), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", start, *words], cwd=here, env=env, capture_output=True, text=True, check=False
    )
    assert str(tmp_path / "site") in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["planted"][0]["outcome"], document["false_alarms"]) == ("VIOLATION", 0)
