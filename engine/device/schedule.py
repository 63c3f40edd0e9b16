"""When work runs that was asked for: any time that its branch and the events before it allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from engine.device.shadow import Line

Order = Literal["early", "late", "random"]
ORDERS: tuple[Order, ...] = ("early", "late", "random")
_LINES: tuple[Line, ...] = ("graph", "copy", "compute")
"""Copies first: early is as early as a copy can be, before compute work that was asked for with it."""


@dataclass(slots=True, eq=False)
class Task:
    """Work on a line, once `after` is done."""

    line: Line
    run: Callable[[], object]
    after: Task | None = None
    done: bool = False


class Schedule:
    """Queues of work. `early` runs it as it comes, `late` when the host waits for it, `random` by a seed."""

    def __init__(self, order: Order, seed: int = 0) -> None:
        self.order = order
        self.name = f"random:{seed}" if order == "random" else order
        self._random = random.Random(seed)
        self._queues: dict[Line, deque[Task]] = {line: deque() for line in _LINES}

    def ask(self, line: Line, run: Callable[[], object], after: Task | None = None) -> Task:
        """Put work at the end of a line; nothing runs before `go`."""
        task = Task(line, run, after)
        self._queues[line].append(task)
        return task

    def go(self) -> None:
        """Run what the order runs unasked."""
        match self.order:
            case "early":
                self.drain()
            case "random":
                for _ in range(self._random.randrange(4)):
                    self._any()

    def reach(self, task: Task) -> None:
        """The host waits for a task: no more than that has to run."""
        while not task.done:
            if self.order == "random":
                self._any()
            else:
                self._next(task.line)

    def drain(self) -> None:
        """The host waits for everything."""
        while any(self._queues.values()):
            if self.order == "random":
                self._any()
            else:
                self._next(next(line for line in _LINES if self._queues[line]))

    def _any(self) -> None:
        ready = [q[0] for q in self._queues.values() if q and (q[0].after is None or q[0].after.done)]
        if ready:
            self._next(self._random.choice(ready).line)

    def _next(self, line: Line) -> None:
        """Run the head of a line, and first what it waits for."""
        task = self._queues[line][0]
        while task.after is not None and not task.after.done:
            self._next(task.after.line)
        self._queues[line].popleft()
        task.done = True
        task.run()
