"""One line of a child's result stream as a JSON object, strictly: what no store could keep is refused by its place.

Python's own reader takes `NaN`, turns `1e400` into infinity, keeps integers of any length and half surrogate pairs,
guesses at other encodings than UTF-8, and gives up on deep nesting with RecursionError. Each of those would fail later,
in the hands of somebody who cannot say which child wrote it; so it is a fault of the child's line, found here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 16
"""Levels of nesting; the deepest line of the protocol has 4."""

LOW, HIGH = -(2**63), 2**63 - 1


class BadLine(Exception):
    """A line that cannot be used: `reason` names the place, `rest` is what could be read of it all the same."""

    def __init__(self, reason: str, rest: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.rest = dict(rest or {})


def parse_line(line: bytes) -> dict[str, Any]:
    """The object of one line: `type` is text, numbers are finite and of 64 bits, text is storable. Raises BadLine."""
    try:
        value = json.loads(line.decode(), object_pairs_hook=each_once)
    except RecursionError:
        raise BadLine(f"nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeDecodeError:
        raise BadLine("not a JSON line: not UTF-8") from None
    except ValueError as exc:  # also JSONDecodeError, a byte order mark, and integers too long to convert
        raise BadLine(str(exc) if isinstance(exc, _Twice) else "not a JSON line") from None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise BadLine("not a JSON object with a type")
    fault = unfit(value)
    if fault is not None:
        raise BadLine(fault, value)
    return value


def unfit(value: Any, place: str = "", depth: int = 0) -> str | None:
    """The first thing in `value` that is not storable, with its place; None when all of it is."""
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{place or 'value'} is not finite"
    if isinstance(value, int):
        return None if LOW <= value <= HIGH else f"{place or 'value'} is beyond 64 bits"
    if isinstance(value, str):
        return None if storable_text(value) else f"{place or 'value'} holds NUL or half a surrogate pair"
    if not isinstance(value, dict | list):
        return None
    if depth == MAX_DEPTH:
        return f"nested deeper than {MAX_DEPTH} levels"
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        if isinstance(key, str) and not storable_text(key):
            return f"a name in {place or 'the line'} holds NUL or half a surrogate pair"
        fault = unfit(item, f"{place}.{key}" if place else str(key), depth + 1)
        if fault is not None:
            return fault
    return None


def storable_text(text: str) -> bool:
    """Whether both stores take a text: without NUL and half surrogate pairs."""
    return "\0" not in text and not any("\ud800" <= letter <= "\udfff" for letter in text)


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The members of one JSON object. Raises ValueError for a name that stands twice."""
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(f"the member {next(n for n in names if names.count(n) > 1)!r} stands twice in one object")
    return made


class _Twice(ValueError):
    """An object that names one member twice, so that two readers could see different things."""
