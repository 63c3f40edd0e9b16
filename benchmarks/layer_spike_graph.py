"""What the layer spike records: steps and copies in one CUDA graph, predicted from the plan and read back from it."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cuda.bindings import driver

from benchmarks.layer_spike_card import THREADS, Arena, Bound, Card, Memory, ask
from engine.graph import DTYPES
from engine.paging.policy import aligned
from engine.plan import Plan, Step


@dataclass(frozen=True, slots=True)
class Copy:
    """A transfer inside a pass: after step `issue_after` (-1: at once), before step `needed_by`."""

    source: int
    target: int
    nbytes: int
    issue_after: int
    needed_by: int


Recorded = tuple[Any, Any]  # the graph, to be read back, and its executable form


def run(card: Card, launches: Sequence[Bound]) -> None:
    """Launch steps on the compute stream: eagerly, or into an open capture."""
    for b in launches:
        f, (x, y) = card.functions[b.step.kernel], b.grid
        ask(
            driver.cuLaunchKernel(
                f, x, y, 1, THREADS, 1, 1, b.shared_bytes, card.compute, ctypes.addressof(b.arguments), 0
            )
        )


def capture(card: Card, launches: Sequence[Bound], copies: Sequence[Copy]) -> Recorded:
    """Record steps on the compute stream and copies on a branch that forks from it and joins at its readers."""
    ask(driver.cuStreamBeginCapture(card.compute, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    ready: dict[int, Any] = {}
    for at in range(-1, len(launches) + 1):
        if at in ready:
            card.wait(card.compute, ready[at])
        if 0 <= at < len(launches):
            run(card, launches[at : at + 1])
        due = [c for c in copies if c.issue_after == at]
        if due:
            card.wait(card.copier, card.mark(card.compute))
        for c in due:
            ask(driver.cuMemcpyHtoDAsync(c.target, c.source, c.nbytes, card.copier))
            ready[c.needed_by] = card.mark(card.copier)
    graph = ask(driver.cuStreamEndCapture(card.compute))
    executable = ask(driver.cuGraphInstantiate(graph, 0))
    ask(driver.cuGraphUpload(executable, card.compute))
    return graph, executable


def census(recorded: Recorded) -> dict[str, Any]:
    """Nodes by type, kernels by name, bytes and targets of copies, edges: all read back from the graph."""
    graph = recorded[0]
    nodes = ask(driver.cuGraphGetNodes(graph, ask(driver.cuGraphGetNodes(graph, 0))[1]))[0]
    types, names, copied = Counter[str](), Counter[str](), []
    for node in nodes:
        kind = ask(driver.cuGraphNodeGetType(node)).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        types[kind] += 1
        if kind == "kernel":
            p = ask(driver.cuGraphKernelNodeGetParams(node))
            named = driver.cuFuncGetName(p.func)
            names[ask(named if int(named[0]) == 0 else driver.cuKernelGetName(p.kern)).decode()] += 1
        elif kind == "memcpy":
            p = ask(driver.cuGraphMemcpyNodeGetParams(node))
            copied.append((int(p.dstDevice) + p.dstXInBytes, p.WidthInBytes * max(p.Height, 1) * max(p.Depth, 1)))
    return {
        "types": dict(types),
        "kernels": dict(names),
        "copies": sorted(copied),
        "edges": int(ask(driver.cuGraphGetEdges(graph, 0))[-1]),
    }


def predicted(plan: Plan, copies: Sequence[Copy]) -> dict[str, Any]:
    """What `census` should read, from the plan and the copies alone."""
    forks = len({c.issue_after for c in copies if c.issue_after >= 0})
    joins = len({c.needed_by for c in copies})
    types = {"kernel": len(plan.steps)} | ({"memcpy": len(copies)} if copies else {})
    return {
        "types": types,
        "kernels": dict(Counter(s.kernel for s in plan.steps)),
        "copies": sorted((c.target, c.nbytes) for c in copies),
        "edges": len(plan.steps) - 1 + max(len(copies) - 1, 0) + forks + joins,
    }


class Record:
    """The keys that one step reads of one weight, laid together in pinned host memory and in a fixed slot."""

    def __init__(self, memory: Memory, plan: Plan, node_part: str) -> None:
        self.step = next(s for s in plan.steps if node_part in s.node and s.keys)
        self.keys = self.step.keys
        offsets = [sum(aligned(plan.keys[k].nbytes) for k in self.keys[:i]) for i in range(len(self.keys))]
        self.nbytes = offsets[-1] + plan.keys[self.keys[-1]].nbytes
        self.source, view = memory.card.pinned(self.nbytes)
        self.slot = Arena(memory.card, self.nbytes).base
        self.moved = {k: self.slot + o for k, o in zip(self.keys, offsets, strict=True)}
        self._parts = [(o, plan.keys[k].nbytes) for k, o in zip(self.keys, offsets, strict=True)]
        for k, (offset, nbytes) in zip(self.keys, self._parts, strict=True):
            view[offset : offset + nbytes] = plan.keys[k].weight.data

    def copies(self, parts: bool, issue_after: int) -> list[Copy]:
        """One copy of the whole record, or one for each key."""
        pieces = self._parts if parts else [(0, self.nbytes)]
        return [Copy(self.source + o, self.slot + o, n, issue_after, self.step.index) for o, n in pieces]

    def bands(self, plan: Plan, count: int) -> tuple[Plan, list[Copy]]:
        """The plan with the record's step cut into bands of output rows, and a copy a key for each band."""
        at = self.step.index
        cut = [_band(self.step, i, count) for i in range(count)]
        steps = [*plan.steps[:at], *cut, *plan.steps[at + 1 :]]
        copies = [
            Copy(self.source + o + i * (n // count), self.slot + o + i * (n // count), n // count, -1, at + i)
            for i in range(count)
            for o, n in self._parts
        ]
        return replace(plan, steps=tuple(replace(s, index=i) for i, s in enumerate(steps))), copies


def _band(step: Step, index: int, count: int) -> Step:
    """Band `index` of a one-row product: a part of the rows of its weight and of the elements of its output."""
    operands = []
    for o in step.operands:
        ref, size = o.ref, math.prod(o.ref.shape) * DTYPES[o.ref.dtype].itemsize // count
        if o.access == "w":
            shape = (*ref.shape[:-1], ref.shape[-1] // count)
        else:
            shape = (ref.shape[0] // count, *ref.shape[1:])
        moved = replace(ref, shape=shape, offset_bytes=ref.offset_bytes + index * size)
        operands.append(o if o.name == "x" else replace(o, ref=moved))
    return replace(step, operands=tuple(operands), params={**step.params, "N": step.params["N"] // count})
