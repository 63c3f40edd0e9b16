"""Mutants from the syntax tree: each call that orders, ends or refuses something in the engine's memory, left out.

A call is known by the words of its name, so that what is added later is found without being listed. A mutant is named
by file, function and call, and by which of several alike it is; line numbers are no part of it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILES = ("engine/paging/*.py", "engine/device/*.py", "engine/kv*.py", "engine/capture*.py", "engine/decode*.py")
"""Paging, device, caches, and both halves of capture: what cuts a plan and what records and replays it."""
KINDS: dict[str, str] = {
    "wait": "wait join drain reach",
    "record": "mark record begin_capture end_capture",
    "synchronize": "sync synchronize",
    "poison": "poison",
    "reset": "reset restart forget clear",
    "generation": "passed replayed invalidate",
    "release": "unmap free destroy give refund unreserve release close drop evict discard abandon own goes destroyed",
    "veto": "check refuse veto",
}
"""What a call does -> words of which its name has one; the first kind that fits counts."""
_OF_WORD = {word: kind for kind, words in KINDS.items() for word in words.split()}
_BUMPED = {"_warm", "_recorded", "_generation", "_token", "_mappings", "_replays", "_new"}
"""Attributes that say which generation of addresses, graphs or tokens it is: to set one, but at first, is a bump."""
_DRIVER = {"call", "_or_abandon"}
"""Functions whose first argument is the call of the driver that they make."""
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One piece of source that is left out: a statement, or a call, in whose place None stands."""

    path: str
    place: str
    """The function that it is in, with its class."""
    kind: str
    what: str
    """The call's name, `raise` with the exception's, or the attribute that is set."""
    turn: int
    """0 for the first of its name in that function."""
    line: int
    node: int
    """Its number in the order in which `ast.walk` comes to it."""

    @property
    def name(self) -> str:
        """The same as long as the function has it."""
        return f"{self.path}:{self.place}:{self.what}" + (f"#{self.turn + 1}" if self.turn else "")

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.path.removesuffix(".py").replace("/", ".")


def mutants(root: Path) -> list[Mutant]:
    """All of them, in the order of the source."""
    paths = sorted({path for pattern in FILES for path in root.glob(pattern)})
    return [mutant for path in paths for mutant in of_source(path.read_text("utf-8"), str(path.relative_to(root)))]


def of_source(source: str, path: str) -> list[Mutant]:
    """Those of one file."""
    tree = ast.parse(source)
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for place, node in _placed(tree, ()):
        kind_and_name = _kind(node)
        if kind_and_name is None or (isinstance(node, ast.Assign | ast.AugAssign) and place.endswith("__init__")):
            continue
        kind, what = kind_and_name
        found.append(Mutant(path, place, kind, what, seen[place, what], getattr(node, "lineno", 0), numbers[id(node)]))
        seen[place, what] += 1
    return found


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The source's tree without that piece."""
    tree = ast.parse(source)
    target = next(node for number, node in enumerate(ast.walk(tree)) if number == mutant.node)
    changed = _Remove(target).visit(tree)
    assert isinstance(changed, ast.Module)
    return ast.fix_missing_locations(changed)


class _Remove(ast.NodeTransformer):
    def __init__(self, target: ast.AST) -> None:
        self.target = target

    def visit(self, node: ast.AST) -> ast.AST:
        whole = node.value if isinstance(node, ast.Expr) else node
        if whole is self.target:
            gone = ast.Pass() if isinstance(node, ast.stmt) else ast.Constant(None)
            return ast.copy_location(gone, node)
        return self.generic_visit(node)


def _placed(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[str, ast.AST]]:
    """Every node with the function it is in, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        inner = names
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            inner = (*names, child.name)
        yield ".".join(inner), child
        yield from _placed(child, inner)


def _kind(node: ast.AST) -> tuple[str, str] | None:
    """What a node does, and its name; None for one that is no mutant."""
    if isinstance(node, ast.Raise):
        raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return "veto", "raise" if raised is None else f"raise {ast.unparse(raised)}"
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        bumped = [name for name in map(_attribute, targets) if name in _BUMPED]
        return ("generation", bumped[0]) if bumped else None
    if not isinstance(node, ast.Call):
        return None
    name = _called(node)
    if name[:1].isupper() or (isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Constant)):
        return None  # a constructor, or a separator that joins texts
    parts = _PART.findall(name)
    for word in (name, *map(str.lower, parts if name.startswith("cu") else parts[:1])):
        if word in _OF_WORD:
            return _OF_WORD[word], name
    return None


def _called(node: ast.Call) -> str:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in _DRIVER and node.args and isinstance(node.args[0], ast.Attribute):
        return node.args[0].attr
    return name


def _attribute(target: ast.expr) -> str:
    """The attribute that is set, or whose entry is; of several at once, the first of them that counts."""
    if isinstance(target, ast.Tuple):
        return next((name for name in map(_attribute, target.elts) if name in _BUMPED), "")
    whole = target.value if isinstance(target, ast.Subscript) else target
    return whole.attr if isinstance(whole, ast.Attribute) else ""
