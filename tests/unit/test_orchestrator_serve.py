"""`assay serve` as a command: what it refuses by name, how it says where it is, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from jobs.store.connect import Database
from orchestrator.cli import call
from orchestrator.commands.serve import TOKEN

pytest_plugins = ("tests.unit.orchestrator_judged",)

SECRET = "s3cret-of-sixteen-or-more"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = call(["serve", "--port", "0", *words])
    return code, capsys.readouterr().err


@pytest.fixture
def server(judged: str, checkout: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "orchestrator.cli", "serve", "--port", "0"],
        env={**os.environ, "PYTHONPATH": str(checkout), TOKEN: SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.wait()


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    said = re.fullmatch(r"serving sqlite:///\S+/store\.db at (http://127\.0\.0\.1:\d+)/\n", server.stdout.readline())
    assert said is not None
    return said[1]


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_signal_ends_it_with_its_code_and_the_token_is_nowhere(
    server: subprocess.Popen[str], judged: str, number: signal.Signals
) -> None:
    address = address_of(server)
    with httpx.Client(auth=("ada", SECRET)) as client:  # its connection is still open when the end is asked for
        page = client.get(f"{address}/sweeps/{judged}")
        assert page.status_code == 200 and judged in page.text
        assert httpx.get(f"{address}/sweeps/{judged}?token={SECRET}").status_code == 401
        server.send_signal(number)
        out, err = server.communicate(timeout=30)
    assert server.returncode == 128 + number
    assert (out, err) == ("", "")


def test_a_port_that_is_taken_is_named(judged: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, said = refused(capsys, "--port", port)
    assert code == 4 and f"port {port} of 127.0.0.1 is in use" in said and "--port P" in said


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7"])
def test_other_hosts_are_not_let_in_without_a_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    code, said = refused(capsys, "--host", host)
    assert code == 2 and f"--host {host} is open to other hosts, and there is no token (set {TOKEN}" in said


@pytest.mark.parametrize("token", ["", "short", "with blank in the middle", "näher-als-sechzehn-zeichen"])
def test_a_token_that_protects_nothing_is_refused_and_not_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.setenv(TOKEN, token)
    code, said = refused(capsys)
    assert code == 2 and f"{TOKEN} is no token" in said
    assert not token or token not in said


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--host", "box.example"), 2, "--host 'box.example' is "),
        (("--allow-host", "http://box"), 2, "--allow-host 'http://box' is no host name"),
        (("--store", "nowhere.sqlite"), 4, "no store at "),
        (("--port", "65536"), 2, "Invalid value for '--port'"),
    ],
)
def test_what_cannot_be_served_is_named(
    judged: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...],
    code: int, told: str,
) -> None:  # fmt: skip
    monkeypatch.setenv(TOKEN, SECRET)
    ended, said = refused(capsys, *words)
    assert ended == code and told in said
    assert not Path("nowhere.sqlite").exists()


def test_a_store_of_an_older_revision_is_not_upgraded_by_reading(
    judged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    database = Database(f"sqlite:///{tmp_path}/.assay/store.db")
    database.write(lambda c: c.execute(text("UPDATE alembic_version SET version_num = '0009'")))
    code, said = refused(capsys)
    assert code == 4 and "the store is at revision 0009" in said and "assay db upgrade" in said
    with database.reading() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "0009"
    database.close()
