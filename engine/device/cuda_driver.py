"""The one place where a driver or compiler call is made and its answer is checked."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from engine.errors import BadRequest, DeviceFailure, OutOfMemory

_INSTALL = "install the cuda13 or cuda12 extra on a host with an NVIDIA driver, or use --device sim"


def bindings() -> tuple[ModuleType, ModuleType]:
    """The driver's and the compiler's bindings. Raises BadRequest where cuda-python is not installed."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise BadRequest(f"device cuda needs cuda-python, which is missing: {error}", _INSTALL) from error
    return driver, nvrtc


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns after its code. Raises OutOfMemory or DeviceFailure with the call's and the code's names."""
    try:
        code, *values = function(*arguments)
    except RuntimeError as error:  # the library behind the binding cannot be loaded
        raise BadRequest(f"device cuda: {function.__name__}: {str(error).splitlines()[0]}", _INSTALL) from error
    if int(code) != 0:
        name = getattr(code, "name", str(code))
        if name.endswith("OUT_OF_MEMORY"):
            raise OutOfMemory(f"the card ran out of memory: {function.__name__}: {name}", "use a smaller budget")
        raise DeviceFailure(f"{function.__name__} failed: {name}")
    return values[0] if len(values) == 1 else tuple(values)
