"""onnxruntime's operators: nothing that one of them is given is passed over in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime.capi.onnxruntime_pybind11_state as onnxruntime_state
import pytest

from engine import contrib, oracle
from engine.bind import lower
from engine.errors import UnsupportedModel
from engine.graph import Node
from engine.ops import served
from engine.opsets import check
from engine.values import Refusal
from tests.unit.engine_small import HEADS, HIDDEN, MICROSOFT, Small

SIMPLIFIED = ("", "SimplifiedLayerNormalization")
Schemas = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def schemas() -> Schemas:
    """What the installed onnxruntime says of its operators."""
    found = {}
    for schema in onnxruntime_state.get_all_operator_schema():
        domain = "" if schema.name == SIMPLIFIED[1] else schema.domain
        if schema.domain == MICROSOFT or (domain, schema.name) == SIMPLIFIED:
            found[domain, schema.name] = schema
    return found


def test_every_operator_of_onnxruntime_that_is_served_is_listed() -> None:
    assert {key for key in served() if key[0] == MICROSOFT} | {SIMPLIFIED} == contrib.SIGNATURES.keys()


def test_nothing_is_listed_that_onnxruntime_does_not_have(schemas: Schemas) -> None:
    for key, taken in contrib.SIGNATURES.items():
        schema = schemas[key]
        assert taken.free | taken.only.keys() <= set(schema.attributes), key
        assert not taken.free & taken.only.keys(), key
        assert taken.inputs <= schema.max_input and taken.outputs <= schema.max_output, key


def test_what_onnxruntime_has_and_is_not_listed_is_refused_by_name(schemas: Schemas) -> None:
    """Its own list, so that what a later version adds is refused and not passed over."""
    refused = set()
    for domain, op in contrib.SIGNATURES:
        schema = schemas[domain, op]
        for name in set(schema.attributes) - contrib.SIGNATURES[domain, op].free:
            with pytest.raises(Refusal, match=f"^{name} = 7 is not served$"):
                check(Node("n", op, domain, (), (), {name: 7}))
            refused.add(f"{op}.{name}")
        for index, entry in enumerate(schema.inputs[contrib.SIGNATURES[domain, op].inputs :]):
            at = contrib.SIGNATURES[domain, op].inputs + index
            with pytest.raises(Refusal, match=f"^input {at} \\('{entry.name}'\\) is not served$"):
                check(Node("n", op, domain, ("",) * at + (entry.name,), (), {}))
            refused.add(f"{op}.{entry.name}")
    assert {
        "GatedAdd.gate_weight",
        "GatedRMSNorm.activation",
        "GroupQueryAttention.q_norm_epsilon",
        "GroupQueryAttention.k_norm_epsilon",
        "GroupQueryAttention.query_seqlens",
        "MoE.swiglu_limit_after_activation",
        "QMoE.swiglu_limit_after_activation",
        "CausalConvWithState.state_channels_last",
        "GatedDeltaNet.capture_count",
    } <= refused


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("GatedRMSNorm", {"activation": "silu"}),
        ("GroupQueryAttention", {"smooth_softmax": -1, "causal": 1}),
        ("CausalConvWithState", {"state_channels_last": -1}),
        ("QMoE", {"swiglu_limit_after_activation": 0}),
    ],
)
def test_a_default_may_be_written_out(op: str, attributes: dict[str, Any]) -> None:
    check(Node("n", op, MICROSOFT, (), (), attributes))


@pytest.mark.parametrize("value", [True, 0.0, "0", [0], np.zeros(2)], ids=str)
def test_an_attribute_of_another_type_than_the_value_served_is_refused(value: Any) -> None:
    with pytest.raises(Refusal, match="smooth_softmax = "):
        check(Node("n", "GroupQueryAttention", MICROSOFT, (), (), {"smooth_softmax": value}))


@pytest.mark.parametrize("value", [2, -1, 1.0, np.ones(2)], ids=str)
def test_a_switch_that_is_neither_on_nor_off_is_refused_by_engine_and_reference(value: Any) -> None:
    """onnxruntime asks of one whether it is 1: with 2 it rotates nothing, where another runtime would."""
    s = Small()
    s.head(s.attended(s.embedded(), do_rotary=value))
    for use in (lambda: lower(s.graph(), 1), lambda: oracle.logits(s.graph(), [1, 2])):
        with pytest.raises(UnsupportedModel, match=r"do_rotary = .* is neither 0 nor 1"):
            use()


def test_every_switch_of_the_standards_operators_is_known_as_one() -> None:
    """Whole numbers that default to 0 or 1, less those that count or name something."""
    others = {
        "axis",
        "block_size",
        "output_dtype",
        "qk_matmul_output_mode",
        "rotary_embedding_dim",
        "start",
        "stash_type",
    }
    schemas = [onnx.defs.get_schema(op) for domain, op in served() if not domain and onnx.defs.has(op)]
    attributes = [a for schema in schemas for a in schema.attributes.values() if a.default_value.name]
    whole = {a.name for a in attributes if a.type == onnx.defs.OpSchema.AttrType.INT and a.default_value.i in (0, 1)}
    assert {"keepdims", "is_causal"} < whole and whole - others <= contrib.SWITCHES


def gated(**more: Any) -> Small:
    """A decoder with a gated sum behind its embedding; `more` are further inputs of it, or attributes."""
    s = Small()
    x = s.embedded()
    gate = s.add("Sigmoid", s.add("MatMul", x, s.drawn("gate", HIDDEN, 1)))
    inputs = [s.drawn(name, HIDDEN) for name in more.pop("inputs", ())]
    s.head(s.attended(s.add("GatedAdd", x, x, gate, *inputs, domain=MICROSOFT, **more)))
    return s


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"inputs": ["gate_weight"]}, "input 3 ('gate_weight') is not served"),
        ({"limit": 7.0}, "limit = 7.0 is not served"),
    ],
    ids=["input", "attribute"],
)
def test_engine_and_reference_both_refuse_it_by_node(more: dict[str, Any], says: str) -> None:
    graph = gated(**more).graph()
    for use in (lambda: lower(graph, 1), lambda: oracle.logits(graph, [1, 2])):
        with pytest.raises(UnsupportedModel) as caught:
            use()
        assert [r.partition(" ")[2] for r in caught.value.reasons] == [f"(com.microsoft::GatedAdd): {says}"]
    assert lower(gated().graph(), 1).steps and oracle.logits(gated().graph(), [1, 2]).shape == (2, 12)


def test_the_gates_of_a_delta_net_are_not_taken_for_what_they_are_not_said_to_be() -> None:
    """Absent, both are "none": raw gates and beta are used as they come, which is not served."""
    s = Small()
    x = s.embedded()
    heads = s.add("Reshape", x, s.constant([0, 0, HEADS, HIDDEN // HEADS]))
    gates = [s.add("MatMul", x, s.drawn(f"{n} weight", HIDDEN, HEADS)) for n in ("gate", "beta")]
    s.inputs["past.0.recurrent"] = s.inputs["past.0.key"]
    wired = (heads, heads, heads, "", *gates, "past.0.recurrent", s.drawn("a_log", HEADS), s.drawn("dt", HEADS))
    outputs = ("mixed", "present.0.recurrent")
    s.add("GatedDeltaNet", *wired, domain=MICROSOFT, outputs=outputs, gate_activation="qwen")
    with pytest.raises(UnsupportedModel) as caught:
        lower(s.graph(), 1)
    assert any("beta_activation = 'none' is not served: 'sigmoid' is" in r for r in caught.value.reasons)


def test_an_input_that_is_not_given_is_called_so() -> None:
    """As the exporter leaves the tables of a rotary embedding in fp32 for CUDA."""
    s = Small()
    s.head(s.attended(s.add("RotaryEmbedding", s.embedded(), "", "", "", domain=MICROSOFT)))
    with pytest.raises(UnsupportedModel) as caught:
        lower(s.graph(), 1)
    wanted = ["(com.microsoft::RotaryEmbedding): an input that it needs is not given"]
    assert [r.partition(" ")[2] for r in caught.value.reasons] == wanted
