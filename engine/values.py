"""What a name of the graph stands for while a plan is being made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from engine.graph import Weight
from engine.plan import Ref


@dataclass(frozen=True, slots=True)
class Tensor:
    """An activation: a view of a buffer, of contiguous elements."""

    ref: Ref

    @property
    def shape(self) -> tuple[int, ...]:
        """Its concrete shape."""
        return self.ref.shape

    @property
    def dtype(self) -> str:
        """Its element type."""
        return self.ref.dtype


@dataclass(frozen=True, slots=True)
class WeightValue:
    """An initialiser, perhaps seen through a Reshape: same bytes, same key."""

    weight: Weight
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Its element type."""
        return self.weight.dtype


@dataclass(frozen=True, slots=True)
class Transposed:
    """A float matrix [N, K] read as [K, N]: products take it as it lies, and whoever else asks gets a copy."""

    held: WeightValue


@dataclass(frozen=True, slots=True)
class Const:
    """A value known at build."""

    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> str:
        """Its element type."""
        return str(self.array.dtype)


@dataclass(frozen=True, slots=True)
class Dequantized:
    """An initialiser behind a DequantizeLinear: codes, scales and zero points, in blocks along `axis`."""

    codes: WeightValue
    scales: WeightValue
    zero_points: WeightValue | None
    axis: int
    block: int


@dataclass(frozen=True, slots=True)
class LengthValue:
    """A number that depends on the sequence's total length alone: total + `offset`."""

    offset: int


@dataclass(frozen=True, slots=True)
class Switched:
    """A number that the total length decides: `above` where it is above `threshold`, else `below`; 1 and 0 of tests."""

    threshold: int
    above: int
    below: int


@dataclass(frozen=True, slots=True)
class ByLength:
    """One of two initialisers, by whether the total length is above `threshold`."""

    threshold: int
    above: WeightValue
    below: WeightValue


@dataclass(frozen=True, slots=True)
class MaskShape:
    """Shape of the attention mask, [1, total]."""


@dataclass(frozen=True, slots=True)
class Mask:
    """The attention mask itself: all ones, so its sum is the total length."""


@dataclass(frozen=True, slots=True)
class Ids:
    """The token ids that go in, [1, rows]."""


@dataclass(frozen=True, slots=True)
class Positions:
    """Positions of the tokens that go in, counted from the cached length, repeated to `shape` (last axis: rows).

    `shift` is added to all of them.
    """

    shape: tuple[int, ...]
    shift: Switched | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """A layer's cached keys or values; `layer` counts the layers that have a cache."""

    layer: int
    what: str  # "key" or "value"


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent or convolution state: kept in float32, zero at the start of each sequence, updated in place."""

    index: int
    shape: tuple[int, ...]


LoweredValue = (
    Tensor
    | WeightValue
    | Transposed
    | Const
    | Dequantized
    | LengthValue
    | Switched
    | ByLength
    | MaskShape
    | Mask
    | Ids
    | Positions
    | Past
    | State
)


class Refusal(Exception):
    """An op's reason for not serving a node; collected, so that all reasons come at once."""


class Absent(Refusal):
    """An input is produced by nothing that is served."""

    def __init__(self, name: str) -> None:
        super().__init__(f"input {name!r} is produced by nothing that is served")
        self.name = name


class NotKnown(Refusal):
    """An input would have to be known at build, and is not."""

    def __init__(self, name: str) -> None:
        super().__init__(f"input {name!r} is not known at build")
        self.name = name
