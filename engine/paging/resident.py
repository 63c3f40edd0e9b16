"""Keys that are chosen once and stay: packed at the start of one mapped arena, loaded before the first step."""

from __future__ import annotations

from collections.abc import Collection

from engine.counters import Tally
from engine.device.base import Device
from engine.paging.arena import offsets
from engine.paging.ledger import Pool
from engine.paging.policy import aligned
from engine.plan import Plan


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
        self._keys = [k for k in plan.keys if k.index in keys]
        starts = offsets(self._keys)
        packed = starts[-1] + aligned(self._keys[-1].nbytes) if starts else 0
        self._granules = -(-(packed + further_bytes) // device.granule_bytes)
        self._base = pool.map_range(self._granules, "weights")
        self.places = {k.index: self._base + at for k, at in zip(self._keys, starts, strict=True)}
        self.behind = self._base + packed
        """Where the further memory starts."""
        self.nbytes = sum(k.nbytes for k in self._keys)
        self.loaded = False
        self._publish()

    def load(self) -> None:
        """Bring all of them in: a load, not a page-in."""
        for key in self._keys:
            self._device.copy_in(self.places[key.index], key.weight.data)
            self._tally.add("loaded_keys")
            self._tally.add("loaded_bytes", key.nbytes)
        self.loaded = True
        self._publish()

    def close(self) -> None:
        """Unmap everything and give addresses and granules back."""
        self.loaded = False
        self._pool.unmap_range(self._base, self._granules, "weights")
        self._publish()

    def _publish(self) -> None:
        nbytes = self.nbytes if self.loaded else 0
        self._tally.set("resident_keys", len(self._keys) if self.loaded else 0)
        self._tally.set("content_resident_bytes", nbytes)
        self._tally.high("peak_resident_bytes", nbytes)
