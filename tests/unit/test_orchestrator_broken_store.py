"""A store that somebody changed by hand, or a disk spoiled: every command that reads it says so in one line."""

from __future__ import annotations

import sqlite3

import pytest

from orchestrator.cli import call

pytest_plugins = ("tests.unit.orchestrator_judged",)


def spoil(statement: str) -> None:
    with sqlite3.connect(".assay/store.db") as database:
        assert database.execute(statement).rowcount > 0


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert call(list(words)) == 4
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    (line,) = shown.err.splitlines()
    assert line.startswith("error: ")
    assert "backup" in line or "judge the sweep again" in line
    return line


BROKEN = {
    "the manifest is no JSON": ("UPDATE sweep SET manifest = '{broken'", ("judge", "explain", "db check")),
    "the manifest is another document": ("UPDATE sweep SET manifest = '{}'", ("judge", "explain", "db check")),
    "the manifest is nothing but a list": ("UPDATE sweep SET manifest = '[]'", ("judge", "explain", "db check")),
    "the plan of a cell is no JSON": ("UPDATE scenario SET plan = '{'", ("judge", "explain", "db check")),
    "the verdict is no JSON": (
        "UPDATE verdict SET document = 'x'",
        ("gate", "report", "explain", "db check"),
    ),
    "the verdict is empty": ("UPDATE verdict SET document = '{}'", ("gate", "report", "explain", "db check")),
    "a name is no text": ("UPDATE sweep SET name = CAST(x'ff' AS TEXT)", ("status", "db check")),
    "a time is none": ("UPDATE sweep SET created_at = 'yesterday'", ("status", "status ID", "db check")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_row_is_one_line_and_a_fault_of_the_host(
    judged: str, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    statement, commands = BROKEN[case]
    assert call(["db", "check"]) == 0
    spoil(statement)
    for command in commands:
        words = command.replace("ID", judged).split()
        if words[0] in {"judge", "gate", "report", "explain"}:
            words += [judged] + (["toy/p"] if command == "explain" else [])
        refused(capsys, *words)


def test_the_check_names_the_broken_sweep(judged: str, capsys: pytest.CaptureFixture[str]) -> None:
    spoil("UPDATE verdict SET document = 'x'")
    assert f"sweep {judged}: " in refused(capsys, "db", "check")
