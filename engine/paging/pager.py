"""The pager acts: it maps, fills and evicts keys as the policy decides, and counts what it did.

Every key has addresses of its own in one packed arena, reserved once: a key that comes back comes back to the same
place. A granule shared by neighbours is held while any of them is in. A granule that nobody holds stays mapped until
its room is needed, so that neighbours that pass through one after another share one mapping.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType

from engine.counters import Tally
from engine.device.base import Device
from engine.errors import EngineError, Refused
from engine.paging.arena import granules, minimum_budget, offsets, pack, refuse_small
from engine.paging.ledger import Ledger, Pool
from engine.paging.policy import KeyView, Policy, Room, Setting, make
from engine.paging.traffic import Filling, KeyTraffic
from engine.plan import Plan, Step


class Pager:
    """Residency of a plan's keys under a budget in bytes (None: no bound)."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        policy: str,
        budget_bytes: int | None,
        ledger: Ledger,
        pool: Pool,
        tally: Tally,
        heat: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._device = device
        self._plan = plan
        self._keys = plan.keys
        self._ledger = ledger
        self._pool = pool
        self._tally = tally
        self._granule = device.granule_bytes
        self._views = pack(plan.keys, self._granule)
        self._steps = [s.keys for s in plan.steps if s.keys]
        arena = max((v.last for v in self._views), default=-1) + 1
        self.capacity = arena if budget_bytes is None else min(arena, budget_bytes // self._granule)
        self.fits = arena <= self.capacity
        refuse_small(plan, self._views, self.capacity, budget_bytes, self._granule)
        self._name, self._heat = policy, heat
        self._banks = [s.experts for s in plan.steps if s.experts is not None]
        self._policy = self._make("lru" if self.fits else policy, self.capacity)
        self.epoch = 0
        """How often keys that were steady no longer are."""
        ledger.allow(self.capacity_bytes)
        for key in plan.keys:
            for piece in key.pieces:
                device.host_range(key.index, piece.weight.data, piece.offset_bytes)
        self._base = device.reserve(max(arena, 1) * self._granule)
        try:
            self._slot, self._slot_used = self._map_slot(), 0
        except EngineError:
            device.unreserve(self._base)
            raise
        self._references = [0] * arena
        self._held = 0  # granules with a reference
        self._idle: OrderedDict[int, None] = OrderedDict()  # mapped without one, longest idle first
        self._resident: OrderedDict[int, KeyView] = OrderedDict()
        self._content = 0  # bytes of resident keys
        self._passing: list[KeyView] = []  # bypasses of the step in flight
        self._in_slot: dict[int, int] = {}  # key -> address, of the step in flight
        self._left: dict[int, int] = {}  # the same, of the step that used the slot last
        self._pinned: set[int] = set()
        self._offsets = offsets(plan.keys, self._granule)
        self.traffic = [KeyTraffic() for _ in plan.keys]
        self._arena_capacity = self.capacity - self._policy.slot_granules
        self._publish()

    @cached_property
    def least_bytes(self) -> int:
        """What the widest step needs, in whole granules."""
        return minimum_budget(self._plan, self._granule)

    @property
    def capacity_bytes(self) -> int:
        """The budget in whole granules."""
        return self.capacity * self._granule

    @property
    def facts(self) -> Mapping[str, int]:
        """Nothing beyond what counters say."""
        return {}

    @property
    def filling(self) -> Filling:
        """Granules that resident keys hold, and the fixed slot."""
        return Filling(self._held * self._granule, self._policy.slot_granules * self._granule)

    def steady(self, key: int) -> bool:
        """Whether a key, once in, is never evicted, so that a graph may read it without asking."""
        return self.fits or key in self._policy.steady()

    def resident(self, key: int) -> bool:
        """Whether the key is in now."""
        return key in self._resident

    def standing(self) -> Iterator[tuple[int, int]]:
        """Resident keys, and what the last step to use the slot left there."""
        yield from ((key, self.place(key)) for key in self._resident)
        yield from (self._in_slot or self._left).items()

    def place(self, key: int) -> int:
        """Where the key stands while it is resident."""
        return self._base + self._offsets[key]

    def can_hold(self, keys: Sequence[int]) -> bool:
        """Whether all of these can stand at once, whatever is in now."""
        if self._slot is None:
            return granules(self._views, keys) <= self._arena_capacity
        passing = sum(self._views[k].slot_bytes for k in keys if k not in self._policy.steady())
        return passing <= self._policy.slot_granules * self._granule

    def preload(self) -> None:
        """Bring in, before the first step, every key where all fit, else experts that stay: a load, not a page-in."""
        stays = [self._views[k] for bank in self._banks for k in bank.keys if k in self._policy.steady()]
        for view in self._views if self.fits else stays:
            self._bring_in(view)
            self._resident[view.index] = view
            self._content += view.nbytes
            self._tally.add("loaded_keys")
            self._tally.add("loaded_bytes", view.nbytes)
        self._publish()

    def issue(self, plan: Plan, step: Step) -> None:
        """Nothing moves but on a touch."""

    def join(self) -> None:
        """Nothing is under way: copies and steps are one queue."""

    def touch(self, plan: Plan, step: Step, experts: Sequence[int] = ()) -> tuple[int, ...]:
        """Make the keys that a step reads readable, of experts these; addresses. They stay pinned until `release`."""
        return tuple(self._touch(key) for key in (*step.keys, *experts))

    def touch_all(self, plan: Plan, steps: Sequence[Step]) -> None:
        """Count the touches of steps whose keys all stay in; who was read last does not matter then."""
        assert self.fits
        read = [key for step in steps for key in step.keys]
        for key in read:
            self.traffic[key].hits += 1
        self._tally.add("hits", len(read))
        self._tally.add("hit_bytes", sum(self._views[key].nbytes for key in read))

    def _touch(self, key: int) -> int:
        if key in self._in_slot:  # the same key twice in one step
            self._hit(key)
            return self._in_slot[key]
        if key in self._resident:
            self._hit(key)
            self._pinned.add(key)
            return self.place(key)
        return self._page_in(self._views[key])

    def resize(self, capacity_bytes: int) -> None:
        """Go on with another budget in whole granules, between two steps; what no longer fits goes by the policy.

        Room that comes back is filled as keys are read.
        """
        assert not self._pinned and not self._passing, "a budget changes between steps"
        capacity = capacity_bytes // self._granule
        if capacity < self.capacity:
            self._shrink(capacity)
        if self._slot is None:
            self._slot = self._map_slot()
        self.capacity = capacity
        self._arena_capacity = capacity - self._policy.slot_granules
        self._ledger.allow(self.capacity_bytes)

    def _shrink(self, capacity: int) -> None:
        """Evict and unmap until all that is mapped, the slot included, is within `capacity` granules."""
        before = {v.index for v in self._views if self.steady(v.index)}
        policy = self._policy
        if self.fits or policy.slot_granules:  # chosen for what there was
            policy = self._make(self._name, capacity)
        resident = list(self._resident.values())
        room = capacity - policy.slot_granules
        if policy.slot_granules:  # what stays was fixed beforehand
            leave: Iterator[KeyView] = iter([v for v in resident if v.index not in policy.steady()])
        else:
            leave = takewhile(lambda _: self._held > room, policy.victims(None, resident))
        for victim in leave:
            self._evict(victim)
        if policy.slot_granules != self._policy.slot_granules:
            self._unmap_slot()
        while self._idle and self._held + len(self._idle) > room:
            self._unmap_idle()
        self._policy, self.fits = policy, False
        self.epoch += before != {v.index for v in self._views if self.steady(v.index)}

    def release(self) -> None:
        """The step is over: bypasses go, pins are lifted."""
        for view in self._passing:
            self._drop(view)
        self._passing.clear()
        if self._slot_used:
            self._left, self._in_slot = self._in_slot, {}
        self._in_slot.clear()
        self._slot_used = 0
        self._pinned.clear()

    def close(self) -> None:
        """Unmap everything and give addresses and granules back; the ledger must then stand at zero."""
        self.release()
        for view in list(self._resident.values()):
            self._drop(view)
        self._resident.clear()
        self._content = 0
        while self._idle:
            self._unmap_idle()
        self._unmap_slot()
        self._device.unreserve(self._base)
        self._publish()

    def _map_slot(self) -> int | None:
        granules = self._policy.slot_granules
        return self._pool.map_range(granules, "weights") if granules else None

    def _page_in(self, view: KeyView) -> int:
        key = self._keys[view.index]
        evictable = list(self._resident.values())
        if self._pinned:  # they were read last, so they stand at the end
            del evictable[-len(self._pinned) :]
        decision = self._policy.admit(view, self._room(view), evictable)
        self._tally.add("page_ins")
        self._tally.add("htod_bytes", key.nbytes)
        if decision == "slot":
            return self._through_slot(view)
        self._make_room(view, evictable)
        address = self._bring_in(view)
        if decision == "retain":
            self._resident[view.index] = view
            self._content += view.nbytes
            self._pinned.add(view.index)
            self.traffic[view.index].retained += 1
            self._tally.add("retained_page_ins")
            self._tally.add("retained_bytes", key.nbytes)
            self._publish()
        else:
            self._passing.append(view)
            self._in_slot[view.index] = address
            self._count_bypass(view)
        return address

    def _through_slot(self, view: KeyView) -> int:
        assert self._slot is not None
        address = self._slot + self._slot_used
        self._slot_used += view.slot_bytes
        assert self._slot_used <= self._policy.slot_granules * self._granule, "slot sized below its widest step"
        self._fill(view.index, address)
        self._in_slot[view.index] = address
        self._count_bypass(view)
        return address

    def _fill(self, key: int, address: int) -> None:
        for piece in self._keys[key].pieces:
            self._device.copy_in(address + piece.offset_bytes, piece.weight.data)

    def _count_bypass(self, view: KeyView) -> None:
        self.traffic[view.index].bypassed += 1
        self._tally.add("bypassed_page_ins")
        self._tally.add("bypassed_page_in_bytes", view.nbytes)

    def _make_room(self, view: KeyView, evictable: Sequence[KeyView]) -> None:
        if self._room(view).fits:
            return
        for victim in self._policy.victims(view, evictable):
            before = self._held
            self._evict(victim)
            if self._held == before:
                self._tally.add("admission_no_progress")
            if self._room(view).fits:
                return
        raise Refused(
            f"no room for key {self._keys[view.index].name}: {self._room(view).needed * self._granule} bytes needed, "
            f"{self._room(view).free * self._granule} free and nothing left to evict",
            "raise the weight budget",
        )

    def _evict(self, victim: KeyView) -> None:
        del self._resident[victim.index]
        self._content -= victim.nbytes
        self._drop(victim)
        self.traffic[victim.index].evicted += 1
        self._tally.add("evictions")
        self._tally.add("evicted_bytes", victim.nbytes)
        self._publish()

    def _hit(self, key: int) -> None:
        if key in self._resident:
            self._resident.move_to_end(key)
        self.traffic[key].hits += 1
        self._tally.add("hits")
        self._tally.add("hit_bytes", self._keys[key].nbytes)

    def _room(self, view: KeyView) -> Room:
        needed = sum(1 for g in range(view.first, view.last + 1) if self._references[g] == 0)
        return Room(self._arena_capacity - self._held, needed)

    def _bring_in(self, view: KeyView) -> int:
        """Map a key and fill it, or neither; its address."""
        address = self.place(view.index)
        self._map(view)
        try:
            self._fill(view.index, address)
        except EngineError:
            self._drop(view)
            raise
        return address

    def _map(self, view: KeyView) -> None:
        """Hold the key's granules, mapping those that are not mapped yet; idle ones give way, longest idle first.

        What was mapped when the device refused the next one is idle.
        """
        fresh = [g for g in range(view.first, view.last + 1) if self._references[g] == 0]
        unmapped = [g for g in fresh if g not in self._idle]
        for g in fresh:
            if g in self._idle:
                self._idle.move_to_end(g)  # these are not given up for each other
        for g in unmapped:
            if self._ledger.mapped_bytes("weights") >= self.capacity_bytes:
                self._unmap_idle()
            self._pool.map(self._base + g * self._granule, "weights")
            self._idle[g] = None
        for g in fresh:
            del self._idle[g]
        self._held += len(fresh)
        for g in range(view.first, view.last + 1):
            self._references[g] += 1

    def _drop(self, view: KeyView) -> None:
        """Let go of a key: its bytes are dead, granules that nobody else holds are idle."""
        self._device.poison(self.place(view.index), self._keys[view.index].span_bytes)
        for g in range(view.first, view.last + 1):
            self._references[g] -= 1
            if self._references[g] == 0:
                self._held -= 1
                self._idle[g] = None

    def _unmap_idle(self) -> None:
        granule, _ = self._idle.popitem(last=False)
        self._pool.unmap(self._base + granule * self._granule, "weights")

    def _unmap_slot(self) -> None:
        if self._slot is not None:
            self._pool.unmap_range(self._slot, self._policy.slot_granules, "weights")
            self._slot = None
            self._left = {}

    def _make(self, name: str, capacity: int) -> Policy:
        return make(name, Setting(self._views, self._steps, capacity, self._granule, self._banks, self._heat))

    def _publish(self) -> None:
        self._tally.set("resident_keys", len(self._resident))
        self._tally.set("content_resident_bytes", self._content)
        self._tally.high("peak_resident_bytes", self._content)
