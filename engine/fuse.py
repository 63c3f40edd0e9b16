"""The target's fusions: neighbouring steps that one launch can do become one step, on whatever device the plan runs.

What is fused is read off kernels and operands, never off names. A buffer that nobody else reads goes with the step that
made it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from engine.fuse_hybrid import NewBuffer, deltas, mixtures, views
from engine.kernels import attention
from engine.kernels.matmul import MOST, ends
from engine.kernels.nbits import tiled
from engine.plan import Operand, Ref, Step
from engine.step_links import Links, changed, has, links_of, maker, operand_names, ref_of, sole_maker


def fuse(steps: Sequence[Step], kept: Iterable[int], buffer: NewBuffer, context: int | None = None) -> tuple[Step, ...]:
    """The same pass in fewer steps; `kept` are buffers that somebody reads after the last of them.

    `buffer` makes room for what lies between two launches, or the blocks, of one step. `context` is how many positions
    there can be, where that is known.
    """
    held = frozenset(kept)
    for rule in (_biases, _gates, _siblings, deltas):
        steps = rule(list(steps), held)
    steps = mixtures(list(steps), held, buffer)
    steps = views(_norms(list(steps), held), held)
    if context is None or context > attention.SHORT:
        steps = [_spread(step, buffer) for step in steps]
    return tuple(replace(step, index=i) for i, step in enumerate(steps))


def _spread(step: Step, buffer: NewBuffer) -> Step:
    """Attention of one row, with room for the parts that a long context goes in, side by side."""
    shape = attention.room(step.params) if step.kernel == "gqa" else None
    if shape is None or math.prod(ref_of(step, "query").shape[:-1]) > 1:
        return step
    room = Operand("parts", buffer(f"{step.node}/parts", "float32", shape), "w")
    return replace(step, operands=(*step.operands, room))


def _biases(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """A product and the addition of a row to it."""
    links = links_of(steps)
    made: list[Step | None] = list(steps)
    for at, step in enumerate(steps):
        if step.kernel != "add":
            continue
        for x, row in (("a", "b"), ("b", "a")):
            before = sole_maker(steps, links, kept, ref_of(step, x))
            bias = ref_of(step, row)
            if before is None or bias.kind != "key" or "bias" in operand_names(steps[before]):
                continue
            if not _is_product(steps[before]) or bias.shape != (steps[before].params["N"],):
                continue
            more = (Operand("bias", bias), Operand("y", ref_of(step, "y"), "w"))
            made[at], made[before] = changed(steps[before], more, without=("y",), tail=step), None
            break
    return [s for s in made if s is not None]


def _gates(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """Two products of one x, silu of the first times the second."""
    links = links_of(steps)
    gone: set[int] = set()
    made: dict[int, Step] = {}
    for at, step in enumerate(steps):
        if step.kernel != "mul":
            continue
        for left, right in (("a", "b"), ("b", "a")):
            silu = _silu_of(steps, links, kept, ref_of(step, left))
            value = sole_maker(steps, links, kept, ref_of(step, right))
            if silu is None or value is None:
                continue
            gate = silu[0]
            pair = steps[gate], steps[value]
            if not _alike(*pair) or pair[0].params["N"] != pair[1].params["N"] or has(pair, "bias"):
                continue
            joined = _joined(pair, gated=True)
            made[at] = changed(joined, (Operand("y", ref_of(step, "y"), "w"),), without=("y", "y2"), tail=step)
            gone |= {*silu, value}
            break
    return [made.get(i, s) for i, s in enumerate(steps) if i not in gone]


def _silu_of(steps: list[Step], links: Links, kept: frozenset[int], ref: Ref) -> tuple[int, ...] | None:
    """The product whose silu a buffer is, and the steps between."""
    last = sole_maker(steps, links, kept, ref)
    if last is None:
        return None
    step = steps[last]
    if step.kernel == "swish" and step.params.get("alpha") == 1.0:
        product = sole_maker(steps, links, kept, ref_of(step, "a"))
        return None if product is None else (product, last)
    if step.kernel != "mul":
        return None
    for x, s in (("a", "b"), ("b", "a")):
        sigmoid = sole_maker(steps, links, kept, ref_of(step, s))
        if sigmoid is None or steps[sigmoid].kernel != "sigmoid" or ref_of(steps[sigmoid], "a") != ref_of(step, x):
            continue
        product = maker(links, ref_of(step, x))
        if product is not None and set(links.readers[ref_of(step, x).index]) == {sigmoid, last}:
            return (product, sigmoid, last)
    return None


def _siblings(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """Products of one x, where the first of them stands: they need nothing else."""
    made: list[Step] = []
    for step in steps:
        for at, before in enumerate(made):
            codes = _alike(before, step) and not before.params.get("gated") and not step.params.get("gated")
            if (codes or _are_dense(before, step)) and len(ends(before.params)) < len(MOST):
                made[at] = _joined((before, step))
                break
        else:
            made.append(step)
    return made


def _norms(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """A residual goes with the product that it is added to, a norm with the products that read what it makes."""
    links = links_of(steps)
    made: list[Step | None] = list(steps)
    for at, step in enumerate(steps):
        if step.kernel not in ("rms_norm", "skip_rms_norm"):
            continue
        x = ref_of(step, "x")
        if step.kernel == "skip_rms_norm":
            total = ref_of(step, "sum")
            found = None if has((step,), "bias") else _with_residual(made, links, kept, step)
            if found is None:
                continue
            before, product = found
            made[before], x = product, total
            made[at] = _normed_alone(step, x)
        readers = links.readers.get(ref_of(step, "y").index, ())
        if not readers or ref_of(step, "y").index in kept:
            continue
        products = [made[r] for r in readers]
        if all(p is not None and _may_norm(p, step, x) for p in products):
            for r, p in zip(readers, products, strict=True):
                assert p is not None
                made[r] = _normed(p, step, x)
            made[at] = None
    return [s for s in made if s is not None]


def _with_residual(steps: list[Step | None], links: Links, kept: frozenset[int], norm: Step) -> tuple[int, Step] | None:
    """The product that makes one of the norm's summands, with the other added, and where it stands."""
    for of_product, other in (("skip", "x"), ("x", "skip")):
        ref = ref_of(norm, of_product)
        before = maker(links, ref)
        if before is None or ref.index in kept or len(links.readers.get(ref.index, ())) != 1:
            continue
        product = steps[before]
        if product is None or not (_is_product(product) or product.kernel == "mixture"):
            continue
        if len(ends(product.params)) > 1 or has((product,), "residual"):
            continue
        if product.params.get("gated") or ref_of(product, "y") != ref:
            continue
        if (maker(links, ref_of(norm, other)) or -1) > before:
            continue  # what is added is not there yet
        more = (Operand("residual", ref_of(norm, other)), Operand("y", ref_of(norm, "sum"), "w"))
        return before, changed(product, more, without=("y",))
    return None


def _normed_alone(step: Step, x: Ref) -> Step:
    operands = (Operand("x", x), *(o for o in step.operands if o.name in ("gamma", "y")))
    return replace(step, kernel="rms_norm", operands=operands)


def _may_norm(product: Step, norm: Step, x: Ref) -> bool:
    read = [o for o in product.operands if o.ref.kind == "buffer" and o.ref.index == ref_of(norm, "y").index]
    return (
        (_is_product(product) or _is_dense(product) or product.kernel == "mixture")
        and not has((product,), "gamma")
        and [o.name for o in read] == ["x"]
        and x.dtype == read[0].ref.dtype == "float32"
        and read[0].ref.shape[-1] == ref_of(norm, "gamma").shape[-1]
    )


def _normed(product: Step, norm: Step, x: Ref) -> Step:
    """The product over what the norm read: rows of the same places, since both are as wide."""
    own = ref_of(product, "x")
    start = x.offset_bytes + own.offset_bytes - ref_of(norm, "y").offset_bytes
    source = replace(x, shape=own.shape, offset_bytes=start)
    rest = tuple(o for o in product.operands if o.name != "x")
    operands = (Operand("x", source), Operand("gamma", ref_of(norm, "gamma")), *rest)
    return replace(product, operands=operands, params={**product.params, "eps": norm.params["eps"]})


# -- reading steps


def _is_product(step: Step) -> bool:
    return step.kernel == "matmul_nbits" and tiled(step.params)


def _is_dense(step: Step) -> bool:
    return step.kernel == "matmul" and not step.params["transposed"]


def _are_dense(left: Step, right: Step) -> bool:
    """Whether two products with plain weights take the same x, the second alone so far."""
    if not (_is_dense(left) and _is_dense(right)) or len(ends(right.params)) > 1 or has((left, right), "gamma"):
        return False
    same = ref_of(left, "x") == ref_of(right, "x") and left.params["K"] == right.params["K"]
    return same and ref_of(left, "weight").dtype == ref_of(right, "weight").dtype


def _alike(left: Step, right: Step) -> bool:
    """Whether two products take the same x in the same way, the second alone so far."""
    if not (_is_product(left) and _is_product(right)) or len(ends(right.params)) > 1:
        return False
    if has((left, right), "residual") or ref_of(left, "x") != ref_of(right, "x"):
        return False
    same = all(left.params[n] == right.params[n] for n in ("K", "bits", "block"))
    types = [
        {n: o.ref.dtype for n in ("scales", "zero_points", "bias") for o in s.operands if o.name == n}
        for s in (left, right)
    ]
    return same and types[0] == types[1]


def _joined(pair: tuple[Step, Step], *, gated: bool = False) -> Step:
    """Two products as one step: the second's weight and output get the next ending."""
    left, right = pair
    end = MOST[len(ends(left.params))]
    more = [replace(o, name=f"{o.name}{end}") for o in right.operands if o.name != "x"]
    params = {**left.params, f"N{end}": right.params["N"]} | ({"gated": True} if gated else {})
    operands = (*(o for o in left.operands if o.access == "r"), *(o for o in more if o.access == "r"))
    written = (*(o for o in left.operands if o.access == "w"), *(o for o in more if o.access == "w"))
    return replace(left, operands=operands + written, params=params)
