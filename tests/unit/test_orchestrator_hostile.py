"""A sweep whose names are made to act, through a store and every command: what they print and post is inert text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import call
from reports.publish import comment as posting
from tests.unit.fake_github import BOT, JOB_TOKEN, NEW, REPOSITORY, FakeGitHub
from tests.unit.reports_parsing import Page, markdown
from tests.unit.stored_documents import Put
from tests.unit.test_reports_hostile import CONTROLS, WHOLE, is_inert, typed

pytest_plugins = ("tests.unit.orchestrator_stored",)

NAME = WHOLE[0]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeGitHub]:
    monkeypatch.setattr(posting, "SETTLE_S", 0.0)
    with FakeGitHub() as fake:
        job = {"GITHUB_TOKEN": JOB_TOKEN, "GITHUB_API_URL": fake.url, "GITHUB_REPOSITORY": REPOSITORY}
        for name, value in {**job, "GITHUB_STEP_SUMMARY": str(tmp_path / "step.md")}.items():
            monkeypatch.setenv(name, value)
        yield fake


def test_names_are_text_in_whatever_a_command_prints_or_posts(
    server: FakeGitHub, here: Path, stored: Put, documents: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    head = documents.stable_arm(ids=lambda _run, _generation: (1, 2, 3), record={"log_tail": NAME, "error": NAME})
    sweep_id = stored(documents.sweep(head=head, cell=dict.fromkeys(("cell", "model", "prompt"), NAME), name=NAME))
    file = "x\x1b[2J\u202e@octocat.assay"
    said: dict[tuple[str, ...], str] = {}

    def run(*words: str) -> str:
        capsys.readouterr()
        call(list(words))
        said[words] = "".join(capsys.readouterr())
        return said[words]

    for form in ("comment", "html", "json", "junit", "text"):
        run("report", sweep_id, "--format", form)
    cell = json.loads(run("explain", sweep_id, "fixes", "--json"))
    runs = [one["run_id"] for one in cell["input"]["runs"]][:2]
    for words in (("explain", sweep_id, "fixes"), ("compare", *runs), ("history", "hits", "--cell", "fixes")):
        run(*words)
    for words in (
        ("status",),
        ("status", sweep_id),
        ("judge", sweep_id),
        ("gate", sweep_id),
        ("explain", sweep_id, "no"),
    ):
        run(*words)
    run("comment", sweep_id, "--pr", "7", "--head", NEW)
    run("check", sweep_id, "--head", NEW)
    run("db", "export", sweep_id, file)
    run("db", "upgrade", "--store", "sqlite:///other.db")
    assert "imported" in run("db", "import", file, "--store", "sqlite:///other.db")
    assert [words for words, text in said.items() if CONTROLS.search(text)] == []
    assert all(len(text) > 20 for text in said.values())
    assert typed(NAME) in " ".join(Page(said["report", sweep_id, "--format", "html"]).text.split())
    (check,) = server.checks
    for body in (*server.of(BOT), check["output"]["summary"], (here.parent / "step.md").read_text()):
        is_inert(markdown(body))
    assert not CONTROLS.search(check["output"]["title"]) and "\n" not in check["output"]["title"]
    assert re.fullmatch(r"[\x20-\x7e…]*", check["output"]["title"])
