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
    kept = list(setting.keys)
    while kept:
        inside = frozenset(k.index for k in kept)
        slot = _slot_granules(setting, inside)
        mapped = len({g for k in kept for g in range(k.first, k.last + 1)})
        if mapped + slot <= setting.capacity:
            return StableSlot(inside, slot)
        kept.pop()
    return StableSlot(frozenset(), _slot_granules(setting, frozenset()))


def _slot_granules(setting: Setting, resident: frozenset[int]) -> int:
    """Granules that the widest step needs for its keys outside the resident set, each once, at an aligned offset."""
    sizes = {k.index: aligned(k.nbytes) for k in setting.keys}
    widest = max((sum(sizes[k] for k in set(step) if k not in resident) for step in setting.steps), default=0)
    return -(-widest // setting.granule_bytes)
