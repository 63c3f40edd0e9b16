"""What an audit finds: which bytes differ, where they stand, and what stands there instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from engine.device.book import POISON

What = Literal["weights", "host bytes", "kv", "state", "logits", "ids", "failure"]
_SHOWN_BYTES = 16
_LEAST_TELLING_BYTES = 8
"""Fewer bytes than these may be zeros, or all ones, by chance."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Difference:
    """Bytes that are not what they should be. `name` is the key's, the state's, or that of a layer's cache."""

    what: What
    name: str
    sequence: int | None = None
    position: int | None = None
    """Of the token that was computed; of a cache, the first position that differs."""
    layer: int | None = None
    step_index: int | None = None
    """The plan's step that reads the key, and its node."""
    node: str = ""
    address: int | None = None
    """Of the first byte that differs."""
    granule_address: int | None = None
    granule_serial: int | None = None
    """None for memory that is no granule."""
    granule_index: int | None = None
    """Counted from the granule in which the key starts."""
    granules: int | None = None
    """Of the key's granules, how many differ."""
    first_byte: int | None = None
    end_byte: int | None = None
    """Range of bytes that differ, from the start of the key, vector, state or row; of a key, in that granule."""
    expected: str = ""
    found: str = ""
    """The first bytes there, in hexadecimal; of ids, the ids."""
    crc32: tuple[str, str] | None = None
    """Of the key's bytes in that granule, expected and found."""
    instead: str = ""

    def line(self) -> dict[str, Any]:
        """As JSON has it: what does not apply is left out, addresses are hexadecimal."""
        made: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None or value == "":
                continue
            made[name] = f"{value:#x}" if name.endswith("address") else list(value) if name == "crc32" else value
        return made

    def __str__(self) -> str:
        parts = [f"{self.what} of {self.name}" if self.what != "failure" else self.name]
        parts += [f"layer {self.layer}"] if self.layer is not None else []
        parts += [f"sequence {self.sequence + 1}"] if self.sequence else []
        parts += [f"position {self.position}"] if self.position is not None else []
        if self.node:
            parts.append(self.node if self.step_index is None else f"step {self.step_index} of the plan, {self.node}")
        if self.first_byte is not None:
            parts.append(f"bytes {self.first_byte} to {self.end_byte}")
        if self.address is not None:
            of = "" if self.granule_serial is None else f", granule {self.granule_serial}"
            more = "" if self.granules is None else f" ({self.granules} of the key's granules differ)"
            parts.append(f"at {self.address:#x}{of}{more}")
        parts += [f"expected {self.expected}, found {self.found}"] if self.expected else []
        parts += [f"there stands {self.instead}"] if self.instead else []
        return "; ".join(parts)


def extent(found: Bytes, expected: Bytes) -> tuple[int, int] | None:
    """First byte that differs and the one after the last; None where all are equal."""
    unequal = np.flatnonzero(found != expected)
    return (int(unequal[0]), int(unequal[-1]) + 1) if unequal.size else None


def shown(raw: Bytes) -> str:
    """The first bytes."""
    return raw[:_SHOWN_BYTES].tobytes().hex()


def plainly(raw: Bytes) -> str:
    """Bytes that say for themselves what they are."""
    if raw.size < _LEAST_TELLING_BYTES:
        return ""
    return {0: "zeros", POISON: "poison"}.get(int(raw[0]), "") if (raw == raw[0]).all() else ""


def granule_of(address: int, granule_bytes: int, serials: Mapping[int, int]) -> dict[str, Any]:
    """Address and serial of the granule there, as fields of a difference."""
    start = address // granule_bytes * granule_bytes
    return {"granule_address": start, "granule_serial": serials.get(start)}
