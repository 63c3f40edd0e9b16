"""What a run says while it runs: JSON lines, each written whole, strict (no NaN)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

Emit = Callable[[dict[str, Any]], None]


def to_fd(fd: int) -> Emit:
    """Write each line to a file descriptor."""

    def emit(line: dict[str, Any]) -> None:
        data = (json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n").encode()
        while data:
            data = data[os.write(fd, data) :]

    return emit


class Collected:
    """Keeps the lines, for a caller in the same process."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def __call__(self, line: dict[str, Any]) -> None:
        """Keep one line, checked to be strict JSON."""
        self.lines.append(json.loads(json.dumps(line, allow_nan=False)))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Lines of one type, in order."""
        return [line for line in self.lines if line["type"] == kind]
