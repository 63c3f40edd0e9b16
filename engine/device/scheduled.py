"""A device of the host whose work runs when a schedule says, every use of memory told to a checker as it is asked for.

The device itself is `inner`: addresses, granules, bytes and counters are its own. What the host does at once (map,
unmap, alloc, free) is done at once; what goes on a branch waits in its queue until the schedule runs it. Counters are
raised when work runs, so those of one pass may come with the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.device.base import Branch, Event, Fetch, Granule, Launch, Placed, Recorded
from engine.device.book import BookedDevice
from engine.device.hazards import COMPUTE, COPY, GRAPH, HOST, Hazards, Use
from engine.device.recording import Act, Dead, Mark, Recorder, Staged, Wait
from engine.device.schedule import Schedule, Task
from engine.device.shadow import LINES
from engine.errors import DeviceFailure
from engine.plan import Step

_BRANCHES: dict[Branch, int] = {"compute": COMPUTE, "copy": COPY}
_IN_GRAPH: dict[Branch, int] = {"compute": COMPUTE, "copy": GRAPH}
_Point = tuple[Task, tuple[int, ...]]
"""An event: the task that reaches it, and the clock there."""


class ScheduledDevice(Recorder):
    """`inner` under a schedule and a checker; implements `Device`."""

    queues = True

    def __init__(self, inner: BookedDevice[Any], schedule: Schedule, hazards: Hazards) -> None:
        self.inner, self.schedule, self.hazards = inner, schedule, hazards
        self.kind, self.name, self.uuid, self.driver = inner.kind, inner.name, inner.uuid, inner.driver
        self.granule_bytes, self.profile, self.tally = inner.granule_bytes, inner.profile, inner.tally
        self._points: WeakKeyDictionary[Event, _Point] = WeakKeyDictionary()
        self._words: dict[int, NDArray[Any]] = {}  # controls as they will be when all that was asked for has run

    # -- what the host does at once

    @property
    def mapped_bytes(self) -> int:
        """Bytes of granules mapped now."""
        return self.inner.mapped_bytes

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses; nothing is there yet."""
        return self.inner.reserve(nbytes)

    def unreserve(self, address: int) -> None:
        """Give addresses back, of which none is mapped."""
        self.inner.unreserve(address)

    def create(self) -> Granule:
        """A physical granule."""
        return self.inner.create()

    def destroy(self, granule: Granule) -> None:
        """Give a physical granule back."""
        self._check_closed("destroy")
        self.inner.destroy(granule)
        self.hazards.destroyed(granule)

    def map(self, address: int, granule: Granule) -> None:
        """Map a granule, at once."""
        self._check_closed("map")
        self.inner.map(address, granule)
        self.hazards.appears("map", address, address + self.granule_bytes, f"granule {granule.serial}", granule)

    def unmap(self, address: int) -> Granule:
        """Unmap, after all work."""
        self._check_closed("unmap")
        self.drain()
        granule = self.inner.unmap(address)
        self.hazards.goes("unmap", address, address + self.granule_bytes, f"granule {granule.serial}", granule)
        return granule

    def alloc(self, nbytes: int, what: str) -> int:
        """Plain memory."""
        self._check_closed("alloc")
        address = self.inner.alloc(nbytes, what)
        self.hazards.appears("alloc", address, address + max(nbytes, 1), what)
        return address

    def free(self, address: int) -> None:
        """Give plain memory back, after all work."""
        self._check_closed("free")
        self.drain()
        nbytes, what = self.inner.plain(address)
        self.inner.free(address)
        self.hazards.goes("free", address, address + nbytes, what)

    def host_range(self, key: int, source: NDArray[Any], offset_bytes: int = 0) -> None:
        """Make a key's host bytes known."""
        self.inner.host_range(key, source, offset_bytes)

    def map_host(self, source: NDArray[Any]) -> int:
        """Map a key's host bytes: they are there at once, and filled."""
        self._check_closed("map_host")
        address = self.inner.map_host(source)
        end = address + source.nbytes
        self.hazards.appears("map_host", address, end, "host bytes")
        fill = Use(address, end, tag=self.inner.whole(source))
        self.hazards.work(HOST, "map_host", "host bytes", fills=(fill,))
        return address

    def unmap_host(self, address: int) -> None:
        """Take a mapping of host bytes away, after all work."""
        self._check_closed("unmap_host")
        self.drain()
        nbytes, what = self.inner.mapped_host(address)
        self.inner.unmap_host(address)
        self.hazards.goes("unmap_host", address, address + nbytes, what)

    def prepare(self, steps: Iterable[Step]) -> None:
        """Have ready what these steps run."""
        self.inner.prepare(steps)

    def drain(self) -> None:
        """The host waits for all work: what `unmap` and `free` begin with."""
        self.schedule.drain()
        self.hazards.drain()

    def sync(self, event: Event) -> None:
        """The host waits for an event."""
        self._check_closed("sync")
        task, clock = self._points[event]
        self.schedule.reach(task)
        self.hazards.wait(HOST, clock)
        self.inner.sync(event)

    def copy_out(self, address: int, nbytes: int) -> bytes:
        """Read device bytes on the host, which waits for all compute work before."""
        self._check_closed("copy_out")
        self.hazards.out(address, address + nbytes)
        found: list[bytes] = []
        self.schedule.reach(self.schedule.ask("compute", lambda: found.append(self.inner.copy_out(address, nbytes))))
        self.hazards.wait(HOST, self.hazards.mark(COMPUTE))
        return found[0]

    def fetched(self, fetch: Fetch) -> bytes:
        """Read on the host what was asked for, which waits for the compute work before that."""
        (task, clock), found = fetch.handle
        self.schedule.reach(task)
        self.hazards.wait(HOST, clock)
        self.hazards.passed()
        return self.inner.fetched(found[0])

    # -- what is asked for

    def fetch(self, address: int, nbytes: int) -> Fetch:
        """Ask for device bytes, after all compute work before."""
        self._check_closed("fetch")
        self.hazards.out(address, address + nbytes)
        found: list[Fetch] = []
        task = self.schedule.ask("compute", lambda: found.append(self.inner.fetch(address, nbytes)))
        return Fetch(nbytes, ((task, self.hazards.mark(COMPUTE)), found))

    def copy_in(self, address: int, source: NDArray[Any]) -> None:
        """Copy host bytes in, after all compute work before."""
        self._check_closed("copy_in")
        if source.nbytes == 8:
            self._words[address] = source.reshape(-1).copy()
        use = Use(address, address + source.nbytes, tag=self.inner.whole(source))
        self.hazards.work(COMPUTE, "copy_in", "host bytes", fills=(use,) if source.nbytes else ())
        self._do(lambda: self.inner.copy_in(address, source))

    def copy_within(self, target: int, source: int, nbytes: int) -> None:
        """Copy device bytes, after all compute work before."""
        self._check_closed("copy_within")
        if nbytes:
            here, there = Use(source, source + nbytes), Use(target, target + nbytes)
            self.hazards.work(COMPUTE, "copy_within", "device bytes", (here,), (there,))
        self._do(lambda: self.inner.copy_within(target, source, nbytes))

    def poison(self, address: int, nbytes: int) -> None:
        """These bytes are dead for all compute work from here on, or from this point of each replay on."""
        act = Dead(address, nbytes)
        if not self._record(act):
            self._tell(act, COMPUTE)
            self._do(lambda: self.inner.poison(address, nbytes))

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set device bytes, after all compute work before."""
        self._check_closed("fill")
        self.hazards.work(COMPUTE, "fill", f"byte {byte}", fills=(Use(address, address + nbytes),) if nbytes else ())
        self._do(lambda: self.inner.fill(address, nbytes, byte))

    def stage(self, address: int, source: NDArray[Any]) -> None:
        """Copy a key's host bytes on the copy branch, or record that."""
        if self.inner.piece(source) is None:
            raise DeviceFailure("only bytes of a known host range are staged")
        act = Staged(address, source)
        if not self._record(act):
            self._tell(act, COPY)
            self.schedule.ask("copy", lambda: self.inner.stage(address, source))
            self.schedule.go()

    def launch(self, launch: Launch) -> None:
        """Run a step after all compute work before, or record it."""
        if not self._record(launch):
            self._tell(launch, COMPUTE)
            self._do(lambda: self.inner.launch(launch))

    def mark(self, branch: Branch) -> Event:
        """A branch's work up to here."""
        event = Event(branch)
        if not self._record(Mark(event)):
            self._points[event] = self._mark(_BRANCHES[branch])
        return event

    def wait(self, branch: Branch, event: Event) -> None:
        """What this branch is asked for from here on starts after the event."""
        if not self._record(Wait(branch, event)):
            self._wait(_BRANCHES[branch], self._points[event])

    def replay(self, graph: Recorded) -> None:
        """Run a recording once, against what is mapped when its nodes run.

        Its copies start after the compute work before it, as they enter by a wait for a mark of the recording.
        """
        acts = self._acts_of(graph)
        self.hazards.replay()
        points: dict[Event, _Point] = {}
        for act in acts:
            match act:
                case Mark(event):
                    points[event] = self._mark(_IN_GRAPH[event.branch])
                case Wait(branch, event):
                    self._wait(_IN_GRAPH[branch], points[event])
                case _:
                    line = GRAPH if isinstance(act, Staged) else COMPUTE
                    self._tell(act, line)
                    self._queue(line, act)
        self.hazards.replayed()
        self.schedule.go()

    def _queue(self, line: int, act: Act) -> None:
        self.schedule.ask(LINES[line], lambda: self.inner.run_node(act))

    def _do(self, run: Any) -> None:
        self.schedule.ask("compute", run)
        self.schedule.go()

    def _mark(self, line: int) -> _Point:
        return self.schedule.ask(LINES[line], lambda: None), self.hazards.mark(line)

    def _wait(self, line: int, point: _Point) -> None:
        task, clock = point
        self.schedule.ask(LINES[line], lambda: None, task)
        self.hazards.wait(line, clock)

    # -- what work uses

    def _tell(self, act: Act, line: int) -> None:
        match act:
            case Staged(address, source):
                use = Use(address, address + source.nbytes, tag=self.inner.piece(source))
                self.hazards.work(line, "stage", "host bytes", fills=(use,))
            case Dead(address, nbytes):
                if nbytes:
                    self.hazards.poison(address, address + nbytes, "given up")
            case Launch(step):
                reads, fills = self._uses(act)
                self.hazards.work(line, "launch", step.node, reads, fills, step.index)
                self._advance(act)

    def _uses(self, launch: Launch) -> tuple[list[Use], list[Use]]:
        """What a launch reads and fills: whole operands, caches as far as positions are in."""
        reads: list[Use] = []
        fills: list[Use] = []
        length = next((p for p in launch.placed if p.operand.name == "length"), None)
        for placed in launch.placed:
            if placed.host is not None:
                continue
            access = placed.operand.access
            for sequence in launch.sequences if placed.stride else (0,):
                at = placed.address + sequence * placed.stride
                if placed.placement is not None:
                    assert length is not None, "a cache is read as far as its length says"
                    past = int(self._words[length.address + sequence * length.stride][0])
                    new = past + self._rows(launch)
                    reads += _windows(placed, at, 0, past if "w" in access else new)
                    fills += _windows(placed, at, past, new) if "w" in access else ()
                    continue
                ref = placed.operand.ref
                key = ref.index if ref.kind == "key" else None
                if placed.nbytes and "r" in access:
                    reads.append(Use(at, at + placed.nbytes, key, offset_bytes=ref.offset_bytes))
                if placed.nbytes and "w" in access:
                    fills.append(Use(at, at + placed.nbytes))
        return reads, fills

    def _rows(self, launch: Launch) -> int:
        query = next(p for p in launch.placed if p.operand.name == "query")
        return math.prod(query.operand.ref.shape[:-1])

    def _advance(self, launch: Launch) -> None:
        """Follow the count of cached positions, which stands on the device and moves by the step that writes it."""
        for placed in launch.placed:
            if placed.operand.name == "length" and "w" in placed.operand.access:
                for sequence in launch.sequences:
                    word = self._words.setdefault(placed.address + sequence * placed.stride, np.zeros(1, np.int64))
                    kernels.get("advance").run({"length": word}, launch.step.params)


def _windows(placed: Placed, address: int, first: int, end: int) -> Iterator[Use]:
    assert placed.placement is not None
    if first < end:
        for low, high in placed.placement.windows(first, end):
            yield Use(address + low, address + high)
