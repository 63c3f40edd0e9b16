"""Element-wise kernels with NumPy's broadcasting: half types are computed in float32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define

_HALF = ("float16", "bfloat16")
_erf = np.vectorize(math.erf, otypes=[np.float64])


def wide(x: Array) -> Array:
    """Half types as float32; everything else as it is."""
    return x.astype(np.float32) if str(x.dtype) in _HALF else x


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)); a large negative x gives 0."""
    return np.asarray(1 / (1 + np.exp(-x)), dtype=x.dtype)


def gelu(x: Array, approximate: str) -> Array:
    """x * Phi(x); "tanh": the usual approximation."""
    if approximate == "tanh":
        inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
        return np.asarray(x.dtype.type(0.5) * x * (1 + np.tanh(inner)))
    return np.asarray(0.5 * x * (1 + _erf(x / math.sqrt(2))), dtype=x.dtype)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)) without overflow."""
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))), dtype=x.dtype)


def _divide(a: Array, b: Array) -> Array:
    if a.dtype.kind in "iu":  # ONNX divides integers towards zero
        quotient = np.abs(a.astype(np.int64)) // np.abs(b.astype(np.int64))
        return np.asarray(np.sign(a) * np.sign(b) * quotient, dtype=a.dtype)
    return np.asarray(a / b)


def _power(a: Array, b: Array) -> Array:
    return np.asarray(np.power(a, b.astype(a.dtype) if a.dtype.kind == "f" else b))


UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "sqrt": np.sqrt,
    "exp": np.exp,
    "log": np.log,
    "reciprocal": np.reciprocal,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "not": np.logical_not,
    "relu": lambda x: np.maximum(x, 0),
    "erf": lambda x: np.asarray(_erf(x), dtype=x.dtype),
    "sigmoid": sigmoid,
    "softplus": softplus,
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "pow": _power,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "equal": np.equal,
    "greater": np.greater,
    "less": np.less,
    "greaterorequal": np.greater_equal,
    "lessorequal": np.less_equal,
}


def _unary(function: Callable[[Array], Array]) -> Callable[[Arrays, Params], None]:
    def run(a: Arrays, _: Params) -> None:
        with np.errstate(all="ignore"):
            a["y"][...] = function(wide(a["a"]))

    return run


def _binary(function: Callable[[Array, Array], Array]) -> Callable[[Arrays, Params], None]:
    def run(a: Arrays, _: Params) -> None:
        with np.errstate(all="ignore"):
            a["y"][...] = function(wide(a["a"]), wide(a["b"]))

    return run


def run_cast(a: Arrays, _: Params) -> None:
    """y = a in y's type; floats to integers go towards zero."""
    with np.errstate(all="ignore"):
        a["y"][...] = a["a"].astype(np.float32) if str(a["a"].dtype) == "bfloat16" else a["a"]


def run_where(a: Arrays, _: Params) -> None:
    """y = b where a, else c."""
    a["y"][...] = np.where(a["a"], a["b"], a["c"])


def run_clip(a: Arrays, p: Params) -> None:
    """y = a held between the bounds given; bounds are the operands that `bounds` names, "lh", "l", "h" or ""."""
    x = wide(a["a"])
    for which, letter in zip(p["bounds"], "bc", strict=False):
        bound = wide(a[letter])
        x = np.maximum(x, bound) if which == "l" else np.minimum(x, bound)
    a["y"][...] = x


def run_gelu(a: Arrays, p: Params) -> None:
    """Gaussian error linear unit, exact or by tanh."""
    with np.errstate(all="ignore"):
        a["y"][...] = gelu(wide(a["a"]), p["approximate"])


def run_swish(a: Arrays, p: Params) -> None:
    """y = a * sigmoid(alpha * a)."""
    with np.errstate(all="ignore"):
        x = wide(a["a"])
        a["y"][...] = x * sigmoid(x.dtype.type(p["alpha"]) * x)


for _name, _one in UNARY.items():
    define(KernelDef(_name, _unary(_one)))
for _name, _two in BINARY.items():
    define(KernelDef(_name, _binary(_two)))
define(KernelDef("cast", run_cast))
define(KernelDef("where", run_where))
define(KernelDef("clip", run_clip))
define(KernelDef("gelu", run_gelu))
define(KernelDef("swish", run_swish))
