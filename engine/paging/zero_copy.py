"""Zero copy: a resident set that never moves, and everything else read in place, over the link, by each step itself.

What does not stay has no granule and no page-in: its host memory is mapped into the device's address space once, and a
step's kernel reads it there in every pass. No address ever changes, so a captured pass is one segment. There is no
least budget either: a step wider than the budget reads its keys in place like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.paging.resident import FixedPager
from engine.paging.stream import fullest
from engine.plan import Plan, Step


class ZeroCopyPager(FixedPager):
    """Residency of a plan's keys under a budget in bytes (None: no bound)."""

    least_bytes = 0

    def standing(self) -> Iterator[tuple[int, int]]:
        """The resident set, and everything else where its host memory is mapped."""
        yield from super().standing()
        yield from self._in_place.items()

    def issue(self, plan: Plan, step: Step) -> None:
        """Nothing moves."""

    def join(self) -> None:
        """Nothing is under way."""

    def touch(self, plan: Plan, step: Step, experts: Sequence[int] = ()) -> tuple[int, ...]:
        """The addresses of the keys that a step reads. A read in place counts each time: nothing of it stays."""
        assert not experts, "what is read in place needs no choice beforehand: banks are whole"
        addresses = []
        for key in step.keys:
            there = self._in_place.get(key)
            if there is None:
                self._hit(key)
            else:
                self.traffic[key].in_place += 1
                self._tally.add("zero_copy_reads")
                self._tally.add("zero_copy_bytes", self._keys[key].nbytes)
            addresses.append(self._set.places[key] if there is None else there)
        return tuple(addresses)

    def release(self) -> None:
        """Nothing is pinned."""

    def _choose(self, capacity_bytes: int) -> tuple[frozenset[int], int]:
        stays = frozenset(k.index for k in self._keys) if self.fits else fullest(self._plan, capacity_bytes)
        self._in_place: dict[int, int] = {}
        for key in self._keys:
            if key.index not in stays:
                self._in_place[key.index] = self._device.map_host(key.weight.data)
        self._tally.set("zero_copy_binds", len(self._in_place))
        return stays, 0

    def _division(self) -> Mapping[str, int]:
        return {"resident_set_bytes": self._set.nbytes}

    def _per_step(self) -> Mapping[str, int]:
        read = (k for step in self._plan.steps for k in step.keys if k in self._in_place)
        return {"zero_copy_bytes": sum(self._keys[k].nbytes for k in read)}

    def _let_go(self) -> None:
        while self._in_place:
            self._device.unmap_host(self._in_place.popitem()[1])
        self._tally.set("zero_copy_binds", 0)
