"""The greedy choice: ties go to the lowest id, and no number that is not finite ever becomes a token."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import kernels
from engine.errors import NonFiniteLogits
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny, reconfigured, run, write_array

HEAD = "lm_head.MatMul.weight_scales"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model; tests copy it before they change it."""
    return build_tiny(tmp_path_factory.mktemp("sampling"))


def argmax(*rows: list[float], dtype: type = np.float32) -> tuple[int, float]:
    """Chosen id and gap of the last row."""
    ids, gap = np.array([-1]), np.zeros(1, np.float32)
    kernels.get("argmax").run({"logits": np.array([rows], dtype), "ids": ids, "gap": gap}, {})
    return int(ids[0]), float(gap[0])


@pytest.mark.parametrize(
    ("row", "chosen", "gap"),
    [
        ([1, 3, 3, 2], 1, 0),
        ([3, 3, 3, 3], 0, 0),
        ([0, -0.0], 0, 0),
        ([-0.0, 0], 0, 0),
        ([-5, -3, -9, -3], 1, 0),
        ([2, 1, 5, 4.5], 2, 0.5),
        ([5, 1, 4], 0, 1),
        ([1, 4, 5], 2, 1),
    ],
)
def test_ties_go_to_the_lowest_id(row: list[float], chosen: int, gap: float) -> None:
    for dtype in (np.float32, np.float16):
        assert argmax(row, dtype=dtype) == (chosen, gap)


def test_the_last_row_decides() -> None:
    assert argmax([9, 0, 0], [0, 0, 7]) == (2, 7)
    assert math.isnan(argmax([0, 0, 7], [0, math.nan, 7])[1])
    assert argmax([math.nan, 0, 0], [0, 0, 7])[1] == 7, "earlier rows are not logits of this step"


@settings(max_examples=100, deadline=None)
@given(row=st.lists(st.floats(width=32), min_size=1, max_size=8))
def test_gap_and_choice_of_any_row(row: list[float]) -> None:
    chosen, gap = argmax(row)
    if not all(map(math.isfinite, row)):
        assert math.isnan(gap)
        return
    best = max(row)
    assert chosen == row.index(best)
    assert math.isfinite(gap) and gap >= 0, "a gap is a number, however wide"
    if len(row) > 1:
        rest = max(row[:chosen] + row[chosen + 1 :])
        assert gap == pytest.approx(min(best - rest, float(np.finfo(np.float32).max)), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["first", "middle", "last", "all"])
def test_field_36_a_value_that_is_not_finite_makes_the_gap_nan(value: float, where: str) -> None:
    row: NDArray[np.float32] = np.linspace(-3, 3, 512, dtype=np.float32)
    row[{"first": slice(0, 1), "middle": slice(256, 257), "last": slice(511, 512), "all": slice(None)}[where]] = value
    for dtype in (np.float32, np.float16):
        assert math.isnan(argmax(row.tolist(), dtype=dtype)[1])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [[0], [256], [511], list(range(512))])
@pytest.mark.parametrize("capture", [True, False])
def test_field_36_one_such_logit_ends_the_run(
    tiny: Path, tmp_path: Path, value: float, where: list[int], capture: bool
) -> None:
    """A head row with such scales gives such a logit; the run ends before a token of that step is emitted."""

    def spoil(scales: NDArray[np.float32]) -> NDArray[np.float32]:
        changed = scales.reshape(512, 4).copy()
        changed[where] = value
        return changed.reshape(-1)

    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    write_array(folder, HEAD, spoil)
    outcome = run(folder, config={"capture": capture})
    assert outcome.code == 15
    error = outcome.error
    assert error["kind"] == "non_finite" and error["remedy"]
    assert f"position {len(TINY_PROMPT) - 1}" in error["message"]
    assert error["ids"] == [] and error["counters"]["forward_steps"] == 1
    assert not outcome.lines.of("generation") and not outcome.lines.of("result")


@pytest.mark.parametrize("config", [{}, {"capture": False}, {"weight_budget": "50%", "granule": 4096}])
def test_field_36_a_scale_that_overflows_ends_the_run(tiny: Path, tmp_path: Path, config: dict[str, object]) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    write_array(folder, "model.layers.1.mlp.up_proj.MatMul.weight_scales", lambda s: s * np.float32(1e38))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what the arithmetic met is said once, in the error line
        assert run(folder, config=config).code == 15


def test_logits_as_wide_as_float32_are_still_numbers(tiny: Path, tmp_path: Path) -> None:
    """Finite logits further apart than float32 reaches: a gap, a token, and lines that are strict JSON."""
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    one_each: NDArray[np.uint8] = np.full((512, 64), 0x88, np.uint8)  # code 8 is zero
    one_each[np.arange(512), np.arange(512) % 64] = 0x89
    write_array(folder, "lm_head.MatMul.weight_Q4", lambda _: one_each.reshape(-1))
    write_array(folder, HEAD, np.ones_like)
    bench = Bench(folder)
    bench.prefill(TINY_PROMPT, 1)
    hidden = bench.logits()[:64]  # every second number of the last hidden state
    column = int(np.abs(hidden).argmax())
    assert abs(hidden[column]) > 1
    all_the_same = np.broadcast_to(one_each[column], (512, 64))
    write_array(folder, "lm_head.MatMul.weight_Q4", lambda _: all_the_same.reshape(-1))
    wanted = np.full(512, -2e38)
    wanted[7] = 2e38
    write_array(folder, HEAD, lambda _: np.repeat(wanted / float(hidden[column]), 4).astype(np.float32))
    outcome = run(folder, tokens=1)
    assert outcome.code == 0
    assert outcome.streams == [([7], [float(np.finfo(np.float32).max)])]


def test_poison_in_the_logits_names_the_step(tiny: Path) -> None:
    """Weights that go bad midway end the run at the position where they did, with the tokens before it known."""
    bench = Bench(tiny)
    bench.prefill(TINY_PROMPT, 1)
    bench.step()
    bench.device.fill(bench.key_address(HEAD), bench.plan.keys[bench.key(HEAD)].nbytes, 0xFF)
    with pytest.raises(NonFiniteLogits, match="position 5 "):
        bench.step()
