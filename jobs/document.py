"""The frozen form of every document that passes between parts."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict

_NOT_KEPT: set[str] = set()


class Document(BaseModel):
    """A frozen piece of a document; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def model_post_init(self, _context: Any) -> None:
        """Forget which fields were told: nobody asks, and the set of them is more than half of a row's 1.3 kB."""
        object.__setattr__(self, "__pydantic_fields_set__", _NOT_KEPT)

    def canonical(self) -> str:
        """JSON with sorted keys: the form that is stored and digested."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def digest(self) -> str:
        """sha256 of `canonical()`, hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()
