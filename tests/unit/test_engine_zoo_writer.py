"""The decoder writer: node for node what the exporter writes, and never more than a tensor in memory."""

from __future__ import annotations

import hashlib
import weakref
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import pytest

from engine.zoo.external import ALIGNMENT_BYTES
from engine.zoo.quant import F32, U8, PackedLinear
from engine.zoo.tiny import TINY
from engine.zoo.writer import DATA_FILE, MODEL_FILE, DecoderGeometry, rotary_caches, write_decoder

T = TypeVar("T", F32, U8)
EXPORTED = Path(__file__).parents[3] / "shared" / "models"


@dataclass
class Blank:
    """`DecoderWeights` of zeros that notes what is asked for, and how much of it is still alive at each request."""

    geometry: DecoderGeometry
    asked: list[str] = field(default_factory=list)
    most_alive: int = 0
    _alive: list[weakref.ref[Any]] = field(default_factory=list)

    def embedding(self) -> F32:
        return self._hand_over("embedding", np.zeros((self.geometry.vocabulary, self.geometry.hidden), np.float32))

    def norm(self, name: str) -> F32:
        return self._hand_over(name, np.zeros(self.geometry.hidden, np.float32))

    def linear(self, name: str) -> PackedLinear:
        g = self.geometry
        hidden = {"o_proj": g.heads * g.head_size, "down_proj": g.ffn}
        widths = {**dict(g.projections), "o_proj": g.hidden, "down_proj": g.hidden, "lm_head": g.vocabulary}
        role = name.rsplit(".", 1)[-1]
        rows, blocks = widths.get(role, g.ffn), hidden.get(role, g.hidden) // 32
        codes = self._hand_over(name, np.zeros((rows, blocks, 16), np.uint8))
        return PackedLinear(4, codes, np.ones((rows, blocks), np.float32))

    def bias(self, name: str, width: int) -> F32:
        return self._hand_over(name, np.zeros(width, np.float32))

    def _hand_over(self, name: str, values: T) -> T:
        self._alive = [ref for ref in self._alive if ref() is not None]
        self.most_alive = max(self.most_alive, len(self._alive))
        self.asked.append(name)
        self._alive.append(weakref.ref(values))
        return values


def write(folder: Path, geometry: DecoderGeometry) -> tuple[onnx.GraphProto, Blank]:
    weights = Blank(geometry)
    write_decoder(folder, geometry, weights, producer_version="test")
    return onnx.load(folder / MODEL_FILE, load_external_data=False).graph, weights


def nodes(graph: onnx.GraphProto) -> dict[str, Any]:
    """Nodes by name, without what the exporter sets differently for a processor or a checkpoint."""
    described = {}
    for node in graph.node:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        attributes.pop("accuracy_level", None)  # the exporter asks CPU runtimes for int8 activations: we do not
        if "value" in attributes:
            attributes["value"] = onnx.numpy_helper.to_array(attributes["value"]).tolist()
        described[node.name] = (node.domain, node.op_type, list(node.input), list(node.output), attributes)
    return described


def shapes(values: Any) -> dict[str, Any]:
    return {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}


def exported(name: str) -> onnx.GraphProto:
    path = EXPORTED / name / "model.onnx"
    if not path.is_file():
        pytest.skip("skipped: no ../shared/models")
    return onnx.load(path, load_external_data=False).graph


def test_an_untied_decoder_is_the_exporters_own(tmp_path: Path) -> None:
    theirs = exported("llama-int4-cpu")
    ours, _ = write(tmp_path, TINY)
    assert nodes(ours) == nodes(theirs)
    assert [v.name for v in ours.input] == [v.name for v in theirs.input]
    assert [v.name for v in ours.output] == [v.name for v in theirs.output]
    assert [*ours.input, *ours.output] == [*theirs.input, *theirs.output]  # element types and symbols too
    kinds = {t.name: (t.data_type, list(t.dims)) for t in theirs.initializer}
    assert {t.name: (t.data_type, list(t.dims)) for t in ours.initializer} == kinds
    wrong_in_theirs = {"/model/constants/INT64/[1]": [1]}  # recorded as a scalar, written with one dimension
    assert shapes(ours.value_info) == shapes(theirs.value_info) | wrong_in_theirs


def test_a_tied_table_is_stored_once_as_the_exporter_does(tmp_path: Path) -> None:
    theirs = exported("llama-tied-int4-cuda")
    ours, weights = write(tmp_path, replace(TINY, tied=True))
    assert nodes(ours) == nodes(theirs)
    assert {t.name: list(t.dims) for t in ours.initializer} == {t.name: list(t.dims) for t in theirs.initializer}
    assert weights.asked.count("lm_head") == 1
    readers = [n.op_type for n in ours.node if "lm_head.MatMul.weight_Q4" in n.input]
    assert readers == ["Reshape", "MatMulNBits"]


def test_rotary_caches_are_the_exporters_values(tmp_path: Path) -> None:
    exported("llama-fp32-cpu")
    theirs = onnx.load(EXPORTED / "llama-fp32-cpu" / "model.onnx").graph
    stored = {t.name: onnx.numpy_helper.to_array(t) for t in theirs.initializer if t.name.endswith("_cache")}
    cos, sin = rotary_caches(TINY)
    # Theirs come from torch's own fp32 functions: a last bit apart here and there.
    np.testing.assert_allclose(cos, stored["cos_cache"], rtol=0, atol=6e-8)
    np.testing.assert_allclose(sin, stored["sin_cache"], rtol=0, atol=6e-8)


def test_separate_projections_feed_attention(tmp_path: Path) -> None:
    graph, weights = write(tmp_path, replace(TINY, fused_qkv=False))
    attention = next(n for n in graph.node if n.op_type == "GroupQueryAttention")
    expected = [f"/model/layers.0/attn/{role}_proj/MatMul/output_0" for role in "qkv"]
    assert list(attention.input)[:3] == expected
    assert [name for name in weights.asked if name.startswith("layers.1.attn")] == [
        f"layers.1.attn.{role}_proj" for role in "qkvo"
    ]


def test_every_initialiser_is_external_aligned_and_apart(tmp_path: Path) -> None:
    graph, _ = write(tmp_path, TINY)
    end_bytes = 0
    for tensor in graph.initializer:
        where = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(where["offset"]), int(where["length"])
        assert where["location"] == DATA_FILE
        assert not tensor.raw_data
        assert offset % ALIGNMENT_BYTES == 0
        assert end_bytes <= offset < end_bytes + ALIGNMENT_BYTES
        end_bytes = offset + length
    assert (tmp_path / DATA_FILE).stat().st_size == end_bytes


def test_sizes_and_digests_are_those_of_the_files(tmp_path: Path) -> None:
    written = write_decoder(tmp_path, TINY, Blank(TINY), producer_version="test")
    assert sorted(file.name for file in written) == [MODEL_FILE, DATA_FILE]
    for file in written:
        content = (tmp_path / file.name).read_bytes()
        assert (file.size_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("tied", [False, True])
def test_one_tensor_is_alive_at_a_time(tmp_path: Path, tied: bool) -> None:
    _, weights = write(tmp_path, replace(TINY, tied=tied))
    assert len(weights.asked) == len(set(weights.asked)) >= 2 * 7
    assert weights.most_alive == 0, "a weight was still held when the next was asked for"
