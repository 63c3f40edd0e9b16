"""What a device on the host keeps: addresses, granules, tagged spans, recordings, counters and the modelled clock.

What the bytes are is for the device on top to say: real ones (`sim`), or none at all (`plan_only`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from engine import kernels
from engine.counters import Tally
from engine.device.base import H200, Branch, Event, Fetch, Granule, Launch, Placed, Profile, Recorded, Tag
from engine.device.recording import Act, Dead, Mark, Recorder, Staged, Wait
from engine.device.spans import Spans
from engine.errors import DeviceFailure
from engine.kv_layout import Placement
from engine.plan import Step

POISON = 0xFF
DEFAULT_GRANULE_BYTES = 2 << 20
_FIRST_ADDRESS = 1 << 44


@dataclass(slots=True)
class Region:
    """A stretch of addresses: a reservation with one slot a granule, plain memory (`granules` None), or the host's."""

    address: int
    nbytes: int
    what: str
    granules: list[Granule | None] | None
    host: NDArray[np.uint8] | None = None
    """The bytes, where they are the host's own: read in place, and never written."""
    spans: Spans = field(default_factory=Spans)

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.address + self.nbytes


@dataclass(frozen=True, slots=True)
class KeyRead:
    """A key, or a piece of one from `offset_bytes` on, that a launch reads: where it should stand whole."""

    region: Region
    start: int
    end: int
    key: int
    operand: str
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Reads:
    """What a launch reads that may not be there: keys, and caches as far as they are filled."""

    keys: tuple[KeyRead, ...]
    key_bytes: int
    in_place_bytes: int
    """Bytes of keys that stand in host memory."""
    caches: tuple[tuple[int, Placement], ...]
    """Address of each cache, and how it lies there."""
    rows: int
    """Positions that the launch adds."""
    length: Placed | None
    """Where the count of cached positions stands."""


Bound = TypeVar("Bound")


class BookedDevice(Recorder, ABC, Generic[Bound]):
    """A device on the host without its bytes; implements every verb of `Device` on hooks that hold them."""

    kind: str
    queues = False
    driver: str
    name: str

    def __init__(self, uuid: str, granule_bytes: int | None, profile: Profile = H200) -> None:
        self.uuid = uuid
        self.granule_bytes = granule_bytes or DEFAULT_GRANULE_BYTES
        self.profile = profile
        self.tally = Tally()
        self._regions: dict[int, Region] = {}
        self._addresses: list[int] = []  # of regions, ascending: new ones always come last
        self._next_address = _FIRST_ADDRESS
        self._serials = count()
        self._live: set[Granule] = set()  # created and not given back
        self._mapped: set[Granule] = set()
        self._ranges: dict[tuple[int, int], Tag] = {}  # address and size of host bytes -> whose they are
        self._sizes: dict[int, int] = {}  # the same, address -> size
        self._starts: list[int] = []  # of those ranges, ascending
        self._bound: dict[Launch, tuple[tuple[Launch, Reads, Bound], ...]] = {}  # sequence by sequence

    # -- what the device on top says of bytes

    @abstractmethod
    def _begin(self, region: Region) -> None:
        """A region came to be."""

    @abstractmethod
    def _end(self, region: Region) -> None:
        """A region is gone."""

    @abstractmethod
    def _put(self, region: Region, offset: int, source: NDArray[np.uint8]) -> None:
        """Bytes go in."""

    @abstractmethod
    def _get(self, region: Region, offset: int, nbytes: int) -> bytes:
        """Bytes come out."""

    @abstractmethod
    def _copy(self, source: Region, offset: int, target: Region, at: int, nbytes: int) -> None:
        """Bytes go from one region to another."""

    @abstractmethod
    def _set(self, region: Region, offset: int, nbytes: int, byte: int) -> None:
        """Bytes are all made `byte`."""

    @abstractmethod
    def _resolve(self, launch: Launch) -> Bound:
        """What is worked out once for a launch."""

    @abstractmethod
    def _compute(self, launch: Launch, bound: Bound, reads: Reads, tags: tuple[Tag | None, ...]) -> None:
        """Run a launch; `tags` says what stands whole where each of its keys should, None where nothing does."""

    # -- addresses and granules

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses for whole granules."""
        granules = -(-nbytes // self.granule_bytes)
        return self._region(granules * self.granule_bytes, "reservation", [None] * granules).address

    def unreserve(self, address: int) -> None:
        """Give a reservation back."""
        region = self._regions.get(address)
        if region is None or region.granules is None:
            raise DeviceFailure(f"no reservation starts at {address:#x}")
        if any(g is not None for g in region.granules):
            raise DeviceFailure(f"reservation at {address:#x} still has mapped granules")
        self._forget(region)

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
        self._set(region, address - region.address, self.granule_bytes, POISON)
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
        self._set(region, 0, region.nbytes, POISON)
        self.tally.add("alloc_calls")
        return region.address

    def free(self, address: int) -> None:
        """Give plain memory back."""
        self.plain(address)
        self._forget(self._regions[address])

    def plain(self, address: int) -> tuple[int, str]:
        """Size of the plain memory that starts there, and what it is for."""
        region = self._regions.get(address)
        if region is None or region.granules is not None or region.host is not None:
            raise DeviceFailure(f"no plain memory starts at {address:#x}")
        return region.nbytes, region.what

    # -- data

    @property
    def mapped_bytes(self) -> int:
        """Bytes of granules mapped now."""
        return len(self._mapped) * self.granule_bytes

    def host_range(self, key: int, source: NDArray[Any], offset_bytes: int = 0) -> None:
        """Remember where a key's bytes lie: only a copy from there fills that key."""
        nbytes = source.nbytes
        if nbytes:
            start = _host_address(source)
            if start not in self._sizes:
                insort(self._starts, start)
            self._ranges[start, nbytes] = Tag(key, offset_bytes)
            self._sizes[start] = max(nbytes, self._sizes.get(start, 0))

    def whole(self, source: NDArray[Any]) -> Tag | None:
        """The key whose host bytes these are, in one range."""
        return self._ranges.get((_host_address(source), source.nbytes)) if source.nbytes else None

    def piece(self, source: NDArray[Any]) -> Tag | None:
        """The key whose host bytes these are a piece of, or all."""
        start = _host_address(source)
        at = bisect_right(self._starts, start) - 1
        if at < 0 or not source.nbytes:
            return None
        first = self._starts[at]
        nbytes = self._sizes[first]
        if start + source.nbytes > first + nbytes:
            return None
        of = self._ranges[first, nbytes]
        return Tag(of.key, of.offset_bytes + start - first)

    def map_host(self, source: NDArray[Any]) -> int:
        """A region over the host's own bytes, which hold their key, whole."""
        tag = self.whole(source)
        if tag is None:
            raise DeviceFailure("only a key's whole host bytes are mapped for the device")
        flat = source.reshape(-1).view(np.uint8)
        region = self._region(flat.nbytes, f"host bytes of key {tag.key}", None, flat)
        region.spans.put(region.address, region.end, tag)
        return region.address

    def unmap_host(self, address: int) -> None:
        """Take the region away; the host's bytes stay where they are."""
        self.mapped_host(address)
        self._forget(self._regions[address])

    def mapped_host(self, address: int) -> tuple[int, str]:
        """Size of the host memory that is mapped there, and what it is."""
        region = self._regions.get(address)
        if region is None or region.host is None:
            raise DeviceFailure(f"no host memory is mapped at {address:#x}")
        return region.nbytes, region.what

    def copy_in(self, address: int, source: NDArray[Any]) -> None:
        """Copy host bytes in; a copy from a known range leaves that key there, any other leaves nobody."""
        self._check_closed("copy_in")
        self._fill_from(address, source, self.whole(source))

    def stage(self, address: int, source: NDArray[Any]) -> None:
        """Copy a key's host bytes, or record that."""
        tag = self.piece(source)
        if tag is None:
            raise DeviceFailure("only bytes of a known host range are staged")
        if not self._record(Staged(address, source)):
            self._fill_from(address, source, tag)

    def mark(self, branch: Branch) -> Event:
        """An event: here all work before it is done, as everything runs when it is asked for."""
        event = Event(branch)
        self._record(Mark(event))
        return event

    def wait(self, branch: Branch, event: Event) -> None:
        """Nothing to wait for, except in a recording."""
        self._record(Wait(branch, event))

    def sync(self, event: Event) -> None:
        """Count a wait of the host."""
        self._check_closed("sync")
        self.tally.add("host_syncs")

    def _fill_from(self, address: int, source: NDArray[Any], tag: Tag | None) -> None:
        flat = source.reshape(-1).view(np.uint8)
        region, offset = self._writable(address, flat.nbytes, "copy to")
        self._put(region, offset, flat)
        if tag is None:
            region.spans.drop(address, address + flat.nbytes)
            return
        region.spans.put(address, address + flat.nbytes, tag)
        self.tally.add("device_htod_bytes", flat.nbytes)
        self._model(self.profile.link_ns(flat.nbytes))

    def copy_within(self, target: int, source: int, nbytes: int) -> None:
        """Copy device bytes to another place on the device: they are read and written, at the memory's rate."""
        self._check_closed("copy_within")
        here, there = self._range(source, nbytes, "copy from"), self._writable(target, nbytes, "copy to")
        self._copy(*here, *there, nbytes)
        there[0].spans.drop(target, target + nbytes)
        self.tally.add("device_dtod_bytes", nbytes)
        self._model(self.profile.memory_ns(2 * nbytes))

    def copy_out(self, address: int, nbytes: int) -> bytes:
        """Read device bytes on the host."""
        self._check_closed("copy_out")
        region, offset = self._range(address, nbytes, "copy from")
        self.tally.add("host_syncs")
        return self._get(region, offset, nbytes)

    def fetch(self, address: int, nbytes: int) -> Fetch:
        """Read device bytes now, for `fetched`."""
        self._check_closed("fetch")
        region, offset = self._range(address, nbytes, "copy from")
        return Fetch(nbytes, self._get(region, offset, nbytes))

    def fetched(self, fetch: Fetch) -> bytes:
        """What was read; counts a wait of the host."""
        self.tally.add("host_syncs")
        return bytes(fetch.handle)

    def poison(self, address: int, nbytes: int) -> None:
        """Fill dead bytes with poison, now or in each replay, so that whoever still reads them is found out."""
        if not self._record(Dead(address, nbytes)):
            self.fill(address, nbytes, POISON)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set device bytes; a range that held a key no longer does."""
        self._check_closed("fill")
        region, offset = self._writable(address, nbytes, "fill of")
        self._set(region, offset, nbytes, byte)
        region.spans.drop(address, address + nbytes)

    # -- execution

    def prepare(self, steps: Iterable[Step]) -> None:
        """Nothing to have ready: every kernel has its NumPy reference."""

    def launch(self, launch: Launch) -> None:
        """Run a step now, or record it."""
        if self._record(launch):
            return
        launches = kernels.get(launch.step.kernel).launches
        self.tally.add("eager_launches", launches)
        self._model(self.profile.launch_ns * launches)
        self._run(launch)

    def replay(self, graph: Recorded) -> None:
        """Run a recording once, against what is mapped now."""
        for act in self._acts_of(graph):
            self.run_node(act)

    def run_node(self, act: Act) -> None:
        """Run what one node of a recording does; marks and waits do nothing here, where all runs in order."""
        match act:
            case Launch():
                self._model(self.profile.node_ns * kernels.get(act.step.kernel).launches)
                self._run(act)
            case Staged(address, source):
                self._model(self.profile.node_ns)
                self._fill_from(address, source, self.piece(source))
            case Dead(address, nbytes):
                self.fill(address, nbytes, POISON)

    def _run(self, launch: Launch) -> None:
        known = self._bound.get(launch)
        if known is None:
            alone = [launch.alone(sequence) for sequence in launch.sequences]
            known = tuple((one, self._reads(one), self._resolve(one)) for one in alone)
            if not launch.once:
                self._bound[launch] = known
        self.tally.add("kernel_runs", kernels.get(launch.step.kernel).launches)
        for _, own, _ in known:
            self._check_caches(launch, own)
        reads = known[0][1]  # of keys: all sequences read the same ones, once
        tags = tuple(read.region.spans.whole(read.start, read.end, read.offset_bytes) for read in reads.keys)
        for read, tag in zip(reads.keys, tags, strict=True):
            if tag is None:  # no whole key: mapped at all?
                self._range(read.start, read.end - read.start, f"{launch.step.node}: read of")
        self._model(self.profile.memory_ns(reads.key_bytes - reads.in_place_bytes))
        if reads.in_place_bytes:
            self.tally.add("device_zero_copy_bytes", reads.in_place_bytes)
            self._model(self.profile.in_place_ns(reads.in_place_bytes))
        for one, own, bound in known:
            self._compute(one, bound, own, tags)

    def _check_caches(self, launch: Launch, reads: Reads) -> None:
        """A cache must be mapped as far as the step reads and writes it."""
        if reads.length is not None:
            filled = self._whole_number(reads.length) + reads.rows
            for address, placement in reads.caches:
                for start, end in placement.windows(0, filled):
                    self._range(address + start, end - start, f"{launch.step.node}: cache of")

    def _reads(self, launch: Launch) -> Reads:
        keys = [p for p in launch.placed if p.operand.ref.kind == "key"]
        caches = tuple((p.address, p.placement) for p in launch.placed if p.placement is not None)
        by_name = {p.operand.name: p for p in launch.placed}
        return Reads(
            tuple(
                KeyRead(self._find(p.address)[0], p.address, p.address + p.nbytes, ref.index, name, ref.offset_bytes)
                for p in keys
                for name, ref in ((p.operand.name, p.operand.ref),)
            ),
            sum(p.nbytes for p in keys),
            sum(p.nbytes for p in keys if self._find(p.address)[0].host is not None),
            caches,
            math.prod(by_name["query"].operand.ref.shape[:-1]) if caches else 0,
            by_name["length"] if caches else None,
        )

    # -- bookkeeping

    def _region(
        self, nbytes: int, what: str, granules: list[Granule | None] | None, host: NDArray[np.uint8] | None = None
    ) -> Region:
        region = Region(self._next_address, nbytes, what, granules, host)
        span = -(-nbytes // self.granule_bytes) + 1  # one granule of nothing between regions catches overruns
        self._next_address += span * self.granule_bytes
        self._regions[region.address] = region
        self._addresses.append(region.address)
        self._begin(region)
        return region

    def _forget(self, region: Region) -> None:
        del self._regions[region.address]
        self._addresses.remove(region.address)
        self._bound.clear()  # what was worked out for memory that is gone must not be used again
        self._end(region)

    def _find(self, address: int) -> tuple[Region, int]:
        at = bisect_right(self._addresses, address) - 1
        region = self._regions[self._addresses[at]] if at >= 0 else None
        if region is None or address >= region.end:
            raise DeviceFailure(f"address {address:#x} belongs to nothing")
        return region, address - region.address

    def _range(self, address: int, nbytes: int, what: str) -> tuple[Region, int]:
        region, offset = self._find(address)
        if address + nbytes > region.end:
            raise DeviceFailure(f"{what} {nbytes} bytes at {address:#x} runs past {region.what}")
        if region.granules is not None:
            first, last = offset // self.granule_bytes, (offset + max(nbytes, 1) - 1) // self.granule_bytes
            if None in region.granules[first : last + 1]:
                raise DeviceFailure(f"{what} {nbytes} bytes at {address:#x} touches unmapped addresses")
        return region, offset

    def _writable(self, address: int, nbytes: int, what: str) -> tuple[Region, int]:
        region, offset = self._range(address, nbytes, what)
        if region.host is not None:
            raise DeviceFailure(f"{what} {nbytes} bytes at {address:#x} would write to {region.what}")
        return region, offset

    def _slot(self, address: int) -> tuple[Region, int]:
        region, offset = self._find(address)
        if region.granules is None or offset % self.granule_bytes:
            raise DeviceFailure(f"{address:#x} is no granule of a reservation")
        return region, offset // self.granule_bytes

    def _check_live(self, granule: Granule) -> None:
        if granule not in self._live:
            raise DeviceFailure(f"granule {granule.serial} is none of this device's, or was given back")

    def _whole_number(self, placed: Placed) -> int:
        region, offset = self._find(placed.address)
        return int.from_bytes(self._get(region, offset, 8), "little", signed=True)

    def _model(self, ns: float) -> None:
        self.tally.add("modelled_ns", round(ns))


def _host_address(source: NDArray[Any]) -> int:
    """Where an array's bytes lie; `ctypes.data` says the same and takes ten times as long."""
    address: int = source.__array_interface__["data"][0]
    return address
