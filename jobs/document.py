"""The frozen form of every document that passes between parts."""

from __future__ import annotations

import hashlib
import json
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
        _put(row, "__dict__", fields)
        _put_told(row, _NOT_KEPT)
        _put_extra(row, None)
        _put_private(row, None)
        return row

    def canonical(self) -> str:
        """JSON with sorted keys: the form that is stored and digested."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def digest(self) -> str:
        """sha256 of `canonical()`, hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()
