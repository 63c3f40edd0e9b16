"""The native adapter against a stand-in engine: records, failures by class, and what the parent verifies itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.interrupt import INTERRUPTED
from engine.zoo import build, model_digest
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.model_files import ModelDigests, last_changed
from jobs.adapters.native import NativeAdapter, child_environment, request_document
from jobs.errors import SpecError
from jobs.model import ArmPlan, CellPlan, Missing, RunSettings
from jobs.provenance import own_root, tree_digest

FAKE = Path(__file__).parents[1] / "fakes" / "engine_main.py"
UUID = "SIM-test-0"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree whose `engine` is the stand-in."""
    package = tmp_path / "arm" / "engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    shutil.copyfile(FAKE, package / "__main__.py")
    return tmp_path / "arm"


def order_for(tree: Path, *, timeout_s: float = 20.0, digest: str | None = None, **wish: Any) -> RunOrder:
    arm = ArmPlan(
        name="head",
        role="head",
        source="path",
        tree_digest=tree_digest(tree) if digest is None else digest,
        python_path=str(tree),
        config={"policy": "stable"},
        env={"FAKE_ENGINE": json.dumps(wish)},
    )
    cell = CellPlan(
        cell="m/p",
        model="m",
        model_path="/models/m",
        model_digest="d" * 64,
        prompt="p",
        prompt_ids=(1, 2),
        config={"weight_budget": "50%", "policy": "lru"},
        settings=RunSettings(tokens=3, generations=2),
        arms=("head",),
    )
    return RunOrder("run_1", "att_1", 1, cell, arm, UUID, timeout_s)


def run(tmp_path: Path, order: RunOrder, models: Callable[[Path], str] | None = None, **place: Any) -> RunResult:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    environ = {"PATH": "/usr/bin:/bin", "ASSAY_STORE": "postgresql://secret", "GITHUB_TOKEN": "secret"}
    adapter = NativeAdapter(models=models or (lambda _folder: "d" * 64))
    return adapter.run(order, RunPlace(scratch, environ, lambda: "2026-01-01T00:00:00Z", **place))


def test_a_run_without_arithmetic_is_never_a_measurement(tmp_path: Path, tree: Path) -> None:
    lie = {"device": {"kind": "plan", "uuid": UUID}}
    done = run(tmp_path, order_for(tree, lie=lie, ids=[]))
    assert (done.end, done.retry) == ("failed", False)
    assert "without arithmetic" in done.reason


def test_a_good_run_becomes_a_complete_record(tmp_path: Path, tree: Path) -> None:
    heard: list[str] = []
    order = order_for(tree)
    done = run(tmp_path, order, on_progress=lambda line: heard.append(line["type"]))
    assert (done.end, done.reason) == ("measured", "")
    record = done.record
    assert record is not None
    assert (record.run_id, record.attempt_id, record.exit_code, record.error) == ("run_1", "att_1", 0, None)
    assert [g.ids for g in record.generations] == [(5, 6, 7), (5, 6, 7)]
    assert record.counters["page_ins"] == 8
    assert record.metrics["count_hit_rate"] == 0
    assert record.metrics["htod_bytes_per_token"] == pytest.approx(800 / 6)
    assert record.engine_digest == tree_digest(tree)
    assert record.effective_config["policy"] == {"value": "stable", "source": "request"}
    assert record.keys[0].bypassed == 8
    assert record.equations[0].holds
    assert "fake engine done" in record.log_tail
    assert heard == ["hello", "progress", "generation", "progress", "generation", "result"]


def test_arm_config_wins_over_the_cells(tree: Path) -> None:
    order = order_for(tree)
    document = request_document(order.cell, order.arm, UUID)
    assert document["config"] == {"weight_budget": "50%", "policy": "stable"}
    assert document["uuid"] == UUID


def test_each_arm_is_asked_for_its_own_batch(tree: Path) -> None:
    """As many prompts as it has sequences; the engine takes them in turn where there are fewer."""
    order = order_for(tree)
    cell = order.cell.model_copy(update={"further_prompts": ((3,), (4, 5)), "config": {"batch": 5}})
    asked = request_document(cell, order.arm, UUID)
    assert (asked["prompt_ids"], asked["further_prompts"], asked["config"]["batch"]) == ([1, 2], [[3], [4, 5]], 5)
    narrow = request_document(cell, order.arm.model_copy(update={"config": {"batch": 1}}), UUID)
    assert "further_prompts" not in narrow, "an older engine knows no such key"
    assert "further_prompts" not in request_document(order.cell, order.arm, UUID)


def test_every_sequence_of_a_batch_is_recorded(tmp_path: Path, tree: Path) -> None:
    further = '"further": [{"ids": [7, 8], "stop_reason": "eos", "gaps": [0.5, 0.25]}], '
    line = GENERATION.replace('"index": 0', '"index": 7').replace('"counters"', further + '"counters"')
    done = run(tmp_path, order_for(tree, spoil=line))
    assert done.record is not None
    [made] = [g for g in done.record.generations if g.index == 7]
    assert [(s.ids, s.stop_reason) for s in made.sequences] == [((1,), "length"), ((7, 8), "eos")]
    bad = run(tmp_path, order_for(tree, spoil=line.replace("[7, 8]", "[7, -8]")))
    assert bad.end == "failed" and "a negative id" in bad.reason


def test_an_error_keeps_the_tokens_of_every_sequence(tmp_path: Path, tree: Path) -> None:
    error = {"type": "error", "code": 15, "kind": "non_finite", "message": "x", "ids": [4], "further_ids": [[5, 6], []]}
    done = run(tmp_path, order_for(tree, spoil=json.dumps(error)))
    assert done.record is not None
    assert [s.ids for s in done.record.generations[-1].sequences] == [(4,), (5, 6), ()]
    assert done.record.generations[-1].stop_reason is None


@pytest.mark.parametrize("tree", [None, "/arms/head"])
@pytest.mark.parametrize("there", [True, False])
def test_an_installation_on_the_workers_import_path_is_the_childs_too_behind_its_tree(
    tree: str | None, there: bool
) -> None:
    """Where wheels were unpacked into a folder; any other folder there stays with the worker."""
    arm = ArmPlan(name="head", role="head", source="installed", python_path=tree)
    worker = ["/a", str(own_root()), "/b"] if there else ["/a", f"{own_root()}/deeper"]
    given = child_environment(arm, {"PYTHONPATH": os.pathsep.join(worker)})
    path = [*filter(None, given.get("PYTHONPATH", "").split(os.pathsep))]
    assert path == [*filter(None, [tree]), *([str(own_root())] if there else [])]
    assert ("PYTHONPATH" in given) is bool(tree or there)


def test_no_secret_of_the_worker_reaches_the_child(tmp_path: Path, tree: Path) -> None:
    run(tmp_path, order_for(tree, mark=str(tmp_path / "mark")))
    seen = (tmp_path / "mark").read_text()
    assert "PATH" in seen
    assert "OPENBLAS_NUM_THREADS" in seen
    assert "ASSAY_STORE" not in seen
    assert "TOKEN" not in seen


@pytest.mark.parametrize(
    ("code", "kind", "end", "retry"),
    [
        (10, "bad_request", "failed", False),
        (12, "unsupported", "failed", False),
        (13, "refused", "refused", False),
        (14, "out_of_memory", "failed", True),
        (15, "non_finite", "failed", False),
        (16, "device", "failed", True),
    ],
)
def test_error_lines_keep_their_class_and_what_was_counted(
    tmp_path: Path, tree: Path, code: int, kind: str, end: str, retry: bool
) -> None:
    error = {"code": code, "kind": kind, "message": "budget 10 below 20", "remedy": "raise it"}
    done = run(tmp_path, order_for(tree, error=error))
    assert (done.end, done.retry) == (end, retry)
    assert done.reason == f"{kind}: budget 10 below 20 (raise it)"
    assert done.record is not None
    assert done.record.exit_code == code
    assert done.record.counters == {"page_ins": 1}
    assert done.record.metrics == {}
    assert done.record.generations[-1].stop_reason is None


def test_a_crash_in_decode_is_a_crash_with_its_signal(tmp_path: Path, tree: Path) -> None:
    done = run(tmp_path, order_for(tree, die=signal.SIGSEGV))
    assert (done.end, done.retry) == ("failed", True)
    assert done.record is not None
    assert done.record.signal == signal.SIGSEGV
    assert "signal 11" in done.reason


def test_a_run_told_to_end_is_ended_by_its_signal_and_keeps_what_it_had_counted(tmp_path: Path, tree: Path) -> None:
    error = {"code": 143, "kind": INTERRUPTED, "message": "told to end by SIGTERM", "remedy": "run it again"}
    done = run(tmp_path, order_for(tree, error=error, die_last=signal.SIGTERM))
    assert (done.end, done.retry, done.reason) == ("failed", True, "crash: ended by signal 15")
    assert done.record is not None
    assert (done.record.signal, done.record.exit_code) == (signal.SIGTERM, None)
    assert done.record.counters == {"page_ins": 1} and done.record.generations[-1].ids == (5,)


def test_exit_zero_without_a_result_is_no_success(tmp_path: Path, tree: Path) -> None:
    done = run(tmp_path, order_for(tree, silent=True))
    assert (done.end, done.retry) == ("failed", True)
    assert "no result" in done.reason


def test_a_result_followed_by_a_failing_exit_is_no_success(tmp_path: Path, tree: Path) -> None:
    done = run(tmp_path, order_for(tree, exit=139))
    assert done.end == "failed"
    assert "exit 139" in done.reason


def test_the_deadline_is_enforced_by_the_parent(tmp_path: Path, tree: Path) -> None:
    done = run(tmp_path, order_for(tree, sleep_s=60, timeout_s=1.0))
    assert (done.end, done.retry) == ("failed", True)
    assert done.reason == "timeout: running: no end within 1 s"
    assert done.record is not None and done.record.error == done.reason


def test_an_engine_that_never_says_who_it_is_is_ended_at_its_start(tmp_path: Path, tree: Path) -> None:
    order = replace(order_for(tree, hang=True), start_timeout_s=1.5)
    done = run(tmp_path, order)
    assert (done.end, done.fault, done.retry) == ("failed", "timeout", True)
    assert re.fullmatch(r"timeout: spawning: no word within [12] s", done.reason)
    assert done.record is not None and done.record.error == done.reason


def test_a_stop_is_cancelled_and_not_failed(tmp_path: Path, tree: Path) -> None:
    done = run(tmp_path, order_for(tree, sleep_s=60), stopped=lambda: True)
    assert done.end == "cancelled"


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"module_path": "/usr/lib/other/engine/__init__.py"}, "imported from /usr/lib/other"),
        ({"protocol": 7}, "protocol 7"),
        ({"device": {"uuid": "GPU-other"}}, "card GPU-other"),
        ({"model": {"path": "x", "digest": "e" * 64}}, "read model eeee"),
    ],
)
def test_a_child_that_speaks_of_something_else_is_not_believed(
    tmp_path: Path, tree: Path, lie: dict[str, Any], words: str
) -> None:
    done = run(tmp_path, order_for(tree, lie=lie))
    assert (done.end, done.retry) == ("failed", False)
    assert words in done.reason


def test_a_tree_that_changed_since_submission_is_not_run(tmp_path: Path, tree: Path) -> None:
    order = order_for(tree, mark=str(tmp_path / "mark"))
    (tree / "engine" / "extra.py").write_text("")
    done = run(tmp_path, order)
    assert done.end == "failed"
    assert "changed since" in done.reason
    assert not (tmp_path / "mark").exists()


def test_a_missing_tree_is_a_failure_with_its_path(tmp_path: Path, tree: Path) -> None:
    order = order_for(tree)
    shutil.rmtree(tree)
    done = run(tmp_path, order)
    assert done.end == "failed"
    assert str(tree) in done.reason


def result_line(**fields: Any) -> str:
    return json.dumps({"type": "result", "counters": {}, **fields})


HELLO = '{"type": "hello", "protocol": 1, "module_path": "/x", "device": {"uuid": "SIM-test-0"}}'
GENERATION = (
    '{"type": "generation", "index": 0, "warmup": false, "ids": [1], "stop_reason": "length", "gaps": [1.0], '
    '"counters": {}, "prefill_ns": 1, "step_ns": []}'
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not a JSON line"),
        ("[1]", "not a JSON object with a type"),
        ('{"type": ["hello"]}', "not a JSON object with a type"),
        ("[" * 100_000, "nested deeper"),
        ('{"type": "result", "x": ' + "[" * 100 + "]" * 100 + "}", "nested deeper"),
        ('{"type": "result", "x": NaN}', "x is not finite"),
        ('{"type": "result", "counters": {"hits": 1e400}}', "counters.hits is not finite"),
        ('{"type": "generation", "gaps": [1.0, -1e999]}', "gaps.1 is not finite"),
        ('{"type": "result", "counters": {"hits": 9223372036854775808}}', "counters.hits is beyond 64 bits"),
        ('{"type": "result", "n": ' + "9" * 5000 + "}", "not a JSON line"),
        ('{"type": "progress", "phase": "\\ud800"}', "phase holds NUL or half a surrogate pair"),
        ('{"type": "progress", "\\u0000": 1}', "a name in the line holds NUL"),
        ('{"type": "result", "counters": {"hits": 1, "hits": 2}}', "'hits' stands twice"),
        ('{"type": "generation", "ids": [], "stop_reason": null, "index": "x"}', "index: "),
        (result_line(counters={"page_ins": "7"}), "counters.page_ins"),
        (result_line(counters={"page_ins": True}), "counters.page_ins"),
        (result_line(counters={"page_ins": None}), "counters.page_ins"),
        (result_line(peak_rss_bytes=1.5), "peak_rss_bytes"),
        (result_line(seams=7), "seams: not a list of rows"),
        (result_line(keys=[{"key": "w", "nbytes": "100"}]), "nbytes"),
        (result_line(equations=[1]), "equations: not a list of rows"),
        (GENERATION.replace("[1]", "[-1]"), "a negative id"),
        (GENERATION.replace("[1]", '["1"]'), "ids.0"),
        (GENERATION.replace("false", "0"), "warmup"),
        (GENERATION + "\n" + GENERATION, "generation 1 a second time"),
        ('{"type": "error", "code": 14}', "kind"),
        ('{"type": "error", "code": true, "kind": "device", "message": "x"}', "code"),
        ('{"type": "hello", "protocol": 1}', "a second one"),
        (HELLO, "a second one"),
        (result_line() + "\n" + result_line(), "it stands after the result"),
    ],
)
def test_a_line_that_cannot_be_used_fails_the_run_with_one_reason(
    tmp_path: Path, tree: Path, text: str, words: str
) -> None:
    done = run(tmp_path, order_for(tree, spoil=text))
    assert (done.end, done.retry) == ("failed", False)
    assert done.record is not None
    assert done.reason.startswith("protocol: ")
    assert words in done.reason
    assert len(done.reason.splitlines()) == 1
    assert len(done.reason) < 400
    done.record.canonical()


def test_field_67_a_counter_that_overflowed_is_missing_and_the_good_ones_are_kept(tmp_path: Path, tree: Path) -> None:
    spoil = '{"type": "result", "counters": {"hits": 5, "htod_bytes": 1e400, "ratio": 0.5, "page_ins": true}}'
    record = run(tmp_path, order_for(tree, spoil=spoil)).record
    assert record is not None
    assert {name: value for name, value in record.counters.items() if not isinstance(value, Missing)} == {
        "hits": 5,
        "ratio": 0.5,
    }
    assert set(record.counters) == {"hits", "htod_bytes", "ratio", "page_ins"}


def test_tokens_before_a_spoilt_line_are_kept(tmp_path: Path, tree: Path) -> None:
    done = run(tmp_path, order_for(tree, exit_line='{"type": "result", "counters": {"hits": -Infinity}}', silent=True))
    assert done.record is not None
    assert [g.ids for g in done.record.generations] == [(5, 6, 7), (5, 6, 7)]
    assert "hits is not finite" in done.reason


def test_a_result_without_hello_is_not_believed(tmp_path: Path, tree: Path) -> None:
    done = run(tmp_path, order_for(tree, lie={"type": "progress"}))
    assert done.reason.startswith("protocol: ")
    assert "before hello" in done.reason


def test_the_models_digest_is_the_parents_and_not_the_childs_word(tmp_path: Path, tree: Path) -> None:
    record = run(tmp_path, order_for(tree)).record  # the stand-in tells no digest
    assert record is not None
    assert record.model_digest == "d" * 64


def test_a_model_that_changed_since_submission_starts_no_child(tmp_path: Path, tree: Path) -> None:
    order = order_for(tree, mark=str(tmp_path / "mark"))
    done = run(tmp_path, order, models=lambda _folder: "e" * 64)
    assert (done.end, done.retry) == ("failed", False)
    assert done.reason.startswith("provenance: model m in /models/m has digest eeee")
    assert "changed since the sweep was submitted" in done.reason
    assert not (tmp_path / "mark").exists()


def test_a_model_that_changed_under_the_run_fails_it(tmp_path: Path, tree: Path) -> None:
    answers = iter(["d" * 64, "d" * 64, "e" * 64])
    done = run(tmp_path, order_for(tree), models=lambda _folder: next(answers))
    assert done.end == "failed"
    assert done.reason.startswith("provenance: model m")


def test_a_models_digest_is_read_again_only_when_a_file_changed_and_the_file_is_named(tmp_path: Path) -> None:
    folder = build("tiny", tmp_path / "tiny", cache_dir=tmp_path).folder
    digests = ModelDigests()
    first = digests(folder)
    assert first == model_digest(folder)
    assert digests(folder) == first
    data = next(path for path in folder.iterdir() if path.name.endswith(".data"))
    row, content = data.stat(), bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    os.utime(data, ns=(row.st_atime_ns, row.st_mtime_ns))  # same inode, size and mtime: the inode's own change tells
    assert digests(folder) != first
    assert data.name in last_changed(folder)
    with pytest.raises(SpecError, match="cannot be read"):
        digests(tmp_path / "nowhere")
