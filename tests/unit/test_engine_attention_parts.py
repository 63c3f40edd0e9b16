"""Contexts that attention takes in parts: what they give, and that no more than the positions seen decides how.

On a card (`-p tests.on_card`) a row with room for its parts is spread over blocks, and rows without go through the
parts one by one; the same bits must come out.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401 - bfloat16 by its name
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import kernels
from engine.device import cuda
from engine.device.base import Launch, Placed
from engine.device.cuda_bind import TICKETS_BYTES
from engine.fuse import fuse
from engine.kernels.attention import LEAST, SHORT, room, split_of
from engine.kernels.cuda import Geometry, prepare
from engine.plan import Operand, Ref, Step
from tests.unit.engine_cuda_host import run_on_host
from tests.unit.engine_driver import Card, Driver
from tests.unit.engine_plain import attend, turn
from tests.unit.test_engine_cuda_forms import nvrtc, texts

Arrays = dict[str, NDArray[Any]]

FORMS: dict[str, dict[str, Any]] = {
    "0.5B": {"heads": 14, "kv_heads": 2, "head_size": 64},
    "1.5B": {"heads": 12, "kv_heads": 2, "head_size": 128},
    "7B": {"heads": 28, "kv_heads": 4, "head_size": 128},
    "35B": {"heads": 16, "kv_heads": 2, "head_size": 256, "half": 32, "norms": True},
    "SmolLM2": {"heads": 9, "kv_heads": 3, "head_size": 64},
    "one a lane": {"heads": 3, "kv_heads": 1, "head_size": 8},
    "ragged": {"heads": 5, "kv_heads": 1, "head_size": 20, "half": 4},
    "whole, of one head each": {"heads": 80, "kv_heads": 80, "head_size": 16},
    "sinks": {"heads": 8, "kv_heads": 2, "head_size": 64, "sinks": True, "softcap": 3.0},
    "window": {"heads": 8, "kv_heads": 2, "head_size": 64, "window": SHORT + 1},
    "int8": {"heads": 8, "kv_heads": 2, "head_size": 64, "cache": "int8"},
    "half": {"heads": 8, "kv_heads": 2, "head_size": 64, "cache": "float16", "packed": True},
    "float32": {"heads": 4, "kv_heads": 2, "head_size": 64, "cache": "float32", "interleaved": True},
}
QUICK = ("1.5B", "ragged")
"""Forms whose text is run on the host every time; the others are slow tests."""
LENGTHS = (SHORT - 1, SHORT, SHORT + LEAST - 1, SHORT + LEAST, 1100)
"""Cached positions: the last ones of a whole context, the first in parts, ends of parts, and some."""


def params_of(form: Mapping[str, Any]) -> dict[str, Any]:
    """The step's scalars."""
    made = {n: form[n] for n in ("heads", "kv_heads", "head_size")}
    made |= {"softcap": 0.0, "window": -1, "interleaved": False} | {n: form[n] for n in form if n in _SCALARS}
    return made | {"scale": 1 / math.sqrt(form["head_size"]), "qk_norm_eps": 1e-6, "long_above": None}


_SCALARS = ("softcap", "window", "interleaved")


def arrays_of(form: Mapping[str, Any], past: int, rows: int, seed: int = 1) -> Arrays:
    """Inputs of `rows` new positions behind `past` cached ones; beyond these lies what must not be felt."""
    random = np.random.default_rng(seed)
    heads, kv_heads, d = form["heads"], form["kv_heads"], form["head_size"]
    half = form.get("half", d // 2)
    new = [random.normal(size=(1, rows, n * d)).astype(np.float32) for n in (heads, kv_heads, kv_heads)]
    packed = {"query": np.concatenate(new, axis=-1)}
    made: Arrays = packed if form.get("packed") else dict(zip(("query", "key", "value"), new, strict=True))
    dtype = form.get("cache", "float16")
    for name in ("k_cache", "v_cache"):
        cache = random.normal(size=(past + rows + 3, kv_heads, d)) * (40 if dtype == "int8" else 1)
        made[name] = np.rint(cache).clip(-128, 127).astype(dtype) if dtype == "int8" else cache.astype(dtype)
        if dtype == "int8":
            made[f"{name[0]}_scale"] = np.full(1, 0.03, np.float32)
        else:
            made[name][past:] = np.nan
    angles = random.uniform(-3, 3, (past + rows, half))
    made |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    if form.get("sinks"):
        made["sinks"] = (random.normal(size=heads) * 3).astype(np.float16)
    if form.get("norms"):
        made |= {n: random.normal(size=d).astype(np.float16) for n in ("q_norm", "k_norm")}
    return made | {"length": np.array([past]), "y": np.full((1, rows, heads * d), np.nan, np.float32)}


def rowwise(form: Mapping[str, Any], a: Arrays) -> NDArray[Any]:
    """The same, row after row, each with room for its parts; what comes out, and the caches as they end up in `a`."""
    shape, p, out = room(params_of(form)), params_of(form), []
    for r in range(a["y"].shape[1]):
        one = {n: x[:, r : r + 1].copy() if n in ("query", "key", "value", "y") else x for n, x in a.items()}
        one["length"] = a["length"] + r
        if shape is not None:
            one["parts"] = np.full(shape, np.nan, np.float32)
        kernels.get("gqa").run(one, p)
        out.append(one["y"])
    return np.concatenate(out, axis=1)


def expected(form: Mapping[str, Any], before: Arrays, after: Arrays) -> NDArray[Any]:
    """In float64, from the inputs and what was stored of them."""
    heads, d = form["heads"], form["head_size"]
    past, rows = int(before["length"][0]), before["y"].shape[1]
    q = before["query"][0, :, : heads * d].astype(np.float64).reshape(rows, heads, d)
    if form.get("norms"):
        q = q / np.sqrt((q * q).mean(axis=-1, keepdims=True) + 1e-6) * before["q_norm"].astype(np.float64)
    cos, sin = (before[n][past:].astype(np.float64) for n in ("cos", "sin"))
    q = turn(q, cos, sin, bool(form.get("interleaved")))
    scale = 0.03 if form.get("cache") == "int8" else 1.0
    keys, values = (after[n][: past + rows].astype(np.float64) * scale for n in ("k_cache", "v_cache"))
    assert np.isfinite(keys).all() and np.isfinite(values).all()
    sinks = before["sinks"].astype(np.float64) if form.get("sinks") else None
    return attend(q, keys, values, past, params_of(form), sinks).reshape(before["y"].shape)


@pytest.mark.parametrize("past", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_a_long_context_gives_what_float64_gives_and_in_every_grouping_of_rows_the_same_bits(
    form: str, past: int
) -> None:
    how, rows = FORMS[form], 2
    before = arrays_of(how, past, rows)
    together, apart = ({n: x.copy() for n, x in before.items()} for _ in range(2))
    kernels.get("gqa").run(together, params_of(how))
    found = rowwise(how, apart)
    assert found.tobytes() == together["y"].tobytes()
    for name in ("k_cache", "v_cache"):
        assert apart[name].tobytes() == together[name].tobytes()
    np.testing.assert_allclose(found, expected(how, before, together), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("where", ["first part", "last part", "new row"])
def test_what_is_not_finite_shows_in_a_long_context(where: str) -> None:
    form = FORMS["0.5B"]
    a = arrays_of(form, 1100, 1)
    if where == "new row":
        a["key"][0, 0, 3] = np.nan
    else:
        a["v_cache"][3 if where == "first part" else 1099, 0, 5] = np.inf
    with np.errstate(all="ignore"):
        y = rowwise(form, a).reshape(14, 64)
    assert not np.isfinite(y[:7]).all() and np.isfinite(y[7:]).all(), "heads of the other kv head are well"


def step_of(form: Mapping[str, Any], rows: int, *, parts: bool) -> Step:
    """The step of a form, as a plan has it."""
    arrays = arrays_of(form, 4, rows)
    shape = room(params_of(form)) if parts else None
    if shape is not None:
        arrays["parts"] = np.zeros(shape, np.float32)
    kinds = {"k_cache": "kv_key", "v_cache": "kv_value"}
    operands = tuple(
        Operand(
            n,
            Ref(kinds.get(n, "buffer"), 0, str(x.dtype), (0, *x.shape[1:]) if n in kinds else x.shape, n),  # type: ignore[arg-type]
            "rw" if n in kinds else "w" if n in ("y", "parts") else "r",
        )
        for n, x in arrays.items()
    )
    return Step(0, "attention", "test", "gqa", operands, params_of(form))


def geometry_of(step: Step) -> Geometry:
    """How a step is launched."""
    [form] = kernels.get("gqa").forms
    return form.geometry({o.name: o.ref for o in step.operands}, step.params)


@pytest.mark.parametrize(
    ("form", "past", "heads_first"),
    [
        *(pytest.param(form, 1100, False, marks=[] if form in QUICK else pytest.mark.slow) for form in FORMS),
        ("35B", SHORT - 1, False),
        pytest.param("0.5B", 1100, True, marks=pytest.mark.slow),
        ("int8", SHORT, True),
    ],
)
def test_the_kernel_s_text_on_the_host_gives_float64_s_and_the_same_bits_spread(
    form: str, past: int, heads_first: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Blocks and threads take turns in drawn orders: who is last to end decides nothing."""
    how, rows, d = FORMS[form], 2, FORMS[form]["head_size"]
    before = arrays_of(how, past, rows)
    positions, kv_heads, _ = before["k_cache"].shape
    strides = (d, positions * d) if heads_first else (kv_heads * d, d)

    def laid(cache: NDArray[Any]) -> NDArray[Any]:
        return np.ascontiguousarray(cache.transpose(1, 0, 2)) if heads_first else cache.copy()

    def launched(arrays: Arrays, rows: int, *, parts: bool, seed: int) -> None:
        step = step_of(how, rows, parts=parts)
        of_caches = dict.fromkeys(("k_cache", "v_cache"), strides)
        run_on_host(step, arrays, of_caches, tmp_path_factory.getbasetemp(), seed, tickets)
        assert not tickets.any(), "as the next launch has to find them"

    tickets = np.zeros(kv_heads, np.uint32)
    together = {n: laid(x) if n.endswith("cache") else x.copy() for n, x in before.items()}
    launched(together, rows, parts=False, seed=1)
    apart, found = {n: laid(x) if n.endswith("cache") else x for n, x in before.items()}, []
    for r in range(rows):
        one = {n: x[:, r : r + 1].copy() if n in ("query", "key", "value", "y") else x for n, x in apart.items()}
        one |= {"length": before["length"] + r}
        one["parts"] = np.full(room(params_of(how)) or (1,), np.nan, np.float32)
        launched(one, 1, parts=True, seed=2 + r)
        found.append(one["y"])
    assert np.concatenate(found, axis=1).tobytes() == together["y"].tobytes()
    for name in ("k_cache", "v_cache"):
        assert apart[name].tobytes() == together[name].tobytes()
        together[name] = together[name].transpose(1, 0, 2) if heads_first else together[name]
    np.testing.assert_allclose(together["y"], expected(how, before, together), rtol=1e-4, atol=2e-5)


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.integers(1, 80),
    group=st.integers(1, 72),
    size=st.sampled_from([8, 16, 20, 32, 40, 64, 80, 96, 112, 128, 160, 192, 256, 320, 512, 520]),
    cache=st.sampled_from(["float32", "float16", "bfloat16", "int8"]),
)
def test_every_geometry_splits_into_what_a_block_has_room_for_and_rows_have_no_say(
    kv_heads: int, group: int, size: int, cache: str
) -> None:
    form = {"heads": kv_heads * group, "kv_heads": kv_heads, "head_size": size, "cache": cache}
    split, spread = split_of(params_of(form)), geometry_of(step_of(form, 1, parts=True))
    defines = spread.defines
    assert dict(geometry_of(step_of(form, 3, parts=False)).defines) == dict(defines), "one order of sums"
    assert 4 * int(defines["ROOM"]) <= 40 << 10
    if split is None:
        assert spread.blocks == (kv_heads * group, 1) and not spread.tickets and defines["SPLITS"] == 1
        return
    warps, lanes, slots = spread.threads // 32, int(defines["LANES"]), int(defines["HEAD_SLOTS"])
    assert split.teams * split.heads >= group and warps % split.teams == 0
    assert split.heads <= slots < 2 * split.heads and int(defines["AT_ONCE"]) * slots <= lanes <= 32
    assert int(defines["ROOM"]) >= max(warps * split.heads * size, group * size, 4 * group * split.most)
    assert spread.blocks == (max(kv_heads * group, kv_heads * split.most), 1) and spread.tickets == kv_heads
    assert kv_heads * split.most <= 132


@pytest.mark.parametrize(
    ("context", "rows", "has"), [(4096, 1, True), (None, 1, True), (4096, 5, False), (SHORT, 1, False)]
)
def test_one_row_has_room_for_parts_where_the_context_may_be_long(context: int | None, rows: int, has: bool) -> None:
    made: list[tuple[int, ...]] = []

    def buffer(name: str, dtype: str, shape: tuple[int, ...]) -> Ref:
        made.append(shape)
        return Ref("buffer", 99, dtype, shape, name)

    [step] = fuse([step_of(FORMS["0.5B"], rows, parts=False)], (), buffer, context)
    assert made == [(14 * 64, 66)] * has
    assert ("parts" in {o.name for o in step.operands if o.access == "w"}) == has


def test_rows_of_any_number_share_a_text_and_one_row_is_told_of_its_tickets() -> None:
    form = FORMS["0.5B"]
    assert texts(step_of(form, 3, parts=False)) == texts(step_of(form, 1, parts=False))
    spread = texts(step_of(form, 1, parts=True))[0].text
    assert "u32* tickets" in spread and "u32* tickets" not in texts(step_of(form, 3, parts=False))[0].text
    assert "ARGUMENTS, const Numbers" in texts(step_of(form, 1, parts=True), sequences=2)[0].text, "strides come last"


def test_a_device_has_one_zeroed_room_for_tickets_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(cuda, "find_card", lambda uuid: Card(driver))
    device = cuda.CudaDevice()
    whole, spread = (step_of(FORMS["0.5B"], 1, parts=parts) for parts in (False, True))
    device.prepare([whole])
    assert not driver.plain, "nobody counts blocks"
    device.prepare([spread])
    device.prepare([spread, whole])
    [(address, _)] = driver.plain.items()
    device.copy_out(address, 4)
    assert not any(driver.bytes_at(address, TICKETS_BYTES))
    placed = tuple(Placed(o, 64 * i, 64, stride=4096) for i, o in enumerate(spread.operands))
    for sequences, behind in (((0,), 0), ((0, 1), 2)):
        [kernel] = device._binder.bind(Launch(spread, placed, sequences)).kernels
        assert kernel.values[-1 - behind].value == address, "in front of a batch's strides"
    del device
    gc.collect()
    assert not driver.plain


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_90a"])
@pytest.mark.parametrize("form", FORMS)
def test_the_spread_form_compiles_without_much_in_local_memory(form: str, architecture: str) -> None:
    """Bytes that registers have no room for: none where the cache is a float one."""
    compiler = nvrtc()
    [made] = texts(step_of(FORMS[form], 1, parts=True))
    _, program = compiler.nvrtcCreateProgram(made.text.encode(), b"parts.cu", 0, [], [])
    options = [b"--std=c++17", b"--fmad=false", b"--ptxas-options=-v", f"--gpu-architecture={architecture}".encode()]
    code = compiler.nvrtcCompileProgram(program, len(options), options)[0]
    log = bytearray(compiler.nvrtcGetProgramLogSize(program)[1])
    compiler.nvrtcGetProgramLog(program, log)
    assert int(code) == 0, log.decode()
    spilled = int(log.decode().split(" bytes spill stores")[0].split()[-1])
    assert spilled <= (64 if FORMS[form].get("cache") == "int8" else 0), log.decode()


@pytest.mark.parametrize(
    ("window", "capacity", "parts"),
    [(-1, None, True), (-1, SHORT, False), (-1, SHORT + 1, True), (SHORT, None, False), (SHORT + 1, 4096, True)],
)
def test_where_no_query_sees_more_than_a_short_context_nothing_is_spread(
    window: int, capacity: int | None, parts: bool
) -> None:
    """The grid and registers that parts need are then spared; all that a cache holds is what a query may see."""
    params = params_of(FORMS["7B"]) | {"window": window}
    cache = (0, 4, 128)
    operands = (
        Operand("query", Ref("buffer", 0, "float32", (1, 1, 28 * 128))),
        Operand("key", Ref("buffer", 1, "float32", (1, 1, 4 * 128))),
        Operand("value", Ref("buffer", 2, "float32", (1, 1, 4 * 128))),
        Operand("k_cache", Ref("kv_key", 0, "float16", cache), "rw"),
        Operand("v_cache", Ref("kv_value", 0, "float16", cache), "rw"),
        Operand("parts", Ref("buffer", 3, "float32", room(params) or (1, 1)), "w"),
        Operand("y", Ref("buffer", 4, "float32", (1, 1, 28 * 128)), "w"),
    )
    step = Step(0, "attention", "GroupQueryAttention", "gqa", operands, params)
    strides = {"k_cache": (4 * 128, 128), "v_cache": (4 * 128, 128)}
    geometry = prepare(kernels.get("gqa").forms[0], step, strides, capacity=capacity).geometry
    assert (geometry.tickets > 0, geometry.blocks[0] > 28, geometry.defines["SPLITS"] != 1) == (parts,) * 3
