"""Element-wise kernels with NumPy's broadcasting: half types are computed in float32 and rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from engine.kernels import Array, Arrays, KernelDef, Params, define
from engine.kernels.cuda import THREADS, CudaForm, Geometry, Refs
from engine.kernels.steps import broadcast, merged

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


CUDA: dict[str, str] = {
    "neg": "-A",
    "abs": "absolute(A)",
    "sqrt": "sqrt(A)",
    "exp": "exp(A)",
    "log": "log(A)",
    "reciprocal": "1 / A",
    "sign": "sign(A)",
    "floor": "floor(A)",
    "ceil": "ceil(A)",
    "tanh": "tanh(A)",
    "sin": "sin(A)",
    "cos": "cos(A)",
    "not": "!A",
    "relu": "larger(A, decltype(A)(0))",
    "erf": "erf((double)A)",
    "sigmoid": "sigmoid(A)",
    "softplus": "softplus(A)",
    "add": "A + B",
    "sub": "A - B",
    "mul": "A * B",
    "div": "A / B",
    "pow": "power(A, B)",
    "min": "smaller(A, B)",
    "max": "larger(A, B)",
    "and": "A && B",
    "or": "A || B",
    "xor": "!A != !B",
    "equal": "A == B",
    "greater": "A > B",
    "less": "A < B",
    "greaterorequal": "A >= B",
    "lessorequal": "A <= B",
    "cast": "A",
    "where": "A ? B : C",
    "swish": "A * sigmoid((decltype(A + A))P_alpha * A)",
}
"""The same functions as C++ expressions of A, B and C."""


def blocks(count: int, each: int = THREADS) -> int:
    """Blocks for so many elements, at least one."""
    return max(1, -(-count // each))


def elementwise(expression: str | Callable[[Params], str]) -> CudaForm:
    """The CUDA form of an expression of A, B and C, broadcast to y."""

    def geometry(refs: Refs, p: Params) -> Geometry:
        to = refs["y"].shape
        names = [n for n in refs if n != "y"]
        shape, *steps = merged(to, *(broadcast(refs[n].shape, to) for n in names))
        scalars: dict[str, int | tuple[int, ...]] = {"count": math.prod(to), "shape": shape}
        for name, of in zip(names, steps, strict=True):
            scalars |= {f"{name}_steps": of, f"{name}_start": 0}
        made = expression if isinstance(expression, str) else expression(p)
        return Geometry((blocks(math.prod(to)), 1), scalars, {"EXPRESSION": made})

    return CudaForm("elementwise", geometry)


def _clip(p: Params) -> str:
    made = "A"
    for which, letter in zip(p["bounds"], "BC", strict=False):
        made = f"{'larger' if which == 'l' else 'smaller'}({made}, {letter})"
    return made


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
    define(KernelDef(_name, _unary(_one), cuda=elementwise(CUDA[_name])))
for _name, _two in BINARY.items():
    define(KernelDef(_name, _binary(_two), cuda=elementwise(CUDA[_name])))
for _name, _run in (("cast", run_cast), ("where", run_where), ("swish", run_swish)):
    define(KernelDef(_name, _run, cuda=elementwise(CUDA[_name])))
define(KernelDef("clip", run_clip, cuda=elementwise(_clip)))
define(
    KernelDef("gelu", run_gelu, cuda=elementwise(lambda p: "gelu_tanh(A)" if p["approximate"] == "tanh" else "gelu(A)"))
)
