"""What is not served ends a run before it begins: exit code 12, each thing by node and operator, all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.run as engine_run
from engine.__main__ import main as engine_main
from engine.bind import lower
from engine.errors import UnsupportedModel
from engine.graph import Graph, Value
from tests.unit.engine_rig import Bench, run
from tests.unit.engine_small import HEAD_SIZE, HEADS, HIDDEN, MICROSOFT, Small

Part = Callable[[Small, str], str]
"""Puts something between the embedding and the head; takes and gives a name."""


@dataclass(frozen=True)
class Kind:
    """One thing that is not served, and what its reasons say."""

    part: Part
    says: tuple[str, ...]


def unknown(s: Small, x: str) -> str:
    return s.add("Mystery", s.add("NonZero", x), domain="org.example")


def paged(s: Small, x: str) -> str:
    for name in ("block_table", "past_sequence_lengths"):
        s.inputs[name] = Value(name, "int32", ("batch", "blocks"))
    wired = (x, "", "", "past.0.key", "past.0.value", "past_sequence_lengths", "block_table")
    return s.add("PagedAttention", *wired, domain=MICROSOFT, num_heads=HEADS, kv_num_heads=1)


def prepacked_experts(s: Small, x: str) -> str:
    """As the exporter writes them for one kernel: [E, in, out * bits / 8]."""
    return experts(s, x, (2, HIDDEN, 2 * 24 // 2), (2, 24, HIDDEN // 2))


def two_bit_experts(s: Small, x: str) -> str:
    return experts(s, x, (2, 2 * 24, HIDDEN // 4), (2, HIDDEN, 24 // 4), expert_weight_bits=2)


def experts(s: Small, x: str, first: tuple[int, ...], second: tuple[int, ...], **attributes: Any) -> str:
    router = s.add("MatMul", x, s.drawn(f"router {len(s.nodes)}", HIDDEN, 2))
    at = len(s.nodes)
    names = [s.weight(f"{at} w{i}", np.ones(shape, np.uint8)) for i, shape in enumerate((first, second))]
    scales = [s.weight(f"{at} s{i}", np.ones((2, n), np.float32)) for i, n in enumerate((48, HIDDEN))]
    wired = (x, router, names[0], scales[0], "", names[1], scales[1])
    return s.add("QMoE", *wired, domain=MICROSOFT, activation_type="swiglu", swiglu_fusion=1, **attributes)


def product(s: Small, x: str, more: tuple[str, ...] = (), **attributes: Any) -> str:
    at = len(s.nodes)
    codes = s.weight(f"{at} codes", np.ones((HIDDEN, 1, 8), np.uint8))
    scales = s.weight(f"{at} scales", np.ones((HIDDEN, 1), np.float32))
    given = {"K": HIDDEN, "N": HIDDEN, "bits": 4, "block_size": 16, **attributes}
    return s.add("MatMulNBits", x, codes, scales, *more, domain=MICROSOFT, **given)


def grouped(s: Small, x: str) -> str:
    return product(s, x, ("", s.weight(f"{len(s.nodes)} g_idx", np.zeros(HIDDEN, np.int32))))


def two_bits(s: Small, x: str) -> str:
    return product(s, x, bits=2)


def prepacked_weights(s: Small, x: str) -> str:
    return product(s, x, weight_prepacked=1)


def windowed_state(s: Small, x: str) -> str:
    weight = s.weight(f"{len(s.nodes)} taps", np.ones((1, 1, 4), np.float32))
    return s.add("CausalConvWithState", x, weight, domain=MICROSOFT, state_window=4)


KINDS = {
    "unknown operators": Kind(
        unknown, ("(ai.onnx::NonZero): operator is not served", "(org.example::Mystery): operator is not served")
    ),
    "paged attention": Kind(
        paged,
        (
            "(com.microsoft::PagedAttention): operator is not served",
            "graph input 'block_table' is not served",
            "graph input 'past_sequence_lengths' is not served",
        ),
    ),
    "prepacked experts": Kind(
        prepacked_experts, ("(com.microsoft::QMoE): experts [2, 16, 24] and [2, 24, 8] are not",)
    ),
    "experts of two bits": Kind(two_bit_experts, ("(com.microsoft::QMoE): 2 bits are not served",)),
    "g_idx": Kind(grouped, ("(com.microsoft::MatMulNBits): g_idx is not served",)),
    "two bits": Kind(two_bits, ("(com.microsoft::MatMulNBits): 2 bits are not served",)),
    "prepacked weights": Kind(prepacked_weights, ("(com.microsoft::MatMulNBits): prepacked weights are not served",)),
    "windowed state": Kind(windowed_state, ("(com.microsoft::CausalConvWithState): state_window = 4 is not served",)),
}
SMOOTH = "(com.microsoft::GroupQueryAttention): smooth_softmax = 1 is not served"
INT4_CACHE = "KV cache of type uint8 is not served: export with a float or int8 KV cache"


def decoder(*parts: Part, cache: str = "float32", side_by_side: bool = False, **attributes: Any) -> Graph:
    """A decoder with these parts one after another, or each on the embedding itself and read by nothing."""
    s = Small(cache=cache)
    x = s.embedded()
    for part in parts:
        made = part(s, x)
        x = x if side_by_side else made
    s.head(s.attended(x, **attributes))
    return s.graph()


def refusal(graph: Graph) -> UnsupportedModel:
    """What lowering raises, for one row and for many."""
    found = []
    for rows in (1, 3):
        with pytest.raises(UnsupportedModel) as caught:
            lower(graph, rows)
        found.append(caught.value)
    assert found[0].reasons == found[1].reasons
    assert found[0].exit_code == 12 and found[0].remedy and "\n" not in str(found[0])
    return found[0]


def test_without_any_of_them_it_runs() -> None:
    def whole(s: Small, x: str) -> str:
        return product(s, x)

    bench = Bench(decoder(whole), rows=(3,))
    bench.prefill([1, 2, 3])
    assert np.isfinite(bench.prompt_logits(3)).all()


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_by_name(name: str) -> None:
    error = refusal(decoder(KINDS[name].part))
    assert len(error.reasons) == len(KINDS[name].says), error.reasons
    for part, reason in zip(KINDS[name].says, error.reasons, strict=True):
        assert part in reason and part in error.message


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_in_two_layers_is_said_twice(name: str) -> None:
    """The second stands behind the first and is found all the same: it asks for what is not served by itself."""
    says = [s for s in KINDS[name].says if "graph input" not in s]
    error = refusal(decoder(KINDS[name].part, KINDS[name].part))
    for part in says:
        assert sum(part in reason for reason in error.reasons) == 2, error.reasons
    nodes = [reason.split(" (")[0] for reason in error.reasons if "::" in reason]
    assert len(set(nodes)) == len(nodes) == 2 * len(says)


def test_smooth_softmax_and_a_cache_of_half_bytes() -> None:
    assert [r.split(" ", 1)[1] for r in refusal(decoder(smooth_softmax=1)).reasons] == [SMOOTH]
    assert refusal(decoder(cache="uint8")).reasons == (INT4_CACHE,)
    quantised = decoder(cache="uint8", k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL", kv_cache_bit_width=4)
    assert refusal(quantised).reasons == (INT4_CACHE,)


@pytest.mark.parametrize("side_by_side", [True, False])
def test_all_reasons_come_at_once(side_by_side: bool) -> None:
    """Unserved operators, attributes, layouts, inputs, caches and element types in one graph: none hides another."""
    graph = decoder(*(k.part for k in KINDS.values()), cache="uint8", side_by_side=side_by_side, smooth_softmax=1)
    kept = {n: w for n, w in graph.weights.items() if n != "head"}
    graph = replace(graph, weights=kept, unserved={"head": "initialiser head: element type FLOAT8E8M0 is not served"})
    expected = [*(s for k in KINDS.values() for s in k.says), SMOOTH, INT4_CACHE, "initialiser head: element type"]
    reasons = list(refusal(graph).reasons)
    for part in expected:
        [found] = [reason for reason in reasons if part in reason]
        reasons.remove(found)
    assert reasons == [], "and nothing else"


def test_a_run_ends_with_code_12_before_anything_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = decoder(*(k.part for k in KINDS.values()), cache="uint8", smooth_softmax=1)
    monkeypatch.setattr(engine_run, "load", lambda *_, **__: graph)
    outcome = run(tmp_path, prompt_ids=[1, 2], tokens=2)
    assert (outcome.code, outcome.error["code"], outcome.error["kind"]) == (12, 12, "unsupported")
    assert outcome.error["reasons"] == list(refusal(graph).reasons)
    assert "and 9 more" in outcome.error["message"] and outcome.error["remedy"]
    assert outcome.error["ids"] == [] and not any(outcome.error["counters"].values())


def test_a_cache_of_another_shape_than_the_config_says_is_refused() -> None:
    graph = decoder()
    for info in (replace(graph.info, head_size=2 * HEAD_SIZE), replace(graph.info, kv_heads=2)):
        with pytest.raises(UnsupportedModel, match="GroupQueryAttention"):
            lower(replace(graph, info=info), 1)


def test_the_command_says_every_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first ones in the message, the others a line each: a user mends them in one go."""
    graph = decoder(*(k.part for k in KINDS.values()), cache="uint8", smooth_softmax=1)
    monkeypatch.setattr(engine_run, "load", lambda *_, **__: graph)
    assert engine_main(["run", "--model", str(tmp_path), "--prompt-ids", "1,2", "--tokens", "2"]) == 12
    lines = capsys.readouterr().err.splitlines()
    reasons = refusal(graph).reasons
    assert all(reason in lines[0] for reason in reasons[:4])
    assert [line.strip() for line in lines[1:]] == list(reasons[4:])


def test_names_in_a_graph_reach_no_terminal_as_its_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A node may be called anything, also a line that looks like ours, or what sets a window's title."""
    graph = decoder()
    first, *others = graph.nodes
    named = replace(graph, nodes=(replace(first, name="n\x1b]0;title\x07\nerror: ok", op="No\x9bOp"), *others))
    monkeypatch.setattr(engine_run, "load", lambda *_, **__: named)
    assert engine_main(["run", "--model", str(tmp_path), "--prompt-ids", "1,2", "--tokens", "2"]) == 12
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "n\\u001b]0;title\\u0007\\u000aerror: ok" in line and "No\\u009bOp" in line
    assert not any(control in said.out + said.err for control in "\x1b\x07\x9b")
