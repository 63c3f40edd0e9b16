"""`assay bless`, `waive` and `retract` on the command line: what they write, and every way in which they refuse."""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from jobs.model import JudgeInput
from jobs.spec.faults import parse
from jobs.spec.reviewed_form import GoldensForm, WaiversForm, goldens_of, waivers_of
from jobs.spec.reviewed_write import add_entry, read_list
from jobs.spec.yaml_lines import read_file
from orchestrator.cli import call
from orchestrator.commands.author import author
from orchestrator.settings import settings
from tests.unit.stored_documents import Put

pytest_plugins = ("tests.unit.orchestrator_stored",)

CELL = "smollm2/capital/weight_budget=50%"


def done(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert call(list(words)) == code, capsys.readouterr().err
    return capsys.readouterr().out


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """A command that must be refused as a mistake of its user: its one line."""
    capsys.readouterr()
    assert call(list(words)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("error: ")


def regressed(documents: Any) -> JudgeInput:
    doc: JudgeInput = documents.sweep(head=documents.stable_arm(changes={"segments": 2}))
    return doc


def waiving(sweep_id: str, *more: str, **changes: str) -> list[str]:
    day = (datetime.now(UTC) + timedelta(days=30)).date().isoformat()
    options = {"class": "REGRESSED", "metric": "segments", "expires": day, "evidence": "issue 7", "reason": "known"}
    words = [word for name, value in {**options, **changes}.items() for word in (f"--{name}", value)]
    return ["waive", sweep_id, CELL, *words, "--by", "Ada", *more]


# ---- bless -------------------------------------------------------------------------------------------------------


def test_blessed_ids_are_written_with_all_of_their_provenance(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(documents.sweep())
    out = done(capsys, "bless", sweep_id[:10], "capital", "--reason", "matches the reference", "--by", "Ada")
    assert "32 ids of head" in out and "it counts once base's commit holds it" in out
    assert "name the file in the sweep file: goldens: goldens.yaml" in out
    source = read_file(here / "goldens.yaml", "")
    (golden,) = goldens_of(parse(GoldensForm, source), source)
    assert golden.streams[0].ids == documents.IDS
    assert (golden.cell, golden.sweep, golden.arm, golden.by) == (CELL, sweep_id, "head", "Ada")
    assert (golden.engine_digest, golden.reason, len(golden.runs)) == ("e" * 64, "matches the reference", 2)
    assert datetime.fromisoformat(golden.at) > datetime.now(UTC) - timedelta(minutes=5)
    again = json.loads(
        done(capsys, "bless", sweep_id, CELL, "--arm", "base", "--reason", "again", "--by", "Bo", "--json")
    )
    assert again["supersedes"] == golden.id
    assert again["arm"] == "base"
    source = read_file(here / "goldens.yaml", "")
    assert [one.id for one in goldens_of(parse(GoldensForm, source), source)] == [golden.id, again["golden"]]


@pytest.mark.parametrize(
    ("arm", "why"),
    [
        ({"changes": {"touches": 1}}, "the equation "),
        ({"ids": lambda run, _g: documents_ids(run)}, "runs of one build and config disagree"),
        ({"gap": float("nan")}, "logits are not finite"),
        ({"counters": "resident"}, "the witness page_ins > 0 is unmet"),
        ({"ids": lambda _r, _g: (1, 2, 3)}, "3 of 32 tokens"),
    ],
)
def test_field_36_what_is_broken_unsteady_or_vacuous_is_never_blessed(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str], arm: dict[str, Any], why: str
) -> None:
    if arm.get("counters") == "resident":
        arm = {**arm, "counters": documents.resident}
    sweep_id = stored(documents.sweep(head=documents.stable_arm(**arm)))
    said = failed(capsys, "bless", sweep_id, CELL, "--reason", "no")
    assert "head of smollm2/capital" in said and "cannot be blessed" in said
    assert why in said
    assert not (here / "goldens.yaml").exists()
    assert done(capsys, "bless", sweep_id, CELL, "--arm", "base", "--reason", "the mirror").startswith("golden gld_")


def documents_ids(run: int) -> tuple[int, ...]:
    return tuple(range(1, 33)) if run else tuple(range(2, 34))


def test_a_retracted_run_or_sweep_cannot_be_blessed(
    stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(documents.sweep())
    done(capsys, "retract", sweep_id, "--reason", "wrong model")
    assert "is retracted: wrong model" in failed(capsys, "bless", sweep_id, CELL, "--reason", "x")


def test_an_arm_with_a_run_that_does_not_count_cannot_be_blessed(
    stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(documents.sweep())
    listed = done(capsys, "explain", sweep_id, CELL)
    head = next(line for line in listed.splitlines() if " head " in line and "run_" in line)
    done(capsys, "retract", re.findall(r"run_[0-9a-z]{26}", head)[0], "--reason", "the fan was blocked")
    done(capsys, "judge", sweep_id, code=3)
    said = failed(capsys, "bless", sweep_id, CELL, "--reason", "x")
    assert "1 of its 2 runs do not count: retracted: the fan was blocked" in said
    assert "32 ids of base" in done(capsys, "bless", sweep_id, CELL, "--arm", "base", "--reason", "the mirror")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["swp_none", CELL, "--reason", "x"], "no id begins with 'swp_none'"),
        (["{id}", "nowhere", "--reason", "x"], "no cell is named"),
        (["{id}", CELL], "Missing option '--reason'"),
        (["{id}", CELL, "--reason", "  "], "the golden gives no reason"),
        (["{id}", CELL, "--reason", "x", "--arm", "third"], "has no arm 'third' (name one of: base, null, head)"),
        (["{id}", CELL, "--reason", "x", "--file", "broken.yaml"], "broken.yaml:2: unknown key 'idd'"),
        (["{id}", CELL, "--reason", "x", "--file", "other.yaml"], "holds no list of goldens"),
        (["{id}", CELL, "--reason", "x", "--file", "nowhere/a.yaml"], "--file: folder nowhere does not exist"),
    ],
)
def test_what_cannot_be_blessed_is_said_with_its_remedy(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    sweep_id = stored(documents.sweep())
    (here / "broken.yaml").write_text("goldens:\n  - {idd: 1}\n")
    (here / "other.yaml").write_text("waivers: []\n")
    assert says in failed(capsys, "bless", *(word.replace("{id}", sweep_id) for word in words))


# ---- waive -------------------------------------------------------------------------------------------------------


def test_a_waiver_is_written_below_what_is_there(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(regressed(documents))
    (here / "waivers.yaml").write_text("# reviewed by the kernel group\nwaivers: []\n")
    out = done(capsys, *waiving(sweep_id))
    assert "it covers 1 findings" in out
    text = (here / "waivers.yaml").read_text()
    assert text.startswith("# reviewed by the kernel group\nwaivers:\n  - cell: ")
    told = json.loads(done(capsys, *waiving(sweep_id, "--json", reason="again")))
    source = read_file(here / "waivers.yaml", "")
    made = waivers_of(parse(WaiversForm, source), source)
    assert [one.reason for one in made] == ["known", "again"]
    assert (made[1].id, made[1].written) == (told["waiver"], datetime.now(UTC).date())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"expires": "2020-01-01"}, "it expires on 2020-01-01, before it was written"),
        ({"expires": "2999-01-01"}, "more than 366 days"),
        ({"expires": "soon"}, "'soon' is no day (write it as 2026-12-31)"),
        ({"evidence": " "}, "the waiver gives no evidence"),
        ({"reason": ""}, "reason is empty"),
        ({"class": "MISSING"}, "no class that can be waived"),
        ({"metric": "segmens"}, "unknown metric 'segmens'"),
        ({"metric": "fallbacks"}, "the verdict has no finding like that: REGRESSED of fallbacks"),
    ],
)
def test_what_cannot_be_waived_is_said_and_nothing_is_written(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str], changes: dict[str, str], says: str
) -> None:
    sweep_id = stored(regressed(documents))
    assert says in failed(capsys, *waiving(sweep_id, **changes))
    assert not (here / "waivers.yaml").exists()


def test_a_clean_verdict_has_nothing_to_waive(stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing in it costs anything" in failed(capsys, *waiving(stored(documents.sweep())))
    assert "no id begins with" in failed(capsys, *waiving("swp_none"))


# ---- retract -----------------------------------------------------------------------------------------------------


def test_a_retracted_sweep_gates_with_3_and_says_so_everywhere(
    here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(documents.sweep())
    done(capsys, "gate", sweep_id)
    done(capsys, "bless", sweep_id, CELL, "--reason", "x")
    told = json.loads(done(capsys, "retract", sweep_id, "--reason", "wrong model", "--by", "Ada", "--json"))
    assert (told["retracted"], len(told["verdicts"]), len(told["goldens"])) == (sweep_id, 1, 1)
    assert done(capsys, "gate", sweep_id, code=3).startswith("RETRACTED (exit 3): The sweep")
    assert json.loads(done(capsys, "gate", sweep_id, "--json", code=3))["outcome"] == "RETRACTED"
    assert "RETRACTED, exit 3" in done(capsys, "status")
    assert "UTC: wrong model" in done(capsys, "status", sweep_id)
    assert json.loads(done(capsys, "status", sweep_id, "--json"))["retracted_reason"] == "wrong model"
    assert "struck out: The sweep" in done(capsys, "explain", sweep_id, CELL)
    for form in ("comment", "html", "json", "text"):
        assert "wrong model" in done(capsys, "report", sweep_id, "--format", form)
    done(capsys, "judge", sweep_id, code=3)
    done(capsys, "report", sweep_id, "--format", "html", "--out", str(here / "pages"))
    pages = list((here / "pages").rglob("*.html"))
    assert len(pages) == 4  # the index, the sweep, its cell, its scenario
    for page in pages:
        text = page.read_text()
        assert "<s>" in text and "retracted" in text.lower(), f"{page} strikes out what it said"


def test_a_retracted_run_names_the_way_on(stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sweep_id = stored(documents.sweep())
    run_id = re.findall(r"run_[0-9a-z]{26}", done(capsys, "explain", sweep_id, CELL))[0]
    out = done(capsys, "retract", run_id, "--reason", "the fan was blocked")
    assert f"judge without it: assay judge {sweep_id}" in out
    done(capsys, "gate", sweep_id, code=3)
    told = json.loads(done(capsys, "judge", sweep_id, "--json", code=3))
    assert (told["outcome"], told["next_step"]) == (
        "MISSING", "Run the sweep anew: a run that was retracted is not made again."
    )  # fmt: skip


@pytest.mark.parametrize("of_run", [False, True])
def test_a_retraction_keeps_its_first_reason(
    stored: Put, documents: Any, capsys: pytest.CaptureFixture[str], of_run: bool
) -> None:
    sweep_id = stored(documents.sweep())
    runs = re.findall(r"run_[0-9a-z]{26}", done(capsys, "explain", sweep_id, CELL))
    subject = runs[0] if of_run else sweep_id
    first = done(capsys, "retract", subject, "--reason", "the fan was blocked", "--json")
    assert done(capsys, "retract", subject, "--reason", "the fan was blocked", "--json") == first
    told = failed(capsys, "retract", subject, "--reason", "another one")
    assert f"{subject} is retracted already, since 20" in told
    assert "UTC: the fan was blocked (that reason stands and nothing was changed" in told
    assert "the fan was blocked" in done(capsys, "gate", sweep_id, code=3)
    assert "another one" not in done(capsys, "status", sweep_id)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run_none", "--reason", "x"], "no id begins with 'run_none'"),
        (["{id}"], "Missing option '--reason'"),
        (["{id}", "--reason", " "], "a retraction needs a reason"),
        (["vrd_", "--reason", "x"], "is no run and no sweep"),
    ],
)
def test_what_cannot_be_retracted_is_said(
    stored: Put, documents: Any, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    sweep_id = stored(documents.sweep())
    assert says in failed(capsys, "retract", *(word.replace("{id}", sweep_id) for word in words))


# ---- who ---------------------------------------------------------------------------------------------------------


def test_who_decides_is_git_s_user_here_else_the_host_s(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    assert author(settings({"USER": "ada"})) == "ada"
    assert author(settings({"LOGNAME": "lovelace"})) == "lovelace"
    assert author(settings({})) == "somebody"
    subprocess.run(["git", "init", "-q"], check=True)
    subprocess.run(["git", "config", "user.name", "Ada"], check=True)
    assert author(settings({"USER": "ada"})) == "Ada"
    subprocess.run(["git", "config", "user.email", "ada@example.org"], check=True)
    assert author(settings({"USER": "ada"})) == "Ada <ada@example.org>"


# ---- the files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "waivers:\n", "waivers: 3\n", "- a\n"])
def test_a_file_without_the_list_is_refused(here: Path, text: str) -> None:
    (here / "w.yaml").write_text(text)
    with pytest.raises(Exception, match="holds no list of waivers"):
        read_list(here / "w.yaml", "waivers")


def test_an_entry_keeps_comments_indentation_and_odd_text(here: Path) -> None:
    file = here / "w.yaml"
    file.write_text("# first\nwaivers:\n- {a: 1}  # kept\n")
    entry = {"cell": "*", "sum": "12e3", "on": "off", "day": "2026-12-31", "note": 'a "quoted": #1\nline', "n": "~"}
    add_entry(file, "waivers", entry)
    assert read_file(file, "").values["waivers"] == [{"a": 1}, entry]
    assert file.read_text().startswith("# first\nwaivers:\n- {a: 1}  # kept\n- cell: ")


def test_a_list_in_one_line_is_left_alone(here: Path) -> None:
    file = here / "w.yaml"
    file.write_text("waivers: [{a: 1}]\n")
    with pytest.raises(Exception, match=r"below a dash|did not find|expected"):
        add_entry(file, "waivers", {"b": 2})
    assert file.read_text() == "waivers: [{a: 1}]\n"
