"""The adapter `command` against small programs: what they are given, what is made of text and JSON, hostile output."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jobs.adapters import child, command
from jobs.adapters.base import RunOrder, RunPlace, RunResult
from jobs.adapters.command import CommandAdapter
from jobs.adapters.command_reads import Unread, mapped
from jobs.adapters.native_forced import ForceOrder, adjudicate
from jobs.gates import GATING, UNDECLARED
from jobs.model import ArmPlan, CellPlan, Missing, RunRecord, RunSettings
from jobs.near_tie import FollowUp
from jobs.provenance import SHELL
from jobs.reads import Figure, Reads
from jobs.whole_trees import program_digest

UUID = "SIM-test-0"
HELLO = '{"type": "hello", "protocol": 1, "device": {"uuid": "SIM-test-0"}}'
GENERATION = '{"type": "generation", "index": 0, "warmup": false, "ids": [5, 6, 7], "stop_reason": "length"}'
RESULT = '{"type": "result", "counters": {"htod_bytes": 12, "of_my_own": 3}}'
DEVICE = {"kind": "sim", "uuid": UUID}
JSON = Reads(
    format="json",
    generations="runs",
    ids="out.tokens",
    stop="why",
    prefill=Figure(at="ttft", unit="ms"),
    steps=Figure(at="itl", unit="us"),
    counters={"htod_bytes": Figure(at="copied.0", unit="KiB"), "page_ins": Figure(at="n", unit="count")},
    config={"weight_budget": "budget"},
)
DOCUMENT: dict[str, Any] = {
    "runs": [{"out": {"tokens": [5, 6, 7]}, "why": "length", "ttft": 1.5, "itl": [2, 3.5]}] * 3,
    "copied": [2.5],
    "n": 7,
    "budget": 4096,
}


def order_for(
    tmp_path: Path, text: str, *, reads: Reads | None = None, counters: tuple[str, ...] = (), timeout_s: float = 20
) -> RunOrder:
    tree = tmp_path / "tree"
    tree.mkdir(exist_ok=True)
    (tree / "here").write_text("")
    arm = ArmPlan(
        name="head",
        role="head",
        source="path",
        adapter="command",
        tree_digest=program_digest(tree),
        python_path=str(tree),
        command=(*SHELL, text),
        env={"MINE": "of the arm"},
        counters=counters,
        reads=reads,
    )
    cell = CellPlan(
        cell="m/p",
        model="m",
        model_path="/models/m",
        model_digest="d" * 64,
        prompt="p",
        prompt_ids=(1, 2),
        config={"policy": "lru"},
        settings=RunSettings(tokens=3, generations=1),
        arms=("head",),
    )
    return RunOrder("run_1", "att_1", 1, cell, arm, UUID, timeout_s)


def run(tmp_path: Path, order: RunOrder) -> RunResult:
    scratch = tmp_path / "scratch"
    scratch.mkdir(exist_ok=True)
    environ = {"PATH": "/usr/bin:/bin", "ASSAY_STORE": "postgresql://secret", "GITHUB_TOKEN": "secret"}
    adapter = CommandAdapter(models=lambda _folder: "d" * 64)
    return adapter.run(order, RunPlace(scratch, environ, lambda: "2026-01-01T00:00:00Z"))


def printed(*lines: str) -> str:
    return "cat > $ASSAY_RESULT <<'end'\n" + "\n".join(lines) + "\nend\n"


def record_of(done: RunResult) -> RunRecord:
    assert (done.end, done.reason) == ("measured", "")
    assert done.record is not None
    return done.record


@pytest.mark.parametrize("kind", ["oracle", "lock"])
def test_a_program_whose_model_is_a_file_cannot_be_forced_and_that_alone_is_said(tmp_path: Path, kind: str) -> None:
    """Nothing could be built again: no oracle reads what only the program can."""
    (tmp_path / "model.bin").write_bytes(b"theirs")
    order = order_for(tmp_path, "true")
    cell = order.cell.model_copy(update={"model_path": str(tmp_path / "model.bin")})
    own = {"cell": "c", "base": order.arm.name, "head": order.arm.name, "card": "SIM-0", "first": 0}
    asked = FollowUp.model_validate({**own, "kind": kind, "prompt_ids": (1,), "base_ids": (1,), "head_ids": (2,)})
    answer = adjudicate(ForceOrder(asked, cell, order.arm, order.arm, 5.0), RunPlace(tmp_path, {}, str))
    assert answer.failure == f"the engine of {order.arm.name} is run by command, which cannot force ids"


def test_lines_become_a_record_and_what_is_not_counted_has_its_reason(tmp_path: Path) -> None:
    order = order_for(tmp_path, printed(HELLO, GENERATION, RESULT), counters=("htod_bytes", "page_ins"))
    record = record_of(run(tmp_path, order))
    assert [g.ids for g in record.generations] == [(5, 6, 7)]
    assert (record.counters["htod_bytes"], record.counters["of_my_own"]) == (12, 3)
    assert record.counters["page_ins"] == command.UNTOLD
    assert {name for name, value in record.counters.items() if value == Missing(missing=UNDECLARED)} == GATING - {
        "htod_bytes"
    }
    assert record.device["kind"] == "sim" and record.engine_digest == order.arm.tree_digest


def test_a_program_is_given_its_request_and_no_secret(tmp_path: Path) -> None:
    order = order_for(
        tmp_path, 'env > "$ASSAY_SCRATCH/env"; pwd > "$ASSAY_SCRATCH/pwd"; cp $ASSAY_REQUEST "$ASSAY_SCRATCH/r"'
    )
    assert run(tmp_path, order).end == "failed"
    told = dict(line.partition("=")[::2] for line in (tmp_path / "scratch/env").read_text().splitlines())
    documented = set(re.findall(r"`(ASSAY_[A-Z_]+)`", (Path(__file__).parents[2] / "docs/adapters.md").read_text()))
    assert documented == {name for name in told if name.startswith("ASSAY_")} - {"ASSAY_CHILD"}
    assert told["ASSAY_PROMPT_IDS"] == "1 2" and told["ASSAY_TOKENS"] == "3" and told["ASSAY_IGNORE_EOS"] == "0"
    assert json.loads(told["ASSAY_CONFIG"]) == {"policy": "lru"}
    assert (told["ASSAY_DEVICE"], told["ASSAY_CARD"], told["MINE"]) == ("sim", UUID, "of the arm")
    assert "secret" not in str(told) and "OMP_NUM_THREADS" not in told
    assert (tmp_path / "scratch/pwd").read_text().strip() == order.arm.python_path
    assert json.loads((tmp_path / "scratch/r").read_text())["prompt_ids"] == [1, 2]


def test_a_command_may_hold_braces(tmp_path: Path) -> None:
    order = order_for(tmp_path, "{ " + printed(HELLO, GENERATION, RESULT) + "}")
    assert run(tmp_path, order).end == "measured"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("true", "crash: no result; the log is empty"),
        ("echo oh no >&2; exit 7", "crash: exit 7; log ends: oh no"),
        ("exit 14", "out_of_memory: exit 14; the log is empty"),
        ("kill -SEGV $$", "crash: ended by signal 11"),
        ("no-such-program", "crash: exit 127"),
        ("head -c 100000 /dev/zero > $ASSAY_RESULT", "protocol: not a JSON line: cut off"),
        ("printf '\\377\\376\\n' > $ASSAY_RESULT", "protocol: not a JSON line"),
        (printed(HELLO, "[1, 2]"), "protocol: not a JSON object with a type"),
        (printed(HELLO, HELLO), "protocol: line of type 'hello' not understood: a second one"),
        (printed(GENERATION), "it stands before hello"),
        (printed(HELLO, GENERATION, RESULT, RESULT), "it stands after the result"),
        (
            printed(HELLO, '{"type": "error", "code": 0, "kind": "measured", "message": "fine"}'),
            "crash: measured: fine",
        ),
    ],
)
def test_output_that_cannot_be_used_is_named(tmp_path: Path, text: str, says: str) -> None:
    done = run(tmp_path, order_for(tmp_path, text))
    assert done.end == "failed" and says in done.reason
    assert done.record is not None and done.record.error == done.reason


def test_a_line_without_end_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MAX_LINE_BYTES", 1 << 20)
    done = run(tmp_path, order_for(tmp_path, "head -c 5000000 /dev/zero > $ASSAY_RESULT"))
    assert done.reason.startswith("protocol: longer than 1048576 bytes")


def test_a_program_that_forks_and_goes_is_followed(tmp_path: Path) -> None:
    done = run(tmp_path, order_for(tmp_path, printed(HELLO, GENERATION, RESULT) + "setsid sleep 60 & exit 0"))
    assert done.end == "measured" and len(done.leftovers) == 1


@pytest.mark.parametrize("reads", [None, JSON])
def test_a_program_that_hangs_is_ended(tmp_path: Path, reads: Reads | None) -> None:
    done = run(tmp_path, order_for(tmp_path, "sleep 60", reads=reads, timeout_s=0.5))
    assert (done.fault, done.retry) == ("timeout", True)


# ---- mappings ----------------------------------------------------------------------------------------------------


def test_json_is_read_by_its_mapping_and_exactly(tmp_path: Path) -> None:
    document = {**DOCUMENT, "runs": DOCUMENT["runs"][:1]}
    order = order_for(tmp_path, f"echo '{json.dumps(document)}'", reads=JSON, counters=("htod_bytes", "page_ins"))
    record = record_of(run(tmp_path, order))
    assert (record.counters["htod_bytes"], record.counters["page_ins"]) == (2560, 7)
    assert record.generations[0].prefill_ns == 1_500_000
    assert record.generations[0].step_ns == (2000, 3500)
    assert record.effective_config["weight_budget"]["value"] == 4096
    assert record.device["uuid"] == UUID


def test_the_first_generations_are_the_warm_ups() -> None:
    lines = mapped(json.dumps(DOCUMENT).encode(), JSON, 2, DEVICE).lines
    assert [(line["index"], line["warmup"]) for line in lines[1:-1]] == [(0, True), (1, True), (2, False)]


def test_a_rounded_figure_is_missing_with_its_reason(tmp_path: Path) -> None:
    document = {**DOCUMENT, "runs": DOCUMENT["runs"][:1], "copied": [2.51]}
    order = order_for(tmp_path, f"echo '{json.dumps(document)}'", reads=JSON, counters=("htod_bytes", "page_ins"))
    reading = record_of(run(tmp_path, order)).counters["htod_bytes"]
    assert reading == Missing(missing="2.51 KiB is not a whole number: the program rounds it")


def test_text_is_read_by_its_patterns() -> None:
    reads = Reads(
        format="text",
        ids=r"^tokens: (.*)$",
        prefill=Figure(at=r"after ([\d.]+) s", unit="s"),
        counters={"htod_bytes": Figure(at=r"copied (\d+) MiB", unit="MiB")},
        config={"policy": r"policy=(\w+)", "capture": r"capture=(\w+)"},
    )
    text = "policy=lru capture=true\ntokens: 5, 6 7\nafter 0.25 s\ntokens: 8\nafter 1 s\ncopied 3 MiB\n"
    hello, first, second, result = mapped(text.encode(), reads, 0, DEVICE).lines
    assert (first["ids"], second["ids"], first["prefill_ns"]) == ([5, 6, 7], [8], 250_000_000)
    assert result["counters"] == {"htod_bytes": 3 << 20}
    assert [entry["value"] for entry in hello["effective_config"].values()] == ["lru", True]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"runs": 3}, "generations: runs is no list"),
        ({"runs": [{}]}, "ids: no 'out' on the way to out.tokens"),
        ({"runs": [{"out": {"tokens": [1.5]}, "why": "length", "ttft": 1, "itl": []}]}, "no list of whole numbers"),
        ({"runs": [{"out": {"tokens": [True]}, "why": "length", "ttft": 1, "itl": []}]}, "no list of whole numbers"),
        ({"runs": [{"out": {"tokens": ["5"]}, "why": "length", "ttft": 1, "itl": []}]}, "no list of whole numbers"),
        ({"runs": [{"out": {"tokens": "5 6.0"}, "why": "length", "ttft": 1, "itl": []}]}, "no list of ids"),
        ({"runs": [{"out": {"tokens": "5 six"}, "why": "length", "ttft": 1, "itl": []}]}, "no list of ids"),
        ({"runs": [{"out": {"tokens": [2**70]}, "why": "length", "ttft": 1, "itl": []}]}, "ids.0 is beyond 64 bits"),
        ({"runs": [{"out": {"tokens": [1]}, "why": 3, "ttft": 1, "itl": []}]}, "stop: '3' is no word"),
        ({"runs": [{"out": {"tokens": [1]}, "why": "eos", "ttft": "soon", "itl": []}]}, "prefill: no number"),
        (
            {"runs": [{"out": {"tokens": [1]}, "why": "eos", "ttft": "2 or 900", "itl": []}]},
            "prefill: 2 numbers, and one is meant",
        ),
        ({"copied": []}, "htod_bytes: no '0' on the way to copied.0"),
        ({"copied": ["1e999999999"]}, "htod_bytes: '1e999999999' is no finite number"),
        ({"copied": [True]}, "htod_bytes: 'True' is no finite number"),
        ({"n": 2**70}, "counters.page_ins is beyond 64 bits"),
    ],
)
def test_a_place_that_holds_something_else_is_a_fault(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Unread, match=re.escape(says)):
        mapped(json.dumps({**DOCUMENT, **changes}).encode(), JSON, 0, DEVICE)


def test_a_member_that_stands_twice_is_a_fault_and_not_the_last_one() -> None:
    text = json.dumps(DOCUMENT)
    with pytest.raises(Unread, match="the member 'n' stands twice in one object"):
        mapped(f'{text[:-1]}, "n": 3}}'.encode(), JSON, 0, DEVICE)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (b"", "the output is no JSON document"),
        (b"\xff\xfe", "the output is not UTF-8 text: byte 0 is 0xff"),
        (b'{"n": NaN}', "NaN is no number"),
        (b"\xef\xbb\xbf{}", "the output is no JSON document"),
        ("{}".encode("utf-16-be"), "the output is no JSON document"),
        (b"{} {}", "the output is no JSON document"),
        (b"[" * 100_000, "the output is no JSON document"),
    ],
)
def test_output_that_is_no_document_is_a_fault(output: bytes, says: str) -> None:
    with pytest.raises(Unread, match=re.escape(says)):
        mapped(output, JSON, 0, DEVICE)


def test_a_figure_that_is_found_twice_is_a_fault() -> None:
    reads = Reads(format="text", ids=r"t (\d+)", counters={"hits": Figure(at=r"hits (\d+)", unit="count")})
    with pytest.raises(Unread, match="is found 2 times in the output, and not once"):
        mapped(b"t 1\nhits 2\nhits 3\n", reads, 0, DEVICE)


def test_places_that_are_found_unequally_often_are_a_fault() -> None:
    reads = Reads(format="text", ids=r"t (\d+)", prefill=Figure(at=r"ms (\d+)", unit="ms"))
    with pytest.raises(Unread, match="found 1 times, and another place of the mapping 2 times"):
        mapped(b"t 1\nt 2\nms 3\n", reads, 0, DEVICE)


def test_more_output_than_is_kept_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (child, command):
        monkeypatch.setattr(module, "MAX_OUTPUT_BYTES", 1000)
    done = run(tmp_path, order_for(tmp_path, "head -c 5000 /dev/zero", reads=JSON))
    assert done.reason.startswith("protocol: the program printed more than 1000 bytes")
