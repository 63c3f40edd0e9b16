"""A run that is told to end while it pages says what it had counted, and ends by the signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.interrupt import Interrupted, ended_by_signals
from tests.unit.engine_child import LINES, environment
from tests.unit.engine_rig import build_tiny, request

PAGING: dict[str, Any] = {"weight_budget": "40%", "granule": 4096}
TOKENS = 120
ENDING = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("interrupt"))


@contextmanager
def paging(tiny: Path, folder: Path, policy: str) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[bytes]]]:
    """A run without end, and its lines as they come."""
    asked = request(tiny, tokens=TOKENS, ignore_eos=True, generations=10_000, config={**PAGING, "policy": policy})
    (folder / "request.json").write_text(json.dumps(asked))
    read, write = os.pipe()
    words = ["run", "--request", str(folder / "request.json"), "--result-fd", str(write)]
    # what starts in the background of a shell ignores the interrupt, and what nohup starts the hang-up
    hears = "import signal as s; s.signal(s.SIGINT, s.default_int_handler); s.signal(s.SIGHUP, s.SIG_DFL)"
    code = f"{hears}; import sys; from engine.__main__ import main; sys.exit(main({words!r}))"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code], env=environment(), pass_fds=(write,), stdout=-1, stderr=-1
    ) as child:
        os.close(write)
        try:
            with os.fdopen(read, "rb") as stream:
                yield child, iter(stream)
        finally:
            child.kill()


def stopped(tiny: Path, folder: Path, policy: str, number: int) -> tuple[list[dict[str, Any]], int, bytes]:
    """All lines of a run that was sent a signal after its second generation, its end, and what it said beside them."""
    with paging(tiny, folder, policy) as (child, stream):
        lines, seen = [], 0
        for raw in stream:
            assert raw.endswith(b"\n"), "each line is whole"
            lines.append(json.loads(raw))
            assert not [e.message for e in LINES.iter_errors(lines[-1])]
            seen += lines[-1]["type"] == "generation"
            if seen == 2 and lines[-1]["type"] == "generation":
                child.send_signal(number)
        out, err = child.communicate(timeout=60)
    return lines, child.returncode, out + err


@pytest.mark.parametrize(("number", "policy"), [*((n, "lru") for n in ENDING), (signal.SIGTERM, "staging")])
def test_a_run_told_to_end_says_what_it_counted_and_ends_by_the_signal(
    tiny: Path, tmp_path: Path, number: int, policy: str
) -> None:
    lines, code, said = stopped(tiny, tmp_path, policy, number)
    assert (code, said) == (-number, b"")
    error, whole = lines[-1], next(line for line in lines if line["type"] == "generation")
    assert (error["type"], error["kind"], error["code"]) == ("error", "interrupted", 128 + number)
    assert error["message"] == f"told to end by {signal.Signals(number).name}" and error["remedy"]
    assert error["counters"]["page_ins"] > 0 < error["counters"]["htod_bytes"]
    assert error["ids"] == whole["ids"][: len(error["ids"])], "the tokens of the generation that it cut off"
    finished = sum(len(line["ids"]) for line in lines if line["type"] == "generation")
    beyond = error["counters"]["emitted_tokens"] - finished - len(error["ids"])
    assert beyond in (0, -1, TOKENS), "no token is told twice; within a step, or with a generation's line not out yet"


@pytest.mark.parametrize("verb", ["audit", "hazards"])
def test_another_command_told_to_end_says_so_and_ends_by_the_signal(tiny: Path, verb: str) -> None:
    words = [verb, "--model", str(tiny), "--prompt-ids", "1 2", "--tokens", "120", "--granule", "4096"]
    words += ["--generations", "1000"] if verb == "audit" else []
    code = f"import sys; from engine.__main__ import main; print(flush=True); sys.exit(main({words!r}))"
    with subprocess.Popen([sys.executable, "-P", "-c", code], env=environment(), stdout=-1, stderr=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.5)
        child.terminate()
        _, said = child.communicate(timeout=60)
    assert (child.returncode, said) == (-signal.SIGTERM, b"error: told to end by SIGTERM; it had not finished\n")


def test_a_run_that_is_killed_leaves_whole_lines(tiny: Path, tmp_path: Path) -> None:
    lines, code, _ = stopped(tiny, tmp_path, "lru", signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert {line["type"] for line in lines} == {"hello", "progress", "generation"}


def test_the_first_signal_is_told_and_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in ENDING]
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ended_by_signals():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN, "who ignores it goes on ignoring it"
            with pytest.raises(Interrupted, match="told to end by SIGTERM"):
                os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a second one ends it at once"
    finally:
        signal.signal(signal.SIGHUP, before[0])
    assert [signal.getsignal(number) for number in ENDING] == before


def test_beside_the_main_thread_nothing_is_heard() -> None:
    seen: list[Any] = []

    def work() -> None:
        with ended_by_signals():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]
