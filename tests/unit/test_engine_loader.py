"""Model folders that are broken, each in one way: the right class, the thing named, a remedy, nothing outside read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import oracle
from engine.__main__ import main as engine_main
from engine.bind import lower
from engine.errors import EngineError, ModelFilesError, UnsupportedModel
from engine.model_files import LFS_MARK
from engine.onnx_load import load
from tests.unit.engine_rig import build_tiny, edited, initializer, node, reconfigured, run, set_entry

GATE = "model.layers.0.mlp.gate_proj.MatMul.weight_Q4"
HEAD_SCALES = "lm_head.MatMul.weight_scales"
POINTER = LFS_MARK + b"v1\noid sha256:" + b"0" * 64 + b"\nsize 523000\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model; tests copy it before they break it."""
    return build_tiny(tmp_path_factory.mktemp("loader"))


def refusal(folder: Path, kind: type[EngineError] = ModelFilesError) -> EngineError:
    """What loading and lowering the folder raises."""
    with pytest.raises(kind) as caught:
        lower(load(folder), 1)
    assert caught.value.remedy, f"no remedy: {caught.value.message}"
    assert "\n" not in caught.value.message
    return caught.value


def moved(tiny: Path, into: Path, entry: str, value: str | None) -> Path:
    """A copy in which one entry of the gate's external data reads otherwise."""
    return edited(tiny, into, lambda m: set_entry(initializer(m, GATE), entry, value))


def test_a_whole_folder_loads(tiny: Path) -> None:
    graph = load(tiny)
    assert len(graph.info.caches) == 2 and graph.info.vocabulary == 512
    assert graph.weights[GATE].shape == (256, 4, 16)
    assert not graph.weights[GATE].data.flags.owndata, "weights are views of the mapped file"
    assert graph.digest is not None


@pytest.mark.parametrize(
    "location",
    [
        "../model.onnx.data",
        "sub/../../model.onnx.data",
        "./.././model.onnx.data",
        "/etc/hostname",
        "",
        ".",
        "..\\model.onnx.data",
        "C:\\data",
        "model.onnx.data\0",
        "/dev/zero",
    ],
)
def test_field_42_a_location_outside_the_folder_is_refused(tiny: Path, tmp_path: Path, location: str) -> None:
    secret = b"do not read me" * 100
    (tmp_path / "model.onnx.data").write_bytes(secret)
    error = refusal(moved(tiny, tmp_path / "m", "location", location))
    assert GATE in error.message and repr(location) in error.message
    assert "do not read me" not in error.message


def test_field_42_a_missing_location_is_refused(tiny: Path, tmp_path: Path) -> None:
    assert GATE in refusal(moved(tiny, tmp_path / "m", "location", None)).message


def test_field_42_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(tiny: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.data"
    folder = moved(tiny, tmp_path / "m", "location", "linked.data")
    outside.write_bytes((folder / "model.onnx.data").read_bytes())
    (folder / "linked.data").symlink_to(outside)
    assert GATE in refusal(folder).message
    (folder / "linked.data").unlink()
    (folder / "linked.data").symlink_to("model.onnx.data")
    assert load(folder).weights[GATE].nbytes == 16384


def test_field_42_a_linked_parent_folder_out_of_the_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = moved(tiny, tmp_path / "m", "location", "sub/model.onnx.data")
    (folder / "sub").symlink_to(tiny, target_is_directory=True)
    assert GATE in refusal(folder).message


def test_field_42_a_model_folder_that_is_itself_a_link_loads(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tiny, target_is_directory=True)
    assert load(tmp_path / "link").weights[GATE].nbytes == 16384


@pytest.mark.parametrize("make", ["folder", "fifo", "loop", "nothing", "long"])
def test_field_42_what_is_no_file_is_refused(tiny: Path, tmp_path: Path, make: str) -> None:
    name = "x" * 300 if make == "long" else "odd"
    folder = moved(tiny, tmp_path / "m", "location", name)
    odd = folder / "odd"
    if make == "folder":
        odd.mkdir()
    elif make == "fifo":
        os.mkfifo(odd)
    elif make == "loop":
        odd.symlink_to(odd)
    assert "odd" in refusal(folder).message or make == "long"


def test_field_42_a_constant_with_its_value_in_a_file_reads_no_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's tensor may be external too: it is neither looked for in the working folder nor anywhere else."""
    (tmp_path / "stray.data").write_bytes(np.array([1], np.int64).tobytes())
    monkeypatch.chdir(tmp_path)

    def edit(model: onnx.ModelProto) -> None:
        constant = node(model, "INT64/1")
        tensor = constant.attribute[0].t
        tensor.ClearField("raw_data")
        tensor.ClearField("int64_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="stray.data")

    error = refusal(edited(tiny, tmp_path / "m", edit))
    assert "/model/constant_nodes/INT64/1" in error.message


def test_field_44_a_pointer_in_place_of_data_is_named(tiny: Path, tmp_path: Path) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    for name in ("model.onnx.data", "model.onnx", "genai_config.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(POINTER)
        error = refusal(folder)
        assert name in error.message and "Git LFS pointer" in error.message and "git lfs pull" in error.remedy
        (folder / name).write_bytes(kept)


def test_field_44_data_cut_by_one_byte(tiny: Path, tmp_path: Path) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    data = folder / "model.onnx.data"
    size = data.stat().st_size
    os.truncate(data, size - 1)
    error = refusal(folder)
    for part in ("model.onnx.data", str(size - 1), str(size), HEAD_SCALES):
        assert part in error.message
    assert "truncated" in error.remedy


def test_field_44_empty_data(tiny: Path, tmp_path: Path) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    os.truncate(folder / "model.onnx.data", 0)
    assert "has 0 bytes" in refusal(folder).message


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("offset", "523000"),
        ("offset", str(2**63 - 1)),
        ("offset", str(2**64 - 16384)),
        ("offset", str(10**30)),
        ("offset", "-16384"),
        ("offset", "1e3"),
        ("offset", "1_024"),
        ("offset", "\u0661\u0660"),
        ("offset", "9" * 5000),
        ("offset", ""),
        ("length", str(2**64)),
        ("length", "-1"),
        ("length", "sixteen"),
        ("length", "16383"),
        ("length", "16385"),
        ("length", "0"),
    ],
)
def test_field_44_offsets_and_lengths(tiny: Path, tmp_path: Path, entry: str, value: str) -> None:
    error = refusal(moved(tiny, tmp_path / "m", entry, value))
    assert GATE in error.message


def test_a_name_that_is_made_twice_is_refused(tiny: Path, tmp_path: Path) -> None:
    """Which of two initialisers or nodes of one name is read, the graph does not say."""

    def another_weight(model: onnx.ModelProto) -> None:
        model.graph.initializer.add().CopyFrom(initializer(model, GATE))

    def another_maker(model: onnx.ModelProto) -> None:
        model.graph.node.add(
            op_type="Neg", input=["logits"], output=[node(model, "layers.0/mlp/act_fn/Sigmoid").output[0]]
        )

    def both(model: onnx.ModelProto) -> None:
        model.graph.node.add(op_type="Neg", input=["logits"], output=[GATE])

    def in_a_branch(model: onnx.ModelProto) -> None:
        branch = onnx.GraphProto(node=[onnx.NodeProto(op_type="Neg", input=["logits"], output=["x"])] * 2)
        model.graph.node.add(op_type="If", attribute=[onnx.helper.make_attribute("then_branch", branch)])

    for n, (edit, name) in enumerate(
        ((another_weight, GATE), (another_maker, "layers.0/mlp/act_fn/Sigmoid"), (both, GATE), (in_a_branch, "'x'"))
    ):
        error = refusal(edited(tiny, tmp_path / str(n), edit))
        assert name in error.message and "twice" in error.message


def test_a_function_of_the_models_own_takes_no_operators_place_in_silence(tiny: Path, tmp_path: Path) -> None:
    def define(op: str) -> Callable[[onnx.ModelProto], None]:
        return lambda m: m.functions.extend([onnx.FunctionProto(domain="com.microsoft", name=op)])

    error = refusal(edited(tiny, tmp_path / "used", define("MatMulNBits")), UnsupportedModel)
    assert "com.microsoft::MatMulNBits is a function of the model's own" in error.message
    with pytest.raises(UnsupportedModel, match="a function of the model's own"):
        oracle.logits(load(tmp_path / "used"), [1, 2])
    assert lower(load(edited(tiny, tmp_path / "unused", define("Other"))), 1).steps


@pytest.mark.parametrize("key", ["ofset", "Offset", "", "offset "])
def test_field_44_an_entry_that_the_standard_does_not_have_is_refused(tiny: Path, tmp_path: Path, key: str) -> None:
    """Overlooked, it would leave the default: another tensor's numbers."""
    error = refusal(moved(tiny, tmp_path / "m", key, "4096"))
    assert GATE in error.message and repr(key) in error.message


def test_field_44_an_entry_given_twice_is_refused_and_others_of_the_standard_are_not(
    tiny: Path, tmp_path: Path
) -> None:
    def edit(model: onnx.ModelProto) -> None:
        initializer(model, GATE).external_data.add(key="offset", value="0")

    assert "twice" in refusal(edited(tiny, tmp_path / "m", edit)).message
    for n, key in enumerate(("checksum", "prepacked_0")):
        assert load(moved(tiny, tmp_path / f"n{n}", key, "00")).weights[GATE].nbytes == 16384


def test_field_44_a_length_left_out_is_the_tensors_own(tiny: Path, tmp_path: Path) -> None:
    assert load(moved(tiny, tmp_path / "m", "length", None)).weights[GATE].nbytes == 16384


def test_field_44_the_last_of_many_tensors_is_checked_before_anything_runs(tiny: Path, tmp_path: Path) -> None:
    folder = edited(tiny, tmp_path / "m", lambda m: set_entry(initializer(m, HEAD_SCALES), "offset", "600000"))
    outcome = run(folder)
    assert outcome.code == 11
    assert HEAD_SCALES in outcome.error["message"]
    assert outcome.error["counters"].get("device_htod_bytes", 0) == 0, "nothing was copied"
    assert outcome.error["counters"].get("vmm_calls", 0) == 0


def test_field_45_an_offset_beyond_4_gib_is_read_there(tiny: Path, tmp_path: Path) -> None:
    far = (4 << 30) + 4096
    folder = edited(tiny, tmp_path / "m", lambda m: set_entry(initializer(m, GATE), "offset", str(far)))
    expected = load(tiny).weights[GATE].data.tobytes()
    with (folder / "model.onnx.data").open("r+b") as data:
        data.seek(far)  # a hole: the file takes no room
        data.write(expected)
    assert load(folder).weights[GATE].data.tobytes() == expected


@pytest.mark.parametrize("dims", [[256, 4, 15], [256, 4, 17], [257, 4, 16], [2**32, 2**32], [-256, -64], [2**62, 4]])
def test_sizes_that_do_not_fit_the_shape(tiny: Path, tmp_path: Path, dims: list[int]) -> None:
    def edit(model: onnx.ModelProto) -> None:
        tensor = initializer(model, GATE)
        del tensor.dims[:]
        tensor.dims.extend(dims)

    assert GATE in refusal(edited(tiny, tmp_path / "m", edit)).message


@pytest.mark.parametrize("dims", [[], [0], [2**32, 2**32], [3], [-1]])
@pytest.mark.parametrize("raw", [b"", b"12345678"])
def test_inline_values_of_the_wrong_size(tiny: Path, tmp_path: Path, dims: list[int], raw: bytes) -> None:
    """Sizes are multiplied without wrapping round: 2^32 by 2^32 elements are not none."""

    def edit(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(
            onnx.TensorProto(name="spare", data_type=onnx.TensorProto.INT64, dims=dims, raw_data=raw)
        )

    folder = edited(tiny, tmp_path / "m", edit)
    if (dims, len(raw)) in (([], 8), ([0], 0)):
        assert load(folder).weights["spare"].nbytes == len(raw)
    else:
        assert "spare" in refusal(folder).message


def test_inline_weights_load_as_external_ones_do(tiny: Path, tmp_path: Path) -> None:
    expected = load(tiny).weights[GATE].data.tobytes()

    def edit(model: onnx.ModelProto) -> None:
        tensor = initializer(model, GATE)
        del tensor.external_data[:]
        tensor.data_location = onnx.TensorProto.DEFAULT
        tensor.raw_data = expected

    assert load(edited(tiny, tmp_path / "m", edit)).weights[GATE].data.tobytes() == expected


def test_element_types_that_are_not_served_are_listed_all_at_once(tiny: Path, tmp_path: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        for name, kind in (("a", onnx.TensorProto.FLOAT8E8M0), ("b", onnx.TensorProto.STRING), ("c", 99)):
            model.graph.initializer.append(onnx.TensorProto(name=name, data_type=kind, dims=[0]))
            repeated = onnx.helper.make_tensor_value_info(name, kind, [0])  # as an input, which it is not
            model.graph.input.append(repeated)
        node(model, "layers.1/mlp/act_fn/Sigmoid").op_type = "NonZero"
        node(model, "layers.0/mlp/gate_proj/MatMul_Q4").input[2] = "a"

    error = refusal(edited(tiny, tmp_path / "m", edit), UnsupportedModel)
    assert isinstance(error, UnsupportedModel)
    assert "ai.onnx::NonZero" in error.reasons[0], "nodes and initialisers together"
    assert [r.split(":")[0] for r in error.reasons[1:]] == ["initialiser a", "initialiser b", "initialiser c"]
    assert "FLOAT8E8M0" in error.reasons[1] and "STRING" in error.reasons[2] and "99" in error.reasons[3]


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "genai_config.json"])
def test_a_missing_file_is_named(tiny: Path, tmp_path: Path, name: str) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    (folder / name).unlink()
    error = refusal(folder)
    assert name in error.message and "missing" in error.message


def test_a_missing_folder_and_a_file_in_its_place(tmp_path: Path) -> None:
    assert "nowhere" in refusal(tmp_path / "nowhere").message
    (tmp_path / "file").write_text("x")
    assert "file" in refusal(tmp_path / "file").message


def test_a_name_that_no_file_can_have_and_one_that_feigns_a_line_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("x" * 5000, "a\n\x1b[31merror: b"):
        for told in (["--prompt-ids", "1"], ["--prompt", "text"]):
            assert engine_main(["run", "--model", str(tmp_path / name), *told]) == ModelFilesError.exit_code
            error = capsys.readouterr().err
            assert error.count("\n") == 1 and "\x1b" not in error, error


def test_a_file_that_may_not_be_read_is_named(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    real = Path.open
    for name in ("model.onnx", "model.onnx.data"):

        def deny(self: Path, *args: Any, name: str = name, **kwargs: Any) -> Any:
            if self.name == name:
                raise PermissionError(13, "Permission denied", str(self))
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", deny)
            error = refusal(folder)
        assert name in error.message and "Permission denied" in error.message


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_garbage_in_place_of_the_graph(tiny: Path, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "garbage"
    if not folder.exists():
        reconfigured(tiny, folder, lambda _: None)
    (folder / "model.onnx").write_bytes(content)
    assert "model.onnx" in refusal(folder).message


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_one_flipped_byte_in_the_graph_never_ends_in_a_traceback(
    tiny: Path, tmp_path: Path, at: float, flip: int
) -> None:
    folder = tmp_path / "flipped"
    if not folder.exists():
        reconfigured(tiny, folder, lambda _: None)
    content = bytearray((tiny / "model.onnx").read_bytes())
    content[int(at * len(content))] ^= flip
    (folder / "model.onnx").write_bytes(bytes(content))
    with suppress(ModelFilesError, UnsupportedModel):
        lower(load(folder), 1)


def test_a_cut_graph(tiny: Path, tmp_path: Path) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[: len(content) // 2])
    assert "model.onnx is not a readable ONNX file" in refusal(folder).message


def decoder(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config["model"]["decoder"]
    return found


CONFIG_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no model": (lambda c: c.pop("model"), "model.decoder"),
    "no decoder": (lambda c: c["model"].pop("decoder"), "model.decoder"),
    "decoder is a list": (lambda c: c["model"].update(decoder=[]), "model.decoder"),
    "inputs is a list": (lambda c: decoder(c).update(inputs=[]), "inputs"),
    "no head size": (lambda c: decoder(c).pop("head_size"), "head_size"),
    "head size in words": (lambda c: decoder(c).update(head_size="wide"), "wide"),
    "head size zero": (lambda c: decoder(c).update(head_size=0), "head_size"),
    "no kv heads": (lambda c: decoder(c).update(num_key_value_heads=0), "num_key_value_heads"),
    "vocabulary infinite": (lambda c: c["model"].update(vocab_size=float("inf")), "vocab_size"),
    "vocabulary negative": (lambda c: c["model"].update(vocab_size=-5), "vocab_size"),
    "eos in words": (lambda c: c["model"].update(eos_token_id=["stop"]), "stop"),
    "ids unknown": (lambda c: decoder(c)["inputs"].update(input_ids="tokens"), "'tokens'"),
    "mask unknown": (lambda c: decoder(c)["inputs"].update(attention_mask="mask"), "'mask'"),
    "logits unknown": (lambda c: decoder(c)["outputs"].update(logits="scores"), "'scores'"),
    "graph outside": (lambda c: decoder(c).update(filename="../model.onnx"), "'../model.onnx'"),
    "graph elsewhere": (lambda c: decoder(c).update(filename="decoder.onnx"), "decoder.onnx"),
    "graph without bytes": (lambda c: decoder(c).update(filename="a\ud800"), "'a\\ud800'"),
    "past without a layer": (lambda c: decoder(c)["inputs"].update(past_key_names="past"), "'past'"),
    "past with two layers": (lambda c: decoder(c)["inputs"].update(past_key_names="p.%d.%d"), "'p.%d.%d'"),
    "value without a layer": (lambda c: decoder(c)["inputs"].update(past_value_names="past"), "'past'"),
    "present with a word": (lambda c: decoder(c)["outputs"].update(present_key_names="p.%s"), "'p.%s'"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_genai_config_faults(tiny: Path, tmp_path: Path, name: str) -> None:
    edit, says = CONFIG_FAULTS[name]
    error = refusal(reconfigured(tiny, tmp_path / "m", edit))
    assert says in error.message


@pytest.mark.parametrize(
    ("side", "key", "pattern"),
    [
        ("inputs", "past_key_names", "cache_k_%d"),
        ("inputs", "past_value_names", "cache_v_%d"),
        ("outputs", "present_key_names", "new_k_%d"),
        ("outputs", "present_value_names", "new_v_%d"),
    ],
)
def test_field_52_cache_names_that_the_graph_lacks(
    tiny: Path, tmp_path: Path, side: str, key: str, pattern: str
) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda c: decoder(c)[side].update({key: pattern}))
    with pytest.raises((ModelFilesError, UnsupportedModel)) as caught:
        lower(load(folder), 1)
    assert pattern.removesuffix("%d") in caught.value.message


def test_layers_that_config_and_graph_count_differently(tiny: Path, tmp_path: Path) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda c: decoder(c).update(num_hidden_layers=3))
    error = refusal(folder, UnsupportedModel)
    assert "[0, 1]" in error.message
    assert "num_hidden_layers is 3" in error.message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"null"])
def test_a_config_that_is_no_object(tiny: Path, tmp_path: Path, content: bytes) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    (folder / "genai_config.json").write_bytes(content)
    assert "genai_config.json" in refusal(folder).message


def test_a_record_of_the_build_that_is_damaged(tiny: Path, tmp_path: Path) -> None:
    folder = reconfigured(tiny, tmp_path / "m", lambda _: None)
    for content in (b"{", b"\xff", b"[1]"):
        (folder / "zoo.json").write_bytes(content)
        assert "zoo.json" in refusal(folder).message
    (folder / "zoo.json").write_text(json.dumps({"model_digest": 5}))
    assert load(folder).digest is None


def test_field_48_initialisers_repeated_as_inputs_are_not_asked_for(tiny: Path, tmp_path: Path) -> None:
    def edit(model: onnx.ModelProto) -> None:
        for tensor in model.graph.initializer:
            model.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )

    folder = edited(tiny, tmp_path / "m", edit)
    assert GATE not in load(folder).inputs
    assert run(folder).streams == run(tiny).streams
