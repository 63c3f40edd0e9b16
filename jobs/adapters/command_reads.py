"""A program's text or JSON as lines of the child protocol, by the mapping that its sweep file declares.

Nothing is guessed: a place that is not there, is there twice, or holds something else than was declared is a fault with
its name. Numbers are read as written, exactly, so that 2.5 KiB are 2560 bytes and 2.51 KiB are no number of bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any

from jobs.adapters.child_line import each_once, unfit
from jobs.excerpt import first_words
from jobs.reads import UNITS, Figure, Reads, units_of

_ABSENT = object()
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_MOST_EXPONENT = 400
"""Beyond it a number is no figure of anything, and as a fraction it would fill the memory."""


class Unread(Exception):
    """Why an output cannot be read by its mapping, in one line."""


@dataclass(slots=True)
class Mapped:
    """Lines of the child protocol, and why counters of the mapping are not among them."""

    lines: list[dict[str, Any]]
    absent: dict[str, str] = field(default_factory=dict)


def mapped(output: bytes, reads: Reads, warmups: int, device: Mapping[str, str]) -> Mapped:
    """The hello, generations and result that an output amounts to; the first `warmups` generations are warm-ups.

    Raises Unread.
    """
    try:
        text = output.decode("utf-8")
    except UnicodeDecodeError as exc:
        raise Unread(f"the output is not UTF-8 text: byte {exc.start} is {output[exc.start]:#04x}") from None
    parts = _Json(text, reads) if reads.format == "json" else _Text(text, reads)
    config = {name: {"value": _setting(parts.one(at, name)), "source": "request"} for name, at in reads.config.items()}
    hello = {"type": "hello", "protocol": 1, "effective_config": config, "device": dict(device)}
    made = Mapped([hello, *_generations(parts, reads, warmups)])
    counters = {name: _counter(parts, name, figure, made.absent) for name, figure in reads.counters.items()}
    made.lines.append({"type": "result", "counters": {n: value for n, value in counters.items() if value is not None}})
    for line in made.lines:
        if fault := unfit(line):
            raise Unread(fault)
    return made


def _generations(parts: _Json | _Text, reads: Reads, warmups: int) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(parts.generations()):
        line: dict[str, Any] = {"type": "generation", "index": index, "warmup": index < warmups}
        line["ids"] = _ids(row.get("ids", []), f"ids of generation {index + 1}")
        line["stop_reason"] = _word(row.get("stop", "length"), "stop")
        if reads.prefill is not None:
            line["prefill_ns"] = _times(row["prefill"], reads.prefill, "prefill")[0]
        if reads.steps is not None:
            line["step_ns"] = _times(row["steps"], reads.steps, "steps")
        yield line


class _Json:
    """One JSON document; places are dotted paths, a number being the index of a list."""

    def __init__(self, text: str, reads: Reads) -> None:
        self._reads = reads
        try:
            self._whole = json.loads(
                text, parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=each_once
            )
        except (ValueError, RecursionError) as exc:
            raise Unread(f"the output is no JSON document: {first_words(str(exc), 120)}") from None

    def generations(self) -> list[dict[str, Any]]:
        """What is asked of each generation, by its word in the mapping."""
        rows = self.one(self._reads.generations, "generations") if self._reads.generations else [self._whole]
        if not isinstance(rows, list):
            raise Unread(f"generations: {self._reads.generations} is no list")
        return [{word: _inside(row, at, word) for word, at in _places(self._reads).items()} for row in rows]

    def one(self, at: str, word: str) -> Any:
        """What stands at a path of the document."""
        return _inside(self._whole, at, word)


class _Text:
    """Text; places are patterns with one group, `^` and `$` being the ends of a line."""

    def __init__(self, text: str, reads: Reads) -> None:
        self._text = text
        self._reads = reads

    def generations(self) -> list[dict[str, Any]]:
        """The k-th match of each pattern is the k-th generation's."""
        found = {word: self._all(at) for word, at in _places(self._reads).items()}
        most = max(map(len, found.values()), default=0)
        for word, matches in found.items():
            if len(matches) != most:
                raise Unread(f"{word}: found {len(matches)} times, and another place of the mapping {most} times")
        return [{word: matches[index] for word, matches in found.items()} for index in range(most)]

    def one(self, at: str, word: str) -> Any:
        """The one match of a pattern."""
        matches = self._all(at)
        if len(matches) != 1:
            raise Unread(f"{word}: {at!r} is found {len(matches)} times in the output, and not once")
        return matches[0]

    def _all(self, at: str) -> list[str]:
        return [match.group(1) or "" for match in re.finditer(at, self._text, re.MULTILINE)]


def _places(reads: Reads) -> dict[str, str]:
    """What is asked of each generation, and where it stands."""
    figures = {"prefill": reads.prefill, "steps": reads.steps}
    places = {"ids": reads.ids, "stop": reads.stop, **{word: f.at for word, f in figures.items() if f}}
    return {word: at for word, at in places.items() if at}


def _inside(value: Any, at: str, word: str) -> Any:
    for name in at.split("."):
        inner = _ABSENT
        if isinstance(value, dict):
            inner = value.get(name, _ABSENT)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            inner = value[int(name)]
        if inner is _ABSENT:
            raise Unread(f"{word}: no {name!r} on the way to {at}")
        value = inner
    return value


def _ids(value: Any, word: str) -> list[int]:
    """Token ids: a list of whole numbers, or text that holds nothing but them, blanks and commas."""
    if isinstance(value, str):
        words: Sequence[Any] = value.replace(",", " ").split()
        if not all(re.fullmatch(r"-?\d{1,18}", item) for item in words):
            raise Unread(f"{word}: {first_words(value, 60)!r} is no list of ids")
        return [int(item) for item in words]
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        raise Unread(f"{word}: no list of whole numbers")
    return value


def _setting(value: Any) -> Any:
    """A setting as a sweep file would hold it: numbers and booleans in text are what they say."""
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, str):
        try:
            told = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return told if told is None or isinstance(told, int | float) else value
    return value if value is None or isinstance(value, int) else str(value)


def _word(value: Any, word: str) -> str:
    if not isinstance(value, str):
        raise Unread(f"{word}: {first_words(str(value), 60)!r} is no word")
    return value


def _times(value: Any, figure: Figure, word: str) -> list[int]:
    """Times in whole ns: a number, a list of them, or text that holds them."""
    values = _NUMBER.findall(value) if isinstance(value, str) else value if isinstance(value, list) else [value]
    if word == "prefill" and len(values) != 1:
        raise Unread(f"{word}: {len(values) or 'no'} number{'s' * (len(values) > 1)}, and one is meant")
    return [round(_number(item, word) * UNITS["ns"][figure.unit]) for item in values]


def _counter(parts: _Json | _Text, name: str, figure: Figure, absent: dict[str, str]) -> int | float | None:
    """A counter in its own unit; one that is not whole, where it must be, is told in `absent`."""
    told = parts.one(figure.at, name)
    value = _number(told, name) * units_of(name)[figure.unit]
    if figure.unit == "logit":
        return float(value)
    if value.denominator != 1:
        absent[name] = f"{told} {figure.unit} is not a whole number: the program rounds it"
        return None
    return int(value)


def _number(value: Any, word: str) -> Fraction:
    if isinstance(value, str):
        value = value.strip()
    try:
        number = Decimal(value) if isinstance(value, str | int | Decimal) and not isinstance(value, bool) else None
    except InvalidOperation:
        number = None
    if number is None or not number.is_finite() or abs(number.adjusted()) > _MOST_EXPONENT:
        raise Unread(f"{word}: {first_words(str(value), 60)!r} is no finite number")
    return Fraction(number)


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is no number")
