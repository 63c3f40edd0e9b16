"""Stable with a fixed slot: what does not stay lands in one mapped slot, charged to the budget, and evicts nobody.

A pure cyclic scan of n equal keys then hits c of n, c being what is left of the budget beside the slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.paging.policy import Decision, KeyView, Room, Setting, aligned


class StableSlot:
    """A resident set fixed from the start, first come first kept; the rest through the slot."""

    name = "stable_slot"

    def __init__(self, resident: frozenset[int], slot_granules: int) -> None:
        self._resident = resident
        self.slot_granules = slot_granules

    def admit(self, key: KeyView, room: Room, resident: Sequence[KeyView]) -> Decision:
        """By the fixed set."""
        return "retain" if key.index in self._resident else "slot"

    def victims(self, key: KeyView | None, resident: Sequence[KeyView]) -> Iterator[KeyView]:
        """Nobody goes."""
        return iter(())

    def steady(self) -> frozenset[int]:
        """The fixed set."""
        return self._resident


def make(setting: Setting) -> StableSlot:
    """Choose slot and resident set together.

    The slot must hold the keys of one step that are not resident; a larger resident set leaves need for a smaller slot,
    so keys are dropped from the end until both fit.
    """
    held: set[int] = set()
    mapped = []  # granules of the first 1, 2, ... keys
    for key in setting.keys:
        held.update(range(key.first, key.last + 1))
        mapped.append(len(held))
    readers: dict[int, list[int]] = {}
    for number, step in enumerate(setting.steps):
        for index in set(step):
            readers.setdefault(index, []).append(number)
    widths, widest = [0] * len(setting.steps), 0  # of each step's keys that were dropped, at aligned offsets
    for kept in range(len(setting.keys), 0, -1):
        slot = -(-widest // setting.granule_bytes)
        if mapped[kept - 1] + slot <= setting.capacity:
            return StableSlot(frozenset(k.index for k in setting.keys[:kept]), slot)
        dropped = setting.keys[kept - 1]
        for number in readers.get(dropped.index, ()):
            widths[number] += aligned(dropped.nbytes)
            widest = max(widest, widths[number])
    return StableSlot(frozenset(), -(-widest // setting.granule_bytes))
