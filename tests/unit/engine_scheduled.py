"""Scheduled devices, and the planted defect of one that takes memory away without waiting."""

from __future__ import annotations

from typing import Any

from engine.device.book import BookedDevice
from engine.device.hazards import Hazards
from engine.device.schedule import Order, Schedule
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice

G = 4096


class Undrained(ScheduledDevice):
    """Unmaps and frees at once, as a driver does when nobody waits for it."""

    def drain(self) -> None:
        """Wait for nothing."""


def scheduled(
    order: Order = "late",
    seed: int = 0,
    kind: type[ScheduledDevice] = ScheduledDevice,
    inner: BookedDevice[Any] | None = None,
) -> ScheduledDevice:
    """A simulated card of 4 KiB granules under a schedule."""
    return kind(inner or SimDevice(granule_bytes=G), Schedule(order, seed), Hazards())


def kinds(device: ScheduledDevice) -> set[str]:
    """What was found."""
    return {hazard.kind for hazard in device.hazards.found}
