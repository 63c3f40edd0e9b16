"""No password of a store is ever printed, whatever a command says of it, and the way on can still be gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from jobs.store.connect import shown_url
from orchestrator.cli import call
from orchestrator.settings import settings, store_words

pytest_plugins = ("tests.unit.jobs_store_cases",)

SECRET = "s3cr3t"
NOBODY = (f"postgresql://u:{SECRET}@127.0.0.1:1/x", f"postgresql://u@127.0.0.1:1/x?password={SECRET}")
COMMANDS = (
    ("run", "sweep.yaml"),
    ("run", "sweep.yaml", "--resume"),
    ("run", "swp_0", "--resume", "--json"),
    ("status",),
    ("judge", "swp_0"),
    ("gate", "swp_0"),
    ("report", "swp_0", "--format", "json"),
    ("explain", "swp_0", "m/p"),
    ("db", "check"),
    ("db", "upgrade", "--json"),
)
SWEEP = """\
sweep: tiny
models: {tiny: {build: tiny, seed: 7}}
prompts: {short: {ids: [1, 2]}}
arms: {base: {source: installed}, head: {like: base}}
run: {tokens: 3, generations: 1}
"""


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://u:{SECRET}@h:5/db", "postgresql://u@h:5/db"),
        (f"postgresql://u:p%40{SECRET}@h/db?password={SECRET}&sslmode=require", "postgresql://u@h/db?sslmode=require"),
        (f"postgresql://h/db?user=a&sslpassword={SECRET}", "postgresql://h/db?user=a"),
        ("postgresql://u@h/db?host=a&host=b", "postgresql://u@h/db?host=a&host=b"),
        (f"postgresql://u:p@{SECRET}@h:port/db", "h:port/db"),
        (f"postgresql://h:port/db?password={SECRET}", "postgresql://h:port/db?password=***"),
        ("sqlite:////tmp/a b.db", "sqlite:////tmp/a b.db"),
    ],
)
def test_a_store_is_shown_without_its_password_and_otherwise_as_given(url: str, shown: str) -> None:
    assert shown_url(url) == shown
    assert SECRET not in repr(settings({}, store=url))


@pytest.mark.parametrize("url", NOBODY)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_prints_the_password_of_a_store_that_cannot_be_reached(
    command: tuple[str, ...],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    assert call([*command, "--store", url]) == 4
    told = capfd.readouterr()
    assert "127.0.0.1" in told.err
    assert SECRET not in told.out + told.err


@pytest.mark.parametrize("store_url", ["postgresql"], indirect=True)
def test_no_command_prints_the_password_of_a_store_that_answers(
    store_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = make_url(store_url).set(drivername="postgresql", password=SECRET).render_as_string(hide_password=False)
    assert SECRET in url
    told = ""
    for command in (("db", "upgrade"), ("db", "upgrade", "--json"), ("db", "check"), ("db", "check", "--json")):
        assert call([*command, "--store", url]) == 0
        told += capsys.readouterr().out
    assert SECRET not in told
    assert "postgresql://" in told


def test_the_way_on_names_the_store_as_given_and_where_its_password_goes() -> None:
    assert store_words(None) == ""
    assert store_words("a b.db") == " --store 'a b.db'"
    words = store_words(f"postgresql://u:{SECRET}@h/db")
    assert words.startswith(" --store postgresql://u@h/db  # set PGPASSWORD, "), "a shell passes over it"
    assert SECRET not in words


def test_the_document_of_a_plan_holds_no_store_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    assert call(["run", "sweep.yaml", "--dry-run", "--json", "--store", NOBODY[0]]) == 0
    told = capsys.readouterr().out
    assert SECRET not in told
    assert json.loads(told)["sweep"] == "tiny"
