"""The seed's rule: what fits stays; once full, what is there is kept and newcomers bypass.

A bypass needs physical room too and may evict the front for it; that room is not given to later newcomers, so after the
first pass of a cyclic scan the resident set stands still and nothing is evicted (onnx-genai section 1.6, #723).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.paging.policy import Decision, KeyView, Room, Setting


class Stable:
    """Retain until the first newcomer that does not fit; bypass from then on."""

    name = "stable"
    slot_granules = 0

    def __init__(self) -> None:
        self._full = False

    def admit(self, key: KeyView, room: Room, resident: Sequence[KeyView]) -> Decision:
        """Stay while nothing was ever turned away."""
        self._full = self._full or not room.fits
        return "bypass" if self._full else "retain"

    def victims(self, key: KeyView | None, resident: Sequence[KeyView]) -> Iterator[KeyView]:
        """Oldest first."""
        return iter(resident)

    def steady(self) -> frozenset[int]:
        """A bypass may evict anything."""
        return frozenset()


def make(setting: Setting) -> Stable:
    """The policy needs to know nothing beforehand."""
    return Stable()
