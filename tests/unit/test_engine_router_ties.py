"""Router logits that are equal: the lower expert, in one step as in a whole decoder; and those that are no numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from engine import oracle
from engine.config import RunRequest
from engine.errors import NonFiniteLogits
from engine.forced import force
from engine.graph import Graph
from engine.onnx_load import load
from engine.oracle.inputs import MICROSOFT
from tests.unit.engine_mixture import BANKS, CHOSEN, EXPERTS, PROMPT, asked, built, choices
from tests.unit.engine_plain import compute, stored
from tests.unit.engine_rig import write_array

HIDDEN = 4
GROUPS = ((0, 3, 6), (1, 4, 7), (2, 5))
"""Experts whose rows of the router are equal."""
FORCED = (3, 99, 41, 250, 8)
TURNED = {"alone": {}, "one by one": {"weight_budget": "60%", "policy": "lru"}, "in chunks": {"prefill_chunk": 2}}


def onnxruntimes(x: NDArray[Any], router: NDArray[Any], weights: dict[str, NDArray[Any]], **words: Any) -> NDArray[Any]:
    """MoE of onnxruntime's CPU kernel, which gives a tie to the higher index: so experts go in the other way round."""
    turned = [numpy_helper.from_array(np.ascontiguousarray(w[::-1]), n) for n, w in weights.items()]
    given_ = {"x": x, "router": np.ascontiguousarray(router[:, ::-1])}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape) for n, a in given_.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)]
    node = helper.make_node("MoE", [*given_, "w1", "", "w2"], ["y"], domain=MICROSOFT, **words)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    graph = helper.make_graph([node], "one", inputs, outputs, turned)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    made: NDArray[Any] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, given_)[0]
    return made


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ties_are_those_of_onnxruntime_with_the_experts_in_the_other_order(data: st.DataObject) -> None:
    """Router logits of few values, so that nearly every choice has a tie at its edge."""
    experts = data.draw(st.integers(2, 33))
    k = data.draw(st.integers(1, min(experts, 8)))
    words: dict[str, Any] = {"k": k, "activation_type": "silu"}
    words["normalize_routing_weights"] = data.draw(st.integers(0, 1))
    random = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = random.normal(size=(3, HIDDEN)).astype(np.float32)
    router = random.integers(0, data.draw(st.integers(1, 3)), (3, experts)).astype(np.float32)
    weights = {n: random.normal(size=(experts, HIDDEN, HIDDEN)).astype(np.float32) for n in ("w1", "w2")}
    kept = {n: stored(n, w) for n, w in weights.items()}
    [y] = compute("MoE", {"x": x, "router": router}, wiring=["x", "router", "w1", "", "w2"], weights=kept, **words)
    np.testing.assert_allclose(y, onnxruntimes(x, router, weights, **words), rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of four banks whose routers have three different rows for eight experts.

    Each row takes one number of x, times the same: no order of summing can part what is equal.
    """
    folder = built(tmp_path_factory.mktemp("ties") / "m")

    def codes(old: NDArray[Any]) -> NDArray[Any]:
        made = np.full((EXPERTS, old.size // EXPERTS), 0x88, np.uint8)
        for number, group in enumerate(GROUPS):
            made[list(group), number] = 0x8F  # the lower half: 7 where others are 0
        return made.reshape(-1)

    for layer in range(BANKS):
        name = f"model.layers.{layer}.moe.router.MatMul.weight"
        write_array(folder, f"{name}_Q4", codes)
        write_array(folder, f"{name}_scales", lambda old: np.full_like(old, 0.25))
    return folder


@pytest.mark.parametrize("config", TURNED.values(), ids=TURNED)
def test_a_decoder_takes_the_lower_experts_of_every_tie(tied: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "routing.json"
    assert asked(tied, routing_out=str(path), config=config).code == 0
    found = {tuple(map(int, pair)) for pair in choices(path).reshape(-1, CHOSEN)}
    assert found == {group[:CHOSEN] for group in GROUPS}, "every group wins somewhere, and its last expert never"


def forced_through(folder: Path) -> tuple[Graph, RunRequest]:
    """A model, and what feeds it the prompt and FORCED."""
    return load(folder), RunRequest(folder, tuple(PROMPT), len(FORCED) + 1, device="sim")


def test_the_reference_takes_them_too(tied: Path) -> None:
    graph, request = forced_through(tied)
    found = force(graph, request, FORCED, wide=True)
    wanted = oracle.logits(graph, PROMPT, FORCED)
    assert np.abs(found - wanted).max() <= 2e-4 * np.abs(wanted).max()


def test_field_36_a_router_that_gives_no_numbers_ends_decoder_and_reference_alike(tmp_path: Path) -> None:
    folder = built(tmp_path / "m")
    name = f"model.layers.{BANKS - 1}.moe.router.MatMul.weight_scales"
    write_array(folder, name, lambda old: np.full_like(old, np.nan))
    graph, request = forced_through(folder)
    with pytest.raises(NonFiniteLogits):
        force(graph, request, FORCED)
    with pytest.raises(NonFiniteLogits, match="position 0"):
        oracle.logits(graph, PROMPT, FORCED)
