"""What can go wrong between a sweep file and its verdict, with the exit code of each class.

The tree::

    JobsError                   never raised itself
    +- SpecError            2   the sweep file, an id or a ref cannot be understood
    |  +- RefError          2   no such git ref, or it holds no engine
    +- NotJudged            3   a sweep has no verdict yet
    +- StoreError           4   the store cannot be reached, read or written
       +- UnknownAttempt    4   no such attempt in this store
       +- Unstorable        4   a record that no store could hold, or that names another attempt
       +- PackError         4   an arm's pack that is not what its name says, or not where it is needed
       +- Conflict          4   a guard failed: somebody else moved first, or a resend differs
       +- IllegalMove       4   a state change that the lifecycle does not know
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from engine.plain import plain


class JobsError(Exception):
    """An end with a cause and a remedy, both one line."""

    exit_code: ClassVar[int] = 4

    def __init__(self, message: str, remedy: str = "") -> None:
        self.message = plain(message)  # it quotes names out of files, whose line ends would feign another error
        self.remedy = plain(remedy)
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class SpecError(JobsError):
    """What the user wrote cannot be understood.

    `file` and `line` (1-based) say where, when the fault stands in a file; `others` are further faults of that file.
    """

    exit_code = 2

    def __init__(
        self,
        message: str,
        remedy: str = "",
        *,
        file: str = "",
        line: int | None = None,
        others: Sequence[SpecError] = (),
    ) -> None:
        super().__init__(message, remedy)
        self.file = file
        self.line = line
        self.others = tuple(others)

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        own = f"{place}: {super().__str__()}" if place else super().__str__()
        return "\n".join([own, *map(str, self.others)])


class RefError(SpecError):
    """A git ref that names nothing here, or a commit without an engine."""


class NotJudged(JobsError):
    """No answer yet: the sweep is there, and its runs are not done or not judged."""

    exit_code = 3


class StoreError(JobsError):
    """The store cannot be reached, is at another revision, or refused a row."""


class UnknownAttempt(StoreError):
    """An attempt that this store has never heard of."""


class Unstorable(StoreError):
    """A record itself cannot be kept, now or later: a fault of whoever made it, and not of the store."""


class PackError(StoreError):
    """An arm's pack that is not what its name says, or is not where it is needed."""


class Conflict(StoreError):
    """A guarded change found another state or fence than expected, or a resend differs from what is stored."""


class KeyTaken(Conflict):
    """A sweep is submitted under a key that stands for another one: whoever submits it has to choose."""

    exit_code = 2


class IllegalMove(StoreError):
    """A state change outside the lifecycle; the message carries the history."""
