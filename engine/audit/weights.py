"""Keys on the device against their host bytes: a checksum for every granule that a key lies on."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.audit.difference import Bytes, Difference, extent, granule_of, plainly, shown
from engine.audit.watched import WatchedDevice
from engine.device.base import Launch
from engine.errors import DeviceFailure
from engine.layer_names import layer_of
from engine.plan import Key, Plan, Step

_NEEDLE_BYTES = 32
"""Of what stands in a key's place, so many are looked for among all keys: fewer may be anyone's."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes of one piece of a key that lie on one granule, as offsets into the key, and their checksum."""

    first: int
    end: int
    crc32: int


@dataclass(slots=True)
class Seen:
    """One key: how often it was checked, and the stretches at the place where it stood last."""

    checks: int = 0
    address: int = 0
    stretches: list[Stretch] = field(default_factory=list)


class Weights:
    """Checks keys of a plan on a device.

    Sums of host bytes are taken once, where a key is first seen, so that host memory that changes later is found too.
    """

    def __init__(self, device: WatchedDevice, plan: Plan) -> None:
        self._device = device
        self._plan = plan
        self._granule: int = device.granule_bytes
        self._sums: dict[tuple[int, int], list[list[Stretch]]] = {}  # key and where in a granule it starts -> by piece
        self._readers: dict[int, Step] = {}
        for step in reversed(plan.steps):
            keys = (*step.keys, *(step.experts.keys if step.experts is not None else ()))
            self._readers |= dict.fromkeys(keys, step)
        self.seen: dict[int, Seen] = {}
        self.keys = self.key_bytes = self.granules = 0
        """What was checked so far."""
        self.found: list[Difference] = []
        """One a key, in the order in which they came to light."""
        self._wrong: set[int] = set()
        self.crc32 = 0
        """Of all sums since it was last set to zero."""

    def hear(self, launch: Launch) -> None:
        """Check what a launch is about to read, at the addresses that it was given."""
        bases = {
            (p.operand.ref.index, p.address - p.operand.ref.offset_bytes): None
            for p in launch.placed
            if p.operand.ref.kind == "key"
        }
        for key, base in bases:
            self.check(key, base, launch.step)

    def check(self, key: int, base: int, step: Step | None = None) -> None:
        """Read a key back from where it should stand; what differs is among `found`."""
        whose = self._plan.keys[key]
        if not whose.nbytes or key in self._wrong:
            return
        sums = self._sums.setdefault((key, base % self._granule), list(self._cut(whose, base)))
        stretches = [stretch for piece in sums for stretch in piece]
        seen = self.seen.setdefault(key, Seen())
        seen.checks, seen.address, seen.stretches = seen.checks + 1, base, stretches
        self.keys += 1
        self.key_bytes += whose.nbytes
        self.granules += len({(base + s.first) // self._granule for s in stretches})
        wrong: list[tuple[Stretch, Bytes, Bytes]] = []
        for piece, own in zip(whose.pieces, sums, strict=True):
            at = piece.offset_bytes
            try:
                raw = np.frombuffer(self._device.copy_out(base + at, piece.weight.nbytes), np.uint8)
            except DeviceFailure as error:
                named = self._named(whose, base + at, base, step)
                self._tell(key, Difference(instead=f"nothing: {error}", **named))
                return
            for s in own:
                crc32 = zlib.crc32(raw[s.first - at : s.end - at].data)
                self.crc32 = zlib.crc32(crc32.to_bytes(4, "little"), self.crc32)
                if crc32 != s.crc32:
                    host = piece.weight.data.reshape(-1)
                    wrong.append((s, raw[s.first - at : s.end - at], host[s.first - at : s.end - at]))
        if wrong:
            self._tell(key, self._told(whose, base, step, wrong))

    def _tell(self, key: int, difference: Difference) -> None:
        self._wrong.add(key)
        self.found.append(difference)

    def rows(self) -> list[dict[str, Any]]:
        """Every key that was checked, with the sums of its granules where it stood last."""
        return [
            {
                "key": (key := self._plan.keys[index]).name,
                "nbytes": key.nbytes,
                "node": (step := self._readers[index]).node,
                "layer": layer_of(step.node, key.name),
                "checks": seen.checks,
                "address": f"{seen.address:#x}",
                "crc32": [f"{s.crc32:08x}" for s in seen.stretches],
            }
            for index, seen in sorted(self.seen.items())
        ]

    def _cut(self, key: Key, base: int) -> Iterator[list[Stretch]]:
        """Sums of the key's host bytes, piece by piece, cut where granules end."""
        for piece in key.pieces:
            made, at, end = [], piece.offset_bytes, piece.offset_bytes + piece.weight.nbytes
            host = piece.weight.data.reshape(-1)
            while at < end:
                until = min(end, ((base + at) // self._granule + 1) * self._granule - base)
                own = host[at - piece.offset_bytes : until - piece.offset_bytes]
                made.append(Stretch(at, until, zlib.crc32(own.data)))
                at = until
            yield made

    def _named(self, key: Key, address: int, base: int, step: Step | None) -> dict[str, Any]:
        """What a difference says of a key, whatever differs."""
        reader = step or self._readers[key.index]
        return {
            "what": "weights",
            "name": key.name,
            "layer": layer_of(reader.node, key.name),
            "step_index": reader.index,
            "node": reader.node,
            "address": address,
            "granule_index": address // self._granule - base // self._granule,
            **granule_of(address, self._granule, self._device.serials),
        }

    def _told(self, key: Key, base: int, step: Step | None, wrong: list[tuple[Stretch, Bytes, Bytes]]) -> Difference:
        stretch, raw, host = wrong[0]
        first, end = extent(raw, host) or (0, len(raw))
        equal = raw.tobytes() == host.tobytes()  # with what the host has now, and not with what it had at first
        named = self._named(key, base + stretch.first + first, base, step)
        return Difference(
            **{**named, "what": "host bytes" if equal else "weights"},
            granules=len({(base + s.first) // self._granule for s, _, _ in wrong}),
            first_byte=stretch.first + first,
            end_byte=stretch.first + end,
            expected="" if equal else shown(host[first:]),
            found="" if equal else shown(raw[first:]),
            crc32=(f"{stretch.crc32:08x}", f"{zlib.crc32(raw.data):08x}"),
            instead="" if equal else self._whose(raw, first, end),
        )

    def _whose(self, raw: Bytes, first: int, end: int) -> str:
        """What stands there, as far as bytes tell: poison, zeros, or a key's."""
        if told := plainly(raw[first:end]):
            return told
        needle = raw[first : first + _NEEDLE_BYTES].tobytes()
        if len(needle) == _NEEDLE_BYTES and not plainly(raw[first : first + _NEEDLE_BYTES]):
            for key in self._plan.keys:
                for piece in key.pieces:
                    at = piece.weight.data.tobytes().find(needle)
                    if at >= 0:
                        return f"{key.name} from byte {piece.offset_bytes + at}"
        return ""
