"""CUDA forms without a card: every kernel has one, its text follows from the step, and it compiles where NVRTC is."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import conformance, kernels
from engine.bind import lower
from engine.device.base import Launch
from engine.device.cuda import CudaDevice
from engine.device.sim import SimDevice
from engine.errors import UnsupportedModel
from engine.kernels.cuda import NoForm, Variant, prepare, source, sources
from engine.kernels.steps import broadcast, merged, rows_first
from engine.onnx_load import load
from engine.paging.experts import WHOLE, decide, split
from engine.plan import TARGETS, Step
from tests.unit.engine_mixture import built
from tests.unit.engine_rig import build_tiny

ARCHITECTURES = ("sm_80", "sm_90", "sm_90a")


def variant(step: Step, sequences: int = 1) -> Variant:
    """The text of a step's kernel."""
    return texts(step, sequences)[0]


def texts(step: Step, sequences: int = 1, capacity: int | None = None) -> list[Variant]:
    """The texts of all that a step launches, its caches of that many positions where it is said."""
    caches = {o.name: (0, 0) for o in step.operands if o.ref.kind in ("kv_key", "kv_value")}
    made = [prepare(form, step, caches, sequences, capacity).variant for form in kernels.get(step.kernel).forms]
    assert made
    return made


def variants(steps: Iterable[Step], sequences: int = 1, capacity: int | None = None) -> set[Variant]:
    """The different texts of these steps."""
    return {text for step in steps for text in texts(step, sequences, capacity)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model of two layers."""
    return build_tiny(tmp_path_factory.mktemp("cuda-forms"))


def test_every_kernel_has_a_form_and_every_source_a_kernel() -> None:
    kernels.get("add")
    assert [name for name, kernel in kernels._KERNELS.items() if kernel.cuda is None] == []
    used = {stem for kernel in kernels._KERNELS.values() for form in kernel.forms for stem in form.sources}
    assert used == set(sources())


def test_prompts_of_any_length_share_their_variants(tiny: Path) -> None:
    graph = load(tiny)
    texts = [variants(lower(graph, rows).steps) for rows in (2, 5, 64)]
    assert texts[0] == texts[1] == texts[2]
    one = variants(lower(graph, 1).steps)
    assert len(one) <= 12 and {v.function for v in one} == {v.function for v in texts[0]}


def test_a_text_names_each_operand_once_and_a_batch_moves_each(tiny: Path) -> None:
    step = next(s for s in lower(load(tiny), 1).steps if s.kernel == "gqa")
    alone, batch = variant(step).text, variant(step, 3).text
    for operand in step.operands:
        assert alone.count(f"typedef float {operand.name}_t;") == (operand.ref.dtype == "float32")
        assert alone.count(f"#define HAS_{operand.name} 1") == 1
        assert f"{operand.name} = (" in batch and f"{operand.name} = (" not in alone
    assert "Numbers<3> sequences" in batch


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_merged_steps_reach_what_numpy_broadcasts(data: st.DataObject) -> None:
    to = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4), label="to"))
    shapes = []
    for _ in range(2):
        kept = data.draw(st.integers(0, len(to)))
        shapes.append(tuple(data.draw(st.sampled_from([1, d])) for d in to[len(to) - kept :]))
    shape, *steps = merged(to, *(broadcast(s, to) for s in shapes))
    assert all(extent > 1 for extent in shape) or shape == (1,)
    for own, of in zip(shapes, steps, strict=True):
        array = np.arange(int(np.prod(own, dtype=np.int64)))
        reached = [int(sum(i * s for i, s in zip(index, of, strict=True))) for index in np.ndindex(*shape)]
        assert reached == np.broadcast_to(array.reshape(own), to).reshape(-1).tolist()


def test_steps_of_a_transpose_do_not_merge() -> None:
    shape, steps = merged((3, 2), rows_first((2, 3))[::-1])
    assert (shape, steps) == ((3, 2), (1, 3))


def test_steps_without_a_form_are_refused_all_at_once_by_node_and_op(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gqa", "argmax"):
        monkeypatch.setitem(kernels._KERNELS, name, replace(kernels.get(name), cuda=None))
    monkeypatch.setattr(kernels, "get", kernels._KERNELS.__getitem__)
    nothing = SimpleNamespace(_card=SimpleNamespace(load=lambda *_: pytest.fail("loaded before all was checked")))
    with pytest.raises(UnsupportedModel) as caught:
        CudaDevice.prepare(cast("CudaDevice", nothing), lower(load(tiny), 1).steps)
    assert caught.value.exit_code == 12
    assert caught.value.reasons == (
        "/model/layers.0/attn/GroupQueryAttention (com.microsoft::GroupQueryAttention): kernel gqa: no CUDA form",
        "/model/layers.1/attn/GroupQueryAttention (com.microsoft::GroupQueryAttention): kernel gqa: no CUDA form",
        "argmax (assay::ArgMax): kernel argmax: no CUDA form",
    )


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """What a mixture's steps become whose experts are read one by one, of either target."""
    graph = load(built(tmp_path_factory.mktemp("experts") / "m", hollow=True), hollow=True)
    plans = [lower(graph, 1, target=target) for target in TARGETS]
    made = [s for p in plans for s in split({1: p}, decide(p))[1].steps if s.experts is not None or s.kernel == "route"]
    assert {s.kernel for s in made} == {"route", *WHOLE.values()}
    return made


@pytest.fixture(scope="module")
def standard() -> list[Step]:
    """Every step that the standard's cases become."""
    with pytest.MonkeyPatch.context() as patch:
        return conformance_steps(patch)


def test_a_body_uses_no_parameter_that_its_step_lacks(
    tiny: Path, checkout: Path, standard: list[Step], experts: list[Step]
) -> None:
    """Read by the preprocessor alone, which every build host has: what is left of a parameter's name is an argument."""
    samples = sorted((checkout.parent / "shared" / "models").glob("*/model.onnx"))
    steps = [*standard, *lower(load(tiny), 1).steps]
    steps += [step for model in samples for step in lower(load(model.parent), 1).steps]
    steps += experts
    texts = variants(steps)
    assert {v.function for v in texts} >= {"assay_gather", "assay_gqa", "assay_reducesum"} and len(texts) > 200
    for text in texts:
        left = set(re.findall(r"\bP_[A-Za-z]\w*", preprocessed(text.text)))
        given = set(re.findall(r"const (?:i64|float|Numbers<\d+>) (P_\w+)", text.text))
        assert left <= given, f"{text.function} names {sorted(left - given)}, which the step does not give"


def preprocessed(text: str) -> str:
    """A variant as its compiler sees it, macros replaced."""
    command = ["cc", "-E", "-P", "-x", "c", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def nvrtc() -> Any:
    """The compiler's bindings; skips the test where they, or the library, are not installed."""
    bindings = pytest.importorskip("cuda.bindings.nvrtc", reason="skipped: no NVRTC")
    try:
        bindings.nvrtcVersion()
    except RuntimeError:
        pytest.skip("skipped: no NVRTC")
    return bindings


def conformance_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Every step that the standard's cases become."""
    seen: list[Step] = []
    launch = SimDevice.launch

    def kept(self: SimDevice, bound: Launch) -> None:
        seen.append(bound.step)
        launch(self, bound)

    monkeypatch.setattr(SimDevice, "launch", kept)
    conformance.run_all()
    return seen


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_steps_of_experts_one_by_one_compile(experts: list[Step], architecture: str) -> None:
    nvrtc()
    from engine.device.cuda_compile import compile_variant

    texts = variants(experts) | variants(experts, sequences=3)
    assert {v.function for v in texts} == {f"assay_{kernel}" for kernel in ("route", *WHOLE.values())}
    for text in texts:
        assert len(compile_variant(text, architecture)) > 1000, text.function


def test_a_part_of_experts_that_lie_apart_is_found_by_what_the_launch_is_told(experts: list[Step]) -> None:
    for step in experts:
        if step.experts is None:
            assert all("APART 1" not in v.text for v in texts(step))
            continue
        for text in (v.text for v in texts(step)):
            assert f"const __grid_constant__ Numbers<{step.experts.count}> told" in text
            for part in step.experts.parts:
                assert f"#define {part.name} ((const {part.name}_t*)(experts[EXPERT] + {part.offset_bytes}))" in text


def test_a_norm_s_factors_that_a_kernel_puts_there_are_waited_for(experts: list[Step]) -> None:
    """As weights they are read before what kernels write is there; in a graph the copy may still be under way then."""
    step = next(s for s in experts if s.kernel == WHOLE["mixture"])
    assert next(o.ref.kind for o in step.operands if o.name == "gamma") == "buffer"
    up = texts(step)[0]
    whole = replace(up, text=up.text.replace("#define APART 1\n", ""))
    for text, waits in ((up, True), (whole, False)):
        body = preprocessed(text.text).split("void body(")[1]
        assert (body.index("inputs_ready()") < body.index("eight(gamma")) is waits


def test_more_experts_than_a_launch_can_be_told_of_are_refused(experts: list[Step]) -> None:
    step = next(s for s in experts if s.experts is not None)
    assert step.experts is not None
    many = replace(step, experts=replace(step.experts, count=4096))
    with pytest.raises(NoForm, match="4096 experts one by one, 3840 is the most: read banks whole"):
        prepare(kernels.get(many.kernel).forms[0], many, {})


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_everything_compiles(tiny: Path, checkout: Path, standard: list[Step], architecture: str) -> None:
    """All variants of the standard's cases and of the models at hand: no errors, and none of the texts is empty."""
    nvrtc()
    from engine.device.cuda_compile import compile_variant

    steps = list(standard)
    samples = checkout.parent / "shared" / "models"
    for folder in [tiny, *(p for p in sorted(samples.glob("*")) if (p / "model.onnx").is_file())]:
        graph = load(folder)
        for rows in (1, 5):
            steps += lower(graph, rows).steps
    texts = variants(steps) | variants(lower(load(tiny), 1).steps, sequences=3)
    texts |= variants((s for s in steps if s.kernel == "gqa"), capacity=1)
    assert {s.kernel for s in steps} >= {"gqa", "matmul_nbits", "add", "reducesum"}
    for text in texts:
        assert len(compile_variant(text, architecture)) > 1000, text.function


def test_support_holds_no_kernel_and_bodies_include_nothing() -> None:
    heads = {"support", *(head for k in kernels._KERNELS.values() for form in k.forms for head in form.heads)}
    assert heads == {"support", "mixture", "routing", "attention_parts"}
    for stem in ("support", *sources()):
        assert "#include" not in source(stem)
        assert ("BODY {" in source(stem)) == (stem not in heads)
