"""The seam between the engine and a device: about fifteen verbs, all on plain addresses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from engine.counters import Tally
from engine.kv_layout import Placement
from engine.plan import Operand, Step


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured rates of a card, which floors and the modelled clock are computed from; bytes per second and ns."""

    name: str
    link_bytes_per_s: float
    memory_bytes_per_s: float
    node_ns: float
    launch_ns: float
    map_ns: float
    in_place_bytes_per_s: float
    """Of a kernel that reads pinned host memory itself, from 32 blocks on."""

    def link_ns(self, nbytes: int) -> int:
        """Time over the link of so many bytes from host to device."""
        return round(nbytes / self.link_bytes_per_s * 1e9)

    def in_place_ns(self, nbytes: int) -> int:
        """Time in which a kernel reads so many bytes of host memory over the link."""
        return round(nbytes / self.in_place_bytes_per_s * 1e9)

    def memory_ns(self, nbytes: int) -> int:
        """Time in which a kernel reads so many bytes."""
        return round(nbytes / self.memory_bytes_per_s * 1e9)


H200 = Profile("h200-measured-2026-11-29", 55.4e9, 4343e9, 530.0, 5700.0, 27_400.0, 51e9)
"""One NVIDIA H200: pinned copy host to device in one piece, plain read by a kernel, node of a graph, launch from
Python, map and set-access of a granule, kernel reading pinned host memory."""


Branch = Literal["compute", "copy"]
"""Two queues of work: each runs in the order it was asked for, and beside the other unless an event orders them."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Event:
    """A point in a branch's work; equal only to itself. `handle` is the driver's own, where there is one."""

    branch: Branch
    handle: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Device bytes on their way to the host; `handle` is what the device finds them by."""

    nbytes: int
    handle: Any


CONTROL = "control block"
"""What the memory of length, ids and gap is allocated as."""


@dataclass(frozen=True, slots=True, eq=False)
class Granule:
    """A physical granule; equal only to itself, since an address seen again may hold another one."""

    serial: int


@dataclass(frozen=True, slots=True)
class Tag:
    """What a range of device memory holds: a key, or a piece of one, copied from the key's own host bytes.

    Poison, partial fills and copies from anywhere else have no tag, whoever made them. Pieces of one key that follow
    each other become one whole.
    """

    key: int
    offset_bytes: int = 0
    """How far into the key's own bytes the range starts."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An operand at its address, that of sequence 0; sequence s of a batch has its `stride` * s bytes further on."""

    operand: Operand
    address: int
    nbytes: int
    host: NDArray[Any] | None = None
    """The host array, where the kernel reads host memory in place."""
    placement: Placement | None = None
    """Of a KV cache: its capacity and strides, which belong to the run and not to the plan."""
    stride: int = 0
    """0: all sequences share it, as they do weights, constants and host memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """A step bound to addresses for some sequences of a batch: what a graph node bakes in.

    Each sequence is computed as if it were alone; what has no stride is read once for all of them.
    """

    step: Step
    placed: tuple[Placed, ...]
    sequences: tuple[int, ...] = (0,)
    once: bool = False
    """Made for one pass: what a device works out for it is not kept."""

    def alone(self, sequence: int) -> Launch:
        """The same step for one sequence, at that sequence's own addresses."""
        return Launch(self.step, tuple(replace(p, address=p.address + sequence * p.stride) for p in self.placed))


class Recorded(Protocol):
    """A captured graph."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        ...


class Device(Protocol):
    """Verbs of a device. All sizes are bytes, all addresses plain numbers; `tally` counts the device's own calls.

    Copies, fills and launches are asked for and run later, on the compute branch; `stage` on the copy branch. The host
    waits in `copy_out`, `fetched` and `sync`, and where memory is taken away: `unmap` and `free` wait for all work.
    A verb that a capture would have recorded and that fails leaves no capture open.
    """

    kind: str
    queues: bool
    """Whether work goes on while the host does something else; if not, a verb has done its work when it returns."""
    name: str
    uuid: str
    driver: str
    granule_bytes: int
    profile: Profile
    tally: Tally

    @property
    def mapped_bytes(self) -> int:
        """Bytes of granules mapped now, as the device itself counts them."""
        ...

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses (whole granules); nothing is mapped yet."""
        ...

    def unreserve(self, address: int) -> None:
        """Give a reservation back. Raises DeviceFailure while anything is mapped in it."""
        ...

    def create(self) -> Granule:
        """A physical granule. Raises OutOfMemory."""
        ...

    def destroy(self, granule: Granule) -> None:
        """Give a physical granule back. Raises DeviceFailure while it is mapped."""
        ...

    def map(self, address: int, granule: Granule) -> None:
        """Map a granule, readable and writable. Raises DeviceFailure where something is mapped already."""
        ...

    def unmap(self, address: int) -> Granule:
        """Unmap the granule at an address, after all work. Raises DeviceFailure where nothing is mapped."""
        ...

    def alloc(self, nbytes: int, what: str) -> int:
        """Plain device memory outside the granules."""
        ...

    def free(self, address: int) -> None:
        """Give plain memory back, after all work."""
        ...

    def host_range(self, key: int, source: NDArray[Any], offset_bytes: int = 0) -> None:
        """Make host bytes known as a key's, from `offset_bytes` on: what weight copies read from; a card pins them."""
        ...

    def map_host(self, source: NDArray[Any]) -> int:
        """Map a key's host bytes into the device's address space: where kernels read them in place, over the link.

        They take no granule, and nothing may write there. Raises DeviceFailure for bytes of no known host range.
        """
        ...

    def unmap_host(self, address: int) -> None:
        """Take that mapping away, after all work."""
        ...

    def copy_in(self, address: int, source: NDArray[Any]) -> None:
        """Copy host bytes to the device; from a known host range it is weight traffic."""
        ...

    def stage(self, address: int, source: NDArray[Any]) -> None:
        """Copy a key's host bytes, or a piece of them, on the copy branch; recorded while a capture is open.

        Raises DeviceFailure for bytes of no known host range: from plain pages a graph copies at a quarter of the link.
        """
        ...

    def mark(self, branch: Branch) -> Event:
        """A branch's work up to here."""
        ...

    def wait(self, branch: Branch, event: Event) -> None:
        """What this branch is asked for from here on starts after the event."""
        ...

    def sync(self, event: Event) -> None:
        """The host waits for an event. Raises DeviceFailure while a capture is open."""
        ...

    def copy_within(self, target: int, source: int, nbytes: int) -> None:
        """Copy device bytes to another place on the device, after all work before it."""
        ...

    def copy_out(self, address: int, nbytes: int) -> bytes:
        """Read device bytes on the host, after all work before it."""
        ...

    def fetch(self, address: int, nbytes: int) -> Fetch:
        """Ask for device bytes as they stand after all compute work before; two may be under way at a time."""
        ...

    def fetched(self, fetch: Fetch) -> bytes:
        """The bytes that were asked for: the host waits for them, and not for what was asked for since."""
        ...

    def poison(self, address: int, nbytes: int) -> None:
        """These bytes are dead: reading them is a fault. The simulator makes it show; a card need do nothing."""
        ...

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set device bytes."""
        ...

    def prepare(self, steps: Iterable[Step]) -> None:
        """Have ready what these steps run. Raises UnsupportedModel with all that the device has no kernel for."""
        ...

    def launch(self, launch: Launch) -> None:
        """Run a step, or record it while a capture is open."""
        ...

    def begin_capture(self) -> None:
        """Record what is launched and staged from here on; the copy branch enters by a `wait` for a mark made here."""
        ...

    def end_capture(self) -> Recorded:
        """Close the recording. Raises DeviceFailure where the compute branch has not waited for all that is staged."""
        ...

    def replay(self, graph: Recorded) -> None:
        """Run a recording once."""
        ...


class Feed(Protocol):
    """What a device needs to know of a launch's host operands: arrays by weight name."""

    def host_array(self, name: str) -> NDArray[Any]:
        """The host array of an initialiser."""
        ...


Launches = Sequence[Launch]
