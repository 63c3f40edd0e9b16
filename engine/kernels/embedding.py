"""Embedding rows by token id."""

from __future__ import annotations

import math

import numpy as np

from engine.kernels import Arrays, KernelDef, Params, define
from engine.kernels.cuda import CudaForm, Geometry, Refs
from engine.kernels.elementwise import blocks
from engine.kernels.matmul import unpack, zero_points


def run_gather_rows(a: Arrays, _: Params) -> None:
    """y[..., r, :] = table[ids[r]]."""
    a["y"][0] = a["table"][a["ids"][0]]


def run_gather_block_quantized(a: Arrays, p: Params) -> None:
    """y[..., r, :] = (code - zero point) * scale of row ids[r], block by block.

    Without zero points they are 2^(bits-1) for packed bytes and 0 for typed 4-bit tables (onnxruntime's rule).
    """
    ids = a["ids"][0]
    width, bits, block = p["width"], p["bits"], p["block"]
    blocks = a["scales"].shape[1]
    points = a["zero_points"][ids] if "zero_points" in a else None
    if p["packed"]:
        codes = unpack(a["table"][ids].reshape(len(ids), 1, -1), bits, width).astype(np.float32)
        shift = zero_points(points, bits, len(ids), blocks)
    else:
        codes = a["table"][ids].astype(np.float32)
        shift = np.zeros((1, 1), np.float32) if points is None else points.astype(np.float32)
    wide_shift = shift if shift.shape[1] == 1 and blocks != 1 else np.repeat(shift, block, axis=1)[:, :width]
    scales = np.repeat(a["scales"][ids].astype(np.float32), block, axis=1)[:, :width]
    a["y"][0] = (codes - wide_shift) * scales


def _rows(refs: Refs, _: Params) -> Geometry:
    width = refs["y"].shape[-1]
    return Geometry((blocks(width), math.prod(refs["ids"].shape)), {"width": width})


define(KernelDef("gather_rows", run_gather_rows, cuda=CudaForm("embedding", _rows)))
define(KernelDef("gather_block_quantized", run_gather_block_quantized, cuda=CudaForm("embedding", _rows)))
