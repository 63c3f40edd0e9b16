"""The copy branch: what is staged, marked and waited for, in a recording and outside of one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.device.base import Event
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure

KEY = 3
NBYTES = 96


@pytest.fixture
def device() -> SimDevice:
    """A card with granules of 4 KiB."""
    return SimDevice(granule_bytes=4096)


@pytest.fixture
def weight(device: SimDevice) -> NDArray[np.uint8]:
    """A key's host bytes, known to the device."""
    made = np.arange(NBYTES, dtype=np.uint8)
    device.host_range(KEY, made)
    return made


def test_pieces_of_a_key_become_the_key(device: SimDevice, weight: NDArray[np.uint8]) -> None:
    slot = device.alloc(NBYTES, "slot")
    region, _ = device._find(slot)
    for start, end in ((32, 64), (0, 32)):
        device.stage(slot + start, weight[start:end])
        assert region.spans.whole(slot, slot + NBYTES) is None
    assert region.spans.whole(slot + 32, slot + 64) is None, "a piece from the middle is no key"
    device.stage(slot + 64, weight[64:])
    tag = region.spans.whole(slot, slot + NBYTES)
    assert tag is not None and tag.key == KEY
    assert device.copy_out(slot, NBYTES) == weight.tobytes()
    assert device.tally.read()["device_htod_bytes"] == NBYTES


def test_pieces_in_the_wrong_place_become_nothing(device: SimDevice, weight: NDArray[np.uint8]) -> None:
    slot = device.alloc(NBYTES, "slot")
    device.stage(slot, weight[:32])
    device.stage(slot + 32, weight[64:])
    assert device._find(slot)[0].spans.whole(slot, slot + 64) is None


def test_device_bytes_copied_over_a_key_leave_none_there(device: SimDevice, weight: NDArray[np.uint8]) -> None:
    slot, other = device.alloc(NBYTES, "slot"), device.alloc(NBYTES, "other")
    device.copy_in(slot, weight)
    device.copy_within(other, slot, NBYTES)
    spans = [device._find(address)[0].spans.whole(address, address + NBYTES) for address in (slot, other)]
    assert spans[0] is not None and spans[1] is None, "bytes of no host range are nobody's"
    device.copy_within(slot + 8, other, 8)
    assert device._find(slot)[0].spans.whole(slot, slot + NBYTES) is None


@pytest.mark.parametrize("nbytes", [1, NBYTES + 1, 0])
def test_only_known_host_bytes_are_staged(device: SimDevice, weight: NDArray[np.uint8], nbytes: int) -> None:
    slot = device.alloc(2 * NBYTES, "slot")
    with pytest.raises(DeviceFailure, match="known host range"):
        device.stage(slot, np.zeros(nbytes, np.uint8))


def test_a_recording_copies_at_every_replay(device: SimDevice, weight: NDArray[np.uint8]) -> None:
    slot = device.alloc(NBYTES, "slot")
    device.begin_capture()
    device.wait("copy", device.mark("compute"))
    device.stage(slot, weight)
    device.wait("compute", device.mark("copy"))
    graph = device.end_capture()
    assert graph.nodes == 1, "events leave no node"
    assert device.tally.read().get("device_htod_bytes", 0) == 0, "recorded, not run"
    for turn in (1, 2):
        device.poison(slot, NBYTES)
        device.replay(graph)
        assert device.copy_out(slot, NBYTES) == weight.tobytes()
        assert device.tally.read()["device_htod_bytes"] == turn * NBYTES


def broken(device: SimDevice, weight: NDArray[np.uint8]) -> dict[str, tuple[str, Callable[[], object]]]:
    """What a capture may not do, each with the words that say so; a card refuses the same."""
    slot, before = device.alloc(NBYTES, "slot"), device.mark("compute")
    device.begin_capture()

    def unjoined(join: bool) -> None:
        device.wait("copy", device.mark("compute"))
        device.stage(slot, weight)
        if join:
            device.wait("compute", device.mark("copy"))
            device.stage(slot, weight)
        device.end_capture()

    return {
        "stage before the fork": ("has not entered", lambda: device.stage(slot, weight)),
        "mark before the fork": ("has not entered", lambda: device.mark("copy")),
        "wait for an event of before": ("not marked in it", lambda: device.wait("copy", before)),
        "host wait": ("while a capture is open", lambda: device.sync(before)),
        "no join": ("1 copies", lambda: unjoined(False)),
        "a copy after the join": ("1 copies", lambda: unjoined(True)),
    }


@pytest.mark.parametrize("what", [*broken(SimDevice(granule_bytes=4096), np.zeros(1, np.uint8))])
def test_what_a_capture_may_not_do(device: SimDevice, weight: NDArray[np.uint8], what: str) -> None:
    words, act = broken(device, weight)[what]
    with pytest.raises(DeviceFailure, match=words):
        act()


def test_the_host_waits_are_counted(device: SimDevice) -> None:
    event = device.mark("copy")
    device.sync(event)
    assert device.tally.read()["host_syncs"] == 1
    assert event != Event("copy"), "an event equals only itself"
