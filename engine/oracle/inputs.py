"""What an operator of the reference is given: a node's inputs, widened to float32 as they are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.graph import Node, Weight

Array = NDArray[Any]
HALVES = ("float16", "bfloat16")


class Unserved(Exception):
    """A node's reason for not being computed."""


@dataclass(frozen=True, slots=True)
class Start:
    """A cache or state at the start of a sequence: nothing is in it. `dtype` is what it would be kept in."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Picked:
    """One of two tables for each position, by what held in the call that fed it."""

    above: Array
    pick: NDArray[np.bool_]
    below: Array


@dataclass(frozen=True, slots=True)
class LastRow:
    """Each call's last row, of an activation with a row for every position: the head sees all of them here."""

    rows: Array


@dataclass(frozen=True, slots=True)
class Coded:
    """An initialiser behind a DequantizeLinear, left as codes until it is used."""

    codes: Weight
    floats: Callable[[], Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values."""
        return self.codes.shape


Value = Array | Weight | Start | Picked | LastRow | Coded


@dataclass(frozen=True, slots=True)
class Inputs:
    """A node with its inputs' values, in a sequence of so many positions."""

    node: Node
    values: tuple[Value | None, ...]
    positions: int

    def value(self, index: int) -> Value | None:
        """Input `index` as it is, None where absent."""
        return self.values[index] if index < len(self.values) else None

    def has(self, index: int) -> bool:
        """Whether input `index` is given."""
        return self.value(index) is not None

    def stored(self, index: int) -> Array:
        """Input `index` as an array of the type it is stored in; an initialiser is a view of its file."""
        value = self.value(index)
        if isinstance(value, Coded):
            return value.floats()
        if isinstance(value, Weight):
            return value.array()
        if not isinstance(value, np.ndarray):
            raise Unserved(f"input {index} is {type(value).__name__}, not a tensor")
        return value

    def __getitem__(self, index: int) -> Array:
        """Input `index`, half types widened to float32."""
        return widened(self.stored(index))

    def floats(self, index: int) -> Array:
        """Input `index` in float32, whatever it is stored in."""
        return np.asarray(self.stored(index), np.float32)

    def start(self, index: int) -> Start:
        """Input `index` as a cache or state that a sequence starts with. Raises Unserved for any other."""
        value = self.value(index)
        if not isinstance(value, Start):
            raise Unserved(f"input {index} is not a cache or state of the decoder")
        return value

    def begun(self, index: int) -> Start | None:
        """Input `index` as what a sequence starts with, or None where absent: either way there is nothing before it."""
        return self.start(index) if self.has(index) else None

    def integers(self, index: int) -> list[int] | None:
        """Input `index` as whole numbers, None where absent."""
        return None if not self.has(index) else [int(n) for n in self.stored(index).reshape(-1)]

    def whole(self, name: str, default: int) -> int:
        """An attribute that is a whole number."""
        return int(self.node.attributes.get(name, default))

    def number(self, name: str, default: float) -> float:
        """An attribute that is a number."""
        return float(self.node.attributes.get(name, default))

    def only(self, name: str, *served: Any) -> None:
        """Refuse an attribute that has another value than those; absent is served."""
        value = self.node.attributes.get(name, served[0])
        if value not in served:
            raise Unserved(f"{name} = {value!r}")


Computed = Value | tuple[Value | None, ...]
Rule = Callable[[Inputs], Computed]
RULES: dict[tuple[str, str], Rule] = {}
MICROSOFT = "com.microsoft"


def rule(name: str, domain: str = "") -> Callable[[Rule], Rule]:
    """Register the meaning of an operator."""

    def register(meaning: Rule) -> Rule:
        assert (domain, name) not in RULES, (domain, name)
        RULES[domain, name] = meaning
        return meaning

    return register


def widened(array: Array) -> Array:
    """float16 and bfloat16 as float32; every other type as it is."""
    return array.astype(np.float32) if str(array.dtype) in HALVES else array


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow on either side."""
    small = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1, small) / (1 + small), x.dtype)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), x.dtype)


def shape_like(extents: tuple[int, ...], target: list[int], keep_zero: bool) -> tuple[int, ...]:
    """A Reshape's target with 0 (the same extent) and -1 (the rest) filled in."""
    made = [extents[i] if d == 0 and not keep_zero else d for i, d in enumerate(target)]
    if -1 in made:
        rest = math.prod(d for d in made if d != -1)
        made[made.index(-1)] = math.prod(extents) // max(rest, 1)
    return tuple(made)
