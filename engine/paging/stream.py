"""What streams, where to and when, as data: the resident set, the ring's slots, and the copies of one pass.

A pass reads the same keys in the same order each time, so nothing is left to decide while it runs: what stays is chosen
once, and each other record has its place in a fixed slot and its turn. A slot holds the widest step that streams, so
that a step's keys are there together. Weights are not cut into bands of rows: what is wide is kept resident first, and
only under a budget that cannot keep it does the slot grow to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.paging.policy import ALIGNMENT_BYTES, aligned
from engine.plan import Plan, Step

PIECE_BYTES = 64 << 20
"""No slot is larger, unless a single step needs it: in one graph, two slots of this kept the link at 98.9 %."""
_PIECES = 64
"""Of how many pieces a budget is thought: a ring of two then takes a thirty-second of it at most."""
_SMALL_BYTES = 64 << 10
"""Records below this stay, all of them: a copy of so few bytes runs at a third of the link."""
_DEPTHS = (2, 1)
"""Slots of a ring: one fills while one is read; a single one where the budget has no room for two."""
_CHOICES = 8
"""Slot sizes that are tried, the narrowest ones that work."""
_SEARCH = 50_000
"""Counts that the search for the fullest resident set may try, many more than a handful of record sizes needs."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One key's bytes on their way into a slot.

    It may start once step `issue_after` has been issued (-1: at once), the slot's last reader before; step `needed_by`
    reads it first. Keys of one record go side by side, at multiples of 256 bytes.
    """

    record: int
    key: int
    nbytes: int
    slot: int
    slot_offset: int
    issue_after: int
    needed_by: int


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The copies of one pass, in the order in which they are issued, and where each step finds its streamed keys."""

    slots: int
    copies: tuple[Copy, ...]
    by_step: Mapping[int, tuple[Copy, ...]]
    """Step -> the copies to issue just before it."""
    places: Mapping[tuple[int, int], Copy]
    """(Step, key) -> the copy that brings it."""

    @property
    def nbytes(self) -> int:
        """Bytes that one pass copies."""
        return sum(copy.nbytes for copy in self.copies)

    @property
    def left(self) -> tuple[Copy, ...]:
        """What stands in the slots when the pass is over: the copies of each one's last turn."""
        held: dict[int, list[Copy]] = {}
        for copy in self.copies:
            if copy.slot_offset == 0:
                held[copy.slot] = []
            held[copy.slot].append(copy)
        return tuple(copy for turn in held.values() for copy in turn)

    @property
    def waits(self) -> int:
        """Copies that wait for the last reader of what their slot held before."""
        return sum(copy.issue_after >= 0 for copy in self.copies)


@dataclass(frozen=True, slots=True)
class Ring:
    """What a budget in whole granules is divided into: resident keys, a ring of `nbytes` for its slots, and a rest."""

    resident: frozenset[int]
    slots: int
    slot_bytes: int
    nbytes: int
    piece_bytes: int
    """What a slot may grow to, where it is smaller, out of room that no further record fits into."""
    unfilled_bytes: int


def piece_bytes(budget_bytes: int, granule_bytes: int) -> int:
    """A sixty-fourth of the budget, in whole granules, one at least and 64 MiB at most."""
    granules = -(-budget_bytes // _PIECES // granule_bytes)
    return min(max(granules, 1) * granule_bytes, max(PIECE_BYTES, granule_bytes))


def divide(plan: Plan, capacity_bytes: int, granule_bytes: int) -> Ring:
    """Choose the resident set and the ring together: the most bytes that stay beside a ring that serves the rest.

    `capacity_bytes` must hold the widest step, and less than all keys. Steps too wide for a slot have their records
    kept, so a slot may be as narrow as the budget can pay for; room that no record fits into widens it, up to a
    piece or its own last granule.
    """
    piece = piece_bytes(capacity_bytes, granule_bytes)
    records = _records(plan)
    sizes = {name: _width(plan, keys) for name, keys in records.items()}
    slots, choices = _slots(plan, sizes, capacity_bytes)
    best: tuple[int, int, frozenset[int]] | None = None
    for slot, wide in choices:
        room = capacity_bytes - slots * slot - sum(sizes[name] for name in wide)
        others = {name: size for name, size in sizes.items() if name not in wide}
        stays = wide | _fullest(others, room, min(_SMALL_BYTES, piece))
        total = sum(sizes[name] for name in stays)
        if best is None or total > best[0]:
            best = total, slot, stays
    assert best is not None, "the widest step does not fit: that was refused before"
    total, slot, stays = best
    left = capacity_bytes - total
    nbytes = min(left, slots * max(piece, -(-slot // granule_bytes) * granule_bytes))
    slot = nbytes // slots // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return Ring(frozenset(k for name in stays for k in records[name]), slots, slot, nbytes, piece, left - nbytes)


def fullest(plan: Plan, capacity_bytes: int) -> frozenset[int]:
    """The keys of the records of the most bytes that fit, small ones together; nothing else has to lie beside them."""
    records = _records(plan)
    sizes = {name: _width(plan, keys) for name, keys in records.items()}
    return frozenset(k for name in _fullest(sizes, capacity_bytes, _SMALL_BYTES) for k in records[name])


def schedule(plan: Plan, ring: Ring) -> StreamPlan:
    """The copies of one pass: steps in order, each step's streamed keys into the slot that is being filled.

    A key that a later step reads while its slot is still being filled is not copied again.
    """
    copies: list[Copy] = []
    places: dict[tuple[int, int], Copy] = {}
    last_reader = [-1] * ring.slots
    turn, used, free_after = -1, ring.slot_bytes, -1
    filled: dict[int, Copy] = {}  # what the slot being filled holds, by key
    for step in plan.steps:
        streamed = [k for k in dict.fromkeys(step.keys) if k not in ring.resident]
        if not streamed:
            continue
        fresh = [k for k in streamed if k not in filled]
        if used + sum(aligned(plan.keys[k].nbytes) for k in fresh) > ring.slot_bytes:
            turn, used, fresh = turn + 1, 0, streamed
            filled = {}
            free_after = last_reader[turn % ring.slots]
        for key in fresh:
            nbytes = plan.keys[key].nbytes
            made = Copy(plan.keys[key].record, key, nbytes, turn % ring.slots, used, free_after, step.index)
            used += aligned(nbytes)
            filled[key] = made
            copies.append(made)
        assert used <= ring.slot_bytes, "slot sized below its widest step"
        places |= {(step.index, k): filled[k] for k in streamed}
        last_reader[turn % ring.slots] = step.index
    return StreamPlan(ring.slots, tuple(copies), _by_step(copies, plan.steps), places)


def _by_step(copies: Sequence[Copy], steps: Sequence[Step]) -> dict[int, tuple[Copy, ...]]:
    order = [step.index for step in steps]
    following = dict(zip([-1, *order[:-1]], order, strict=True))
    grouped: dict[int, list[Copy]] = {}
    for copy in copies:
        grouped.setdefault(following[copy.issue_after], []).append(copy)
    return {step: tuple(group) for step, group in grouped.items()}


def _records(plan: Plan) -> dict[int, list[int]]:
    """Keys by record: the codes, scales and zero points of one weight are kept or streamed together."""
    records: dict[int, list[int]] = {}
    for key in plan.keys:
        records.setdefault(key.record, []).append(key.index)
    return records


def _width(plan: Plan, keys: Sequence[int]) -> int:
    return sum(aligned(plan.keys[k].nbytes) for k in set(keys))


def _slots(plan: Plan, sizes: Mapping[int, int], capacity: int) -> tuple[int, list[tuple[int, frozenset[int]]]]:
    """How many slots, two where that can be, and the narrowest ones, each with the records of all wider steps."""
    widths = sorted(((_width(plan, step.keys), step.keys) for step in plan.steps), key=lambda w: w[0], reverse=True)
    for slots in _DEPTHS:
        choices: dict[int, frozenset[int]] = {}
        wide: set[int] = set()
        total = 0
        for width, keys in widths:
            if width and width not in choices and slots * width + total <= capacity:
                choices[width] = frozenset(wide)
            fresh = {plan.keys[k].record for k in keys} - wide
            wide |= fresh
            total += sum(sizes[name] for name in fresh)
            if total > capacity:
                break
        if choices:
            return slots, sorted(choices.items())[:_CHOICES]
    return 0, []


def _fullest(sizes: Mapping[int, int], room: int, small: int) -> frozenset[int]:
    """Records of the most bytes that `room` holds, the small ones as one where it fits.

    Those of a size that go are spread over the pass: a copy waits for the reader of what its slot held, so between two
    readers the link is busy for as long as one copy takes, and no longer.
    """
    pool = [name for name, size in sizes.items() if size < small]
    pooled = sum(sizes[name] for name in pool)
    if pooled > room:
        pool, pooled = [], 0
    by_size: dict[int, list[int]] = {}
    for name, size in sizes.items():
        if not pool or size >= small:
            by_size.setdefault(size, []).append(name)
    order = sorted(by_size, reverse=True)
    counts = _counts(order, [len(by_size[size]) for size in order], room - pooled)
    chosen = [name for size, count in zip(order, counts, strict=True) for name in _spread(by_size[size], count)]
    return frozenset(pool + chosen)


def _spread(names: Sequence[int], count: int) -> list[int]:
    """So many of them, as evenly as can be."""
    return [name for i, name in enumerate(names) if (i + 1) * count // len(names) > i * count // len(names)]


def _counts(sizes: Sequence[int], most: Sequence[int], room: int) -> Sequence[int]:
    """How many of each size, largest first, come closest to `room`: the best, or the first best of a bounded search."""
    best, best_left = [0] * len(sizes), room
    for tried, (counts, left) in enumerate(_fillings(sizes, most, room)):
        if left < best_left:
            best, best_left = counts, left
        if best_left == 0 or (tried + 1) * len(sizes) >= _SEARCH:
            break
    return best


def _fillings(sizes: Sequence[int], most: Sequence[int], room: int) -> Iterator[tuple[list[int], int]]:
    """Ways to fill `room`, with what each leaves: as many as fit of every size, then fewer of the last but one, ..."""
    counts, start, left = [0] * len(sizes), 0, room
    while True:
        for i in range(start, len(sizes)):
            counts[i] = min(most[i], left // sizes[i]) if sizes[i] else most[i]
            left -= counts[i] * sizes[i]
        yield list(counts), left
        fewer = next((i for i in reversed(range(len(sizes) - 1)) if counts[i]), None)
        if fewer is None:
            return
        left += sizes[fewer] + sum(counts[i] * sizes[i] for i in range(fewer + 1, len(sizes)))
        counts[fewer] -= 1
        start = fewer + 1
