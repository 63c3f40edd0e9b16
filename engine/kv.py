"""The KV cache of one sequence: contiguous addresses per layer, granules committed as it grows.

Seq-major: position p of a layer starts at p * token_bytes, so growth commits granules at the tail, moves nothing, and
keeps captured graphs valid.
"""

from __future__ import annotations

from engine.device.base import Device
from engine.paging.ledger import Ledger, Pool
from engine.plan import KvGeometry

MIN_BUCKET_TOKENS = 256


def bucket(tokens: int, hard_max: int) -> int:
    """Capacity in tokens for `tokens`: the next power of two from 256, at most `hard_max`."""
    return min(hard_max, max(MIN_BUCKET_TOKENS, 1 << (tokens - 1).bit_length()))


def committed_bytes(geometry: KvGeometry, tokens: int, granule_bytes: int) -> int:
    """Granule bytes that `tokens` positions commit over all layers, keys and values."""
    return geometry.layers * 2 * -(-geometry.token_bytes * tokens // granule_bytes) * granule_bytes


class KvCache:
    """Keys and values of every layer, `capacity` positions of addresses each."""

    def __init__(self, device: Device, geometry: KvGeometry, capacity: int, ledger: Ledger, pool: Pool) -> None:
        self._device = device
        self._ledger = ledger
        self._pool = pool
        self.geometry = geometry
        self.capacity = capacity
        self._committed = 0  # granules of each range
        nbytes = geometry.token_bytes * capacity
        self._ranges = [(device.reserve(nbytes), device.reserve(nbytes)) for _ in range(geometry.layers)]

    def address(self, layer: int, what: str) -> int:
        """Where a layer's keys ("key") or values ("value") start."""
        return self._ranges[layer][0 if what == "key" else 1]

    def ensure(self, tokens: int) -> None:
        """Commit granules so that `tokens` positions are mapped."""
        granule = self._device.granule_bytes
        wanted = -(-self.geometry.token_bytes * tokens // granule)
        for index in range(self._committed, wanted):
            for pair in self._ranges:
                for start in pair:
                    self._device.map(start + index * granule, self._pool.take())
                    self._ledger.charge("kv")
        self._committed = max(self._committed, wanted)

    def close(self) -> None:
        """Unmap everything and give the addresses back."""
        granule = self._device.granule_bytes
        for pair in self._ranges:
            for start in pair:
                for index in range(self._committed):
                    self._pool.give(self._device.unmap(start + index * granule))
                    self._ledger.refund("kv")
                self._device.unreserve(start)
        self._ranges, self._committed = [], 0
