"""Embedding rows by token id."""

from __future__ import annotations

import numpy as np

from engine.kernels import Arrays, KernelDef, Params, define
from engine.kernels.matmul import unpack


def run_gather_rows(a: Arrays, _: Params) -> None:
    """y[..., r, :] = table[ids[r]]."""
    a["y"][0] = a["table"][a["ids"][0]]


def run_gather_block_quantized(a: Arrays, p: Params) -> None:
    """y[..., r, :] = (code - 2^(bits-1)) * scale of row ids[r], block by block."""
    ids = a["ids"][0]
    width, bits, block = p["width"], p["bits"], p["block"]
    codes = unpack(a["table"][ids].reshape(len(ids), 1, -1), bits, width).astype(np.float32)
    scales = np.repeat(a["scales"][ids].astype(np.float32), block, axis=1)[:, :width]
    a["y"][0] = (codes - np.float32(1 << (bits - 1))) * scales


define(KernelDef("gather_rows", run_gather_rows))
define(KernelDef("gather_block_quantized", run_gather_block_quantized))
