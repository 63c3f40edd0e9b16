"""Python's collector of cycles, left to wait while something without cycles is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 100_000
"""Objects that are worth not being looked through. Fewer are: what is old is searched seldom, and others' cycles are
among the young."""


@contextmanager
def paused() -> Iterator[None]:
    """No search for cycles meanwhile: rows of a document hold none, and over ten thousand cells a third of the time
    went into looking. Much that was built counts as old afterwards, else the next search would go through all of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()  # all that stands leaves its generation unread,
            gc.unfreeze()  # and comes back to the oldest one
        if was_enabled:
            gc.enable()
