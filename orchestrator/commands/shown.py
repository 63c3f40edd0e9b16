"""Text from elsewhere as a terminal may take it: no control character reaches it, and none fills the screen."""

from __future__ import annotations

from engine.plain import plain, plain_lines

MOST_CHARACTERS = 300
MOST_OF_AN_ERROR = 1000
"""An error of our own may be longer, since its remedy holds paths and commands to copy."""

shown_lines = plain_lines
"""Text of several lines of any length, without controls but line ends and tabs."""


def shown(text: str, most: int = MOST_CHARACTERS) -> str:
    """One line of at most `most` characters: controls as escapes, and too long a text without its middle."""
    line = plain(text)
    if len(line) <= most:
        return line
    tail = most // 3
    return f"{line[: most - tail - 3]} … {line[-tail:]}"
