"""Every operator that is claimed, against the ONNX standard's own node cases, and the document that lists them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.backend.test.loader import load_model_tests

from engine import conformance, kernels
from engine.__main__ import main
from engine.conformance import CaseResult

PROMISED = (
    *("Attention", "RMSNormalization", "RotaryEmbedding", "LinearAttention", "CausalConvWithState", "Split", "Gather"),
    *("MatMul", "Softmax", "Concat", "Reshape", "Slice", "Where", "Cast", "LayerNormalization", "Gelu", "If", "Add"),
    *("Sub", "Mul", "Div", "Pow", "Neg", "Sigmoid", "Tanh", "Relu", "Sqrt", "Exp", "Log", "Erf", "Equal", "Greater"),
)
NOT_CARRIED = re.compile(r"float8|float4|u?int[24]\b|type object|cast to type (17|18|19|2\d) |is no tensor|of nothing")


@pytest.fixture(scope="module")
def results() -> list[CaseResult]:
    """All cases: making them takes most of the time, so that a sample would save nothing."""
    return conformance.run_all()


def test_no_case_of_a_claimed_operator_fails(results: list[CaseResult]) -> None:
    assert [(r.name, r.why) for r in results if r.outcome == "failed"] == []
    assert Counter(r.outcome for r in results)["passed"] >= 770


def test_what_is_refused_is_of_a_type_that_is_not_carried(results: list[CaseResult]) -> None:
    assert [(r.name, r.why) for r in results if r.outcome == "refused" and not NOT_CARRIED.search(r.why)] == []


def test_what_is_promised_is_claimed_and_passes_cases(results: list[CaseResult]) -> None:
    table = conformance.by_op(results)
    assert [op for op in PROMISED if f"ai.onnx::{op}" not in conformance.claims()] == []
    assert [op for op in PROMISED if not table[f"ai.onnx::{op}"]["passed"]] == []


def test_a_kernel_that_is_wrong_fails_its_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [c for c in load_model_tests(kind="node") if c.name in ("test_add", "test_softmax_axis_1")]
    assert [conformance.run_case(c).outcome for c in cases] == ["passed", "passed"]
    get = kernels.get

    def wrong(arrays: Any, _: Any) -> None:
        arrays["y"][...] = np.nextafter(arrays["a"] + arrays["b"], np.float32(np.inf)) * np.float32(1.01)

    monkeypatch.setattr(kernels, "get", lambda name: kernels.KernelDef("add", wrong) if name == "add" else get(name))
    outcomes = {c.name: conformance.run_case(c) for c in cases}
    assert outcomes["test_add"].outcome == "failed" and "largest difference" in outcomes["test_add"].why
    assert outcomes["test_softmax_axis_1"].outcome == "passed"


def test_the_document_lists_what_the_registry_claims(checkout: Path, results: list[CaseResult]) -> None:
    from engine.commands.conformance import markdown

    written = (checkout / "docs" / "conformance.md").read_text()
    listed = re.findall(r"^\| (\S+::\S+) \|", written, re.MULTILINE)
    assert listed == conformance.claims(), "run `assay engine conformance --markdown > docs/conformance.md`"
    if f"onnx {onnx.__version__}" in written:  # the counts are those of one release's cases
        assert written == markdown(results)


def test_the_command_says_the_same_in_text_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: list[CaseResult]
) -> None:
    monkeypatch.setattr(conformance, "run_all", lambda: results)
    assert main(["conformance", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["totals"] == {o: sum(r.outcome == o for r in results) for o in document["totals"]}
    assert document["ops"]["ai.onnx::Softmax"]["claimed"] and not document["ops"]["ai.onnx::Conv"]["claimed"]
    assert main(["conformance"]) == 0
    text = capsys.readouterr().out
    for name, counts in document["ops"].items():
        row = next(line for line in text.splitlines() if line.split()[0] == name)
        assert row.split()[1:] == [str(counts[o]) for o in ("passed", "failed", "refused", "not claimed")]
    assert main(["conformance", "--op", "Erf"]) == 0
    assert "passed: test_erf" in capsys.readouterr().out


def test_a_failed_case_is_exit_1_and_an_unknown_operator_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [CaseResult("a", ("ai.onnx::Add",), "failed", "off by one"), CaseResult("b", ("ai.onnx::Mul",), "passed")]
    monkeypatch.setattr(conformance, "run_all", lambda: cases)
    assert main(["conformance"]) == 1
    assert "failed: a: off by one" in capsys.readouterr().out
    assert main(["conformance", "--op", "Mul"]) == 0
    capsys.readouterr()
    assert main(["conformance", "--op", "Mu"]) == 10
    assert capsys.readouterr().err.strip() == "error: no case and no claim has the operator 'Mu' (did you mean 'Mul'?)"
