"""Zero copy: a resident set that never moves, and everything else read in place, over the link, by each step itself.

What does not stay has no granule and no page-in: its host memory is mapped into the device's address space once, and a
step's kernel reads it there in every pass. No address ever changes, so a captured pass is one segment. There is no
least budget either: a step wider than the budget reads its keys in place like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from engine.counters import Tally
from engine.device.base import Device
from engine.errors import EngineError
from engine.paging.arena import pack
from engine.paging.ledger import Pool
from engine.paging.resident import ResidentSet
from engine.paging.stream import fullest
from engine.paging.traffic import KeyTraffic
from engine.plan import Plan, Step


class ZeroCopyPager:
    """Residency of a plan's keys under a budget in bytes (None: no bound); every address is known from the start."""

    def __init__(self, device: Device, plan: Plan, budget_bytes: int | None, pool: Pool, tally: Tally) -> None:
        self._device = device
        self._keys = plan.keys
        self._tally = tally
        granule = device.granule_bytes
        arena = max((v.last for v in pack(plan.keys, granule)), default=-1) + 1
        capacity = arena if budget_bytes is None else min(arena, budget_bytes // granule)
        self.capacity_bytes = capacity * granule
        self.fits = arena <= capacity
        stays = frozenset(k.index for k in plan.keys) if self.fits else fullest(plan, self.capacity_bytes)
        for key in plan.keys:
            device.host_range(key.index, key.weight.data)
        self._set = ResidentSet(device, plan, stays, 0, pool, tally)
        cold = [k for k in plan.keys if k.index not in stays]
        self._in_place: dict[int, int] = {}
        try:
            self._in_place.update((k.index, device.map_host(k.weight.data)) for k in cold)
        except EngineError:
            self.close()
            raise
        self._of_step = sum(plan.keys[k].nbytes for s in plan.steps for k in s.keys if k in self._in_place)
        self.traffic = [KeyTraffic() for _ in plan.keys]
        tally.set("zero_copy_binds", len(self._in_place))

    @property
    def facts(self) -> Mapping[str, int]:
        """Where the budget went, and what one pass reads in place: bytes that follow from plan and budget alone."""
        return MappingProxyType({"resident_set_bytes": self._set.nbytes, "zero_copy_bytes_per_step": self._of_step})

    def steady(self, key: int) -> bool:
        """Always: no address changes, and nothing has to be brought in."""
        return True

    def resident(self, key: int) -> bool:
        """Whether the key is in device memory now, and stays."""
        return self._set.loaded and key in self._set.places

    def preload(self) -> None:
        """Bring the resident set in before the first step: a load, not a page-in."""
        self._set.load()

    def issue(self, plan: Plan, step: Step) -> None:
        """Nothing moves."""

    def join(self) -> None:
        """Nothing is under way."""

    def touch(self, plan: Plan, step: Step) -> tuple[int, ...]:
        """The addresses of the keys that a step reads. A read in place counts each time: nothing of it stays."""
        addresses = []
        for key in step.keys:
            traffic, nbytes = self.traffic[key], self._keys[key].nbytes
            there = self._in_place.get(key)
            if there is None:
                traffic.hits += 1
                self._tally.add("hits")
                self._tally.add("hit_bytes", nbytes)
            else:
                traffic.in_place += 1
                self._tally.add("zero_copy_reads")
                self._tally.add("zero_copy_bytes", nbytes)
            addresses.append(self._set.places[key] if there is None else there)
        return tuple(addresses)

    def release(self) -> None:
        """Nothing is pinned."""

    def close(self) -> None:
        """Give addresses and granules back; the ledger must then stand at zero."""
        self._set.close()
        while self._in_place:
            self._device.unmap_host(self._in_place.popitem()[1])
        self._tally.set("zero_copy_binds", 0)
