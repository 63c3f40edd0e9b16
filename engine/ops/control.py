"""Control flow that is settled at build: a branch by a known condition, or tables chosen by the total length."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from engine.errors import UnsupportedModel
from engine.graph import Node, Subgraph
from engine.lower import Lowering, walk
from engine.ops import op
from engine.values import ByLength, Const, LoweredValue, Refusal, Switched, WeightValue


@op("", "If")
def if_(b: Lowering, node: Node) -> None:
    """One of two subgraphs.

    A condition known at build takes its branch. One on the total length is served where both branches give
    initialisers, as exporters write long-rope tables: the step then picks by the length on the device.
    """
    then, other = (node.attributes.get(n) for n in ("then_branch", "else_branch"))
    if not isinstance(then, Subgraph) or not isinstance(other, Subgraph):
        raise Refusal("a branch is missing")
    test = b.value(node.input(0))
    if isinstance(test, Switched):
        if bool(test.above) == bool(test.below):
            raise Refusal("its condition holds for every length or for none")
        above, below = _both(b, node, then, other)
        if not test.above:
            above, below = below, above
        for name, yes, no in zip(node.outputs, above, below, strict=True):
            b.set(name, ByLength(test.threshold, _weight(b, f"{name} above", yes), _weight(b, f"{name} below", no)))
        return
    taken = then if bool(np.asarray(b.known(node, 0)).reshape(-1)[0]) else other
    for name, value in zip(node.outputs, _outputs(b, node, taken, "taken"), strict=True):
        b.set(name, value)


def _both(b: Lowering, node: Node, then: Subgraph, other: Subgraph) -> list[list[LoweredValue]]:
    found: list[list[LoweredValue]] = []
    reasons: list[str] = []
    for branch, side in ((then, "above"), (other, "below")):
        try:
            found.append(_outputs(b, node, branch, side))
        except UnsupportedModel as refused:
            reasons += refused.reasons
    if reasons:
        raise UnsupportedModel(f"{node.name}: its branches are not served", "export with other options", tuple(reasons))
    return found


def _outputs(b: Lowering, node: Node, branch: Subgraph, side: str) -> list[LoweredValue]:
    """A branch's values. It is a scope of its own: what it calls `cos` is not what another branch calls so."""
    if len(branch.outputs) != len(node.outputs):
        raise Refusal(f"a branch gives {len(branch.outputs)} values for {len(node.outputs)}")
    for name, weight in branch.weights.items():
        own = replace(weight, name=f"{node.output(0)} {side} {name}")
        b.set(name, WeightValue(own, own.shape))
    walk(b, branch.nodes)
    return [b.value(name) for name in branch.outputs]


def _weight(b: Lowering, name: str, value: LoweredValue) -> WeightValue:
    if isinstance(value, Const):
        return b.promote(name, value)
    if not isinstance(value, WeightValue):
        raise Refusal(f"{name!r} is chosen by the length and is computed")
    return value
