"""`engine logits`: the golden's form out of the command line, its two precisions, and bad input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.__main__ import main
from engine.bind import lower
from engine.errors import BadRequest
from engine.graph import Graph
from engine.onnx_load import load
from engine.out_file import check_out
from engine.plan import Plan
from tests.unit.engine_rig import build_tiny, edited, reconfigured, write_array

SAMPLES = (
    *("gemma2-int4-cpu", "llama-bf16-cuda", "llama-fp32-cpu", "llama-int4-asym-cuda", "llama-int4-cpu"),
    *("llama-int4-cuda", "llama-tied-int4-cuda", "phi-int4-cpu", "phi3-int4-cuda", "qwen2-int4-cuda"),
    *("qwen3-int4-cuda", "qwen3-int4-nofuseqk-cuda", "qwen35-int4-cuda", "qwen35moe-int4raw-cuda"),
)
FP32 = 5e-5
"""Of the largest logit, with the KV cache in float32. Seen: 4e-6; the promise is 2e-4."""
IDS = ("--prompt-ids", "1 17 42 99", "--forced-ids", "7,3")
Logits = NDArray[np.float32]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model of two layers."""
    return build_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def samples(checkout: Path) -> Path:
    """The folder of exporter-written models beside the checkout."""
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `engine logits` in this process: exit code, stdout, stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["logits", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def golden_run(run: Run, folder: Path, out: Path, context: str, *more: object) -> tuple[Logits, Logits]:
    """Logits that the command writes for a golden's ids, and the golden's own."""
    golden = np.load(folder / "golden.npz")
    prompt, forced = golden[f"{context}prompt_ids"], golden[f"{context}forced_ids"]
    ids = ("--prompt-ids", " ".join(map(str, prompt)), "--forced-ids", " ".join(map(str, forced)))
    code, _, err = run("--model", folder, *ids, "--granule", 16384, "--out", out, *more)
    assert (code, err) == (0, "")
    written = np.load(out)
    assert set(written.files) == {"logits", "prompt_ids", "forced_ids"}
    assert written["prompt_ids"].tolist() == prompt.tolist()
    assert written["forced_ids"].tolist() == forced.tolist()
    assert written["logits"].dtype == np.float32
    assert len(written["logits"]) == len(prompt) + len(forced)
    wanted: Logits = golden[f"{context}logits"]
    return written["logits"][-len(wanted) :], wanted


@pytest.mark.parametrize("context", ["", "long_"])
@pytest.mark.parametrize("name", SAMPLES)
def test_in_float32_every_sample_reaches_its_golden(
    samples: Path, tmp_path: Path, run: Run, name: str, context: str
) -> None:
    found, wanted = golden_run(run, samples / name, tmp_path / "l.npz", context, "--dtype", "fp32")
    assert np.abs(found - wanted).max() <= FP32 * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("name", "rounds"), [("llama-fp32-cpu", False), ("qwen2-int4-cuda", True), ("phi-int4-cpu", False)]
)
def test_native_rounds_to_the_caches_type_and_nothing_else(
    samples: Path, tmp_path: Path, run: Run, name: str, rounds: bool
) -> None:
    native, wanted = golden_run(run, samples / name, tmp_path / "n.npz", "")
    wide, _ = golden_run(run, samples / name, tmp_path / "w.npz", "", "--dtype", "fp32")
    assert np.abs(native - wanted).max() <= 2e-3 * np.abs(wanted).max()
    assert np.array_equal(native, wide) is not rounds


def test_neither_budget_nor_policy_nor_capture_changes_a_bit(tiny: Path, tmp_path: Path, run: Run) -> None:
    forms: list[tuple[Any, ...]] = [(), ("--capture", "off"), ("--kv-capacity", 256), ("--granule", 65536)]
    forms += [("--weight-budget", "50%", "--policy", p, "--granule", 4096) for p in ("stable", "lru", "stable_slot")]
    rows = []
    for form in forms:
        code, _, err = run("--model", tiny, *IDS, "--out", tmp_path / "l.npz", *form)
        assert (code, err) == (0, ""), form
        rows.append(np.load(tmp_path / "l.npz")["logits"])
    assert all(np.array_equal(rows[0], other) for other in rows[1:])


def test_what_is_forced_are_the_steps_of_the_target_that_was_asked_for(
    tiny: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same bits here, so the plans are counted: on a card the steps of a target are other kernels."""
    made: list[tuple[str, int]] = []

    def noted(graph: Graph, rows: int, **given: Any) -> Plan:
        plan = lower(graph, rows, **given)
        made.append((given["target"], len(plan.steps)))
        return plan

    monkeypatch.setattr("engine.forced.lower", noted)
    rows = []
    for target in ("plain", "fused"):
        assert run("--model", tiny, *IDS, "--out", tmp_path / "l.npz", "--target", target)[0] == 0
        rows.append(np.load(tmp_path / "l.npz")["logits"])
    assert np.array_equal(*rows)
    (_, plain), _, (_, fused), _ = made
    assert [target for target, _ in made] == ["plain", "plain", "fused", "fused"] and fused < plain


def test_what_it_says_and_without_forced_ids(tiny: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "l.npz"
    code, text, _ = run("--model", tiny, "--prompt-ids", "1 17 42 99", "--out", out)
    assert code == 0 and "4 rows of the prompt and 0 forced" in text
    code, text, _ = run("--model", tiny, *IDS, "--out", out, "--json")
    told = json.loads(text)
    logits = np.load(out)["logits"]
    assert (told["prompt_rows"], told["forced_rows"], told["vocabulary"]) == (4, 2, logits.shape[1])
    ordered = np.sort(logits, axis=1)
    assert told["smallest_margin"] == pytest.approx(float((ordered[:, -1] - ordered[:, -2]).min()))
    assert told["largest"] == pytest.approx(float(np.abs(logits).max()))
    assert [p.name for p in tmp_path.iterdir()] == ["l.npz"]


def test_a_device_or_pipe_is_never_replaced_by_the_file(tiny: Path, tmp_path: Path, run: Run) -> None:
    pipe, long = tmp_path / "pipe", tmp_path / ("x" * 300)
    os.mkfifo(pipe)
    for out in (pipe, long, tmp_path):
        code, _, err = run("--model", tiny, *IDS, "--out", out)
        assert code == 10 and f"--out: {out} cannot be written" in err and err.count("\n") == 1
        with pytest.raises(BadRequest, match=r"--routing-out: .* cannot be written"):
            check_out(out, "--routing-out")
    assert pipe.is_fifo()


BAD: list[tuple[list[str], int, str]] = [
    (["--model", "/no/such/folder", *IDS], 11, "does not exist"),
    (["--prompt-ids", "1 2 99999", "--model", "{tiny}"], 10, "id 99999 is outside the vocabulary"),
    (["--prompt-ids", "1 2", "--forced-ids", "99999", "--model", "{tiny}"], 10, "id 99999 is outside the vocabulary"),
    (["--prompt-ids", "1 -2", "--model", "{tiny}"], 10, "prompt id -2 is not a token id"),
    (["--prompt-ids", "1 x", "--model", "{tiny}"], 10, "prompt id 'x' is not a whole number"),
    (["--prompt-ids", "1", "--forced-ids", "2.5", "--model", "{tiny}"], 10, "forced id '2.5' is not a whole number"),
    (["--prompt-ids", " ", "--model", "{tiny}"], 10, "the prompt is empty"),
    (["--prompt-ids", "1", "--forced-ids", "2 " * 5000, "--model", "{tiny}"], 10, "do not fit the model's"),
    (["--model", "{tiny}"], 10, "no prompt"),
    ([*IDS], 10, "--model"),
    ([*IDS, "--model", "{tiny}", "--out", "/no/such/folder/l.npz"], 10, "folder /no/such/folder does not exist"),
    ([*IDS, "--model", "{tiny}", "--out", "{tiny}"], 10, "cannot be written"),
    ([*IDS, "--model", "{tiny}", "--dtype", "fp64"], 10, "--dtype"),
    ([*IDS, "--model", "{tiny}", "--granule", "5000"], 10, "granule is 5000"),
    ([*IDS, "--model", "{tiny}", "--device", "tpu"], 10, "unknown device 'tpu'"),
    ([*IDS, "--model", "{tiny}", "--policy", "luck"], 10, "unknown policy 'luck'"),
    ([*IDS, "--model", "{tiny}", "--weight-budget", "all"], 10, "weight_budget is 'all'"),
    ([*IDS, "--model", "{tiny}", "--weight-budget", "1"], 13, "budget"),
]


@pytest.mark.parametrize(("given", "code", "said"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_is_one_line(tiny: Path, tmp_path: Path, run: Run, given: list[str], code: int, said: str) -> None:
    out = tmp_path / "l.npz"
    told = run("--out", out, *(word.format(tiny=tiny) for word in given))
    assert (told[0], told[1]) == (code, "")
    assert said in told[2] and told[2].count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_logits_that_are_not_finite_are_never_written(tiny: Path, tmp_path: Path, run: Run) -> None:
    folder = edited(tiny, tmp_path / "edited", lambda _: None)
    norm = next(n.inputs[2] for n in load(tiny).nodes if n.op.startswith("Skip"))
    write_array(folder, norm, lambda values: np.full_like(values, np.inf))
    code, out, err = run("--model", folder, *IDS, "--out", tmp_path / "l.npz")
    assert code == 15 and out == "" and "not finite" in err
    assert not (tmp_path / "l.npz").exists()


def test_a_context_may_be_filled_to_its_end(tiny: Path, tmp_path: Path, run: Run) -> None:
    def shorten(config: dict[str, Any]) -> None:
        config["model"]["context_length"] = 6

    folder = reconfigured(tiny, tmp_path / "short", shorten)
    assert run("--model", folder, *IDS, "--out", tmp_path / "l.npz")[0] == 0
    code, _, err = run("--model", folder, *IDS[:3], "7 3 5", "--out", tmp_path / "l.npz")
    assert code == 10 and "4 prompt and 3 forced ids do not fit the model's 6 positions" in err
