"""The driver of a sweep in a process of its own, so that whatever ends it does not end the command.

Ray's client library ends the process that it lives in: with exit code 1 some 10 s after its control server died, at
once when its node manager dies while it connects. From the command itself that would read as a regression. The command
also keeps both signals for itself, of which Ray takes one; it passes them on through a byte of shared memory.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TypeVar

from jobs.errors import JobsError
from orchestrator.cards import ProbeError
from orchestrator.lost import HostLost, Stopped
from orchestrator.stop import SIGNALS, StopFlag

T = TypeVar("T")
POLL_S = 0.2
PR_SET_PDEATHSIG = 1


def supervised(drive: Callable[[], T], stop: StopFlag) -> T:
    """What `drive` returns or raises in a process of its own, which ends with this one.

    Raises HostLost when that process dies, Stopped when it does so after a stop was asked for: a service manager sends
    its signal to every process of the service.
    """
    context = get_context("fork")  # the store and the manifest need not be sent
    mine, theirs = context.Pipe(duplex=False)
    driver = context.Process(target=_drive, args=(drive, theirs, os.getpid()), name="driver")
    sys.stdout.flush()
    sys.stderr.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until the driver has handlers of its own
    try:
        driver.start()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    theirs.close()
    try:
        while not mine.poll(POLL_S):
            pass
        answer = mine.recv()
    except EOFError:
        driver.join()
        if stop():
            raise Stopped from None
        raise HostLost(
            f"the driver {_words(driver.exitcode)}, as Ray ends it when Ray's own servers are gone"
        ) from None
    except KeyboardInterrupt:
        driver.kill()
        raise
    finally:
        driver.join()
        mine.close()
    if isinstance(answer, HostLost) and stop():
        raise Stopped from answer
    if isinstance(answer, BaseException):
        raise answer
    return answer  # type: ignore[no-any-return]


def deaf() -> None:
    """Do nothing on a signal: the flag tells. Not SIG_IGN, which every process started from here would inherit."""
    for number in SIGNALS:
        signal.signal(number, lambda _number, _frame: None)


def _drive(drive: Callable[[], T], answer: Connection, command: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    deaf()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if os.getppid() != command:
        return
    try:
        answer.send(drive())
    except (Stopped, HostLost, ProbeError, JobsError, OSError) as told:
        answer.send(told)


def _words(code: int | None) -> str:
    if code is not None and code < 0:
        return f"was killed by signal {-code}"
    return f"ended with exit code {code}"
