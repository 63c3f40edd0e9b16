"""Staging: a resident set that never moves, and a ring of mapped slots that everything else streams through.

One arena holds both, resident keys first; it is mapped whole before the first step and stays. A pass's copies are
issued between its steps and recorded into its graph like them: a captured pass is one segment that maps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType

from engine.counters import Tally
from engine.device.base import Device, Event
from engine.paging.arena import pack, refuse_small
from engine.paging.ledger import Pool
from engine.paging.resident import ResidentSet
from engine.paging.stream import Ring, StreamPlan, divide, schedule
from engine.paging.traffic import KeyTraffic
from engine.plan import Plan, Step


class StagedPager:
    """Residency of a plan's keys under a budget in bytes (None: no bound); every address is known from the start."""

    def __init__(self, device: Device, plan: Plan, budget_bytes: int | None, pool: Pool, tally: Tally) -> None:
        self._device = device
        self._keys = plan.keys
        self._tally = tally
        granule = device.granule_bytes
        views = pack(plan.keys, granule)
        arena = max((v.last for v in views), default=-1) + 1
        capacity = arena if budget_bytes is None else min(arena, budget_bytes // granule)
        refuse_small(plan, views, capacity, budget_bytes, granule)
        self.capacity_bytes = capacity * granule
        self.fits = arena <= capacity
        whole = Ring(frozenset(k.index for k in plan.keys), 0, 0, 0, 0, 0)
        self.ring = whole if self.fits else divide(plan, self.capacity_bytes, granule)
        for key in plan.keys:
            device.host_range(key.index, key.weight.data)
        self._set = ResidentSet(device, plan, self.ring.resident, self.ring.nbytes, pool, tally)
        self._streams: dict[int, StreamPlan] = {}  # by rows
        self._landing: dict[int, Event] = {}  # step -> what it has to wait for, in the order of the copies
        self.stream = self._of(plan)
        self.traffic = [KeyTraffic() for _ in plan.keys]

    @property
    def facts(self) -> Mapping[str, int]:
        """Where the budget went, and what one pass streams: bytes that follow from plan and budget alone."""
        return MappingProxyType(
            {
                "ring_slots": self.ring.slots,
                "slot_bytes": self.ring.slot_bytes,
                "ring_bytes": self.ring.nbytes,
                "piece_bytes": self.ring.piece_bytes,
                "resident_set_bytes": self._set.nbytes,
                "unfilled_bytes": self.ring.unfilled_bytes,
                "staged_bytes_per_step": self.stream.nbytes,
                "ring_waits_per_step": self.stream.waits,
            }
        )

    def steady(self, key: int) -> bool:
        """Always: a key is where the schedule says, in each pass anew, and that address never moves."""
        return True

    def resident(self, key: int) -> bool:
        """Whether the key is in now, and stays."""
        return self._set.loaded and key in self._set.places

    def preload(self) -> None:
        """Bring the resident set in before the first step: a load, not a page-in."""
        self._set.load()

    def issue(self, plan: Plan, step: Step) -> None:
        """Just before a step: fork the copies whose slots its predecessors read last, then join those that it needs."""
        due = self._of(plan).by_step.get(step.index, ())
        for copy in due:
            if copy.slot_offset == 0:  # all that the slot held is dead
                self._device.poison(self._slot(copy.slot), self.ring.slot_bytes)
        if due:
            self._device.wait("copy", self._device.mark("compute"))
        for needed_by, group in groupby(due, lambda copy: copy.needed_by):
            for copy in group:
                self._device.stage(self._slot(copy.slot) + copy.slot_offset, self._keys[copy.key].weight.data)
            self._landing[needed_by] = self._device.mark("copy")
        if step.index in self._landing:
            self._device.wait("compute", self._landing.pop(step.index))

    def join(self) -> None:
        """Have the steps from here on wait for every copy under way: a graph ends, or begins, with none."""
        for event in list(self._landing.values())[-1:]:  # copies run in order
            self._device.wait("compute", event)
        self._landing.clear()

    def touch(self, plan: Plan, step: Step) -> tuple[int, ...]:
        """The addresses of the keys that a step reads; each is there when the step runs, if its copies were issued."""
        stream = self._of(plan)
        addresses, seen = [], set[int]()
        for key in step.keys:
            traffic, nbytes = self.traffic[key], self._keys[key].nbytes
            copy = stream.places.get((step.index, key))
            if copy is None or copy.needed_by != step.index or key in seen:
                traffic.hits += 1
                self._tally.add("hits")
                self._tally.add("hit_bytes", nbytes)
            else:
                traffic.staged += 1
                self._tally.add("page_ins")
                self._tally.add("htod_bytes", nbytes)
                self._tally.add("staged_page_ins")
                self._tally.add("staged_bytes", nbytes)
                self._tally.add("ring_waits", int(copy.issue_after >= 0))
            seen.add(key)
            addresses.append(self._set.places[key] if copy is None else self._slot(copy.slot) + copy.slot_offset)
        return tuple(addresses)

    def release(self) -> None:
        """Nothing is pinned: a slot is taken over by the schedule alone."""

    def close(self) -> None:
        """Unmap everything and give addresses and granules back; the ledger must then stand at zero."""
        self._set.close()

    def _of(self, plan: Plan) -> StreamPlan:
        """The schedule of a plan's pass: its steps read the same keys in the same order, whatever the rows."""
        known = self._streams.get(plan.rows)
        if known is None:
            known = self._streams[plan.rows] = schedule(plan, self.ring)
        return known

    def _slot(self, slot: int) -> int:
        return self._set.behind + slot * self.ring.slot_bytes
