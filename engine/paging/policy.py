"""What a policy may decide: whether a newcomer stays, and who goes first. It moves nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal, Protocol

from engine.plan import Experts

ALIGNMENT_BYTES = 256
"""Keys start at multiples of this, in the arena and in a slot."""

Decision = Literal["retain", "bypass", "slot"]


@dataclass(frozen=True, slots=True)
class KeyView:
    """A key as a policy sees it: its number, its bytes, the first and last granule of the arena that it spans, and the
    bytes of a slot that it takes."""

    index: int
    nbytes: int
    first: int
    last: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Room:
    """Budget left, in granules: `free` now, `needed` for the newcomer beyond what its neighbours have mapped."""

    free: int
    needed: int

    @property
    def fits(self) -> bool:
        """Whether the newcomer fits as things stand."""
        return self.needed <= self.free


class Policy(Protocol):
    """Decides on admission and eviction order."""

    name: str
    slot_granules: int
    """Granules of the fixed slot that bypasses land in; 0: each bypass lands at its own addresses."""

    def admit(self, key: KeyView, room: Room, resident: Sequence[KeyView]) -> Decision:
        """Whether the newcomer is kept, passes through, or lands in the fixed slot. `resident` is oldest first."""
        ...

    def victims(self, key: KeyView | None, resident: Sequence[KeyView]) -> Iterator[KeyView]:
        """Who goes, in order, until the newcomer (None: another owner of memory) has room.

        `resident` holds evictable keys, oldest first.
        """
        ...

    def steady(self) -> frozenset[int]:
        """Keys that this policy never evicts once they are in: their steps may be captured."""
        ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy is made from: keys in touch order, the keys of each step, capacity in granules.

    `banks` are experts that are keys of their own, with how many of them a token chooses; `heat` says how often some
    keys were read in a run before, where one is given.
    """

    keys: Sequence[KeyView]
    steps: Sequence[Sequence[int]]
    capacity: int
    granule_bytes: int
    banks: Sequence[Experts] = ()
    heat: Mapping[int, int] = field(default_factory=dict)


Maker = Callable[[Setting], Policy]

_MAKERS: Mapping[str, str] = {
    "lru": "engine.paging.lru",
    "stable": "engine.paging.stable",
    "stable_slot": "engine.paging.stable_slot",
    "size_first": "engine.paging.size_first",
}


def aligned(nbytes: int) -> int:
    """Bytes up to the next aligned offset."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def make(name: str, setting: Setting) -> Policy:
    """The policy of that name. Each lives in a module of its own, with one function `make`."""
    maker: Maker = import_module(_MAKERS[name]).make
    return maker(setting)
