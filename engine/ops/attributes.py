"""Reading a node's attributes: the value, the default where it is absent, or a refusal that names it."""

from __future__ import annotations

from engine.graph import Node
from engine.values import Refusal


def whole(node: Node, name: str, default: int | None = None, *, least: int | None = None) -> int:
    """A whole number. Raises Refusal where it is absent without a default, of another type, or below `least`."""
    value = node.attributes.get(name, default)
    if not isinstance(value, int) or (least is not None and value < least):
        raise Refusal(f"attribute {name} is {value!r}, not a whole number{'' if least is None else f' from {least}'}")
    return value


def number(node: Node, name: str, default: float) -> float:
    """A number. Raises Refusal where it is of another type."""
    value = node.attributes.get(name, default)
    if not isinstance(value, int | float):
        raise Refusal(f"attribute {name} is {value!r}, not a number")
    return float(value)
