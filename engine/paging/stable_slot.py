"""Stable with a fixed slot: what does not stay lands in one mapped slot, charged to the budget, and evicts nobody.

A pure cyclic scan of n equal keys then hits c of n, c being what is left of the budget beside the slot. Of experts that
are keys of their own the resident set is the hot set: those that a run before read most, where one is given.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from engine.paging.policy import Decision, KeyView, Room, Setting


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
    so keys are dropped from the end until both fit. Experts come after all that each pass reads, the hottest first.
    """
    routed = {k for bank in setting.banks for k in bank.keys}
    each_pass = [k for k in setting.keys if k.index not in routed]
    experts = sorted((k for k in setting.keys if k.index in routed), key=lambda k: -setting.heat.get(k.index, 0))
    kept = [*each_pass, *experts]
    held = Counter(g for k in kept for g in range(k.first, k.last + 1))
    slot = _Slot(setting)
    while kept and len(held) + slot.granules > setting.capacity:
        dropped = kept.pop()
        slot.add(dropped)
        for g in range(dropped.first, dropped.last + 1):
            held[g] -= 1
            if not held[g]:
                del held[g]
    return StableSlot(frozenset(k.index for k in kept), slot.granules)


class _Slot:
    """What the widest step needs for its keys outside the resident set, each once, at an aligned offset."""

    def __init__(self, setting: Setting) -> None:
        self._granule = setting.granule_bytes
        self._readers: dict[int, list[int]] = defaultdict(list)
        for number, step in enumerate(setting.steps):
            for key in set(step):
                self._readers[key].append(number)
        self._banks = {k: number for number, bank in enumerate(setting.banks) for k in bank.keys}
        self._chosen = [bank.chosen for bank in setting.banks]
        self._outside: Counter[int] = Counter()  # experts of each bank
        self._width: Counter[int] = Counter()  # bytes of each step
        self._widest = 0

    @property
    def granules(self) -> int:
        """Whole granules of it."""
        return -(-self._widest // self._granule)

    def add(self, key: KeyView) -> None:
        """One key more is not resident."""
        for step in self._readers[key.index]:
            self._width[step] += key.slot_bytes
            self._widest = max(self._widest, self._width[step])
        if key.index in self._banks:  # a bank's experts are of one size
            bank = self._banks[key.index]
            self._outside[bank] += 1
            self._widest = max(self._widest, min(self._outside[bank], self._chosen[bank]) * key.slot_bytes)
