"""`python -P -m engine run` as a parent or a person starts it: exit codes, one clear line, no traceback, no orphan."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import engine
from engine.errors import EXIT_KINDS
from engine.tokens import Tokens
from tests.unit.engine_child import Ended, environment, parent
from tests.unit.engine_rig import TINY_PROMPT, build_tiny, edited, node, reconfigured, request, write_array

PROMPT = " ".join(map(str, TINY_PROMPT))
Change = Callable[[Path, Path], tuple[dict[str, Any], str]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("engine-cli"))


def person(folder: Path, *words: str) -> Ended:
    """The command as typed, in some folder."""
    command = [sys.executable, "-P", "-m", "engine", *words]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert "Traceback" not in done.stderr + done.stdout, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()] if "--json" in words else []
    return Ended(done.returncode, lines, done.stdout, done.stderr)


def copy(tiny: Path, into: Path) -> Path:
    """A copy to break."""
    return reconfigured(tiny, into / "model", lambda _: None)


def missing_data(tiny: Path, into: Path) -> tuple[dict[str, Any], str]:
    folder = copy(tiny, into)
    (folder / "model.onnx.data").unlink()
    return request(folder), "model.onnx.data"


def truncated_data(tiny: Path, into: Path) -> tuple[dict[str, Any], str]:
    folder = copy(tiny, into)
    os.truncate(folder / "model.onnx.data", 522_000)
    return request(folder), "522000"


def pointer(tiny: Path, into: Path) -> tuple[dict[str, Any], str]:
    folder = copy(tiny, into)
    (folder / "model.onnx.data").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    return request(folder), "Git LFS pointer"


def unknown_op(tiny: Path, into: Path) -> tuple[dict[str, Any], str]:
    def edit(model: onnx.ModelProto) -> None:
        node(model, "layers.0/mlp/act_fn/Sigmoid").op_type = "Elu"

    return request(edited(tiny, into / "model", edit)), "ai.onnx::Elu"


def overflowing(tiny: Path, into: Path) -> tuple[dict[str, Any], str]:
    folder = copy(tiny, into)
    write_array(folder, "model.layers.1.mlp.down_proj.MatMul.weight_scales", lambda s: s * 1e38)
    return request(folder), "not finite"


def asked(**changes: Any) -> Change:
    """A request for the whole model with some keys changed; the message must name the last change's value."""

    def change(tiny: Path, _: Path) -> tuple[dict[str, Any], str]:
        says = changes.pop("says")
        return request(tiny, **changes), says

    return change


CASES: dict[str, tuple[int, Change]] = {
    "unknown key": (10, asked(tokns=3, says="'tokns'")),
    "unknown config name": (10, asked(config={"polcy": "lru"}, says="'polcy'")),
    "empty prompt": (10, asked(prompt_ids=[], says="empty")),
    "zero tokens": (10, asked(tokens=0, says="tokens is 0")),
    "negative budget": (10, asked(config={"weight_budget": -1}, says="-1")),
    "budget in words": (10, asked(config={"weight_budget": "half"}, says="'half'")),
    "wrong protocol": (10, asked(protocol=9, says="9")),
    "prompt outside the vocabulary": (10, asked(prompt_ids=[512], says="512")),
    "too many tokens": (10, asked(tokens=1000, says="1004")),
    "cuda": (10, asked(device="cuda", says="device cuda")),
    "no such model": (11, asked(model="/nowhere/at/all", says="/nowhere/at/all")),
    "missing data": (11, missing_data),
    "truncated data": (11, truncated_data),
    "pointer": (11, pointer),
    "unknown operator": (12, unknown_op),
    "a quarter of the weights": (13, asked(config={"weight_budget": "10%", "granule": 4096}, says="32768")),
    "a small limit": (13, asked(config={"vram_limit": 5000, "granule": 4096}, says="5000")),
    "not finite": (15, overflowing),
}


@pytest.mark.parametrize("name", CASES)
def test_each_fault_is_one_error_line_with_the_code_of_its_class(tiny: Path, tmp_path: Path, name: str) -> None:
    code, change = CASES[name]
    document, says = change(tiny, tmp_path)
    ended = parent(tmp_path, document)
    assert ended.code == code, ended.err
    line = ended.last()
    assert (line["type"], line["code"], line["kind"]) == ("error", code, EXIT_KINDS[code])
    assert says in line["message"] and line["remedy"]
    assert ended.out == ""
    assert len(ended.err.splitlines()) <= 1, "at most the one line"


def test_a_good_run_says_hello_progress_generations_and_a_result(tiny: Path, tmp_path: Path) -> None:
    ended = parent(tmp_path, request(tiny, generations=2, config={"weight_budget": "50%", "granule": 4096}))
    assert ended.code == 0 and ended.out == ended.err == ""
    kinds = [line["type"] for line in ended.lines]
    assert kinds == ["hello", "progress", "progress", "generation", "progress", "generation", "result"]
    assert Path(ended.lines[0]["module_path"]) == Path(engine.__file__)
    assert all(e["holds"] for e in ended.last()["equations"])
    assert ended.lines[3]["ids"] == ended.lines[5]["ids"]


@pytest.mark.parametrize("text", ["", "{", "[]", '"run"', "\0", '{"protocol": 1, "protocol": 1}', "9" * 5000])
def test_a_request_file_that_is_no_request(tmp_path: Path, text: str) -> None:
    ended = parent(tmp_path, None, text=text)
    assert ended.code == 10 and ended.last()["kind"] == "bad_request" and ended.last()["remedy"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "required"),
        (["run"], "--model is missing"),
        (["jog"], "jog"),
        (["run", "--modle", "x"], "--modle"),
        (["run", "--tokens", "many"], "many"),
        (["run", "--request", "none.json"], "none.json"),
        (["run", "--request", "none.json", "--result-fd", "77"], "--result-fd 77 is not open"),
        (["run", "--request", "none.json", "--control-fd", "77"], "--control-fd 77 is not open"),
        (["run", "--model", "MODEL"], "no prompt"),
        (["run", "--model", "MODEL", "--prompt", ""], "empty"),
        (["run", "--model", "MODEL", "--prompt-ids", ""], "empty"),
        (["run", "--model", "MODEL", "--prompt-ids", "1 x"], "'x'"),
        (["run", "--model", "MODEL", "--prompt-ids", "-1"], "-1"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--prompt", "x"], "not allowed with"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--tokens", "0"], "tokens is 0"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--weight-budget", "-5"], "-5"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--weight-budget", "half"], "'half'"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--policy", "mru"], "'mru'"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--capture", "maybe"], "maybe"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--granule", "5000"], "5000"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--device", "tpu"], "'tpu'"),
        (["run", "--model", "MODEL", "--prompt-ids", "1", "--device", "cuda"], "device cuda"),
    ],
)
def test_words_that_make_no_request_are_one_line_on_stderr(
    tiny: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    ended = person(tmp_path, *[str(tiny) if w == "MODEL" else w for w in words])
    assert ended.code == 10
    [line] = ended.err.splitlines()
    assert line.startswith("error: ") and says in line and "(" in line, "the remedy stands behind the message"


def test_a_person_reads_ids_counters_floors_and_equations(tiny: Path, tmp_path: Path) -> None:
    words = ("--prompt-ids", PROMPT, "--tokens", "6", "--weight-budget", "50%", "--granule", "4096", "--policy", "lru")
    ended = person(tmp_path, "run", "--model", str(tiny), *words, "--generations", "2", "--warmups", "1")
    assert ended.code == 0 and ended.err == ""
    for words_ in ("config: policy=lru source=request", "config: capture=True source=default", "warmup 1:"):
        assert words_ in ended.out
    for name in ("htod_bytes_per_token=", "ratio_to_floor=", "byte_hit_rate=", "segments=", "generated_text:"):
        assert name in ended.out
    assert ended.out.count("generated_token_ids:") == 3 and "BROKEN" not in ended.out
    assert ended.out.count(" holds") >= 15


def test_text_and_ids_ask_the_same(tiny: Path, tmp_path: Path) -> None:
    by_text = person(tmp_path, "run", "--model", str(tiny), "--prompt", "ab", "--tokens", "4", "--json")
    hello, *_, result = by_text.lines
    assert (hello["type"], result["type"]) == ("hello", "result")
    ids = " ".join(map(str, Tokens(tiny).encode("ab")))
    by_ids = person(tmp_path, "run", "--model", str(tiny), "--prompt-ids", ids, "--tokens", "4", "--json")
    ids_of = [[line["ids"] for line in e.lines if line["type"] == "generation"] for e in (by_text, by_ids)]
    assert ids_of[0] == ids_of[1] and len(ids_of[0][0]) == 4


def test_a_model_without_a_tokenizer_runs_on_ids_and_refuses_text(tiny: Path, tmp_path: Path) -> None:
    folder = copy(tiny, tmp_path)
    (folder / "tokenizer.json").unlink()
    good = person(tmp_path, "run", "--model", str(folder), "--prompt-ids", PROMPT, "--tokens", "2")
    assert good.code == 0 and "generated_text" not in good.out
    bad = person(tmp_path, "run", "--model", str(folder), "--prompt", "ab")
    assert bad.code == 11 and "tokenizer.json" in bad.err and "--prompt-ids" in bad.err


def test_errors_come_in_the_same_words_with_and_without_json(tiny: Path, tmp_path: Path) -> None:
    words = ("run", "--model", str(tiny), "--prompt-ids", PROMPT, "--weight-budget", "1000", "--granule", "4096")
    plain, lines = person(tmp_path, *words), person(tmp_path, *words, "--json")
    assert plain.code == lines.code == 13
    assert plain.err == lines.err and "32768" in plain.err
    assert lines.last()["message"] in plain.err


def test_when_the_control_pipe_closes_the_child_ends(tiny: Path, tmp_path: Path) -> None:
    """A parent that is gone cannot stop its child: the child notices by itself, in the middle of a long run."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request(tiny, tokens=200, generations=100_000, ignore_eos=True)))
    read, write = os.pipe()
    control, hold = os.pipe()
    command = [sys.executable, "-P", "-m", "engine", "run", "--request", str(path)]
    command += ["--result-fd", str(write), "--control-fd", str(control)]
    child = subprocess.Popen(command, cwd=tmp_path, env=environment(), pass_fds=(write, control))
    try:
        os.close(write)
        os.close(control)
        with os.fdopen(read) as stream:
            seen = [json.loads(next(stream))["type"] for _ in range(4)]
            assert seen[0] == "hello" and child.poll() is None
            os.close(hold)
            assert child.wait(timeout=20) == 143
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
            child.wait()


def test_a_reader_that_goes_away_ends_the_child_without_a_traceback(tiny: Path, tmp_path: Path) -> None:
    """The result pipe's reader is gone: nobody is left to tell, so the child says it once on stderr and ends."""
    path = tmp_path / "request.json"
    path.write_text(json.dumps(request(tiny, generations=3)))
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-P", "-m", "engine", "run", "--request", str(path), "--result-fd", str(write)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(),
        pass_fds=(write,),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(write)
    assert done.returncode == 143 and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_output_into_a_pipe_that_closes_early(tiny: Path, tmp_path: Path) -> None:
    """As `... | head -1` leaves it: one line read, no traceback."""
    command = [sys.executable, "-P", "-m", "engine", "run", "--model", str(tiny), "--prompt-ids", PROMPT]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(write)
    assert done.returncode == 143 and "gone" in done.stderr and len(done.stderr.splitlines()) == 1


def test_peak_memory_is_the_childs_own(tiny: Path, tmp_path: Path) -> None:
    """What the parent holds when it starts the child is none of the child's: exec hands it on in ru_maxrss."""
    held = np.ones(600 << 20, np.uint8)
    assert held[-1] == 1
    ended = parent(tmp_path, request(tiny))
    assert 10 << 20 < ended.last()["peak_rss_bytes"] < 400 << 20


def test_help_is_no_error(tmp_path: Path) -> None:
    ended = person(tmp_path, "run", "--help")
    assert ended.code == 0 and "--weight-budget" in ended.out and ended.err == ""
