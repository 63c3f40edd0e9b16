"""A device on the host: fake addresses, real bytes, real tokens.

Physical granules are poisoned (0xFF: NaN in float scales and zero points) when they are freshly mapped, so that a read
before the fill shows in the logits. A decoded weight is kept per key and used only while the bytes at its addresses are
that key's, whole: poison, a partial or a foreign fill decode the real bytes. Time is a modelled clock on a profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from engine import kernels
from engine.device.base import H200, Launch, Placed, Profile, Tag
from engine.device.book import DEFAULT_GRANULE_BYTES, POISON, BookedDevice, Reads, Region
from engine.device.recording import HostGraph
from engine.graph import DTYPES

__all__ = ["DEFAULT_GRANULE_BYTES", "POISON", "SimDevice", "SimGraph"]

SimGraph = HostGraph


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A launch resolved to arrays: its kernel, and a view of memory by operand."""

    kernel: kernels.KernelDef
    form: int
    """Number of kernel, scalars, weight types and shapes: equal bytes decode to equal numbers in one form only."""
    views: dict[str, NDArray[Any]]


class SimDevice(BookedDevice[_Arrays]):
    """The simulated device; implements `Device`."""

    kind = "sim"
    driver = "sim 1"
    name = "simulated card"

    def __init__(self, uuid: str = "SIM-0", granule_bytes: int | None = None, profile: Profile = H200) -> None:
        super().__init__(uuid, granule_bytes, profile)
        self._bytes: dict[int, NDArray[np.uint8]] = {}  # of regions, by address
        self._forms: dict[tuple[Any, ...], int] = {}
        self._decoded: dict[tuple[int, tuple[int, ...]], NDArray[Any]] = {}

    def _begin(self, region: Region) -> None:
        self._bytes[region.address] = np.empty(region.nbytes, np.uint8) if region.host is None else region.host

    def _end(self, region: Region) -> None:
        del self._bytes[region.address]

    def _put(self, region: Region, offset: int, source: NDArray[np.uint8]) -> None:
        self._bytes[region.address][offset : offset + source.nbytes] = source

    def _get(self, region: Region, offset: int, nbytes: int) -> bytes:
        return self._bytes[region.address][offset : offset + nbytes].tobytes()

    def _copy(self, source: Region, offset: int, target: Region, at: int, nbytes: int) -> None:
        self._bytes[target.address][at : at + nbytes] = self._bytes[source.address][offset : offset + nbytes]

    def _set(self, region: Region, offset: int, nbytes: int, byte: int) -> None:
        self._bytes[region.address][offset : offset + nbytes] = byte

    def _resolve(self, launch: Launch) -> _Arrays:
        kernel = kernels.get(launch.step.kernel)
        weights = [p.operand for p in launch.placed if p.operand.ref.kind == "key" and p.operand.name in kernel.weights]
        scalars = tuple(sorted(launch.step.params.items()))
        form = (kernel.name, scalars, tuple((o.name, o.ref.dtype, o.ref.shape) for o in weights))
        views = {p.operand.name: self._view(p) for p in launch.placed}
        return _Arrays(kernel, self._forms.setdefault(form, len(self._forms)), views)

    def _compute(self, launch: Launch, bound: _Arrays, reads: Reads, tags: tuple[Tag | None, ...]) -> None:
        arrays = bound.views
        with np.errstate(all="ignore"):  # what is not finite shows in the logits, and is said there
            if bound.kernel.decode is not None:
                decoded = (t for r, t in zip(reads.keys, tags, strict=True) if r.operand in bound.kernel.weights)
                known = tuple(-1 if tag is None else tag.key for tag in decoded)
                arrays = {**arrays, "decoded": self._decode(bound, launch.step.params, known)}
            bound.kernel.run(arrays, launch.step.params)

    def _decode(self, bound: _Arrays, params: kernels.Params, tags: tuple[int, ...]) -> NDArray[Any]:
        assert bound.kernel.decode is not None
        if -1 in tags:  # poison, partial or foreign bytes: what is there counts, not what should be
            return bound.kernel.decode(bound.views, params)
        known = (bound.form, tags)
        if known not in self._decoded:
            self._decoded[known] = bound.kernel.decode(bound.views, params)
        return self._decoded[known]

    def _view(self, placed: Placed) -> NDArray[Any]:
        ref = placed.operand.ref
        if placed.host is not None:
            return placed.host.reshape(ref.shape)
        region, offset = self._find(placed.address)
        raw = self._bytes[region.address][offset : offset + placed.nbytes].view(DTYPES[ref.dtype])
        if placed.placement is not None:  # positions, heads, elements, however far apart they lie
            return as_strided(raw, placed.placement.shape, placed.placement.strides)
        return raw.reshape(ref.shape)
