"""CUDA forms of kernels: from a step to source text, launch geometry and arguments; nothing here needs a GPU.

A source file holds bodies, written against names: `x_t` and `x` for operand x, `P_eps` for a parameter, and what the
form's geometry adds. The text before a body (types, constants, the signature) is made from the step itself, so that a
body and the arguments that it gets cannot disagree. Row counts are run-time numbers: all of a model's plans share one
variant for each kernel and width. The grid's third dimension is the sequence of a batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from engine.plan import Experts, Operand, Ref, Step

Refs = Mapping[str, Ref]
Params = Mapping[str, Any]
Scalar = int | float | tuple[int, ...]

THREADS = 256
_MOST_APART = 3840
"""Experts of a bank, whose addresses are arguments: of those a launch takes 32,764 bytes."""
_CONSTANT = ("key", "constant", "host")
"""Kinds of operands that no kernel writes."""
_FOLDER = Path(__file__).parent
_SUPPORT = "support"
C_TYPES: Mapping[str, str] = {
    "float32": "float",
    "float16": "half_t",
    "bfloat16": "bfloat16_t",
    "float64": "double",
    "uint8": "unsigned char",
    "int8": "signed char",
    "uint16": "unsigned short",
    "int16": "short",
    "uint32": "unsigned int",
    "int32": "int",
    "uint64": "unsigned long long",
    "int64": "long long",
    "bool": "bool",
    "int4": "signed char",
    "uint4": "unsigned char",
}
"""Element types as the sources spell them; half types are in support.cu, and host tables of 4 bits are unpacked."""


class NoForm(Exception):
    """A kernel has no CUDA form for these types; the text says which."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a step is launched: blocks in two dimensions, and what its body is told beside operands and parameters.

    `scalars` are run-time arguments by name: whole numbers, floats, or lists of whole numbers of a fixed length.
    `defines` are compiled in. `tickets` are counters of a sequence, 0 where a launch begins and where it ends, by which
    its blocks find out who of them ends last.
    """

    blocks: tuple[int, int]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    defines: Mapping[str, str | int] = field(default_factory=dict)
    threads: int = THREADS
    shared_bytes: int = 0
    tickets: int = 0


@dataclass(frozen=True, slots=True)
class CudaForm:
    """A kernel's CUDA form: the stem of its source file, and its geometry from operands and parameters.

    `runtime` are parameters that differ between plans of one model and so are arguments; the others are compiled in.
    `faults`: the body may find an index beyond the elements and reports it. `early`: the body itself waits for what the
    kernels before it write, having read weights first; for the others the entry waits. `heads` are sources whose text
    stands before, in order.
    """

    source: str
    geometry: Callable[[Refs, Params], Geometry]
    runtime: tuple[str, ...] = ()
    faults: bool = False
    early: bool = False
    heads: tuple[str, ...] = ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Stems of its source files, in order."""
        return (*self.heads, self.source)


@dataclass(frozen=True, slots=True)
class Variant:
    """Source text of one kernel for given types and constants; equal text compiles to the same code."""

    function: str
    text: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step ready to be bound: its variant, geometry, and the order of its arguments."""

    variant: Variant
    geometry: Geometry
    operands: tuple[str, ...]
    """Names of the operands, one pointer each, in the order of the step."""
    scalars: tuple[Scalar, ...]
    """What follows the pointers."""
    faults: bool


def prepare(
    form: CudaForm,
    step: Step,
    strides: Mapping[str, tuple[int, int]],
    sequences: int = 1,
    capacity: int | None = None,
) -> Prepared:
    """A step's variant and arguments, for one sequence or for several at once.

    `strides` are elements from one position, and from one head, to the next in a cache, by operand; `capacity` the
    positions that its caches have room for now, where that is known.
    """
    apart = step.experts
    if apart is not None and apart.count > _MOST_APART:
        raise NoForm(f"{apart.count} experts one by one, {_MOST_APART} is the most: read banks whole (experts: whole)")
    refs = {o.name: o.ref for o in step.operands} | ({} if apart is None else _bank(apart))
    if capacity is not None:
        caches = {name: refs[name] for name in strides}
        refs |= {name: replace(ref, shape=(capacity, *ref.shape[1:])) for name, ref in caches.items()}
    geometry = form.geometry(refs, step.params)
    scalars: dict[str, Scalar] = {f"P_{n}": step.params[n] for n in form.runtime}
    scalars.update(geometry.scalars)
    for name, (position, head) in strides.items():
        scalars.update({f"{name}_position": position, f"{name}_head": head})
    function = f"assay_{step.kernel}"
    text = "".join(
        (
            _constants(step, form, geometry),
            source(_SUPPORT),
            _signature(step.operands, scalars, apart, faults=form.faults, tickets=geometry.tickets > 0),
            *map(source, form.sources),
            _entry(function, step.operands, geometry.threads, sequences, form.early, apart),
        )
    )
    names = tuple(o.name for o in step.operands)
    return Prepared(Variant(function, text), geometry, names, tuple(scalars.values()), form.faults)


def argument(value: Scalar) -> Any:
    """A run-time scalar as the C value that the signature asks for."""
    if isinstance(value, tuple):
        return (ctypes.c_longlong * len(value))(*value)
    return ctypes.c_longlong(value) if isinstance(value, int) else ctypes.c_float(value)


@cache
def source(stem: str) -> str:
    """Text of a source file."""
    return (_FOLDER / f"{stem}.cu").read_text(encoding="utf-8")


def sources() -> tuple[str, ...]:
    """Stems of all source files that hold bodies."""
    return tuple(sorted(p.stem for p in _FOLDER.glob("*.cu") if p.stem != _SUPPORT))


def _bank(experts: Experts) -> dict[str, Ref]:
    """Parts of experts that lie apart, as they would be of a bank in one piece: what a geometry goes by."""
    return {
        part.name: Ref("key", experts.first_key, part.dtype, (experts.count, *part.shape)) for part in experts.parts
    }


def _constants(step: Step, form: CudaForm, geometry: Geometry) -> str:
    lines = [f"#define KERNEL_{step.kernel} 1"]
    for name, value in step.params.items():
        if name not in form.runtime:
            lines += _define(f"P_{name}", value)
    for name, made in geometry.defines.items():
        lines.append(f"#define {name} {made}")
    return "\n".join(lines) + "\n"


def _define(name: str, value: Any) -> list[str]:
    """A parameter as a constant: text becomes a name to test for; lists are the geometry's business, None is absent."""
    if isinstance(value, str):
        return [f"#define {name}_{value} 1"] if value.isidentifier() else []
    if isinstance(value, bool | int):
        return [f"#define {name} {int(value)}"]
    return [f"#define {name} ((float){float(value).hex()})"] if isinstance(value, float) else []


def _signature(
    operands: tuple[Operand, ...], scalars: Mapping[str, Scalar], apart: Experts | None, *, faults: bool, tickets: bool
) -> str:
    """Types, ARGUMENTS of the kernel, SIGNATURE and PASSED of what it calls.

    Of experts that lie apart a part's name is where that of expert EXPERT is, which the body says.
    """
    lines, arguments = [], []
    for o in operands:
        lines += [f"typedef {C_TYPES[o.ref.dtype]} {o.name}_t;", f"#define HAS_{o.name} 1"]
        # What kernels write must not come from the cache for constants: this one may start before they end.
        alone = " __restrict__" if o.ref.kind in _CONSTANT else ""
        arguments.append(f"{'const ' if o.access == 'r' else ''}{o.name}_t*{alone} {o.name}")
    for name, value in scalars.items():
        kind = f"Numbers<{len(value)}>" if isinstance(value, tuple) else "i64" if isinstance(value, int) else "float"
        arguments.append(f"const {kind} {name}")
    passed: tuple[str, ...] = (*(("fault", "step") if faults else ()), *(("tickets",) if tickets else ()))
    if faults:
        arguments += ["i64* fault", "const int step"]
    if tickets:
        arguments.append("u32* tickets")
    lines.append(f"#define ARGUMENTS {', '.join(arguments)}")
    if apart is not None:
        arguments.append("const i64* experts")
        passed += ("experts",)
        lines.append("#define APART 1")
        for part in apart.parts:
            lines += [f"typedef {C_TYPES[part.dtype]} {part.name}_t;", f"#define HAS_{part.name} 1"]
            lines.append(f"#define {part.name} ((const {part.name}_t*)(experts[EXPERT] + {part.offset_bytes}))")
    for access, name in (("r", "READ"), ("w", "WRITTEN")):
        named = [o.name for o in operands if o.access == access]
        lines.append(f"#define {name} {', '.join(named)}")
    lines.append(f"#define SIGNATURE {', '.join(arguments)}")
    lines.append(f"#define PASSED {', '.join((*(o.name for o in operands), *scalars, *passed))}")
    return "\n".join(lines) + "\n"


def _entry(
    function: str, operands: tuple[Operand, ...], threads: int, sequences: int, early: bool, apart: Experts | None
) -> str:
    """The kernel: the body, for each sequence of a batch at that sequence's own addresses."""
    given, moved = "ARGUMENTS", ""
    if apart is not None:
        given += f", const __grid_constant__ Numbers<{apart.count}> told"
        moved = "const i64* experts = told.at; "
    if sequences > 1:
        given += f", const Numbers<{len(operands)}> strides, const Numbers<{sequences}> sequences"
        moved += "".join(
            f"{o.name} = ({'const ' if o.access == 'r' else ''}{o.name}_t*)"
            f"((const char*){o.name} + strides[{i}] * sequences[blockIdx.z]); "
            for i, o in enumerate(operands)
        )
    head = f'extern "C" __global__ void __launch_bounds__({threads}) {function}({given})'
    begun = "next_may_start(); " if early else "next_may_start(); inputs_ready(); "
    return f"\n{head} {{ {begun}{moved}body(PASSED); }}\n"
