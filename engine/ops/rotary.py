"""Rotary embeddings outside attention; the standard operator and onnxruntime's take their inputs in another order."""

from __future__ import annotations

from engine.graph import Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.ops.movement import indices
from engine.plan import Operand, Ref
from engine.values import Const, Positions, Refusal, Tensor, WeightValue


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


def _rotary(b: Lowering, node: Node, *, cos: int, sin: int, ids: int) -> None:
    x, c, s = b.operand(node, 0), b.operand(node, cos), b.operand(node, sin)
    positions = b.value(node.input(ids)) if node.input(ids) else None
    gathered = positions is None
    width = c.shape[-1] if c.shape else 0
    if c.shape != s.shape or len(x.shape) not in (3, 4) or len(c.shape) != (3 if gathered else 2):
        raise Refusal(f"tables {list(c.shape)} and {list(s.shape)} do not fit {list(x.shape)}")
    size, rotated = _head_size(node, x.shape, width), whole(node, "rotary_embedding_dim", 0, least=0)
    half = (rotated or size) // 2
    if 2 * half != (rotated or size) or half > width or 2 * half > size or (not rotated and half != width):
        raise Refusal(f"a rotary width of {rotated or size} does not fit heads of {size} and tables of {width}")
    params = {
        "layout": "tokens" if len(x.shape) == 3 else "heads",
        "size": size,
        "half": half,
        "gathered": gathered,
        "interleaved": bool(whole(node, "interleaved", 0)),
        "scale": number(node, "scale", 1.0) if node.domain else 1.0,
    }
    if isinstance(positions, Positions):
        if b.info is not None and c.shape[0] < b.info.context_length:
            raise Refusal(f"rotary tables of {c.shape[0]} rows end before the context's {b.info.context_length}")
        y = b.make(node.output(0), x.dtype, x.shape)
        tables = [Operand(n, b.constant(b.weight(node, i))) for n, i in (("b", cos), ("c", sin))]
        length = Operand("length", Ref("control", -1, "int64", (1,), "length"))
        operands = (Operand("a", b.ref(node, 0, x)), *tables, length, Operand("y", y.ref, "w"))
        b.emit(node, "rotary", operands, params)
        return
    inputs = [x, c, s] + ([] if gathered else [_ids(b, node, ids, x.shape)])
    b.apply(node, "rotary", inputs, params, [(x.dtype, x.shape)])
