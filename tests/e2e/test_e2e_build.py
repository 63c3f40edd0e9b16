"""Arms that must be built before they run: the built tree is what runs, once a tree; one that fails is judged so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.provenance import tree_digest

CHECKOUT = Path(__file__).parents[2]
SWEEP = """\
sweep: built
models: {{tiny: {{build: tiny, seed: 7}}}}
prompts: {{short: {{ids: [1, 17, 42, 99]}}}}
arms:
  base:
    source: "git:base"
    build: {{command: "sh make.sh", outputs: [native/fast.so], timeout_s: 60}}
  head: {{like: base, source: "{head}"}}
matrix: {{weight_budget: ["50%"], granule: [4096]}}
run: {{tokens: 4, generations: 2, ignore_eos: true}}
witnesses:
  - {{expr: "page_ins > 0"}}
"""
MAKE = """\
echo ran >>"$HOME/builds"
mkdir native
cat library >native/fast.so
echo 'SPEED = 1' >engine/made.py
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This engine, made to need a module that only a build makes; and branches whose build differs, fails, or hangs."""
    clone = tmp_path_factory.mktemp("built") / "clone"
    clone.mkdir()
    for name in filter(None, _git(CHECKOUT, "ls-files", "-zco", "--exclude-standard", "engine").split("\0")):
        if (CHECKOUT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            (clone / name).write_bytes((CHECKOUT / name).read_bytes())
    main = clone / "engine" / "__main__.py"
    first, future, rest = main.read_text().partition("from __future__ import annotations\n")
    assert future
    main.write_text(f"{first}{future}\nimport engine.made\n{rest}")
    _git(clone, "init", "-q", "-b", "base")
    _branch(clone, "base", {"library": "one", "make.sh": MAKE})
    _branch(clone, "other", {"library": "two"})
    _branch(clone, "broken", {"make.sh": "seq 99; echo 'fast.c:3: error: no such name' >&2; exit 2\n"})
    _branch(clone, "hangs", {"make.sh": 'sleep 60 & echo $! >"$HOME/pid"; wait\n'})
    return clone


def test_a_built_tree_is_what_runs_and_its_library_tells_it_from_another(clone: Path, tmp_path: Path) -> None:
    """Neither arm would start without its build; base and head differ in nothing but the library."""
    sweep = _sweep(clone, tmp_path, "git:other")
    looked = json.loads(_assay(clone, tmp_path, "run", sweep, "--dry-run", "--json").stdout)
    assert looked["arms_to_build"] == {"base": "sh make.sh", "head": "sh make.sh"}
    assert not (tmp_path / "builds").exists()
    done = _assay(clone, tmp_path, "run", sweep)
    verdict = _verdict(tmp_path, done)
    assert (done.returncode, verdict["outcome"]) == (0, "PASS"), done.stdout + done.stderr
    assert (tmp_path / "builds").read_text() == "ran\nran\n"
    arms = {arm["arm"]: arm for arm in verdict["cells"][0]["arms"]}
    trees = {}
    for place in (tmp_path / "cache" / "assay" / "trees").glob("build-*/tree"):
        trees[(place / "native/fast.so").read_text()] = place
    assert arms["base"]["engine_digest"] == tree_digest(trees["one"], ["native/fast.so"])
    assert arms["head"]["engine_digest"] == tree_digest(trees["two"], ["native/fast.so"])
    assert tree_digest(trees["one"]) == tree_digest(trees["two"])
    again = json.loads(_assay(clone, tmp_path, "run", sweep, "--dry-run", "--json").stdout)
    assert again["arms_to_build"] == {}


@pytest.mark.slow
def test_a_head_that_does_not_build_exits_1_with_the_end_of_its_log(clone: Path, tmp_path: Path) -> None:
    done = _assay(clone, tmp_path, "run", _sweep(clone, tmp_path, "git:broken"))
    verdict = _verdict(tmp_path, done)
    assert (done.returncode, verdict["outcome"]) == (1, "BUILD_FAILED"), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "arm head: build failed: exit 2: fast.c:3: error: no such name (log in " in done.stderr
    (finding,) = verdict["findings"]
    assert (finding["arm"], finding["log"].splitlines()[-2:]) == ("head", ["99", "fast.c:3: error: no such name"])
    runs = {arm["arm"]: (arm["runs_complete"], arm["runs_expected"]) for arm in verdict["cells"][0]["arms"]}
    assert runs == {"base": (2, 2), "head": (0, 2)}
    report = tmp_path / "out"
    text = _assay(clone, tmp_path, "report", "swp_", "--format", "text").stdout
    (page,) = (report / "sweeps").glob("*/index.html")
    for form in (text, (report / "comment.md").read_text(), page.read_text()):
        assert "The log of" in form
        assert "fast.c:3: error: no such name" in form
    log = Path(done.stderr.partition("(log in ")[2].partition(")")[0])
    assert log.read_text().startswith("1\n2\n3\n")


def test_a_build_is_stopped_with_all_that_it_started_and_nothing_is_submitted(clone: Path, tmp_path: Path) -> None:
    command, environ = _command(clone, tmp_path, "run", _sweep(clone, tmp_path, "git:hangs"))
    process = subprocess.Popen(command, cwd=clone, env=environ, stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert time.monotonic() < until_s and process.poll() is None
        time.sleep(0.05)
    sleeper = int((tmp_path / "pid").read_text())
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert said.endswith("stopped; nothing was submitted\n")
    assert _is_gone(sleeper)
    assert json.loads(_assay(clone, tmp_path, "status", "--json").stdout) == []


def _is_gone(pid: int) -> bool:
    """Whether a process has ended; whoever reaps it may be late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def _sweep(clone: Path, tmp_path: Path, head: str) -> str:
    path = tmp_path / "sweep.yaml"
    path.write_text(SWEEP.format(head=head))
    return str(path)


def _command(clone: Path, tmp_path: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    """A command line of assay, with caches, home and store of its own."""
    environ = {**os.environ, "HOME": str(tmp_path)}
    environ |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [str(Path(sys.executable).with_name("assay")), *words, "--store", f"sqlite:///{tmp_path}/store.db"]
    return command + (["--out", str(tmp_path / "out")] if words[0] == "run" else []), environ


def _assay(clone: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command, environ = _command(clone, tmp_path, *words)
    return subprocess.run(command, cwd=clone, env=environ, capture_output=True, text=True, timeout=120, check=False)


def _verdict(tmp_path: Path, done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    verdict = tmp_path / "out" / "verdict.json"
    assert verdict.is_file(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(verdict.read_text())
    return found


def _branch(clone: Path, name: str, files: dict[str, str]) -> None:
    """A branch off base with these files changed."""
    if name != "base":
        _git(clone, "checkout", "-q", "-b", name, "base")
    for file, text in files.items():
        (clone / file).write_text(text)
    _git(clone, "add", "-A")
    _git(clone, "-c", "user.name=test", "-c", "user.email=test@example.invalid", "commit", "-qm", name)
    _git(clone, "checkout", "-q", "base")


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout
