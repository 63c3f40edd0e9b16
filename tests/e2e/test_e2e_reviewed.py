"""Waivers, goldens, declarations and retraction through the real path, over a repository with a base and a change."""

from __future__ import annotations

import json
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_e2e_run import ROOT, assay

pytestmark = pytest.mark.slow

SWEEP = """\
sweep: gate
models: {tiny: {build: tiny, seed: 7}}
prompts: {short: {ids: [1, 2, 3, 4]}}
arms:
  base: {source: "git:main", config: {policy: stable}}
  head: {source: checkout, config: {policy: lru}}
matrix: {weight_budget: ["50%"], granule: [4096]}
varies: [policy]
run: {device: sim, tokens: 8, generations: 2, ignore_eos: true}
expectations: changes.yaml
waivers: waivers.yaml
goldens: goldens.yaml
"""
WORSE = ("htod_bytes", "vmm_calls_steady")
"""What lru does more of than stable does here."""

EMPTY = {"changes.yaml": "expectations: []\n", "waivers.yaml": "waivers: []\n", "goldens.yaml": "goldens: []\n"}


def test_decisions_of_people_count_where_base_holds_them_and_fall_with_what_they_rest_on(tmp_path: Path) -> None:
    repository(tmp_path)
    first = ran(tmp_path, 1)
    assert first["outcome"] == "REGRESSED"
    assert {one["metric"] for one in verdict(first)["findings"]} == set(WORSE)
    cell = first["cells"][0]["cell"]
    day = (datetime.now(UTC) + timedelta(days=30)).date().isoformat()
    for metric in WORSE:
        done(tmp_path, "waive", first["sweep"], cell, "--class", "REGRESSED", "--metric", metric, "--expires", day,
             "--evidence", "measured twice", "--reason", "lru is asked for", "--by", "Ada")  # fmt: skip
    done(tmp_path, "bless", first["sweep"], cell, "--reason", "as the reference", "--by", "Ada")

    alone = ran(tmp_path, 1)  # both files lie in the tree under test, and base's commit has neither
    assert alone["outcome"] == "REGRESSED"
    states = {row["kind"]: row["state"] for row in verdict(alone)["reviewed"]}
    assert states == {"waiver": "not in force", "golden": "not in force"}

    commit(tmp_path)
    held = ran(tmp_path, 0)
    assert held["outcome"] == "WAIVED"
    assert {row["kind"]: row["state"] for row in verdict(held)["reviewed"]} == {"waiver": "used", "golden": "used"}
    comment = Path(held["comment"]).read_text()
    assert "waived as REGRESSED" in comment and "measured twice" in comment

    (tmp_path / "waivers.yaml").write_text(EMPTY["waivers.yaml"])
    commit(tmp_path)
    row = "  - {{metric: {}, change: higher, reason: the change asks for lru}}\n"
    (tmp_path / "changes.yaml").write_text("expectations:\n" + "".join(map(row.format, WORSE)))
    declared = ran(tmp_path, 0)
    assert declared["outcome"] == "DECLARED" and "declared by this change" in declared["headline"]

    struck = json.loads(done(tmp_path, "retract", first["sweep"], "--reason", "another model", "--json"))
    assert len(struck["goldens"]) == 1
    assert {row["sweep"] for row in struck["verdicts"]} == {first["sweep"], held["sweep"], declared["sweep"]}
    for sweep, code in ((first, 3), (held, 3), (declared, 3), (alone, 1)):
        assert assay(tmp_path, "gate", sweep["sweep"]).returncode == code
    assert "~~DECLARED" in done(tmp_path, "report", declared["sweep"], "--format", "comment")
    judged = assay(tmp_path, "judge", declared["sweep"])
    assert (judged.returncode, judged.stdout.split()[0]) == (0, "DECLARED"), "without the golden it stands"


def ran(folder: Path, code: int) -> dict[str, Any]:
    done = assay(folder, "run", "gate.yaml", "--json")
    assert done.returncode == code, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def verdict(run: dict[str, Any]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(run["verdict"]).read_text())
    return document


def done(folder: Path, *words: str) -> str:
    finished = assay(folder, *words)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


def repository(folder: Path) -> None:
    """The engine and the sweep with three empty files, committed to main."""
    shutil.copytree(ROOT / "engine", folder / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in {"gate.yaml": SWEEP, ".gitignore": "/cache\n/state\n/.assay\n", **EMPTY}.items():
        (folder / name).write_text(text)
    git(folder, "init", "-q", "-b", "main")
    commit(folder)


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-qm", "why")


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
