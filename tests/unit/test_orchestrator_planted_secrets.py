"""Secrets planted in an arm's environment, in a run's log and in its error: none is in any form that anybody reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.model import BuildFailure, BuildPlan, JudgeInput
from jobs.redact import HIDDEN, redact, redacted
from orchestrator.cli import call
from reports.publish import comment as posting
from tests.unit.fake_github import JOB_TOKEN, NEW, OLD, REPOSITORY, FakeGitHub
from tests.unit.stored_documents import Put

pytest_plugins = ("tests.unit.orchestrator_stored",)

MARK = "s3cr3t"
LINES = (
    f"GITHUB_TOKEN=ghp_{MARK}0123456789abcdefghijABCD",
    f"HF_TOKEN=9{MARK}",
    f"Authorization: Bearer {MARK}abcdef0123456789",
    f"cloning https://me:{MARK}@git.example/x",
    f"engine --api-key {MARK}-word --tokens 24",
    f'{{"password": "{MARK}-word", "tokens": "many"}}',
)
LOG = "\n".join(("loaded 211 keys", *LINES, "tokens: identical"))
ENV = {"HF_TOKEN": f"{MARK} of several words", "STORE": f"postgresql://me:{MARK}@db/assay"}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGitHub]:
    monkeypatch.setattr(posting, "SETTLE_S", 0.0)
    with FakeGitHub() as fake:
        job = {"GITHUB_TOKEN": JOB_TOKEN, "GITHUB_API_URL": fake.url, "GITHUB_REPOSITORY": REPOSITORY}
        for name, value in {**job, "GITHUB_STEP_SUMMARY": str(tmp_path / "step.md"), "MY_SECRET": MARK}.items():
            monkeypatch.setenv(name, value)
        yield fake


def planted(documents: Any, kind: str) -> JudgeInput:
    """Head's run ended with an error that names secrets, or its build did, or its tokens differ."""
    plan: dict[str, Any] = {"env": ENV}
    record: dict[str, Any] = {"log_tail": LOG}
    head: dict[str, Any] = {"plan": plan, "record": record}
    if kind == "an error":
        record |= {"error": f"cannot log in: {' '.join(LINES)}", "exit_code": 16}
    elif kind == "other tokens":
        head["ids"] = lambda _run, _generation: documents.IDS[::-1]
    else:
        failure = BuildFailure(reason=f"exit 2: {' '.join(LINES)}", log_tail=LOG)
        plan |= {"build": BuildPlan(command=f"make {LINES[0]}", outputs=("x.so",), failure=failure), "tree_digest": ""}
        head["fact"] = {"state": "exhausted", "attempts": (), "record": None}
    doc: JudgeInput = documents.sweep(
        base=documents.arm(plan={"env": ENV}, record={"log_tail": LOG}), head=documents.stable_arm(**head)
    )
    commits = {"head": NEW, "base": OLD, "null": OLD}
    arms = tuple(arm.model_copy(update={"commit": commits[arm.name]}) for arm in doc.manifest.arms)
    return doc.model_copy(update={"manifest": doc.manifest.model_copy(update={"arms": arms})})


@pytest.mark.parametrize("kind", ["an error", "a build", pytest.param("other tokens", marks=pytest.mark.slow)])
def test_no_form_shows_a_planted_secret(
    server: FakeGitHub, here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    sweep_id = stored(planted(documents, kind))
    commands: list[tuple[str, ...]] = [
        ("report", sweep_id, "--format", form) for form in ("comment", "html", "json", "junit", "text")
    ]
    commands += [("explain", sweep_id, "capital", *more) for more in ((), ("--json",))]
    commands += [("status", sweep_id, "--json"), ("judge", sweep_id, "--json"), ("gate", sweep_id, "--json")]
    commands += [("report", sweep_id, "--format", "html", "--out", "site")]
    commands += [("comment", sweep_id, "--pr", "7"), ("check", sweep_id, "--json")]
    told: dict[tuple[str, ...], str] = {}
    for words in commands:
        call(list(words))
        told[words] = "".join(capsys.readouterr())
    runs = [run["run_id"] for run in json.loads(told["explain", sweep_id, "capital", "--json"])["input"]["runs"]]
    for words in (("compare", runs[0], runs[1]), ("compare", runs[0], runs[1], "--json")):
        assert call(list(words)) == 0
        told[words] = "".join(capsys.readouterr())
    call(["history", "htod_bytes", "--json"])
    told["history",] = "".join(capsys.readouterr())
    told["pages",] = "".join(path.read_text() for path in (here / "site").rglob("*.html"))
    told["posted",] = "".join(server.bodies) + str(server.checks)
    told["job",] = (here.parent / "step.md").read_text()
    assert [words for words, said in told.items() if len(said) < 9] == [], "each was made"
    assert [words for words, said in told.items() if MARK in said or JOB_TOKEN in said] == []
    assert HIDDEN in told["explain", sweep_id, "capital"] and "loaded 211 keys" in told["pages",]


def test_what_names_tokens_and_is_no_secret_is_left() -> None:
    for text in (
        "tokens: identical",
        "tokens=24",
        "token=33803;",
        "--tokens 24",
        "emitted_tokens: missing",
        "a token",
        "TOKEN=$GH_TOKEN",
    ):
        assert redact(text) == text


def test_a_document_is_cleaned_text_by_text_and_by_the_names_over_them() -> None:
    found = redacted({"env": ENV, "ids": [1, 2], "lines": list(LINES), "tokens": "24", "HF_TOKEN": None})
    assert MARK not in json.dumps(found)
    assert (found["ids"], found["tokens"], found["HF_TOKEN"]) == ([1, 2], "24", None)
    assert found["env"]["STORE"] == f"postgresql://{HIDDEN}@db/assay"
