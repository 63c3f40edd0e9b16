"""Says what is wrong with a sweep file in its own words: pydantic's findings with line, expectation and remedy."""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from jobs.errors import SpecError
from jobs.spec.yaml_lines import Path_, Source

F = TypeVar("F", bound=BaseModel)

MOST_FAULTS = 20
"""Faults told at once: who sees that many mends them first."""

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "dict_type": "a mapping (name: value)",
    "model_type": "a mapping (name: value)",
    "finite_number": "a finite number",
    "scalar": "one value (text, a number, true, false or null)",
}


def parse(form: type[F], source: Source) -> F:
    """Check a document against a form. Raises SpecError: the first fault by line, with the others attached."""
    if not isinstance(source.values, dict):
        remedy = "docs/sweep-file.md has an example with every key"
        raise source.error((), f"expected a mapping (name: value), got {kind_of(source.values)}", remedy)
    try:
        # Through JSON, so that lists may stand for tuples while text may still not stand for numbers.
        return form.model_validate_json(json.dumps(source.values))
    except ValidationError as error:
        details = error.errors(include_url=False)
    told = sorted(_told(details), key=lambda detail: source.line(tuple(detail["loc"])))
    raise first_of(_fault(form, source, detail) for detail in told[:MOST_FAULTS])


def first_of(faults: Iterable[SpecError]) -> SpecError:
    """One error out of several of a file: the first by line carries the rest."""
    first, *others = sorted(faults, key=lambda fault: fault.line or 0)[:MOST_FAULTS]
    return SpecError(first.message, first.remedy, file=first.file, line=first.line, others=others)


def nearest(name: str, known: Iterable[str]) -> str:
    """A remedy for an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names) or 'none'}"


def spell(path: Path_) -> str:
    """A path as a reader writes it: `matrix.model[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"


def kind_of(value: Any) -> str:
    """What a value is, as shown in "got ...": its kind and, when short, itself."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 40 else "a text"
    return "a list" if isinstance(value, list) else "a mapping"


def _told(details: Sequence[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Findings without those that only follow from another one.

    A misspelt key is also a missing one: the nearest name says it better. A list or mapping with a faulty entry is
    called too short as well, since pydantic leaves that entry out of its count.
    """
    misspelt = {detail["loc"][:-1] for detail in details if detail["type"] == "extra_forbidden"}
    holders = {detail["loc"][:length] for detail in details for length in range(len(detail["loc"]))}
    for detail in details:
        if detail["type"] == "missing" and detail["loc"][:-1] in misspelt:
            continue
        if detail["type"] != "too_short" or detail["loc"] not in holders:
            yield detail


def _fault(form: type[BaseModel], source: Source, detail: ErrorDetails) -> SpecError:
    path, kind, value = tuple(detail["loc"]), detail["type"], detail["input"]
    context = detail.get("ctx", {})
    if path and path[-1] == "[key]":
        return source.error(
            path[:-1], f"the name {path[-2]!r} is not allowed", "names hold a-z, 0-9, dot, dash and underscore"
        )
    if kind == "extra_forbidden":
        known = _keys(_at(form, path[:-1]))
        return source.error(path, f"unknown key {path[-1]!r} in {spell(path[:-1])}", nearest(str(path[-1]), known))
    if kind == "missing":
        return source.error(path, f"{spell(path[:-1])} lacks the key {path[-1]!r}", "add it")
    if kind == "too_short" and path[:1] == ("prompts",) and len(path) > 1:
        return source.error(path, f"the prompt {path[1]!r} is empty", "give at least one token id")
    if kind == "too_long":
        return source.error(path, f"{spell(path)} has too many entries", f"at most {context['max_length']}")
    if kind in {"too_short", "string_too_short"}:
        return source.error(path, f"{spell(path)} is empty", "give at least one, or leave the key out")
    if kind == "string_type" and value is None:
        remedy = 'write "null" in quotes if that is the name'
        return source.error(path, f"{spell(path)}: expected text, got nothing", remedy)
    if kind in EXPECTED:
        return source.error(path, f"{spell(path)}: expected {EXPECTED[kind]}, got {kind_of(value)}")
    if kind == "literal_error":
        return source.error(path, f"{spell(path)}: expected {context['expected']}, got {kind_of(value)}")
    if kind in {"greater_than_equal", "greater_than", "less_than_equal"}:
        return source.error(path, f"{spell(path)} is {value}", _bound(kind, context))
    return source.error(path, f"{spell(path)}: {detail['msg'].removeprefix('Input ')}, got {kind_of(value)}")


def _bound(kind: str, context: dict[str, Any]) -> str:
    words = {"greater_than_equal": ("ge", "or more"), "less_than_equal": ("le", "or less")}
    if kind in words:
        key, tail = words[kind]
        return f"{context[key]:.12g} {tail} is needed"
    return f"more than {context['gt']:g} is needed"


def _at(form: Any, path: Path_) -> Any:
    """The annotation that governs `path` below a form."""
    for part in path:
        form = _bare(form)
        if isinstance(form, type) and issubclass(form, BaseModel):
            form = next(f.annotation for name, f in form.model_fields.items() if part in {name, f.alias})
        else:
            form = typing.get_args(form)[-1 if typing.get_origin(form) is dict else 0]
    return _bare(form)


def _bare(annotation: Any) -> Any:
    """An annotation without Annotated and without None."""
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif origin in {typing.Union, types.UnionType}:
            annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
        else:
            return annotation


def _keys(form: Any) -> list[str]:
    return [f.alias or name for name, f in form.model_fields.items()]
