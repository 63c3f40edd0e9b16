"""The ledger: granules charged to owners. It counts and reports faults; it never asserts in a finalizer."""

from __future__ import annotations

from typing import Literal

from engine.counters import Tally
from engine.device.base import Device, Granule
from engine.errors import EngineError

Owner = Literal["weights", "kv"]


class Ledger:
    """Two accounts that must not be mixed: granules mapped (by owner) and granules owned by the pool."""

    def __init__(self, granule_bytes: int, limit_bytes: int | None, tally: Tally) -> None:
        self.granule_bytes = granule_bytes
        self.limit_bytes = limit_bytes
        self._tally = tally
        self._mapped: dict[Owner, int] = {"weights": 0, "kv": 0}
        self._owned = 0
        self._weights_allowed = 0
        self._peak_weights = 0
        self.publish()

    def charge(self, owner: Owner) -> None:
        """One granule was mapped for `owner`."""
        self._mapped[owner] += 1
        self.publish()

    def refund(self, owner: Owner) -> None:
        """One granule of `owner` was unmapped."""
        if self._mapped[owner] == 0:
            self._tally.add("ref_underflows")
            return
        self._mapped[owner] -= 1
        self.publish()

    def allow(self, nbytes: int) -> None:
        """What weights may map from here on: it is set aside from the limit, mapped or not."""
        self._weights_allowed = nbytes
        self.publish()

    def own(self, change: int) -> None:
        """The pool holds `change` granules more (or fewer)."""
        self._owned += change
        self.publish()

    def mapped_bytes(self, owner: Owner) -> int:
        """Bytes mapped for an owner, in whole granules."""
        return self._mapped[owner] * self.granule_bytes

    @property
    def peak_weight_bytes(self) -> int:
        """The most that was ever mapped for weights."""
        return self._peak_weights * self.granule_bytes

    @property
    def room_bytes(self) -> int | None:
        """Bytes that the KV cache may still map under the limit, beside what weights may map; None without a limit."""
        if self.limit_bytes is None:
            return None
        return self.limit_bytes - max(self._weights_allowed, self.mapped_bytes("weights")) - self.mapped_bytes("kv")

    @property
    def owned_bytes(self) -> int:
        """Bytes of every granule the pool holds, mapped or not."""
        return self._owned * self.granule_bytes

    def audit(self, device_mapped_bytes: int, free_bytes: int) -> None:
        """Hold the accounts against what the device says is mapped, and against what the pool has lying free.

        Mapped granules that nobody is charged for are unaccounted; owned ones that are neither mapped nor free are lost
        to a failed call, in quarantine.
        """
        charged = sum(self._mapped.values()) * self.granule_bytes
        self._tally.set("unaccounted_bytes", max(0, device_mapped_bytes - charged))
        self._tally.set("quarantined_bytes", max(0, self.owned_bytes - device_mapped_bytes - free_bytes))

    def publish(self) -> None:
        """Write gauges and peaks."""
        self._peak_weights = max(self._peak_weights, self._mapped["weights"])
        mapped = sum(self._mapped.values()) * self.granule_bytes
        self._tally.set("mapped_physical_bytes", self.mapped_bytes("weights"))
        self._tally.set("weight_capacity_bytes", self._weights_allowed)
        self._tally.set("kv_committed_bytes", self.mapped_bytes("kv"))
        self._tally.high("peak_kv_committed_bytes", self.mapped_bytes("kv"))
        self._tally.set("physical_owned_bytes", self.owned_bytes)
        self._tally.high("peak_committed_bytes", mapped)
        self._tally.high("oversubscribed_bytes", max(0, mapped - self.limit_bytes) if self.limit_bytes else 0)


class Pool:
    """Physical granules: created on demand, kept when unmapped, given back at the end."""

    def __init__(self, device: Device, ledger: Ledger) -> None:
        self._device = device
        self._ledger = ledger
        self._free: list[Granule] = []

    @property
    def free_bytes(self) -> int:
        """Bytes owned but unmapped."""
        return len(self._free) * self._ledger.granule_bytes

    def map(self, address: int, owner: Owner) -> None:
        """Map a granule at an address and charge it; one that could not be mapped stays here.

        Raises OutOfMemory when the device has none left.
        """
        if not self._free:
            self._free.append(self._device.create())
            self._device.tally.add("pool_creates")
            self._ledger.own(1)
        else:
            self._device.tally.add("pool_hits")
        self._device.map(address, self._free[-1])
        self._free.pop()
        self._ledger.charge(owner)

    def unmap(self, address: int, owner: Owner) -> None:
        """Unmap the granule at an address, keep it, and take it off the owner's account."""
        self._free.append(self._device.unmap(address))
        self._ledger.refund(owner)

    def map_range(self, granules: int, owner: Owner) -> int:
        """Reserve addresses for whole granules, one at least, and map them all, or nothing; where they start."""
        start = self._device.reserve(max(granules, 1) * self._ledger.granule_bytes)
        mapped = 0
        try:
            for mapped in range(granules):
                self.map(start + mapped * self._ledger.granule_bytes, owner)
        except EngineError:
            self.unmap_range(start, mapped, owner)
            raise
        return start

    def unmap_range(self, start: int, granules: int, owner: Owner) -> None:
        """Unmap the first granules of a reservation, which are all that it has mapped, and give the addresses back."""
        for i in range(granules):
            self.unmap(start + i * self._ledger.granule_bytes, owner)
        self._device.unreserve(start)

    def close(self) -> None:
        """Give every free granule back to the device."""
        while self._free:
            self._device.destroy(self._free.pop())
            self._ledger.own(-1)
