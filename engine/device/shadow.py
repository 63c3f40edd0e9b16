"""What every byte of the address space was last used for: who put it into its state, who has read it since."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, replace
from typing import Literal

from engine.device.base import Tag

Line = Literal["host", "compute", "copy", "graph"]
LINES: tuple[Line, ...] = ("host", "compute", "copy", "graph")
"""What runs beside each other: the host, the two branches, and the copy branch inside a graph that is replayed."""

State = Literal["gone", "blank", "filled", "dead"]
"""Not there; mapped or allocated, and nothing in it; filled; poisoned, as what was in it was given up."""


@dataclass(frozen=True, slots=True)
class Access:
    """One use of memory, and when: `tick` counts what was asked of its line."""

    verb: str
    what: str
    """The step's node, or what the memory is."""
    reads: bool
    line: int
    tick: int
    generation: int
    token: int
    """Passes of the generation before this one."""
    step: int | None = None
    key: int | None = None


@dataclass(slots=True)
class Cell:
    """Bytes that share one history."""

    end: int
    state: State
    put: Access
    """What brought the bytes into their state."""
    mapping: int
    """How often memory came to be at these addresses: the generation of the map."""
    tag: Tag | None
    uses: dict[int, Access]
    """Reads since then, the last one of each line: whoever comes after that comes after those before it. Of bytes that
    were given up, reads and fills (under the line's complement) from before that."""

    def behind(self, nbytes: int) -> Cell:
        """The part from so many bytes on."""
        tag = None if self.tag is None else Tag(self.tag.key, self.tag.offset_bytes + nbytes)
        return replace(self, tag=tag, uses=dict(self.uses))


class Shadow:
    """All addresses in disjoint cells."""

    def __init__(self) -> None:
        never = Access("none", "no memory", False, 0, 0, 0, 0)
        self._starts = [0]
        self._cells = {0: Cell(1 << 64, "gone", never, 0, None, {})}

    def over(self, start: int, end: int) -> list[tuple[int, Cell]]:
        """Cells that make up [start, end), with their starts; those at its borders are cut there."""
        first, last = self._cut(start), self._cut(end)
        return [(at, self._cells[at]) for at in self._starts[first:last]]

    def put(self, start: int, cell: Cell) -> None:
        """One cell in place of all that make up its bytes."""
        first, last = self._cut(start), self._cut(cell.end)
        for gone in self._starts[first:last]:
            del self._cells[gone]
        self._starts[first:last] = [start]
        self._cells[start] = cell

    def _cut(self, at: int) -> int:
        """Position of the cell that starts there, made where there is none."""
        index = bisect_right(self._starts, at) - 1
        start = self._starts[index]
        if start == at:
            return index
        whole = self._cells[start]
        if at >= whole.end:  # the end of all addresses
            return len(self._starts)
        self._cells[at] = whole.behind(at - start)
        whole.end = at
        insort(self._starts, at)
        return index + 1
