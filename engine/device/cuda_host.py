"""Host memory that the card reads: mapped weight files registered in place, everything else copied into pinned memory.

Plain pages are never a copy's source: a graph records them without complaint and then runs at a quarter of the link.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.device.cuda_driver import call
from engine.errors import DeviceFailure, OutOfMemory

_PORTABLE, _MAPPED, _READ_ONLY = 1, 2, 8
_PAGE = mmap.PAGESIZE


class HostMemory:
    """Pinned and registered ranges of one device object, and where the card sees them."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._files: dict[int, tuple[int, Any]] = {}  # start of a registered mapping -> card's address, and its owner
        self._copies: dict[tuple[int, int], tuple[int, int, Any]] = {}  # array -> host address, card's address, owner
        self.registered_bytes = 0
        self.copied_bytes = 0

    def pin(self, source: NDArray[Any]) -> tuple[int, int]:
        """Host address and card's address of these bytes, in memory that stays pinned until `release`."""
        own = source.ctypes.data
        mapping = _mapping(source)
        if mapping is not None:
            start, nbytes = mapping
            if start not in self._files:
                self._files[start] = self._register(start, nbytes), source
            address = self._files[start][0]
            if address:
                return own, address + own - start
        name = (own, source.nbytes)
        if name not in self._copies:
            self._copies[name] = (*self._copy(source), source)
        host, address, _ = self._copies[name]
        return host, address

    def staging(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Pinned memory for what goes to and fro, with its bytes; the card's address first."""
        host = int(call(self._driver.cuMemHostAlloc, nbytes, _PORTABLE | _MAPPED))
        view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))
        address = int(call(self._driver.cuMemHostGetDevicePointer, host, 0))
        self._copies[host, -nbytes] = host, address, view
        return address, view

    def release(self) -> None:
        """Unpin everything; nothing may be reading it."""
        for start, (address, _) in self._files.items():
            if address:
                call(self._driver.cuMemHostUnregister, start)
        for host, _, _ in self._copies.values():
            call(self._driver.cuMemFreeHost, host)
        self._files.clear()
        self._copies.clear()

    def _register(self, start: int, nbytes: int) -> int:
        """The card's address of a mapping registered read-only; 0 where this host cannot, and it is copied instead."""
        whole = -(-nbytes // _PAGE) * _PAGE
        try:
            call(self._driver.cuMemHostRegister, start, whole, _PORTABLE | _MAPPED | _READ_ONLY)
        except (DeviceFailure, OutOfMemory):  # the latter: more than this host may lock
            return 0
        self.registered_bytes += nbytes
        return int(call(self._driver.cuMemHostGetDevicePointer, start, 0))

    def _copy(self, source: NDArray[Any]) -> tuple[int, int]:
        nbytes = max(source.nbytes, 1)
        host = int(call(self._driver.cuMemHostAlloc, nbytes, _PORTABLE | _MAPPED))
        ctypes.memmove(host, np.ascontiguousarray(source).ctypes.data, source.nbytes)
        self.copied_bytes += source.nbytes
        return host, int(call(self._driver.cuMemHostGetDevicePointer, host, 0))


def _mapping(source: NDArray[Any]) -> tuple[int, int] | None:
    """Start and bytes of the file mapping that an array is a view of, or None."""
    here: Any = source
    while isinstance(here, np.ndarray):
        here = here.base
    if not isinstance(here, mmap.mmap):
        return None
    return int(np.frombuffer(here, np.uint8).ctypes.data), len(here)
