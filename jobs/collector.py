"""Python's collector of cycles, left to wait while something without cycles is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No search for cycles meanwhile: rows of a document hold none, and over ten thousand cells a third of the time
    went into looking."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
