"""Fusions of hybrid decoders: a mixture of experts with what is added behind it, gated delta attention with what stands
around it, and splits of one row, which move nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.graph import DTYPES
from engine.kernels import delta, mixture
from engine.plan import Operand, Ref, Step
from engine.routing import routed
from engine.step_links import Links, has, links_of, maker, ref_of, sole_maker

NewBuffer = Callable[[str, str, tuple[int, ...]], Ref]
"""Makes a buffer of a name, an element type and a shape."""


def mixtures(steps: list[Step], kept: frozenset[int], buffer: NewBuffer) -> list[Step]:
    """A mixture whose codes tensor cores take, and the shared expert's gated addition to it."""
    links = links_of(steps)
    made: list[Step | None] = list(steps)
    for at, step in enumerate(steps):
        if step.kernel != "moe" or not mixture.serves(step.params) or routed(step) is None:
            continue
        place, own, gone = at, {o.name: o for o in step.operands}, [at]
        behind = _reader(links, kept, own["y"].ref)
        if behind is not None and steps[behind].kernel == "gated_add" and ref_of(steps[behind], "a") == own["y"].ref:
            gate = sole_maker(steps, links, kept, ref_of(steps[behind], "c"))
            tokens = math.prod(step.operands[0].ref.shape[:-1])
            if (
                gate is not None
                and steps[gate].kernel == "sigmoid"
                and math.prod(ref_of(steps[gate], "a").shape) == tokens
            ):
                place, gone = behind, [at, gate]
                own |= {
                    "other": Operand("other", ref_of(steps[behind], "b")),
                    "other_gate": Operand("other_gate", ref_of(steps[gate], "a")),
                    "y": Operand("y", ref_of(steps[behind], "y"), "w"),
                }
        own |= {o.name: o for o in _scratch(step, own["routed"].ref.shape, own["x"].ref.shape[-1], buffer)}
        for one in gone:
            made[one] = None
        made[place] = replace(step, kernel="mixture", operands=(*(o for o in own.values() if o.name != "y"), own["y"]))
    return [s for s in made if s is not None]


def deltas(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """Gated delta attention, from the split of what the convolution made to the gated norm."""
    links = links_of(steps)
    made: list[Step | None] = list(steps)
    for at in range(len(steps)):
        found = _delta(steps, links, kept, at)
        if found is not None:
            for one in found.gone:
                made[one] = None
            made[found.place] = found.step
    return [s for s in made if s is not None]


def views(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """A split whose parts lie one behind another already: who reads a part reads it where it lies."""
    links = links_of(steps)
    moved: dict[int, Ref] = {}
    rest = []
    for step in steps:
        step = _reading(step, moved)
        written = [o.ref for o in step.operands if o.access == "w"]
        if step.kernel != "split" or not _is_flat(step) or any(r.index in kept for r in written):
            rest.append(step)
            continue
        source = ref_of(step, "a")
        alone = all(maker(links, r) is not None and r.offset_bytes == 0 for r in written)
        if source.kind != "buffer" or source.index in kept or not alone or len(links.writers[source.index]) != 1:
            rest.append(step)
            continue
        start = source.offset_bytes
        for ref in written:
            moved[ref.index] = replace(source, offset_bytes=start)
            start += math.prod(ref.shape) * DTYPES[ref.dtype].itemsize
    return rest


@dataclass(frozen=True, slots=True)
class _Found:
    step: Step
    place: int
    gone: tuple[int, ...]


def _delta(steps: Sequence[Step], links: Links, kept: frozenset[int], at: int) -> _Found | None:
    step = steps[at]
    p = step.params
    if step.kernel != "linear_attention" or p["rule"] != "gated_delta" or not has((step,), "state"):
        return None
    batch, heads, dk, dv = ref_of(step, "state").shape
    if batch != 1 or p["q_heads"] != p["k_heads"] or heads != p["kv_heads"] or not delta.serves(dk, dv):
        return None
    q, scale, scaled = _scaled(steps, links, kept, ref_of(step, "q"))
    norms = [_norm_of(steps, links, kept, ref, dk) for ref in (q, ref_of(step, "k"))]
    gate = _both_of(steps, links, kept, (ref_of(step, "decay"), ref_of(step, "beta")), "linear_gate")
    last = _reader(links, kept, ref_of(step, "y"))
    if None in norms or gate is None or last is None or steps[last].kernel != "gated_rms_norm":
        return None
    end = steps[last]
    parts = (*(ref_of(steps[n], "a") for n in norms if n is not None), ref_of(step, "v"))
    cut = _both_of(steps, links, kept, parts, "split")
    if cut is None or ref_of(end, "a") != ref_of(step, "y") or math.prod(ref_of(end, "b").shape) != dv:
        return None
    source, sizes = ref_of(steps[cut], "a"), (p["q_heads"] * dk, p["q_heads"] * dk, heads * dv)
    rank = len(source.shape)
    if tuple(steps[cut].params["sizes"]) != sizes or steps[cut].params["axis"] != rank - 1 or rank != 3:
        return None
    if source.shape[0] != 1 or math.prod(ref_of(steps[gate], "b").shape) != heads:
        return None
    gates = [Operand(name, ref_of(steps[gate], name)) for name in "abcd"]
    operands = [
        Operand("qkv", source),
        *gates,
        *([] if scale is None else [Operand("scale", scale)]),
        next(o for o in step.operands if o.name == "state"),
        Operand("gamma", ref_of(end, "b")),
        Operand("gate", ref_of(end, "c")),
        Operand("y", ref_of(end, "y"), "w"),
    ]
    params = {name: p[name] for name in ("q_heads", "kv_heads", "scale")} | {"eps": end.params["eps"]}
    gone = (at, gate, cut, *(n for n in norms if n is not None), *scaled)
    return _Found(replace(step, kernel="delta", operands=tuple(operands), params=params), last, gone)


def _scaled(
    steps: Sequence[Step], links: Links, kept: frozenset[int], ref: Ref
) -> tuple[Ref, Ref | None, tuple[int, ...]]:
    """What a buffer was before one number multiplied it, that number, and the step; or itself."""
    at = sole_maker(steps, links, kept, ref)
    if at is not None and steps[at].kernel == "mul":
        for x, number in (("a", "b"), ("b", "a")):
            by = ref_of(steps[at], number)
            if by.kind == "constant" and math.prod(by.shape) == 1:
                return ref_of(steps[at], x), by, (at,)
    return ref, None, ()


def _norm_of(steps: Sequence[Step], links: Links, kept: frozenset[int], ref: Ref, size: int) -> int | None:
    """The step that takes heads of `size` at length 1."""
    at = sole_maker(steps, links, kept, ref)
    if at is None or steps[at].kernel != "lp_norm" or steps[at].params["p"] != 2:
        return None
    shape = ref_of(steps[at], "a").shape
    return at if steps[at].params["axis"] == len(shape) - 1 and shape[-1] == size else None


def _both_of(steps: Sequence[Step], links: Links, kept: frozenset[int], refs: Sequence[Ref], kernel: str) -> int | None:
    """The step of a kernel whose outputs these are, all of them and in this order, each read once."""
    makers = {sole_maker(steps, links, kept, ref) for ref in refs}
    at = makers.pop()
    if makers or at is None or steps[at].kernel != kernel:
        return None
    written = [o.ref.index for o in steps[at].operands if o.access == "w"]
    return at if written == [ref.index for ref in refs] else None


def _reader(links: Links, kept: frozenset[int], ref: Ref) -> int | None:
    """The one step that reads a buffer."""
    found = links.readers.get(ref.index, ()) if ref.kind == "buffer" and ref.index not in kept else ()
    return found[0] if len(found) == 1 else None


def _scratch(step: Step, chosen: tuple[int, ...], width: int, buffer: NewBuffer) -> tuple[Operand, Operand]:
    """Room for the experts' activations, with a norm's factors behind them, and for the experts' shares."""
    rows = ref_of(step, "fc1").shape[1]
    columns = mixture.padded(rows // 2 if step.params["activation"] == "swiglu" else rows)
    room = buffer(f"{step.node}/hidden", "float32", (math.prod(chosen) * columns + width,))
    share = buffer(f"{step.node}/share", "float32", chosen)
    return Operand("hidden", replace(room, shape=(*chosen, columns)), "w"), Operand("share", share, "w")


def _is_flat(step: Step) -> bool:
    return math.prod(ref_of(step, "a").shape[: step.params["axis"]]) == 1


def _reading(step: Step, moved: dict[int, Ref]) -> Step:
    """A step that reads some buffers elsewhere."""
    if not any(o.ref.kind == "buffer" and o.ref.index in moved for o in step.operands):
        return step
    operands = []
    for o in step.operands:
        to = moved.get(o.ref.index) if o.ref.kind == "buffer" else None
        if to is not None:
            ref = replace(o.ref, index=to.index, name=to.name, offset_bytes=to.offset_bytes + o.ref.offset_bytes)
            o = replace(o, ref=ref)
        operands.append(o)
    return replace(step, operands=tuple(operands))
