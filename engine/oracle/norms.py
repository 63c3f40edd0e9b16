"""Norms over the last axes."""

from __future__ import annotations

import numpy as np

from engine.oracle.inputs import MICROSOFT, Array, Computed, Inputs, Unserved, rule, sigmoid


def rms(x: Array, scale: Array, eps: float, axes: tuple[int, ...] = (-1,)) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale."""
    square = np.square(x, dtype=np.float32)
    return np.asarray(x / np.sqrt(square.mean(axes, keepdims=True) + np.float32(eps)) * scale)


def centred(x: Array, scale: Array, shift: Array | None, eps: float, axes: tuple[int, ...] = (-1,)) -> Array:
    """(x - mean) / sqrt(variance + eps) * scale + shift."""
    off = x - x.mean(axes, keepdims=True)
    made = off / np.sqrt(np.square(off).mean(axes, keepdims=True) + np.float32(eps)) * scale
    return np.asarray(made if shift is None else made + shift)


def _axes(i: Inputs, rank: int) -> tuple[int, ...]:
    first = i.whole("axis", -1)
    return tuple(range(first + rank if first < 0 else first, rank))


@rule("SimplifiedLayerNormalization")
@rule("RMSNormalization")
def _rms(i: Inputs) -> Computed:
    x = i.floats(0)
    return rms(x, i.floats(1), i.number("epsilon", 1e-5), _axes(i, x.ndim))


@rule("LayerNormalization")
def _layer_norm(i: Inputs) -> Computed:
    x = i.floats(0)
    return centred(x, i.floats(1), i.floats(2) if i.has(2) else None, i.number("epsilon", 1e-5), _axes(i, x.ndim))


@rule("SkipSimplifiedLayerNormalization", MICROSOFT)
def _skip_rms(i: Inputs) -> Computed:
    total = i.floats(0) + i.floats(1)
    total = total + i.floats(3) if i.has(3) else total
    return rms(total, i.floats(2), i.number("epsilon", 1e-12)), None, None, total


@rule("SkipLayerNormalization", MICROSOFT)
def _skip_layer_norm(i: Inputs) -> Computed:
    total = i.floats(0) + i.floats(1)
    total = total + i.floats(4) if i.has(4) else total
    shift = i.floats(3) if i.has(3) else None
    return centred(total, i.floats(2), shift, i.number("epsilon", 1e-12)), None, None, total


@rule("GatedRMSNorm", MICROSOFT)
def _gated_rms(i: Inputs) -> Computed:
    x, scale, gate = i.floats(0), i.floats(1), i.floats(2)
    parts = x.reshape(*x.shape[:-1], -1, scale.size)  # the scale is of one head
    made = rms(parts, scale.reshape(-1), i.number("epsilon", 1e-5)).reshape(x.shape)
    return np.asarray(made * gate * sigmoid(gate))


@rule("LpNormalization")
def _lp(i: Inputs) -> Computed:
    x, axis, p = i.floats(0), i.whole("axis", -1), i.whole("p", 2)
    if p not in (1, 2):
        raise Unserved(f"p = {p}")
    norm = np.abs(x).sum(axis, keepdims=True) if p == 1 else np.sqrt(np.square(x).sum(axis, keepdims=True))
    return np.where(norm == 0, np.float32(0), x / np.where(norm == 0, np.float32(1), norm))
