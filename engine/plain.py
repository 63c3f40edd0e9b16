"""Text from models and files as a terminal may take it: names in a graph are anybody's, and may hold its controls."""

from __future__ import annotations

import re

CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls of a terminal, line ends, what turns the direction of writing, and halves of surrogate pairs."""


def plain(text: str) -> str:
    """One line: every control as its escape."""
    return CONTROLS.sub(_escaped, text)


def plain_lines(text: str) -> str:
    """Several lines: every control as its escape, but line ends and tabs."""
    return CONTROLS.sub(lambda match: match[0] if match[0] in "\n\t" else _escaped(match), text)


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"  # as JSON writes it, so that a document stays one
