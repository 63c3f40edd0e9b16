"""Adds an entry to a reviewed file, as text, so that what people wrote around it stays."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from jobs.errors import SpecError
from jobs.spec.yaml_lines import SCALARS, Source, read_file, read_lines

WIDTH = 110


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our own reader would take for a number, a truth value or nothing."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_plain = not any(pattern.fullmatch(value) for pattern in SCALARS.values())
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if is_plain else '"')


_Dumper.add_representer(str, _text)


def read_list(file: Path, key: str) -> Source | None:
    """A reviewed file, or None where there is none yet. Raises SpecError when its one key is not that list."""
    if not file.exists():
        return None
    source = read_file(file, "name another file")
    if not isinstance(source.values, dict) or not isinstance(source.values.get(key), list):
        raise source.error((), f"{file} holds no list of {key}", f"begin it with {key}: []")
    return source


def add_entry(file: Path, key: str, entry: Mapping[str, Any]) -> Source:
    """Write an entry at the end of the list `key` of a file, which is made where it is not there; the file read anew.

    Raises SpecError, having written nothing, where the list is of a form to which no line can be added.
    """
    source = read_list(file, key)
    before: list[Any] = [] if source is None else source.values[key]
    text = f"{key}:\n" if source is None else source.text.rstrip("\n") + "\n"
    if not before:
        text = re.sub(rf"^{key}:[ \t]*\[[ \t]*\]", f"{key}:", text, count=1, flags=re.MULTILINE)
    indent = "  " if source is None or not before else _indent(source, key)
    text += "".join(f"{indent}{line}\n" for line in _lines(entry))
    made = read_lines(text, str(file))
    if made.values.get(key) != [*before, dict(entry)]:
        raise SpecError(f"no entry can be added to the list in {file}", "write each entry below a dash of its own")
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(file)
    return made


def _lines(entry: Mapping[str, Any]) -> list[str]:
    text = yaml.dump([dict(entry)], Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=WIDTH)
    return text.splitlines()


def _indent(source: Source, key: str) -> str:
    line = source.text.splitlines()[source.line((key, 0)) - 1]
    return line[: len(line) - len(line.lstrip())]
