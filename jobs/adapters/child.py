"""One measured program as a child process: spawned, read, bounded, ended with everything it started.

The child stays in the session of its parent, since Ray ends a worker's session with the worker, but leads a process
group of its own, so that the whole group can be ended. A launcher of a few lines sets the parent-death signal and then
becomes the program; doing that between fork and exec instead would run Python in the fork of a threaded process. The
signal fires when the *thread* that spawned it ends, so spawn from a thread that outlives the run.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.adapters.brood import MARK, Brood, end_members, signal_group
from jobs.adapters.capped_log import CappedLog
from jobs.adapters.child_line import BadLine, parse_line

TICK_S = 0.1
DRAIN_S = 2.0
MAX_LINE_BYTES = 64 << 20
MAX_KEPT_BYTES = 128 << 20
"""All lines that are kept of one child; each costs several times its length as objects."""
MAX_VALUES = 16_000_000
"""Values in them: as an empty list each three bytes become seventy, and a third of a microsecond of the worker."""
MAX_OUTPUT_BYTES = 16 << 20

# argv: parent PID, control fd or -1, then the program. 1 is PR_SET_PDEATHSIG. The parent may have died before the call.
_LAUNCHER = (
    "import ctypes,os,signal,sys\n"
    "ctypes.CDLL(None).prctl(1,signal.SIGKILL,0,0,0)\n"
    "if os.getppid()!=int(sys.argv[1]): sys.exit(143)\n"
    "os.execvp(sys.argv[2],sys.argv[2:])\n"
)


@dataclass(frozen=True, slots=True)
class ChildOrder:
    """What to start. `argv` may hold "{result_fd}" and "{control_fd}"; `env` is the whole environment.

    `timeout_s` bounds the whole child, and `start_timeout_s` (None: nothing) the time to its first line.
    `result_variable` names a variable that tells the child the path of its result stream. With `keeps_stdout` what it
    prints there is kept beside the log, up to MAX_OUTPUT_BYTES.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    log_path: Path
    timeout_s: float
    start_timeout_s: float | None = None
    term_grace_s: float = 3.0
    log_cap_bytes: int = 128 << 10
    result_variable: str = ""
    keeps_stdout: bool = False


@dataclass(slots=True)
class ChildEnd:
    """How it ended: exit code or signal, never both.

    `lines` are the JSON objects of the result stream; of progress lines only the last is kept. The first line that
    cannot be used ends them: `bad_line` is its start, `bad_reason` what is wrong, `bad_rest` what could be read of it,
    and `cut_off` says that it is the end of the stream without its newline. `leftovers` are PIDs that the child
    started, wherever they moved, that outlived it and were ended by us.
    """

    pid: int
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    spoke: bool = False  # a line of the result stream came, while it ran
    stopped: bool = False
    lines: list[dict[str, Any]] = field(default_factory=list)
    bad_line: str | None = None
    bad_reason: str = ""
    bad_rest: dict[str, Any] = field(default_factory=dict)
    cut_off: bool = False
    stdout: bytearray = field(default_factory=bytearray)  # a byte more than is kept where there was more
    log_tail: str = ""
    wall_s: float = 0.0
    leftovers: tuple[int, ...] = ()


def run_child(
    order: ChildOrder,
    *,
    on_spawn: Callable[[int], None] = lambda _pid: None,
    on_line: Callable[[dict[str, Any]], None] = lambda _line: None,
    stopped: Callable[[], bool] = lambda: False,
) -> ChildEnd:
    """Run a program to its end, or end it at its deadline or when `stopped` says so.

    Raises OSError when it cannot be started at all.
    """
    result_read, result_write = os.pipe()
    control_read, control_write = os.pipe()
    log_read, log_write = os.pipe()
    out_read, out_write = os.pipe() if order.keeps_stdout else (-1, log_write)
    child_ends = {result_write, control_read, log_write, out_write}
    own_reads = (result_read, log_read, *([out_read] if order.keeps_stdout else []))
    try:
        brood = Brood.expected()
        process = _spawn(order, brood.mark, result_write, control_read, log_write, out_write)
    except OSError:
        for fd in (*own_reads, control_write):
            os.close(fd)
        raise
    finally:
        for fd in child_ends:
            os.close(fd)
    end = ChildEnd(process.pid)
    log = CappedLog(order.log_path, order.log_cap_bytes)
    reader = _LineReader(end, on_line)
    feeds: dict[int, Callable[[bytes], None]] = {result_read: reader.feed, log_read: log.feed}

    def keep(data: bytes) -> None:
        log.feed(data)
        end.stdout += data[: MAX_OUTPUT_BYTES + 1 - len(end.stdout)]

    if order.keeps_stdout:
        feeds[out_read] = keep
    try:
        on_spawn(process.pid)
        _attend(process, order, end, brood, feeds, stopped)
    finally:
        os.close(control_write)
        _end_group(process, order.term_grace_s)
        end.leftovers = tuple(sorted({*end.leftovers, *brood.end()}))
        for fd in own_reads:
            os.close(fd)
        log.close()
    reader.finish()
    end.log_tail = log.tail_text()
    code = process.returncode
    end.exit_code, end.signal = (code, None) if code >= 0 else (None, -code)
    return end


def bound(argv: Sequence[str]) -> list[str]:
    """Words that start a program which is killed when the thread that starts it ends, as with its whole process."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv]


def _spawn(
    order: ChildOrder, mark: str, result_fd: int, control_fd: int, log_fd: int, out_fd: int
) -> subprocess.Popen[bytes]:
    argv = [a.format(result_fd=result_fd, control_fd=control_fd) if a.startswith("{") else a for a in order.argv]
    told = {order.result_variable: f"/dev/fd/{result_fd}"} if order.result_variable else {}
    return subprocess.Popen(
        bound(argv),
        env={**order.env, MARK: mark, **told},
        cwd=order.cwd,
        stdin=subprocess.DEVNULL,
        stdout=out_fd,
        stderr=log_fd,
        pass_fds=(result_fd, control_fd),
        process_group=0,
    )


def _attend(
    process: subprocess.Popen[bytes],
    order: ChildOrder,
    end: ChildEnd,
    brood: Brood,
    feeds: Mapping[int, Callable[[bytes], None]],
    stopped: Callable[[], bool],
) -> None:
    """Read both pipes until the child is gone; past a deadline or on a stop, end the group and drain what is left."""
    begin_s = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for fd, feed in feeds.items():
            os.set_blocking(fd, False)
            selector.register(fd, selectors.EVENT_READ, feed)
        while process.poll() is None:
            _pump(selector, TICK_S)
            lasted_s = time.monotonic() - begin_s
            end.spoke = bool(end.lines) or end.bad_line is not None
            silent = not end.spoke and order.start_timeout_s is not None and lasted_s > order.start_timeout_s
            end.timed_out = silent or lasted_s > order.timeout_s
            end.stopped = stopped()
            if end.timed_out or end.stopped:
                _end_group(process, order.term_grace_s, lambda: _pump(selector, TICK_S))
        end.wall_s = time.monotonic() - begin_s
        # first: what it started may still hold the pipes open
        end.leftovers = tuple(sorted({*end_members(process.pid), *brood.end()}))
        drain_until_s = time.monotonic() + DRAIN_S
        while selector.get_map() and time.monotonic() < drain_until_s:
            _pump(selector, TICK_S)


def _pump(selector: selectors.BaseSelector, wait_s: float) -> None:
    """Feed what has arrived within `wait_s`; an ended pipe is taken off."""
    if not selector.get_map():
        time.sleep(wait_s / 10)
        return
    for key, _ in selector.select(wait_s):
        try:
            data = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            continue
        if data:
            key.data(data)
        else:
            selector.unregister(key.fd)


def _end_group(
    process: subprocess.Popen[bytes], grace_s: float, meanwhile: Callable[[], None] = lambda: time.sleep(0.02)
) -> None:
    """TERM, then KILL, for the leader and all it started; nothing when the leader has been reaped already."""
    if process.poll() is not None:
        return
    signal_group(process.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    while process.poll() is None and time.monotonic() < deadline_s:
        meanwhile()
    if process.poll() is None:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


class _LineReader:
    """Splits the result stream into JSON objects; the first line that cannot be used ends the reading."""

    def __init__(self, end: ChildEnd, on_line: Callable[[dict[str, Any]], None]) -> None:
        self._end = end
        self._on_line = on_line
        self._rest = bytearray()
        self._kept_bytes = self._kept_values = 0
        self._progress_at: int | None = None

    def feed(self, data: bytes) -> None:
        if self._end.bad_line is not None:
            return
        self._rest += data
        if b"\n" not in data:
            if len(self._rest) > MAX_LINE_BYTES:
                self._spoil(bytes(self._rest), f"longer than {MAX_LINE_BYTES} bytes")
            return
        *lines, rest = bytes(self._rest).split(b"\n")
        self._rest = bytearray(rest)
        for line in lines:
            self._take(line)

    def finish(self) -> None:
        """A rest without newline is a cut-off line: the child died while writing it, so it says nothing."""
        if self._rest and self._end.bad_line is None:
            self._end.cut_off = True
            self._spoil(bytes(self._rest), "not a JSON line: cut off")

    def _take(self, line: bytes) -> None:
        if self._end.bad_line is not None or not line.strip():
            return
        values = sum(map(line.count, (b",", b"[", b"{")))
        try:
            if self._kept_values + values > MAX_VALUES:
                raise BadLine(f"the stream holds more than {MAX_VALUES} values")
            value = parse_line(line)
        except BadLine as bad:
            self._spoil(line, bad.reason, bad.rest)
            return
        if not self._keep(value, len(line), values):
            self._spoil(line, f"the stream holds more than {MAX_KEPT_BYTES} bytes")
            return
        self._on_line(value)

    def _keep(self, value: dict[str, Any], length_bytes: int, values: int) -> bool:
        """Keep a line if there is room; a progress line takes the place of the one before it."""
        if value["type"] == "progress" and length_bytes < 4096:
            if self._progress_at is not None:
                del self._end.lines[self._progress_at]
            self._progress_at = len(self._end.lines)
        else:
            self._kept_bytes += length_bytes
            self._kept_values += values
            if self._kept_bytes > MAX_KEPT_BYTES:
                return False
        self._end.lines.append(value)
        return True

    def _spoil(self, line: bytes, reason: str, rest: Mapping[str, Any] | None = None) -> None:
        self._end.bad_line = line[:200].decode("utf-8", "replace")
        self._end.bad_reason = reason
        self._end.bad_rest = dict(rest or {})
        self._rest.clear()


def allowed_environment(environ: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """The variables of `environ` that an allowlist names."""
    return {name: environ[name] for name in names if name in environ}
