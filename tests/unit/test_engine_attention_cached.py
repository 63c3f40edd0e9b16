"""The standard's Attention over a decoder's cache: the same numbers as GroupQueryAttention, in either layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import oracle
from engine.bind import lower
from engine.errors import UnsupportedModel
from engine.graph import Graph, Value
from tests.unit.engine_rig import Bench
from tests.unit.engine_small import CONTEXT, HEAD_SIZE, HEADS, MICROSOFT, Small

_OUTPUTS = ("attended", "present.0.key", "present.0.value")
PROMPT, FORCED = [1, 2, 3, 4, 5], [6, 7, 8]


def decoder(form: str, *, cache: str = "float32", more: tuple[str, ...] = (), **attributes: Any) -> Graph:
    """A decoder with queries, keys and values apart; `form`: "ms", "tokens" [1, S, H * D] or "heads" [1, H, S, D]."""
    s = Small(seed=3, cache=cache)
    packed = s.add("MatMul", s.embedded(), s.drawn("qkv.0", s.hidden, (HEADS + 2) * HEAD_SIZE))
    sizes = s.constant([HEADS * HEAD_SIZE, HEAD_SIZE, HEAD_SIZE])
    s.add("Split", packed, sizes, outputs=("q", "k", "v"), axis=-1)
    qkv, past = ("q", "k", "v"), ("past.0.key", "past.0.value")
    if form == "ms":
        given = {"num_heads": HEADS, "kv_num_heads": 1, **attributes}
        y = s.add("GroupQueryAttention", *qkv, *past, *s.lengths(), domain=MICROSOFT, outputs=_OUTPUTS, **given)
    elif form == "tokens":
        counts = {"q_num_heads": HEADS, "kv_num_heads": 1, "is_causal": 1}
        y = s.add("Attention", *qkv, "", *past, *more, outputs=_OUTPUTS, **{**counts, **attributes})
    else:
        apart = []
        for name, heads in (("q", HEADS), ("k", 1), ("v", 1)):
            shape = s.constant([0, 0, heads, HEAD_SIZE])
            apart.append(s.add("Transpose", s.add("Reshape", name, shape), perm=[0, 2, 1, 3]))
        y = s.add("Attention", *apart, "", *past, *more, outputs=_OUTPUTS, **{"is_causal": 1, **attributes})
        y = s.add("Reshape", s.add("Transpose", y, perm=[0, 2, 1, 3]), s.constant([0, 0, HEADS * HEAD_SIZE]))
    s.head(y)
    return s.graph()


def logits(graph: Graph, chunk: int) -> list[bytes]:
    """Of the prompt's last row and of each forced id."""
    bench = Bench(graph, rows=(len(PROMPT), chunk, len(PROMPT) % chunk or chunk))
    bench.prefill(PROMPT, chunk)
    made = [bench.prompt_logits(len(PROMPT) % chunk or min(chunk, len(PROMPT))).tobytes()]
    for token in FORCED:
        bench.force(token)
        made.append(bench.logits().tobytes())
    return made


@pytest.mark.parametrize("chunk", [5, 2, 1])
@pytest.mark.parametrize("cache", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("standard", "microsoft"),
    [
        ({}, {}),
        ({"scale": 0.2, "softcap": 1.5}, {"scale": 0.2, "softcap": 1.5}),
        ({"left_window_size": 2}, {"local_window_size": 3}),
    ],
)
def test_it_is_bit_for_bit_what_group_query_attention_is(
    standard: dict[str, Any], microsoft: dict[str, Any], cache: str, chunk: int
) -> None:
    """A window of the standard leaves the query itself out of its count."""
    expected = logits(decoder("ms", cache=cache, **microsoft), 5)
    for form in ("tokens", "heads"):
        assert logits(decoder(form, cache=cache, **standard), chunk) == expected


@pytest.mark.parametrize("form", ["tokens", "heads"])
def test_the_reference_computes_it(form: str) -> None:
    graph = decoder(form, softcap=2.0)
    told = oracle.logits(graph, PROMPT, FORCED)
    found = [np.frombuffer(row, np.float32) for row in logits(graph, 5)]
    np.testing.assert_allclose(told[len(PROMPT) - 1 :], np.stack(found), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"is_causal": 0}, "is_causal = 0 is not served beside a cache"),
        ({"more": ("lengths",)}, "a mask, key lengths or scores as an output are not served"),
        ({"cache": "int8"}, "do not fit a cache of 1 heads of 8 in int8"),
        ({"q_num_heads": 3}, "3 query and 1 key heads"),
        ({"q_num_heads": 4}, "4 query and 1 key heads"),
    ],
)
def test_what_it_does_not_serve_is_refused_by_node_and_op(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        lower(decoder("tokens", **given), 1)
    [reason] = caught.value.reasons
    assert says in reason and "(ai.onnx::Attention)" in reason


def numbered(ids: str) -> Graph:
    """A decoder whose GroupQueryAttention is given position ids, of the graph's input or one more than that."""
    s = Small(seed=3)
    s.inputs["position_ids"] = Value("position_ids", "int64", ("batch", "sequence"))
    angles = np.arange(CONTEXT)[:, None] * np.array([1.0, 0.1, 0.01, 0.001])
    tables = {
        7: s.weight("cos", np.cos(angles).astype(np.float32)),
        8: s.weight("sin", np.sin(angles).astype(np.float32)),
    }
    if ids == "moved":
        tables[9] = s.add("Add", "position_ids", s.constant(1))
    elif ids == "given":
        tables[9] = s.add("Cast", "position_ids", to=7)
    s.head(s.attended(s.embedded(), more=tables, do_rotary=1))
    return s.graph()


def test_position_ids_that_count_from_the_cached_length_are_what_attention_counts_itself() -> None:
    expected = logits(numbered("none"), 5)
    assert logits(numbered("given"), 2) == expected
    told = oracle.logits(numbered("given"), PROMPT, FORCED)[len(PROMPT) - 1 :]
    np.testing.assert_allclose(told, [np.frombuffer(r, np.float32) for r in expected], rtol=1e-4, atol=1e-5)


def test_other_position_ids_are_refused() -> None:
    graph = numbered("moved")
    with pytest.raises(UnsupportedModel, match=r"GroupQueryAttention\): position ids that do not count"):
        lower(graph, 1)
    with pytest.raises(UnsupportedModel, match=r"GroupQueryAttention\): position ids that do not count"):
        oracle.logits(graph, PROMPT)


@pytest.mark.parametrize(
    ("attributes", "says"),
    [({"softcap": -2.0}, "softcap = -2.0 is below 0"), ({"local_window_size": 0}, "local_window_size = 0")],
)
def test_attributes_that_runtimes_read_in_different_ways_are_refused(attributes: dict[str, Any], says: str) -> None:
    """onnxruntime takes a softcap below 0 for none, and a window of 0 for something else than none."""
    graph = decoder("ms", **attributes)
    with pytest.raises(UnsupportedModel, match=f"GroupQueryAttention.*{says}"):
        lower(graph, 1)
    with pytest.raises(UnsupportedModel, match="softcap below 0 or local_window_size = 0"):
        oracle.logits(graph, PROMPT)


@pytest.mark.parametrize("axis", [1, -2])
def test_the_reference_sees_every_row_of_a_head_that_keeps_the_last_one(axis: int) -> None:
    """Cut by a Slice, as by a Gather: the rows that a decode computes one by one."""
    s = Small(seed=3)
    y = s.attended(s.embedded())
    s.head(s.add("Slice", y, s.constant([-1]), s.constant([2**62]), s.constant([axis])))
    graph = s.graph()
    told = oracle.logits(graph, PROMPT, FORCED)
    found = np.stack([np.frombuffer(row, np.float32) for row in logits(graph, 5)])
    np.testing.assert_allclose(told[len(PROMPT) - 1 :], found, rtol=1e-4, atol=1e-5)
