"""Operators: one function each, from a node to the steps it becomes."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.graph import Node
    from engine.lower import Lowering

Rule = Callable[["Lowering", "Node"], None]

_FAMILIES = (
    "attention",
    "control",
    "elementwise",
    "embedding",
    "linear",
    "matmul",
    "moe",
    "movement",
    "norm",
    "reduce",
    "rotary",
    "scaled_attention",
)
_RULES: dict[tuple[str, str], Rule] = {}


def op(domain: str, name: str) -> Callable[[Rule], Rule]:
    """Register a function as the rule of an operator; the default domain is ""."""

    def register(rule: Rule) -> Rule:
        assert (domain, name) not in _RULES, (domain, name)
        _RULES[domain, name] = rule
        return rule

    return register


def find(domain: str, name: str) -> Rule | None:
    """The rule of an operator, or None where it is not served."""
    return served().get((domain, name))


def served() -> dict[tuple[str, str], Rule]:
    """Every operator served, by domain and name."""
    for family in _FAMILIES:
        import_module(f"engine.ops.{family}")
    return _RULES
