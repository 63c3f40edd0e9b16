"""A driver in Python with the calls that a card's device makes: streams that run late, granules, captures, and books.

It does what the driver's manual says of order and of what is refused, and nothing of what kernels compute. Work waits
in its stream until someone waits for it, so that order which nobody asked for shows; what then finds its memory gone is
written down in `faults`, where a card would read it or stop.
"""

# ruff: noqa: N802 - names are the driver's

from __future__ import annotations

import ctypes
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

GRANULARITY = 4096
Op = Callable[[], None]


class Code(int):
    """A driver's answer, with its name."""

    name: str

    def __new__(cls, number: int, name: str = "CUDA_SUCCESS") -> Code:
        code = super().__new__(cls, number)
        code.name = name
        return code


OK = Code(0)
FULL = Code(2, "CUDA_ERROR_OUT_OF_MEMORY")
INVALID = Code(1, "CUDA_ERROR_INVALID_VALUE")
CAPTURED = Code(900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
UNJOINED = Code(904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED")


class _Names:
    """An enumeration of which nobody needs the values."""

    def __getattr__(self, name: str) -> str:
        return name


@dataclass(slots=True, eq=False)
class Capture:
    """A graph that is being recorded, or was."""

    origin: int
    streams: set[int]
    nodes: list[tuple[int, str, Op]] = field(default_factory=list)
    joined: int = 0
    """Nodes before the last join."""


@dataclass(slots=True, eq=False)
class Point:
    """Where an event stands: in a stream's work, or in a capture before that node."""

    stream: int = 0
    done: bool = True
    capture: Capture | None = None
    nodes: int = 0


class Driver:
    """The calls, each answering with a code and what it gives."""

    CUmemAllocationType = CUmemLocationType = CUmemAccess_flags = CUmemAllocationGranularity_flags = _Names()
    CUstreamCaptureMode = CUlaunchAttributeID = _Names()

    def __init__(self) -> None:
        self.numbers = count(1)
        self.streams: dict[int, deque[Op]] = {}
        self.events: dict[int, Point] = {}
        self.last: dict[int, str] = {}
        """What each stream was asked for last, or recorded."""
        self.launched: Counter[str] = Counter()
        self.reserved: dict[int, int] = {}
        self.granules: dict[int, bytearray] = {}
        self.mapped: dict[int, int] = {}
        self.reachable: set[int] = set()
        self.plain: dict[int, bytearray] = {}
        self.hosts: dict[int, Any] = {}
        self.capture: Capture | None = None
        self.graphs: dict[int, Capture] = {}
        self.executables: dict[int, list[tuple[int, str, Op]]] = {}
        self.faults: list[str] = []
        self.failing: dict[str, Code] = {}
        """Calls that fail the next time, and how."""

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name.startswith("cu") and name in self.failing:
            code = self.failing.pop(name)

            def failed(*_: Any) -> tuple[Any, ...]:
                return (code, None) if name == "cuStreamEndCapture" else (code,)

            failed.__name__ = name
            return failed
        return found

    # -- memory

    def cuMemGetAllocationGranularity(self, *_: Any) -> tuple[Any, ...]:
        return OK, GRANULARITY

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuMemAddressReserve(self, nbytes: int, *_: Any) -> tuple[Any, ...]:
        address = next(self.numbers) << 32
        self.reserved[address] = nbytes
        return OK, address

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        return (OK,) if self.reserved.pop(address, None) == nbytes else (INVALID,)

    def cuMemCreate(self, nbytes: int, *_: Any) -> tuple[Any, ...]:
        handle = next(self.numbers)
        self.granules[handle] = bytearray(nbytes)
        return OK, handle

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        return (OK,) if self.granules.pop(handle, None) is not None else (INVALID,)

    def cuMemMap(self, address: int, nbytes: int, _: int, handle: int, flags: int) -> tuple[Any, ...]:
        if address in self.mapped:
            return (INVALID,)
        self.mapped[address] = handle
        return (OK,)

    def cuMemSetAccess(self, address: int, *_: Any) -> tuple[Any, ...]:
        self.reachable.add(address)
        return (OK,)

    def cuMemUnmap(self, address: int, _: int) -> tuple[Any, ...]:
        self.reachable.discard(address)
        return (OK,) if self.mapped.pop(address, None) is not None else (INVALID,)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        if self.capture is not None:
            return (CAPTURED,)
        address = next(self.numbers) << 32
        self.plain[address] = bytearray(nbytes)
        return OK, address

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        return (OK,) if self.plain.pop(address, None) is not None else (INVALID,)

    def bytes_at(self, address: int, nbytes: int) -> memoryview:
        """Memory as it is now; an empty view, and a fault, where there is none."""
        for start, held in self.plain.items():
            if start <= address and address + nbytes <= start + len(held):
                return memoryview(held)[address - start :][:nbytes]
        for start in self.reachable:
            held = self.granules.get(self.mapped[start], bytearray())
            if start <= address and address + nbytes <= start + len(held):
                return memoryview(held)[address - start :][:nbytes]
        self.faults.append(f"{nbytes} bytes at {address:#x} are gone")
        return memoryview(bytearray(nbytes))

    def _pieces(self, address: int, nbytes: int) -> list[memoryview]:
        """The same over granules side by side, each of its own."""
        start = next((s for s in self.reserved if s <= address < s + self.reserved[s]), address)
        size = next((len(self.granules[self.mapped[a]]) for a in self.reachable if a >= start), nbytes or 1)
        end, made = address + nbytes, []
        while address < end and start in self.reserved:
            until = min(end, start + ((address - start) // size + 1) * size)
            made.append(self.bytes_at(address, until - address))
            address = until
        return made or [self.bytes_at(address, nbytes)]

    def read(self, address: int, nbytes: int) -> bytes:
        """Memory as it is now, over any granules."""
        return b"".join(self._pieces(address, nbytes))

    def write(self, address: int, data: bytes) -> None:
        """Fill memory, over any granules."""
        at = 0
        for piece in self._pieces(address, len(data)):
            piece[:] = data[at : at + len(piece)]
            at += len(piece)

    def cuMemHostAlloc(self, nbytes: int, _: int) -> tuple[Any, ...]:
        memory = (ctypes.c_uint8 * nbytes)()
        self.hosts[ctypes.addressof(memory)] = memory
        return OK, ctypes.addressof(memory)

    def cuMemHostGetDevicePointer(self, host: int, _: int) -> tuple[Any, ...]:
        return OK, host

    def cuMemFreeHost(self, host: int) -> tuple[Any, ...]:
        return (OK,) if self.hosts.pop(host, None) is not None else (INVALID,)

    def cuMemHostRegister(self, start: int, *_: Any) -> tuple[Any, ...]:
        self.hosts[start] = None
        return (OK,)

    def cuMemHostUnregister(self, start: int) -> tuple[Any, ...]:
        known = start in self.hosts
        self.hosts.pop(start, None)
        return (OK,) if known else (INVALID,)

    # -- streams and events

    def cuStreamCreate(self, _: int) -> tuple[Any, ...]:
        stream = next(self.numbers)
        self.streams[stream] = deque()
        return OK, stream

    def cuStreamSynchronize(self, stream: int) -> tuple[Any, ...]:
        if self.capture is not None and stream in self.capture.streams:
            return (CAPTURED,)
        while self.streams[stream]:
            self.streams[stream].popleft()()
        return (OK,)

    def finish(self) -> None:
        """Let all work end that nobody waited for."""
        for stream in self.streams:
            self.cuStreamSynchronize(stream)

    def _ask(self, stream: int, kind: str, op: Op) -> tuple[Any, ...]:
        self.last[stream] = kind
        if self.capture is not None and stream in self.capture.streams:
            self.capture.nodes.append((stream, kind, op))
        else:
            self.streams[stream].append(op)
        return (OK,)

    def cuEventCreate(self, _: int) -> tuple[Any, ...]:
        event = next(self.numbers)
        self.events[event] = Point()
        return OK, event

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        return (OK,) if self.events.pop(event, None) is not None else (INVALID,)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        if self.capture is not None and stream in self.capture.streams:
            self.events[event] = Point(stream, False, self.capture, len(self.capture.nodes))
            return (OK,)
        point = self.events[event] = Point(stream, False)
        return self._ask(stream, "event", lambda: setattr(point, "done", True))

    def cuStreamWaitEvent(self, stream: int, event: int, _: int) -> tuple[Any, ...]:
        point = self.events[event]
        if point.capture is not None:
            if point.capture is not self.capture:
                return (INVALID,)
            point.capture.streams.add(stream)
            if stream == point.capture.origin and point.stream != stream:
                point.capture.joined = max(point.capture.joined, point.nodes)
            return (OK,)
        return self._ask(stream, "wait", lambda: self._reach(point))

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        if self.events[event].capture is not None:
            return (CAPTURED,)
        self._reach(self.events[event])
        return (OK,)

    def _reach(self, point: Point) -> None:
        while not point.done:
            self.streams[point.stream].popleft()()

    # -- copies and launches

    def cuMemcpyHtoDAsync(self, address: int, host: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        def copy() -> None:
            self.write(address, ctypes.string_at(host, nbytes))

        return self._ask(stream, "memcpy", copy)

    def cuMemcpyDtoHAsync(self, host: int, address: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        def copy() -> None:
            ctypes.memmove(host, self.read(address, nbytes), nbytes)

        return self._ask(stream, "memcpy", copy)

    def cuMemcpyDtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        def copy() -> None:
            self.write(target, self.read(source, nbytes))

        return self._ask(stream, "memcpy", copy)

    def cuMemsetD8Async(self, address: int, byte: int, nbytes: int, stream: int) -> tuple[Any, ...]:
        def fill() -> None:
            self.write(address, bytes([byte]) * nbytes)

        return self._ask(stream, "memset", fill)

    def CUlaunchConfig(self) -> Any:
        return SimpleNamespace(attrs=[])

    def CUlaunchAttribute(self) -> Any:
        return SimpleNamespace(value=SimpleNamespace())

    def cuLaunchKernelEx(self, how: Any, function: str, *_: Any) -> tuple[Any, ...]:
        if how.attrs and self.last.get(how.hStream) != "kernel":
            self.faults.append(f"{function} may start early behind {self.last.get(how.hStream)}")
        return self._ask(how.hStream, "kernel", lambda: self.launched.update([function]))

    # -- graphs

    def cuStreamBeginCapture(self, stream: int, _: Any) -> tuple[Any, ...]:
        if self.capture is not None:
            return (CAPTURED,)
        self.last.clear()
        self.capture = Capture(stream, {stream})
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        capture, self.capture = self.capture, None
        if capture is None:
            return INVALID, None
        late = [n for n, (of, _, _) in enumerate(capture.nodes) if of != stream and n >= capture.joined]
        if late:
            return UNJOINED, None
        graph = next(self.numbers)
        self.graphs[graph] = capture
        return OK, graph

    def cuGraphDestroy(self, graph: int) -> tuple[Any, ...]:
        return (OK,) if self.graphs.pop(graph, None) is not None else (INVALID,)

    def cuGraphInstantiate(self, graph: int, _: int) -> tuple[Any, ...]:
        executable = next(self.numbers)
        self.executables[executable] = list(self.graphs[graph].nodes)
        return OK, executable

    def cuGraphUpload(self, *_: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuGraphExecDestroy(self, executable: int) -> tuple[Any, ...]:
        return (OK,) if self.executables.pop(executable, None) is not None else (INVALID,)

    def cuGraphLaunch(self, executable: int, stream: int) -> tuple[Any, ...]:
        def replay() -> None:
            for _, _, op in self.executables[executable]:
                op()

        return self._ask(stream, "graph", replay)

    def cuGraphGetNodes(self, graph: int, wanted: int) -> tuple[Any, ...]:
        nodes = self.graphs[graph].nodes
        return OK, nodes[:wanted], len(nodes)

    def cuGraphNodeGetType(self, node: tuple[int, str, Op]) -> tuple[Any, ...]:
        return OK, SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{node[1].upper()}")

    def cuGraphKernelNodeGetParams(self, node: tuple[int, str, Op]) -> tuple[Any, ...]:
        return OK, SimpleNamespace(func="kernel")

    def cuFuncGetName(self, function: str) -> tuple[Any, ...]:
        return OK, function.encode()

    def cuGraphGetEdges(self, *_: Any) -> tuple[Any, ...]:
        return OK, [], [], 0


class Card:
    """A card over such a driver, whose kernels are their names."""

    ordinal, name, uuid, version = 0, "double", "GPU-0", "CUDA 0"
    starts_early = True

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def enter(self) -> None:
        """There is one context."""

    def load(self, variant: Any, shared_bytes: int = 0) -> str:
        """The kernel's name."""
        return str(variant.function)
