"""Happens-before: every use of memory held against the last fill and the last readers of the same bytes.

Host and branches carry vector clocks. Work that is asked for starts after all that came before it on its branch and
after what the host had done by then; a wait takes over an event's clock; the host knows of work only what it waited
for. Two uses of the same bytes of which one changes them must be ordered, or they are a hazard, whatever order this run
had by chance. reference: vector clocks as in FastTrack (Flanagan and Freund, PLDI 2009).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from engine.device.base import Granule, Tag
from engine.device.shadow import LINES, Access, Cell, Shadow, State

Kind = Literal[
    "read before its fill",
    "read of another's bytes",
    "read of dead bytes",
    "refill under a reader",
    "two fills without an order",
    "memory taken away under use",
    "use of memory that is gone",
    "replay against moved or freed addresses",
]
Clock = list[int]
HOST, COMPUTE, COPY, GRAPH = range(len(LINES))
MOST_SHOWN = 50


@dataclass(frozen=True, slots=True)
class Hazard:
    """Two uses of the same bytes and the order that they lack."""

    kind: Kind
    first: Access
    second: Access
    missing: str
    start: int
    end: int
    mapping: int
    """Generation of the map at these addresses when the second came."""

    def line(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.kind}: {_told(self.second)} against {_told(self.first)}; missing: {self.missing}; "
            f"bytes {self.start:#x} to {self.end:#x}, map generation {self.mapping}"
        )


def _told(access: Access) -> str:
    of = "" if access.key is None else f" key {access.key}"
    at = "" if access.step is None else f" step {access.step}"
    when = f"generation {access.generation + 1} pass {access.token}"
    return f"{access.verb} [{access.what}]{of}{at} on {LINES[access.line]} ({when})"


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes that an act reads or fills; of a read of a key, its number and from where in it."""

    start: int
    end: int
    key: int | None = None
    tag: Tag | None = None
    offset_bytes: int = 0


class Hazards:
    """The checker. It is fed in the order in which the host asks, and knows nothing of when work runs."""

    def __init__(self) -> None:
        self.accesses = 0
        self.total = 0
        self.found: list[Hazard] = []
        """The first of each kind and pair of places, up to MOST_SHOWN."""
        self._seen: set[tuple[Any, ...]] = set()
        self._shadow = Shadow()
        self._clocks: list[Clock] = [[0] * len(LINES) for _ in LINES]
        self._mappings: dict[int, int] = {}
        self._returned: dict[Granule, list[Access]] = {}  # unmapped and not known to be out of use
        self._generation = self._token = 0
        self._replays = False

    # -- order

    def at(self, generation: int) -> None:
        """A generation begins."""
        self._generation, self._token = generation, 0

    def passed(self) -> None:
        """The host has read what a pass gave."""
        self._token += 1

    def mark(self, line: int) -> tuple[int, ...]:
        """The clock of a line's work up to here."""
        self._after(line, self._clocks[HOST])
        return tuple(self._clocks[line])

    def wait(self, line: int, clock: Iterable[int]) -> None:
        """What comes on this line comes after that clock; the host's line is the host waiting."""
        self._after(line, clock)

    def drain(self) -> None:
        """The host waits for everything."""
        for clock in self._clocks[1:]:
            self._after(HOST, clock)

    def replay(self) -> None:
        """A graph starts on the compute branch: its own copy branch starts there too."""
        self._after(COMPUTE, self._clocks[HOST])
        self._after(GRAPH, self._clocks[COMPUTE])
        self._replays = True

    def replayed(self) -> None:
        """All of the graph has been asked for."""
        self._replays = False

    def _after(self, line: int, clock: Iterable[int]) -> None:
        mine = self._clocks[line]
        mine[:] = map(max, mine, clock)

    # -- uses

    def work(
        self,
        line: int,
        verb: str,
        what: str,
        reads: Iterable[Use] = (),
        fills: Iterable[Use] = (),
        step: int | None = None,
    ) -> None:
        """Work on a branch: all that it reads, then all that it fills."""
        clock = self._tick(line)
        for use in reads:
            self._read(self._access(line, verb, what, True, step, use.key), use, clock)
        for use in fills:
            key = use.key if use.tag is None else use.tag.key
            self._put(self._access(line, verb, what, False, step, key), use, clock, "filled")

    def out(self, start: int, end: int) -> None:
        """The host reads device bytes; padding between what was filled is nobody's, so one filled byte is enough."""
        clock = self._tick(COMPUTE)
        access = self._access(COMPUTE, "copy_out", "host", True)
        cells = self._shadow.over(start, end)
        filled = [(at, cell) for at, cell in cells if cell.state == "filled"]
        for at, cell in filled or cells:
            self._read(access, Use(at, cell.end), clock)

    def poison(self, start: int, end: int, what: str) -> None:
        """Bytes are given up, after all compute work before. A card does nothing for it, so uses before it stay."""
        clock = self._tick(COMPUTE)
        uses: dict[int, Access] = {}
        for _, cell in self._shadow.over(start, end):
            if cell.state == "filled":
                _latest(uses, {~cell.put.line: cell.put})
            _latest(uses, cell.uses)
        self._put(self._access(COMPUTE, "poison", what, False), Use(start, end), clock, "dead")
        for _, cell in self._shadow.over(start, end):
            if cell.state == "dead":
                cell.uses = uses

    def appears(self, verb: str, start: int, end: int, what: str, granule: Granule | None = None) -> None:
        """The host maps or allocates: memory is there from now on, with nothing in it."""
        clock = self._tick(HOST)
        access = self._access(HOST, verb, what, False)
        self._mappings[start] = self._mappings.get(start, 0) + 1
        self._check_returned(access, granule, start, end, clock)
        self._shadow.put(start, Cell(end, "blank", access, self._mappings[start], None, {}))

    def goes(self, verb: str, start: int, end: int, what: str, granule: Granule | None = None) -> None:
        """The host unmaps or frees, at once: all use must be known to be over."""
        clock = self._tick(HOST)
        access = self._access(HOST, verb, what, False)
        used: list[Access] = []
        for at, cell in self._shadow.over(start, end):
            late = [use for use in (*_puts(cell), *cell.uses.values()) if not _before(use, clock)]
            for use in late:
                self._report("memory taken away under use", use, access, "a wait of the host", at, cell)
            used += late
        if granule is not None and used:
            self._returned[granule] = used
        self._shadow.put(start, Cell(end, "gone", access, self._mappings.get(start, 0), None, {}))

    def destroyed(self, granule: Granule) -> None:
        """The host gives a granule back, which by now nobody may use."""
        clock = self._tick(HOST)
        self._check_returned(self._access(HOST, "destroy", f"granule {granule.serial}", False), granule, 0, 0, clock)

    def _check_returned(self, access: Access, granule: Granule | None, start: int, end: int, clock: Clock) -> None:
        if granule is None or not self._returned:
            return
        for use in self._returned.pop(granule, ()):
            if not _before(use, clock):
                there = Cell(end, "gone", use, self._mappings.get(start, 0), None, {})
                self._report("memory taken away under use", use, access, "a wait of the host", start, there)

    def _read(self, access: Access, use: Use, clock: Clock) -> None:
        self.accesses += 1
        cells = self._shadow.over(use.start, use.end)
        for at, cell in cells:
            if cell.state != "filled":
                self._report(self._of_state(cell.state), cell.put, access, _ASKED[cell.state], at, cell)
            elif not _before(cell.put, clock):
                self._report("read before its fill", cell.put, access, _wait(access, cell.put), at, cell)
            elif use.key is not None and cell.tag != Tag(use.key, use.offset_bytes + at - use.start):
                self._report("read of another's bytes", cell.put, access, "a fill of this key before it", at, cell)
            cell.uses[access.line] = access
        if len(cells) > 1:
            self._join(cells, clock)

    def _join(self, cells: list[tuple[int, Cell]], clock: Clock) -> None:
        """Make one cell of those that one read went over, where that forgets nothing: the last fill stands for all."""
        first = cells[0][1]
        line = first.put.line
        for _, cell in cells:
            if cell.state != "filled" or cell.tag is not None or cell.put.line != line or cell.mapping != first.mapping:
                return
            if not _before(cell.put, clock):
                return
        uses: dict[int, Access] = {}
        for _, cell in cells:
            _latest(uses, cell.uses)
        last = max((cell.put for _, cell in cells), key=lambda put: put.tick)
        self._shadow.put(cells[0][0], Cell(cells[-1][1].end, "filled", last, first.mapping, None, uses))

    def _put(self, access: Access, use: Use, clock: Clock, state: State) -> None:
        self.accesses += 1
        cells = self._shadow.over(use.start, use.end)
        for at, cell in cells:
            if cell.state == "gone":
                self._report(self._of_state("gone"), cell.put, access, _ASKED["gone"], at, cell)
            for earlier in (*_puts(cell), *cell.uses.values()):
                if not _before(earlier, clock):
                    kind: Kind = "refill under a reader" if earlier.reads else "two fills without an order"
                    self._report(kind, earlier, access, _wait(access, earlier), at, cell)
        if cells and cells[0][1].state != "gone":
            self._shadow.put(use.start, Cell(use.end, state, access, cells[0][1].mapping, use.tag, {}))

    def _of_state(self, state: State) -> Kind:
        if state == "gone":
            return "replay against moved or freed addresses" if self._replays else "use of memory that is gone"
        return "read of dead bytes" if state == "dead" else "read before its fill"

    def _tick(self, line: int) -> Clock:
        clock = self._clocks[line]
        if line != HOST:
            self._after(line, self._clocks[HOST])
        clock[line] += 1
        return clock

    def _access(
        self, line: int, verb: str, what: str, reads: bool, step: int | None = None, key: int | None = None
    ) -> Access:
        tick = self._clocks[line][line]
        return Access(verb, what, reads, line, tick, self._generation, self._token, step, key)

    def _report(self, kind: Kind, first: Access, second: Access, missing: str, start: int, cell: Cell) -> None:
        self.total += 1
        place = (kind, first.verb, first.what, second.verb, second.what, second.key)
        if place in self._seen or len(self.found) == MOST_SHOWN:
            return
        self._seen.add(place)
        self.found.append(Hazard(kind, first, second, missing, start, cell.end, cell.mapping))


_ASKED: dict[State, str] = {
    "gone": "a new binding, or memory there, before it",
    "blank": "a fill before it",
    "dead": "a fill between it and the poison",
}


def _puts(cell: Cell) -> tuple[Access, ...]:
    """What must be over before the bytes may change: a poison is nothing that runs."""
    return () if cell.state == "dead" else (cell.put,)


def _latest(uses: dict[int, Access], more: Mapping[int, Access]) -> None:
    """Add these, of each line the last one."""
    for of, use in more.items():
        if of not in uses or uses[of].tick < use.tick:
            uses[of] = use


def _before(access: Access, clock: Clock) -> bool:
    return clock[access.line] >= access.tick


def _wait(later: Access, earlier: Access) -> str:
    """What would order the two."""
    return f"{LINES[later.line]} waits for {LINES[earlier.line]} after that {'read' if earlier.reads else 'fill'}"
