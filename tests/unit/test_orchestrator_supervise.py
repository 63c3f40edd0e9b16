"""The driver's process may end in any way: the command says how, and never takes its exit code for a verdict."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs.errors import StoreError
from orchestrator.cards import ProbeError
from orchestrator.commands import run as run_command
from orchestrator.guard import Guard
from orchestrator.lost import HostLost, Stopped
from orchestrator.stop import SIGNALS, StopFlag
from orchestrator.supervise import deaf, supervised


@pytest.fixture
def stop() -> Iterator[StopFlag]:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopFlag(polls=True).listening() as flag:
        yield flag
    assert [signal.getsignal(number) for number in SIGNALS] == before


def until(stop: StopFlag) -> None:
    while not stop():
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_the_driver_returns_or_raises_comes_back(stop: StopFlag) -> None:
    assert supervised(lambda: (os.getpid() != os.getppid(), 7), stop) == (True, 7)

    def refuse() -> None:
        raise StoreError("the store is gone", "bring it back")

    with pytest.raises(StoreError, match=r"the store is gone [(]bring it back[)]") as told:
        supervised(refuse, stop)
    assert told.value.exit_code == 4


@pytest.mark.parametrize("end", [lambda: os._exit(1), lambda: os._exit(0), lambda: os.kill(os.getpid(), 9)])
def test_a_driver_that_is_ended_under_us_is_a_loss_of_the_host(stop: StopFlag, end: object) -> None:
    """As Ray's library does, with exit code 1, which would read as a regression."""
    with pytest.raises(HostLost, match=r"the driver (ended with exit code [01]|was killed by signal 9)"):
        supervised(end, stop)  # type: ignore[arg-type]


def test_a_fault_of_ours_in_the_driver_is_no_verdict_either(stop: StopFlag, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HostLost, match="ended with exit code 1"):
        supervised(lambda: 1 // 0, stop)
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_to_the_command_reaches_the_driver_as_the_flag(stop: StopFlag, number: int) -> None:
    def drive() -> None:
        os.kill(os.getppid(), number)
        until(stop)
        raise Stopped

    with pytest.raises(Stopped):
        supervised(drive, stop)
    assert stop.number == number


def test_a_signal_to_the_whole_group_stops_once(stop: StopFlag) -> None:
    """Ctrl-C reaches both processes, and only a second one may interrupt at once."""

    def drive() -> str:
        for pid in (os.getppid(), os.getpid(), os.getpid()):
            os.kill(pid, signal.SIGINT)
        until(stop)
        time.sleep(0.1)
        return "in order"

    assert supervised(drive, stop) == "in order"
    assert stop.number == signal.SIGINT


def test_a_driver_that_a_stop_of_the_whole_service_killed_was_stopped(stop: StopFlag) -> None:
    def drive() -> None:
        os.kill(os.getppid(), signal.SIGTERM)
        until(stop)
        os._exit(15)

    with pytest.raises(Stopped):
        supervised(drive, stop)


def test_a_second_interrupt_ends_the_driver_at_once(stop: StopFlag) -> None:
    read, write = os.pipe()

    def drive() -> None:
        os.write(write, str(os.getpid()).encode())
        for _ in range(2):
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.3)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        supervised(drive, stop)
    assert not alive(int(os.read(read, 20)))
    os.close(read)
    os.close(write)


def test_before_anything_is_submitted_the_first_signal_interrupts_and_later_ones_do_not(stop: StopFlag) -> None:
    stop.polls = False
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert stop.number == signal.SIGTERM


def test_what_a_driver_starts_does_not_inherit_its_deafness(stop: StopFlag) -> None:
    def drive() -> tuple[bool, bool]:
        deaf()
        ignored = any(signal.getsignal(number) is signal.SIG_IGN for number in SIGNALS)
        return ignored, bool(signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(SIGNALS))

    assert supervised(drive, stop) == (False, False)


@pytest.mark.parametrize("loss", [HostLost("Ray is gone"), ProbeError("card 0 is gone"), StoreError("locked", "wait")])
def test_whatever_is_lost_on_the_way_the_command_tells_how_to_go_on(
    stop: StopFlag, monkeypatch: pytest.MonkeyPatch, loss: Exception
) -> None:
    def lose(*_given: object) -> None:
        raise loss

    card = SimpleNamespace(simulated=True)
    cell = SimpleNamespace(settings=SimpleNamespace(device="sim"), card_class="any", card_memory_bytes=0)
    store = SimpleNamespace(pending=lambda _sweep: SimpleNamespace(runs=1, pending=1))
    monkeypatch.setattr(run_command, "cards_of_host", lambda *_given: (card,))
    monkeypatch.setattr(run_command, "supervised", lose)
    with pytest.raises(HostLost, match=rf"{re.escape(str(loss))} \(go on with: assay run x --resume\)"):
        run_command._work(store, "swp_1", SimpleNamespace(cells=[cell]), 1, None, "assay run x --resume", stop)  # type: ignore[arg-type]


def test_sockets_lie_where_their_names_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))  # as TMPDIR would: Ray then refused to start
    guard = Guard.start("0mark")
    try:
        assert guard.folder.is_relative_to("/tmp") and len(str(guard.folder)) < 43
    finally:
        guard.finish()
    assert not guard.folder.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_guard_that_somebody_ended_or_stopped_leaves_no_folder(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.guard.MOST_SWEEP_S", 0.2)
    guard = Guard.start("1mark")
    (guard.folder / "session").mkdir()
    os.kill(guard._process.pid, number)
    guard.finish()
    assert not guard.folder.exists()
    guard.finish()
