"""Steps and what links them: who writes and who reads each buffer, and steps with other operands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.plan import Operand, Ref, Step


@dataclass(frozen=True, slots=True)
class Links:
    """Who writes and who reads each buffer, as positions in a list of steps."""

    writers: Mapping[int, Sequence[int]]
    readers: Mapping[int, Sequence[int]]


def links_of(steps: Sequence[Step]) -> Links:
    writers: dict[int, list[int]] = {}
    readers: dict[int, list[int]] = {}
    for at, step in enumerate(steps):
        for o in step.operands:
            if o.ref.kind == "buffer":
                for access, seen in (("w", writers), ("r", readers)):
                    if access in o.access and at not in seen.setdefault(o.ref.index, []):
                        seen[o.ref.index].append(at)
    return Links(writers, readers)


def maker(links: Links, ref: Ref) -> int | None:
    """The one step that writes a buffer."""
    found = links.writers.get(ref.index, ()) if ref.kind == "buffer" else ()
    return found[0] if len(found) == 1 else None


def sole_maker(steps: Sequence[Step], links: Links, kept: frozenset[int], ref: Ref) -> int | None:
    """The one step that writes a buffer, as it is read here, where one step alone reads it."""
    at = maker(links, ref)
    if at is None or ref.index in kept or len(links.readers.get(ref.index, ())) != 1:
        return None
    written = [o.ref for o in steps[at].operands if o.access == "w" and o.ref.index == ref.index]
    same = [r for r in written if r.offset_bytes == ref.offset_bytes and r.dtype == ref.dtype]
    return at if same and math.prod(same[0].shape) == math.prod(ref.shape) else None


def operand_names(step: Step) -> set[str]:
    return {o.name for o in step.operands}


def has(steps: Iterable[Step], name: str) -> bool:
    return any(name in operand_names(s) for s in steps)


def ref_of(step: Step, name: str) -> Ref:
    return next(o.ref for o in step.operands if o.name == name)


def changed(step: Step, more: tuple[Operand, ...], *, without: tuple[str, ...], tail: Step | None = None) -> Step:
    """A step with other operands, known by the node of the last step that it stands for."""
    operands = (*(o for o in step.operands if o.name not in without), *more)
    named = step if tail is None else replace(step, node=tail.node, op=tail.op)
    return replace(named, operands=operands)
