"""A device on the host without bytes: every address, granule, span, tag and counter of the simulator, no arithmetic.

Pager, ledger and capture run on it as on any other device, on models of any size. Only the control block has bytes,
since the count of cached positions stands there. A step runs where all its operands are controls, as `advance`; what
any other step would write to a control is 0, a placeholder that means nothing. Bytes cannot show here that they are
wrong, so a step that reads a key which is not there whole is a failure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.device.base import CONTROL, H200, Launch, Placed, Profile, Tag
from engine.device.book import BookedDevice, Reads, Region
from engine.errors import DeviceFailure
from engine.graph import DTYPES
from engine.routing import ROUTED

KIND = "plan"


class PlanDevice(BookedDevice[None]):
    """The device of plan-only runs; implements `Device`."""

    kind = KIND
    driver = "plan 1"
    name = "no device, no arithmetic"

    def __init__(self, uuid: str = "PLAN-0", granule_bytes: int | None = None, profile: Profile = H200) -> None:
        super().__init__(uuid, granule_bytes, profile)
        self._control: dict[int, NDArray[np.uint8]] = {}  # of control blocks, by address

    def _begin(self, region: Region) -> None:
        if region.what == CONTROL:
            self._control[region.address] = np.empty(region.nbytes, np.uint8)

    def _end(self, region: Region) -> None:
        self._control.pop(region.address, None)

    def _put(self, region: Region, offset: int, source: NDArray[np.uint8]) -> None:
        if region.address in self._control:
            self._control[region.address][offset : offset + source.nbytes] = source

    def _get(self, region: Region, offset: int, nbytes: int) -> bytes:
        if region.address not in self._control:
            raise DeviceFailure(f"{region.what} has no bytes: this device computes nothing")
        return self._control[region.address][offset : offset + nbytes].tobytes()

    def _copy(self, source: Region, offset: int, target: Region, at: int, nbytes: int) -> None:
        assert source.address not in self._control, "controls are written, not copied"

    def _set(self, region: Region, offset: int, nbytes: int, byte: int) -> None:
        if region.address in self._control:
            self._control[region.address][offset : offset + nbytes] = byte

    def _resolve(self, launch: Launch) -> None:
        kernels.get(launch.step.kernel)  # a step without a kernel is found out here too

    def _compute(self, launch: Launch, bound: None, reads: Reads, tags: tuple[Tag | None, ...]) -> None:
        for read, tag in zip(reads.keys, tags, strict=True):
            if tag is None or tag.key != read.key:
                held = "nothing whole" if tag is None else f"key {tag.key}"
                raise DeviceFailure(f"{launch.step.node}: key {read.key} is read where there is {held}")
        controls = [p for p in launch.placed if p.operand.ref.kind == "control"]
        if len(controls) == len(launch.placed):
            arrays = {p.operand.name: self._view(p) for p in controls}
            kernels.get(launch.step.kernel).run(arrays, launch.step.params)
            return
        for placed in controls:
            if placed.operand.access != "r" and placed.operand.name != ROUTED:  # those stand there where they are known
                self._view(placed)[...] = 0

    def _view(self, placed: Placed) -> NDArray[np.generic]:
        region, offset = self._find(placed.address)
        raw = self._control[region.address][offset : offset + placed.nbytes]
        return raw.view(DTYPES[placed.operand.ref.dtype]).reshape(placed.operand.ref.shape)
