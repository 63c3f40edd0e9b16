"""Least recently used: the newcomer always stays, the oldest go. On a cyclic scan over budget it never hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.paging.policy import Decision, KeyView, Room, Setting


class Lru:
    """Always retain; evict from the front."""

    name = "lru"
    slot_granules = 0

    def admit(self, key: KeyView, room: Room, resident: Sequence[KeyView]) -> Decision:
        """Every newcomer stays."""
        return "retain"

    def victims(self, key: KeyView | None, resident: Sequence[KeyView]) -> Iterator[KeyView]:
        """Oldest first."""
        return iter(resident)

    def steady(self) -> frozenset[int]:
        """Anything may be evicted."""
        return frozenset()


def make(setting: Setting) -> Lru:
    """The policy needs to know nothing beforehand."""
    return Lru()
