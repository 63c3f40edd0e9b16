"""The YAML reader: values, lines, and what it refuses to guess."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.spec.yaml_lines import read_lines


def read(text: str) -> object:
    return read_lines(text, "f.yaml").values


def test_lines_of_keys_and_items() -> None:
    source = read_lines("a:\n  - 1\n  - b: 2\n\nc: {d: 3,\n  e: 4}\n", "f.yaml")
    assert source.values == {"a": [1, {"b": 2}], "c": {"d": 3, "e": 4}}
    assert {path: source.line(path) for path in [("a",), ("a", 0), ("a", 1, "b"), ("c",), ("c", "e")]} == {
        ("a",): 1,
        ("a", 0): 2,
        ("a", 1, "b"): 3,
        ("c",): 5,
        ("c", "e"): 6,
    }
    assert source.line(("a", 1, "missing")) == 3
    assert source.line(("nowhere",)) == 1


def test_a_duplicate_key_names_both_lines() -> None:
    with pytest.raises(SpecError, match=r"f\.yaml:4: duplicate key 'tokens', first written in line 2"):
        read("run:\n  tokens: 1\n  warmups: 0\n  tokens: 2\n")


def test_the_same_key_in_two_mappings_is_no_duplicate() -> None:
    assert read("a: {x: 1}\nb: {x: 2}\n") == {"a": {"x": 1}, "b": {"x": 2}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("on", "on"),
        ("yes", "yes"),
        ("true", True),
        ("False", False),
        ("1:30", "1:30"),
        ("010", 10),
        ("0x10", 16),
        ("1_000", 1000),
        ("-3", -3),
        ("2026-11-30", "2026-11-30"),
        ("1e3", 1000.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e5x", "1e5x"),
        ("~", None),
        ("null", None),
        ('"null"', "null"),
        ("50%", "50%"),
        ("git:v1.0", "git:v1.0"),
    ],
)
def test_scalars_are_what_they_look_like(text: str, value: object) -> None:
    found = read_lines(f"key: {text}", "f.yaml").values["key"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_text() -> None:
    assert read("null: 1\ntrue: 2\n7: 3\noff: 4\n") == {"null": 1, "true": 2, "7": 3, "off": 4}


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: 1\nb: .nan\n", 2, "not a finite number"),
        ("a: .inf\n", 1, "not a finite number"),
        ("a: 1e999\n", 1, "not a finite number"),
        ('a: "x\\0y"\n', 1, "NUL"),
        ('a: 1\n"k\\0": 1\n', 2, "NUL"),
        ('a: "\\ud800"\n', 1, "surrogate"),
        ("a: \x01\n", 1, "not allowed"),
        ("a: &x {b: 1}\nc: {<<: *x}\n", 2, "merge keys"),
        ("a: !!python/object:os.system x\n", 1, "is not read"),
        ("a: !include x\n", 1, "is not read"),
        ("a: 1\n---\nb: 2\n", 2, "but found another document"),
        ("? [a, b]\n: 1\n", 1, "a key is empty or holds several values"),
        ("a: &x [*x]\n", 1, "contains itself"),
        ("a: *nowhere\n", 1, "undefined alias"),
    ],
)
def test_what_is_not_read_is_refused_with_its_line(text: str, line: int, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(text)
    assert str(caught.value).startswith(f"f.yaml:{line}: ")
    assert message in str(caught.value)
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


def test_an_alias_may_be_used_but_not_multiplied() -> None:
    assert read("a: &x [1]\nb: *x\n") == {"a": [1], "b": [1]}
    rows = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(SpecError, match="multiplies"):
        read("\n".join(rows))


def test_depth_is_bounded() -> None:
    with pytest.raises(SpecError, match="nested too deeply"):
        read("[" * 3000 + "]" * 3000)
    with pytest.raises(SpecError, match=r":1: a whole number of 5000 digits"):
        read("a: " + "9" * 5000)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    """No input escapes as another error than SpecError, and no number read is infinite."""
    try:
        values = read(text)
    except SpecError:
        return
    waiting = [values]
    while waiting:
        one = waiting.pop()
        assert not isinstance(one, float) or math.isfinite(one)
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list) else []
