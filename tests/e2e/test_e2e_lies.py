"""Engines that lie through the adapter `command`: each lie runs the whole way, and gets its class and exit code.

Base is an honest program, head the same with one lie (tests/fakes/harness.py); what stands in a record was printed by a
process, judged and rendered.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.zoo.tiny import build_tiny
from jobs.errors import SpecError
from jobs.spec import load
from jobs.verdict import Verdict
from orchestrator.conclude import Concluded
from orchestrator.selftest.stage import Stage

HARNESS = Path(__file__).parents[1] / "fakes" / "harness.py"
COUNTERS = (
    "touches, hits, hit_bytes, page_ins, retained_page_ins, retained_bytes, bypassed_page_ins, bypassed_page_in_bytes, "
    "staged_page_ins, staged_bytes, htod_bytes, device_htod_bytes, segments, captures, replays, emitted_tokens"
)
SWEEP = """\
sweep: lies
models: {{tiny: {{path: {model}}}}}
prompts: {{p: {{ids: [1, 17, 42, 99]}}}}
arms:
  base: {{source: "path:{base}", adapter: command, command: "{python} -I -S harness.py", counters: [{counters}]}}
  head: {{like: base, source: "path:{head}"}}
run: {{tokens: 12, generations: 2, warmups: 1, ignore_eos: true}}
witnesses: [{{expr: "page_ins > 0"}}, {{expr: "captures >= 1"}}]
limits: {{run_timeout_s: {timeout_s}, attempts: 1, queue_timeout_s: 5}}
"""
SAME = [7 * (index + 1) * 159 % 500 for index in range(12)]
WRONG_AT_7 = [*SAME[:7], (SAME[7] + 1) % 500, *SAME[8:]]
PAGED = 4 * 24
BYTES = PAGED * 4096

Play = Callable[..., Concluded]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary of 512."""
    return build_tiny(7, tmp_path_factory.mktemp("lies") / "tiny").folder


@pytest.fixture
def play(tmp_path: Path, model: Path) -> Play:
    """A sweep of an honest base and a head with a lie."""

    def played(head: dict[str, Any], base: dict[str, Any] | None = None, timeout_s: float = 20) -> Concluded:
        trees = {}
        for name, lie in (("base", base or {}), ("head", head)):
            trees[name] = tmp_path / name
            trees[name].mkdir()
            shutil.copyfile(HARNESS, trees[name] / "harness.py")
            (trees[name] / "lie.json").write_text(json.dumps(lie))
        text = SWEEP.format(model=model, python=sys.executable, counters=COUNTERS, timeout_s=timeout_s, **trees)
        return Stage(tmp_path / "stage", {"PATH": os.environ["PATH"]}).play("lies", text)

    return played


def messages(verdict: Verdict) -> str:
    return "\n".join(f"{f.outcome} {f.exit_code} {f.arm}: {f.message}" for f in verdict.findings)


def expect(done: Concluded, outcome: str, code: int, says: str) -> None:
    """The verdict, the finding that names it, and that the comment shows both."""
    verdict = done.verdict
    assert (verdict.outcome, verdict.exit_code) == (outcome, code), messages(verdict)
    assert any(f.outcome == outcome and says in f.message for f in verdict.findings), messages(verdict)
    assert outcome in done.comment.read_text()


def test_an_honest_program_passes(play: Play) -> None:
    done = play({})
    assert (done.verdict.outcome, done.verdict.exit_code, done.verdict.findings) == ("PASS", 0, ()), messages(
        done.verdict
    )
    rows = {row.metric: row for row in done.verdict.cells[0].exact}
    assert rows["htod_bytes"].gating and rows["htod_bytes"].base == BYTES
    assert not rows["step_kernels"].gating, "no arm says that it counts them"


RESULT_AGAIN = '{"type": "result", "counters": {}}\n'
GENERATION = '{"type": "generation", "index": %d, "warmup": false, "ids": [1], "stop_reason": "length"}\n'
ERROR = '{"type": "error", "code": 0, "kind": "%s", "message": "all is well"}\n'

HELLO = '{"type": "hello", "protocol": 1, "device": {"uuid": "SIM-host-0"}}\n'
WHOLE = f'{{"type": "generation", "index": %d, "warmup": false, "ids": {SAME}, "stop_reason": "length"}}\n'
CUT_OFF = WHOLE.replace('"length"', "null")

TOLD = {
    "a wrong token at 7": ({"generation": {"ids": WRONG_AT_7}}, "VIOLATION", 1, "at index 7"),
    "one byte more": (
        {"counters": dict.fromkeys(("htod_bytes", "device_htod_bytes", "bypassed_page_in_bytes"), BYTES + 1)},
        "REGRESSED",
        1,
        "htod_bytes rose by 1",
    ),
    "a missing counter": ({"counters": {"htod_bytes": None}}, "MISSING", 3, "htod_bytes"),
    "a counter that is NaN": (
        {"lines": {"result": '{"type": "result", "counters": {"htod_bytes": NaN}}\n'}},
        "REGRESSED",
        1,
        "htod_bytes is not finite",
    ),
    "an early stop": (
        {
            "generation": {"ids": SAME[:5], "gaps": None, "step_ns": None, "stop_reason": "eos"},
            "counters": {"emitted_tokens": 10},
        },
        "SHORT",
        1,
        "stops after 5",
    ),
    "counters that do not close": ({"counters": {"hits": 47}}, "BROKEN_INVARIANT", 1, "hits + page_ins == touches"),
    "captures, and none was made": ({"counters": {"segments": 0}}, "BROKEN_INVARIANT", 1, "no captured segment"),
    "tokens of base, and no work": (
        {"counters": {**dict.fromkeys(COUNTERS.split(", "), 0), "emitted_tokens": 24}},
        "VACUOUS",
        3,
        "page_ins > 0",
    ),
}
UNTOLD = {
    "one byte more on one side of the books": (
        {"counters": {"htod_bytes": BYTES + 1}},
        "BROKEN_INVARIANT",
        1,
        "htod_bytes == retained_bytes",
    ),
    "a negative counter": ({"counters": {"hits": -1}}, "BROKEN_INVARIANT", 1, "hits is -1"),
    "half an event": ({"counters": {"hits": 47.5}}, "BROKEN_INVARIANT", 1, "hits is 47.5"),
    "a count beyond 64 bits": ({"counters": {"htod_bytes": 2**63}}, "REGRESSED", 1, "beyond 64 bits"),
    "a count as text": ({"counters": {"htod_bytes": "393216"}}, "REGRESSED", 1, "counters.htod_bytes"),
    "a count that is true": ({"counters": {"segments": True}}, "REGRESSED", 1, "counters.segments"),
    "a missing counter that does not gate": ({"counters": {"touches": None}}, "MISSING", 3, "did not give touches"),
    "bytes in KiB": (
        {
            "counters": {
                "htod_bytes": BYTES // 1024 // 64,
                "device_htod_bytes": BYTES // 1024 // 64,
                "bypassed_page_in_bytes": BYTES // 1024 // 64,
            }
        },
        "BROKEN_INVARIANT",
        1,
        "each carries a byte at least",
    ),
    "bytes without a page-in": (
        {"counters": {"staged_bytes": 4096, "htod_bytes": BYTES + 4096, "device_htod_bytes": BYTES + 4096}},
        "BROKEN_INVARIANT",
        1,
        "staged_page_ins is 0",
    ),
    "fewer tokens counted than given": ({"counters": {"emitted_tokens": 23}}, "BROKEN_INVARIANT", 1, "ids given out"),
    "a gap that is infinite": (
        {"generation": {"gaps": [1e999] * 12}},
        "REGRESSED",
        1,
        "is not finite",
    ),
    "logits that are no numbers, by its own word": (
        {"lines": {"0": "", "1": "", "2": "", "result": ""}, "exit": 15},
        "VIOLATION",
        1,
        "non_finite",
    ),
    "a generation twice": (
        {"lines": {"end": ""}, "generation": {"index": 1}, "at": 2},
        "REGRESSED",
        1,
        "generation 2 a second time",
    ),
    "generations in another order": ({"swap": True}, "REGRESSED", 1, "generation 2 stands after generation 3"),
    "a generation too few": (
        {"lines": {"2": ""}, "counters": {"emitted_tokens": 12}},
        "MISSING",
        3,
        "1 of 2 measured generations given",
    ),
    "a warm-up that is none": (
        {"generation": {"warmup": True}, "at": 1, "counters": {"emitted_tokens": 12}},
        "MISSING",
        3,
        "2 of 1 warm-up given",
    ),
    "generations that do not count from 0": (
        {"generation": {"index": 5}, "at": 2},
        "MISSING",
        3,
        "do not count from 0",
    ),
    "a token outside the vocabulary": (
        {"generation": {"ids": [*SAME[:11], 512]}},
        "REGRESSED",
        1,
        "vocabulary, which ends at 511",
    ),
    "a token below zero": ({"generation": {"ids": [-1, *SAME[1:]]}}, "REGRESSED", 1, "a negative id"),
    "tokens that are text": ({"generation": {"ids": "7"}}, "REGRESSED", 1, "ids"),
    "more tokens than asked": (
        {"generation": {"ids": [*SAME, 1], "gaps": None, "step_ns": None}, "counters": {"emitted_tokens": 26}},
        "LONG",
        1,
        "runs on to 13",
    ),
    "an end id at full length": ({"generation": {"stop_reason": "eos"}}, "SHORT", 1, "ends by eos"),
    "other tokens after a warm-up": ({"generation": {"ids": WRONG_AT_7}, "at": 2}, "VIOLATION", 1, "index 7"),
    "two results": ({"lines": {"end": RESULT_AGAIN}}, "REGRESSED", 1, "stands after the result"),
    "tokens after the result": ({"lines": {"end": GENERATION % 3}}, "REGRESSED", 1, "stands after the result"),
    "tokens before hello": ({"lines": {"hello": ""}}, "REGRESSED", 1, "stands before hello"),
    "hello of another version": ({"hello": {"protocol": 7}}, "REGRESSED", 1, "speaks protocol 7"),
    "another card": ({"hello": {"device": {"uuid": "SIM-else-0"}}}, "INFRASTRUCTURE", 4, "SIM-else-0"),
    "another kind of card": ({"hello": {"device": {"uuid": "", "kind": "cuda"}}}, "INFRASTRUCTURE", 4, "expected SIM-"),
    "another model": ({"hello": {"model": {"digest": "f" * 64}}}, "INFRASTRUCTURE", 4, "read model ffffffffffff"),
    "nothing was computed": (
        {"hello": {"device": {"uuid": "x", "kind": "plan"}}},
        "INFRASTRUCTURE",
        4,
        "computed nothing",
    ),
    "steps of no time": ({"generation": {"step_ns": [0] * 11}}, "BROKEN_INVARIANT", 1, "a step took 0 ns"),
    "a negative time": ({"generation": {"step_ns": [1000] * 10 + [-1]}}, "BROKEN_INVARIANT", 1, "a negative time"),
    "slow steps left out": ({"generation": {"step_ns": [1000] * 3}}, "BROKEN_INVARIANT", 1, "3 steps were timed"),
    "more time than the clock": (
        {"generation": {"prefill_ns": 10**12}},
        "BROKEN_INVARIANT",
        1,
        "by the worker's clock",
    ),
    "an equation that does not hold": (
        {
            "result": {
                "equations": [{"name": "W1", "text": "a == b", "relation": "==", "lhs": 1, "rhs": 2, "holds": True}]
            }
        },
        "BROKEN_INVARIANT",
        1,
        "the engine says holds = True, its numbers say False",
    ),
    "captures, and no graph has a node": (
        {"counters": {"graph_nodes": 0, "invalidations": 0}},
        "BROKEN_INVARIANT",
        1,
        "and none has a node",
    ),
    "more replays than steps": ({"counters": {"decode_steps": 21}}, "BROKEN_INVARIANT", 1, "of 21 one-token steps"),
    "a peak below what is held": (
        {"counters": {"content_resident_bytes": 9000, "peak_resident_bytes": 8192}},
        "BROKEN_INVARIANT",
        1,
        "peak_resident_bytes is 8,192",
    ),
    "a key read less than never": (
        {"result": {"keys": [{"key": "w", "nbytes": 4096, "hits": -1}]}},
        "BROKEN_INVARIANT",
        1,
        "key w: hits is -1",
    ),
    "gaps below zero": ({"generation": {"gaps": [-1.0] * 12}}, "BROKEN_INVARIANT", 1, "the least -1.0"),
    "gaps of other ids": ({"generation": {"gaps": [1.0] * 9}}, "BROKEN_INVARIANT", 1, "9 top-2 gaps of 12 ids"),
    "another driver": ({"driver": "2"}, "NOT_COMPARABLE", 3, "card's driver is 1 in base and 2 in head"),
    "a setting that base does not have": (
        {"hello": {"effective_config": {"capture": False}}},
        "NOT_COMPARABLE",
        3,
        "capture is absent in base and False in head",
    ),
    "graphs that ran nothing": (
        {"counters": {"kernel_runs": 90, "eager_launches": 90}},
        "BROKEN_INVARIANT",
        1,
        "ran outside a graph",
    ),
    "an error that calls itself measured": (
        {"lines": {"result": ERROR % "measured"}},
        "REGRESSED",
        1,
        "crash: measured",
    ),
    "an error that calls itself cancelled": (
        {"lines": {"result": ERROR % "cancelled"}},
        "REGRESSED",
        1,
        "crash: cancelled",
    ),
    "an error that blames the host": ({"lines": {"result": ERROR % "provenance"}}, "REGRESSED", 1, "crash: provenance"),
    "no result": ({"lines": {"result": ""}}, "REGRESSED", 1, "no result"),
    "a result, and exit 3": ({"exit": 3}, "REGRESSED", 1, "exit 3"),
    "a result, and a refusal": ({"exit": 13}, "REGRESSED", 1, "refused"),
    "a line that is cut off": ({"lines": {"result": '{"type": "result", "coun'}}, "REGRESSED", 1, "cut off"),
    "bytes that are no text": ({"lines": {"1": '{"type": "\u00ff\u00fe"}\n'}}, "REGRESSED", 1, "not a JSON line"),
    "a member twice": (
        {"lines": {"result": '{"type": "result", "counters": {"hits": 1, "hits": 2}}\n'}},
        "REGRESSED",
        1,
        "stands twice",
    ),
    "a crash": ({"kill": 11}, "REGRESSED", 1, "signal 11"),
    "an end that a host could have brought about": ({"kill": 9}, "INFRASTRUCTURE", 4, "signal 9"),
    "ids as text": ({"generation": {"ids": list(map(str, SAME))}}, "REGRESSED", 1, "ids.0"),
    "ids with a point": ({"generation": {"ids": list(map(float, SAME))}}, "REGRESSED", 1, "ids.0"),
    "an id that is true": ({"generation": {"ids": [*SAME[:11], True]}}, "REGRESSED", 1, "ids.11"),
    "no ids at all": ({"generation": {"ids": None}}, "REGRESSED", 1, "ids"),
    "an index that is true": ({"generation": {"index": True}, "at": 1}, "REGRESSED", 1, "index"),
    "an index below zero": ({"generation": {"index": -1}, "at": 0}, "MISSING", 3, "do not count from 0"),
    "a protocol that is true": ({"hello": {"protocol": True}}, "REGRESSED", 1, "protocol"),
    "a generation too many": (
        {"lines": {"2": WHOLE % 2 + WHOLE % 3}, "counters": {"emitted_tokens": 36}},
        "MISSING",
        3,
        "3 of 2 measured generations given",
    ),
    "a second sequence that nobody asked for": (
        {"generation": {"further": [{"ids": SAME, "stop_reason": "length"}]}, "counters": {"emitted_tokens": 48}},
        "MISSING",
        3,
        "2 of 1 sequences",
    ),
    "no stop at full length": ({"generation": {"stop_reason": None}}, "REGRESSED", 1, "stop_reason"),
    "a stop that is null": ({"lines": {"1": CUT_OFF % 1}}, "SHORT", 1, "stop not declared"),
    "a stop of its own": ({"generation": {"stop_reason": "done"}}, "REGRESSED", 1, "stop_reason"),
    "a wrong token that calls itself a tie": (
        {"generation": {"ids": WRONG_AT_7, "gaps": [0.0] * 12}},
        "VIOLATION",
        1,
        "base's gap there is 1",
    ),
    "a count of 1e400": (
        {"lines": {"result": '{"type": "result", "counters": {"htod_bytes": 1e400}}\n'}},
        "REGRESSED",
        1,
        "htod_bytes is not finite",
    ),
    "a count as huge as goes": (
        {"counters": dict.fromkeys(("htod_bytes", "device_htod_bytes", "bypassed_page_in_bytes"), 2**63 - 1)},
        "REGRESSED",
        1,
        "htod_bytes rose by",
    ),
    "a member twice, once in disguise": (
        {"lines": {"result": '{"type": "result", "counters": {"hits": 1, "h\\u0069ts": 2}}\n'}},
        "REGRESSED",
        1,
        "'hits' stands twice",
    ),
    "two objects on a line": (
        {"lines": {"end": '{"type": "progress"} {"type": "progress"}\n'}},
        "REGRESSED",
        1,
        "not a JSON line",
    ),
    "a byte order mark": ({"lines": {"hello": "\u00ef\u00bb\u00bf" + HELLO}}, "REGRESSED", 1, "not a JSON line"),
    "UTF-16, which a reader may guess": (
        {"lines": {"hello": HELLO.strip().encode("utf-16-be").decode("latin-1") + "\n"}},
        "REGRESSED",
        1,
        "not a JSON line",
    ),
    "a line that unfolds": ({"bomb": 9_000_000}, "REGRESSED", 1, "more than 16000000 values"),
    "nesting without end": (
        {"lines": {"end": '{"type": "x", "a": ' + "[" * 100_000 + "}\n"}},
        "REGRESSED",
        1,
        "nested deeper than",
    ),
    "a refusal, and exit 0": ({"lines": {"result": ERROR % "refused"}}, "REGRESSED", 1, "refused: all is well"),
    "a hello twice": ({"lines": {"0": HELLO}}, "REGRESSED", 1, "a second one"),
    "less than no memory": ({"result": {"peak_rss_bytes": -1}}, "BROKEN_INVARIANT", 1, "peak_rss_bytes is -1"),
    "the program of base is changed": ({"meddle": True}, "INFRASTRUCTURE", 4, "tree of arm base"),
}


@pytest.mark.parametrize(("lie", "outcome", "code", "says"), TOLD.values(), ids=TOLD)
def test_a_lie_gets_its_class_and_exit_code(
    play: Play, lie: dict[str, Any], outcome: str, code: int, says: str
) -> None:
    expect(play(lie), outcome, code, says)


@pytest.mark.slow
@pytest.mark.parametrize(("lie", "outcome", "code", "says"), UNTOLD.values(), ids=UNTOLD)
def test_so_does_one_that_nobody_told(play: Play, lie: dict[str, Any], outcome: str, code: int, says: str) -> None:
    expect(play(lie), outcome, code, says)


def test_what_base_does_too_proves_nothing_of_head(play: Play) -> None:
    lie = {"hello": {"protocol": 7}}
    expect(play(lie, lie), "MISSING", 3, "speaks protocol 7")


def test_a_program_that_hangs_is_ended_and_named(play: Play) -> None:
    expect(play({"sleep_s": 60}, timeout_s=2), "REGRESSED", 1, "timeout: running: no end within 2 s")


@pytest.mark.slow
def test_a_result_after_the_end_of_its_time_counts_for_nothing(play: Play) -> None:
    """It is told to end, gives the result of an honest run, and ends well."""
    expect(play({"sleep_s": 60, "last_word": True}, timeout_s=2), "REGRESSED", 1, "timeout: running: no end within 2 s")


def test_what_a_program_leaves_behind_is_ended_and_counts_for_nothing(play: Play) -> None:
    done = play({"fork": True})
    assert (done.verdict.outcome, done.verdict.exit_code) == ("PASS", 0), messages(done.verdict)


def test_noise_on_standard_output_is_log_and_no_line(play: Play) -> None:
    done = play({"print": "fffe00" + "41" * 5000 + "0a"})
    assert (done.verdict.outcome, done.verdict.exit_code) == ("PASS", 0), messages(done.verdict)


def test_a_program_that_changes_itself_is_not_what_was_planned(play: Play) -> None:
    """Its tree is looked at before and after each run."""
    expect(play({"write": "harness.pyc"}), "INFRASTRUCTURE", 4, "the file changed last is harness.pyc")


def test_what_two_arms_say_in_other_units_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """A mapping is the sweep file's word, and arms that differ in it are another measure."""
    figures = "reads: {{format: json, ids: ids, counters: {{htod_bytes: {{at: mib, unit: {unit}}}}}}}"
    text = SWEEP.replace("counters: [{counters}]", figures.format(unit="MiB").replace("{", "{{").replace("}", "}}"))
    head = figures.format(unit="B").replace("{", "{{").replace("}", "}}")
    text = text.replace('source: "path:{head}"', f'source: "path:{{head}}", {head}')
    file = tmp_path / "units.yaml"
    file.write_text(text.format(model="m", base="a", head="b", python="python", timeout_s=5))
    with pytest.raises(SpecError, match="arm 'head' differs from base in program"):
        load(file)
