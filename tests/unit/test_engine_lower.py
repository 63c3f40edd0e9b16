"""Nodes that are not served, or say what does not hold together: refused by name at load, all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import oracle
from engine.bind import lower
from engine.errors import UnsupportedModel
from engine.graph import Value
from engine.lower import _place
from engine.onnx_load import load
from engine.plan import Access, Operand, Ref, Step
from tests.unit.engine_rig import (
    TINY_PROMPT,
    Bench,
    build_tiny,
    edited,
    initializer,
    node,
    reconfigured,
    run,
    set_attribute,
)
from tests.unit.engine_small import Small

GQA = "layers.0/attn/GroupQueryAttention"
GATE = "layers.0/mlp/gate_proj/MatMul_Q4"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model; tests copy it before they change it."""
    return build_tiny(tmp_path_factory.mktemp("lower"))


def refusal(folder: Path) -> UnsupportedModel:
    """What lowering the folder raises; it must have a remedy and fit a line."""
    with pytest.raises(UnsupportedModel) as caught:
        lower(load(folder), 1)
    assert caught.value.remedy and "\n" not in caught.value.message
    return caught.value


def test_unknown_operators_are_all_named_with_their_nodes(tiny: Path, tmp_path: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        node(model, "layers.0/mlp/act_fn/Sigmoid").op_type = "Unique"
        node(model, "layers.1/mlp/act_fn/Sigmoid").op_type = "NonZero"
        unknown = node(model, "layers.1/mlp/Mul")
        unknown.domain, unknown.name = "org.example", ""
        model.opset_import.append(onnx.helper.make_opsetid("org.example", 1))

    error = refusal(edited(tiny, tmp_path / "m", edit))
    assert [r.rsplit(": ", 1)[1] for r in error.reasons] == ["operator is not served"] * 3
    for part in ("/model/layers.0/mlp/act_fn/Sigmoid (ai.onnx::Unique)", "ai.onnx::NonZero", "org.example::Mul"):
        assert any(part in reason for reason in error.reasons)
        assert part in error.message


def test_an_operator_of_another_domain_is_another_operator(tiny: Path, tmp_path: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        node(model, GATE).domain = ""
        node(model, "layers.0/mlp/act_fn/Sigmoid").domain = "ai.onnx"  # the long spelling of the default domain

    error = refusal(edited(tiny, tmp_path / "m", edit))
    assert len(error.reasons) == 1 and "ai.onnx::MatMulNBits" in error.message


def test_one_refused_node_is_one_reason_and_two_are_two(tiny: Path, tmp_path: Path) -> None:
    """Consumers of what a refused node would have made do not complain as well."""

    def edit(model: onnx.ModelProto) -> None:
        set_attribute(node(model, "layers.0" + GQA[8:]), "smooth_softmax", 1)
        set_attribute(node(model, "layers.1" + GQA[8:]), "softcap", "much")

    error = refusal(edited(tiny, tmp_path / "m", edit))
    assert len(error.reasons) == 1, "the second stands behind the first"
    assert "smooth_softmax = 1" in error.message


@pytest.mark.parametrize(
    ("where", "name", "value", "says"),
    [
        (GQA, "causal", 0, "causal = 0"),
        (GQA, "smooth_softmax", 1, "smooth_softmax = 1"),
        (GQA, "qk_output", 1, "qk_output = 1"),
        (GQA, "kv_cache_bit_width", 8, "kv_cache_bit_width = 8"),
        (GQA, "k_quant_type", "PER_TENSOR", "k_quant_type = PER_TENSOR"),
        (GQA, "v_quant_type", "PER_CHANNEL", "v_quant_type = PER_CHANNEL"),
        (GQA, "sliding_window_cache", 1, "sliding_window_cache = 1 without a window"),
        (GQA, "num_heads", None, "num_heads is None"),
        (GQA, "num_heads", 0, "num_heads is 0"),
        (GQA, "num_heads", 5, "does not fit 5 heads"),
        (GQA, "kv_num_heads", 0, "kv_num_heads is 0"),
        (GQA, "kv_num_heads", 4, "4 kv heads"),
        (GQA, "scale", "x", "scale is 'x'"),
        (GATE, "K", None, "K is None"),
        (GATE, "K", 64, "K = 64"),
        (GATE, "K", -128, "K is -128"),
        (GATE, "N", 0, "N is 0"),
        (GATE, "N", 255, "codes"),
        (GATE, "bits", 2, "2 bits"),
        (GATE, "bits", 8, "codes"),
        (GATE, "block_size", 8, "block size 8"),
        (GATE, "block_size", 48, "block size 48"),
        (GATE, "block_size", 0, "block size 0"),
        (GATE, "block_size", 64, "scales"),
        (GATE, "block_size", None, "block_size is None"),
        (GATE, "weight_prepacked", 1, "prepacked"),
        ("layers.0/input_layernorm/LayerNorm", "axis", 0, "axis 0"),
        ("layers.0/input_layernorm/LayerNorm", "epsilon", "tiny", "epsilon is 'tiny'"),
        ("Sub/Cast", "to", None, "to is None"),
        ("Sub/Cast", "to", 9, "cast to type 9"),
        ("Sub/Cast", "to", 14, "cast to type 14"),
        ("embed_tokens/Gather", "axis", 1, "rows of a table"),
        ("ReduceSum", "keepdims", 1, None),
    ],
)
def test_attributes(tiny: Path, tmp_path: Path, where: str, name: str, value: Any, says: str | None) -> None:
    folder = edited(tiny, tmp_path / "m", lambda m: set_attribute(node(m, where), name, value))
    if says is None:
        lower(load(folder), 1)
        return
    error = refusal(folder)
    assert says in error.message
    assert where.rsplit("/", 1)[-1] in error.message, "the node is named"


def wire(where: str, index: int, name: str) -> Callable[[onnx.ModelProto], None]:
    """An edit that connects input `index` of a node to `name`, absent inputs between being empty names."""

    def edit(model: onnx.ModelProto) -> None:
        inputs = node(model, where).input
        inputs.extend([""] * (index + 1 - len(inputs)))
        inputs[index] = name

    return edit


@pytest.mark.parametrize(
    ("where", "index", "name", "says"),
    [
        (GQA, 0, "input_ids", "not an activation"),
        (GQA, 1, "/model/layers.0/attn/qkv_proj/MatMul/output_0", "does not fit"),
        (GQA, 3, "past_key_values.1.key", "one layer's cached"),
        (GQA, 3, "past_key_values.0.value", "one layer's cached"),
        (GQA, 5, "attention_mask", "sequence lengths"),
        (GQA, 9, "input_ids", "position ids"),
        (GQA, 12, "model.layers.0.input_layernorm.weight", "scales beside a cache of float32"),
        (GQA, 14, "model.layers.0.input_layernorm.weight", "q_norm float32[128] is not [32]"),
        (GQA, 8, "model.embed_tokens.weight", "rotary tables"),
        (GATE, 1, "lm_head.MatMul.weight_Q4", "codes"),
        (GATE, 2, "cos_cache", "scales"),
        (GATE, 3, "model.layers.0.input_layernorm.weight", "zero points"),
        (GATE, 4, "model.layers.0.input_layernorm.weight", "g_idx"),
        (GATE, 5, "model.layers.0.input_layernorm.weight", "bias"),
        (GATE, 0, "nowhere", "'nowhere' is produced by nothing"),
        (GATE, 0, "", "an input that it needs is not given"),
        ("embed_tokens/Gather", 0, "cos_cache", "256 rows for a vocabulary of 512"),
        ("embed_tokens/Gather", 1, "attention_mask", "('attention_mask') is Mask, not a tensor"),
        ("layers.0/post_attention_layernorm/SkipLayerNorm", 3, "cos_cache", "bias"),
        ("layers.0/post_attention_layernorm/SkipLayerNorm", 2, "cos_cache", "gamma"),
    ],
)
def test_wiring(tiny: Path, tmp_path: Path, where: str, index: int, name: str, says: str) -> None:
    folder = edited(tiny, tmp_path / "m", wire(where, index, name))
    error = refusal(folder)
    assert says in error.message
    assert len(error.reasons) == 1


@pytest.mark.parametrize("position", [1, 5])
def test_field_50_empty_names_in_the_middle_and_at_the_end_are_absent(
    tiny: Path, tmp_path: Path, position: int
) -> None:
    def edit(model: onnx.ModelProto) -> None:
        for n in model.graph.node:
            if n.op_type == "MatMulNBits":
                n.input.extend([""] * position)
            if n.op_type == "SkipSimplifiedLayerNormalization":
                n.input.append("")

    assert run(edited(tiny, tmp_path / "m", edit)).streams == run(tiny).streams


def test_a_cache_that_two_nodes_would_advance_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Layer 1 reads layer 0's cache and gives none on: the second would overwrite what the first one keeps."""

    def edit(model: onnx.ModelProto) -> None:
        first, second = (node(model, f"layers.{i}" + GQA[8:]) for i in (0, 1))
        twin = onnx.NodeProto()
        twin.CopyFrom(second)
        twin.name = "twin"
        twin.input[3], twin.input[4] = first.input[3], first.input[4]
        twin.output[0], twin.output[1], twin.output[2] = "spare", "", ""
        model.graph.node.insert(list(model.graph.node).index(second), twin)

    error = refusal(edited(tiny, tmp_path / "m", edit))
    assert error.reasons == ("twin (com.microsoft::GroupQueryAttention): its cache or state is another node's already",)


def test_rotary_tables_shorter_than_the_context_are_refused(tiny: Path, tmp_path: Path) -> None:
    error = refusal(reconfigured(tiny, tmp_path / "m", lambda c: c["model"].update(context_length=257)))
    assert "256 rows" in error.message and "257 positions" in error.message


@pytest.mark.parametrize("row_bytes", [0, 1, 2])
def test_field_47_packed_zero_points_of_one_block_take_a_byte_a_row(tiny: Path, tmp_path: Path, row_bytes: int) -> None:
    """Blocks of 128 over K = 128: one half byte a row, padded to a whole one; fewer or more bytes are refused."""

    def edit(model: onnx.ModelProto) -> None:
        gate = node(model, GATE)
        set_attribute(gate, "block_size", 128)
        scales = np.full((256, 1), 0.01, np.float32)
        points = np.full((256, row_bytes), 0xF7, np.uint8)  # garbage in the upper half
        model.graph.initializer.append(onnx.numpy_helper.from_array(scales, "wide_scales"))
        model.graph.initializer.append(onnx.numpy_helper.from_array(points, "points"))
        gate.input[2:] = ["wide_scales", "points"]

    folder = edited(tiny, tmp_path / "m", edit)
    if row_bytes == 1:
        assert run(folder).code == 0
    else:
        assert "zero points" in refusal(folder).message


def test_more_logits_than_the_vocabulary_has_are_refused(tiny: Path, tmp_path: Path) -> None:
    """An id beyond the table could be chosen and then not be read."""
    error = refusal(reconfigured(tiny, tmp_path / "m", lambda c: c["model"].update(vocab_size=511)))
    assert "512 logits for a vocabulary of 511" in error.message


def test_hidden_states_of_an_export_without_its_head_are_not_taken_for_logits() -> None:
    """As exclude_lm_head=true writes them: then the only float output beside the caches is a state's."""
    s = Small(hidden=8)
    x = s.embedded()
    s.attended(x)
    graph = s.graph()
    outputs = {**graph.outputs, x: Value(x, "float32", ())}
    hidden = replace(graph, info=replace(graph.info, logits=x), outputs=outputs)
    for use in (lambda: lower(hidden, 1), lambda: oracle.logits(hidden, [1, 2])):
        with pytest.raises(UnsupportedModel) as caught:
            use()
        assert "has 8 logits for a vocabulary of 12" in caught.value.message
        assert "export the model with its head" in caught.value.remedy


def retyped(*kinds: int) -> Callable[[onnx.ModelProto], None]:
    """An edit that gives the caches these element types, turn by turn."""

    def edit(model: onnx.ModelProto) -> None:
        past = [value for value in model.graph.input if value.name.startswith("past")]
        for i, value in enumerate(past):
            value.type.tensor_type.elem_type = kinds[i % len(kinds)]

    return edit


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        ((onnx.TensorProto.DOUBLE,), "KV cache of type float64"),
        ((onnx.TensorProto.UINT8,), "KV cache of type uint8"),
        ((onnx.TensorProto.FLOAT8E4M3FN,), "KV cache of type FLOAT8E4M3FN"),
        ((onnx.TensorProto.FLOAT, onnx.TensorProto.INT8), "KV cache of type float32, int8"),
    ],
)
def test_field_54_a_cache_of_another_type_is_refused(
    tiny: Path, tmp_path: Path, kinds: tuple[int, ...], says: str
) -> None:
    error = refusal(edited(tiny, tmp_path / "m", retyped(*kinds)))
    assert error.reasons == (f"{says} is not served: export with a float or int8 KV cache",)


def test_field_54_an_int8_cache_without_scales_is_refused(tiny: Path, tmp_path: Path) -> None:
    error = refusal(edited(tiny, tmp_path / "m", retyped(onnx.TensorProto.INT8)))
    assert "GroupQueryAttention" in error.message and "quantised as ['NONE', 'NONE']" in error.message


def test_a_cache_of_the_window_alone_is_served_by_one_that_grows(tiny: Path, tmp_path: Path) -> None:
    def windowed(cache: int | None) -> Callable[[onnx.ModelProto], None]:
        def edit(model: onnx.ModelProto) -> None:
            for n in model.graph.node:
                if n.op_type == "GroupQueryAttention":
                    set_attribute(n, "local_window_size", 3)
                    set_attribute(n, "sliding_window_cache", cache)

        return edit

    kept, grown = (run(edited(tiny, tmp_path / f"m{c}", windowed(c))).streams for c in (1, None))
    assert kept == grown != run(tiny).streams


def test_field_52_layers_with_a_gap_are_refused(tiny: Path, tmp_path: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        for value in (*model.graph.input, *model.graph.output):
            value.name = value.name.replace(".1.", ".2.")
        for n in model.graph.node:
            for names in (n.input, n.output):
                for i, name in enumerate(names):
                    if name.startswith(("past", "present")):
                        names[i] = name.replace(".1.", ".2.")

    assert "layers [0, 2]" in refusal(edited(tiny, tmp_path / "m", edit)).message


def test_a_weight_used_twice_is_one_key_and_two_touches(tiny: Path, tmp_path: Path) -> None:
    """Layer 1 reads layer 0's gate: bytes count once in W, once per step in what is asked for."""

    def edit(model: onnx.ModelProto) -> None:
        second = node(model, "layers.1/mlp/gate_proj/MatMul_Q4")
        second.input[1] = second.input[1].replace("layers.1", "layers.0")
        second.input[2] = second.input[2].replace("layers.1", "layers.0")

    plan, whole = lower(load(edited(tiny, tmp_path / "m", edit)), 1), lower(load(tiny), 1)
    assert len(plan.keys) == len(whole.keys) - 2
    assert plan.touches == whole.touches
    assert plan.weight_bytes == whole.weight_bytes - 16384 - 4096
    assert plan.touched_bytes == whole.touched_bytes == whole.weight_bytes


def test_an_embedding_is_no_key_and_its_rows_are_gathered(tiny: Path) -> None:
    plan = lower(load(tiny), 3)
    assert "model.embed_tokens.weight" not in {k.name for k in plan.keys}
    assert plan.gather_bytes == 3 * 128 * 4
    assert {w.name for w in plan.constants} == {"cos_cache", "sin_cache"}


def test_keys_are_the_same_whatever_the_rows(tiny: Path) -> None:
    graph = load(tiny)
    one, many = lower(graph, 1), lower(graph, 7)
    assert [k.name for k in one.keys] == [k.name for k in many.keys]
    assert [s.keys for s in one.steps] == [s.keys for s in many.steps]


def test_only_the_last_row_goes_through_the_head(tiny: Path) -> None:
    plan = lower(load(tiny), 9)
    assert plan.logits.shape == (1, 1, 512)
    head = next(s for s in plan.steps if s.node == "/lm_head/MatMul_Q4")
    x = next(o.ref for o in head.operands if o.name == "x")
    assert x.shape == (1, 1, 128) and x.offset_bytes == 8 * 128 * 4


SIZES = st.lists(st.integers(1, 3000), min_size=1, max_size=12)


@settings(max_examples=150, deadline=None)
@given(sizes=SIZES, data=st.data())
def test_buffers_that_live_at_once_never_share_bytes(sizes: list[int], data: st.DataObject) -> None:
    """Against the plain rule: two buffers whose lives overlap lie apart, and inside the workspace."""
    steps = []
    lives: dict[int, tuple[int, int]] = {}
    for index in range(data.draw(st.integers(1, 15))):
        used = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=4))
        how: dict[int, Access] = {b: data.draw(st.sampled_from(["r", "w", "rw"])) for b in used}
        operands = tuple(Operand(str(b), Ref("buffer", b, "uint8", (sizes[b],)), how[b]) for b in used)
        steps.append(Step(index, f"n{index}", "op", "k", operands, {}))
        for b in used:  # what is read before a step wrote it is an input, there from the start
            lives[b] = (lives[b][0] if b in lives else index if how[b] == "w" else 0, index)
    kept = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=2))
    for b in kept:
        lives[b] = (lives[b][0] if b in lives else 0, len(steps))
    buffers, total = _place([(str(i), n) for i, n in enumerate(sizes)], steps, kept)
    for buffer in buffers:
        assert buffer.offset_bytes % 256 == 0 and buffer.offset_bytes + buffer.nbytes <= total
    for one in lives:
        for other in lives:
            if one < other and lives[one][0] <= lives[other][1] and lives[other][0] <= lives[one][1]:
                low, high = sorted((buffers[one], buffers[other]), key=lambda x: x.offset_bytes)
                assert low.offset_bytes + low.nbytes <= high.offset_bytes


@pytest.mark.parametrize("target", [[0, 0, -1], [1, -1, 128], [-1]])
def test_reshapes_of_an_activation_move_nothing(tiny: Path, tmp_path: Path, target: list[int]) -> None:
    """A Reshape to the same layout and back is no step, and the tokens stay."""

    def edit(model: onnx.ModelProto) -> None:
        names = [n.name for n in model.graph.node]
        at = names.index("/model/layers.0/attn/qkv_proj/MatMul_Q4")
        source = model.graph.node[at].input[0]
        for name, shape in (("there", target), ("back", [1, -1, 128])):
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape, np.int64), name))
        there = onnx.helper.make_node("Reshape", [source, "there"], ["t"], name="there")
        back = onnx.helper.make_node("Reshape", ["t", "back"], ["u"], name="back")
        model.graph.node[at].input[0] = "u"
        kept = list(model.graph.node)
        del model.graph.node[:]
        model.graph.node.extend([*kept[:at], there, back, *kept[at:]])

    folder = edited(tiny, tmp_path / "m", edit)
    assert len(lower(load(folder), 1).steps) == len(lower(load(tiny), 1).steps)
    assert run(folder).streams == run(tiny).streams


@pytest.mark.parametrize("target", [[1, 1, 127], [-1, -1, 128], [-2, -64], [0, 0, 0, 128], [3, -1, 7]])
def test_reshapes_to_what_does_not_fit_are_refused(tiny: Path, tmp_path: Path, target: list[int]) -> None:
    def edit(model: onnx.ModelProto) -> None:
        at = node(model, "layers.0/attn/qkv_proj/MatMul_Q4")
        index = [n.name for n in model.graph.node].index(at.name)
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(target, np.int64), "to"))
        made = onnx.helper.make_node("Reshape", [at.input[0], "to"], ["t"], name="reshaped")
        at.input[0] = "t"
        model.graph.node.insert(index, made)

    assert "reshaped" in refusal(edited(tiny, tmp_path / "m", edit)).message


def test_a_head_that_is_cast_still_costs_one_row(tiny: Path, tmp_path: Path) -> None:
    """A Cast between the head and the logits does not hide that only the last row is asked for."""

    def edit(model: onnx.ModelProto) -> None:
        head = node(model, "lm_head/MatMul_Q4")
        head.output[0] = "narrow"
        for name, source, to, made in (("a", "narrow", 10, "half"), ("b", "half", 1, "logits")):
            model.graph.node.append(onnx.helper.make_node("Cast", [source], [made], name=name, to=to))

    folder = edited(tiny, tmp_path / "m", edit)
    plan = lower(load(folder), 5)
    assert plan.logits.shape == (1, 1, 512)
    assert next(s for s in plan.steps if s.node == "/lm_head/MatMul_Q4").operands[0].ref.shape == (1, 1, 128)
    assert [ids for ids, _ in run(folder).streams] == [ids for ids, _ in run(tiny).streams]


def test_a_head_with_a_bias_costs_one_row_and_a_bias_a_row_is_added_to_its_own(tiny: Path, tmp_path: Path) -> None:
    """What is added may be one for all rows, or an activation of all rows: the last row stays what it is."""
    bias = np.linspace(-2, 2, 512, dtype=np.float32)

    def edit(model: onnx.ModelProto) -> None:
        node(model, "lm_head/MatMul_Q4").output[0] = "plain"
        model.graph.initializer.append(onnx.numpy_helper.from_array(bias, "bias"))
        model.graph.node.append(onnx.helper.make_node("Add", ["plain", "bias"], ["logits"], name="biased"))

    def by_row(model: onnx.ModelProto) -> None:
        edit(model)
        head = node(model, "lm_head/MatMul_Q4")
        again = onnx.NodeProto()
        again.CopyFrom(head)
        again.name, again.output[0] = "twin", "other"
        model.graph.node.insert(len(model.graph.node) - 1, again)
        model.graph.node[-1].input[1] = "other"

    folder = edited(tiny, tmp_path / "m", edit)
    plan = lower(load(folder), 5)
    assert plan.logits.shape == (1, 1, 512)
    assert next(s for s in plan.steps if s.node == "/lm_head/MatMul_Q4").operands[0].ref.shape == (1, 1, 128)
    benches = [Bench(m, rows=(4,)) for m in (tiny, folder, edited(tiny, tmp_path / "n", by_row))]
    for bench in benches:
        bench.prefill(TINY_PROMPT)
    plain, biased, twice = (bench.prompt_logits(4) for bench in benches)
    np.testing.assert_array_equal(biased, plain + bias)
    np.testing.assert_array_equal(twice, plain + plain)


def test_logits_that_another_node_reads_keep_all_rows(tiny: Path, tmp_path: Path) -> None:
    """A second consumer of the head's rows must see all of them; the choice still goes by the last."""

    def edit(model: onnx.ModelProto) -> None:
        head = node(model, "lm_head/MatMul_Q4")
        head.output[0] = "wide"
        model.graph.node.append(onnx.helper.make_node("Sigmoid", ["wide"], ["unused"], name="peek"))
        model.graph.node.append(onnx.helper.make_node("Cast", ["wide"], ["logits"], name="same", to=1))

    folder = edited(tiny, tmp_path / "m", edit)
    assert lower(load(folder), 5).logits.shape == (1, 5, 512)
    assert run(folder).streams == run(tiny).streams
    assert initializer(onnx.load(str(folder / "model.onnx"), load_external_data=False), "cos_cache").dims == [256, 16]
