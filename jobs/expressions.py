"""Witnesses and invariants: small conditions over a run's counters, parsed by a whitelist.

Grammar: numbers, names, + - * /, comparisons (also chained), `and`, `or`, `not`, parentheses. Nothing else is read,
so an expression can neither call nor reach anything. A missing operand makes the whole expression Missing: an unknown
value never makes a condition true, not even behind an `or`.
"""

from __future__ import annotations

import ast
import difflib
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from jobs.errors import SpecError
from jobs.metrics import is_finite
from jobs.model import Missing

Value = bool | int | float | Missing
Values = Mapping[str, int | float | Missing]
Evaluator = Callable[[Values], Value]
Kind = Literal["number", "condition"]
Relation = Literal["==", "<=", ">="]

MAX_LENGTH = 400
"""Longest expression read, in characters; keeps the parser's depth bounded."""

_ARITHMETIC: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUATIONS: Mapping[type[ast.cmpop], Relation] = {ast.Eq: "==", ast.LtE: "<=", ast.GtE: ">="}


class ExpressionError(SpecError):
    """An expression that cannot be read, or that names an unknown counter; `remedy` says what to write instead."""


def check(expr: str, names: Collection[str]) -> frozenset[str]:
    """The names that a condition uses; raises ExpressionError unless it is a condition over known names.

    A bare number and a condition without any name are refused: neither can fail because of what a run did.
    """
    tree = _parse(expr)
    if _kind(tree, expr) != "condition":
        raise ExpressionError(f'"{expr}" is a number, not a condition', f'compare it, for example "{expr} > 0"')
    used = names_in(expr)
    if not used:
        raise ExpressionError(f'"{expr}" names no counter', "a condition that no run can change proves nothing")
    for name in sorted(used - frozenset(names)):
        near = difflib.get_close_matches(name, sorted(names), n=1)
        remedy = f"did you mean '{near[0]}'?" if near else "known are " + ", ".join(sorted(names))
        raise ExpressionError(f"unknown counter '{name}' in \"{expr}\"", remedy)
    return used


@lru_cache(maxsize=1024)
def names_in(expr: str) -> frozenset[str]:
    """The names an expression reads."""
    return frozenset(node.id for node in ast.walk(_parse(expr)) if isinstance(node, ast.Name))


def evaluate(expr: str, values: Values) -> Value:
    """An expression's value; Missing with the reason when an operand is absent, Missing, not finite or over 0."""
    return _compiled(expr)(values)


def holds(expr: str, values: Values) -> bool:
    """True only when the condition is known to be true."""
    return evaluate(expr, values) is True


@lru_cache(maxsize=1024)
def sides(expr: str) -> tuple[str, Relation, str] | None:
    """Left, relation and right of a plain equation, so that both numbers can be shown; None for any other condition."""
    tree = _parse(expr)
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1:
        sign = _EQUATIONS.get(type(tree.ops[0]))
        if sign is not None:
            return ast.unparse(tree.left), sign, ast.unparse(tree.comparators[0])
    return None


@lru_cache(maxsize=1024)
def _parse(expr: str) -> ast.expr:
    if len(expr) > MAX_LENGTH:
        raise ExpressionError(f"expression of {len(expr)} characters", f"write at most {MAX_LENGTH}")
    try:
        tree = ast.parse(expr.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise ExpressionError(f'cannot read "{expr}": {reason}', 'write a condition such as "page_ins > 0"') from None
    _kind(tree, expr)
    return tree


def _kind(node: ast.expr, expr: str) -> Kind:
    """Number or condition; refuses all that the grammar does not hold, and a condition used as a number."""
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return "number"
        case ast.Name():
            return "number"
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return _need("number", operand, expr)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _need("condition", operand, expr)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            _need("number", left, expr)
            return _need("number", right, expr)
        case ast.BoolOp(values=parts):
            for part in parts:
                _need("condition", part, expr)
            return "condition"
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            for part in (left, *others):
                _need("number", part, expr)
            return "condition"
        case _:
            raise ExpressionError(
                f"'{ast.unparse(node)}' is not allowed in \"{expr}\"",
                "use numbers, counter names, + - * /, comparisons, and, or, not",
            )


def _need(wanted: Kind, node: ast.expr, expr: str) -> Kind:
    found = _kind(node, expr)
    if found != wanted:
        raise ExpressionError(f"'{ast.unparse(node)}' in \"{expr}\" is a {found}", f"a {wanted} must stand there")
    return found


@lru_cache(maxsize=1024)
def _compiled(expr: str) -> Evaluator:
    """An expression as a function: a sweep evaluates a few of them once for each of its runs."""
    return _evaluator(_parse(expr))


def _evaluator(node: ast.expr) -> Evaluator:
    match node:
        case ast.Constant(value=value):
            assert isinstance(value, int | float)
            number: Value = value
            return lambda _values: number
        case ast.Name(id=name):
            return lambda values: _operand(name, values)
        case ast.UnaryOp(op=op, operand=operand):
            return _unary(op, _evaluator(operand))
        case ast.BinOp(left=left, right=right):
            return _arithmetic(node, _evaluator(left), _evaluator(right))
        case ast.BoolOp(op=op, values=parts):
            return _boolean(op, [_evaluator(part) for part in parts])
        case ast.Compare():
            return _compare(node, [_evaluator(part) for part in (node.left, *node.comparators)])
        case _:
            raise AssertionError(f"the parser let {ast.dump(node)} through")


def _operand(name: str, values: Values) -> Value:
    value = values.get(name)
    if type(value) is int:
        return value
    if value is None:
        return Missing.made(missing=f"{name}: not recorded")
    if type(value) is Missing:
        return Missing.made(missing=f"{name}: {value.missing}")
    return value if is_finite(value) else Missing(missing=f"{name}: not finite")


def _unary(op: ast.unaryop, operand: Evaluator) -> Evaluator:
    def apply(values: Values) -> Value:
        inner = operand(values)
        if type(inner) is Missing:
            return inner
        return not inner if isinstance(op, ast.Not) else -inner if isinstance(op, ast.USub) else inner

    return apply


def _arithmetic(node: ast.BinOp, left: Evaluator, right: Evaluator) -> Evaluator:
    apply, text = _ARITHMETIC[type(node.op)], ast.unparse(node)

    def compute(values: Values) -> Value:
        mine, theirs = left(values), right(values)
        if type(mine) is Missing:
            return mine
        if type(theirs) is Missing:
            return theirs
        try:
            result = apply(mine, theirs)
        except ZeroDivisionError:
            return Missing(missing=f"{text}: division by zero")
        except OverflowError:
            return Missing(missing=f"{text}: out of range")
        return result if type(result) is int or is_finite(result) else Missing(missing=f"{text}: not finite")

    return compute


def _boolean(op: ast.boolop, parts: Sequence[Evaluator]) -> Evaluator:
    joined = all if isinstance(op, ast.And) else any

    def join(values: Values) -> Value:
        known = [part(values) for part in parts]
        return next((part for part in known if type(part) is Missing), joined(known))

    return join


def _compare(node: ast.Compare, operands: Sequence[Evaluator]) -> Evaluator:
    signs = [_COMPARISONS[type(op)] for op in node.ops]

    def compare(values: Values) -> Value:
        numbers: list[bool | int | float] = []
        for operand in operands:
            value = operand(values)
            if type(value) is Missing:
                return value
            numbers.append(value)
        return all(sign(*pair) for sign, pair in zip(signs, pairwise(numbers), strict=True))

    return compare
