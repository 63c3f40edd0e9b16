"""The workflows of docs, examples and action.yml: commands that the command line takes, no token where code is run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from orchestrator.cli import application
from reports.publish.comment import SHORTER
from reports.render import COMMENT_FLOOR, COMMENT_LIMIT
from tests.unit.test_readme_commands import blocks

ASSAY = re.compile(r"(?:^|\$\(|&&|\|)\s*(assay [^\n|)]*)", re.MULTILINE)
POSTING = {"comment", "check"}


def documents(checkout: Path) -> dict[str, dict[Any, Any]]:
    """The workflows by name, and the action."""
    fenced = blocks((checkout / "docs/ci.md").read_text(encoding="utf-8"))
    found = [yaml.safe_load("\n".join(block.lines)) for block in fenced if block.language == "yaml"]
    example = yaml.safe_load((checkout / "examples/ci/.github/workflows/gate.yml").read_text(encoding="utf-8"))
    return {f"{index} {one['name']}": one for index, one in enumerate(found)} | {
        "example": example,
        "action": yaml.safe_load((checkout / "action.yml").read_text(encoding="utf-8")),
    }


def jobs_of(document: dict[Any, Any]) -> dict[str, Any]:
    return document["jobs"] if "jobs" in document else {"action": document["runs"]}


@pytest.fixture(scope="module")
def jobs(checkout: Path) -> dict[str, Any]:
    """Every job, by workflow and name."""
    return {f"{name}/{job}": body for name, one in documents(checkout).items() for job, body in jobs_of(one).items()}


def steps(jobs: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, step) for name, job in jobs.items() for step in job["steps"]]


def commands(script: str) -> list[list[str]]:
    """The words after `assay` of each command; a variable stands for a word, `${X:+...}` for what it adds."""
    spelled = re.sub(r"\$\{\w+:\+([^}]*)\}", r"\1", script)
    return [shlex.split(found)[1:] for found in ASSAY.findall(spelled)]


def test_there_are_three_ways_and_the_first_is_one_box(jobs: dict[str, Any]) -> None:
    assert list(jobs) == [
        "0 gate/gate", "1 gate/gate", "2 close what is due/close", "3 gate for a fork/measure",
        "3 gate for a fork/post", "example/gate", "action/action",
    ]  # fmt: skip


def test_every_command_is_taken_by_the_command_line(jobs: dict[str, Any]) -> None:
    seen = set()
    for _, step in steps(jobs):
        for command in commands(step.get("run", "")):
            group: Any = typer.main.get_command(application(command))
            name, *rest = command
            given = [word.replace("$PR", "7").replace("$STORE", "x.db") for word in rest]
            extra = ["--repo", "octo/engine"] if name in POSTING else []  # the environment of a job has it
            group.commands[name].make_context(name, given + extra)
            seen.add(name)
    assert seen == {"run", "submit", "check", "comment", "gate"}


def test_a_command_that_the_command_line_does_not_know_is_seen() -> None:
    (command,) = commands('id=$(assay comment "$ID" --pull 7 | jq .)')
    group: Any = typer.main.get_command(application(command))
    with pytest.raises(Exception, match="--pull"):
        group.commands["comment"].make_context("comment", command[1:])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_every_script_is_one(jobs: dict[str, Any]) -> None:
    for name, step in steps(jobs):
        done = subprocess.run(["bash", "-n"], input=step.get("run", ""), text=True, capture_output=True, check=False)
        assert done.returncode == 0, (name, done.stderr)


def test_nothing_from_an_event_is_pasted_into_a_script(jobs: dict[str, Any]) -> None:
    for name, step in steps(jobs):
        assert "${{" not in step.get("run", ""), name


def test_only_steps_that_post_have_a_token(jobs: dict[str, Any]) -> None:
    holding = []
    for name, step in steps(jobs):
        if "TOKEN" in str(step.get("env", {})).upper():
            assert {command[0] for command in commands(step["run"])} <= POSTING, name
            assert not re.search(r"\b(git|pip|make|bash|sh)\b", step["run"]), name
            holding.append(name)
    assert len(holding) == 8
    for name, job in jobs.items():
        assert "token" not in str(job.get("env", {})).lower(), name


def test_permissions_are_given_by_job_and_write_only_to_those_that_post(checkout: Path, jobs: dict[str, Any]) -> None:
    for name, document in documents(checkout).items():
        assert name == "action" or document["permissions"] == {}, name
    for name, job in jobs.items():
        writes = [what for what, how in job.get("permissions", {}).items() if how == "write"]
        run = "\n".join(step.get("run", "") for step in job["steps"])
        assert not writes or POSTING & {command[0] for command in commands(run)}, name
        assert "contents" not in writes, name


def test_a_fork_s_code_never_meets_a_token_that_writes(jobs: dict[str, Any]) -> None:
    measure, post = (jobs[f"3 gate for a fork/{name}"] for name in ("measure", "post"))
    assert measure["permissions"] == {"contents": "read"}
    used = [step["uses"] for step in post["steps"] if "uses" in step]
    assert [one.split("@")[0] for one in used] == ["actions/download-artifact"]
    posted = commands(post["steps"][-1]["run"])
    assert posted == [["comment", "--verdict", "artifact/verdict.json", "--head", "$HEAD", "--pr", "$PR"]]
    for _, step in steps(jobs):
        if "checkout" in step.get("uses", ""):
            assert step["with"]["persist-credentials"] is False


def test_what_is_measured_is_the_commit_of_the_pull_request(jobs: dict[str, Any]) -> None:
    for name in ("0 gate/gate", "1 gate/gate"):
        checkout = jobs[name]["steps"][0]
        assert checkout["with"]["ref"] == "${{ github.event.pull_request.head.sha }}"
        assert checkout["with"]["fetch-depth"] == 0
        assert "if" not in jobs[name], "a job that a condition skips passes a required check"


def test_the_page_says_the_limits_that_hold(checkout: Path) -> None:
    page = (checkout / "docs/ci.md").read_text(encoding="utf-8")
    assert SHORTER[0] == COMMENT_LIMIT == 65_536
    assert f"{COMMENT_LIMIT:,} characters" in page
    assert f"down to {COMMENT_FLOOR}" in page
