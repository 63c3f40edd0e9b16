"""A run that is told to end says first what it had measured, and then ends by the signal that told it.

SIGKILL cannot be heard: then a run's last line is what it had said before.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = "interrupted"
"""Kind of the error line of a run that was told to end. It is no exit code's: the process ends by the signal."""
ABANDONED = 143
"""Exit code of a run whose parent or reader went away; as a process that was told to end."""
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_BY_DEFAULT = (signal.SIG_DFL, signal.default_int_handler)


class Interrupted(KeyboardInterrupt):
    """A signal told this process to end."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        self.number = number
        super().__init__(f"told to end by {signal.Signals(number).name}")


def exit_code(told: BaseException | None = None) -> int:
    """What a shell says of a process that was told to end: 128 and the signal, SIGINT where it is not said."""
    return 128 + int(getattr(told, "number", signal.SIGINT))


@contextmanager
def ended_by_signals(*, tells: bool = False) -> Iterator[None]:
    """Within, the first signal that would end the process raises Interrupted; behind it the process ends by it.

    A second one ends it at once. Signals that are ignored or heard by somebody else are left alone. With `tells` the
    end is said on stderr.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # Python hears signals in the main thread alone
        return
    heard = {number: was for number in _ENDING if (was := signal.getsignal(number)) in _BY_DEFAULT}

    def tell(number: int, _: FrameType | None) -> None:
        for each in heard:
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(number)

    for number in heard:
        signal.signal(number, tell)
    try:
        yield
    except Interrupted as interrupted:
        if interrupted.number in heard:
            if tells:
                print(f"error: {interrupted}; it had not finished", file=sys.stderr, flush=True)
            os.kill(os.getpid(), interrupted.number)
        raise
    finally:
        for number, was in heard.items():
            signal.signal(number, was)


def end_with(control_fd: int) -> None:
    """End this process when the parent's side of the pipe closes: an orphan must not hold a card."""

    def wait() -> None:
        while os.read(control_fd, 1):
            pass
        os._exit(ABANDONED)

    threading.Thread(target=wait, daemon=True, name="control").start()
