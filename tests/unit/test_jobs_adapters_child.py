"""A child process is read to its end, bounded, and ended with everything it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from jobs.adapters import child
from jobs.adapters.capped_log import CappedLog
from jobs.adapters.child import ChildEnd, ChildOrder, allowed_environment, run_child
from jobs.adapters.child_line import BadLine, parse_line

PRELUDE = (
    "import json, os, signal, subprocess, sys, time\n"
    "result, control = int(sys.argv[1]), int(sys.argv[2])\n"
    "def say(**line): os.write(result, (json.dumps(line) + chr(10)).encode())\n"
)


def run(
    tmp_path: Path,
    body: str,
    *,
    timeout_s: float = 20.0,
    start_timeout_s: float | None = None,
    cap: int = 4096,
    **callbacks: Callable[..., Any],
) -> ChildEnd:
    order = ChildOrder(
        argv=(sys.executable, "-c", PRELUDE + body, "{result_fd}", "{control_fd}"),
        env={"PATH": os.environ["PATH"]},
        cwd=tmp_path,
        log_path=tmp_path / "log",
        timeout_s=timeout_s,
        start_timeout_s=start_timeout_s,
        term_grace_s=0.5,
        log_cap_bytes=cap,
    )
    return run_child(order, **callbacks)


def gone(pid: int, within_s: float = 3.0) -> bool:
    """Whether a process has ended (a zombie has)."""
    deadline_s = time.monotonic() + within_s
    while time.monotonic() < deadline_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_lines_exit_code_and_log_come_back(tmp_path: Path) -> None:
    heard: list[dict[str, Any]] = []
    end = run(
        tmp_path, "say(type='hello'); print('to the log'); say(type='result', n=1); sys.exit(13)", on_line=heard.append
    )
    assert [line["type"] for line in end.lines] == ["hello", "result"] == [line["type"] for line in heard]
    assert (end.exit_code, end.signal, end.bad_line) == (13, None, None)
    assert end.log_tail == "to the log\n" == (tmp_path / "log").read_text()


def test_a_signal_is_reported_as_a_signal(tmp_path: Path) -> None:
    end = run(tmp_path, "say(type='hello'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert (end.exit_code, end.signal) == (None, signal.SIGSEGV)
    assert len(end.lines) == 1


def test_the_child_leads_its_own_group_in_our_session(tmp_path: Path) -> None:
    (line,) = run(tmp_path, "say(type='x', pid=os.getpid(), group=os.getpgid(0), session=os.getsid(0))").lines
    assert line["group"] == line["pid"]
    assert line["session"] == os.getsid(0)


def test_deadline_ends_a_child_that_ignores_term_and_keeps_its_lines(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    end = run(
        tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN); say(type='hello'); time.sleep(60)", timeout_s=0.8
    )
    assert end.timed_out
    assert end.signal == signal.SIGKILL
    assert [line["type"] for line in end.lines] == ["hello"]
    assert time.monotonic() - begin_s < 5


def test_a_child_that_never_speaks_is_ended_at_its_start_deadline_with_its_group(tmp_path: Path) -> None:
    begin_s = time.monotonic()
    body = "g = subprocess.Popen(['sleep', '60']); open('grand', 'w').write(str(g.pid)); time.sleep(60)"
    end = run(tmp_path, body, timeout_s=30.0, start_timeout_s=2.0)
    assert (end.timed_out, end.spoke) == (True, False)
    assert 2.0 < end.wall_s < 8 and time.monotonic() - begin_s < 12
    assert gone(end.pid) and gone(int((tmp_path / "grand").read_text()))


def test_a_child_that_spoke_has_all_its_time(tmp_path: Path) -> None:
    end = run(tmp_path, "say(type='hello'); time.sleep(4)", start_timeout_s=3.0)
    assert (end.timed_out, end.exit_code, end.spoke) == (False, 0, True)
    assert end.wall_s > 4


def test_stop_ends_the_child_and_what_it_started(tmp_path: Path) -> None:
    grand: list[int] = []
    body = "g = subprocess.Popen(['sleep', '60']); say(type='grand', pid=g.pid); time.sleep(60)"
    end = run(tmp_path, body, on_line=lambda line: grand.append(line["pid"]), stopped=lambda: bool(grand))
    assert end.stopped
    assert gone(end.pid)
    assert gone(grand[0])


def test_field_5_a_grandchild_that_outlives_the_child_is_ended_and_named(tmp_path: Path) -> None:
    body = "g = subprocess.Popen(['sleep', '60']); say(type='grand', pid=g.pid); os.kill(os.getpid(), signal.SIGSEGV)"
    end = run(tmp_path, body)
    grand = end.lines[0]["pid"]
    assert end.leftovers == (grand,)
    assert gone(grand)
    assert end.wall_s < 5


def test_the_control_pipe_closes_when_the_run_ends(tmp_path: Path) -> None:
    """A grandchild outside the group still hears of the end through the control pipe."""
    body = (
        "code = 'import os, sys; os.read(int(sys.argv[1]), 1)'\n"
        "g = subprocess.Popen([sys.executable, '-c', code, str(control)], pass_fds=[control], start_new_session=True,"
        " stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "say(type='grand', pid=g.pid)"
    )
    end = run(tmp_path, body)
    assert gone(end.lines[0]["pid"])


def test_a_grandchild_that_left_group_and_session_is_ended_and_named(tmp_path: Path) -> None:
    body = (
        "g = subprocess.Popen(['sleep', '60'], start_new_session=True, close_fds=True, stdout=subprocess.DEVNULL,"
        " stderr=subprocess.DEVNULL)\nsay(type='grand', pid=g.pid)"
    )
    end = run(tmp_path, body)
    grand = end.lines[0]["pid"]
    assert end.exit_code == 0
    assert end.leftovers == (grand,)
    assert gone(grand)


WIPED = (
    "quiet = dict(start_new_session=True, env={}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    "g = subprocess.Popen(['/bin/sh', '-c', '/bin/sleep 60 & echo $! > grand; wait'], **quiet)\n"
    "while not os.path.exists('grand') or not open('grand').read().strip(): time.sleep(0.01)\n"
    "say(type='grand', pids=[g.pid, int(open('grand').read())])\n"
)


def test_field_5_a_grandchild_with_a_wiped_environment_and_its_own_session_is_ended_and_named(tmp_path: Path) -> None:
    end = run(tmp_path, WIPED)
    pids = end.lines[0]["pids"]
    assert end.exit_code == 0
    assert end.leftovers == tuple(sorted(pids))
    assert all(gone(pid) for pid in pids)


def test_runs_side_by_side_leave_each_others_processes_alone(tmp_path: Path) -> None:
    """Both are children of this process, as orphans are; only the mark tells them apart."""
    places = [tmp_path / "long", tmp_path / "short"]
    for place in places:
        place.mkdir()
    wait = "g = subprocess.Popen(['sleep', '60'], start_new_session=True); time.sleep(1.5); say(type='x', pid=g.pid)"
    with ThreadPoolExecutor(2) as pool:
        longer = pool.submit(run, places[0], wait)
        shorter = run(places[1], WIPED)
    assert shorter.leftovers == tuple(sorted(shorter.lines[0]["pids"]))
    assert longer.result().exit_code == 0
    assert longer.result().leftovers == (longer.result().lines[0]["pid"],)


def test_a_child_that_is_stopped_takes_its_detached_children_along_and_nobody_elses(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    grand: list[int] = []
    body = "g = subprocess.Popen(['sleep', '60'], start_new_session=True); say(type='x', pid=g.pid); time.sleep(60)"
    end = run(tmp_path, body, on_line=lambda line: grand.append(line["pid"]), stopped=lambda: bool(grand))
    assert end.leftovers == (grand[0],)
    assert gone(grand[0])
    assert other.poll() is None
    other.kill()
    other.wait()


def test_of_progress_lines_only_the_last_is_kept_and_all_are_heard(tmp_path: Path) -> None:
    heard: list[int] = []
    body = "say(type='hello')\nfor i in range(5000): say(type='progress', done=i)\nsay(type='result')"
    end = run(tmp_path, body, on_line=lambda line: heard.append(line.get("done", -1)))
    assert [(line["type"], line.get("done")) for line in end.lines] == [
        ("hello", None),
        ("progress", 4999),
        ("result", None),
    ]
    assert len(heard) == 5002


def test_a_stream_beyond_its_bound_is_a_fault_and_what_came_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "MAX_KEPT_BYTES", 10_000)
    end = run(tmp_path, "say(type='hello')\nfor i in range(5000): say(type='x', text='y' * 90)\nsay(type='result')")
    assert end.bad_reason == "the stream holds more than 10000 bytes"
    assert len(end.lines) < 110
    assert end.lines[0]["type"] == "hello"


@pytest.mark.parametrize("says", ["say(type='x', a=[[]] * 600)", "for i in range(60): say(type='x', a=[[]] * 9)"])
def test_a_stream_that_unfolds_is_a_fault_before_it_is_unfolded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """Few bytes can be many objects: in one line, or in all of them together."""
    monkeypatch.setattr(child, "MAX_VALUES", 1000)
    end = run(tmp_path, f"say(type='hello')\n{says}\nsay(type='result')")
    assert end.bad_reason == "the stream holds more than 1000 values"
    assert end.lines[0]["type"] == "hello" and len(end.lines) < 60
    assert all(line["type"] != "result" for line in end.lines)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-16-le", "utf-32-be"])
def test_a_line_in_another_encoding_is_not_guessed_at(encoding: str) -> None:
    with pytest.raises(BadLine, match="not a JSON line"):
        parse_line('{"type": "hello"}'.encode(encoding))


def test_a_line_beyond_its_bound_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_LINE_BYTES", 100_000)
    end = run(tmp_path, "say(type='hello'); os.write(result, b'[' * 60000); os.write(result, b'[' * 60000)")
    assert end.bad_reason == "longer than 100000 bytes"
    assert end.bad_line == "[" * 200


@pytest.mark.parametrize("text", ["no json", "[1]", '{"a": 1}', '{"type": "result", "x": NaN}'])
def test_a_line_that_is_no_typed_object_spoils_the_stream_from_there(tmp_path: Path, text: str) -> None:
    body = f"say(type='hello'); os.write(result, ({text!r} + chr(10)).encode()); say(type='result')"
    end = run(tmp_path, body)
    assert end.bad_line == text
    assert [line["type"] for line in end.lines] == ["hello"]


def test_a_line_cut_off_by_death_is_no_line(tmp_path: Path) -> None:
    end = run(tmp_path, "say(type='hello'); os.write(result, b'{\"type\": \"res'); os.kill(os.getpid(), 9)")
    assert [line["type"] for line in end.lines] == ["hello"]
    assert end.bad_line == '{"type": "res'


def test_a_result_of_megabytes_arrives_whole(tmp_path: Path) -> None:
    end = run(tmp_path, "say(type='result', ids=list(range(600000)))")
    assert end.lines[0]["ids"][-1] == 599999


def test_field_9_a_flood_of_output_keeps_head_tail_and_the_result(tmp_path: Path) -> None:
    body = "print('first')\nfor i in range(200000): print('x' * 90, i)\nsay(type='result')\nprint('last')"
    end = run(tmp_path, body)
    text = (tmp_path / "log").read_text()
    assert len(text) < 4096 + 100
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    assert "bytes of output left out" in text
    assert "bytes of output left out" in end.log_tail
    assert end.lines[-1]["type"] == "result"


def test_field_9_fifty_megabytes_without_a_newline_stay_small(tmp_path: Path) -> None:
    log = CappedLog(tmp_path / "log", 1000)
    for _ in range(50):
        log.feed(b"y" * 1_000_000)
    log.close()
    assert (tmp_path / "log").stat().st_size < 1100
    assert len(log.tail_text()) < 1100


def test_only_named_variables_pass() -> None:
    assert allowed_environment({"PATH": "p", "TOKEN": "t"}, ("PATH", "HOME")) == {"PATH": "p"}


def test_a_program_that_does_not_exist_ends_with_a_code_and_a_log(tmp_path: Path) -> None:
    order = ChildOrder(("/no/such/program",), {}, tmp_path, tmp_path / "log", 5.0)
    end = run_child(order)
    assert end.exit_code not in (0, None)
    assert "/no/such/program" in end.log_tail or "FileNotFoundError" in end.log_tail


def test_a_killed_parent_takes_its_child_along(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from jobs.adapters.child import ChildOrder, run_child\n"
        "order = ChildOrder(('sleep', '60'), {'PATH': '/usr/bin:/bin'}, Path(sys.argv[1]), Path('log'), 60)\n"
        "run_child(order, on_spawn=lambda pid: print(json.dumps(pid), flush=True))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", "import json\n" + code, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    child = json.loads(parent.stdout.readline())
    deadline_s = time.monotonic() + 5
    while b"sleep" not in Path(f"/proc/{child}/cmdline").read_bytes() and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not gone(child, 0.1)
    parent.kill()
    parent.wait()
    assert gone(child)
