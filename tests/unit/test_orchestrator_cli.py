"""The command line: every expected error is one clear line with its remedy and the exit code of its class."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli import call

pytest_plugins = ("tests.unit.orchestrator_judged",)

SWEEP = """\
sweep: small
models:
  tiny: {build: tiny, seed: 7}
prompts:
  short: {ids: [1, 2, 3, 4]}
arms:
  base: {source: installed, config: {policy: lru}}
  head: {source: installed, config: {policy: stable}}
matrix:
  weight_budget: ["50%"]
  granule: [4096]
varies: [policy]
run: {tokens: 4, generations: 1}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, built once."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    assert call(["models", "build", "tiny", "--seed", "7", "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, with caches of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def failed(capsys: pytest.CaptureFixture[str], code: int, *words: str) -> str:
    """Run a command that must fail: its one line, without the prefix."""
    assert call(list(words)) == code
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, shown.err
    assert "Traceback" not in shown.err
    return lines[0].removeprefix("error: ")


OUR_REPORTS = {
    "index.html": '<meta name="generator" content="assay">',
    "comment.md": "<!-- assay:sweep=x -->",
    "verdict.json": '{"sweep":"x","schema":"assay.verdict/1"}',
}


def sweep_file(here: Path, old: str = "", new: str = "") -> str:
    assert old in SWEEP
    (here / "sweep.yaml").write_text(SWEEP.replace(old, new, 1) if old else SWEEP)
    return "sweep.yaml"


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        pytest.param("tokens: 4", "tokns: 4", 13, "tokens", id="unknown-key"),
        pytest.param("models:\n", "sweep: again\nmodels:\n", 2, "sweep", id="duplicate-key"),
        pytest.param("ids: [1, 2, 3, 4]", "ids: []", 5, "the prompt 'short' is empty", id="empty-prompt"),
        pytest.param("tokens: 4", "tokens: 0", 13, "tokens", id="zero-tokens"),
        pytest.param('["50%"]', "[-5]", 10, "weight_budget", id="negative-budget"),
        pytest.param("{source: installed, config: {policy: lru}}", '{source: "path:gone"}', 7, "gone", id="no-folder"),
        pytest.param("build: tiny", "build: tinny", 3, "tiny", id="unknown-model"),
    ],
)
def test_a_faulty_sweep_is_a_usage_error_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line: int, says: str
) -> None:
    message = failed(capsys, 2, "run", sweep_file(here, old, new), "--dry-run")
    assert f"sweep.yaml:{line}:" in message
    assert says in message
    assert message.endswith(")"), "the remedy stands in brackets"


def test_a_sweep_that_is_not_there_is_a_usage_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.yaml" in failed(capsys, 2, "run", "nowhere.yaml")


@pytest.mark.parametrize("words", [("absent.yaml",), ("absent.yaml", "--cards", "0")])
def test_a_run_that_fails_leaves_no_report_of_an_earlier_one(
    here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (here / "out/cells").mkdir(parents=True)
    for name, text in {**OUR_REPORTS, "notes.txt": "mine", "cells/a.html": OUR_REPORTS["index.html"]}.items():
        (here / "out" / name).write_text(text)
    failed(capsys, 2, "run", "absent.yaml", "--resume", "--out", "out")
    failed(capsys, 2, "run", "absent.yaml", "--dry-run", "--out", "out")
    assert len(list((here / "out").iterdir())) == 5
    failed(capsys, 2, "run", *words, "--out", "out")
    assert [path.name for path in (here / "out").iterdir()] == ["notes.txt"]


def test_a_run_that_fails_leaves_the_pages_of_other_sweeps(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stands under its own id; only what a reader would take for this run's goes."""
    (here / "out/sweeps/swp_a").mkdir(parents=True)
    pages = {f"sweeps/swp_a/{name}": OUR_REPORTS["index.html"] for name in ("index.html", "entry.json")}
    for name, text in {**OUR_REPORTS, **pages}.items():
        (here / "out" / name).write_text(text)
    failed(capsys, 2, "run", "absent.yaml", "--out", "out")
    left = {path.relative_to(here / "out").as_posix() for path in (here / "out").rglob("*") if path.is_file()}
    assert left == {"index.html", *pages}


@pytest.mark.parametrize("name", OUR_REPORTS)
def test_somebody_elses_file_is_neither_removed_nor_replaced(
    here: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """As in a user's own folder of pages, which an empty --out names too."""
    (here / name).write_text("mine")
    message = failed(capsys, 2, "run", sweep_file(here), "--out", "")
    assert f"{name} there is no report of ours (name another folder)" in message
    assert (here / name).read_text() == "mine"
    assert "no id begins with 'swp_'" in failed(capsys, 2, "gate", "swp_"), "nothing was submitted"


def test_a_report_folder_that_cannot_be_is_refused_before_anything_runs(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "/proc/nosuch" in failed(capsys, 4, "run", sweep_file(here), "--out", "/proc/nosuch")
    (here / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != here / "out")  # root may write everywhere
    assert "make it accessible" in failed(capsys, 4, "run", sweep_file(here), "--out", "out")
    assert "no id begins with 'swp_'" in failed(capsys, 2, "gate", "swp_"), "nothing was submitted"


def test_a_name_with_a_line_end_does_not_feign_a_second_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no\\u000aerror: such" in failed(capsys, 2, "run", "no\nerror: such.yaml")


def test_a_git_ref_that_is_not_there_names_the_repository(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["git", "init", "-q", "."], check=True)
    message = failed(capsys, 2, "run", sweep_file(here, "source: installed", 'source: "git:nosuch"'), "--dry-run")
    assert "no such git ref: 'nosuch'" in message


def test_a_checkout_arm_outside_a_checkout_says_what_to_do(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = failed(capsys, 2, "run", sweep_file(here, "source: installed", "source: checkout"), "--dry-run")
    assert "source: installed" in message


@pytest.mark.parametrize(
    ("store", "says"),
    [
        ("sqlite:////no/such/folder/store.db", "/no/such/folder"),
        ("postgresql://127.0.0.1:1/none", ""),
        ("mysql://host/db", "postgresql://"),
    ],
)
def test_an_unreachable_store_is_a_host_fault(
    here: Path, capsys: pytest.CaptureFixture[str], store: str, says: str
) -> None:
    assert says in failed(capsys, 4, "run", sweep_file(here), "--store", store)
    assert not (here / ".assay").exists()


def test_reading_a_store_that_is_not_there_says_how_to_make_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "assay db upgrade" in failed(capsys, 4, "status")


def break_model(folder: Path, how: str) -> None:
    (data,) = [p for p in folder.iterdir() if p.name.endswith(".data")]
    if how == "missing":
        data.unlink()
    elif how == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        data.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n")


@pytest.mark.parametrize(("how", "says"), [("missing", "model.onnx.data"), ("truncated", "bytes"), ("pointer", "LFS")])
def test_a_broken_model_is_named_with_its_remedy(
    here: Path, tiny: Path, capsys: pytest.CaptureFixture[str], how: str, says: str
) -> None:
    shutil.copytree(tiny, here / "model")
    break_model(here / "model", how)
    message = failed(capsys, 2, "run", sweep_file(here, "{build: tiny, seed: 7}", "{path: model}"))
    assert says in message
    assert message.endswith(")")
    assert "engine" not in capsys.readouterr().out
    assert call(["models", "check", "model"]) == 11
    assert call(["engine", "run", "--model", "model", "--prompt-ids", "1", "--tokens", "1"]) == 11


def test_more_cards_than_none_and_nonsense_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no number of cards" in failed(capsys, 2, "run", sweep_file(here), "--cards", "many")
    assert "no card for device cuda" in failed(
        capsys, 4, "run", sweep_file(here, "generations: 1", "generations: 1, device: cuda")
    )


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("run",),
        ("run", "x.yaml", "--nonsense"),
        ("report", "swp_1", "--format", "pdf"),
        ("db", "nonsense"),
        ("models", "build", "tiny"),
    ],
)
def test_a_command_line_that_makes_no_sense_points_to_help(
    here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert "--help" in failed(capsys, 2, *words)


def test_an_id_that_names_nothing_is_a_usage_error(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["db", "upgrade"]) == 0
    for words in (["gate", "swp_0"], ["report", "zz"], ["judge", "swp_0"], ["explain", "x", "y"], ["status", "q"]):
        capsys.readouterr()
        assert "in this store" in failed(capsys, 2, *words)
    assert "in this store" in failed(capsys, 2, "run", "swp_0", "--resume")


def test_resume_without_anything_open_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no unjudged sweep 'small'" in failed(capsys, 2, "run", sweep_file(here), "--resume")


def test_a_dry_run_shows_cells_runs_and_time_and_builds_and_stores_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["run", sweep_file(here), "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (cell,) = plan["cells"]
    assert (cell["runs"], cell["order"]) == (4, ["base", "head", "head", "base"])
    assert plan["models_to_build"] == ["tiny (tiny)"]
    assert "not known" in plan["time"]
    assert not (here / ".assay").exists()
    assert not list((here.parent / "cache").rglob("*.onnx"))


@pytest.mark.parametrize("words", [("cards",), ("models", "list"), ("db", "upgrade"), ("status",), ("db", "check")])
def test_commands_that_print_print_json_on_request(
    here: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert call(["db", "upgrade"]) == 0
    capsys.readouterr()
    assert call([*words, "--json"]) == 0
    json.loads(capsys.readouterr().out)


HEAVY = {"alembic", "engine.zoo", "filelock", "gguf", "httpx", "jinja2", "numpy", "onnx", "psutil", "pynvml", "ray"}
HEAVY |= {"reports", "rich", "scipy", "tokenizers", "yaml"}
"""What a look at the queue of a store in a file needs nothing of; most of them take a tenth of a second and more."""


@pytest.mark.parametrize("words", [("status", "swp_"), ("watch", "--once")])
def test_a_look_at_the_queue_imports_only_what_it_needs(judged: str, words: tuple[str, ...]) -> None:
    """It is typed again and again, and asks for a second at most: its imports are most of what it takes."""
    code = f"import sys; from orchestrator.cli import call; call({words!r}); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert {"sqlalchemy", "orchestrator.commands.sweeps"} <= loaded
    assert not HEAVY & loaded


def test_a_document_is_built_when_it_is_first_used() -> None:
    """All of them take a tenth of a second, and most commands use few."""
    code = "from jobs.model import RunRecord; print(RunRecord.__pydantic_complete__)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_every_command_in_the_help_has_help_of_its_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in (
        "run",
        "status",
        "judge",
        "gate",
        "report",
        "explain",
        "comment",
        "check",
        "cards",
        "engine",
        "models",
        "db",
    ):
        assert command in shown
        assert call([command, "--help"]) == 0


def test_the_engines_own_commands_pass_through_with_their_codes(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", str(tiny), "--prompt-ids", "1 2", "--tokens", "2", "--granule", "4096"]
    assert call(["engine", "run", *words, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[-1]["type"] == "result"
    assert call(["engine", "run", *words, "--weight-budget", "10"]) == 13


def test_exit_codes_of_the_engine_stay_with_its_commands_and_a_sweeps_broken_model_is_usage(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "empty").mkdir()
    name = sweep_file(here, "{build: tiny, seed: 7}", "{path: empty}")
    assert "model.onnx is missing" in failed(capsys, 2, "run", name)
    assert "model.onnx is missing" in failed(capsys, 2, "run", name, "--dry-run")
    assert call(["models", "check", "empty"]) == 11
    assert call(["engine", "run", "--model", "empty", "--prompt-ids", "1", "--tokens", "1"]) == 11


def test_a_bug_of_ours_never_reads_as_a_regression(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr("orchestrator.commands.db.migrate.current", broken)
    assert call(["db", "upgrade"]) == 4
    assert "RuntimeError: ours" in capsys.readouterr().err


@pytest.mark.parametrize("lost", [False, True], ids=["as it is", "as another error"])
def test_an_interrupt_while_modules_load_is_one_line(here: Path, lost: bool) -> None:
    """A compiled module may answer it with an error of its own that no longer says what was behind it."""
    script = f"""
import os, signal, sys
import orchestrator.cli as cli

def cut_short(_name):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        if not {lost}:
            raise
    raise ImportError("a module failed to import")

signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background of a shell ignores it
cli.import_module = cut_short
sys.argv = ["assay", "status"]
cli.main()
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "error: stopped while it was starting; nothing was begun\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_any_command_with_words_and_its_code(tiny: Path, number: int, code: int) -> None:
    words = ["engine", "audit", "--model", str(tiny), "--prompt-ids", "1 2", "--generations", "1000"]
    script = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background of a shell ignores it
from engine import onnx_load
from orchestrator.cli import main

def told(*given, load=onnx_load.load, **how):
    print(flush=True)  # from here on the command is under way
    return load(*given, **how)

onnx_load.load = told
sys.argv = ["assay", *{words!r}]
main()
"""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-P", "-c", script], env=environ, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "\n"
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told.split("\n")[-2]) == (
        code, "error: stopped before it was done; what it had stored by then stays"
    )  # fmt: skip


def test_a_broken_pipe_ends_quietly(here: Path) -> None:
    """`assay models list | head -0` must not end in a traceback."""
    script = "import sys; from orchestrator.cli import main; sys.argv = ['assay', 'models', 'list']; main()"
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.wait()


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        pytest.param("[1, 2, 3, 4]", "[1, 512]", 5, "the vocabulary of model 'tiny' ends at 511", id="id"),
        pytest.param("granule: [4096]", "prefix_reuse: [true]", 11, "prefix_reuse without a warm-up", id="request"),
        pytest.param("head: {source: installed", "head: {source: git:nope", 8, "git", id="ref"),
        pytest.param("build: tiny", "build: tinny", 3, "no model named 'tinny'", id="model"),
    ],
)
def test_what_is_wrong_is_told_before_any_arm_is_built(
    here: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line: int, says: str
) -> None:
    (here / "engine").mkdir()
    (here / "engine/__init__.py").write_text("")
    file = sweep_file(here, old, new)
    text = (here / file).read_text()
    build = f"source: checkout, build: {{command: touch {here}/began lib, outputs: [lib]}}"
    (here / file).write_text(text.replace("source: installed", build, 1))
    message = failed(capsys, 2, "run", file)
    assert f"sweep.yaml:{line}: " in message and says in message
    assert not (here / "began").exists()


def test_help_that_an_engine_error_names_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(see `assay engine --help`)" in failed(capsys, 10, "engine", "frob")
    assert call(["engine", "--help"]) == 0
    assert "usage: assay engine" in capsys.readouterr().out
    assert call(["models", "build", "--help"]) == 0
    assert "(default: 1234)" in " ".join(re.sub("[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
