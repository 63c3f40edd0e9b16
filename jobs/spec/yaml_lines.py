"""YAML with line numbers: plain values, the line of every key and item, and no silent surprises.

Refused, each with its line: duplicate keys (both lines), merge keys, NaN and infinity, NUL and lone surrogates, several
documents, aliases that loop or multiply, more values or bytes than a person writes, tags that do not fit their text.
Keys are text, so an arm can be called `null`. Only `true` and `false` are booleans and only plain decimals are whole
numbers, as in YAML 1.2: `off` is a word here (a gate can be `off`), and `1:30` is not ninety.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jobs.errors import SpecError

Path_ = tuple[str | int, ...]
"""Where a value stands in a document: keys and list indices from the top."""

MOST_FILE_BYTES = 2**20
MOST_NODES = 100_000
MOST_DIGITS = 40
NOT_STORABLE = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Source:
    """A document's values, and the 1-based line at which each key or list item stands."""

    file: str
    text: str
    values: Any
    lines: dict[Path_, int] = field(default_factory=dict)

    def line(self, path: Path_) -> int:
        """The line of the value at `path`, or of its nearest ancestor that is written down."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 1

    def error(self, path: Path_, message: str, remedy: str = "") -> SpecError:
        """A SpecError that points at `path`."""
        return SpecError(message, remedy, file=self.file, line=self.line(path))


class _TooMany(yaml.MarkedYAMLError):
    """More values than a sweep file can mean."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules above, which stops at too many values instead of reading on for minutes."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.values = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.values += 1
        if self.values > MOST_NODES:
            problem = f"the file holds more than {MOST_NODES} values"
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise _TooMany(problem=problem, problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


SCALARS: dict[str, re.Pattern[str]] = {}
"""Kind of scalar -> what one looks like, for a tag (`!!int x`) can claim it of any text."""

_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*)?\.[0-9]+(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+"
        r"|[-+]?[0-9]+\.|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+0123456789.",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    SCALARS[_tag] = re.compile(_pattern, re.ASCII)
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read_file(path: Path, remedy: str) -> Source:
    """Read and parse one YAML file. Raises SpecError; `remedy` is for a file that cannot be opened."""
    try:
        with path.open("rb") as stream:
            data = stream.read(MOST_FILE_BYTES + 1)
        if len(data) > MOST_FILE_BYTES:
            raise too_large(str(path))
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError("the file is not UTF-8 text", "save it as UTF-8", file=str(path)) from error
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror or error}", remedy) from error
    return read_lines(text, str(path))


def read_lines(text: str, file: str) -> Source:
    """Parse one YAML document. Raises SpecError with file and line."""
    if len(text) > MOST_FILE_BYTES:
        raise too_large(file)
    try:
        node = yaml.compose(text, _Loader)
    except RecursionError as error:
        raise SpecError("brackets are nested too deeply", "a sweep file is a few levels deep", file=file) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "not YAML"
        raise SpecError(problem, _remedy(problem), file=file, line=mark.line + 1 if mark else None) from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SpecError(f"character {error.character!r} is not allowed", "remove it", file=file, line=line) from error
    source = Source(file, text, None)
    values = _Builder(source).build(node, ()) if node is not None else None
    return Source(file, text, values, source.lines)


def too_large(file: str) -> SpecError:
    """Why a file is not even parsed."""
    return SpecError(f"the file is larger than {MOST_FILE_BYTES} bytes", "split the sweep", file=file)


class _Builder:
    """Turns nodes into values and notes their lines."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.open: list[int] = []
        self.count = 0

    def build(self, node: yaml.Node, path: Path_) -> Any:
        self.source.lines.setdefault(path, node.start_mark.line + 1)
        self.count += 1
        if id(node) in self.open or self.count > MOST_NODES:
            raise self.source.error(path, "an alias that contains itself or multiplies", "write the values out")
        self.open.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, path)
            if isinstance(node, yaml.SequenceNode):
                return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]
            return self.scalar(node)
        finally:
            self.open.pop()

    def mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise self.at(line, "merge keys (<<) are not read", "write the values out; arms have `like:`")
            if not isinstance(key, str) or not key:
                raise self.at(line, "a key is empty or holds several values", "write a name before the colon")
            if key in made:
                first = self.source.lines[(*path, key)]
                raise self.at(line, f"duplicate key {key!r}, first written in line {first}", "keep one of the two")
            self.text(key, line)
            self.source.lines[(*path, key)] = line
            made[key] = self.build(value_node, (*path, key))
        return made

    def scalar(self, node: yaml.Node) -> str | int | float | bool | None:
        text = str(node.value)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        line = node.start_mark.line + 1
        if kind == "str":
            return self.text(text, line)
        if kind in SCALARS and not SCALARS[kind].fullmatch(text):
            shown = repr(text) if len(text) <= MOST_DIGITS else "a text"
            raise self.at(line, f"tag {node.tag!r} does not fit {shown}", "write a plain value without a tag")
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        if kind == "int":
            if len(text) > MOST_DIGITS:
                raise self.at(line, f"a whole number of {len(text)} digits", f"at most {MOST_DIGITS}")
            digits = text.replace("_", "")
            return int(digits, 16 if digits.lower().startswith("0x") else 10)
        if kind == "float":
            return self.finite(text, line)
        raise self.at(line, f"tag {node.tag!r} is not read", "write a plain value")

    def finite(self, text: str, line: int) -> float:
        value = float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
        if not math.isfinite(value):
            raise self.at(line, f"{text} is not a finite number", "give a finite one")
        return value

    def text(self, text: str, line: int) -> str:
        if NOT_STORABLE.search(text):
            raise self.at(line, "text holds NUL or half a surrogate pair", "remove the escape")
        return text

    def at(self, line: int, message: str, remedy: str) -> SpecError:
        return SpecError(message, remedy, file=self.source.file, line=line)


def _remedy(problem: str) -> str:
    if problem.startswith("the file holds more"):
        return "split the sweep"
    if "'\\t'" in problem:
        return "indent with spaces, not tabs"
    if "single document" in problem or "but found another document" in problem:
        return "a file holds one document; split it"
    return "check indentation, quotes and brackets there"
