"""Cutting a child's words short without cutting a word: half a secret has no shape by which anybody could redact it."""

from __future__ import annotations

import textwrap

GONE = "[...]"


def first_words(line: str, limit: int) -> str:
    """The whole words of a line within `limit` characters, with a mark where it goes on; nothing but it if none fit."""
    if len(line) <= limit:
        return line
    return textwrap.shorten(line, limit, placeholder=f" {GONE}", break_on_hyphens=False, break_long_words=False)


def last_lines(text: str, limit: int) -> str:
    """The whole lines at the end of a text within `limit` characters; of a longer last line its first words.

    Lines, since what tells that a word is a secret may stand before it.
    """
    lines = text.splitlines(keepends=True)
    kept = 0
    for count, line in enumerate(reversed(lines)):
        kept += len(line)
        if kept > limit:
            return "".join(lines[-count:]) if count else first_words(line.strip(), limit)
    return text
