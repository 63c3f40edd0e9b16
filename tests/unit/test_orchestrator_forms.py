"""Commands that show what is stored in forms for programs: JUnit XML, a schema, two runs, a history."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from junitparser import JUnitXml

from orchestrator.cli import call
from tests.unit.stored_documents import Put

pytest_plugins = ("tests.unit.orchestrator_stored",)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command prints, on stderr where it has to fail."""
    capsys.readouterr()
    found = call([*words])
    out, err = capsys.readouterr()
    assert found == code, err or out
    return err if code else out


def test_a_verdict_is_given_as_junit_and_as_json_by_the_schema_that_is_printed(
    stored: Put, documents: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sweep_id = stored(documents.sweep(head=documents.arm(ids=lambda _run, _generation: (1, 2, 3))))
    document = json.loads(said(capsys, "report", sweep_id, "--format", "json"))
    Draft202012Validator(json.loads(said(capsys, "report", "--schema"))).validate(document)
    path = tmp_path / "junit.xml"
    assert said(capsys, "report", sweep_id, "--format", "junit", "--out", str(path)).strip() == str(path)
    (suite,) = JUnitXml.fromfile(str(path))
    told = {one.name: one.value for one in suite.properties()}
    assert (told["outcome"], told["exit_code"]) == (document["outcome"], str(document["exit_code"]))
    assert suite.failures + suite.errors == sum(cell["exit_code"] != 0 for cell in document["cells"]) == 1


def test_a_sweep_goes_from_one_store_to_another_by_a_file(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(documents.sweep())
    out = said(capsys, "db", "export", sweep_id[:12], "one.assay")
    assert out.startswith(f"one.assay: sweep {sweep_id}, ") and "rests on" not in out
    other = ("--store", "sqlite:///other.db")
    said(capsys, "db", "upgrade", *other)
    assert f"sweep {sweep_id}: imported, " in said(capsys, "db", "import", "one.assay", *other)
    assert "was there already" in said(capsys, "db", "import", "one.assay", *other)
    told = json.loads(said(capsys, "db", "import", "one.assay", *other, "--json"))
    assert (told["sweep_id"], told["was_there"], told["absent"]) == (sweep_id, True, [])
    for form in ("json", "junit"):
        words = ("report", sweep_id, "--format", form)
        assert said(capsys, *words, *other) == said(capsys, *words)
    said(capsys, "retract", sweep_id, "--reason", "the fan was blocked", *other)
    assert "with other content than in one.assay: sweep, event" in said(
        capsys, "db", "import", "one.assay", *other, code=4
    )
    assert "no store at" in said(capsys, "db", "import", "one.assay", "--store", "sqlite:///none.db", code=4)
    assert "other.db is no whole export" in said(capsys, "db", "import", "other.db", *other, code=2)
    assert "one.txt: No such file" in said(capsys, "db", "import", "one.txt", *other, code=4)
    unwritable = said(capsys, "db", "export", sweep_id, "/proc/x", code=4 if os.geteuid() == 0 else 2)
    assert "/proc/x" in unwritable and ".tmp" not in unwritable, "the file that was asked for is named"
    assert "folder nowhere does not exist" in said(capsys, "db", "export", sweep_id, "nowhere/a", code=2)
    held = Path("other.db").read_bytes()
    assert "other.db holds something that is no export" in said(capsys, "db", "export", sweep_id, "other.db", code=2)
    assert Path("other.db").read_bytes() == held
    assert sorted(path.name for path in here.glob("*e.assay*")) == ["one.assay"]


def test_two_runs_are_named_by_their_beginnings(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    stored(documents.sweep())
    cell = json.loads(said(capsys, "explain", "swp_", "capital", "--json"))["input"]
    first, *_, last = (run["run_id"] for run in cell["runs"])
    out = said(capsys, "compare", first, last)
    assert out.startswith(f"left: {first}\nright: {last}\n") and "Counters" in out
    told = json.loads(said(capsys, "compare", first, first, "--json"))
    assert (told["schema"], told["cannot"]) == ("assay.two-runs/1", [])
    assert all(row["same"] for row in told["facts"]) and all(row["delta"] in (0, 0.0) for row in told["times"])
    assert "run_x" in said(capsys, "compare", first, "run_x", code=2)


def test_a_series_is_shown_by_the_name_of_its_counter(
    stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(documents.sweep())
    (told,) = json.loads(said(capsys, "history", "htod_bytes", "--cell", "capital", "--arm", "head", "--json"))
    assert (told["schema"], told["name"], [point["sweep"] for point in told["points"]]) == (
        "assay.history/1",
        "htod_bytes",
        [sweep_id],
    )
    out = said(capsys, "history", told["series"])
    assert out.startswith(f"htod_bytes ({told['series']})\n") and "0 changes of level. Advice alone" in out
    out = said(capsys, "history", "decode_ms_per_token", "--arm", "head")
    assert "too few points to seek changes of a time: 1 of the 8" in out
    assert "has measured nothing_such" in said(capsys, "history", "nothing_such", code=2)
