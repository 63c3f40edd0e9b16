"""The seed's byte-aware admission: a newcomer stays if enough room can be had from strictly smaller keys alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.paging.policy import Decision, KeyView, Room, Setting


class SizeFirst:
    """Keep large keys; the smallest go first, and only for strictly larger ones."""

    name = "size_first"
    slot_granules = 0

    def admit(self, key: KeyView, room: Room, resident: Sequence[KeyView]) -> Decision:
        """Stay if there is room, or if strictly smaller keys make enough of it; else a larger one would go too."""
        if room.fits:
            return "retain"
        smaller = _granules(k for k in resident if k.nbytes < key.nbytes)
        kept = _granules(k for k in resident if k.nbytes >= key.nbytes) | _granules((key,))
        return "retain" if room.free + len(smaller - kept) >= room.needed else "bypass"

    def victims(self, key: KeyView | None, resident: Sequence[KeyView]) -> Iterator[KeyView]:
        """Smallest first; equals oldest first."""
        return iter(sorted(resident, key=lambda k: k.nbytes))

    def steady(self) -> frozenset[int]:
        """A larger key may displace any."""
        return frozenset()


def _granules(keys: Iterable[KeyView]) -> set[int]:
    return {g for k in keys for g in range(k.first, k.last + 1)}


def make(setting: Setting) -> SizeFirst:
    """The policy needs to know nothing beforehand."""
    return SizeFirst()
