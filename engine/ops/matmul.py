"""Matrix products with a weight: dense and block-quantised."""

from __future__ import annotations

from engine.graph import DTYPES, Node
from engine.lower import Lowering, Refusal, WeightValue
from engine.ops import op
from engine.ops.attributes import whole
from engine.plan import Operand, Ref

FLOATS = ("float32", "float16", "bfloat16")


@op("", "MatMul")
def matmul(b: Lowering, node: Node) -> None:
    """A [..., K] times a dense weight [K, N]."""
    x, w = b.tensor(node, 0), b.weight(node, 1)
    if len(w.shape) != 2 or w.shape[0] != x.shape[-1] or w.weight.dtype not in FLOATS:
        raise Refusal(f"weight {w.weight.dtype}{list(w.shape)} does not fit input {list(x.shape)}")
    x = b.logit_rows(node, x)
    y = b.make(node.output(0), x.dtype, (*x.shape[:-1], w.shape[1]))
    weight = b.key(w, b.new_record())
    b.emit(
        node,
        "matmul",
        (Operand("x", x.ref), Operand("weight", weight), Operand("y", y.ref, "w")),
        {"K": w.shape[0], "N": w.shape[1]},
    )


@op("com.microsoft", "MatMulNBits")
def matmul_nbits(b: Lowering, node: Node) -> None:
    """A [..., K] times a block-quantised weight [N, K]; semantics of onnxruntime's contrib op.

    Zero points may be packed unsigned integers, rows padded to whole bytes, or floats of the scales' count; absent,
    they are 2^(bits-1). `accuracy_level` allows a runtime to round activations; this engine does not.
    """
    x = b.tensor(node, 0)
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
        raise Refusal("prepacked weights are not served")
    if node.input(4):
        raise Refusal("g_idx is not served")
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
        Operand("codes", _shaped(b.key(codes, record), (n, blocks, block * bits // 8))),
        Operand("scales", _shaped(b.key(scales, record), (n, blocks))),
    ]
    if node.input(3):
        points = b.weight(node, 3)
        packed = points.weight.dtype == "uint8"
        row = -(-blocks * bits // 8) if packed else blocks
        _need(points, ("uint8", *FLOATS), n * row, "zero points")
        operands.append(Operand("zero_points", _shaped(b.key(points, record), (n, row))))
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


def _shaped(ref: Ref, shape: tuple[int, ...]) -> Ref:
    return Ref(ref.kind, ref.index, ref.dtype, shape, ref.name, ref.offset_bytes)
