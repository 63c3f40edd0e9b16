"""Kernels: each with its NumPy reference, which the simulator runs and device kernels are held against.

Compute is in float32; float16 and bfloat16 results are rounded once, where a kernel writes its output. The order of
every sum depends on op, dtype and logical length only: rows are computed one at a time by the one-row form, so that a
token's numbers do not depend on how many came with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from engine.kernels.cuda import CudaForm

Array = NDArray[Any]
Arrays = Mapping[str, Array]
Params = Mapping[str, Any]

_FAMILIES = (
    "attention",
    "delta",
    "elementwise",
    "embedding",
    "linear",
    "matmul",
    "mixture",
    "moe",
    "movement",
    "nbits",
    "norm",
    "reduce",
    "rotary",
    "sampling",
    "scaled_attention",
)
_KERNELS: dict[str, KernelDef] = {}


@dataclass(frozen=True, slots=True)
class KernelDef:
    """A kernel: `run` writes its outputs in place.

    `weights` are operands that `decode` turns into one float32 array, handed to `run` as "decoded": what a device
    kernel would decode on the fly, kept apart here so that the simulator may keep it beside the bytes it came from.
    `cuda` is its form on a card; a kernel without one is refused there. `behind` is what is launched behind it, where
    one launch would have to wait for all of its own blocks; operands are the same ones.
    """

    name: str
    run: Callable[[Arrays, Params], None]
    weights: tuple[str, ...] = ()
    decode: Callable[[Arrays, Params], Array] | None = None
    cuda: CudaForm | None = None
    behind: CudaForm | None = None

    @property
    def forms(self) -> tuple[CudaForm, ...]:
        """What a card launches for one step, in order."""
        return tuple(form for form in (self.cuda, self.behind) if form is not None)

    @property
    def launches(self) -> int:
        """How many launches a step is, on whatever device."""
        return max(1, len(self.forms))


def define(kernel: KernelDef) -> KernelDef:
    """Register a kernel under its name."""
    assert kernel.name not in _KERNELS, kernel.name
    _KERNELS[kernel.name] = kernel
    return kernel


@cache
def get(name: str) -> KernelDef:
    """The kernel of that name."""
    for family in _FAMILIES:
        import_module(f"engine.kernels.{family}")
    return _KERNELS[name]
