"""Staging: a resident set that never moves, and a ring of mapped slots that everything else streams through.

One arena holds both, resident keys first; it is mapped whole before the first step and stays. A pass's copies are
issued between its steps and recorded into its graph like them: a captured pass is one segment that maps nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby

from engine.counters import Tally
from engine.device.base import Device, Event
from engine.paging.arena import minimum_budget, pack, refuse_small
from engine.paging.ledger import Ledger, Pool
from engine.paging.resident import FixedPager
from engine.paging.stream import Ring, StreamPlan, divide, schedule
from engine.plan import Plan, Step


class StagedPager(FixedPager):
    """Residency of a plan's keys under a budget in bytes (None: no bound); every address is known from the start."""

    def __init__(
        self, device: Device, plan: Plan, budget_bytes: int | None, ledger: Ledger, pool: Pool, tally: Tally
    ) -> None:
        granule = device.granule_bytes
        capacity = 0 if budget_bytes is None else budget_bytes // granule
        refuse_small(plan, pack(plan.keys, granule), capacity, budget_bytes, granule)
        super().__init__(device, plan, budget_bytes, ledger, pool, tally)

    @cached_property
    def least_bytes(self) -> int:
        """What the widest step needs, in whole granules."""
        return minimum_budget(self._plan, self._device.granule_bytes)

    def standing(self) -> Iterator[tuple[int, int]]:
        """The resident set, and what the last pass left in the ring."""
        yield from super().standing()
        for copy in self.stream.left if self._passes() > self._since else ():
            yield copy.key, self._slot(copy.slot) + copy.slot_offset

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

    def touch(self, plan: Plan, step: Step, experts: Sequence[int] = ()) -> tuple[int, ...]:
        """The addresses of the keys that a step reads; each is there when the step runs, if its copies were issued."""
        assert not experts, "its schedule is fixed before routing is known: banks are whole"
        stream = self._of(plan)
        addresses, seen = [], set[int]()
        for key in step.keys:
            copy = stream.places.get((step.index, key))
            if copy is None or copy.needed_by != step.index or key in seen:
                self._hit(key)
            else:
                nbytes = self._keys[key].nbytes
                self.traffic[key].staged += 1
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

    def _choose(self, capacity_bytes: int) -> tuple[frozenset[int], int]:
        whole = Ring(frozenset(k.index for k in self._keys), 0, 0, 0, 0, 0)
        self.ring = whole if self.fits else divide(self._plan, capacity_bytes, self._device.granule_bytes)
        self._streams: dict[int, StreamPlan] = {}  # by rows
        self._landing: dict[int, Event] = {}  # step -> what it has to wait for, in the order of the copies
        self.stream = self._of(self._plan)
        return self.ring.resident, self.ring.nbytes

    def _division(self) -> Mapping[str, int]:
        return {
            "ring_slots": self.ring.slots,
            "slot_bytes": self.ring.slot_bytes,
            "ring_bytes": self.ring.nbytes,
            "piece_bytes": self.ring.piece_bytes,
            "resident_set_bytes": self._set.nbytes,
            "unfilled_bytes": self.ring.unfilled_bytes,
        }

    def _per_step(self) -> Mapping[str, int]:
        return {"staged_bytes": self.stream.nbytes, "ring_waits": self.stream.waits}

    def _let_go(self) -> None:
        """The ring lies in the arena of the resident set."""

    def _of(self, plan: Plan) -> StreamPlan:
        """The schedule of a plan's pass: its steps read the same keys in the same order, whatever the rows."""
        known = self._streams.get(plan.rows)
        if known is None:
            known = self._streams[plan.rows] = schedule(plan, self.ring)
        return known

    def _slot(self, slot: int) -> int:
        return self._set.behind + slot * self.ring.slot_bytes
