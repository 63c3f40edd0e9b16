"""Rotary embeddings outside attention; the standard operator and onnxruntime's take their inputs in another order."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.graph import Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.ops.movement import indices
from engine.plan import Operand, Ref
from engine.values import Const, Positions, Refusal, Switched, Tensor, WeightValue


@op("", "RotaryEmbedding")
def rotary_embedding(b: Lowering, node: Node) -> None:
    """ai.onnx: (x, cos, sin, position ids); without ids the tables hold a row for each token."""
    _rotary(b, node, cos=1, sin=2, ids=3)


@op("com.microsoft", "RotaryEmbedding")
def ms_rotary_embedding(b: Lowering, node: Node) -> None:
    """com.microsoft: (x, position ids, cos, sin)."""
    if whole(node, "is_packed_batching", 0):
        raise Refusal("packed batching is not served")
    _rotary(b, node, cos=2, sin=3, ids=1)


@op("com.microsoft", "MRotaryEmbedding")
def m_rotary_embedding(b: Lowering, node: Node) -> None:
    """Sections of the head turn by one of three position rows; in text all three are the same: plain rotary."""
    if whole(node, "is_packed_batching", 0):
        raise Refusal("packed batching is not served")
    if not isinstance(b.value(node.input(1)), Positions):
        raise Refusal("positions do not count from the cached length")
    _rotary(b, node, cos=2, sin=3, ids=1)


def _head_size(node: Node, shape: tuple[int, ...], width: int) -> int:
    """Elements of a head of x; onnxruntime's operator may leave it to the tables where the whole head turns."""
    heads = whole(node, "num_heads", 0, least=0)
    if len(shape) == 4:
        return shape[3]
    if not heads and (not node.domain or node.attributes.get("rotary_embedding_dim")):
        raise Refusal("num_heads is not given for [batch, tokens, width]")
    size = shape[2] // heads if heads else 2 * width
    if size < 1 or shape[2] % size or (heads and shape[2] != heads * size):
        raise Refusal(f"{shape[2]} elements are not {f'{heads} heads' if heads else f'heads of {size}'}")
    return size


def _ids(b: Lowering, node: Node, index: int, shape: tuple[int, ...]) -> Tensor | WeightValue | Const:
    """Positions of the tokens one by one, [batch, tokens], or of the first one, [1]."""
    ids = indices(b, node, index)
    each = (shape[0], shape[1] if len(shape) == 3 else shape[2])
    if ids.shape not in (each, (1,)):
        raise Refusal(f"position ids {list(ids.shape)} are neither {list(each)} nor [1]")
    return ids


def check_start(b: Lowering, sin: WeightValue) -> None:
    """Refuse two tables in one, whose second half a provider takes by an option: the graph does not say when."""
    if sin.weight in b.checked_tables:  # every layer reads the same one
        return
    b.checked_tables.add(sin.weight)
    rows = sin.weight.array().reshape(sin.shape)
    if not rows.size:
        return
    again = np.flatnonzero(rows[1:, 0] == rows[0, 0]) + 1
    again = again[(rows[again] == rows[0]).all(axis=1)]
    if 0 < again.size < len(rows) - 1:
        raise Refusal(
            f"rotary table {sin.weight.name!r} starts anew at row {again[0]}, and the graph does not say from which "
            "length on that holds: export for cpu or cuda, where an If chooses"
        )


def _check_rows(b: Lowering, sin: WeightValue, shift: Switched | None) -> None:
    """Refuse a table that ends before the context does, or that starts anew where nothing moves the positions."""
    context = b.context_length()
    if shift is None:
        check_start(b, sin)
        first, last = 0, context
    else:
        below = min(shift.threshold, context)
        first, last = min(shift.above, shift.below), max(context + shift.above, below + shift.below)
    if first < 0 or sin.shape[0] < last:
        raise Refusal(f"rotary tables of {sin.shape[0]} rows do not hold positions {first} to {last}")


def _rotary(b: Lowering, node: Node, *, cos: int, sin: int, ids: int) -> None:
    x, c, s = b.operand(node, 0), b.operand(node, cos), b.operand(node, sin)
    positions = b.value(node.input(ids)) if node.input(ids) else None
    gathered = positions is None
    width = c.shape[-1] if c.shape else 0
    if c.shape != s.shape or len(x.shape) not in (3, 4) or len(c.shape) != (3 if gathered else 2):
        raise Refusal(f"tables {list(c.shape)} and {list(s.shape)} do not fit {list(x.shape)}")
    size, rotated = _head_size(node, x.shape, width), whole(node, "rotary_embedding_dim", 0, least=0)
    half = (rotated or size) // 2
    if number(node, "scale", 1.0) != 1:
        raise Refusal(f"scale = {node.attributes['scale']} is not served: runtimes leave it out")
    if 2 * half != (rotated or size) or half > width or 2 * half > size or (not rotated and half != width):
        raise Refusal(f"a rotary width of {rotated or size} does not fit heads of {size} and tables of {width}")
    params: dict[str, Any] = {
        "layout": "tokens" if len(x.shape) == 3 else "heads",
        "size": size,
        "half": half,
        "gathered": gathered,
        "interleaved": bool(whole(node, "interleaved", 0)),
    }
    if isinstance(positions, Positions):
        near, far = b.weight(node, cos), b.weight(node, sin)
        _check_rows(b, far, positions.shift)
        y = b.make(node.output(0), x.dtype, x.shape)
        operands = [Operand("a", b.ref(node, 0, x)), Operand("b", b.constant(near)), Operand("c", b.constant(far))]
        operands.append(Operand("length", Ref("control", -1, "int64", (1,), "length")))
        if positions.shift is not None:
            params["long_above"] = positions.shift.threshold
            params["shift"] = (positions.shift.above, positions.shift.below)
            operands.append(Operand("ahead", Ref("control", -1, "int32", (1,), "ahead")))
        b.emit(node, "rotary", (*operands, Operand("y", y.ref, "w")), params)
        return
    inputs = [x, c, s] + ([] if gathered else [_ids(b, node, ids, x.shape)])
    b.apply(node, "rotary", inputs, params, [(x.dtype, x.shape)])
