"""Operators that move elements: shapes are known at build, so nothing here reads a size on the host."""

from __future__ import annotations

import math

import numpy as np

from engine.graph import DTYPES, Node
from engine.lower import Lowering, wide
from engine.ops import op
from engine.ops.attributes import whole
from engine.ops.matmul import FLOATS
from engine.values import Const, Ids, Mask, MaskShape, Positions, Refusal, Tensor, Transposed, WeightValue

Operand = Tensor | WeightValue | Const


@op("", "Identity")
def identity(b: Lowering, node: Node) -> None:
    """The same value under another name."""
    b.set(node.output(0), b.peek(node.input(0)) or b.value(node.input(0)))


@op("", "Constant")
def constant(b: Lowering, node: Node) -> None:
    """A value written in the graph."""
    for name in ("value", "value_int", "value_ints", "value_float", "value_floats"):
        if name in node.attributes:
            array = np.asarray(node.attributes[name])
            if name in ("value_float", "value_floats"):
                array = array.astype(np.float32)
            if str(array.dtype) in DTYPES:
                b.set(node.output(0), Const(array))
                return
    raise Refusal("constant without a numeric value")


@op("", "ConstantOfShape")
def constant_of_shape(b: Lowering, node: Node) -> None:
    """A tensor of one value."""
    shape = b.numbers(node, 0)
    value = np.asarray(node.attributes.get("value", np.zeros(1, np.float32)))
    if shape is None or value.size != 1 or str(value.dtype) not in DTYPES:
        raise Refusal("shape or value is not served")
    b.set(node.output(0), Const(np.full(shape, value.reshape(-1)[0], value.dtype)))


@op("", "Shape")
def shape(b: Lowering, node: Node) -> None:
    """A shape, known at build but for the attention mask's."""
    value = b.value(node.input(0))
    if isinstance(value, Mask):
        if whole(node, "start", 0) != 0 or "end" in node.attributes:
            raise Refusal("only the attention mask's whole shape is served")
        b.set(node.output(0), MaskShape())
        return
    if isinstance(value, Ids):
        extents: tuple[int, ...] = (1, b.rows)
    elif isinstance(value, Positions | Tensor | WeightValue | Const):
        extents = value.shape
    else:
        raise Refusal(f"shape of {type(value).__name__} is not served")
    start, end = whole(node, "start", 0), node.attributes.get("end", len(extents))
    b.set(node.output(0), Const(np.asarray(extents[slice(start, end)], np.int64)))


@op("", "Reshape")
def reshape(b: Lowering, node: Node) -> None:
    """Another shape for the same bytes: of an initialiser (one key) or of an activation (no copy)."""
    target = b.numbers(node, 1)
    if target is None:
        raise Refusal("the target shape is absent")
    value = b.value(node.input(0))
    if isinstance(value, Positions | Ids):
        _reshape_ids(b, node, value, target)
        return
    x = b.operand(node, 0)
    _view(b, node, x, resolve(x.shape, target, keep_zero=bool(whole(node, "allowzero", 0))))


@op("", "Flatten")
def flatten(b: Lowering, node: Node) -> None:
    """Two dimensions: up to `axis`, and the rest."""
    x = b.operand(node, 0)
    axis = whole(node, "axis", 1)
    axis += len(x.shape) if axis < 0 else 0
    _view(b, node, x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@op("", "Squeeze")
def squeeze(b: Lowering, node: Node) -> None:
    """Without the axes given, or without all of extent 1."""
    x = b.operand(node, 0)
    given = b.numbers(node, 1) if node.input(1) else node.attributes.get("axes")
    rank = len(x.shape)
    axes = {i for i, d in enumerate(x.shape) if d == 1} if given is None else {axis_of(a, rank) for a in given}
    if any(x.shape[a] != 1 for a in axes):
        raise Refusal(f"axes {sorted(axes)} of {list(x.shape)} are not all 1")
    _view(b, node, x, tuple(d for i, d in enumerate(x.shape) if i not in axes))


@op("", "Unsqueeze")
def unsqueeze(b: Lowering, node: Node) -> None:
    """With axes of extent 1 put in."""
    value = b.value(node.input(0))
    given = b.numbers(node, 1) if node.input(1) else node.attributes.get("axes")
    if given is None:
        raise Refusal("axes are absent")
    if isinstance(value, Positions):
        shape, rank = value.shape, len(value.shape) + len(given)
    else:
        x = b.operand(node, 0)
        shape, rank = x.shape, len(x.shape) + len(given)
    axes = {axis_of(a, rank) for a in given}
    if len(axes) != len(given):
        raise Refusal(f"axes {given} name one twice")
    rest = iter(shape)
    made = tuple(1 if i in axes else next(rest) for i in range(rank))
    if isinstance(value, Positions):
        b.set(node.output(0), Positions(made, value.shift))
        return
    _view(b, node, b.operand(node, 0), made)


@op("", "Transpose")
def transpose(b: Lowering, node: Node) -> None:
    """Axes in another order; no copy where only axes of extent 1 move, nor of a float matrix among the initialisers."""
    held = b.turned(node.input(0))
    if held is not None and node.attributes.get("perm", [1, 0]) == [1, 0]:
        b.set(node.output(0), held)
        return
    x = b.operand(node, 0)
    rank = len(x.shape)
    perm = node.attributes.get("perm", list(range(rank))[::-1])
    if sorted(perm) != list(range(rank)):
        raise Refusal(f"perm {perm} does not fit {list(x.shape)}")
    made = tuple(x.shape[i] for i in perm)
    moving = [i for i in perm if x.shape[i] != 1]
    if moving == sorted(moving):
        _view(b, node, x, made)
        return
    if isinstance(x, WeightValue) and rank == 2 and x.dtype in FLOATS:
        b.set(node.output(0), Transposed(x))
        return
    b.apply(node, "transpose", [x], {"perm": tuple(perm)}, [(x.dtype, made)])


@op("", "Concat")
def concat(b: Lowering, node: Node) -> None:
    """One after another along an axis."""
    parts = [b.operand(node, i) for i in range(len(node.inputs))]
    if len(parts) > 16:
        raise Refusal(f"{len(parts)} parts are more than 16")
    axis = axis_of(whole(node, "axis"), len(parts[0].shape))
    extents = list(parts[0].shape)
    for part in parts[1:]:
        if len(part.shape) != len(extents) or wide(part.dtype) != wide(parts[0].dtype):
            raise Refusal("ranks or types of the parts differ")
    extents[axis] = sum(part.shape[axis] for part in parts)
    params = {"axis": axis, "letters": "abcdefghijklmnopq"[: len(parts)]}
    b.apply(node, "concat", parts, params, [(parts[0].dtype, tuple(extents))])


@op("", "Split")
def split(b: Lowering, node: Node) -> None:
    """Parts along an axis; sizes come from an input known at build, from `num_outputs`, or are equal."""
    x = b.operand(node, 0)
    axis = axis_of(whole(node, "axis", 0), len(x.shape))
    count = len(node.outputs)
    sizes = b.numbers(node, 1) if node.input(1) else node.attributes.get("split")
    if sizes is None:
        if node.opset < 18 and x.shape[axis] % count:
            raise Refusal(f"{x.shape[axis]} elements are not {count} equal parts, as ai.onnx {node.opset} has them")
        each = -(-x.shape[axis] // whole(node, "num_outputs", count))
        sizes = [min(each, x.shape[axis] - i * each) for i in range(count)]
    if len(sizes) != count or sum(sizes) != x.shape[axis] or any(s < 0 for s in sizes):
        raise Refusal(f"sizes {sizes} do not make up {x.shape[axis]}")
    made = [(x.dtype, tuple(s if i == axis else d for i, d in enumerate(x.shape))) for s in sizes]
    b.apply(node, "split", [x], {"axis": axis, "sizes": tuple(sizes)}, made)


@op("", "Slice")
def slice_(b: Lowering, node: Node) -> None:
    """Ranges of axes, with steps; bounds are known at build."""
    x = b.operand(node, 0)
    old = "starts" in node.attributes  # before opset 10
    starts = node.attributes["starts"] if old else b.numbers(node, 1)
    ends = node.attributes["ends"] if old else b.numbers(node, 2)
    axes = node.attributes.get("axes") if old else b.numbers(node, 3)
    steps = None if old else b.numbers(node, 4)
    if starts is None or ends is None:
        raise Refusal("starts or ends are absent")
    slices: list[tuple[int | None, int | None, int]] = [(None, None, 1)] * len(x.shape)
    axes = list(range(len(starts))) if axes is None else axes
    if not len(axes) == len(starts) == len(ends) == len(steps or starts):
        raise Refusal("starts, ends, axes and steps are not of one length")
    for i, axis in enumerate(axes):
        slices[axis_of(axis, len(x.shape))] = _bounds(starts[i], ends[i], steps[i] if steps else 1, x.shape[axis])
    made = tuple(len(range(d)[slice(*s)]) for d, s in zip(x.shape, slices, strict=True))
    b.apply(node, "slice", [x], {"slices": tuple(slices)}, [(x.dtype, made)])


@op("", "Expand")
def expand(b: Lowering, node: Node) -> None:
    """Broadcast to a shape."""
    x, target = b.operand(node, 0), b.numbers(node, 1)
    try:
        made = tuple(np.broadcast_shapes(x.shape, tuple(target or ())))
    except ValueError as error:
        raise Refusal(f"{list(x.shape)} does not broadcast to {target}") from error
    b.apply(node, "copy", [x], {}, [(x.dtype, made)])


@op("", "GatherElements")
def gather_elements(b: Lowering, node: Node) -> None:
    """Elements along an axis at indices of the result's shape."""
    x, index = b.operand(node, 0), indices(b, node, 1)
    axis = axis_of(whole(node, "axis", 0), len(x.shape))
    _check_elements(x, index, axis)
    b.apply(node, "gather_elements", [x, index], {"axis": axis}, [(x.dtype, index.shape)])


@op("", "ScatterElements")
def scatter_elements(b: Lowering, node: Node) -> None:
    """A tensor with others put in along an axis."""
    x, index, updates = b.operand(node, 0), indices(b, node, 1), b.operand(node, 2)
    how = node.attributes.get("reduction", "none")
    if how not in ("none", "add", "mul", "max", "min"):
        raise Refusal(f"reduction {how!r} is not served")
    axis = axis_of(whole(node, "axis", 0), len(x.shape))
    _check_elements(x, index, axis)
    if updates.shape != index.shape or wide(updates.dtype) != wide(x.dtype):
        raise Refusal(f"updates {updates.dtype}{list(updates.shape)} do not fit indices {list(index.shape)}")
    b.apply(node, "scatter_elements", [x, index, updates], {"axis": axis, "reduction": how}, [(x.dtype, x.shape)])


@op("", "Trilu")
def trilu(b: Lowering, node: Node) -> None:
    """Upper or lower triangle."""
    x = b.operand(node, 0)
    k = b.numbers(node, 1) if node.input(1) else [0]
    if k is None or len(k) != 1:
        raise Refusal("k is no single number")
    b.apply(node, "trilu", [x], {"k": k[0], "upper": bool(whole(node, "upper", 1))}, [(x.dtype, x.shape)])


def indices(b: Lowering, node: Node, index: int) -> Operand:
    """Input `index` as whole numbers that count elements. Raises Refusal otherwise."""
    value = b.operand(node, index)
    if value.dtype not in ("int32", "int64"):
        raise Refusal(f"indices are of type {value.dtype}")
    return value


def _check_elements(x: Operand, index: Operand, axis: int) -> None:
    along = [(d, e) for i, (d, e) in enumerate(zip(index.shape, x.shape, strict=False)) if i != axis]
    if len(index.shape) != len(x.shape) or any(d > e for d, e in along):
        raise Refusal(f"indices {list(index.shape)} do not fit {list(x.shape)} along axis {axis}")


def axis_of(axis: int, rank: int) -> int:
    """An axis from 0; negative ones count from the end. Raises Refusal outside the rank."""
    if not -rank <= axis < max(rank, 1):
        raise Refusal(f"axis {axis} is outside rank {rank}")
    return axis + rank if axis < 0 else axis


def resolve(shape: tuple[int, ...], target: list[int], *, keep_zero: bool = False) -> tuple[int, ...]:
    """Reshape's target with 0 (the same extent) and -1 (what is left) filled in. Raises Refusal where it cannot be."""
    made = [shape[i] if d == 0 and i < len(shape) and not keep_zero else d for i, d in enumerate(target)]
    total = math.prod(shape)
    if made.count(-1) > 1 or any(d < -1 for d in made):
        raise Refusal(f"{target} is no shape to take")
    if -1 in made:
        known = math.prod(d for d in made if d != -1)
        made[made.index(-1)] = total // known if known else 0
    if math.prod(made) != total:
        raise Refusal(f"shape {list(shape)} cannot become {target}")
    return tuple(made)


def _bounds(start: int, end: int, step: int, extent: int) -> tuple[int | None, int | None, int]:
    if step == 0:
        raise Refusal("a step is 0")
    low, high = (-1, extent - 1) if step < 0 else (0, extent)

    def clamp(n: int) -> int:
        n += extent if n < 0 else 0
        return min(max(n, low), high)

    first, last = clamp(start), clamp(end)
    if first < 0:
        return 0, 0, 1
    return first, (None if last < 0 else last), step


def _view(b: Lowering, node: Node, x: Operand, made: tuple[int, ...]) -> None:
    if isinstance(x, Tensor):
        b.set(node.output(0), b.view(x, made))
    elif isinstance(x, WeightValue):
        if x.shape != x.weight.shape or math.prod(made) == math.prod(x.shape):
            b.set(node.output(0), WeightValue(x.weight, made))
    else:
        b.set(node.output(0), Const(x.array.reshape(made)))


def _reshape_ids(b: Lowering, node: Node, value: Positions | Ids, target: list[int]) -> None:
    shape = value.shape if isinstance(value, Positions) else (1, b.rows)
    made = resolve(shape, target)
    if isinstance(value, Ids):
        if made != shape:
            raise Refusal(f"token ids in shape {list(made)} are not served")
        b.set(node.output(0), value)
        return
    if made[-1] != b.rows:
        raise Refusal(f"positions in shape {list(made)} are not served")
    b.set(node.output(0), Positions(made, value.shift))
