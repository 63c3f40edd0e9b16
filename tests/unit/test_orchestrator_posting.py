"""`assay comment` and `assay check` on the command line: exit codes, the job's summary, the store, no token."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.model import JudgeInput
from orchestrator.cli import call
from orchestrator.commands import check as checks
from orchestrator.conclude import judge_sweep
from reports.publish import comment as posting
from reports.render import render
from tests.unit.fake_github import BOT, JOB_TOKEN, NEW, OLD, REPOSITORY, FakeGitHub, Fault
from tests.unit.stored_documents import Put, opened, put

pytest_plugins = ("tests.unit.orchestrator_stored",)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGitHub]:
    """GitHub, and the environment of one of its jobs."""
    monkeypatch.setattr(posting, "SETTLE_S", 0.0)
    monkeypatch.setattr(checks, "WAIT_S", 0.05)
    monkeypatch.delenv("GH_TOKEN", raising=False)
    with FakeGitHub() as fake:
        job = {"GITHUB_TOKEN": JOB_TOKEN, "GITHUB_API_URL": fake.url, "GITHUB_REPOSITORY": REPOSITORY}
        for name, value in {**job, "GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(tmp_path / "step.md")}.items():
            monkeypatch.setenv(name, value)
        yield fake


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """The job's summary."""
    return tmp_path / "step.md"


def clean(documents: Any, commit: str | None = NEW) -> JudgeInput:
    return with_commit(documents.sweep(), commit)


def regressed(documents: Any, commit: str | None = NEW) -> JudgeInput:
    return with_commit(documents.sweep(head=documents.stable_arm(changes={"segments": 2})), commit)


def with_commit(doc: JudgeInput, commit: str | None) -> JudgeInput:
    arms = tuple(arm.model_copy(update={"commit": commit if arm.role == "head" else OLD}) for arm in doc.manifest.arms)
    return doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"arms": arms})})


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert call(list(words)) == code, capsys.readouterr().err
    out, err = capsys.readouterr()
    assert JOB_TOKEN not in out + err
    return out, err


def answer(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    return json.loads(told(capsys, *words, "--json", code=code)[0])


# ---- comment -----------------------------------------------------------------------------------------------------


def test_a_verdict_is_posted_summed_up_and_noted_in_the_store(
    server: FakeGitHub, stored: Put, here: Path, step: Path, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(clean(documents))
    first = answer(capsys, "comment", sweep_id[:12], "--pr", "7")
    again = answer(capsys, "comment", sweep_id, "--pr", "7", "--report-url", "https://ci.example/run/1")
    assert (first["state"], again["state"], first["id"]) == ("created", "updated", again["id"])
    assert "[full report](<https://ci.example/run/1>)" in server.of(BOT)[0]
    assert step.read_text().count("<!-- assay:sweep=") == 2
    out, _ = told(capsys, "retract", sweep_id, "--reason", "a wrong model", "--by", "Ada")
    assert out.count(f"{REPOSITORY}#7") == 1
    everything = b"".join(path.read_bytes() for path in here.parent.rglob("*") if path.is_file())
    assert JOB_TOKEN.encode() not in everything


@pytest.mark.parametrize(
    ("make", "faults"),
    [
        (clean, [Fault("*", 422, "Validation Failed") for _ in range(30)]),
        (regressed, [Fault("*", 403, "Resource not accessible by integration") for _ in range(9)]),
    ],
    ids=["422", "403"],
)
def test_field_31_a_post_that_fails_changes_no_exit_code_and_stands_in_the_summary(
    server: FakeGitHub,
    stored: Put,
    step: Path,
    documents: Any,
    capsys: pytest.CaptureFixture[str],
    make: Any,
    faults: list[Fault],
) -> None:
    sweep_id = stored(make(documents))
    gate = call(["gate", sweep_id])
    server.faults = list(faults)
    _, err = told(capsys, "comment", sweep_id, "--pr", "7")
    assert err.startswith("::warning title=assay::not posted: ")
    assert server.comments == []
    with opened(Path.cwd()) as store:
        verdict = store.verdict(sweep_id)
    assert verdict is not None
    assert verdict.headline.split(" ")[0] in step.read_text()
    assert "assay: not posted: `" in step.read_text()
    server.faults = list(faults)
    assert answer(capsys, "comment", sweep_id, "--pr", "7", "--must-post", code=4)["posted"] is False
    assert call(["gate", sweep_id]) == gate == verdict.exit_code


def test_field_31_a_fork_s_job_has_no_token_and_is_not_red_for_that(
    server: FakeGitHub,
    stored: Put,
    step: Path,
    documents: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GITHUB_TOKEN", "")
    _, err = told(capsys, "comment", stored(clean(documents)), "--pr", "7")
    assert "the token in the environment is not set" in err
    assert server.requests == []
    assert "not posted" in step.read_text()


def test_a_summary_that_is_full_or_cannot_be_written_is_said_and_the_post_is_made(
    server: FakeGitHub, stored: Put, step: Path, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(clean(documents))
    step.write_bytes(b"x" * ((1 << 20) - 900))
    _, err = told(capsys, "comment", sweep_id, "--pr", "7")
    assert "the job's summary is full" in err
    assert step.stat().st_size == (1 << 20) - 900
    step.unlink()
    step.mkdir()
    assert "no summary of the job" in told(capsys, "comment", sweep_id, "--pr", "7")[1]
    assert len(server.of(BOT)) == 1


def test_a_sweep_that_is_not_judged_is_said_in_the_summary_too(
    server: FakeGitHub, here: Path, step: Path, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "comment", pending(here, documents), "--pr", "7", code=3)
    assert "assay: no comment: `sweep swp_" in step.read_text()
    assert server.requests == []


MISTAKES = (
    (("--repo", "../x"), "--repo '../x' names no repository"),
    (("--repo", "octo/.."), "names no repository"),
    (("--pr", "0"), "'--pr'"),
    (("--head", "abc"), "no full commit id"),
    (("--head", OLD), f"is not what was measured, which is {NEW}"),
    (("--api-url", "http://github.example"), "a token does not go over http"),
    (("--verdict", "x.json"), "a comment shows one verdict"),
)


def test_a_mistake_of_the_caller_is_exit_2(
    server: FakeGitHub, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(clean(documents))
    for words, said in MISTAKES:
        assert said in told(capsys, "comment", sweep_id, "--pr", "7", *words, code=2)[1]
    assert server.requests == []


@pytest.mark.parametrize("commit", [None, f"{NEW}-dirty"])
def test_a_head_without_a_commit_of_its_own_has_to_be_named(
    server: FakeGitHub, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str], commit: str | None
) -> None:
    sweep_id = stored(clean(documents, commit))
    assert "--head SHA" in told(capsys, "comment", sweep_id, "--pr", "7", code=2)[1]
    assert answer(capsys, "comment", sweep_id, "--pr", "7", "--head", NEW)["state"] == "created"


def test_a_variant_under_test_has_a_commit_as_a_head_has(
    server: FakeGitHub, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    doc = with_commit(documents.sweep(head=documents.stable_arm(plan={"role": "variant"})), OLD)
    arms = (arm.model_copy(update={"commit": NEW}) if arm.role == "variant" else arm for arm in doc.manifest.arms)
    sweep_id = stored(doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"arms": tuple(arms)})}))
    assert answer(capsys, "comment", sweep_id, "--pr", "7")["state"] == "created"
    assert f"head={NEW}" in server.of(BOT)[0]
    assert "is not what was measured" in told(capsys, "comment", sweep_id, "--pr", "7", "--head", OLD, code=2)[1]
    assert answer(capsys, "check", sweep_id)[0]["head"] == NEW


# ---- a verdict from a file that anybody may have written ------------------------------------------------------------


@pytest.fixture
def artifact(stored: Put, here: Path, documents: Any) -> Path:
    with_store = stored(regressed(documents))
    with opened(here) as store:
        verdict = store.verdict(with_store)
    assert verdict is not None
    place = here / "verdict.json"
    place.write_text(render(verdict, "json"))
    return place


def test_an_artifact_is_posted_for_exactly_the_approved_commit(
    server: FakeGitHub, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told(capsys, "comment", "--verdict", str(artifact), "--pr", "7", code=2)
    told(capsys, "comment", "--verdict", str(artifact), "--pr", "7", "--head", OLD, code=2)
    assert server.requests == []
    told(capsys, "comment", "--verdict", str(artifact), "--pr", "7", "--head", NEW)
    assert "a job left which ran the change's own code" in server.of(BOT)[0]


def hostile(artifact: Path, how: str) -> None:
    document = json.loads(artifact.read_text())
    arms = document["cells"][0]["arms"]
    if how == "no commit":
        for arm in arms:
            arm["commit"] = None
    elif how == "changes on top":
        for arm in arms:
            arm["commit"] = f"{NEW}-dirty"
    elif how == "two heads":
        arms.append({**arms[1], "role": "head", "commit": OLD})
    elif how == "a marker of its own":
        document["stamp"]["sweep_id"] = "swp_x digest=0 --> @octocat"
    elif how == "another schema":
        document["secret"] = "s3cr3t-word"
    text = json.dumps(document)
    artifact.unlink()
    if how == "a link":
        (artifact.parent / "elsewhere.json").write_text(text)
        artifact.symlink_to("elsewhere.json")
    elif how == "a folder":
        artifact.mkdir()
    else:
        artifact.write_text({"no JSON": "s3cr3t-word", "deep": "[" * 100_000}.get(how, text))


HOW = ("no commit", "changes on top", "two heads", "a marker of its own", "another schema", "no JSON", "deep", "a link",
       "a folder")  # fmt: skip


def test_a_hostile_artifact_is_refused_and_nothing_of_it_is_shown(
    server: FakeGitHub, artifact: Path, step: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    honest = artifact.read_text()
    for how in HOW:
        artifact.write_text(honest)
        hostile(artifact, how)
        _, err = told(capsys, "comment", "--verdict", str(artifact), "--pr", "7", "--head", NEW, code=2)
        assert err.startswith("error: "), how
        assert "s3cr3t" not in err + step.read_text(), how
        if how == "a link":
            artifact.unlink()
    assert server.requests == []


# ---- check -------------------------------------------------------------------------------------------------------


def pending(here: Path, documents: Any) -> str:
    with opened(here) as store:
        return store.submit(clean(documents).manifest, "h" * 64, "0.1")


def finish(here: Path, sweep_id: str, documents: Any) -> None:
    with opened(here) as store:
        assert put(store, clean(documents)) == sweep_id  # the same submission, now with its runs
        judge_sweep(store, sweep_id)


def test_a_check_is_open_from_submission_and_closed_by_the_verdict(
    server: FakeGitHub, here: Path, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = pending(here, documents)
    for _ in range(2):
        assert answer(capsys, "check", sweep_id)[0]["stands"] == "open"
    assert "without a verdict it closes at" in server.checks[0]["output"]["title"]
    assert answer(capsys, "check", "--overdue") == []
    finish(here, sweep_id, documents)
    (row,) = answer(capsys, "check", "--overdue")
    assert (row["stands"], row["head"]) == ("success", NEW)
    (made,) = server.checks
    assert (made["status"], made["conclusion"], made["external_id"]) == ("completed", "success", sweep_id)
    assert answer(capsys, "check", "--overdue") == []


def test_a_check_without_a_verdict_is_closed_by_its_deadline(
    server: FakeGitHub, here: Path, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = pending(here, documents)
    (row,) = answer(capsys, "check", sweep_id, "--deadline", "1", "--wait")
    assert row["stands"] == server.checks[0]["conclusion"] == "timed_out"
    assert server.checks[0]["status"] == "completed"


def test_a_check_that_could_not_be_opened_or_closed_is_due_until_it_is(
    server: FakeGitHub, here: Path, step: Path, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = pending(here, documents)
    server.faults = [Fault("*", 403, "no") for _ in range(9)]
    assert "open, which was not posted" in told(capsys, "check", sweep_id, "--deadline", "1")[0]
    assert server.checks == []
    time.sleep(1.1)
    assert answer(capsys, "check", "--overdue", "--must-post", code=4)[0]["url"] == ""
    server.faults = []
    (row,) = answer(capsys, "check", "--overdue", "--must-post")
    assert row["stands"] == server.checks[0]["conclusion"] == "timed_out"
    assert answer(capsys, "check", "--overdue") == []
    assert "assay: check `assay`: timed_out" in step.read_text()


def test_a_check_whose_waiting_is_ended_is_closed_first(
    server: FakeGitHub, here: Path, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = pending(here, documents)
    stop = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGTERM))
    stop.start()
    told(capsys, "check", sweep_id, "--wait", code=128 + signal.SIGTERM)
    stop.join()
    assert [one["conclusion"] for one in server.checks] == ["cancelled"]


def test_the_exit_code_of_a_check_is_no_verdict(
    server: FakeGitHub, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = stored(regressed(documents))
    assert call(["gate", sweep_id]) == 1
    assert answer(capsys, "check", sweep_id)[0]["stands"] == "failure"
    assert server.checks[0]["output"]["title"].startswith("REGRESSED: ")
    told(capsys, "check", code=2)
    told(capsys, "check", sweep_id, "--overdue", code=2)
