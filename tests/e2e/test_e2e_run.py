"""One small sweep from file to verdict through the command line and Ray, then everything that can be asked of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from jobs.store import Store

ROOT = Path(__file__).parents[2]
STRAY = ("engine", "jobs", "reports", "orchestrator")


@dataclass(frozen=True)
class Finished:
    """A folder in which `sweeps/tiny.yaml` has been run with --json."""

    folder: Path
    document: dict[str, Any]
    stderr: str

    def assay(self, *words: str) -> subprocess.CompletedProcess[str]:
        return assay(self.folder, *words)


def assay(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "XDG_STATE_HOME": str(folder / "state")}
    command = [str(Path(sys.executable).with_name("assay")), *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """All of it in a folder that holds four packages of our names, each of which would end whoever imports it."""
    folder = tmp_path_factory.mktemp("tiny")
    for name in STRAY:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise SystemExit('the stray {name} was imported')\n")
    done = assay(folder, "run", str(ROOT / "sweeps" / "tiny.yaml"), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(folder, json.loads(done.stdout), done.stderr)


def test_a_run_prints_its_verdict_and_writes_comment_page_and_store(tiny: Finished) -> None:
    document = tiny.document
    assert (document["outcome"], document["exit_code"]) == ("IMPROVED", 0)
    for word in ("comment", "page", "verdict"):
        assert Path(document[word]).is_file()
    assert document["store"] == f"sqlite:///{tiny.folder}/.assay/store.db"
    comment = Path(document["comment"]).read_text()
    for words in ("htod", "hit rate", "bypassed", "floor"):
        assert words in comment.lower()


def test_packages_in_the_working_folder_are_left_alone(tiny: Finished) -> None:
    """What stands there must not be imported in place of what is installed, by command, worker or child."""
    assert tiny.document["outcome"] == "IMPROVED"
    assert "stray" not in tiny.stderr + json.dumps(tiny.document)
    stray = subprocess.run(
        [sys.executable, "-c", "import engine"], cwd=tiny.folder, capture_output=True, text=True, check=False
    )
    assert "the stray engine was imported" in stray.stderr, "they would be found by whoever looks there"


def test_progress_goes_to_stderr_and_names_the_simulated_card(tiny: Finished) -> None:
    assert "6 runs pending, on 1 x simulated card" in tiny.stderr
    assert "6/6" in tiny.stderr


def test_every_record_is_certified_verified_and_complete(tiny: Finished) -> None:
    store = Store.open(tiny.document["store"], lambda: datetime.now(UTC), migrate=False)
    given = store.judge_input(tiny.document["sweep"])
    runs = [run for cell in given.cells for run in cell.runs]
    assert len(runs) == 6
    digests = {arm.name: arm.tree_digest for arm in given.manifest.arms}
    for run in runs:
        record = run.record
        assert record is not None and record.certificate is not None
        assert (record.certificate.verdict, record.certificate.grade) == ("clear", "scripted")
        assert record.certificate.uuid == record.device["uuid"]
        assert record.engine_digest == digests[run.arm]
        assert record.model_digest == given.cells[0].plan.model_digest
        assert all(equation.holds for equation in record.equations)
        assert [len(generation.ids) for generation in record.generations] == [8, 8]
        assert record.peak_rss_bytes
    assert len({run.record.generations[0].ids for run in runs if run.record}) == 1
    store.close()


def test_gate_report_judge_and_status_agree_by_a_prefix_of_the_id(tiny: Finished) -> None:
    prefix = tiny.document["sweep"][:20]
    gate = tiny.assay("gate", prefix)
    assert (gate.returncode, gate.stdout[:8]) == (0, "IMPROVED")
    verdict = json.loads(Path(tiny.document["verdict"]).read_text())
    assert json.loads(tiny.assay("report", prefix, "--format", "json").stdout) == verdict
    judged = tiny.assay("judge", prefix, "--json")
    assert json.loads(judged.stdout)["outcome"] == "IMPROVED"
    assert json.loads(tiny.assay("report", prefix, "--json").stdout) == verdict
    (row,) = json.loads(tiny.assay("status", "--json").stdout)
    assert (row["state"], row["complete"], row["pending"]) == ("judged", 6, 0)
    assert "IMPROVED" in tiny.assay("status").stdout
    assert "judged" in tiny.assay("status", prefix).stdout


@pytest.mark.parametrize("form", ["comment", "html", "text"])
def test_each_form_is_printed_or_written_where_asked(tiny: Finished, form: str, tmp_path: Path) -> None:
    printed = tiny.assay("report", tiny.document["sweep"], "--format", form)
    assert printed.returncode == 0
    assert "tiny" in printed.stdout
    out = tmp_path / "sub" / "report"
    written = tiny.assay("report", tiny.document["sweep"], "--format", form, "--out", str(out))
    assert written.returncode == 0
    assert Path(written.stdout.strip()).is_file()


def test_a_cell_is_explained_down_to_its_runs(tiny: Finished) -> None:
    told = tiny.assay("explain", tiny.document["sweep"], "weight_budget", "--metric", "htod_bytes")
    assert told.returncode == 0
    assert "head 0.2" in told.stdout
    wrong = tiny.assay("explain", tiny.document["sweep"], "nothing-like-it")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("error: ")


def test_a_judged_sweep_is_not_resumed_and_a_second_run_is_a_sweep_of_its_own(tiny: Finished) -> None:
    again = tiny.assay("run", tiny.document["sweep"], "--resume")
    assert again.returncode == 2
    assert "is judged already" in again.stderr
    plan = json.loads(tiny.assay("run", str(ROOT / "sweeps" / "tiny.yaml"), "--dry-run", "--json").stdout)
    assert "by the last run of this sweep" in plan["time"]
    assert plan["models_to_build"] == []


def test_nothing_is_left_but_store_reports_and_caches(tiny: Finished) -> None:
    assert sorted(p.name for p in (tiny.folder / ".assay").iterdir() if not p.name.startswith("store.db-")) == [
        "report",
        "store.db",
    ]
    assert not list((tiny.folder / "state" / "assay" / "spool").glob("*"))
