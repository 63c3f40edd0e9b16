"""The frozen form of every document that passes between parts."""

from __future__ import annotations

import hashlib
import json

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """A frozen piece of a document; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def canonical(self) -> str:
        """JSON with sorted keys: the form that is stored and digested."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False)

    def digest(self) -> str:
        """sha256 of `canonical()`, hexadecimal."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()
