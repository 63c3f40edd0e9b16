"""What happens to output when nobody can take it: a reader that left, a closed stream, an encoding without the letter.

Output must never decide an exit code by itself: Python's and click's own 1 would read as a regression.
"""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO

READER_GONE = 141
"""128 + SIGPIPE: what a shell shows of any program whose reader left."""

STDOUT, STDERR = 1, 2


@dataclass(frozen=True, slots=True)
class Streams:
    """Stdout and stderr of this process after `take_streams`."""

    out: Outlet
    err: Outlet

    def end(self) -> OSError | None:
        """Write out what is buffered; what now kept stdout from being written, a reader that left apart."""
        told = self.out.failure is not None
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # noted by the outlet; a closed file has nothing to flush
                continue
        return None if told else self.out.failure


class Outlet(io.FileIO):
    """A file descriptor that takes all that is written to it, and notes why it could not pass it on."""

    def __init__(self, descriptor: int, *, quiet: bool, never_raises: bool = False) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.quiet = quiet
        self.never_raises = never_raises
        self.reader_gone = False
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write, or drop what can no longer be written. Raises OSError the first time; a reader gone only if loud."""
        size = memoryview(data).nbytes
        if self.reader_gone or self.failure is not None:
            return size
        try:
            return super().write(data)
        except BrokenPipeError:
            self.reader_gone = True
            if not self.quiet:
                raise
        except OSError as error:
            if self.never_raises:
                self.reader_gone = True
                return size
            self.failure = OSError(error.errno, error.strerror, "stdout")
            raise self.failure from error
        return size


def take_streams(*, quiet: bool = True) -> Streams:
    """Put streams in place of sys.stdout and sys.stderr that cannot end the program.

    A closed one becomes /dev/null (its number would else go to the next file opened, such as the store, and a child's
    output into that). Letters that the encoding lacks are written as escapes. With `quiet` a reader that left is only
    noted; without, BrokenPipeError goes to whoever writes, who can stop working.
    """
    for descriptor in (0, STDOUT, STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == descriptor, "the lowest free number is given, and all below are taken"
            os.set_inheritable(descriptor, True)
    out = Outlet(_number(sys.stdout, STDOUT), quiet=quiet)
    err = Outlet(_number(sys.stderr, STDERR), quiet=True, never_raises=True)
    sys.stdout, sys.stderr = _text(out, sys.stdout), _text(err, sys.stderr, at_once=True)
    return Streams(out, err)


def _number(before: TextIO | None, descriptor: int) -> int:
    """The descriptor to write to; for a stream that was closed at the start not its number, which may be reused."""
    return descriptor if before is not None else os.open(os.devnull, os.O_WRONLY)


def _text(outlet: Outlet, before: TextIO | None, *, at_once: bool = False) -> TextIO:
    encoding = getattr(before, "encoding", None) or "utf-8"
    lines = at_once or outlet.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(outlet), encoding=encoding, errors="backslashreplace", line_buffering=lines
    )
