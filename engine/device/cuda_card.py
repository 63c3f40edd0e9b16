"""One card of this process: its context, what it is, and the kernels loaded there."""

from __future__ import annotations

import uuid as uuids
from functools import cache
from typing import Any

from engine.device.cuda_compile import CubinCache, cache_folder
from engine.device.cuda_driver import bindings, call
from engine.errors import BadRequest, DeviceFailure
from engine.kernels.cuda import Variant

_PLAIN_SHARED_BYTES = 48 << 10
"""Shared memory that a block may ask for without being allowed to first."""


class Card:
    """A card by its number among the visible ones."""

    def __init__(self, ordinal: int) -> None:
        driver, _ = bindings()
        self.driver = driver
        self.ordinal = ordinal
        self.device = call(driver.cuDeviceGet, ordinal)
        self.name = call(driver.cuDeviceGetName, 96, self.device).split(b"\0")[0].decode()
        self.uuid = f"GPU-{uuids.UUID(bytes=bytes(call(driver.cuDeviceGetUuid, self.device).bytes))}"
        version = int(call(driver.cuDriverGetVersion))
        self.version = f"CUDA {version // 1000}.{version % 1000 // 10}"
        self._context = call(driver.cuDevicePrimaryCtxRetain, self.device)
        self.enter()
        attribute = driver.CUdevice_attribute
        major, minor = (
            int(call(driver.cuDeviceGetAttribute, getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), self.device))
            for name in ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
        )
        self.code = CubinCache(cache_folder(), f"sm_{major}{minor}")
        self.starts_early = major >= 9
        """Whether a kernel may be started before the one in front of it ends (programmatic dependent launch)."""
        self._functions: dict[Variant, Any] = {}
        self._allowed: dict[Variant, int] = {}

    def enter(self) -> None:
        """Make the card's context this thread's."""
        call(self.driver.cuCtxSetCurrent, self._context)

    def load(self, variant: Variant, shared_bytes: int = 0) -> Any:
        """The kernel of a variant, compiled and loaded once, allowed so many bytes of shared memory a block."""
        driver = self.driver
        if variant not in self._functions:
            module = call(driver.cuModuleLoadData, self.code.get(variant))
            self._functions[variant] = call(driver.cuModuleGetFunction, module, variant.function.encode())
        function = self._functions[variant]
        if shared_bytes > max(_PLAIN_SHARED_BYTES, self._allowed.get(variant, 0)):
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(driver.cuFuncSetAttribute, function, limit, shared_bytes)
            self._allowed[variant] = shared_bytes
        return function


def find_card(uuid: str | None) -> Card:
    """The visible card of that UUID, or the first. Raises BadRequest where there is none."""
    driver, _ = bindings()
    _start()
    count = int(call(driver.cuDeviceGetCount))
    if not count:
        raise BadRequest("device cuda: no card is visible", "check CUDA_VISIBLE_DEVICES, or use --device sim")
    if uuid is None:
        return _card(0)
    seen = []
    for ordinal in range(count):
        device = call(driver.cuDeviceGet, ordinal)
        seen.append(f"GPU-{uuids.UUID(bytes=bytes(call(driver.cuDeviceGetUuid, device).bytes))}")
        if seen[-1] == uuid:
            return _card(ordinal)
    raise BadRequest(f"card {uuid} is not visible", f"visible: {', '.join(seen)}")


def granule_property(driver: Any, ordinal: int) -> tuple[Any, Any]:
    """What granules are made as, and who may use them: this card, reading and writing."""
    made, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = ordinal
    access.location = made.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made, access


@cache
def _card(ordinal: int) -> Card:
    return Card(ordinal)


@cache
def _start() -> None:
    driver, _ = bindings()
    try:
        call(driver.cuInit, 0)
    except DeviceFailure as error:
        raise BadRequest(
            f"device cuda: the driver does not start: {error}", "use --device sim, or a GPU host"
        ) from error
