"""Keys that are chosen once and stay: packed at the start of one mapped arena, loaded before the first step.

A budget that changes is a new choice: the old set goes, whole, and the new one is loaded at addresses of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from engine.counters import Tally
from engine.device.base import Device
from engine.errors import EngineError
from engine.paging.arena import offsets, pack
from engine.paging.ledger import Ledger, Pool
from engine.paging.policy import aligned
from engine.paging.traffic import Filling, KeyTraffic
from engine.plan import Plan, Step


class ResidentSet:
    """Keys at addresses that hold, and `further_bytes` of mapped memory behind them."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        keys: Collection[int],
        further_bytes: int,
        pool: Pool,
        tally: Tally,
    ) -> None:
        self._device = device
        self._pool = pool
        self._tally = tally
        self.keys = [k for k in plan.keys if k.index in keys]
        starts = offsets(self.keys)
        packed = starts[-1] + aligned(self.keys[-1].nbytes) if starts else 0
        self.filling = Filling(packed, further_bytes)
        self._granules = -(-(packed + further_bytes) // device.granule_bytes)
        self._base = pool.map_range(self._granules, "weights")
        self.places = {k.index: self._base + at for k, at in zip(self.keys, starts, strict=True)}
        self.behind = self._base + packed
        """Where the further memory starts."""
        self.nbytes = sum(k.nbytes for k in self.keys)
        self.loaded = False
        self._open = True
        self._publish()

    def load(self) -> None:
        """Bring all of them in: a load, not a page-in."""
        for key in self.keys:
            self._device.copy_in(self.places[key.index], key.weight.data)
            self._tally.add("loaded_keys")
            self._tally.add("loaded_bytes", key.nbytes)
        self.loaded = True
        self._publish()

    def close(self) -> None:
        """Unmap everything and give addresses and granules back, once."""
        if not self._open:
            return
        self._open = self.loaded = False
        self._pool.unmap_range(self._base, self._granules, "weights")
        self._publish()

    def _publish(self) -> None:
        nbytes = self.nbytes if self.loaded else 0
        self._tally.set("resident_keys", len(self.keys) if self.loaded else 0)
        self._tally.set("content_resident_bytes", nbytes)
        self._tally.high("peak_resident_bytes", nbytes)


class FixedPager(ABC):
    """A pager whose resident set, and way with all else, is laid out once for a budget; no address moves after that."""

    epoch = 0
    """How often everything was laid out anew."""

    def __init__(
        self, device: Device, plan: Plan, budget_bytes: int | None, ledger: Ledger, pool: Pool, tally: Tally
    ) -> None:
        self._device = device
        self._plan = plan
        self._keys = plan.keys
        self._ledger = ledger
        self._pool = pool
        self._tally = tally
        granule = device.granule_bytes
        self._arena = (max((v.last for v in pack(plan.keys, granule)), default=-1) + 1) * granule
        self.traffic = [KeyTraffic() for _ in plan.keys]
        self._preloaded = False
        self._replanned_keys = self._since = 0
        self._of_epochs: dict[str, int] = {}
        for key in plan.keys:
            device.host_range(key.index, key.weight.data)
        self._lay_out(self._arena if budget_bytes is None else min(self._arena, budget_bytes // granule * granule))

    @abstractmethod
    def _choose(self, capacity_bytes: int) -> tuple[frozenset[int], int]:
        """The keys that stay, and bytes to map behind them."""

    @abstractmethod
    def _division(self) -> Mapping[str, int]:
        """How the capacity is divided."""

    @abstractmethod
    def _per_step(self) -> Mapping[str, int]:
        """What one pass will count, by counter: it follows from plan and budget alone."""

    @abstractmethod
    def _let_go(self) -> None:
        """Give up what is held beside the resident set."""

    @property
    def facts(self) -> Mapping[str, int]:
        """Where the budget went, what one pass comes to, and what all passes so far should have come to."""
        per_step = self._per_step()
        return MappingProxyType(
            {
                **self._division(),
                **{f"{name}_per_step": amount for name, amount in per_step.items()},
                **{f"{name}_foreseen": amount for name, amount in self._foreseen(per_step).items()},
                "replanned_keys": self._replanned_keys,
            }
        )

    @property
    def filling(self) -> Filling:
        """The resident set as it is packed, and what is mapped behind it."""
        return self._set.filling

    def steady(self, key: int) -> bool:
        """Always: no address moves, and no granule has to be mapped."""
        return True

    def resident(self, key: int) -> bool:
        """Whether the key is in now, and stays."""
        return self._set.loaded and key in self._set.places

    def standing(self) -> Iterator[tuple[int, int]]:
        """The resident set, once it is loaded."""
        yield from self._set.places.items() if self._set.loaded else ()

    def place(self, key: int) -> int:
        """Where a key of the resident set stands."""
        return self._set.places[key]

    def can_hold(self, keys: Sequence[int]) -> bool:
        """Whether all of these can be read at once: what does not stay needs no choice beforehand."""
        return True

    def preload(self) -> None:
        """Bring the resident set in before the first step: a load, not a page-in."""
        self._preloaded = True
        self._set.load()

    def resize(self, capacity_bytes: int) -> None:
        """Lay everything out anew for another budget in whole granules, between two passes; the old set is evicted."""
        self._of_epochs, self._since = self._foreseen(self._per_step()), self._passes()
        self.epoch += 1
        for key in self._set.keys if self._set.loaded else ():
            self.traffic[key.index].evicted += 1
            self._replanned_keys += 1
            self._tally.add("evictions")
            self._tally.add("evicted_bytes", key.nbytes)
        self._set.close()
        self._let_go()
        self._lay_out(capacity_bytes)
        if self._preloaded:
            self._set.load()

    def close(self) -> None:
        """Give addresses and granules back; the ledger must then stand at zero."""
        self._set.close()
        self._let_go()

    def _lay_out(self, capacity_bytes: int) -> None:
        self._ledger.allow(capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.fits = self._arena <= capacity_bytes
        try:
            stays, further = self._choose(capacity_bytes)
            self._set = ResidentSet(self._device, self._plan, stays, further, self._pool, self._tally)
        except EngineError:
            self._let_go()
            raise

    def touch_all(self, plan: Plan, steps: Sequence[Step]) -> None:
        """Count the touches of steps whose keys all stay in."""
        for step in steps:
            for key in step.keys:
                self._hit(key)

    def _hit(self, key: int) -> None:
        self.traffic[key].hits += 1
        self._tally.add("hits")
        self._tally.add("hit_bytes", self._keys[key].nbytes)

    def _passes(self) -> int:
        return int(self._tally.read().get("forward_steps", 0))

    def _foreseen(self, per_step: Mapping[str, int]) -> dict[str, int]:
        passes = self._passes() - self._since
        return {name: self._of_epochs.get(name, 0) + amount * passes for name, amount in per_step.items()}
