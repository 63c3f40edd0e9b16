"""The seed's byte-aware admission: a newcomer stays if it is larger than the smallest that could go for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.paging.policy import Decision, KeyView, Room, Setting


class SizeFirst:
    """Keep large keys; the smallest go first, and only for strictly larger ones."""

    name = "size_first"
    slot_granules = 0

    def admit(self, key: KeyView, room: Room, resident: Sequence[KeyView]) -> Decision:
        """Stay if there is room, or if some resident key is strictly smaller."""
        smaller = any(other.nbytes < key.nbytes for other in resident)
        return "retain" if room.fits or smaller else "bypass"

    def victims(self, key: KeyView, resident: Sequence[KeyView]) -> Iterator[KeyView]:
        """Smallest first; equals oldest first."""
        return iter(sorted(resident, key=lambda k: k.nbytes))

    def steady(self) -> frozenset[int]:
        """A larger key may displace any."""
        return frozenset()


def make(setting: Setting) -> SizeFirst:
    """The policy needs to know nothing beforehand."""
    return SizeFirst()
