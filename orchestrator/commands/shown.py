"""Text from elsewhere as a terminal may take it: no control character reaches it, and none fills the screen."""

from __future__ import annotations

import re

MOST_CHARACTERS = 300
MOST_OF_AN_ERROR = 1000
"""An error of our own may be longer, since its remedy holds paths and commands to copy."""

CONTROLS = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls of a terminal, line ends, what turns the direction of writing, and halves of surrogate pairs."""


def shown(text: str, most: int = MOST_CHARACTERS) -> str:
    """One line of at most `most` characters: controls as escapes, and too long a text without its middle."""
    plain = CONTROLS.sub(_escaped, text)
    if len(plain) <= most:
        return plain
    tail = most // 3
    return f"{plain[: most - tail - 3]} … {plain[-tail:]}"


def shown_lines(text: str) -> str:
    """Text of several lines of any length, without controls but line ends and tabs."""
    return CONTROLS.sub(lambda match: match[0] if match[0] in "\n\t" else _escaped(match), text)


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"  # as JSON writes it, so that a document stays one
