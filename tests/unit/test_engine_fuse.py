"""Fused plans: fewer steps, the same keys, the same ids and counters, whatever is fused; and what is never fused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import kernels
from engine.bind import lower
from engine.counters import COUNTERS
from engine.fuse import fuse
from engine.onnx_load import load
from engine.plan import Operand, Plan, Ref, Step
from tests.unit.engine_rig import Bench, build_tiny, run

STEPS = {"qwen2-int4-cuda": (29, 14), "phi3-int4-cuda": (27, 14), "qwen35moe-int4raw-cuda": (107, 45)}


def no_buffer(name: str, dtype: str, shape: tuple[int, ...]) -> Ref:
    """These steps need none."""
    raise AssertionError(name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model of two layers."""
    return build_tiny(tmp_path_factory.mktemp("fuse"))


@pytest.mark.parametrize("name", STEPS)
def test_a_sample_in_fewer_steps_reads_the_same_keys_and_gives_the_same_logits(checkout: Path, name: str) -> None:
    folder = checkout.parent / "shared" / "models" / name
    if not folder.is_dir():
        pytest.skip(f"no {name}")
    graph = load(folder)
    plans: list[Plan] = [lower(graph, 1, target=target) for target in ("plain", "fused")]
    assert tuple(len(p.steps) for p in plans) == STEPS[name]
    assert len({frozenset(k for s in p.steps for k in s.keys) for p in plans}) == 1
    twice = [k for k, n in Counter(k for s in plans[1].steps for k in s.keys).items() if n > 1]
    assert all("norm" in plans[1].keys[k].name for k in twice), "a norm alone may go into several products"
    assert [s.index for s in plans[1].steps] == list(range(STEPS[name][1]))
    assert plans[1].workspace_bytes <= plans[0].workspace_bytes
    found = []
    for target in ("plain", "fused"):
        bench = Bench(graph, rows=(3, 5), target=target)
        ids = [bench.prefill((1, 2, 3, 4, 5, 6, 7, 8), 5).token]
        logits = []
        for _ in range(4):
            ids.append(bench.step().token)
            logits.append(bench.logits())
        found.append((ids, np.stack(logits)))
    assert found[0][0] == found[1][0]
    np.testing.assert_allclose(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)


def test_a_run_under_a_budget_counts_as_many_touches(tiny: Path) -> None:
    def counted(target: str) -> tuple[Any, dict[str, Any]]:
        config = {"target": target, "weight_budget": "60%", "policy": "stable_slot", "granule": 4096}
        made = run(tiny, tokens=12, ignore_eos=True, config=config)
        assert made.broken_equations() == []
        return made.streams, {n: made.counters[n] for n in ("touches", "hits", "page_ins", "forward_steps", "replays")}

    plain, fused = counted("plain"), counted("fused")
    assert [ids for ids, _ in plain[0]] == [ids for ids, _ in fused[0]]
    assert plain[1]["touches"] == fused[1]["touches"] and plain[1]["replays"] == fused[1]["replays"]


# -- what is fused, by shape and use


def product(at: int, x: int, y: int, key: int, *, n: int = 64, k: int = 64, bits: int = 4, block: int = 32) -> Step:
    """A product of buffer x into buffer y."""
    operands = (
        Operand("x", Ref("buffer", x, "float32", (1, 1, k))),
        Operand("codes", Ref("key", key, "uint8", (n, k // block, block // 2))),
        Operand("scales", Ref("key", key + 1, "float16", (n, k // block))),
        Operand("y", Ref("buffer", y, "float32", (1, 1, n)), "w"),
    )
    return Step(at, f"/p{at}", "x", "matmul_nbits", operands, {"N": n, "K": k, "bits": bits, "block": block})


def norm(at: int, x: int, skip: int, y: int, total: int) -> Step:
    """A norm of the sum of two buffers."""
    shape = (1, 1, 64)
    operands = (
        *(Operand(n, Ref("buffer", b, "float32", shape)) for n, b in (("x", x), ("skip", skip))),
        Operand("gamma", Ref("key", 90 + at, "float32", (64,))),
        *(Operand(n, Ref("buffer", b, "float32", shape), "w") for n, b in (("y", y), ("sum", total))),
    )
    return Step(at, f"/n{at}", "x", "skip_rms_norm", operands, {"eps": 1e-6})


def names(steps: tuple[Step, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """Kernels with the names of their operands."""
    return [(s.kernel, tuple(o.name for o in s.operands)) for s in steps]


def test_a_residual_goes_back_and_a_norm_goes_forward() -> None:
    made = fuse([product(0, 0, 1, 0), norm(1, 9, 1, 2, 3), product(2, 2, 4, 10)], [3, 4], no_buffer)
    assert names(made) == [
        ("matmul_nbits", ("x", "codes", "scales", "residual", "y")),
        ("matmul_nbits", ("x", "gamma", "codes", "scales", "y")),
    ]
    assert made[0].operands[-1].ref.index == made[1].operands[0].ref.index == 3


@pytest.mark.parametrize("why", ["read elsewhere", "kept", "eight bits", "short blocks"])
def test_what_somebody_else_reads_or_no_tile_holds_stays(why: str) -> None:
    form: dict[str, int] = {"eight bits": {"bits": 8}, "short blocks": {"block": 16}}.get(why, {})
    steps = [product(0, 0, 1, 0, **form), norm(1, 9, 1, 2, 3), product(2, 2, 4, 10, **form)]
    if why == "read elsewhere":
        copy = (
            Operand("a", Ref("buffer", 2, "float32", (1, 1, 64))),
            Operand("y", Ref("buffer", 5, "float32", (64,)), "w"),
        )
        steps.append(Step(3, "/c", "x", "copy", copy, {}))
    made = fuse(steps, [3, 4, 2] if why == "kept" else [3, 4], no_buffer)
    kinds = [s.kernel for s in made]
    if why in ("eight bits", "short blocks"):
        assert kinds == ["matmul_nbits", "skip_rms_norm", "matmul_nbits"]
    else:
        assert kinds[:3] == ["matmul_nbits", "rms_norm", "matmul_nbits"], "the residual may go, the norm may not"


def test_three_products_of_one_x_are_one_and_a_fourth_is_another() -> None:
    made = fuse([product(n, 0, n + 1, 10 * n, n=16 * (n + 1)) for n in range(4)], [1, 2, 3, 4], no_buffer)
    assert [tuple(v for p, v in s.params.items() if p.startswith("N")) for s in made] == [(16, 32, 48), (64,)]
    assert len({k for s in made for k in s.keys}) == 8


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_several_weights_at_once_are_what_each_gives_alone(gated: bool, points: bool) -> None:
    random = np.random.default_rng(3)
    n, k = (24, 24) if gated else (24, 40), 160
    a: dict[str, Any] = {"x": random.normal(size=(2, k)).astype(np.float32), "gamma": np.ones(k, np.float32)}
    kernel, alone = kernels.get("matmul_nbits"), []
    assert kernel.decode is not None
    normed = a["x"] / np.sqrt((a["x"] ** 2).mean(1, keepdims=True) + 1e-6)
    for end, rows in zip(("", "2"), n, strict=True):
        one = {"codes": random.integers(0, 256, (rows, 5, 16), np.uint8)}
        one["scales"] = random.uniform(0.5, 1, (rows, 5)).astype(np.float32)
        if points:
            one["zero_points"] = random.integers(0, 256, (rows, 3), np.uint8)
        a |= {f"{name}{end}": value for name, value in one.items()}
        alone.append(normed @ kernel.decode(one, {"N": rows, "K": k, "bits": 4, "block": 32}).T)
        if not (gated and end):
            a[f"y{end}"] = np.full((2, rows), 99, np.float32)
    if not gated:
        a["bias"], a["bias2"] = (random.normal(size=rows).astype(np.float32) for rows in n)
        alone = [y + a[f"bias{end}"] for end, y in zip(("", "2"), alone, strict=True)]
    params = {"N": n[0], "N2": n[1], "K": k, "bits": 4, "block": 32, "eps": 1e-6} | ({"gated": True} if gated else {})
    kernel.run({**a, "decoded": kernel.decode(a, params)}, params)
    expected = [alone[0] / (1 + np.exp(-alone[0].astype(np.float64))) * alone[1]] if gated else alone
    for end, y in zip(("", "2"), expected, strict=False):
        scale = np.abs(y).max()
        np.testing.assert_allclose(a[f"y{end}"], y, rtol=2e-5, atol=2e-5 * scale)


def test_the_parts_of_a_choice_give_what_argmax_gives() -> None:
    random = np.random.default_rng(0)
    for width in (1, 2, 1023, 1025, 5000):
        logits = random.integers(-3, 3, (1, width)).astype(np.float32)  # many ties
        if width == 5000:
            logits[0, 4999] = np.nan
        whole: dict[str, Any] = {"logits": logits, "ids": np.zeros(1, np.int64), "gap": np.zeros(1, np.float32)}
        kernels.get("argmax").run(whole, {})
        parts = -(-width // 1024)
        made: dict[str, Any] = {
            "logits": logits,
            "y": np.zeros((parts, 2), np.float32),
            "y1": np.zeros(parts, np.int32),
        }
        kernels.get("rank").run(made, {"each": 1024})
        last: dict[str, Any] = {
            "a": made["y"],
            "b": made["y1"],
            "ids": np.zeros(1, np.int64),
            "gap": np.zeros(1, np.float32),
        }
        last["length"] = np.array([7])
        kernels.get("choose").run(last, {"rows": 3})
        assert last["length"][0] == 10
        np.testing.assert_array_equal(last["gap"], whole["gap"])
        if width != 5000:
            assert last["ids"][0] == whole["ids"][0]


def test_every_plan_counter_is_the_targets_own_on_both_devices(tiny: Path) -> None:
    made = [run(tiny, tokens=6, config={"target": "fused"}) for _ in range(2)]
    plan = [{n: v for n, v in m.counters.items() if COUNTERS[n].scope == "plan" and n != "modelled_ns"} for m in made]
    assert plan[0] == plan[1]
    assert made[0].lines.of("hello")[0]["effective_config"]["target"] == {"value": "fused", "source": "request"}
    default = run(tiny, tokens=2).lines.of("hello")[0]["effective_config"]["target"]
    assert default == {"value": "plain", "source": "derived"}


# -- splits, and mixtures


def cut(at: int, a: int, parts: tuple[int, int], rows: int) -> Step:
    """A split of buffer a, rows of 96, into one of 32 and one of 64 columns."""
    widths = (32, 64)
    outs = tuple(
        Operand(name, Ref("buffer", b, "float32", (1, rows, n)), "w")
        for name, b, n in zip(("y", "y1"), parts, widths, strict=True)
    )
    params = {"axis": 2, "sizes": widths}
    return Step(at, f"/s{at}", "x", "split", (Operand("a", Ref("buffer", a, "float32", (1, rows, 96))), *outs), params)


@pytest.mark.parametrize("why", ["one row", "two rows", "kept", "source kept"])
def test_a_split_of_one_row_is_read_where_it_lies(why: str) -> None:
    rows = 2 if why == "two rows" else 1
    reader = product(1, 2, 3, 0)
    held = {"kept": [3, 2], "source kept": [3, 0]}.get(why, [3])
    made = fuse([product(5, 9, 0, 20, n=96), cut(0, 0, (1, 2), rows), reader], held, no_buffer)
    assert ("split" in [s.kernel for s in made]) is (why != "one row")
    x = next(o.ref for o in made[-1].operands if o.name == "x")
    assert (x.index, x.offset_bytes) == ((0, 128) if why == "one row" else (2, 0))


def mixture_steps(**changes: Any) -> list[Step]:
    """A bank of four experts, of 64 columns and 32 inner ones, and the gated addition of buffer 3 to it."""
    shapes: dict[str, tuple[Any, ...]] = {
        "x": ("buffer", 0, "float32", (1, 1, 64)),
        "router": ("buffer", 1, "float32", (1, 4)),
        "fc1": ("key", 0, "uint8", (4, 64, 32)),
        "fc1_scales": ("key", 1, "float16", (4, 64, 2)),
        "fc2": ("key", 2, "uint8", (4, 64, 16)),
        "fc2_scales": ("key", 3, "float16", (4, 64, 1)),
    }
    bank = [Operand(name, Ref(*of)) for name, of in shapes.items()]
    bank += [Operand("routed", Ref("control", -1, "int32", (1, 2)), "w")]
    bank += [Operand("y", Ref("buffer", 2, "float32", (1, 1, 64)), "w")]
    params = {"k": 2, "normalise": True, "activation": "swiglu", "fusion": 2, "alpha": 1.0, "beta": 0.0, "limit": None}
    params |= {"bits": 4, "block": 32, **changes}
    gate = [
        Operand("a", Ref("buffer", 4, "float32", (1, 1, 1))),
        Operand("y", Ref("buffer", 5, "float32", (1, 1, 1)), "w"),
    ]
    names_of = (("a", 2, 64), ("b", 3, 64), ("c", 5, 1))
    added = [Operand(n, Ref("buffer", b, "float32", (1, 1, width))) for n, b, width in names_of]
    added += [Operand("y", Ref("buffer", 6, "float32", (1, 1, 64)), "w")]
    return [
        Step(0, "/moe", "x", "moe", tuple(bank), params),
        Step(1, "/gate", "x", "sigmoid", tuple(gate), {}),
        Step(2, "/add", "x", "gated_add", tuple(added), {}),
    ]


@pytest.mark.parametrize("why", ["alone", "kept", "gate kept", "eight bits", "block a row", "more than lanes"])
def test_a_mixture_takes_the_gated_addition_in_where_nobody_else_reads_it(why: str) -> None:
    made_buffers: list[tuple[int, ...]] = []

    def buffer(name: str, dtype: str, shape: tuple[int, ...]) -> Ref:
        made_buffers.append(shape)
        return Ref("buffer", 70 + len(made_buffers), dtype, shape, name)

    forms: dict[str, Any] = {"eight bits": {"bits": 8}, "block a row": {"block": 0}, "more than lanes": {"k": 33}}
    form = forms.get(why, {})
    held = {"kept": [6, 2], "gate kept": [6, 5]}.get(why, [6])
    made = fuse(mixture_steps(**form), held, buffer)
    kinds = [s.kernel for s in made]
    if form:
        assert kinds == ["moe", "sigmoid", "gated_add"] and made_buffers == []
        return
    assert made_buffers == [(2 * 128 + 64,), (1, 2)]
    assert kinds == (["mixture"] if why == "alone" else ["mixture", "sigmoid", "gated_add"])
    own = {o.name: o.ref.index for o in made[0].operands}
    assert ({"other", "other_gate"} <= own.keys()) is (why == "alone")
    assert own["y"] == (6 if why == "alone" else 2) and made[0].node == "/moe"
