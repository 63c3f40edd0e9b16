"""Output that nobody can take never decides an exit code, and text from elsewhere never reaches a terminal raw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.store.rows import Pending
from orchestrator.cli import call
from orchestrator.commands.shown import shown, shown_lines
from orchestrator.progress import SweepProgress
from orchestrator.seat import Happening

pytest_plugins = ("tests.unit.orchestrator_judged",)

ROOT = Path(__file__).parents[2]
ASSAY = f"{sys.executable} -c 'from orchestrator.cli import main; main()'"


def shell(line: str, **environ: str) -> tuple[int, str, str]:
    """Run a line of shell in which `assay` is the command: exit code, stdout and stderr."""
    script = f'set -o pipefail; assay() {{ {ASSAY} "$@"; }}; {line}'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT), **environ}, check=False
    )
    shown_err = done.stderr.decode()
    assert "Traceback" not in shown_err
    assert "Exception ignored" not in shown_err
    return done.returncode, done.stdout.decode(), shown_err


@pytest.fixture
def code(judged: str, capsys: pytest.CaptureFixture[str]) -> int:
    """What the gate says of the sweep: nothing that a broken stream could say as well."""
    found = call(["gate", judged])
    capsys.readouterr()
    assert found == 3 or found == 4
    return found


def broken(words: str, redirect: str = "") -> tuple[int, str, str]:
    """Run a command into a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    line = f"{ASSAY} {words} {redirect}"
    done = subprocess.run(
        ["bash", "-c", line], stdout=writer, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )  # fmt: skip
    os.close(writer)
    return done.returncode, "", done.stderr.decode()


def test_a_reader_that_left_leaves_a_verdicts_code_alone(judged: str, code: int) -> None:
    for words in (f"gate {judged}", f"judge {judged}", f"gate {judged} --json"):
        assert broken(words) == (code, "", "")


def test_a_reader_that_left_ends_other_commands_as_it_ends_any_program(judged: str, code: int) -> None:
    for words in ("status", "status --json", f"report {judged} --format html", "--help"):
        assert broken(words) == (141, "", "")
    assert broken("status swp_zz")[0] == 2, "its own code stands"
    assert broken("models list", "2>&1")[0] == 141


def test_closed_streams_leave_every_code_alone_and_print_nothing(judged: str, code: int) -> None:
    assert shell(f"assay gate {judged} >&-") == (code, "", "")
    assert shell(f"assay gate {judged} <&- >&- 2>&-") == (code, "", "")
    assert shell("assay status >&-") == (0, "", "")
    assert shell("assay gate nope 2>&-") == (2, "", "")
    assert shell("assay nonsense 2>&-") == (2, "", "")
    assert shell("assay gate nope 2>/dev/full") == (2, "", "")


def test_a_store_is_never_opened_under_the_number_of_a_closed_stream(judged: str, code: int) -> None:
    before = Path(".assay/store.db").read_bytes()
    assert shell(f"assay report {judged} >&- 2>&-")[0] == 0
    assert Path(".assay/store.db").read_bytes() == before


def test_a_full_disk_under_stdout_is_named(judged: str, code: int) -> None:
    for words in ("status", f"report {judged} --format html"):
        assert shell(f"assay {words} >/dev/full") == (
            4, "", "error: stdout: No space left on device (free space there)\n",
        )  # fmt: skip


def test_a_full_disk_under_a_report_has_a_remedy(judged: str, code: int) -> None:
    """The system names no file where it refuses to write into one that is open."""
    assert shell(f"assay report {judged} --format json --out /dev/full") == (
        4, "", "error: No space left on device (free space where the command writes, or name another place)\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    "environ", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}]
)
def test_letters_that_the_terminal_lacks_are_written_as_escapes(
    judged: str, code: int, environ: dict[str, str]
) -> None:
    for words in (f"report {judged} --format comment", "status caf\u00e9"):
        done, out, err = shell(f"assay {words}", **environ)
        assert done == (2 if "caf" in words else 0), err
        assert (out + err).isascii()
    json.loads(shell(f"assay report {judged} --format json", **environ)[1])


def test_a_folder_that_is_gone_is_said(judged: str, tmp_path: Path) -> None:
    line = f"mkdir {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone; assay gate {judged}"
    assert shell(line) == (4, "", "error: the current folder is gone (change to one that exists)\n")


def fails(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    capsys.readouterr()
    assert call(list(words)) == code
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_out_that_cannot_be_is_named_with_a_remedy(judged: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("x")
    assert fails(capsys, 2, "report", judged, "--out", ".") == "error: --out . is a folder (name the file to write)"
    for out in ("file", "file/x"):
        line = fails(capsys, 2, "report", judged, "--format", "html", "--out", out)
        assert line == f"error: --out {out}: file is no folder (name the folder to write into)"
    assert "file: " in fails(capsys, 4, "report", judged, "--out", "file/x")
    Path("index.html").write_text("mine")
    assert "index.html there is no report" in fails(capsys, 2, "report", judged, "--format", "html", "--out", ".")
    assert Path("index.html").read_text() == "mine"
    assert "--out" in fails(capsys, 2, "run", "nowhere.yaml", "--out", "file")
    assert Path("file").read_text() == "x"


SWEEP = """\
sweep: small
models: {tiny: {build: tiny, seed: 7}}
prompts: {short: {ids: [1, 2]}}
arms:
  base: {source: installed}
  head: {source: installed, config: {policy: stable}}
varies: [policy]
run: {tokens: 4}
"""


def test_a_cache_that_cannot_be_written_is_called_the_cache(
    judged: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "s.yaml").write_text(SWEEP)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    capsys.readouterr()
    assert call(["run", "s.yaml"]) == 4
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"error: the cache {tmp_path}/file/assay cannot be written: ")
    assert "XDG_CACHE_HOME" in line
    assert "--out" not in line


@pytest.mark.parametrize("cards", ["\u00b2", "\u0663", "0", "-1", "1025", "9" * 23, "9" * 5000, "", "1.0", " 1"])
def test_a_number_of_cards_is_a_small_number_in_plain_digits(
    judged: str, capsys: pytest.CaptureFixture[str], cards: str
) -> None:
    assert "--cards" in fails(capsys, 2, "run", "nowhere.yaml", f"--cards={cards}")


@pytest.mark.parametrize("store", ["~nosuchuser/x", "", " "])
def test_a_store_that_can_be_no_path_is_a_usage_error(
    judged: str, capsys: pytest.CaptureFixture[str], store: str
) -> None:
    assert "--store" in fails(capsys, 2, "status", f"--store={store}")


def test_resume_makes_no_store(judged: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SWEEP)
    for sweep in ("s.yaml", "swp_0", "x" * 5000):
        assert "new.db" in fails(capsys, 2, "run", sweep, "--resume", "--store", "new.db")
    assert not Path("new.db").exists()


def test_a_sweep_file_that_is_not_sound_makes_no_store(judged: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("s.yaml").write_text(SWEEP.replace("tokens: 4", "tokens: 0"))
    assert "s.yaml:8:" in fails(capsys, 2, "run", "s.yaml", "--store", "new.db")
    assert not Path("new.db").exists()


def test_controls_are_escaped_and_long_text_keeps_both_ends() -> None:
    assert shown("a\x1b[31mred\a\r\nb\u202e\x9b") == "a\\u001b[31mred\\u0007\\u000d\\u000ab\\u202e\\u009b"
    assert shown("caf\u00e9 \u00b7 ok") == "caf\u00e9 \u00b7 ok"
    long = shown("begin" + "x" * 10_000 + "end")
    assert len(long) == 300
    assert long.startswith("begin")
    assert long.endswith("end")
    assert shown_lines("a\n\tb\x1bc") == "a\n\tb\\u001bc"


def test_what_an_engine_says_reaches_the_terminal_plain_and_short(capsys: pytest.CaptureFixture[str]) -> None:
    left = Pending(complete=1, pending=1, exhausted=0, live_attempts=0, leased_blocks=0)
    with SweepProgress(2, 0) as progress:
        progress(Happening("end", "cell", "head", "\x1b]0;owned\a\x1b[2J" + "y" * 5000, lambda: left))
        progress(Happening("wait", "cell\x1b[31m", "head", "z\nerror: forged"))
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\\u001b]0;owned\\u0007" in err
    assert len(err.splitlines()) == 2
    assert max(map(len, err.splitlines())) <= 300


def test_an_error_line_is_plain_too(judged: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, 2, "gate", "swp_\x1b[31m" + "x" * 5000)
    assert "\x1b" not in line
    assert len(line) < 1100
    assert line.endswith("(assay status lists sweeps, and with a sweep's id its runs; --store names another store)")
