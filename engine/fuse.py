"""The target's fusions: neighbouring steps that one launch can do become one step, on whatever device the plan runs.

What is fused is read off kernels and operands, never off names. A buffer that nobody else reads goes with the step that
made it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.kernels.nbits import MOST, tiled
from engine.plan import Operand, Ref, Step


@dataclass(frozen=True, slots=True)
class _Links:
    """Who writes and who reads each buffer, as positions in a list of steps."""

    writers: Mapping[int, Sequence[int]]
    readers: Mapping[int, Sequence[int]]


def fuse(steps: Sequence[Step], kept: Iterable[int] = ()) -> tuple[Step, ...]:
    """The same pass in fewer steps; `kept` are buffers that somebody reads after the last of them."""
    held = frozenset(kept)
    for rule in (_biases, _gates, _siblings, _norms):
        steps = rule(list(steps), held)
    return tuple(replace(step, index=i) for i, step in enumerate(steps))


def _biases(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """A product and the addition of a row to it."""
    links = _links(steps)
    made: list[Step | None] = list(steps)
    for at, step in enumerate(steps):
        if step.kernel != "add":
            continue
        for x, row in (("a", "b"), ("b", "a")):
            before = _sole_maker(steps, links, kept, _ref(step, x))
            bias = _ref(step, row)
            if before is None or bias.kind != "key" or "bias" in _names(steps[before]):
                continue
            if not _is_product(steps[before]) or bias.shape != (steps[before].params["N"],):
                continue
            more = (Operand("bias", bias), Operand("y", _ref(step, "y"), "w"))
            made[at], made[before] = _with(steps[before], more, without=("y",), tail=step), None
            break
    return [s for s in made if s is not None]


def _gates(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """Two products of one x, silu of the first times the second."""
    links = _links(steps)
    gone: set[int] = set()
    made: dict[int, Step] = {}
    for at, step in enumerate(steps):
        if step.kernel != "mul":
            continue
        for left, right in (("a", "b"), ("b", "a")):
            silu = _silu_of(steps, links, kept, _ref(step, left))
            value = _sole_maker(steps, links, kept, _ref(step, right))
            if silu is None or value is None:
                continue
            gate = silu[0]
            pair = steps[gate], steps[value]
            if not _alike(*pair) or pair[0].params["N"] != pair[1].params["N"] or _has(pair, "bias"):
                continue
            joined = _joined(pair, gated=True)
            made[at] = _with(joined, (Operand("y", _ref(step, "y"), "w"),), without=("y", "y2"), tail=step)
            gone |= {*silu, value}
            break
    return [made.get(i, s) for i, s in enumerate(steps) if i not in gone]


def _silu_of(steps: list[Step], links: _Links, kept: frozenset[int], ref: Ref) -> tuple[int, ...] | None:
    """The product whose silu a buffer is, and the steps between."""
    last = _sole_maker(steps, links, kept, ref)
    if last is None:
        return None
    step = steps[last]
    if step.kernel == "swish" and step.params.get("alpha") == 1.0:
        product = _sole_maker(steps, links, kept, _ref(step, "a"))
        return None if product is None else (product, last)
    if step.kernel != "mul":
        return None
    for x, s in (("a", "b"), ("b", "a")):
        sigmoid = _sole_maker(steps, links, kept, _ref(step, s))
        if sigmoid is None or steps[sigmoid].kernel != "sigmoid" or _ref(steps[sigmoid], "a") != _ref(step, x):
            continue
        product = _maker(links, _ref(step, x))
        if product is not None and set(links.readers[_ref(step, x).index]) == {sigmoid, last}:
            return (product, sigmoid, last)
    return None


def _siblings(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """Products of one x, where the first of them stands: they need nothing else."""
    made: list[Step] = []
    for step in steps:
        for at, before in enumerate(made):
            joins = _alike(before, step) and not before.params.get("gated") and not step.params.get("gated")
            if joins and len(_ends(before)) < len(MOST):
                made[at] = _joined((before, step))
                break
        else:
            made.append(step)
    return made


def _norms(steps: list[Step], kept: frozenset[int]) -> list[Step]:
    """A residual goes with the product that it is added to, a norm with the products that read what it makes."""
    links = _links(steps)
    made: list[Step | None] = list(steps)
    for at, step in enumerate(steps):
        if step.kernel not in ("rms_norm", "skip_rms_norm"):
            continue
        x = _ref(step, "x")
        if step.kernel == "skip_rms_norm":
            total = _ref(step, "sum")
            found = None if _has((step,), "bias") else _with_residual(made, links, kept, step)
            if found is None:
                continue
            before, product = found
            made[before], x = product, total
            made[at] = _normed_alone(step, x)
        readers = links.readers.get(_ref(step, "y").index, ())
        if not readers or _ref(step, "y").index in kept:
            continue
        products = [made[r] for r in readers]
        if all(p is not None and _may_norm(p, step, x) for p in products):
            for r, p in zip(readers, products, strict=True):
                assert p is not None
                made[r] = _normed(p, step, x)
            made[at] = None
    return [s for s in made if s is not None]


def _with_residual(
    steps: list[Step | None], links: _Links, kept: frozenset[int], norm: Step
) -> tuple[int, Step] | None:
    """The product that makes one of the norm's summands, with the other added, and where it stands."""
    for of_product, other in (("skip", "x"), ("x", "skip")):
        ref = _ref(norm, of_product)
        before = _maker(links, ref)
        if before is None or ref.index in kept or len(links.readers.get(ref.index, ())) != 1:
            continue
        product = steps[before]
        if product is None or not _is_product(product) or len(_ends(product)) > 1 or _has((product,), "residual"):
            continue
        if product.params.get("gated") or _ref(product, "y") != ref:
            continue
        if (_maker(links, _ref(norm, other)) or -1) > before:
            continue  # what is added is not there yet
        more = (Operand("residual", _ref(norm, other)), Operand("y", _ref(norm, "sum"), "w"))
        return before, _with(product, more, without=("y",))
    return None


def _normed_alone(step: Step, x: Ref) -> Step:
    operands = (Operand("x", x), *(o for o in step.operands if o.name in ("gamma", "y")))
    return replace(step, kernel="rms_norm", operands=operands)


def _may_norm(product: Step, norm: Step, x: Ref) -> bool:
    read = [o for o in product.operands if o.ref.kind == "buffer" and o.ref.index == _ref(norm, "y").index]
    return (
        _is_product(product)
        and not _has((product,), "gamma")
        and [o.name for o in read] == ["x"]
        and x.dtype == read[0].ref.dtype == "float32"
        and product.params["K"] == _ref(norm, "gamma").shape[-1]
    )


def _normed(product: Step, norm: Step, x: Ref) -> Step:
    """The product over what the norm read: rows of the same places, since both are as wide."""
    own = _ref(product, "x")
    start = x.offset_bytes + own.offset_bytes - _ref(norm, "y").offset_bytes
    source = replace(x, shape=own.shape, offset_bytes=start)
    rest = tuple(o for o in product.operands if o.name != "x")
    operands = (Operand("x", source), Operand("gamma", _ref(norm, "gamma")), *rest)
    return replace(product, operands=operands, params={**product.params, "eps": norm.params["eps"]})


# -- reading steps


def _links(steps: Sequence[Step]) -> _Links:
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        for o in step.operands:
            if o.ref.kind == "buffer":
                for access, seen in (("w", writers), ("r", readers)):
                    if access in o.access and at not in seen.setdefault(o.ref.index, []):
                        seen[o.ref.index].append(at)
    return _Links(writers, readers)


def _maker(links: _Links, ref: Ref) -> int | None:
    """The one step that writes a buffer."""
    found = links.writers.get(ref.index, ()) if ref.kind == "buffer" else ()
    return found[0] if len(found) == 1 else None


def _sole_maker(steps: Sequence[Step], links: _Links, kept: frozenset[int], ref: Ref) -> int | None:
    """The one step that writes a buffer, as it is read here, where one step alone reads it."""
    at = _maker(links, ref)
    if at is None or ref.index in kept or len(links.readers.get(ref.index, ())) != 1:
        return None
    written = [o.ref for o in steps[at].operands if o.access == "w" and o.ref.index == ref.index]
    same = [r for r in written if r.offset_bytes == ref.offset_bytes and r.dtype == ref.dtype]
    return at if same and math.prod(same[0].shape) == math.prod(ref.shape) else None


def _names(step: Step) -> set[str]:
    return {o.name for o in step.operands}


def _has(steps: Iterable[Step], name: str) -> bool:
    return any(name in _names(s) for s in steps)


def _ref(step: Step, name: str) -> Ref:
    return next(o.ref for o in step.operands if o.name == name)


def _is_product(step: Step) -> bool:
    return step.kernel == "matmul_nbits" and tiled(step.params)


def _ends(step: Step) -> list[str]:
    return [end for end in MOST if f"N{end}" in step.params]


def _alike(left: Step, right: Step) -> bool:
    """Whether two products take the same x in the same way, the second alone so far."""
    if not (_is_product(left) and _is_product(right)) or len(_ends(right)) > 1:
        return False
    if _has((left, right), "residual") or _ref(left, "x") != _ref(right, "x"):
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
    end = MOST[len(_ends(left))]
    more = [replace(o, name=f"{o.name}{end}") for o in right.operands if o.name != "x"]
    params = {**left.params, f"N{end}": right.params["N"]} | ({"gated": True} if gated else {})
    operands = (*(o for o in left.operands if o.access == "r"), *(o for o in more if o.access == "r"))
    written = (*(o for o in left.operands if o.access == "w"), *(o for o in more if o.access == "w"))
    return replace(left, operands=operands + written, params=params)


def _with(step: Step, more: tuple[Operand, ...], *, without: tuple[str, ...], tail: Step | None = None) -> Step:
    """A step with other operands, known by the node of the last step that it stands for."""
    operands = (*(o for o in step.operands if o.name not in without), *more)
    named = step if tail is None else replace(step, node=tail.node, op=tail.op)
    return replace(named, operands=operands)
