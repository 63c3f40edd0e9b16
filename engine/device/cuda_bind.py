"""Launches as the driver takes them: a step's kernels with their arguments, bound to addresses once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from engine import kernels
from engine.device.base import Launch, Placed, Profile
from engine.device.cuda_card import Card
from engine.device.cuda_host import HostMemory
from engine.kernels.cuda import CudaForm, Geometry, argument, prepare

CACHES = ("kv_key", "kv_value")
"""Kinds of operands that have strides of their own."""
TICKETS_BYTES = 256 << 10
"""Counters that the launches of one stream share, one after another; four bytes each."""


@dataclass(frozen=True, slots=True)
class BoundKernel:
    """One kernel of a launch; `values` keeps alive what `arguments` points to."""

    function: Any
    after_all: Any
    """How it is launched behind anything."""
    after_kernel: Any
    """How it is launched right behind a kernel: it may start before that ends, and waits for it itself."""
    arguments: Any
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """A launch: its kernels in their order, and what the profile and the books say of it."""

    kernels: tuple[BoundKernel, ...]
    read_ns: int
    """What the profile says that reading its keys takes."""
    in_place_bytes: int
    """Of its keys, what it reads in host memory."""


class Binder:
    """Binds launches on one stream of a card. A kernel that may find a fault reports it at `fault_address`."""

    def __init__(self, card: Card, host: HostMemory, profile: Profile, stream: Any, fault_address: int) -> None:
        self._card = card
        self._host = host
        self._profile = profile
        self._stream = stream
        self._fault_address = fault_address
        self.tickets = 0
        """Where `TICKETS_BYTES` of zeros stand, once steps are prepared that count their blocks."""
        self.faulty: list[str] = []
        """Nodes of the steps that may report a fault, by number from 1."""
        self.in_place: dict[int, int] = {}
        """The card's address of a key's host bytes -> how many."""

    def bind(self, launch: Launch) -> Bound:
        """A launch at its addresses."""
        step = launch.step
        strides = {p.operand.name: _strides(p) for p in launch.placed if p.operand.ref.kind in CACHES}
        alone = len(launch.sequences) == 1
        placed = launch.alone(launch.sequences[0]).placed if alone else launch.placed
        keys = [p for p in launch.placed if p.operand.ref.kind == "key"]
        key_bytes = sum(p.nbytes for p in keys)
        in_place_bytes = sum(p.nbytes for p in keys if self._is_in_place(p.address))
        read_ns = self._profile.memory_ns(key_bytes - in_place_bytes) + self._profile.in_place_ns(in_place_bytes)
        made = tuple(
            self._kernel(launch, form, strides, placed, alone=alone) for form in kernels.get(step.kernel).forms
        )
        assert made, "prepare refused it"
        return Bound(made, read_ns, in_place_bytes)

    def _kernel(
        self,
        launch: Launch,
        form: CudaForm,
        strides: dict[str, tuple[int, int]],
        placed: tuple[Placed, ...],
        *,
        alone: bool,
    ) -> BoundKernel:
        step, sequences = launch.step, len(launch.sequences)
        made = prepare(form, step, strides, sequences)
        geometry = made.geometry
        pointers = [p.address if p.host is None else self._host.pin(p.host)[1] for p in placed]
        values: list[Any] = [ctypes.c_void_p(pointer) for pointer in pointers]
        values += [argument(scalar) for scalar in made.scalars]
        if made.faults:
            self.faulty.append(f"{step.node} ({step.op})")
            values += [ctypes.c_void_p(self._fault_address), ctypes.c_int(len(self.faulty))]
        if geometry.tickets:
            assert self.tickets and 4 * geometry.tickets * sequences <= TICKETS_BYTES, (geometry.tickets, sequences)
            values.append(ctypes.c_void_p(self.tickets))
        if not alone:
            values += [argument(tuple(p.stride for p in placed)), argument(launch.sequences)]
        return BoundKernel(
            self._card.load(made.variant, geometry.shared_bytes),
            self._configuration(geometry, sequences, early=False),
            self._configuration(geometry, sequences, early=self._card.starts_early),
            (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)),
            tuple(values),
        )

    def _is_in_place(self, address: int) -> bool:
        return any(start <= address < start + nbytes for start, nbytes in self.in_place.items())

    def _configuration(self, geometry: Geometry, sequences: int, *, early: bool) -> Any:
        driver = self._card.driver
        made = driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY = geometry.blocks
        made.gridDimZ, made.blockDimX, made.blockDimY, made.blockDimZ = sequences, geometry.threads, 1, 1
        made.sharedMemBytes, made.hStream = geometry.shared_bytes, self._stream
        if early:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            made.attrs, made.numAttrs = [attribute], 1
        return made


def _strides(placed: Placed) -> tuple[int, int]:
    """Elements from one cached position, and from one head, to the next."""
    if placed.placement is None:
        _, heads, size = placed.operand.ref.shape
        return heads * size, size
    position, head, element = placed.placement.strides
    return position // element, head // element
