"""A pytest plugin: every kernel's NumPy reference is replaced by its CUDA form, whatever test runs it.

    python -m pytest -p tests.on_card tests/unit/test_engine_kernels.py        (needs a GPU and cuda-python)

The tests then hold the card against what they hold the reference against: plain float64 arithmetic, the standard's own
cases, a runtime's logits. Operands are copied in, outputs are poisoned before each launch, and copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.device.base import Launch, Placed
from engine.device.book import POISON
from engine.device.cuda import CudaDevice
from engine.plan import Access, Operand, Ref, RefKind, Step

Arrays = Mapping[str, NDArray[Any]]

_UPDATED = ("k_cache", "v_cache", "state")
_WRITTEN = ("y", "sum", "gap", "present", "routed", "scores", "hidden", "share", "parts")


@cache
def card() -> CudaDevice:
    """One device for all tests of a process."""
    return CudaDevice()


def access(kernel: str, name: str) -> Access:
    """What a kernel does with an operand of that name."""
    if name in _UPDATED or (kernel, name) == ("advance", "length"):
        return "rw"
    return "w" if name.startswith(_WRITTEN) or (kernel, name) == ("argmax", "ids") else "r"


def step_of(kernel: str, arrays: Arrays, params: Mapping[str, Any]) -> Step:
    """A step whose operands are these arrays."""
    operands = []
    for name, array in arrays.items():
        if name != "decoded":
            kind: RefKind = "kv_key" if name in ("k_cache", "v_cache") else "buffer"
            ref = Ref(kind, 0, str(array.dtype), array.shape, name)
            operands.append(Operand(name, ref, access(kernel, name)))
    return Step(0, "test", "test", kernel, tuple(operands), params)


def run_on_card(kernel: str) -> Callable[[Arrays, Mapping[str, Any]], None]:
    """The same call as the reference's, answered by the card."""

    def run(arrays: Arrays, params: Mapping[str, Any]) -> None:
        device, step = card(), step_of(kernel, arrays, params)
        device.prepare([step])
        placed = []
        for operand in step.operands:
            array = arrays[operand.name]
            placed.append(Placed(operand, device.alloc(array.nbytes, operand.name), array.nbytes))
            if operand.access == "w":
                device.fill(placed[-1].address, array.nbytes, POISON)
            else:
                device.copy_in(placed[-1].address, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        try:
            device.launch(Launch(step, tuple(placed)))
            for p in placed:
                raw = device.copy_out(p.address, p.nbytes)
                if p.operand.access != "r":
                    array = arrays[p.operand.name]
                    array[...] = np.frombuffer(raw, array.dtype).reshape(array.shape)
        finally:
            for p in placed:
                device.free(p.address)

    return run


def pytest_configure() -> None:
    """Put the card in the references' place, before any test is imported."""
    kernels.get("add")
    for name, kernel in kernels._KERNELS.items():
        kernels._KERNELS[name] = replace(kernel, run=run_on_card(name))
    kernels.get.cache_clear()
