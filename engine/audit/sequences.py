"""What two runs of the same prompts have computed, bit for bit: caches, states, logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.audit.difference import Bytes, Difference, extent, granule_of, plainly, shown
from engine.audit.watched import WatchedDevice
from engine.errors import DeviceFailure
from engine.layer_names import layer_of
from engine.run import Setup

_SIDES = ("key", "value")


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs, and the device as it sees it."""

    setup: Setup
    device: WatchedDevice


class Sequences:
    """Compares an audited run with its shadow; sizes are bytes."""

    def __init__(self, audited: Side, shadow: Side) -> None:
        self._audited, self._shadow = audited, shadow
        self.kv_bytes = self.state_bytes = self.logits = 0
        """What was compared so far."""

    def caches(self, lengths: Sequence[int]) -> Iterator[Difference]:
        """The earliest cached position that differs, in its lowest layer; keys before values."""
        found: list[tuple[int, int, Difference]] = []
        for sequence, tokens in enumerate(lengths):
            for layer in range(self._audited.setup.kv.geometry.layers):
                for what in _SIDES:
                    try:
                        told = self._cache(layer, what, sequence, tokens)
                    except DeviceFailure as error:
                        told = Difference("kv", f"{what} cache", sequence, 0, layer, instead=f"nothing: {error}")
                    if told is not None:
                        found.append((told.position or 0, layer, told))
        if found:
            yield min(found, key=lambda one: one[:2])[2]

    def states(self, sequences: int) -> Iterator[Difference]:
        """The first recurrent or convolution state that differs, in its lowest layer."""
        found = []
        for index, spec in enumerate(self._audited.setup.plan.states):
            for sequence in range(sequences):
                raw, expected = (_state(side, index, spec.nbytes, sequence) for side in self._pair)
                self.state_bytes += spec.nbytes
                if (differs := extent(raw, expected)) is None:
                    continue
                first, end = differs
                placed, node = self._audited.device.kept["state", index]
                told = Difference(
                    "state",
                    spec.name,
                    sequence,
                    layer=layer_of(node, spec.name),
                    node=node,
                    address=placed.address + sequence * placed.stride + first,
                    first_byte=first,
                    end_byte=end,
                    expected=shown(expected[first:]),
                    found=shown(raw[first:]),
                    instead=plainly(raw[first:end]),
                )
                found.append(told)
        if found:
            yield min(found, key=lambda one: -1 if one.layer is None else one.layer)

    def last_logits(self, rows: Sequence[int]) -> Iterator[Difference]:
        """Logits after the last pass, which was one of so many rows for each sequence."""
        for sequence, count in enumerate(rows):
            got, expected = (side.setup.decoder.logits(count, sequence)[-1] for side in self._pair)
            self.logits += expected.size
            raw, right = (np.frombuffer(row.tobytes(), np.uint8) for row in (got, expected))
            if (differs := extent(raw, right)) is None:
                continue
            token = differs[0] // 4
            unequal = np.flatnonzero((raw != right).reshape(-1, 4).any(axis=1)).size
            yield Difference(
                "logits",
                f"{unequal} of {expected.size} ids, first {token}",
                sequence,
                first_byte=differs[0],
                end_byte=differs[1],
                expected=f"{expected[token]!s}",
                found=f"{got[token]!s}",
            )
            return

    @property
    def _pair(self) -> tuple[Side, Side]:
        return self._audited, self._shadow

    def _cache(self, layer: int, what: str, sequence: int, tokens: int) -> Difference | None:
        raw, expected = (cached(side, layer, what, sequence, tokens) for side in self._pair)
        self.kv_bytes += expected.nbytes
        if np.array_equal(raw, expected):
            return None
        position, head = np.argwhere((raw != expected).any(axis=2))[0].tolist()
        got, right = raw[position, head], expected[position, head]
        first, end = extent(got, right) or (0, got.size)
        kv, device = self._audited.setup.kv, self._audited.device
        node = device.kept[f"kv_{what}", layer][1]
        start, strides = kv.address(layer, what) + sequence * kv.stride, kv.placement.strides
        address = start + position * strides[0] + head * strides[1] + first
        others = np.flatnonzero((expected[:, head] == got).all(axis=1))
        return Difference(
            "kv",
            f"{what} cache, head {head}",
            sequence,
            position,
            layer if (of_model := layer_of(node)) is None else of_model,
            node=node,
            address=address,
            **granule_of(address, device.granule_bytes, device.serials),
            first_byte=first,
            end_byte=end,
            expected=shown(right[first:]),
            found=shown(got[first:]),
            instead=plainly(got) or (f"position {others[0]}" if others.size else ""),
        )


def cached(side: Side, layer: int, what: str, sequence: int, tokens: int) -> NDArray[np.uint8]:
    """The first positions of a layer's keys or values, whatever the layout: bytes [tokens, heads, vector]."""
    kv = side.setup.kv
    start, place = kv.address(layer, what) + sequence * kv.stride, kv.placement
    parts = [side.device.copy_out(start + low, high - low) for low, high in place.windows(0, tokens)]
    raw: Bytes = np.frombuffer(b"".join(parts), np.uint8)
    if place.layout == "seq-major":
        return raw.reshape(tokens, -1, place.vector_bytes)
    return raw.reshape(-1, tokens, place.vector_bytes).transpose(1, 0, 2)


def _state(side: Side, index: int, nbytes: int, sequence: int) -> Bytes:
    placed, _ = side.device.kept["state", index]
    return np.frombuffer(side.device.copy_out(placed.address + sequence * placed.stride, nbytes), np.uint8)
