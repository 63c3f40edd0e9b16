"""Launches of experts that lie apart: the bits of the bank's own step, wherever they stand and however tokens are cut.

Kernels are the simulator's references, and a card's where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import kernels
from engine.device import cuda, cuda_bind
from engine.device.base import Launch, Placed
from engine.device.sim import SimDevice
from engine.expert_steps import Wave, addresses_of, launch_of, places
from engine.graph import Weight, stored_bytes
from engine.kernels import cuda as cuda_forms
from engine.kernels.mixture import padded
from engine.paging.experts import WHOLE, decide, split
from engine.plan import Buffer, Key, KvGeometry, Operand, Plan, Ref, Step
from engine.routing import bank_operands
from tests.unit.engine_driver import Card, Driver
from tests.unit.test_engine_kernels_fused import make_mixture, mixtures

Arrays = dict[str, NDArray[Any]]
GIVEN = ("points", "bias", "gamma", "other", "residual")
WRITTEN = ("routed", "hidden", "share", "y")
OF_MIXTURE = ("gamma", "other", "other_gate", "residual", "hidden", "share")
DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]


def make_device(kind: str) -> Any:
    """A device of a kind: the host's, or the first visible card."""
    if kind == "sim":
        return SimDevice()
    from engine.device.cuda import CudaDevice

    return CudaDevice()


def plan_of(kernel: str, case: dict[str, Any]) -> tuple[Plan, Arrays]:
    """A plan of one step, a bank's, over a case's operands; those that a mixture alone has are left out elsewhere."""
    arrays, params, _ = make_mixture(case)
    tokens, k, width = case["tokens"], case["k"], padded(case["inner"])
    arrays |= {
        "routed": np.full((tokens, k), -1, np.int32),
        "hidden": np.full((tokens, k, width), 99, np.float32),
        "share": np.full((tokens, k), 99, np.float32),
        "y": np.full(arrays["x"].shape, 99, np.float32),
    }
    if kernel == "moe":
        arrays = {name: array for name, array in arrays.items() if name not in OF_MIXTURE}
    operands, keys, buffers = [], list[Key](), list[Buffer]()
    for name, array in arrays.items():
        dtype = str(array.dtype)
        if name.startswith("fc") or name == "gamma":
            keys.append(Key(len(keys), Weight(name, dtype, array.shape, array.reshape(-1).view(np.uint8)), 0))
            ref = Ref("key", keys[-1].index, dtype, array.shape, name)
        else:
            behind = 4 * case["hidden"] if name == "hidden" else 0  # as fused plans have it
            buffers.append(Buffer(len(buffers), name, array.nbytes + behind, 0))
            ref = Ref("buffer", buffers[-1].index, dtype, array.shape, name)
        operands.append(Operand(name, ref, "w" if name in WRITTEN else "r"))
    step = Step(0, "/moe", "com.microsoft::QMoE", kernel, tuple(operands), params)
    kv = KvGeometry(0, 1, 1, "float32", 4)
    plan = Plan(tokens, (step,), tuple(keys), (), (), tuple(buffers), 0, kv, (), operands[0].ref)
    return plan, arrays


@dataclass(slots=True)
class Rig:
    """A device that has a case's operands in memory, each for itself."""

    device: Any
    plan: Plan
    arrays: Arrays
    buffers: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for buffer in self.plan.buffers:
            self.buffers.append(self.room(buffer.nbytes))
            self.device.fill(self.buffers[-1], buffer.nbytes, 0xFF)
            if buffer.name not in WRITTEN:
                self.device.copy_in(self.buffers[-1], self.arrays[buffer.name].reshape(-1).view(np.uint8))

    def room(self, nbytes: int) -> int:
        self.taken.append(self.device.alloc(nbytes, "operand"))
        return self.taken[-1]

    def key(self, key: Key) -> int:
        """A key's own memory, filled."""
        start = self.room(key.span_bytes)
        for piece in key.pieces:
            self.device.copy_in(start + piece.offset_bytes, piece.weight.data)
        return start

    def placed(self, step: Step) -> list[Placed]:
        return [
            Placed(
                o,
                self.buffers[o.ref.index] + o.ref.offset_bytes
                if o.ref.kind == "buffer"
                else self.key(self.plan.keys[o.ref.index]),
                stored_bytes(o.ref.dtype, math.prod(o.ref.shape)),
            )
            for o in step.operands
        ]

    def read(self, name: str) -> bytes:
        """A buffer's bytes."""
        at = next(b.index for b in self.plan.buffers if b.name == name)
        return bytes(self.device.copy_out(self.buffers[at], self.arrays[name].nbytes))

    def close(self) -> None:
        while self.taken:
            self.device.free(self.taken.pop())


def whole(device: Any, plan: Plan, arrays: Arrays) -> tuple[bytes, bytes]:
    """What the bank's own step chooses and makes."""
    device.prepare(plan.steps)
    rig = Rig(device, plan, arrays)
    device.launch(Launch(plan.steps[0], tuple(rig.placed(plan.steps[0]))))
    made = rig.read("routed"), rig.read("y")
    rig.close()
    return made


def apart(device: Any, plan: Plan, arrays: Arrays, most: int, seed: int) -> tuple[bytes, bytes]:
    """The same by the steps that it becomes, at most so many tokens a launch, chosen experts alone, scattered."""
    made = split({1: plan}, decide(plan))[1]
    device.prepare(made.steps)
    rig = Rig(device, made, arrays)
    for step in made.steps[:-1]:
        device.launch(Launch(step, tuple(rig.placed(step))))
    step, rows = made.steps[-1], arrays["routed"].shape[0]
    assert step.experts is not None and step.kernel == WHOLE[plan.steps[0].kernel]
    chosen = np.frombuffer(rig.read("routed"), np.int32).reshape(rows, -1)
    random = np.random.default_rng(seed)
    for first in range(0, rows, most):
        end = min(first + most, rows)
        asked = np.unique(chosen[first:end]).tolist()
        stands = {e: rig.key(made.keys[step.experts.keys[e]]) for e in random.permutation(asked).tolist()}
        wave = Wave((0,), first, end, tuple(asked))
        device.launch(launch_of(step, rig.placed(step), wave, [stands[e] for e in asked]))
    found = rig.read("routed"), rig.read("y")
    rig.close()
    return found


def cases() -> Iterator[dict[str, Any]]:
    """What a run of an exporter's model does not have: each activation, operands that may be left out, odd sizes."""
    base = {"experts": 7, "k": 3, "tokens": 3, "hidden": 96, "inner": 160, "activation": "silu", "fusion": 2}
    base |= {"limit": None, "alpha": 1.0, "beta": 0.0, "normalise": True, "ties": False, "seed": 4}
    for n, activation in enumerate(("swiglu", "swiglu", "silu", "gelu", "relu", "identity")):
        given_ = {name: bool((n + 1) >> i % 3 & 1) for i, name in enumerate(GIVEN)}
        sizes = {"hidden": (96, 64, 2048)[n % 3], "inner": (160, 512, 32)[n % 3], "experts": (7, 40, 33)[n % 3]}
        more = {"activation": activation, "fusion": 1 + n % 2, "limit": None if n % 2 else 0.5, "ties": n > 3}
        yield {**base, **sizes, **more, "normalise": n % 2 == 0, "seed": n, "given": given_}


@pytest.mark.parametrize("kind", DEVICES)
@pytest.mark.parametrize("kernel", list(WHOLE))
@pytest.mark.parametrize(
    "case", list(cases()), ids=lambda c: f"{c['activation']}-{c['hidden']}-{c['inner']}-{c['fusion']}"
)
def test_no_bit_feels_that_experts_lie_apart(kind: str, kernel: str, case: dict[str, Any]) -> None:
    device = make_device(kind)
    plan, arrays = plan_of(kernel, case)
    expected = whole(device, plan, arrays)
    assert np.isfinite(np.frombuffer(expected[1], np.float32)).all() and b"\xff" * 4 not in expected[0]
    for most in (case["tokens"], 2, 1):
        assert apart(device, plan, arrays, most, case["seed"]) == expected, most


@settings(max_examples=40, deadline=None)
@given(case=mixtures(), kernel=st.sampled_from(list(WHOLE)), most=st.integers(1, 3))
def test_no_bit_feels_it_whatever_the_sizes(case: dict[str, Any], kernel: str, most: int) -> None:
    device = SimDevice()
    plan, arrays = plan_of(kernel, case)
    if case["k"] < case["experts"]:
        assert apart(device, plan, arrays, most, case["seed"]) == whole(device, plan, arrays)


@pytest.mark.parametrize("kind", DEVICES)
def test_a_logit_that_is_none_shows_in_its_token_alone_and_is_no_choice_twice(kind: str) -> None:
    """The choice stays one that can be paged in, so that the run ends with what is wrong: no finite logits."""
    case = {**next(cases()), "given": dict.fromkeys(GIVEN, False)}
    for kernel in WHOLE:
        device = make_device(kind)
        plan, arrays = plan_of(kernel, case)
        arrays["router"][1, :4] = np.nan
        routed, y = whole(device, plan, arrays)
        chosen = np.frombuffer(routed, np.int32).reshape(3, -1)
        assert all(len(set(row)) == case["k"] for row in chosen.tolist()) and chosen[1].min() >= 4
        lost = np.isnan(np.frombuffer(y, np.float32).reshape(3, -1)).all(axis=1)
        assert lost.tolist() == [False, True, False]
        again = apart(device, plan, arrays, 1, 0)
        assert again[0] == routed
        np.testing.assert_array_equal(np.frombuffer(again[1], np.float32), np.frombuffer(y, np.float32))


# -- what a launch is told


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A card's device over a driver in Python."""
    driver = Driver()
    monkeypatch.setattr(cuda, "find_card", lambda uuid: Card(driver))
    return cuda.CudaDevice()


@pytest.mark.parametrize("kernel", list(WHOLE))
@pytest.mark.parametrize("sequences", [(0,), (2,), (0, 2)])
def test_a_card_is_told_each_pass_anew_where_experts_are(
    bound: Any, monkeypatch: pytest.MonkeyPatch, kernel: str, sequences: tuple[int, ...]
) -> None:
    """Behind the operands' own pointers, before what a batch adds; the text is made once and no launch is kept."""
    prepared = []

    def counted(*arguments: Any) -> Any:
        prepared.append(arguments)
        return cuda_forms.prepare(*arguments)

    monkeypatch.setattr(cuda_bind, "prepare", counted)
    plan, _ = plan_of(kernel, next(cases()))
    step = split({1: plan}, decide(plan))[1].steps[-1]
    placed = [Placed(o, n << 20, 64, stride=4096) for n, o in enumerate(step.operands)]
    launches, forms = bound._driver.launched, kernels.get(step.kernel).forms
    for addresses in ([5 << 30, 6 << 30], [8 << 30, 7 << 30]):
        launch = launch_of(step, placed, Wave(sequences, 0, 3, (1, 4)), addresses)
        bound.launch(launch)
        assert bound._bound == {} and len(prepared) == len(forms)
        alone = len(sequences) == 1
        for one in bound._binder.bind(launch).kernels:
            pointers = [(n << 20) + (4096 * sequences[0] if alone else 0) for n in range(len(placed))]
            assert [v.value or 0 for v in one.values[: len(placed)]] == pointers
            table, *batch = one.values[len(placed) :]
            assert list(table) == [0, addresses[0], 0, 0, addresses[1], 0, 0]
            assert [list(v) for v in batch] == ([] if alone else [[4096] * len(placed), [0, 2]])
    bound._driver.finish()
    assert launches.total() == 2 * len(forms) and bound.tally.read()["eager_launches"] == 2 * len(forms)


def test_a_cut_takes_its_tokens_share_of_each_operand_and_all_of_a_norm_s_factors() -> None:
    """As many tokens as columns: which axis is whose goes by the operand, not by its size."""
    case = {**next(cases()), "tokens": 32, "hidden": 32, "inner": 32, "given": dict.fromkeys(GIVEN, True)}
    plan, _ = plan_of("mixture", case)
    step = split({1: plan}, decide(plan))[1].steps[-1]
    placed = [Placed(o, 1 << 20, stored_bytes(o.ref.dtype, math.prod(o.ref.shape))) for o in step.operands]
    made = launch_of(step, placed, Wave((0,), 5, 12, (1,)), [7 << 30])
    assert tuple(p.operand for p in made.placed[: len(placed)]) == made.step.operands and made.once
    for before, after in zip(placed, made.placed, strict=False):
        name, ref = after.operand.name, after.operand.ref
        if name == "gamma":
            assert after is before
            continue
        each = before.nbytes // 32
        assert (after.address, after.nbytes) == (before.address + 5 * each, 7 * each), name
        assert math.prod(ref.shape) == 7 * math.prod(before.operand.ref.shape) // 32 and ref.shape[0] == 7
    assert {p.address - p.operand.ref.offset_bytes for p in made.placed[len(placed) :]} == {7 << 30}
    assert launch_of(step, placed, Wave((0,), 0, 32, (1,)), [0]).step is step


def test_addresses_are_told_by_expert_and_none_of_those_that_are_not_there() -> None:
    plan, _ = plan_of("moe", next(cases()))
    step = split({1: plan}, decide(plan))[1].steps[-1]
    assert step.experts is not None and len(step.experts.parts) == len(bank_operands(plan.steps[0]))
    there = {5: 4096, 1: 1 << 40}
    assert addresses_of(step.experts, places(step.experts, there)) == [0, 1 << 40, 0, 0, 0, 4096, 0]
