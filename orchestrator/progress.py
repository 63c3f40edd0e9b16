"""What a person sees while a sweep runs, on stderr: a bar on a terminal, one line an event elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from orchestrator.commands.shown import shown
from orchestrator.seat import Happening


class SweepProgress:
    """Follows a sweep of `runs` runs, `done` of which are settled already. Use as a context."""

    def __init__(self, runs: int, done: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("starting workers", total=runs, completed=done)
        self._runs = runs

    def __enter__(self) -> SweepProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, happening: Happening) -> None:
        """Show one happening."""
        where = f"{happening.cell} · {happening.arm}"
        if happening.kind == "begin":
            self._bar.update(self._task, description=shown(where))
            return
        if happening.counts is not None:
            counts = happening.counts()
            settled = counts.complete + counts.exhausted
            self._bar.update(self._task, completed=settled)
            if happening.text:
                self._line(f"{where}: {happening.text}")
            elif self._bar.disable:
                self._line(f"{settled}/{self._runs} {where}")
            return
        self._line(f"{where}: {happening.kind}: {happening.text}")

    def _line(self, text: str) -> None:
        self._console.print(Text(shown(text)), soft_wrap=True)
