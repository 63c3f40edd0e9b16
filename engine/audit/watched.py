"""A device under an audit's eyes: which granule is mapped where, where states and caches lie, what launches read.

Every verb is `inner`'s own, on a card as on the simulator; nothing is added to a run but these notes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from engine.device.base import Device, Granule, Launch, Placed, Recorded

_KEPT = ("state", "kv_key", "kv_value")


def unheard(launch: Launch) -> None:
    """Nobody looks at launches."""


class WatchedDevice:
    """`inner`, watched; `device` is the same as what decoders take."""

    def __init__(self, inner: Device) -> None:
        self._inner = inner
        self.serials: dict[int, int] = {}
        """Granules mapped now: address -> serial."""
        self.kept: dict[tuple[str, int], tuple[Placed, str]] = {}
        """State or cache, by kind and number -> where a step last bound it, and the step's node."""
        self.before_launch: Callable[[Launch], None] = unheard
        """Hears each launch just before it is asked for, but for those that a capture records."""
        self._recording = False

    @property
    def device(self) -> Device:
        """This, with all verbs."""
        return cast("Device", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def map(self, address: int, granule: Granule) -> None:
        """Map, and note the granule."""
        self._inner.map(address, granule)
        self.serials[address] = granule.serial

    def unmap(self, address: int) -> Granule:
        """Unmap, and forget the granule."""
        granule = self._inner.unmap(address)
        self.serials.pop(address, None)
        return granule

    def begin_capture(self) -> None:
        """From here on launches are recorded and read nothing yet."""
        self._inner.begin_capture()
        self._recording = True

    def end_capture(self) -> Recorded:
        """Launches run again when they are asked for."""
        self._recording = False
        return self._inner.end_capture()

    def launch(self, launch: Launch) -> None:
        """Note where states and caches are, and let whoever listens look at what the step is about to read."""
        for placed in launch.placed:
            ref = placed.operand.ref
            if ref.kind in _KEPT:
                self.kept[ref.kind, ref.index] = placed, launch.step.node
        if not self._recording:
            self.before_launch(launch)
        self._inner.launch(launch)
