"""Names in the order in which people count: layer 2 stands before layer 10."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[0-9]+")
_DIGITS = 20


def natural(name: str) -> str:
    """What to sort a name by: its numbers are padded to one length."""
    return _NUMBER.sub(lambda number: number.group().zfill(_DIGITS), name)
