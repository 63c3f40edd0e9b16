"""Matrix products: with a weight, dense or block-quantised, and of two activations."""

from __future__ import annotations

from collections.abc import Sequence

from engine.graph import DTYPES, Node
from engine.lower import Lowering, wide
from engine.ops import op
from engine.ops.attributes import number, whole
from engine.ops.elementwise import broadcast
from engine.plan import Operand, Ref
from engine.values import Const, Dequantized, Refusal, Tensor, WeightValue

_Values = Tensor | WeightValue | Const
FLOATS = ("float32", "float16", "bfloat16")


@op("", "MatMul")
def matmul(b: Lowering, node: Node) -> None:
    """A [..., K] times a dense weight [K, N], or one [N, K] through a Transpose; or the product of any two tensors,
    broadcast over leading axes.
    """
    held = b.turned(node.input(1))
    x, w = b.value(node.input(0)), held or b.value(node.input(1))
    if isinstance(w, Dequantized):
        _matmul_dequantized(b, node, b.tensor(node, 0), w)
        return
    dense = isinstance(w, WeightValue) and len(w.shape) == 2 and w.dtype in FLOATS
    if not isinstance(x, Tensor) or not dense or len(x.shape) < 2 or x.dtype not in FLOATS:
        _matmul_any(b, node)
        return
    assert isinstance(w, WeightValue)
    k, n = w.shape if held is None else w.shape[::-1]
    if k != x.shape[-1]:
        raise Refusal(f"weight {w.weight.dtype}{list(w.shape)} does not fit input {list(x.shape)}")
    x = b.logit_rows(node, x)
    y = b.make(node.output(0), x.dtype, (*x.shape[:-1], n))
    weight = b.key(w, b.new_record())
    b.emit(
        node,
        "matmul",
        (Operand("x", x.ref), Operand("weight", weight), Operand("y", y.ref, "w")),
        {"K": k, "N": n, "transposed": held is not None},
    )


@op("com.microsoft", "MatMulNBits")
def matmul_nbits(b: Lowering, node: Node) -> None:
    """A [..., K] times a block-quantised weight [N, K]; semantics of onnxruntime's contrib op.

    Zero points may be packed unsigned integers, rows padded to whole bytes, or floats of the scales' count; absent,
    they are 2^(bits-1). `accuracy_level` allows a runtime to round activations; this engine does not.
    """
    k, n, bits, block = (
        whole(node, "K", least=1),
        whole(node, "N", least=1),
        whole(node, "bits", 4),
        whole(node, "block_size"),
    )
    if bits not in (4, 8):
        raise Refusal(f"{bits} bits are not served")
    if block < 16 or block & (block - 1):
        raise Refusal(f"block size {block} is not a power of two from 16")
    if whole(node, "weight_prepacked", 0):
        raise Refusal("prepacked weights are not served: export with matmulnbits_weights_prepacked=0")
    if node.input(4):
        raise Refusal("g_idx is not served")
    x = b.tensor(node, 0)
    if x.shape[-1] != k:
        raise Refusal(f"input {list(x.shape)} does not end in K = {k}")
    blocks = -(-k // block)
    record = b.new_record()
    codes = b.weight(node, 1)
    _need(codes, ("uint8",), n * blocks * (block * bits // 8), "codes")
    scales = b.weight(node, 2)
    _need(scales, FLOATS, n * blocks, "scales")
    x = b.logit_rows(node, x)
    operands = [
        Operand("x", x.ref),
        Operand("codes", shaped(b.key(codes, record), (n, blocks, block * bits // 8))),
        Operand("scales", shaped(b.key(scales, record), (n, blocks))),
    ]
    if node.input(3):
        points = b.weight(node, 3)
        packed = points.weight.dtype == "uint8"
        row = -(-blocks * bits // 8) if packed else blocks
        _need(points, ("uint8", *FLOATS), n * row, "zero points")
        operands.append(Operand("zero_points", shaped(b.key(points, record), (n, row))))
    if node.input(5):
        bias = b.weight(node, 5)
        _need(bias, FLOATS, n, "bias")
        operands.append(Operand("bias", b.key(bias, record)))
    y = b.make(node.output(0), x.dtype, (*x.shape[:-1], n))
    operands.append(Operand("y", y.ref, "w"))
    b.emit(node, "matmul_nbits", tuple(operands), {"K": k, "N": n, "bits": bits, "block": block})


def _need(value: WeightValue, dtypes: tuple[str, ...], elements: int, what: str) -> None:
    weight = value.weight
    if weight.dtype not in dtypes or weight.nbytes != elements * DTYPES[weight.dtype].itemsize:
        raise Refusal(f"{what} {weight.name!r} are {weight.dtype}{list(weight.shape)}, not {elements} elements")


def shaped(ref: Ref, shape: tuple[int, ...]) -> Ref:
    """The same bytes in another shape of as many elements."""
    return Ref(ref.kind, ref.index, ref.dtype, shape, ref.name, ref.offset_bytes)


@op("", "Gemm")
def gemm(b: Lowering, node: Node) -> None:
    """alpha * A @ B + beta * C, each of A and B transposed where asked."""
    (left, turn_a), (right, turn_b) = _side(b, node, 0, "transA"), _side(b, node, 1, "transB")
    if len(left.shape) != 2 or len(right.shape) != 2:
        raise Refusal(f"shapes {list(left.shape)} and {list(right.shape)} are no matrices")
    m, k = left.shape[::-1] if turn_a else left.shape
    k2, n = right.shape[::-1] if turn_b else right.shape
    if k != k2 or wide(left.dtype) != wide(right.dtype):
        raise Refusal(f"{left.dtype}{list(left.shape)} and {right.dtype}{list(right.shape)} do not fit")
    inputs = [left, right] + ([b.operand(node, 2)] if node.input(2) else [])
    if broadcast((m, n), inputs[-1].shape if node.input(2) else ()) != (m, n):
        raise Refusal(f"C {list(inputs[-1].shape)} does not broadcast to {[m, n]}")
    params = {
        "alpha": number(node, "alpha", 1.0),
        "beta": number(node, "beta", 1.0),
        "turn_a": turn_a,
        "turn_b": turn_b,
    }
    b.apply(node, "gemm", inputs, params, [(left.dtype, (m, n))])


def _side(b: Lowering, node: Node, index: int, attribute: str) -> tuple[_Values, bool]:
    """A matrix of Gemm as it lies, and whether it is to be turned."""
    turn, held = bool(whole(node, attribute, 0)), b.turned(node.input(index))
    return (b.operand(node, index), turn) if held is None else (held, not turn)


@op("", "DequantizeLinear")
def dequantize_linear(b: Lowering, node: Node) -> None:
    """(code - zero point) * scale per tensor, per axis or in blocks; an initialiser in blocks waits for its MatMul."""
    codes, scales = b.value(node.input(0)), b.operand(node, 1)
    axis, block = whole(node, "axis", 1), whole(node, "block_size", 0)
    if isinstance(codes, WeightValue) and isinstance(scales, WeightValue) and block and len(codes.shape) == 2:
        points = b.weight(node, 2) if node.input(2) else None
        axis += 2 if axis < 0 else 0
        made = Dequantized(codes, scales, points, axis, block)
        _check_blocks(made)
        b.set(node.output(0), made)
        return
    x = b.operand(node, 0)
    inputs: list[_Values] = [x, scales] + ([b.operand(node, 2)] if node.input(2) else [])
    if (len(scales.shape) == 1 and scales.shape != (1,)) or block:
        axis += len(x.shape) if axis < 0 else 0
        if not 0 <= axis < len(x.shape):
            raise Refusal(f"axis {axis} is outside {list(x.shape)}")
    _check_scales(x.shape, inputs[1:], axis, block)
    b.apply(node, "dequantize", inputs, {"axis": axis, "block": block}, [(scales.dtype, x.shape)])


def _check_scales(shape: tuple[int, ...], given: Sequence[_Values], axis: int, block: int) -> None:
    scales = given[0]
    if scales.dtype not in FLOATS or block < 0:
        raise Refusal(f"scales {scales.dtype} in blocks of {block} are not served")
    if block:
        expected = tuple(-(-d // block) if i == axis else d for i, d in enumerate(shape))
    else:
        expected = scales.shape if scales.shape in ((), (1,)) else shape[axis : axis + 1]
    for one in given:
        if one.shape != expected:
            raise Refusal(f"scales or zero points {list(one.shape)} are not {list(expected)}")


def _matmul_any(b: Lowering, node: Node) -> None:
    left, right = b.operand(node, 0), b.operand(node, 1)
    if wide(left.dtype) != wide(right.dtype):
        raise Refusal(f"types {left.dtype} and {right.dtype} differ")
    a = (1, *left.shape) if len(left.shape) == 1 else left.shape
    c = (*right.shape, 1) if len(right.shape) == 1 else right.shape
    if not a or not c or a[-1] != c[-2]:
        raise Refusal(f"shapes {list(left.shape)} and {list(right.shape)} do not fit")
    made = (*broadcast(a[:-2], c[:-2]), a[-2], c[-1])
    made = made[:-2] + made[-1:] if len(left.shape) == 1 else made
    made = made[:-1] if len(right.shape) == 1 else made
    b.apply(node, "batched_matmul", [left, right], {}, [(left.dtype, made)])


def _matmul_dequantized(b: Lowering, node: Node, x: Tensor, w: Dequantized) -> None:
    """A [..., K] times a weight [K, N] that is stored as codes in blocks along K."""
    k, n = w.codes.shape
    if x.shape[-1] != k or w.axis != 0:
        raise Refusal(f"weight {list(w.codes.shape)} in blocks along axis {w.axis} does not fit {list(x.shape)}")
    x = b.logit_rows(node, x)
    record = b.new_record()
    operands = [
        Operand("x", x.ref),
        Operand("codes", b.key(w.codes, record)),
        Operand("scales", b.key(w.scales, record)),
    ]
    if w.zero_points is not None:
        operands.append(Operand("zero_points", b.key(w.zero_points, record)))
    y = b.make(node.output(0), x.dtype, (*x.shape[:-1], n))
    operands.append(Operand("y", y.ref, "w"))
    params = {"K": k, "N": n, "block": w.block, "type": w.codes.dtype}
    b.emit(node, "matmul_qdq", tuple(operands), params)


def _check_blocks(w: Dequantized) -> None:
    if w.axis not in (0, 1) or w.block < 1:
        raise Refusal(f"blocks of {w.block} along axis {w.axis} are not served")
    blocks = -(-w.codes.shape[w.axis] // w.block)
    expected = tuple(blocks if i == w.axis else d for i, d in enumerate(w.codes.shape))
    if w.scales.shape != expected:
        raise Refusal(f"scales {list(w.scales.shape)} are not {list(expected)}")
    if w.zero_points is not None and (w.zero_points.dtype, w.zero_points.shape) != (w.codes.dtype, expected):
        raise Refusal(
            f"zero points {w.zero_points.dtype}{list(w.zero_points.shape)} are not {w.codes.dtype}{list(expected)}"
        )
    if w.codes.dtype not in INTEGERS or w.scales.dtype not in FLOATS:
        raise Refusal(f"codes {w.codes.dtype} with scales {w.scales.dtype} are not served")


INTEGERS = ("uint8", "int8", "uint4", "int4")
