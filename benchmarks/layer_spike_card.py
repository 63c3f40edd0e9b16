"""What the layer spike stands on: a card through the driver's bindings, and a plan's operands placed and bound on it.

Binding is generic: SIGNATURES gives each kernel's argument order, and nothing here looks at a node.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver, nvrtc
from numpy.typing import NDArray

from engine.graph import DTYPES, Graph
from engine.paging.policy import aligned
from engine.plan import Operand, Plan, Ref, Step

THREADS, POISON = 256, 0xFF
CUDA_SOURCE = Path(__file__).with_suffix(".cu").with_stem("layer_spike")
CONTROL_OFFSETS = {"length": 0, "gap": 8, "ids": 16}
BYTES_OF = {"codes": "uint8", "table": "uint8", "ids": "int64", "length": "int64"}  # the rest is float32 here

Shapes = Mapping[str, tuple[int, ...]]
Geometry = Callable[[Shapes, Mapping[str, Any]], tuple[int, int]]


def _each_row(s: Shapes, _: Mapping[str, Any]) -> tuple[int, int]:
    return math.prod(s["y"][:-1]), 1


def _each_element(s: Shapes, _: Mapping[str, Any]) -> tuple[int, int]:
    return -(-math.prod(s["y"]) // THREADS), 1


def _one(_: Shapes, __: Mapping[str, Any]) -> tuple[int, int]:
    return 1, 1


# Argument order: *operand, ?optional operand, i: and f: params, n: last dimension and e: elements of an operand.
SIGNATURES: Mapping[str, tuple[str, Geometry]] = {
    "rms_norm": ("*x *gamma *y f:eps n:x", _each_row),
    "skip_rms_norm": ("*x *skip *gamma ?bias *y *sum f:eps n:x", _each_row),
    "sigmoid": ("*x *y e:x", _each_element),
    "mul": ("*x *other *y e:x e:other", _each_element),
    "gather_block_quantized": ("*ids *table *scales *y i:width i:bits i:block", _each_row),
    "matmul_nbits": (
        "*x *codes *scales ?zero_points ?bias *y i:N i:K i:bits i:block",
        lambda s, p: (-(-p["N"] // 8), math.prod(s["x"][:-1])),
    ),
    "gqa": (
        "*query ?key ?value *k_cache *v_cache *length ?cos ?sin *y i:heads i:kv_heads i:head_size f:scale f:softcap "
        "i:window i:interleaved n:query n:cos",
        lambda s, p: (p["heads"], math.prod(s["query"][:-1])),
    ),
    "argmax": ("*logits *ids *gap n:logits", _one),
    "advance": ("*length i:rows", _one),
}


class CudaError(RuntimeError):
    """A driver or compiler call that failed, by the name of its code."""


def ask(result: tuple[Any, ...]) -> Any:
    """The value of a bindings call; raises CudaError."""
    if int(result[0]) != 0:
        raise CudaError(getattr(result[0], "name", str(result[0])))
    return result[1] if len(result) == 2 else result[1:]


class Card:
    """Device 0: context, a compute and a copy stream, the granule's properties and the compiled kernels."""

    def __init__(self) -> None:
        ask(driver.cuInit(0))
        self.device = ask(driver.cuDeviceGet(0))
        ask(driver.cuCtxSetCurrent(ask(driver.cuDevicePrimaryCtxRetain(self.device))))
        self.compute, self.copier = (ask(driver.cuStreamCreate(1)) for _ in range(2))  # 1: not ordered with stream 0
        self.prop, self.access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
        self.prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.prop.location.id = 0
        self.access.location = self.prop.location
        self.access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        sizes = driver.CUmemAllocationGranularity_flags
        self.granularity = {
            n: int(
                ask(driver.cuMemGetAllocationGranularity(self.prop, getattr(sizes, f"CU_MEM_ALLOC_GRANULARITY_{n}")))
            )
            for n in ("MINIMUM", "RECOMMENDED")
        }
        start = time.perf_counter()
        module = ask(driver.cuModuleLoadData(compile_kernels()))
        self.compile_ms = (time.perf_counter() - start) * 1e3
        self.functions = {name: ask(driver.cuModuleGetFunction(module, name.encode())) for name in SIGNATURES}

    def sync(self) -> None:
        """Wait for all work."""
        ask(driver.cuCtxSynchronize())

    def event(self, timed: bool = False) -> Any:
        """A new event; without timing unless asked."""
        return ask(driver.cuEventCreate(0 if timed else 2))

    def mark(self, stream: Any) -> Any:
        """An event after all that stands on a stream."""
        event = self.event()
        ask(driver.cuEventRecord(event, stream))
        return event

    def wait(self, stream: Any, event: Any) -> None:
        """What follows on a stream waits for an event."""
        ask(driver.cuStreamWaitEvent(stream, event, 0))

    def alloc(self, nbytes: int) -> int:
        """Plain device memory, poisoned."""
        address = int(ask(driver.cuMemAlloc(max(nbytes, 1))))
        self.fill(address, nbytes)
        return address

    def fill(self, address: int, nbytes: int, byte: int = POISON) -> None:
        """Set bytes, with everything before and after waiting."""
        self.sync()
        ask(driver.cuMemsetD8(address, byte, max(nbytes, 1)))
        self.sync()

    def write(self, address: int, source: NDArray[Any]) -> None:
        """Host bytes to the device, with everything before and after waiting."""
        flat = np.ascontiguousarray(source)
        self.sync()
        ask(driver.cuMemcpyHtoD(address, flat.ctypes.data, flat.nbytes))
        self.sync()  # a copy from pageable memory may return before its last piece has landed

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Device bytes on the host."""
        out = np.empty(nbytes, np.uint8)
        self.sync()
        ask(driver.cuMemcpyDtoH(out.ctypes.data, address, nbytes))
        return out

    def pinned(self, nbytes: int) -> tuple[int, NDArray[np.uint8]]:
        """Pinned host memory that the device can read: its device address and its bytes."""
        place = int(ask(driver.cuMemHostAlloc(nbytes, 2)))  # 2: mapped into the device's addresses
        view = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(place))
        return int(ask(driver.cuMemHostGetDevicePointer(place, 0))), view


def compile_kernels() -> bytes:
    """CUDA_SOURCE as machine code for this card's generation. Raises CudaError with the compiler's log."""
    program = ask(nvrtc.nvrtcCreateProgram(CUDA_SOURCE.read_bytes(), CUDA_SOURCE.name.encode(), 0, [], []))
    try:
        ask(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"]))
    except CudaError as error:
        log = bytearray(ask(nvrtc.nvrtcGetProgramLogSize(program)))
        ask(nvrtc.nvrtcGetProgramLog(program, log))
        raise CudaError(f"{error}: {log.decode()}") from error
    image = bytearray(ask(nvrtc.nvrtcGetCUBINSize(program)))
    ask(nvrtc.nvrtcGetCUBIN(program, image))
    return bytes(image)


class Arena:
    """Reserved addresses with granules under them; `swap` puts a fresh granule where another was."""

    def __init__(self, card: Card, nbytes: int) -> None:
        self.card, self.granule = card, card.granularity["MINIMUM"]
        self.count = -(-max(nbytes, 1) // self.granule)
        self.base = int(ask(driver.cuMemAddressReserve(self.count * self.granule, 0, 0, 0)))
        self.handles = [self.create() for _ in range(self.count)]
        for i, handle in enumerate(self.handles):
            self.map(i, handle)
        card.fill(self.base, self.count * self.granule)

    def create(self) -> Any:
        """A physical granule."""
        return ask(driver.cuMemCreate(self.granule, self.card.prop, 0))

    def map(self, index: int, handle: Any) -> None:
        """Map a granule, readable and writable."""
        ask(driver.cuMemMap(self.base + index * self.granule, self.granule, 0, handle, 0))
        ask(driver.cuMemSetAccess(self.base + index * self.granule, self.granule, [self.card.access], 1))

    def unmap(self, index: int) -> None:
        """Unmap and release a granule; the caller has made sure that nothing reads it."""
        ask(driver.cuMemUnmap(self.base + index * self.granule, self.granule))
        ask(driver.cuMemRelease(self.handles[index]))

    def swap(self, index: int) -> None:
        """Another granule at the same addresses; it is created first, so that it cannot be the old one."""
        fresh = self.create()
        self.unmap(index)
        self.map(index, fresh)
        self.handles[index] = fresh


@dataclass(frozen=True, slots=True)
class Placed:
    """An operand at its address, with the shape that the run gives it (a cache's capacity)."""

    operand: Operand
    address: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """A step bound to addresses; `values` keeps alive what `arguments` points to."""

    step: Step
    placed: tuple[Placed, ...]
    grid: tuple[int, int]
    shared_bytes: int
    arguments: Any
    values: tuple[Any, ...]


class Memory:
    """Everything a plan's Refs point to, placed by the plan's own numbers."""

    def __init__(self, card: Card, graph: Graph, plans: Mapping[int, Plan], capacity: int) -> None:
        plan = plans[1]
        self.card, self.plan, self.capacity = card, plan, capacity
        self.workspace_bytes = max(p.workspace_bytes for p in plans.values())
        self.workspace = card.alloc(self.workspace_bytes)
        self.control = card.alloc(CONTROL_OFFSETS["ids"] + 8 * max(plans))
        self.constants = [card.alloc(c.nbytes) for c in plan.constants]
        for address, constant in zip(self.constants, plan.constants, strict=True):
            card.write(address, constant.data)
        self.kv = [[Arena(card, plan.kv.token_bytes * capacity) for _ in "kv"] for _ in range(plan.kv.layers)]
        self.offsets = [sum(aligned(k.nbytes) for k in plan.keys[:i]) for i in range(len(plan.keys))]
        self.arena = Arena(card, sum(aligned(k.nbytes) for k in plan.keys))
        self.load(range(len(plan.keys)))
        names = {o.ref.name for s in plan.steps for o in s.operands if o.ref.kind == "host"}
        self.host = {name: card.pinned(graph.weights[name].nbytes) for name in names}
        for name, (_, view) in self.host.items():
            view[:] = graph.weights[name].data

    def load(self, keys: Iterable[int]) -> None:
        """Copy keys to their places in the arena."""
        for k in keys:
            self.card.write(self.arena.base + self.offsets[k], self.plan.keys[k].weight.data)

    def address(self, plan: Plan, ref: Ref, moved: Mapping[int, int]) -> int:
        """Where a Ref stands; `moved` places keys elsewhere than in the arena."""
        match ref.kind:
            case "buffer":
                base = self.workspace + plan.buffers[ref.index].offset_bytes
            case "key":
                base = moved.get(ref.index, self.arena.base + self.offsets[ref.index])
            case "constant":
                base = self.constants[ref.index]
            case "host":
                base = self.host[ref.name][0]
            case "control":
                base = self.control + CONTROL_OFFSETS[ref.name]
            case "kv_key" | "kv_value":
                base = self.kv[ref.index][ref.kind == "kv_value"].base
        return base + ref.offset_bytes

    def bind(self, plan: Plan, moved: Mapping[int, int] | None = None) -> list[Bound]:
        """Every step of a plan, bound by the signature table."""
        return [self._bind(plan, step, moved or {}) for step in plan.steps]

    def _bind(self, plan: Plan, step: Step, moved: Mapping[int, int]) -> Bound:
        text, geometry = SIGNATURES[step.kernel]
        placed = {}
        for o in step.operands:
            shape = (self.capacity, *o.ref.shape[1:]) if o.ref.kind in ("kv_key", "kv_value") else o.ref.shape
            assert o.ref.dtype == BYTES_OF.get(o.name, "float32"), f"{step.node}: {o.name} is {o.ref.dtype}"
            placed[o.name] = Placed(o, self.address(plan, o.ref, moved), shape)
        shapes = {name: p.shape for name, p in placed.items()}
        values = tuple(_argument(token, placed, step.params) for token in text.split())
        known = {token[1:] for token in text.split() if token[0] in "*?"}
        assert set(placed) <= known, f"{step.node}: {set(placed) - known} would be dropped"
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        shared = (step.params["head_size"] + self.capacity) * 4 if step.kernel == "gqa" else 0
        return Bound(step, tuple(placed.values()), geometry(shapes, step.params), shared, pointers, values)

    def view(self, placed: Placed) -> NDArray[Any]:
        """An operand's present values, on the host."""
        dtype = DTYPES[placed.operand.ref.dtype]
        raw = self.card.read(placed.address, math.prod(placed.shape) * dtype.itemsize)
        return raw.view(dtype).reshape(placed.shape)


def _argument(token: str, placed: Mapping[str, Placed], params: Mapping[str, Any]) -> Any:
    if token[0] in "*?":
        name = token[1:]
        assert name in placed or token[0] == "?", f"operand {name} is missing"
        return ctypes.c_void_p(placed[name].address if name in placed else 0)
    kind, name = token.split(":")
    if kind in "ne":
        shape = placed[name].shape if name in placed else (0,)
        return ctypes.c_int(shape[-1] if kind == "n" else math.prod(shape))
    return ctypes.c_float(params[name]) if kind == "f" else ctypes.c_int(int(params[name]))
