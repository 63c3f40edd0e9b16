"""A device on the host: fake addresses, real bytes, real tokens.

Physical granules are poisoned (0xFF: NaN in float scales and zero points) when they are freshly mapped, so that a read
before the fill shows in the logits. A decoded weight is kept per key and used only while the bytes at its addresses are
that key's, whole: poison, a partial or a foreign fill decode the real bytes. Time is a modelled clock on a profile.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.counters import Tally
from engine.device.base import H200, Granule, Launch, Placed, Profile, Recorded, Tag
from engine.device.spans import Spans
from engine.errors import DeviceFailure
from engine.graph import DTYPES

POISON = 0xFF
DEFAULT_GRANULE_BYTES = 2 << 20
_FIRST_ADDRESS = 1 << 44


@dataclass(slots=True)
class _Region:
    """A stretch of addresses: plain memory (`granules` None) or a reservation with one slot a granule."""

    address: int
    backing: NDArray[np.uint8]
    what: str
    granules: list[Granule | None] | None
    spans: Spans = field(default_factory=Spans)

    @property
    def end(self) -> int:
        return self.address + self.backing.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class SimGraph:
    """A recording: launches with the addresses they had."""

    launches: tuple[Launch, ...]

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.launches)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A launch resolved to arrays: views by operand, caches, and each key's region, span and whether it decodes."""

    kernel: kernels.KernelDef
    form: int
    """Number of kernel, scalars, weight types and shapes: equal bytes decode to equal numbers in one form only."""
    views: dict[str, NDArray[Any]]
    caches: tuple[Placed, ...]
    keys: tuple[tuple[_Region, int, int, bool], ...]
    key_bytes: int


class SimDevice:
    """The simulated device; implements `Device`."""

    kind = "sim"
    driver = "sim 1"

    def __init__(self, uuid: str = "SIM-0", granule_bytes: int | None = None, profile: Profile = H200) -> None:
        self.uuid = uuid
        self.name = "simulated card"
        self.granule_bytes = granule_bytes or DEFAULT_GRANULE_BYTES
        self.profile = profile
        self.tally = Tally()
        self._regions: dict[int, _Region] = {}
        self._addresses: list[int] = []  # of regions, ascending: new ones always come last
        self._next_address = _FIRST_ADDRESS
        self._serials = count()
        self._live: set[Granule] = set()  # created and not given back
        self._mapped: set[Granule] = set()
        self._ranges: dict[tuple[int, int], int] = {}  # address and size of host bytes -> key
        self._recording: list[Launch] | None = None
        self._forms: dict[tuple[Any, ...], int] = {}
        self._decoded: dict[tuple[int, tuple[int, ...]], NDArray[Any]] = {}
        self._bound: dict[Launch, _Bound] = {}

    # -- addresses and granules

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses for whole granules."""
        granules = -(-nbytes // self.granule_bytes)
        region = self._region(granules * self.granule_bytes, "reservation", [None] * granules)
        return region.address

    def unreserve(self, address: int) -> None:
        """Give a reservation back."""
        region = self._regions.get(address)
        if region is None or region.granules is None:
            raise DeviceFailure(f"no reservation starts at {address:#x}")
        if any(g is not None for g in region.granules):
            raise DeviceFailure(f"reservation at {address:#x} still has mapped granules")
        self._forget(address)

    def create(self) -> Granule:
        """A physical granule."""
        self.tally.add("vmm_calls")
        granule = Granule(next(self._serials))
        self._live.add(granule)
        return granule

    def destroy(self, granule: Granule) -> None:
        """Give a physical granule back."""
        if granule in self._mapped:
            raise DeviceFailure(f"granule {granule.serial} is released while mapped")
        self._check_live(granule)
        self._live.discard(granule)
        self.tally.add("vmm_calls")

    def map(self, address: int, granule: Granule) -> None:
        """Map and set access: two calls. The granule's bytes are poison until they are filled."""
        region, slot = self._slot(address)
        self._check_live(granule)
        assert region.granules is not None
        if region.granules[slot] is not None or granule in self._mapped:
            raise DeviceFailure(f"granule {granule.serial} cannot be mapped at {address:#x}: one of them is in use")
        region.granules[slot] = granule
        self._mapped.add(granule)
        offset = address - region.address
        region.backing[offset : offset + self.granule_bytes] = POISON
        self.tally.add("vmm_calls", 2)
        self._model(self.profile.map_ns)

    def unmap(self, address: int) -> Granule:
        """Unmap; what the addresses held is gone."""
        region, slot = self._slot(address)
        assert region.granules is not None
        granule = region.granules[slot]
        if granule is None:
            raise DeviceFailure(f"nothing is mapped at {address:#x}")
        region.granules[slot] = None
        self._mapped.discard(granule)
        region.spans.drop(address, address + self.granule_bytes)
        self.tally.add("vmm_calls")
        return granule

    # -- plain memory

    def alloc(self, nbytes: int, what: str) -> int:
        """Plain memory, zero-filled nowhere: its bytes are poison until written."""
        region = self._region(max(nbytes, 1), what, None)
        region.backing[...] = POISON
        self.tally.add("alloc_calls")
        return region.address

    def free(self, address: int) -> None:
        """Give plain memory back."""
        region = self._regions.get(address)
        if region is None or region.granules is not None:
            raise DeviceFailure(f"no plain memory starts at {address:#x}")
        self._forget(address)

    # -- data

    @property
    def mapped_bytes(self) -> int:
        """Bytes of granules mapped now."""
        return len(self._mapped) * self.granule_bytes

    def host_range(self, key: int, source: NDArray[Any]) -> None:
        """Remember where a key's bytes lie: only a copy from there fills that key."""
        self._ranges[source.ctypes.data, source.nbytes] = key

    def copy_in(self, address: int, source: NDArray[Any]) -> None:
        """Copy host bytes in; a copy from a known range leaves that key there, any other leaves nobody."""
        key = self._ranges.get((source.ctypes.data, source.nbytes)) if source.nbytes else None
        flat = source.reshape(-1).view(np.uint8)
        region, offset = self._range(address, flat.nbytes, "copy to")
        region.backing[offset : offset + flat.nbytes] = flat
        if key is None:
            region.spans.drop(address, address + flat.nbytes)
            return
        region.spans.put(address, address + flat.nbytes, Tag(key))
        self.tally.add("device_htod_bytes", flat.nbytes)
        self._model(flat.nbytes / self.profile.link_bytes_per_s * 1e9)

    def copy_out(self, address: int, nbytes: int) -> bytes:
        """Read device bytes on the host."""
        region, offset = self._range(address, nbytes, "copy from")
        self.tally.add("host_syncs")
        return region.backing[offset : offset + nbytes].tobytes()

    def poison(self, address: int, nbytes: int) -> None:
        """Fill dead bytes with poison, so that whoever still reads them is found out."""
        self.fill(address, nbytes, POISON)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set device bytes; a range that held a key no longer does."""
        region, offset = self._range(address, nbytes, "fill of")
        region.backing[offset : offset + nbytes] = byte
        region.spans.drop(address, address + nbytes)

    # -- execution

    def launch(self, launch: Launch) -> None:
        """Run a step now, or record it."""
        if self._recording is not None:
            self._recording.append(launch)
            return
        self.tally.add("eager_launches")
        self._model(self.profile.launch_ns)
        self._run(launch)

    def begin_capture(self) -> None:
        """Open a recording."""
        if self._recording is not None:
            raise DeviceFailure("a capture is open already")
        self._recording = []

    def end_capture(self) -> SimGraph:
        """Close the recording."""
        if self._recording is None:
            raise DeviceFailure("no capture is open")
        graph = SimGraph(tuple(self._recording))
        self._recording = None
        return graph

    def replay(self, graph: Recorded) -> None:
        """Run a recording against what is mapped now."""
        if not isinstance(graph, SimGraph) or self._recording is not None:
            raise DeviceFailure("a replay needs a recording of this device and no open capture")
        for launch in graph.launches:
            self._model(self.profile.node_ns)
            self._run(launch)

    def _run(self, launch: Launch) -> None:
        bound = self._bound.get(launch)
        if bound is None:
            bound = self._bound[launch] = self._resolve(launch)
        self.tally.add("kernel_runs")
        for placed in bound.caches:
            self._range(placed.address, _kv_bytes(placed, bound.views), f"{launch.step.node}: cache of")
        tags: list[int] = []
        for region, start, end, decoded in bound.keys:
            tag = region.spans.whole(start, end)
            if tag is None:  # no whole key: mapped at all?
                self._range(start, end - start, f"{launch.step.node}: read of")
            if decoded:
                tags.append(-1 if tag is None else tag.key)
        self._model(bound.key_bytes / self.profile.memory_bytes_per_s * 1e9)
        arrays = bound.views
        with np.errstate(all="ignore"):  # what is not finite shows in the logits, and is said there
            if bound.kernel.decode is not None:
                arrays = {**arrays, "decoded": self._decode(bound, launch.step.params, tuple(tags))}
            bound.kernel.run(arrays, launch.step.params)

    def _resolve(self, launch: Launch) -> _Bound:
        kernel = kernels.get(launch.step.kernel)
        keys = [p for p in launch.placed if p.operand.ref.kind == "key"]
        weights = [p.operand for p in keys if p.operand.name in kernel.weights]
        scalars = tuple(sorted(launch.step.params.items()))
        form = (kernel.name, scalars, tuple((o.name, o.ref.dtype, o.ref.shape) for o in weights))
        return _Bound(
            kernel,
            self._forms.setdefault(form, len(self._forms)),
            {p.operand.name: self._view(p) for p in launch.placed},
            tuple(p for p in launch.placed if p.operand.ref.kind in ("kv_key", "kv_value")),
            tuple(
                (self._find(p.address)[0], p.address, p.address + p.nbytes, p.operand.name in kernel.weights)
                for p in keys
            ),
            sum(p.nbytes for p in keys),
        )

    def _decode(self, bound: _Bound, params: kernels.Params, tags: tuple[int, ...]) -> NDArray[Any]:
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
        dtype = DTYPES[ref.dtype]
        region, offset = self._find(placed.address)
        raw = region.backing[offset : offset + placed.nbytes].view(dtype)
        if ref.kind in ("kv_key", "kv_value"):
            return raw.reshape(-1, *ref.shape[1:])
        return raw.reshape(ref.shape)

    # -- bookkeeping

    def _region(self, nbytes: int, what: str, granules: list[Granule | None] | None) -> _Region:
        region = _Region(self._next_address, np.empty(nbytes, np.uint8), what, granules)
        span = -(-nbytes // self.granule_bytes) + 1  # one granule of nothing between regions catches overruns
        self._next_address += span * self.granule_bytes
        self._regions[region.address] = region
        self._addresses.append(region.address)
        return region

    def _forget(self, address: int) -> None:
        del self._regions[address]
        self._addresses.remove(address)
        self._bound.clear()  # views into what was freed must not be used again

    def _find(self, address: int) -> tuple[_Region, int]:
        at = bisect_right(self._addresses, address) - 1
        region = self._regions[self._addresses[at]] if at >= 0 else None
        if region is None or address >= region.end:
            raise DeviceFailure(f"address {address:#x} belongs to nothing")
        return region, address - region.address

    def _range(self, address: int, nbytes: int, what: str) -> tuple[_Region, int]:
        region, offset = self._find(address)
        if address + nbytes > region.end:
            raise DeviceFailure(f"{what} {nbytes} bytes at {address:#x} runs past {region.what}")
        if region.granules is not None:
            first, last = offset // self.granule_bytes, (offset + max(nbytes, 1) - 1) // self.granule_bytes
            if None in region.granules[first : last + 1]:
                raise DeviceFailure(f"{what} {nbytes} bytes at {address:#x} touches unmapped addresses")
        return region, offset

    def _slot(self, address: int) -> tuple[_Region, int]:
        region, offset = self._find(address)
        if region.granules is None or offset % self.granule_bytes:
            raise DeviceFailure(f"{address:#x} is no granule of a reservation")
        return region, offset // self.granule_bytes

    def _check_live(self, granule: Granule) -> None:
        if granule not in self._live:
            raise DeviceFailure(f"granule {granule.serial} is none of this device's, or was given back")

    def _model(self, ns: float) -> None:
        self.tally.add("modelled_ns", round(ns))


def _kv_bytes(placed: Placed, views: dict[str, NDArray[Any]]) -> int:
    """Bytes of the cache that a step touches: the cached positions and the new ones."""
    row = int(views[placed.operand.name][:1].nbytes)
    new = int(views["query"].size // views["query"].shape[-1])
    return (int(views["length"][0]) + new) * row
