"""The summary of a job of GitHub Actions: a file that takes Markdown, 1 MiB a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from reports.render import COMMENT_FLOOR, COMMENT_LIMIT

LIMIT_BYTES: Final = 1 << 20
_BYTES_A_UNIT: Final = 3  # the most that UTF-8 takes for one UTF-16 unit


def append(path: Path, render: Callable[[int], str]) -> None:
    """Append what `render` gives in at most so many characters. Raises OSError, also where no room is left."""
    used = path.stat().st_size if path.exists() else 0
    limit = min(COMMENT_LIMIT, (LIMIT_BYTES - used) // _BYTES_A_UNIT - 2)
    if limit < COMMENT_FLOOR:
        raise OSError(f"{path}: the job's summary is full")
    with path.open("a", encoding="utf-8") as stream:
        stream.write(f"\n{render(limit)}\n")
