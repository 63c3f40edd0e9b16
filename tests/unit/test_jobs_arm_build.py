"""Builds of arms: run once in the whole tree, cached by tree and command, ended at their deadline, their log kept."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import pytest

from jobs.arm_build import TAIL_LINES, Built, build_place, build_tree, find_built
from jobs.errors import SpecError
from jobs.model import BuildFailure, BuildPlan
from jobs.provenance import tree_digest
from jobs.whole_trees import WholeTree

ENVIRON = {"PATH": os.environ["PATH"]}
LIB = "native/lib.so"
MAKE = f"mkdir native; cat version >{LIB}"


def source(version: str = "one") -> WholeTree:
    """A tree of an engine and the one file that the command reads."""

    def fill(folder: Path) -> None:
        (folder / "engine").mkdir()
        (folder / "engine/__init__.py").write_text("")
        (folder / "version").write_text(version)

    return WholeTree(f"tree of {version}", fill)


def counted(count: Path, command: str = MAKE) -> str:
    """The command, noting in a file outside the tree that it ran."""
    return f"echo ran >>{count}; {command}"


def plan(command: str = MAKE, *outputs: str, timeout_s: float = 30.0) -> BuildPlan:
    return BuildPlan(command=command, outputs=outputs or (LIB,), timeout_s=timeout_s)


def built(tmp_path: Path, asked: BuildPlan, tree: WholeTree | None = None) -> Built:
    done = build_tree(tree or source(), asked, tmp_path / "cache", ENVIRON)
    assert isinstance(done, Built), done
    return done


def failed(tmp_path: Path, asked: BuildPlan) -> BuildFailure:
    """A failure, after which nothing passes for a build, and the log is there."""
    done = build_tree(source(), asked, tmp_path / "cache", ENVIRON)
    assert isinstance(done, BuildFailure), done
    place = build_place(source(), asked, tmp_path / "cache")
    assert find_built(source(), place, asked) is None
    assert not (place / "tree").exists()
    assert (place / "log").is_file()
    return done


# ---- what a build is ---------------------------------------------------------------------------------------------


def test_a_build_is_the_tree_and_what_the_command_made_of_it(tmp_path: Path) -> None:
    done = built(tmp_path, plan())
    assert (done.tree / LIB).read_text() == "one"
    assert done.digest == tree_digest(done.tree, [LIB]) != tree_digest(done.tree)


def test_another_library_is_another_build(tmp_path: Path) -> None:
    """The engine's code is equal in both; only the output differs."""
    one, two = built(tmp_path, plan()), built(tmp_path, plan(), source("two"))
    assert tree_digest(one.tree) == tree_digest(two.tree)
    assert one.digest != two.digest


def test_an_output_may_be_a_folder_and_caches_in_it_do_not_count(tmp_path: Path) -> None:
    done = built(tmp_path, plan(MAKE, "native"))
    (done.tree / "native/__pycache__").mkdir()
    (done.tree / "native/__pycache__/x.pyc").write_text("x")
    assert tree_digest(done.tree, ["native"]) == done.digest
    (done.tree / "native/more.so").write_text("x")
    assert tree_digest(done.tree, ["native"]) != done.digest


def test_a_command_may_begin_with_a_brace_and_have_several_lines(tmp_path: Path) -> None:
    """Words that begin with a brace are places for descriptors in the launcher of children."""
    assert built(tmp_path, plan("{ mkdir native; }\nX={x}\necho $X >" + LIB)).tree.joinpath(LIB).read_text() == "{x}\n"


def test_no_secret_reaches_a_build_and_its_stdin_is_empty(tmp_path: Path) -> None:
    environ = {**ENVIRON, "HOME": "/h", "ASSAY_STORE": "postgresql://u:p@h/d", "GITHUB_TOKEN": "t", "PYTHONPATH": "/x"}
    asked = plan(f"mkdir native; env >{LIB}; cat >>{LIB}")
    done = build_tree(source(), asked, tmp_path / "cache", environ)
    assert isinstance(done, Built)
    seen = {line.partition("=")[0] for line in (done.tree / LIB).read_text().splitlines()}
    assert seen >= {"PATH", "HOME", "GIT_CEILING_DIRECTORIES"}
    assert not seen & {"ASSAY_STORE", "GITHUB_TOKEN", "PYTHONPATH"}


# ---- the cache ---------------------------------------------------------------------------------------------------


def test_a_second_build_of_the_same_is_the_first(tmp_path: Path) -> None:
    asked = plan(counted(tmp_path / "count"))
    heard: list[str] = []
    first = built(tmp_path, asked)
    assert build_tree(source(), asked, tmp_path / "cache", ENVIRON, heard.append) == first
    assert heard == []
    assert (tmp_path / "count").read_text() == "ran\n"
    longer = asked.model_copy(update={"timeout_s": 60.0})
    assert built(tmp_path, longer) == first, "how long it may take does not change what it makes"


@pytest.mark.parametrize(
    ("tree", "asked"),
    [
        (source("two"), plan()),
        (source(), plan(MAKE + " ")),
        (source(), plan(MAKE, LIB, "version")),
    ],
    ids=["tree", "command", "outputs"],
)
def test_another_tree_command_or_output_is_another_place(tmp_path: Path, tree: WholeTree, asked: BuildPlan) -> None:
    assert build_place(tree, asked, tmp_path) != build_place(source(), plan(), tmp_path)


@pytest.mark.parametrize("name", [LIB, "engine/__init__.py"])
def test_a_build_whose_files_were_touched_is_made_anew(tmp_path: Path, name: str) -> None:
    asked = plan(counted(tmp_path / "count"))
    first = built(tmp_path, asked)
    (first.tree / name).write_text("touched")
    assert find_built(source(), first.tree.parent, asked) is None
    assert built(tmp_path, asked) == first
    assert tree_digest(first.tree, asked.outputs) == first.digest
    assert (tmp_path / "count").read_text() == "ran\nran\n"
    shutil.rmtree(first.tree)
    assert built(tmp_path, asked) == first


def test_several_at_once_build_once(tmp_path: Path) -> None:
    asked = plan(counted(tmp_path / "count", f"sleep 0.3; {MAKE}"))
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(built(tmp_path, asked))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(one == found[0] for one in found)
    assert (tmp_path / "count").read_text() == "ran\n"


def test_whoever_waits_for_a_build_that_does_not_end_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jobs.arm_build.LOCK_GRACE_S", -1.4)
    slow = threading.Thread(target=lambda: built(tmp_path, plan(f"sleep 1; {MAKE}", timeout_s=1.5)))
    slow.start()
    log = build_place(source(), plan(f"sleep 1; {MAKE}"), tmp_path / "cache") / "log"
    until_s = time.monotonic() + 10
    while not log.exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    with pytest.raises(SpecError, match="another process is still building"):
        build_tree(source(), plan(f"sleep 1; {MAKE}", timeout_s=1.5), tmp_path / "cache", ENVIRON)
    slow.join()


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "outputs", "reason"),
    [
        ("echo some; echo 'no rule' >&2; exit 2", (), "exit 2: no rule"),
        ("exit 3", (), "exit 3, and it printed nothing"),
        ("echo x; false; echo never", (), "exit 1: x"),
        ("false | cat; echo never", (), "exit 1, and it printed nothing"),
        ("echo $UNSET_NAME", (), "exit 1: bash: line 1: UNSET_NAME: unbound variable"),
        ("echo x; kill -SEGV $$", (), "ended by signal 11: x"),
        ("mkdir native", (), "output native/lib.so is missing"),
        (MAKE, (LIB, "native/other.so"), "output native/other.so is missing"),
        ("mkdir native", ("native",), "output native is missing"),
        (r"printf '\033[31mred\033[0m\n'; exit 4", (), "exit 4: red"),
    ],
)
def test_a_failure_says_why_in_one_line(tmp_path: Path, command: str, outputs: tuple[str, ...], reason: str) -> None:
    assert failed(tmp_path, plan(command, *outputs)).reason == reason


def test_an_output_that_leads_out_of_the_tree_is_none(tmp_path: Path) -> None:
    assert "leads out of the tree" in failed(tmp_path, plan(f"mkdir native; ln -s /etc/hostname {LIB}")).reason


def test_a_link_inside_the_tree_is_an_output(tmp_path: Path) -> None:
    done = built(tmp_path, plan(f"mkdir native; echo a >native/lib.so.1; ln -s lib.so.1 {LIB}"))
    before = done.digest
    (done.tree / "native/lib.so.1").write_text("b")
    assert tree_digest(done.tree, [LIB]) != before


def test_a_build_past_its_deadline_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    command = f"(while true; do touch {mark}; sleep 0.05; done) & echo waiting; sleep 60"
    begin_s = time.monotonic()
    done = failed(tmp_path, plan(command, timeout_s=0.5))
    assert time.monotonic() - begin_s < 15
    assert done.reason.startswith("no end within")
    assert done.reason.endswith("s: waiting")
    mark.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not mark.exists(), "a child of the build outlived it"


def test_a_failed_build_is_tried_again_and_its_log_is_kept(tmp_path: Path) -> None:
    asked = plan(counted(tmp_path / "count", f"test -e {tmp_path}/mended || {{ echo broken; exit 1; }}; {MAKE}"))
    assert failed(tmp_path, asked).reason == "exit 1: broken"
    assert failed(tmp_path, asked).reason == "exit 1: broken"
    assert (build_place(source(), asked, tmp_path / "cache") / "log").read_text() == "broken\n"
    (tmp_path / "mended").touch()
    assert (built(tmp_path, asked).tree / LIB).read_text() == "one"
    assert (tmp_path / "count").read_text() == "ran\n" * 3


def test_a_long_log_keeps_its_head_and_tail_and_tells_only_its_end(tmp_path: Path) -> None:
    asked = plan("echo first line; seq 400000; echo last line; exit 1")
    done = failed(tmp_path, asked)
    assert done.reason == "exit 1: last line"
    assert done.log_tail.splitlines()[-2:] == ["400000", "last line"]
    assert len(done.log_tail.splitlines()) == TAIL_LINES
    log = build_place(source(), asked, tmp_path / "cache") / "log"
    text = log.read_text()
    assert text.startswith("first line\n1\n")
    assert text.endswith("400000\nlast line\n")
    assert "bytes of output left out" in text
    assert log.stat().st_size < 1.1e6


def test_a_tree_that_cannot_be_copied_is_no_failed_build(tmp_path: Path) -> None:
    def fill(_folder: Path) -> None:
        raise SpecError("it changed", "again")

    with pytest.raises(SpecError, match="it changed"):
        build_tree(WholeTree("x", fill), plan(), tmp_path, ENVIRON)
    assert isinstance(build_tree(source(), plan(), tmp_path, ENVIRON), Built)
