"""Sweep files that are refused: each mistake gives one line with file, line number, what is wrong and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.errors import SpecError
from jobs.spec import load

SOUND = """\
sweep: sound
models:
  toy: {build: tiny}
prompts:
  short: {ids: [1, 2]}
arms:
  base: {source: checkout, config: {policy: lru}}
  null: {like: base}
  head: {source: checkout, config: {policy: stable}}
matrix:
  weight_budget: ["50%"]
varies: [policy]
run:
  tokens: 8
witnesses:
  - {expr: "page_ins > 0"}
"""

HEAD = "source: checkout, config: {policy: stable}"
BASE = "  base: {source: checkout, config: {policy: lru}}\n"
LOCK = "locks: [{{prompt: {}, expected: 1, index: {}}}]\nwitnesses:"
TIE = "identity: {{near_ties: {}, ties: [{}]}}\nvaries:"
NULL = "  null: {like: base}\n"

# what is replaced, by what, the line that must be named, what the message must say, and the remedy
CASES = {
    "unknown key at the top": ("varies:", "varys:", 12, "unknown key 'varys' in the file", "did you mean 'varies'?"),
    "unknown key inside": ("  tokens: 8", "  tokens: 8\n  warmup: 1", 15, "unknown key 'warmup' in run", "'warmups'"),
    "unknown key of an arm": ("{like: base}", "{lik: base}", 8, "unknown key 'lik' in arms.null", "'like'"),
    "unknown key in a list": ('{expr: "page_ins > 0"}', "{exp: a}", 16, "unknown key 'exp' in witnesses[0]", "'expr'"),
    "missing key": ("  tokens: 8", "  generations: 1", 13, "run lacks the key 'tokens'", "add it"),
    "text for a number": ("tokens: 8", 'tokens: "8"', 14, "run.tokens: expected a whole number, got the text '8'", ""),
    "fraction for a whole number": ("tokens: 8", "tokens: 8.5", 14, "expected a whole number, got the number 8.5", ""),
    "number for text": ("sweep: sound", "sweep: 7", 1, "sweep: expected text, got the number 7", ""),
    "word for a boolean": ("tokens: 8", "tokens: 8\n  ignore_eos: yes", 15, "expected true or false, got the text", ""),
    "a value for a list": ("[1, 2]", "1", 5, "prompts.short.ids: expected a list, got the number 1", ""),
    "a list for a mapping": ("  tokens: 8", "  - 8", 13, "run: expected a mapping (name: value), got a list", ""),
    "unquoted null as a value": ("{like: base}", "{source: null}", 8, "'null' needs a source", "checkout, installed"),
    "null in a list": ('"page_ins > 0"}', '"page_ins > 0", arms: [null]}', 16, "expected text", "in quotes"),
    "wrong word": ("tokens: 8", "tokens: 8\n  device: gpu", 15, "expected 'auto', 'sim' or 'cuda', got", ""),
    "bad name": ("sweep: sound", "sweep: Sound one", 1, "sweep: ", ""),
    "bad arm name": ("  head:", "  Head 2:", 9, "the name 'Head 2' is not allowed", "names hold a-z"),
    "empty prompt": ("[1, 2]", "[]", 5, "the prompt 'short' is empty", "at least one token id"),
    "empty prompt text": ("{ids: [1, 2]}", '{text: ""}', 5, "prompts.short.text is empty", ""),
    "no prompt at all": ("{ids: [1, 2]}", "{}", 5, "'short' needs one of ids, text and length", ""),
    "two prompts in one": ("{ids: [1, 2]}", "{ids: [1], text: a}", 5, "needs one of ids, text and length", ""),
    "negative id": ("[1, 2]", "[1, -2]", 5, "prompts.short.ids[1] is -2", "0 or more is needed"),
    "zero tokens": ("tokens: 8", "tokens: 0", 14, "run.tokens is 0", "1 or more is needed"),
    "zero generations": ("tokens: 8", "tokens: 8\n  generations: 0", 15, "run.generations is 0", "1 or more"),
    "no time at all": ("varies: [policy]", "varies: [policy]\nlimits: {run_timeout_s: 0}", 13, "is 0", "more than 0"),
    "negative budget": ('["50%"]', "[-1]", 11, "weight_budget is -1", "above zero"),
    "zero share": ('["50%"]', '["0%"]', 11, "weight_budget is '0%'", "above 0%"),
    "more than all": ('["50%"]', '["150%"]', 11, "weight_budget is '150%'", "up to 100%"),
    "unknown policy": ("policy: stable}", "policy: stabel}", 9, "unknown policy 'stabel'", "stable"),
    "capture as a word": ("policy: stable}", "capture: on}", 9, "capture is 'on'", "true or false"),
    "odd granule": ("policy: stable}", "granule: 5000}", 9, "granule is 5000", "power of two"),
    "unknown config name": ("policy: stable}", "polcy: stable}", 9, "unknown engine config 'polcy'", "'policy'"),
    "a list as a config value": ("policy: stable}", "policy: [a]}", 9, "expected one value", ""),
    "unknown axis": ("  weight_budget:", "  weight_buget:", 11, "unknown matrix axis", "'weight_budget'"),
    "empty axis": ('["50%"]', "[]", 11, "matrix.weight_budget is empty", ""),
    "one value for an axis": ('["50%"]', '"50%"', 11, "expected a list", ""),
    "twice the same value": ('["50%"]', '["50%", "50%"]', 11, "'50%' stands twice", "remove one"),
    "unknown model": ("matrix:", "matrix:\n  model: [toi]", 11, "no model 'toi'", "did you mean 'toy'?"),
    "unknown prompt": ("matrix:", "matrix:\n  prompt: [long]", 11, "no prompt 'long'", "known: short"),
    "axis and arm": ("matrix:", "matrix:\n  policy: [lru]", 7, "'policy' is also in the matrix", "keep one of the two"),
    "axis and varies": ("[policy]", "[policy, weight_budget]", 12, "both in varies and in the matrix", "remove one"),
    "unknown factor": ("[policy]", "[polisy]", 12, "unknown factor 'polisy' in varies", "'policy'"),
    "no source": ("{like: base}", "{}", 8, "arm 'null' needs a source", "like: ARM"),
    "unknown source": (HEAD, "source: main", 9, "unknown source 'main'", "git:REF"),
    "ref without a name": (HEAD, 'source: "git:"', 9, "names no ref", "git:NAME"),
    "like nobody": ("{like: base}", "{like: bass}", 8, "no arm 'bass'", "did you mean 'base'?"),
    "like each other": ("{like: base}", '{like: "null"}', 8, "is like itself", "a source"),
    "base not first": (BASE + NULL, NULL + BASE, 7, "not the base", "first"),
    "two heads": ("  head:", "  other: {like: head, role: head}\n  head:", 10, "both have the role head", "variant"),
    "an uneven null": ("{like: base}", "{like: base, config: {policy: stable}}", 8, "differs from", "{like: base}"),
    "an unnamed difference": ("varies: [policy]", "varies: []", 9, "differs from base in policy", "varies: [policy]"),
    "an unnamed environment": ("policy: stable}", "policy: stable}, env: {A: b}", 9, "in env", "varies: [env]"),
    "environment name": ("policy: stable}", "policy: stable}, env: {A-B: b}", 9, "'A-B' is not an", "rename"),
    "unknown adapter": ("{like: base}", "{like: base, adapter: llama}", 8, "unknown adapter 'llama'", "'llama.cpp'?"),
    "a model without origin": ("{build: tiny}", "{}", 3, "'toy' needs one of build and path", ""),
    "a seed for a folder": ("{build: tiny}", "{path: x, seed: 1}", 3, "seed goes with build", "remove it"),
    "unknown counter": ("page_ins > 0", "page_inns > 0", 16, "unknown counter 'page_inns'", "did you mean 'page_ins'?"),
    "not a condition": ("page_ins > 0", "page_ins", 16, "is a number, not a condition", "> 0"),
    "not an expression": ("page_ins > 0", "page_ins >", 16, "cannot read", "page_ins > 0"),
    "a call": ("page_ins > 0", "exit() > 0", 16, "is not allowed", ""),
    "unknown arm of a witness": ('0"}', '0", arms: [haed]}', 16, "no arm 'haed'", "did you mean 'head'?"),
    "lock past the end": ("witnesses:", LOCK.format("short", 8), 15, "index 8", "0 to 7"),
    "lock on nothing": ("witnesses:", LOCK.format("shrt", 0), 15, "no prompt", "'short'"),
    "a margin upside down": ("witnesses:", LOCK.format("short", "0, margin: [2.0, 1.0]"), 15, "[2, 1] is no", "0.05"),
    "a margin below none": ("witnesses:", LOCK.format("short", "0, margin: [-1.0, 1.0]"), 15, "[-1, 1] is", "from 0"),
    "one block to screen": ("varies:", "blocks: {count: 1, deciding: 16}\nvaries:", 12, "too few", "2 or more"),
    "three blocks to decide": ("varies:", "blocks: {deciding: 3}\nvaries:", 12, "blocks.deciding is 3", "4 or more"),
    "a scope over batches": (
        "varies:", "identity: {scope: [card]}\nvaries:", 12, "the matrix has fewer than two", "name batch in it",
    ),
    "follow ups below none": ("varies:", "limits: {follow_ups: -1}\nvaries:", 12, "follow_ups is -1", "0 or more"),
    "no gate at all": (
        "varies:", "gate: {identity: off, exact: off, time: off}\nvaries:", 12, "every gate is off", "block or advise",
    ),
    "a minimum for a full comparison": (
        "varies:", "identity: {min_tokens: 4}\nvaries:", 12, "goes with compare: prefix", "every token",
    ),
    "a minimum past the end": (
        "varies:", "identity: {compare: prefix, min_tokens: 9}\nvaries:", 12, "9 is more than run.tokens 8", "fewer",
    ),
    "ties that are not listed": ("varies:", TIE.format("listed", ""), 12, "no near tie is listed", "near_ties: refuse"),
    "a list that counts for nothing": (
        "varies:", TIE.format("allow", "{prompt: short, index: 0, ids: [1, 2], reason: x}"), 12,
        "ties goes with near_ties: listed", "near_ties: listed",
    ),
    "a tie of nothing": (
        "varies:", TIE.format("listed", "{prompt: shrt, index: 0, ids: [1, 2], reason: x}"), 12, "no prompt", "'short'",
    ),
    "a tie past the end": (
        "varies:", TIE.format("listed", "{prompt: short, index: 8, ids: [1, 2], reason: x}"), 12, "index 8", "0 to 7",
    ),
    "a tie of one id": (
        "varies:", TIE.format("listed", "{prompt: short, index: 0, ids: [1], reason: x}"), 12, "ids", "",
    ),
    "a tie of an id with itself": (
        "varies:", TIE.format("listed", "{prompt: short, index: 0, ids: [1, 1], reason: x}"), 12, "twice", "once each",
    ),
    "a tie without a reason": (
        "varies:", TIE.format("listed", "{prompt: short, index: 0, ids: [1, 2]}"), 12, "lacks the key 'reason'", "add",
    ),
    "missing expectations": ("varies:", "expectations: no.yaml\nvaries:", 12, "cannot read", "create it"),
    "gate": ("varies:", "gate: {time: warn}\nvaries:", 12, "gate.time: expected 'block', 'advise' or 'off'", ""),
    "scope": ("varies:", "identity: {scope: [host]}\nvaries:", 12, "expected 'batch', 'card' or 'driver'", ""),
    "too many blocks": ("varies:", "blocks: {count: 100000}\nvaries:", 12, "blocks.count is 100000", "1000 or less"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_gives_one_line_with_place_and_remedy(tmp_path: Path, case: str) -> None:
    old, new, line, message, remedy = CASES[case]
    assert SOUND.count(old) == 1, "the case no longer fits the file"
    path = tmp_path / "sweep.yaml"
    path.write_text(SOUND.replace(old, new), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}:{line}: "), text
    assert message in text
    assert remedy in caught.value.remedy
    assert "\n" not in text
    assert caught.value.exit_code == 2


def test_the_file_that_the_cases_spoil_is_sound(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(SOUND, encoding="utf-8")
    assert load(path).form.run.tokens == 8


def test_several_mistakes_are_told_at_once_in_the_files_order(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text(SOUND.replace("tokens: 8", "tokens: 0").replace("{build: tiny}", "{bild: tiny}"), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        load(path)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{path}:3", f"{path}:14"]
    assert caught.value.line == 3
    assert len(caught.value.others) == 1


def test_one_arm_compares_with_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    text = SOUND.replace("  null: {like: base}\n", "").replace(
        "  head: {source: checkout, config: {policy: stable}}\n", ""
    )
    path.write_text(text, encoding="utf-8")
    with pytest.raises(SpecError, match=r":6: one arm compares with nothing \(add head"):
        load(path)


def test_a_matrix_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    many = ", ".join(map(str, range(1, 202)))
    path.write_text(SOUND.replace('weight_budget: ["50%"]', f"vram_limit: [{many}]\n  kv_capacity: [{many}]"))
    with pytest.raises(SpecError, match=r":10: the matrix has 40401 cells"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("- metric: htod_bytes\n", "expected a mapping", "docs/sweep-file.md"),
        ("expectations: [{metric: htod_bites, reason: r}]\n", "unknown metric 'htod_bites'", "'htod_bytes'"),
        ("expectations: [{metric: htod_bytes}]\n", "lacks the key 'reason'", "add it"),
        *(
            (f"expectations: [{{metric: {metric}, reason: r}}]\n", f"{metric} {words}", remedy)
            for metric, words, remedy in (
                ("htod_bytes_per_token", "does not gate", "declare htod_bytes"),
                ("byte_hit_rate", "does not gate", "declare htod_bytes"),
                ("page_ins", "does not gate", "those that do: alloc_calls_steady, "),
                ("decode_ms_per_token", "is a time: only exact counters can be declared", "gate.time"),
            )
        ),
    ],
)
def test_a_mistake_in_the_expectations_points_into_their_file(
    tmp_path: Path, text: str, message: str, remedy: str
) -> None:
    (tmp_path / "changes.yaml").write_text(text)
    path = tmp_path / "sweep.yaml"
    path.write_text(SOUND + "expectations: changes.yaml\n")
    with pytest.raises(SpecError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{tmp_path}/changes.yaml:1: ")
    assert message in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"sweep: \xff\xfe", "not UTF-8"),
        (b"", "expected a mapping (name: value), got nothing"),
        (b"just words", "got the text 'just words'"),
        (b"sweep: a\n\tmodels: b\n", "cannot start any token"),
        (b"sweep: a\nmodels: {x: [\n", "sweep.yaml:3: "),
    ],
)
def test_a_file_that_is_no_sweep(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "sweep.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load(path)
    assert message in str(caught.value)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="Is a directory"):
        load(tmp_path)


def test_a_scope_over_batches_is_taken_where_the_matrix_has_two(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    narrower = SOUND.replace("varies:", "identity: {scope: [driver]}\nvaries:")
    path.write_text(narrower.replace('["50%"]', '["50%"]\n  batch: [1, 2]'), encoding="utf-8")
    assert load(path).form.identity.scope == ("driver",)
    path.write_text(narrower.replace('["50%"]', '["50%"]\n  batch: [2, 2]'), encoding="utf-8")
    with pytest.raises(SpecError):
        load(path)
