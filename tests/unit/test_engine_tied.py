"""A table that is embedding and head at once: one initialiser, one key, no copy, however the head reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.bind import lower
from engine.duplicates import duplicates
from engine.errors import UnsupportedModel
from engine.graph import Graph
from engine.survey import Setting, survey
from tests.unit.engine_plain import compute, stored
from tests.unit.engine_rig import Bench
from tests.unit.engine_small import VOCABULARY, Small

PROMPT = [3, 5, 8, 11]
HALVES = {"float16": 10, "bfloat16": 16}


def turned(s: Small, x: str, table: str) -> str:
    return s.add("MatMul", x, s.add("Transpose", table, perm=[1, 0]), outputs=("logits",))


def turned_by_default(s: Small, x: str, table: str) -> str:
    return s.add("MatMul", x, s.add("Transpose", table), outputs=("logits",))


def renamed(s: Small, x: str, table: str) -> str:
    there = s.add("Identity", s.add("Transpose", s.add("Identity", table), perm=[1, 0]))
    return s.add("MatMul", x, there, outputs=("logits",))


def widened_then_turned(s: Small, x: str, table: str) -> str:
    return turned(s, x, s.add("Cast", table, to=1))


def turned_then_widened(s: Small, x: str, table: str) -> str:
    wide = s.add("Cast", s.add("Transpose", table, perm=[1, 0]), to=1)
    return s.add("MatMul", x, wide, outputs=("logits",))


def turned_back(s: Small, x: str, table: str) -> str:
    back = s.add("Transpose", s.add("Transpose", table, perm=[1, 0]), perm=[1, 0])
    return gemm(s, x, back)


def gemm(s: Small, x: str, table: str, turn: int = 1) -> str:
    rows = s.add("Reshape", x, s.constant([-1, s.hidden]))
    made = s.add("Gemm", rows, table, transB=turn)
    return s.add("Unsqueeze", made, s.constant([0]), outputs=("logits",))


def gemm_of_turned(s: Small, x: str, table: str) -> str:
    return gemm(s, x, s.add("Transpose", table, perm=[1, 0]), turn=0)


def reshaped(s: Small, x: str, table: str) -> str:
    same = s.add("Reshape", table, s.constant([VOCABULARY, -1]))
    return turned(s, x, same)


HEADS: list[Callable[[Small, str, str], str]] = [
    turned, turned_by_default, renamed, widened_then_turned, turned_then_widened, turned_back, gemm, gemm_of_turned,
    reshaped,
]  # fmt: skip


def decoder(head: Callable[[Small, str, str], str] | None, dtype: str) -> Graph:
    """Tied by `head`; by None with a head of its own, of the same numbers."""
    s = Small(seed=3)
    table = s.weight("table", s.random.normal(size=(VOCABULARY, s.hidden)), dtype)
    x = s.attended(s.add("Gather", table, "input_ids"))
    if head is not None:
        head(s, x, table)
        return s.graph()
    values = s.weights["table"].array().astype(np.float32)
    s.weight("head", np.ascontiguousarray(values.T))
    s.add("MatMul", x, "head", outputs=("logits",))
    return s.graph()


def logits(graph: Graph) -> tuple[Bench, NDArray[np.float32]]:
    """Of a prompt and three tokens, the last one replayed."""
    b = Bench(graph, rows=(1, len(PROMPT)), positions=16)
    b.prefill(PROMPT)
    made = [b.prompt_logits(len(PROMPT))]
    for token in (1, 9, 4):
        b.force(token)
        made.append(b.logits())
    return b, np.stack(made)


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("head", HEADS)
def test_field_53_a_tied_table_is_counted_once_and_never_copied(
    head: Callable[[Small, str, str], str], dtype: str
) -> None:
    graph = decoder(head, dtype)
    b, made = logits(graph)
    _, expected = logits(decoder(None, dtype))
    np.testing.assert_allclose(made, expected, rtol=2e-6, atol=2e-6)
    plan = b.plan
    assert {k.name for k in plan.keys} == {"qkv.0", "table"}
    assert all(k.weight is graph.weights[k.name] for k in plan.keys)  # the mapping's own bytes
    assert [w.name for w in plan.hosts] == ["table"]
    assert plan.weight_bytes == sum(w.nbytes for w in graph.weights.values())
    assert b.tally.read()["loaded_bytes"] == plan.weight_bytes
    assert [s.keys for s in plan.steps].count((b.key("table"),)) == 1


def test_who_cannot_read_it_as_it_lies_gets_a_copy_and_products_still_do_not() -> None:
    s = Small(seed=3)
    table = s.drawn("table", VOCABULARY, s.hidden)
    x = s.attended(s.add("Gather", table, "input_ids"))
    other = s.add("Transpose", table, perm=[1, 0])
    s.add("Add", s.add("MatMul", x, other), s.add("ReduceMax", other, s.constant([0])), outputs=("logits",))
    b, made = logits(s.graph())
    assert {k.name for k in b.plan.keys if k.weight is s.weights.get(k.name)} == {"qkv.0", "table"}
    plain = decoder(None, "float32")
    _, expected = logits(plain)
    np.testing.assert_allclose(made, expected + plain.weights["head"].array().max(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_either_side_of_a_gemm_may_lie_the_other_way(sides: str) -> None:
    random = np.random.default_rng(0)
    a, b = random.normal(size=(3, 4)).astype(np.float32), random.normal(size=(4, 5)).astype(np.float32)
    x = a.T if sides != "right" else a
    w = stored("w", b.T if sides != "left" else b)
    turn_a, turn_b = int(sides != "right"), int(sides != "left")
    inputs, weights = {"x": np.ascontiguousarray(x)}, {"w": w}
    (made,) = compute(
        "Gemm", inputs, wiring=("x", "w"), weights=weights, domain="", transA=turn_a, transB=turn_b, alpha=0.5
    )
    np.testing.assert_allclose(made, 0.5 * a @ b, rtol=1e-5, atol=1e-6)


def test_a_transposed_table_that_does_not_fit_is_refused() -> None:
    s = Small(seed=3)
    x = s.attended(s.embedded())
    s.add("MatMul", x, s.add("Transpose", s.drawn("w", 12, 17), perm=[1, 0]), outputs=("logits",))
    with pytest.raises(UnsupportedModel, match=r"does not fit input"):
        Bench(s.graph())


def twice(dtype: str, how: str) -> Graph:
    """The table, and a head of the same numbers under a name of its own: as it lies, or transposed."""
    s = Small(seed=3)
    table = s.weight("table", s.random.normal(size=(VOCABULARY, s.hidden)), dtype)
    x = s.attended(s.add("Gather", table, "input_ids"))
    values = s.weights["table"].array()
    if how == "as it lies":
        s.weight("copy", values, dtype)
        turned(s, x, "copy")
    else:
        values = np.ascontiguousarray(values.T)
        values[0, 0] += how == "one number off"
        s.weight("copy", values, dtype)
        s.add("MatMul", x, "copy", outputs=("logits",))
    return s.graph()


@pytest.mark.parametrize("dtype", ["float32", *HALVES])
@pytest.mark.parametrize("how", ["as it lies", "transposed"])
def test_field_53_a_table_that_was_written_twice_is_counted_twice_and_named(how: str, dtype: str) -> None:
    graph = twice(dtype, how)
    plan = lower(graph, 1)
    assert plan.weight_bytes == sum(w.nbytes for n, w in graph.weights.items() if n != "table")
    document = survey(plan, Setting())
    copy = {"key": "copy", "table": "table", "nbytes": graph.weights["copy"].nbytes}
    assert document["keys"]["duplicates"] == [copy]


def test_field_53_what_only_resembles_the_table_is_no_copy_of_it() -> None:
    assert duplicates(lower(twice("float32", "one number off"), 1)) == ()
    tied = decoder(turned, "float32")
    assert duplicates(lower(tied, 1)) == (), "one initialiser is one"
    graph = twice("float32", "transposed")
    for name in ("table", "copy"):  # as in a folder whose weights are still to be made
        shape = graph.weights[name].shape
        graph = replace(graph, weights={**graph.weights, name: stored(name, np.zeros(shape, np.float32))})
    assert duplicates(lower(graph, 1)) == ()
