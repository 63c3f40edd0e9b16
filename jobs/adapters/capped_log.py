"""A log that cannot fill the disk: its head and its tail are kept, and a visible mark says what is gone."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from jobs.excerpt import last_lines


class CappedLog:
    """Keeps the first and last `cap_bytes / 2` of what is fed to it.

    The head is written as it comes, so that something is there when the writer is killed; the tail on `close`.
    """

    def __init__(self, path: Path, cap_bytes: int) -> None:
        self._half = max(1, cap_bytes // 2)
        self._file = path.open("wb")
        self._head_bytes = 0
        self._tail = bytearray()
        self._gone_bytes = 0
        self._head_end = b""

    def __enter__(self) -> CappedLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def feed(self, data: bytes) -> None:
        """Take some output, of any length, with or without line ends."""
        room = self._half - self._head_bytes
        if room > 0:
            head, data = data[:room], data[room:]
            self._file.write(head)
            self._file.flush()
            self._head_bytes += len(head)
            self._head_end = (self._head_end + head)[-self._half :]
        self._tail += data
        if len(self._tail) > 2 * self._half:
            self._cut()

    def close(self) -> None:
        """Write the mark and the tail."""
        if self._file.closed:
            return
        self._cut()
        self._file.write(self._mark() + bytes(self._tail))
        self._file.close()

    def tail_text(self, limit: int = 4096) -> str:
        """The last whole lines as text, at most `limit` characters, with the mark where output is missing before it."""
        shown = bytes(self._tail)
        if not self._gone_bytes:
            shown = self._head_end + shown
        elif len(shown) <= limit:
            shown = self._mark() + shown
        return last_lines(shown.decode("utf-8", "replace"), limit)

    def _mark(self) -> bytes:
        return f"\n[... {self._gone_bytes} bytes of output left out ...]\n".encode() if self._gone_bytes else b""

    def _cut(self) -> None:
        surplus = len(self._tail) - self._half
        if surplus > 0:
            del self._tail[:surplus]
            self._gone_bytes += surplus
