"""The frozen form of every document that passes between parts."""

from __future__ import annotations

import hashlib
import json
from datetime import date
from functools import cache
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

_NOT_KEPT: set[str] = set()
_put = object.__setattr__
_put_told, _put_extra, _put_private = (
    BaseModel.__dict__[name].__set__
    for name in ("__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


class Document(BaseModel):
    """A frozen piece of a document; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    def model_post_init(self, _context: Any) -> None:
        """Forget which fields were told: nobody asks, and the set of them is more than half of a row's 1.3 kB."""
        _put(self, "__pydantic_fields_set__", _NOT_KEPT)

    @classmethod
    def made(cls, **fields: Any) -> Self:
        """A row whose values are this program's own and of their types: kept as they are, every field given.

        Reading them again costs more than everything else that is done for a row; a sweep has a million.
        """
        assert len(fields) == len(cls.__pydantic_fields__), (cls, sorted(fields))
        row: Self = object.__new__(cls)
        for name, value in fields.items():  # so that rows of a class share their names
            _put(row, name, value)
        _put_told(row, _NOT_KEPT)
        _put_extra(row, None)
        _put_private(row, None)
        return row

    def canonical(self) -> str:
        """JSON with sorted keys: the form that is stored and digested."""
        return _ENCODER.encode(self)

    def digest(self) -> str:
        """sha256 of `canonical()`, hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()


@cache
def _form(document: type[Document]) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Fields that a document writes under another name, each with it, and its rule of what it leaves out."""
    if not issubclass(document, Document):
        raise TypeError(f"a {document.__name__} has no place in a document")
    fields = document.__pydantic_fields__.items() if document.model_config.get("serialize_by_alias") else ()
    renamed = tuple((name, field.serialization_alias) for name, field in fields if field.serialization_alias)
    return renamed, tuple(document.__pydantic_decorators__.model_serializers)


def _written(piece: Any) -> Any:
    """What stands in a document as `model_dump(mode="json")` gives it, the documents in it left to be written next."""
    if type(piece) is date:
        return piece.isoformat()
    kind: type[Document] = type(piece)
    renamed, rules = _form(kind)
    if not renamed and not rules:
        return piece.__dict__

    def fields(one: Document) -> dict[str, Any]:
        told = {**one.__dict__}
        for name, alias in renamed:
            told[alias] = told.pop(name)
        return told

    for rule in rules:
        return getattr(piece, rule)(fields)
    return fields(piece)


_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), allow_nan=False, check_circular=False, default=_written
)
