"""Witness and invariant expressions: what they read, what they refuse, and that unknown is never true."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.errors import SpecError
from jobs.expressions import MAX_LENGTH, ExpressionError, check, evaluate, holds, names_in, sides
from jobs.metrics import expression_names
from jobs.model import Missing

NAMES = ("page_ins", "hits", "touches", "captures")
VALUES: dict[str, int | float | Missing] = {"page_ins": 7, "hits": 3, "touches": 10, "captures": 1}


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        ("page_ins > 0", True),
        ("page_ins < 0", False),
        ("hits + page_ins == touches", True),
        ("0 < hits < page_ins <= touches", True),
        ("0 < hits > page_ins", False),
        ("hits / touches >= 0.3", True),
        ("not (captures == 0)", True),
        ("hits == 4 or page_ins == 7", True),
        ("hits == 3 and page_ins == 8", False),
        ("-hits + 10 == page_ins", True),
        ("2 * (hits - 1) != 4", False),
    ],
)
def test_conditions_are_evaluated(expr: str, expected: bool) -> None:
    check(expr, NAMES)
    assert evaluate(expr, VALUES) is expected
    assert holds(expr, VALUES) is expected


@pytest.mark.parametrize(
    "expr",
    [
        "__import__('os').system('true')",
        "hits.bit_length() > 0",
        "hits[0] > 0",
        "(lambda: 1)() > 0",
        "hits ** 99999 > 0",
        "hits // 2 > 0",
        "hits % 2 == 0",
        "hits in (1, 2)",
        "hits is 3",
        "True or hits > 0",
        "'a' == 'a'",
        "f'{hits}' == 1",
        "[x for x in hits] == 1",
        "(hits := 3) > 0",
        "1j > hits",
        "hits if captures else page_ins",
        "hits > 0; hits",
        "hits >",
        "",
        "\0",
        "(" * 200 + "hits" + ")" * 200 + " > 0",
    ],
)
def test_anything_outside_the_grammar_is_refused(expr: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        check(expr, NAMES)
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("expr", "words"),
    [
        ("hits + page_ins", "not a condition"),
        ("hits", "not a condition"),
        ("1 == 1", "names no counter"),
        ("(hits > 0) + 1 == 2", "is a condition"),
        ("hits and page_ins", "is a number"),
        ("not hits", "is a number"),
        ("hits > 0 " + "or hits > 0 " * 60, "characters"),
    ],
)
def test_conditions_that_prove_nothing_are_refused(expr: str, words: str) -> None:
    with pytest.raises(ExpressionError, match=words):
        check(expr, NAMES)


def test_an_unknown_counter_is_named_with_the_nearest_one() -> None:
    with pytest.raises(ExpressionError) as raised:
        check("page_in > 0", expression_names())
    assert "'page_in'" in raised.value.message
    assert "page_ins" in raised.value.remedy
    assert isinstance(raised.value, SpecError)
    assert raised.value.exit_code == 2


def test_a_name_like_no_other_lists_what_is_known() -> None:
    with pytest.raises(ExpressionError) as raised:
        check("zzz > 0", NAMES)
    assert all(name in raised.value.remedy for name in NAMES)


@pytest.mark.parametrize(
    "expr",
    [
        "gone > 0",
        "gone <= 0",
        "not (gone > 0)",
        "hits == 3 or gone > 0",
        "gone == gone",
        "hits + gone != 0",
        "absent >= 0",
        "poisoned == poisoned",
        "not (poisoned > 1)",
        "hits / (captures - 1) > 0",
        "not (hits / (captures - 1) > 0)",
    ],
)
def test_a_missing_operand_is_never_true(expr: str) -> None:
    values = {**VALUES, "gone": Missing(missing="lost"), "poisoned": float("nan")}
    assert isinstance(evaluate(expr, values), Missing)
    assert not holds(expr, values)


def test_the_reason_of_a_missing_value_names_the_operand() -> None:
    assert evaluate("gone > 0", {"gone": Missing(missing="lost")}) == Missing(missing="gone: lost")
    assert evaluate("gone > 0", {}) == Missing(missing="gone: not recorded")
    result = evaluate("hits / captures > 0", {"hits": 1, "captures": 0})
    assert result == Missing(missing="hits / captures: division by zero")


def test_numbers_beyond_a_float_are_missing_and_do_not_raise() -> None:
    big = {"hits": 10**400, "captures": 0.5}
    assert isinstance(evaluate("hits * captures > 0", big), Missing)
    assert isinstance(evaluate("hits / 3 > 0", big), Missing)


def test_sides_give_both_numbers_of_an_equation() -> None:
    assert sides("hits + page_ins == touches") == ("hits + page_ins", "==", "touches")
    assert sides("hits < 3") is None
    assert sides("hits == 3 and page_ins == 7") is None


def test_names_are_those_that_are_read() -> None:
    assert names_in("hits + page_ins == 2 * touches") == {"hits", "page_ins", "touches"}


def test_length_is_bounded() -> None:
    with pytest.raises(ExpressionError):
        check("hits" + " " * MAX_LENGTH + "> 0", NAMES)


numbers = st.integers(-50, 50)
leaves = st.one_of(numbers.map(str), st.sampled_from(NAMES))
sums = st.recursive(
    leaves,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=6,
)
comparisons = st.tuples(sums, st.sampled_from(["==", "!=", "<", "<=", ">", ">="]), sums).map(" ".join)


@given(expr=comparisons, values=st.fixed_dictionaries(dict.fromkeys(NAMES, numbers)))
def test_values_agree_with_python(expr: str, values: dict[str, int]) -> None:
    try:
        expected: object = eval(compile(ast.parse(expr, mode="eval"), "", "eval"), {"__builtins__": {}}, dict(values))  # noqa: S307
    except ZeroDivisionError:
        expected = None
    got = evaluate(expr, values)
    assert isinstance(got, Missing) if expected is None else got is expected


@given(expr=comparisons, gone=st.sampled_from(NAMES))
def test_whatever_reads_a_missing_name_is_missing(expr: str, gone: str) -> None:
    values = {**VALUES, gone: Missing(missing="lost")}
    if gone in names_in(expr):
        assert isinstance(evaluate(expr, values), Missing)
