"""Rotary tables that an If chooses by the total length: a call takes those of its own length, what is cached stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.bind import lower
from engine.errors import UnsupportedModel
from engine.graph import Graph, Node, Subgraph
from tests.unit.engine_plain import F64, attend, turn
from tests.unit.engine_rig import Bench
from tests.unit.engine_small import CONTEXT, HEAD_SIZE, HEADS, Small, branch

Tables = dict[str, NDArray[Any]]


def above_threshold(s: Small, form: str, threshold: int) -> str:
    """Whether the total length is above the threshold, said in one of the ways that exporters have."""
    match form:
        case "shape":
            return s.add("Greater", s.total(), s.constant(threshold))
        case "sum":
            summed = s.add("ReduceSum", "attention_mask", s.constant([1]), keepdims=0)
            return s.add("Greater", summed, s.constant([threshold]))
    less = s.add("Sub", s.total(), s.constant(2))
    return s.add("Greater", s.add("Cast", less, to=6), s.constant(threshold - 2, np.int32))


def tables(random: np.random.Generator, rows: int) -> Tables:
    """Cosines and sines of random angles."""
    angles = random.uniform(-3, 3, (rows, HEAD_SIZE // 2))
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def decoder(form: str, threshold: int, above: Subgraph, below: Subgraph, **attributes: Any) -> Graph:
    """A decoder whose tables come out of an If."""
    s = Small(seed=5)
    x = s.embedded()
    s.add(
        "If",
        above_threshold(s, form, threshold),
        outputs=("the_cos", "the_sin"),
        then_branch=above,
        else_branch=below,
    )
    s.head(s.attended(x, more={7: "the_cos", 8: "the_sin"}, do_rotary=1, **attributes))
    return s.graph()


def plain(graph: Graph, ids: list[int], calls: list[int], threshold: int, above: Tables, below: Tables) -> F64:
    """Logits of the last row of each call, in float64."""
    w = {n: graph.weights[n].array().astype(np.float64) for n in ("embedding", "qkv.0", "head")}
    keys, values, past, found = np.zeros((0, 1, HEAD_SIZE)), np.zeros((0, 1, HEAD_SIZE)), 0, []
    p = {"window": -1, "scale": HEAD_SIZE**-0.5, "softcap": 0.0}
    for rows in calls:
        packed = (w["embedding"][ids[past : past + rows]] @ w["qkv.0"]).reshape(rows, HEADS + 2, HEAD_SIZE)
        chosen = above if past + rows > threshold else below
        cos, sin = (chosen[n][past : past + rows].astype(np.float64) for n in ("cos", "sin"))
        keys = np.concatenate([keys, turn(packed[:, HEADS : HEADS + 1], cos, sin, False)])
        values = np.concatenate([values, packed[:, HEADS + 1 :]])
        y = attend(turn(packed[:, :HEADS], cos, sin, False), keys, values, past, p)
        past += rows
        found.append(y[-1].reshape(-1) @ w["head"])
    return np.stack(found)


@settings(max_examples=60, deadline=None)
@given(
    threshold=st.integers(1, 9),
    around=st.integers(-2, 2),
    steps=st.integers(1, 6),
    form=st.sampled_from(["shape", "sum", "less"]),
    as_weights=st.booleans(),
    capture=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_steps_that_cross_the_threshold(
    threshold: int, around: int, steps: int, form: str, as_weights: bool, capture: bool, seed: int
) -> None:
    """A prompt that ends around it, then token by token, recorded or not; twice, as the second sequence starts short.

    Both branches use the same names inside, each its own: they are scopes of their own.
    """
    random = np.random.default_rng(seed)
    above, below = tables(random, CONTEXT), tables(random, threshold)
    graph = decoder(form, threshold, branch(above, as_weights=as_weights), branch(below, as_weights=as_weights))
    prompt = max(1, threshold + around)
    ids = random.integers(0, 12, prompt + steps).tolist()
    expected = plain(graph, ids, [prompt, *[1] * steps], threshold, above, below)
    bench = Bench(graph, rows=(prompt,), capture=capture)
    for _ in range(2):
        bench.prefill(ids[:prompt])
        found = [bench.prompt_logits(prompt)]
        for token in ids[prompt:]:
            bench.force(token)
            found.append(bench.logits())
        np.testing.assert_allclose(np.stack(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("capture", [True, False])
def test_a_prompt_across_the_threshold_takes_one_table_however_it_is_cut(chunk: int, capture: bool) -> None:
    """Its length is the prompt's, not the chunk's: the same bits as in one call, and after it the steps' own."""
    random = np.random.default_rng(4)
    graph = decoder("shape", 6, *(branch(tables(random, n), as_weights=False) for n in (CONTEXT, 6)))
    ids = random.integers(0, 12, 8).tolist()
    made = []
    for size in (8, chunk):
        bench = Bench(graph, rows=(8, chunk, 8 % chunk or chunk), capture=capture)
        for prompt in (ids, ids[:4]):  # then a short one, which the long one must not have marked
            last = len(prompt) % size or min(size, len(prompt))
            if last not in bench.plans:
                bench = Bench(graph, rows=(8, size, last), capture=capture)
            bench.prefill(prompt, size)
            made.append(bench.prompt_logits(last))
            bench.force(3)
            made.append(bench.logits())
    half = len(made) // 2
    assert [m.tobytes() for m in made[:half]] == [m.tobytes() for m in made[half:]]


def test_one_step_serves_both_sides_and_is_captured() -> None:
    random = np.random.default_rng(1)
    graph = decoder("shape", 6, *(branch(tables(random, n), as_weights=False) for n in (CONTEXT, 6)))
    plan = lower(graph, 1)
    sides = [f"the_{n} {side}" for n in ("cos", "sin") for side in ("above", "below")]
    assert sorted(w.name for w in plan.constants) == sides
    bench = Bench(graph)
    cutting = bench.decoder.capture_plan
    assert cutting is not None and (cutting.captured, cutting.seam_runs) == (1, 0)


def test_a_condition_known_at_build_takes_its_branch_alone() -> None:
    """A branch that is not taken may hold what is not served."""
    random = np.random.default_rng(2)
    taken = tables(random, CONTEXT)
    other = Subgraph((), {}, ("nothing", "at_all"))
    for value in (True, False):
        s = Small(seed=5)
        x = s.embedded()
        pair = (branch(taken, as_weights=True), other)
        then, otherwise = pair if value else pair[::-1]
        known = s.constant(value, np.bool_)
        s.add("If", known, outputs=("the_cos", "the_sin"), then_branch=then, else_branch=otherwise)
        s.head(s.attended(x, more={7: "the_cos", 8: "the_sin"}, do_rotary=1))
        graph = s.graph()
        bench = Bench(graph, rows=(3,))
        bench.prefill([1, 2, 3])
        expected = plain(graph, [1, 2, 3], [3], 0, taken, taken)
        np.testing.assert_allclose(bench.prompt_logits(3)[None], expected, rtol=1e-4, atol=1e-4)


def broken(name: str) -> Graph:
    """A decoder whose If cannot be served."""
    random = np.random.default_rng(3)
    far, near = tables(random, CONTEXT), tables(random, 6)
    match name:
        case "short":
            near = tables(random, 5)
        case "far too short":
            far = tables(random, CONTEXT - 1)
        case "wide":
            near = {n: np.ones((6, HEAD_SIZE), np.float32) for n in near}
    above, below = branch(far, as_weights=False), branch(near, as_weights=False)
    if name == "unknown operator":
        below = Subgraph((*below.nodes, *branch({"spare": np.ones(1)}, as_weights=False).nodes), {}, ("cos", "missing"))
    if name == "other operators":
        strange = [Node(f"{op} inside", op, "", ("input_ids",), (op,), {}) for op in ("NonZero", "Unique")]
        above = Subgraph((*above.nodes, strange[0]), above.weights, above.outputs)
        below = Subgraph((*below.nodes, strange[1]), below.weights, below.outputs)
    return decoder("shape", 6, above, below, smooth_softmax=int(name == "other operators"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("short", "5 rows end before the context's 6"),
        ("far too short", "23 rows end before the context's 24"),
        ("wide", "do not fit head size 8"),
        ("unknown operator", "'missing'"),
        ("other operators", "NonZero inside (ai.onnx::NonZero): operator is not served"),
        ("other operators", "Unique inside (ai.onnx::Unique): operator is not served"),
        ("other operators", "smooth_softmax = 1"),
    ],
)
def test_tables_that_do_not_reach_or_fit_are_refused(name: str, says: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        lower(broken(name), 1)
    assert says in caught.value.message
