"""Launches as the driver takes them: a step's kernels with their arguments, bound to addresses once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from engine import kernels
from engine.device.base import Launch, Placed, Profile
from engine.device.cuda_card import Card
from engine.device.cuda_host import HostMemory
from engine.expert_steps import addresses_of
from engine.kernels.cuda import CudaForm, Geometry, Prepared, argument, prepare
from engine.plan import Step

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
class _Form:
    """One kernel of a step, ready for any addresses."""

    made: Prepared
    function: Any
    after_all: Any
    after_kernel: Any


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
        self._routed: dict[tuple[Any, ...], tuple[_Form, ...]] = {}  # of steps that are bound anew for each pass

    def bind(self, launch: Launch) -> Bound:
        """A launch at its addresses."""
        alone = len(launch.sequences) == 1
        placed = launch.alone(launch.sequences[0]).placed if alone and any(launch.sequences) else launch.placed
        keys = [p for p in launch.placed if p.operand.ref.kind == "key"]
        key_bytes = sum(p.nbytes for p in keys)
        in_place_bytes = sum(p.nbytes for p in keys if self._is_in_place(p.address))
        read_ns = self._profile.memory_ns(key_bytes - in_place_bytes) + self._profile.in_place_ns(in_place_bytes)
        forms = self._forms(launch)
        assert forms, "prepare refused it"
        return Bound(tuple(self._kernel(launch, form, placed, alone=alone) for form in forms), read_ns, in_place_bytes)

    def _forms(self, launch: Launch) -> tuple[_Form, ...]:
        """What a launch's kernels are, whatever its addresses; kept for steps whose experts are others each time."""
        step, sequences = launch.step, len(launch.sequences)
        if not launch.once:
            caches = [p for p in launch.placed if p.operand.ref.kind in CACHES]
            strides = {p.operand.name: _strides(p) for p in caches}
            capacity = next((p.placement.capacity for p in caches if p.placement is not None), None)
            forms = kernels.get(step.kernel).forms
            return tuple(self._form(step, form, strides, sequences, capacity) for form in forms)
        name = (step.node, step.kernel, step.operands, sequences)
        if name not in self._routed:
            self._routed[name] = tuple(self._form(step, form, {}, sequences) for form in kernels.get(step.kernel).forms)
        return self._routed[name]

    def _form(
        self,
        step: Step,
        form: CudaForm,
        strides: dict[str, tuple[int, int]],
        sequences: int,
        capacity: int | None = None,
    ) -> _Form:
        made = prepare(form, step, strides, sequences, capacity)
        return _Form(
            made,
            self._card.load(made.variant, made.geometry.shared_bytes),
            self._configuration(made.geometry, sequences, early=False),
            self._configuration(made.geometry, sequences, early=self._card.starts_early),
        )

    def _kernel(self, launch: Launch, form: _Form, placed: tuple[Placed, ...], *, alone: bool) -> BoundKernel:
        step, made = launch.step, form.made
        experts, placed = placed[len(step.operands) :], placed[: len(step.operands)]
        pointers = [p.address if p.host is None else self._host.pin(p.host)[1] for p in placed]
        values: list[Any] = [ctypes.c_void_p(pointer) for pointer in pointers]
        values += [argument(scalar) for scalar in made.scalars]
        if made.faults:
            self.faulty.append(f"{step.node} ({step.op})")
            values += [ctypes.c_void_p(self._fault_address), ctypes.c_int(len(self.faulty))]
        if tickets := made.geometry.tickets * len(launch.sequences):
            assert self.tickets and 4 * tickets <= TICKETS_BYTES, tickets
            values.append(ctypes.c_void_p(self.tickets))
        if step.experts is not None:
            values.append(argument(tuple(addresses_of(step.experts, experts))))
        if not alone:
            values += [argument(tuple(p.stride for p in placed)), argument(launch.sequences)]
        return BoundKernel(
            form.function,
            form.after_all,
            form.after_kernel,
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
