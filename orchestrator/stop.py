"""How a command hears that it is to end: the first SIGINT or SIGTERM."""

from __future__ import annotations

import contextlib
import mmap
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MOMENT_S = 0.2


@dataclass(slots=True)
class StopFlag:
    """The first SIGINT or SIGTERM asks for an orderly end; a driver that was forked off sees it too.

    While nobody `polls`, it interrupts what is being done, and later ones are ignored: the ending of a build's
    processes must not be interrupted in its turn. Then it raises the flag, and a second SIGINT interrupts at once.
    """

    polls: bool = False
    _number: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 1))

    @property
    def number(self) -> int:
        """The signal that asked; 0 for none."""
        return self._number[0]

    def __call__(self) -> bool:
        """Whether an end was asked for."""
        return self.number != 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[StopFlag]:
        """Take both signals for as long as it lasts; afterwards they are whose they were."""
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        first = not self.number
        self._number[0] = self.number or number
        if first if not self.polls else number == signal.SIGINT and not first:
            raise KeyboardInterrupt


def pause(seconds: float, stopped: Callable[[], bool]) -> None:
    """Sleep, but not beyond a stop by more than a moment."""
    end_s = time.monotonic() + seconds
    while not stopped() and (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(MOMENT_S, left_s))
