"""Rotary tables that an If chooses by the total length: a call takes those of its own length, what is cached stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import oracle
from engine.bind import lower
from engine.errors import UnsupportedModel
from engine.graph import Graph, Node, Subgraph, Value
from tests.unit.engine_plain import F64, attend, turn
from tests.unit.engine_rig import Bench
from tests.unit.engine_small import CONTEXT, HEAD_SIZE, HEADS, MICROSOFT, Small, branch

Tables = dict[str, NDArray[Any]]


def above_threshold(s: Small, form: str, threshold: int) -> str:
    """Whether the total length is above the threshold, said in one of the ways that exporters have."""
    match form:
        case "shape":
            return s.add("Greater", s.total(), s.constant(threshold))
        case "sum":
            summed = s.add("ReduceSum", "attention_mask", s.constant([1]), keepdims=0)
            return s.add("Greater", summed, s.constant([threshold]))
        case "narrow":
            summed = s.add("ReduceSum", s.add("Cast", "attention_mask", to=6), s.constant([1]), keepdims=0)
            return s.add("Less", s.constant(threshold, np.int32), s.add("ReduceMax", summed, keepdims=0))
        case "least":
            return s.add("GreaterOrEqual", s.add("Add", s.constant(1), s.total()), s.constant(threshold + 2))
        case "most":
            return s.add("LessOrEqual", s.total(), s.constant(threshold))
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
        then_branch=below if form == "most" else above,
        else_branch=above if form == "most" else below,
    )
    s.head(s.attended(x, more={7: "the_cos", 8: "the_sin"}, do_rotary=1, **attributes))
    return s.graph()


def moving(threshold: int, above: Tables, below: Tables) -> Graph:
    """A decoder with both tables in one: positions in longer sequences are moved to the second, as for DirectML."""
    s = Small(seed=5)
    s.inputs["position_ids"] = Value("position_ids", "int64", ("batch", "sequence"))
    x = s.embedded()
    largest = s.add("ReduceMax", "position_ids", keepdims=0)
    long = s.add("Cast", s.add("GreaterOrEqual", largest, s.constant(threshold)), to=7)
    ids = s.add("Add", s.add("Mul", long, s.constant(threshold)), "position_ids")
    cos, sin = (s.weight(n, np.concatenate([below[n], above[n]])) for n in ("cos", "sin"))
    q, k, v = parts(s, s.add("MatMul", x, s.drawn("qkv.0", s.hidden, (HEADS + 2) * HEAD_SIZE)))
    q, k = (s.add("RotaryEmbedding", y, ids, cos, sin, domain=MICROSOFT) for y in (q, k))
    outputs = ("attended", "present.0.key", "present.0.value")
    inputs = (q, k, v, "past.0.key", "past.0.value", *s.lengths())
    given = {"num_heads": HEADS, "kv_num_heads": 1}
    s.head(s.add("GroupQueryAttention", *inputs, domain=MICROSOFT, outputs=outputs, **given))
    return s.graph()


def parts(s: Small, packed: str) -> tuple[str, str, str]:
    """Queries, keys and values out of a packed projection."""
    sizes = s.constant([HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_SIZE])
    s.add("Split", packed, sizes, outputs=("q", "k", "v"), axis=-1)
    return "q", "k", "v"


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
    form=st.sampled_from(["shape", "sum", "less", "narrow", "least", "most", "moved"]),
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
    if form == "moved":
        graph = moving(threshold, above, below)
    else:
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
    told = oracle.logits(graph, ids[:prompt], ids[prompt:])
    np.testing.assert_allclose(told[prompt - 1 :], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["shape", "moved"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
@pytest.mark.parametrize("capture", [True, False])
def test_a_prompt_across_the_threshold_takes_one_table_however_it_is_cut(form: str, chunk: int, capture: bool) -> None:
    """Its length is the prompt's, not the chunk's: the same bits as in one call, and after it the steps' own."""
    random = np.random.default_rng(4)
    above, below = (tables(random, n) for n in (CONTEXT, 6))
    if form == "moved":
        graph = moving(6, above, below)
    else:
        graph = decoder("shape", 6, branch(above, as_weights=False), branch(below, as_weights=False))
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


@pytest.mark.parametrize("form", ["shape", "moved", "counted"])
@pytest.mark.parametrize("capture", [True, False])
def test_field_39_sequences_of_a_batch_choose_their_table_by_their_own_length(form: str, *, capture: bool) -> None:
    """Prompts below, at and above the threshold side by side, cut in chunks, then steps across it: each as alone.

    So do positions that are moved by the length, and those that a step writes down.
    """
    random = np.random.default_rng(5)
    above, below = (tables(random, n) for n in (CONTEXT, 6))
    if form == "moved":
        graph = moving(6, above, below)
    elif form == "counted":
        graph = in_sections(apart=True)
    else:
        graph = decoder("shape", 6, branch(above, as_weights=False), branch(below, as_weights=False))
    prompts = [random.integers(0, 12, n).tolist() for n in (1, 5, 6, 9)]

    def emitted(given: list[list[int]]) -> list[list[tuple[int, float, bytes]]]:
        bench = Bench(graph, rows=(1, 2, 4), capture=capture, sequences=len(given))
        bench.decoder.reset()
        passes = [bench.decoder.prefill(given, 4), *(bench.decoder.step() for _ in range(3))]
        last = [bench.decoder.logits(1, s).tobytes() for s in range(len(given))]
        return [[(e.token, e.gap, last[s]) for e in column] for s, column in enumerate(zip(*passes, strict=True))]

    assert emitted(prompts) == [emitted([prompt])[0] for prompt in prompts]


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


def angled(rows: int) -> Tables:
    """Cosines and sines of angles that grow with the position, as of a real table."""
    angles = np.arange(rows)[:, None] * np.array([1.0, 0.1, 0.01, 0.001])
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def two_in_one(*, fused: bool) -> Graph:
    """Tables of a short and of a long context in one, of which a provider's option says where the second begins."""
    s = Small(seed=5)
    x = s.embedded()
    near, far = angled(6), angled(CONTEXT)
    cos, sin = (s.weight(n, np.concatenate([near[n], far[n]])) for n in ("cos", "sin"))
    if fused:
        s.head(s.attended(x, more={7: cos, 8: sin}, do_rotary=1))
        return s.graph()
    s.inputs["position_ids"] = Value("position_ids", "int64", ("batch", "sequence"))
    s.head(s.add("RotaryEmbedding", s.attended(x), "position_ids", cos, sin, domain=MICROSOFT))
    return s.graph()


@pytest.mark.parametrize(("fused", "op"), [(True, "GroupQueryAttention"), (False, "RotaryEmbedding")])
def test_two_tables_in_one_are_refused_where_the_graph_does_not_say_which_holds(fused: bool, op: str) -> None:
    """Read as one, they would turn position 6 as position 0 without a word."""
    with pytest.raises(UnsupportedModel, match=rf"com.microsoft::{op}\): rotary table 'sin' starts anew at row 6"):
        lower(two_in_one(fused=fused), 1)


def test_the_reference_refuses_two_tables_in_one_too() -> None:
    with pytest.raises(UnsupportedModel, match="starts anew at row 6"):
        oracle.logits(two_in_one(fused=True), [1, 2, 3])


@pytest.mark.parametrize("table", [np.zeros((CONTEXT, 4)), angled(CONTEXT)["sin"]])
def test_one_table_does_not_start_anew(table: NDArray[Any]) -> None:
    """Nor do rows that are all alike, which turn nothing."""
    s = Small(seed=5)
    x = s.embedded()
    cos, sin = s.weight("cos", np.ones((CONTEXT, 4), np.float32)), s.weight("sin", table.astype(np.float32))
    s.head(s.attended(x, more={7: cos, 8: sin}, do_rotary=1))
    assert lower(s.graph(), 1).steps


def test_position_rows_taken_one_by_one_turn_as_rotary_in_sections_does() -> None:
    """As written for TensorRT: a table's rows gathered for each of three rows of positions, and chosen by section."""
    made = []
    for apart in (False, True):
        graph = in_sections(apart=apart)
        bench = Bench(graph, rows=(5,))
        bench.prefill([1, 2, 3, 4, 5])
        rows = [bench.prompt_logits(5)]
        for token in (6, 7):
            bench.force(token)
            rows.append(bench.logits())
        made.append(np.stack(rows))
        np.testing.assert_allclose(oracle.logits(graph, [1, 2, 3, 4, 5], [6, 7])[4:], made[-1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(made[0], made[1], rtol=1e-5, atol=1e-5)


def in_sections(*, apart: bool) -> Graph:
    """A decoder that turns by three rows of positions: in one operator, or in many."""
    s = Small(seed=5)
    s.inputs["position_ids"] = Value("position_ids", "int64", (3, "batch", "sequence"))
    x = s.embedded()
    cos, sin = (s.weight(n, t) for n, t in angled(CONTEXT).items())
    y = s.attended(x)
    if apart:
        x1, x2 = halves(s, y)
        c, n = (chosen(s, table) for table in (cos, sin))
        first = s.add("Sub", s.add("Mul", x1, c), s.add("Mul", x2, n))
        second = s.add("Add", s.add("Mul", x1, n), s.add("Mul", x2, c))
        y = s.add("Reshape", s.add("Concat", first, second, axis=-1), s.constant([0, 0, HEADS * HEAD_SIZE]))
    else:
        sections: dict[str, Any] = {"num_heads": HEADS, "mrope_section": [2, 1, 1]}
        y = s.add("MRotaryEmbedding", y, "position_ids", cos, sin, domain=MICROSOFT, **sections)
    s.head(y)
    return s.graph()


def halves(s: Small, y: str) -> tuple[str, str]:
    """First and second half of each head, [batch, tokens, heads, size / 2]."""
    heads = s.add("Reshape", y, s.constant([0, 0, HEADS, HEAD_SIZE]))
    x1, x2 = (s.add("Gather", heads, s.constant(list(range(n, n + 4))), axis=-1) for n in (0, 4))
    return x1, x2


def chosen(s: Small, table: str) -> str:
    """Rows of a table by position, its columns by section: [batch, tokens, 1, size / 2]."""
    rows = [s.add("Gather", table, s.add("Gather", "position_ids", s.constant(n), axis=0)) for n in range(3)]
    picked = rows[0]
    for n in (1, 2):
        mask = s.constant([False, n == 1, n == 2, False], np.bool_)
        picked = s.add("Where", mask, rows[n], picked)
    return s.add("Unsqueeze", picked, s.constant([2]))
