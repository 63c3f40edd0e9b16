"""The CUDA device: the same verbs on a real card, counted where the driver is called.

Work goes on one stream, in the order in which it was asked for; what is staged goes on a second one, ordered by events.
The host waits in `copy_out` and `sync`, and before memory is taken away: the driver neither waits nor warns when a
granule is unmapped under a running kernel.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.counters import Tally
from engine.device.base import H200, Branch, Event, Fetch, Granule, Launch, Profile, Recorded
from engine.device.cuda_bind import CACHES, TICKETS_BYTES, Binder, Bound
from engine.device.cuda_card import find_card, granule_property
from engine.device.cuda_driver import call
from engine.device.cuda_graph import CudaGraph, OverLink
from engine.device.cuda_host import HostMemory
from engine.device.recording import Act, Mark, Recording, Staged, Wait, check_closed
from engine.errors import BadRequest, DeviceFailure, EngineError, UnsupportedModel
from engine.kernels.cuda import NoForm, prepare
from engine.plan import Step

_NON_BLOCKING = 1  # the stream is not ordered with the legacy one
_UNTIMED = 2  # an event that orders and measures nothing
_STAGING_BYTES = 64 << 10
_LANDING_BYTES = 4 << 10
_FAULT_BYTES = 24  # step, index, elements


@dataclass(slots=True)
class _Landing:
    """Pinned bytes that a fetch goes to, and the event behind it."""

    view: NDArray[np.uint8]
    arrived: Any


class CudaDevice:
    """One card; implements `Device`."""

    kind = "cuda"
    queues = True

    def __init__(self, uuid: str | None = None, granule_bytes: int | None = None, profile: Profile = H200) -> None:
        self._card = card = find_card(uuid)
        self._driver = driver = card.driver
        self.name, self.uuid, self.driver = card.name, card.uuid, card.version
        self.profile = profile
        self.tally = Tally()
        card.enter()
        self._streams: dict[Branch, Any] = {b: call(driver.cuStreamCreate, _NON_BLOCKING) for b in ("compute", "copy")}
        self._stream = self._streams["compute"]
        self._property, self._access = granule_property(driver, card.ordinal)
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        own = int(call(driver.cuMemGetAllocationGranularity, self._property, least))
        self.granule_bytes = granule_bytes or own
        if self.granule_bytes % own:
            raise BadRequest(f"granule {granule_bytes} is no multiple of the card's {own} bytes", "leave it out")
        self._host = HostMemory(driver)
        weakref.finalize(self, self._host.release)
        _, self._staging = self._host.staging(_STAGING_BYTES)
        self._landings = deque(
            _Landing(self._host.staging(_LANDING_BYTES)[1], call(driver.cuEventCreate, _UNTIMED)) for _ in range(2)
        )
        self._fault_address, self._fault = self._host.staging(_FAULT_BYTES)
        self._fault[:] = 0
        self._serials = count()
        self._handles: dict[Granule, Any] = {}
        self._mapped: dict[int, Granule] = {}
        self._reserved: dict[int, int] = {}
        self._plain: set[int] = set()
        self._ranges: dict[tuple[int, int], int] = {}  # address and size of a key's host bytes -> pinned host address
        self._starts: list[tuple[int, int]] = []  # the same ranges, ascending
        self._binder = Binder(card, self._host, profile, self._stream, self._fault_address)
        self._bound: dict[Launch, Bound] = {}
        self._in_flight: list[NDArray[Any]] = []  # pageable sources of copies since the last wait
        self._busy: set[Branch] = set()
        self._behind_kernel = False  # whether the compute stream ends in a kernel
        self._recording: Recording | None = None
        self._node_ns: list[int] = []  # modelled, of each node of the open recording
        self._node_in_place_bytes = 0  # of all of them

    # -- addresses and granules

    @property
    def mapped_bytes(self) -> int:
        """Bytes of granules mapped now."""
        return len(self._mapped) * self.granule_bytes

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses for whole granules."""
        size = max(1, -(-nbytes // self.granule_bytes)) * self.granule_bytes
        address = int(call(self._driver.cuMemAddressReserve, size, self.granule_bytes, 0, 0))
        self._reserved[address] = size
        return address

    def unreserve(self, address: int) -> None:
        """Give a reservation back."""
        size = self._reserved.get(address)
        if size is None:
            raise DeviceFailure(f"no reservation starts at {address:#x}")
        if any(at in self._mapped for at in range(address, address + size, self.granule_bytes)):
            raise DeviceFailure(f"reservation at {address:#x} still has mapped granules")
        call(self._driver.cuMemAddressFree, address, size)
        del self._reserved[address]
        self._bound.clear()  # what was bound to memory that is gone must not be used again

    def create(self) -> Granule:
        """A physical granule."""
        handle = call(self._driver.cuMemCreate, self.granule_bytes, self._property, 0)
        self.tally.add("vmm_calls")
        granule = Granule(next(self._serials))
        self._handles[granule] = handle
        return granule

    def destroy(self, granule: Granule) -> None:
        """Give a physical granule back."""
        if granule in self._mapped.values():
            raise DeviceFailure(f"granule {granule.serial} is released while mapped")
        call(self._driver.cuMemRelease, self._handle(granule))
        self.tally.add("vmm_calls")
        del self._handles[granule]

    def map(self, address: int, granule: Granule) -> None:
        """Map and set access: two calls, undone together where the second fails."""
        handle = self._handle(granule)
        if address in self._mapped or granule in self._mapped.values():
            raise DeviceFailure(f"granule {granule.serial} cannot be mapped at {address:#x}: one of them is in use")
        call(self._driver.cuMemMap, address, self.granule_bytes, 0, handle, 0)
        self.tally.add("vmm_calls")
        try:
            call(self._driver.cuMemSetAccess, address, self.granule_bytes, [self._access], 1)
        except EngineError:
            call(self._driver.cuMemUnmap, address, self.granule_bytes)
            self.tally.add("vmm_calls")
            raise
        self.tally.add("vmm_calls")
        self._mapped[address] = granule
        self._model(self.profile.map_ns)

    def unmap(self, address: int) -> Granule:
        """Unmap, after all work that may read there."""
        if address not in self._mapped:
            raise DeviceFailure(f"nothing is mapped at {address:#x}")
        self._drain()
        call(self._driver.cuMemUnmap, address, self.granule_bytes)
        self.tally.add("vmm_calls")
        return self._mapped.pop(address)

    # -- plain memory and data

    def alloc(self, nbytes: int, what: str) -> int:
        """Plain device memory."""
        address = int(call(self._driver.cuMemAlloc, max(nbytes, 1)))
        self.tally.add("alloc_calls")
        self._plain.add(address)
        return address

    def free(self, address: int) -> None:
        """Give plain memory back, after all work that may use it."""
        if address not in self._plain:
            raise DeviceFailure(f"no plain memory starts at {address:#x}")
        self._drain()
        call(self._driver.cuMemFree, address)
        self._plain.discard(address)
        self._bound.clear()

    def host_range(self, key: int, source: NDArray[Any], offset_bytes: int = 0) -> None:
        """Pin a key's host bytes, or a piece of them."""
        if source.nbytes:
            self._ranges[source.ctypes.data, source.nbytes] = self._host.pin(source)[0]
            insort(self._starts, (source.ctypes.data, source.nbytes))

    def map_host(self, source: NDArray[Any]) -> int:
        """Where the card sees a key's host bytes, which are pinned already."""
        if (source.ctypes.data, source.nbytes) not in self._ranges:
            raise DeviceFailure("only a key's whole host bytes are mapped for the device")
        address = self._host.pin(source)[1]
        self._binder.in_place[address] = source.nbytes
        return address

    def unmap_host(self, address: int) -> None:
        """The bytes stay pinned, and no launch that is bound from here on reads them."""
        if address not in self._binder.in_place:
            raise DeviceFailure(f"no host memory is mapped at {address:#x}")
        self._drain()
        del self._binder.in_place[address]
        self._bound.clear()

    def copy_in(self, address: int, source: NDArray[Any]) -> None:
        """Copy host bytes in, after all work before; from a known range it is weight traffic."""
        check_closed(self._recording, "copy_in")
        if not source.nbytes:
            return
        pinned = self._ranges.get((source.ctypes.data, source.nbytes))
        if pinned is None:
            source = np.ascontiguousarray(source)
            self._in_flight.append(source)
        start = source.ctypes.data if pinned is None else pinned
        call(self._driver.cuMemcpyHtoDAsync, address, start, source.nbytes, self._stream)
        self._queued()
        if pinned is not None:
            self.tally.add("device_htod_bytes", source.nbytes)
            self._model(self.profile.link_ns(source.nbytes))

    def stage(self, address: int, source: NDArray[Any]) -> None:
        """Copy a key's pinned bytes, or a piece of them, on the copy stream; recorded while a capture is open."""
        start = source.ctypes.data
        at = bisect_right(self._starts, (start, sys.maxsize)) - 1
        first, nbytes = self._starts[at] if at >= 0 else (0, 0)
        if not source.nbytes or start + source.nbytes > first + nbytes:
            raise DeviceFailure("only bytes of a known host range are staged")
        modelled_ns = self.profile.link_ns(source.nbytes)
        if self._record(Staged(address, source)):
            self._node_ns.append(round(self.profile.node_ns) + modelled_ns)
        pinned = self._ranges[first, nbytes] + start - first
        self._or_abandon(self._driver.cuMemcpyHtoDAsync, address, pinned, source.nbytes, self._streams["copy"])
        if self._recording is None:
            self._busy.add("copy")
            self.tally.add("device_htod_bytes", source.nbytes)
            self._model(modelled_ns)

    def mark(self, branch: Branch) -> Event:
        """An event, recorded on the branch's stream."""
        event = Event(branch, call(self._driver.cuEventCreate, _UNTIMED))
        weakref.finalize(event, self._driver.cuEventDestroy, event.handle)
        self._record(Mark(event))
        self._or_abandon(self._driver.cuEventRecord, event.handle, self._streams[branch])
        self._behind_kernel = False
        return event

    def wait(self, branch: Branch, event: Event) -> None:
        """What the branch's stream is asked for from here on starts after the event."""
        self._record(Wait(branch, event))
        self._or_abandon(self._driver.cuStreamWaitEvent, self._streams[branch], event.handle, 0)
        self._behind_kernel = False

    def sync(self, event: Event) -> None:
        """The host waits for an event."""
        check_closed(self._recording, "sync")
        call(self._driver.cuEventSynchronize, event.handle)
        self.tally.add("host_syncs")

    def copy_within(self, target: int, source: int, nbytes: int) -> None:
        """Copy device bytes to another place on the device, after all work before."""
        check_closed(self._recording, "copy_within")
        if nbytes:
            call(self._driver.cuMemcpyDtoDAsync, target, source, nbytes, self._stream)
            self._queued()
        self.tally.add("device_dtod_bytes", nbytes)
        self._model(self.profile.memory_ns(2 * nbytes))

    def copy_out(self, address: int, nbytes: int) -> bytes:
        """Read device bytes on the host, after all work before. Raises DeviceFailure for a fault found meanwhile."""
        check_closed(self._recording, "copy_out")
        out = self._staging if nbytes <= _STAGING_BYTES else np.empty(nbytes, np.uint8)
        call(self._driver.cuMemcpyDtoHAsync, out.ctypes.data, address, nbytes, self._stream)
        self._wait()
        return out[:nbytes].tobytes()

    def fetch(self, address: int, nbytes: int) -> Fetch:
        """Ask for device bytes as they stand after all work before."""
        check_closed(self._recording, "fetch")
        landing = self._landings.popleft()
        if landing.view.nbytes < nbytes:
            landing.view = self._host.staging(nbytes)[1]
        call(self._driver.cuMemcpyDtoHAsync, landing.view.ctypes.data, address, nbytes, self._stream)
        call(self._driver.cuEventRecord, landing.arrived, self._stream)
        self._queued()
        return Fetch(nbytes, landing)

    def fetched(self, fetch: Fetch) -> bytes:
        """The bytes that were asked for. Raises DeviceFailure for a fault found meanwhile."""
        landing = fetch.handle
        call(self._driver.cuEventSynchronize, landing.arrived)
        self.tally.add("host_syncs")
        self._landings.append(landing)
        self._check_fault()
        return bytes(landing.view[: fetch.nbytes])

    def poison(self, address: int, nbytes: int) -> None:
        """Nothing: what is read after its end is found by the simulator."""

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set device bytes."""
        check_closed(self._recording, "fill")
        if nbytes:
            call(self._driver.cuMemsetD8Async, address, byte, nbytes, self._stream)
            self._queued()

    # -- execution

    def prepare(self, steps: Iterable[Step]) -> None:
        """Compile and load what these steps run. Raises UnsupportedModel with every step that has no form here."""
        reasons, ready = [], []
        for step in steps:
            forms = kernels.get(step.kernel).forms
            try:
                if not forms:
                    raise NoForm("no CUDA form")
                strides = {o.name: (0, 0) for o in step.operands if o.ref.kind in CACHES}
                capacities = (None, 1) if strides else (None,)  # short ones may have a form of their own
                ready += [prepare(form, step, strides, capacity=c) for c in capacities for form in forms]
            except NoForm as why:
                reasons.append(f"{step.node} ({step.op}): kernel {step.kernel}: {why}")
        if reasons:
            shown = "; ".join(reasons[:4]) + (f"; and {len(reasons) - 4} more" if len(reasons) > 4 else "")
            raise UnsupportedModel(f"not served on the card: {shown}", "use --device sim", tuple(reasons))
        for made in ready:
            self._card.load(made.variant, made.geometry.shared_bytes)
        if not self._binder.tickets and any(made.geometry.tickets for made in ready):
            address = int(call(self._driver.cuMemAlloc, TICKETS_BYTES))
            weakref.finalize(self, self._driver.cuMemFree, address)
            call(self._driver.cuMemsetD8Async, address, 0, TICKETS_BYTES, self._stream)
            self._queued()
            self._binder.tickets = address

    def launch(self, launch: Launch) -> None:
        """Run a step now, or record it."""
        bound = self._bound.get(launch)
        if bound is None:
            bound = self._binder.bind(launch)
            if not launch.once:
                self._bound[launch] = bound
        for kernel in bound.kernels:
            how = kernel.after_kernel if self._behind_kernel else kernel.after_all
            arguments = ctypes.addressof(kernel.arguments)
            self._or_abandon(self._driver.cuLaunchKernelEx, how, kernel.function, arguments, 0)
            self._behind_kernel = True
        if self._record(launch):
            self._node_ns.append(round(self.profile.node_ns * len(bound.kernels)) + bound.read_ns)
            self._node_in_place_bytes += bound.in_place_bytes
            return
        self._busy.add("compute")
        self.tally.add("eager_launches", len(bound.kernels))
        self.tally.add("kernel_runs", len(bound.kernels))
        if bound.in_place_bytes:
            self.tally.add("device_zero_copy_bytes", bound.in_place_bytes)
        self._model(self.profile.launch_ns * len(bound.kernels))
        self._model(bound.read_ns)

    def begin_capture(self) -> None:
        """Open a recording."""
        if self._recording is not None:
            raise DeviceFailure("a capture is open already")
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        call(self._driver.cuStreamBeginCapture, self._stream, mode)
        self._behind_kernel = False
        self._recording, self._node_ns, self._node_in_place_bytes = Recording(), [], 0

    def end_capture(self) -> CudaGraph:
        """Close the recording; the graph is instantiated and on the card."""
        if self._recording is None:
            raise DeviceFailure("no capture is open")
        try:
            acts = self._recording.close().acts
            recorded = call(self._driver.cuStreamEndCapture, self._stream)
            self._behind_kernel = False
        except EngineError:
            self._abandon_capture()
            raise
        self._recording = None
        staged_bytes = sum(act.source.nbytes for act in acts if isinstance(act, Staged))
        over_link = OverLink(staged_bytes, self._node_in_place_bytes)
        return CudaGraph(self._driver, recorded, self._stream, sum(self._node_ns), over_link)

    def replay(self, graph: Recorded) -> None:
        """Run a recording once, against what is mapped now; returns at once."""
        if not isinstance(graph, CudaGraph) or self._recording is not None:
            raise DeviceFailure("a replay needs a recording of this device and no open capture")
        call(self._driver.cuGraphLaunch, graph.executable, self._stream)
        self._queued()
        self.tally.add("kernel_runs", graph.kernel_nodes)
        self.tally.add("device_htod_bytes", graph.over_link.staged_bytes)
        if graph.over_link.in_place_bytes:
            self.tally.add("device_zero_copy_bytes", graph.over_link.in_place_bytes)
        self._model(graph.modelled_ns)

    def _abandon_capture(self) -> None:
        """Close a recording that failed: while one is open, this thread may neither allocate nor wait."""
        if self._recording is not None:
            self._recording = None
            graph = self._driver.cuStreamEndCapture(self._stream)[-1]  # its code says again what just failed
            if graph is not None and int(graph):
                self._driver.cuGraphDestroy(graph)

    def _record(self, act: Act) -> bool:
        """Whether a capture is open and may have this act. Raises DeviceFailure, with none open, where it may not."""
        if self._recording is None:
            return False
        try:
            self._recording.add(act)
        except DeviceFailure:
            self._abandon_capture()
            raise
        return True

    def _or_abandon(self, function: Any, *arguments: Any) -> None:
        """Call the driver; where that fails, no capture stays open."""
        try:
            call(function, *arguments)
        except EngineError:
            self._abandon_capture()
            raise

    def _queued(self) -> None:
        """Something else than a kernel was put on the compute stream."""
        self._busy.add("compute")
        self._behind_kernel = False

    def _drain(self) -> None:
        """Wait for all work of both streams, where there is any."""
        if "copy" in self._busy:
            call(self._driver.cuStreamSynchronize, self._streams["copy"])
            self._busy.discard("copy")
            self.tally.add("host_syncs")
        if self._busy:
            self._wait()

    def _wait(self) -> None:
        """Wait for all work of the compute stream. Raises DeviceFailure for a fault."""
        call(self._driver.cuStreamSynchronize, self._stream)
        self._behind_kernel = False
        self.tally.add("host_syncs")
        self._busy.discard("compute")
        self._in_flight.clear()
        self._check_fault()

    def _check_fault(self) -> None:
        """Whether a kernel reported an index beyond its elements."""
        step, index, extent = self._fault.view(np.int64).tolist()
        if step:
            self._fault[:] = 0
            raise DeviceFailure(
                f"{self._binder.faulty[step - 1]}: index {index} is out of bounds for {extent} elements"
            )

    def _handle(self, granule: Granule) -> Any:
        if granule not in self._handles:
            raise DeviceFailure(f"granule {granule.serial} is none of this device's, or was given back")
        return self._handles[granule]

    def _model(self, ns: float) -> None:
        self.tally.add("modelled_ns", round(ns))
