"""Types of columns that hold the same in SQLite and in PostgreSQL: clean text, UTC times, strict JSON, arrays."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_core import from_json
from sqlalchemy import Dialect, LargeBinary, Text, TypeDecorator

NOT_STORABLE = re.compile("[\0\ud800-\udfff]")


def clean_text(value: str) -> str:
    """Text that both stores take: NUL and lone surrogates become U+FFFD."""
    return NOT_STORABLE.sub("\ufffd", value)


class Words(TypeDecorator[str]):
    """Text without the two things that PostgreSQL refuses, so that both stores hold the same."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else clean_text(value)


class UtcTime(TypeDecorator[datetime]):
    """An aware datetime, stored as sortable UTC text (SQLite drops zones, so the text carries it)."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        assert value.tzinfo is not None, "a naive time has no place in the store"
        return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def process_result_value(self, value: str | None, dialect: Dialect) -> datetime | None:
        return None if value is None else datetime.strptime(value, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)


class Canonical(str):
    """JSON that is text already, in the form of `StrictJson`."""

    __slots__ = ()


class StrictJson(TypeDecorator[Any]):
    """A JSON document as ASCII text; NaN and infinity raise, so that they are dealt with before."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None or isinstance(value, Canonical):
            return value
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else from_json(value)


class Numbers(TypeDecorator[tuple[Any, ...]]):
    """An array in one cell: little-endian 64-bit integers (`q`) or floats (`d`)."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code

    def process_bind_param(self, value: Sequence[Any] | None, dialect: Dialect) -> bytes | None:
        return None if value is None else struct.pack(f"<{len(value)}{self.code}", *value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> tuple[Any, ...] | None:
        return None if value is None else struct.unpack(f"<{len(value) // 8}{self.code}", value)
