"""Embedding look-ups: rows read in place from the table, which is no touch."""

from __future__ import annotations

import math

from engine.graph import DTYPES, PACKED, Node
from engine.lower import Lowering
from engine.ops import op
from engine.ops.attributes import whole
from engine.ops.matmul import FLOATS
from engine.ops.movement import axis_of, indices
from engine.plan import Operand, Ref
from engine.values import Ids, LengthValue, MaskShape, Positions, Refusal


@op("", "Gather")
def gather(b: Lowering, node: Node) -> None:
    """Elements along an axis by index; rows of the embedding table by token id are read in place."""
    data = b.value(node.input(0))
    if isinstance(data, MaskShape):
        _gather_length(b, node)
        return
    if isinstance(data, Positions):
        _gather_positions(b, node, data)
        return
    if not isinstance(b.value(node.input(1)), Ids):
        _gather_any(b, node)
        return
    table = b.weight(node, 0)
    if whole(node, "axis", 0) != 0:
        raise Refusal("only rows of a table by the token ids are served")
    if len(table.shape) != 2 or table.weight.dtype not in FLOATS:
        raise Refusal(f"table {table.weight.dtype}{list(table.shape)} is not a float matrix")
    rows, width = table.shape
    _check_rows(b, rows)
    y = b.make(node.output(0), table.weight.dtype, (1, b.rows, width))
    row_bytes = width * DTYPES[table.weight.dtype].itemsize
    operands = (Operand("ids", _ids(b)), Operand("table", b.host(table)), Operand("y", y.ref, "w"))
    b.emit(node, "gather_rows", operands, {"rows": rows}, gather_bytes=b.rows * row_bytes)


@op("com.microsoft", "GatherBlockQuantized")
def gather_block_quantized(b: Lowering, node: Node) -> None:
    """Rows of a block-quantised table by token id: (code - zero point) * scale per block of the last axis."""
    table, scales = b.weight(node, 0), b.weight(node, 2)
    bits, block = whole(node, "bits", 4), whole(node, "block_size", 128, least=16)
    by_row = whole(node, "gather_axis", 0) == 0 and whole(node, "quantize_axis", 1) in (1, -1)
    if not isinstance(b.value(node.input(1)), Ids) or not by_row:
        raise Refusal("only rows by the token ids, quantised along the last axis, are served")
    packed = table.weight.dtype == "uint8"
    served = (4, 8) if packed else (4,)
    if (not packed and table.weight.dtype not in PACKED) or bits not in served or len(table.shape) != 2:
        raise Refusal(f"table {table.weight.dtype}{list(table.shape)} with {bits} bits is not served")
    rows, row_bytes = table.shape
    width = row_bytes * 8 // bits if packed else row_bytes
    blocks = -(-width // block)
    _check_rows(b, rows)
    if (
        scales.weight.dtype not in FLOATS
        or scales.weight.nbytes != rows * blocks * DTYPES[scales.weight.dtype].itemsize
    ):
        raise Refusal(f"scales {list(scales.shape)} do not fit {rows} rows of {blocks} blocks")
    y = b.make(node.output(0), scales.weight.dtype, (1, b.rows, width))
    read = b.rows * ((row_bytes if packed else -(-row_bytes // 2)) + blocks * DTYPES[scales.weight.dtype].itemsize)
    flat = b.host(scales)
    operands = [
        Operand("ids", _ids(b)),
        Operand("table", b.host(table)),
        Operand("scales", Ref(flat.kind, flat.index, flat.dtype, (rows, blocks), flat.name)),
        Operand("y", y.ref, "w"),
    ]
    if node.input(3):
        points = b.weight(node, 3)
        per_row = -(-blocks * bits // 8) if packed else blocks
        if points.weight.dtype != table.weight.dtype or math.prod(points.shape) != rows * per_row:
            raise Refusal(f"zero points {points.dtype}{list(points.shape)} do not fit {rows} rows of {blocks} blocks")
        ref = b.host(points)
        operands.append(Operand("zero_points", Ref(ref.kind, ref.index, ref.dtype, (rows, per_row), ref.name)))
        read += b.rows * (per_row if packed else -(-per_row // 2))
    params = {"rows": rows, "width": width, "bits": bits, "block": block, "packed": packed}
    b.emit(node, "gather_block_quantized", tuple(operands), params, gather_bytes=read)


def _check_rows(b: Lowering, rows: int) -> None:
    if b.info is not None and rows < b.info.vocabulary:
        raise Refusal(f"the table has {rows} rows for a vocabulary of {b.info.vocabulary}")


def _gather_length(b: Lowering, node: Node) -> None:
    if b.numbers(node, 1) not in ([1], [-1]):
        raise Refusal("only the mask's last dimension is served")
    b.set(node.output(0), LengthValue(0))


def _gather_positions(b: Lowering, node: Node, value: Positions) -> None:
    """Rows of the position ids, which are all the same: one by its number, or several."""
    index = b.known(node, 1)
    if len(value.shape) < 2 or whole(node, "axis", 0) not in (0, -len(value.shape)) or index.dtype.kind not in "iu":
        raise Refusal("of position ids only whole rows, by number, are served")
    if index.size and not (-value.shape[0] <= index.min() and index.max() < value.shape[0]):
        raise Refusal(f"rows {index.tolist()} are outside position ids {list(value.shape)}")
    b.set(node.output(0), Positions((*index.shape, *value.shape[1:]), value.shift))


def _ids(b: Lowering) -> Ref:
    return Ref("control", -1, "int64", (1, b.rows), "ids")


def _gather_any(b: Lowering, node: Node) -> None:
    x, index = b.operand(node, 0), indices(b, node, 1)
    axis = axis_of(whole(node, "axis", 0), len(x.shape))
    made = (*x.shape[:axis], *index.shape, *x.shape[axis + 1 :])
    b.apply(node, "gather", [x, index], {"axis": axis}, [(x.dtype, made)])
