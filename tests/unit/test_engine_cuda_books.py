"""What the card's device asks of its driver, held against a driver in Python that keeps books: no GPU is needed.

Work of the driver runs as late as it may, so each wait that is left out shows as bytes that are not there yet, or as
work whose memory is gone.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine import kernels
from engine.device import cuda, cuda_card, cuda_compile
from engine.device.base import Launch, Placed
from engine.device.cuda import CudaDevice
from engine.device.sim import SimDevice
from engine.errors import BadRequest, DeviceFailure, OutOfMemory, UnsupportedModel
from engine.kernels.cuda import Variant
from engine.plan import Operand, Ref, Step
from tests.unit.engine_driver import FULL, INVALID, OK, Card, Driver

G, NBYTES = 4096, 256
A, B = np.full(NBYTES, 1, np.uint8), np.full(NBYTES, 2, np.uint8)


@pytest.fixture
def driver() -> Driver:
    """A driver whose books are empty."""
    return Driver()


@pytest.fixture
def device(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A card's device over it, that knows two keys."""
    monkeypatch.setattr(cuda, "find_card", lambda uuid: Card(driver))
    made = CudaDevice()
    made.host_range(0, A)
    made.host_range(1, B)
    return made


def mapped(device: CudaDevice, granules: int = 1) -> int:
    """A reservation, mapped whole."""
    start = device.reserve(granules * G)
    for i in range(granules):
        device.map(start + i * G, device.create())
    return start


def a_launch(address: int, kernel: str = "copy") -> Launch:
    """A step that reads bytes and writes as many behind them."""
    refs = [Ref("buffer", i, "uint8", (NBYTES,)) for i in range(2)]
    operands = (Operand("a", refs[0]), Operand("y", refs[1], "w"))
    step = Step(0, "/copy", "ai.onnx::Identity", kernel, operands, {})
    return Launch(step, tuple(Placed(o, address + i * NBYTES, NBYTES) for i, o in enumerate(operands)))


def read(driver: Driver, address: int) -> int:
    """The first byte there now."""
    return driver.bytes_at(address, 1)[0]


def test_addresses_and_granules_are_given_back_once_and_whole(device: CudaDevice, driver: Driver) -> None:
    start = mapped(device)
    with pytest.raises(DeviceFailure, match="still has mapped"):
        device.unreserve(start)
    with pytest.raises(DeviceFailure, match="cannot be mapped"):
        device.map(start, device.create())
    granule = device._mapped[start]
    with pytest.raises(DeviceFailure, match="released while mapped"):
        device.destroy(granule)
    assert device.unmap(start) is granule
    with pytest.raises(DeviceFailure, match="nothing is mapped"):
        device.unmap(start)
    device.destroy(granule)
    with pytest.raises(DeviceFailure, match="none of this device's"):
        device.destroy(granule)
    device.unreserve(start)
    with pytest.raises(DeviceFailure, match="no reservation starts"):
        device.unreserve(start)
    assert (driver.reserved, driver.mapped, len(driver.granules)) == ({}, {}, 1)


def test_plain_memory_is_given_back_once(device: CudaDevice, driver: Driver) -> None:
    address = device.alloc(NBYTES, "x")
    device.free(address)
    assert driver.plain == {}
    with pytest.raises(DeviceFailure, match="no plain memory"):
        device.free(address)


def test_a_map_whose_access_cannot_be_set_leaves_nothing_mapped(device: CudaDevice, driver: Driver) -> None:
    start, granule = device.reserve(G), device.create()
    driver.failing["cuMemSetAccess"] = INVALID
    with pytest.raises(DeviceFailure, match="cuMemSetAccess"):
        device.map(start, granule)
    assert driver.mapped == {} and device.mapped_bytes == 0
    device.map(start, granule)
    assert driver.reachable == {start}


@pytest.mark.parametrize("what", ["granule", "plain"])
@pytest.mark.parametrize("branch", ["compute", "copy"])
def test_memory_goes_after_all_work_of_both_streams(device: CudaDevice, driver: Driver, what: str, branch: str) -> None:
    start = mapped(device) if what == "granule" else device.alloc(NBYTES, "x")
    out = device.alloc(NBYTES, "out")
    if branch == "copy":
        device.stage(start, A)
    else:
        device.copy_in(start, A)
        device.copy_within(out, start, NBYTES)
    device.destroy(device.unmap(start)) if what == "granule" else device.free(start)
    waits = device.tally.read()["host_syncs"]
    device.copy_out(out, NBYTES)
    driver.finish()
    assert driver.faults == []
    assert device.tally.read()["host_syncs"] == waits + 1
    if branch == "compute":
        assert read(driver, out) == 1
    device.free(out)
    assert device.tally.read()["host_syncs"] == waits + 1, "nothing was under way, so nobody waited"


def test_what_was_bound_to_memory_that_is_gone_is_not_kept(device: CudaDevice) -> None:
    start, address = mapped(device), device.alloc(2 * NBYTES, "x")
    device.launch(a_launch(address))
    device.free(address)
    assert device._bound == {}
    device.launch(a_launch(start))
    device.unmap(start)
    device.unreserve(start)
    assert device._bound == {}


def test_sources_in_plain_pages_live_until_the_host_has_waited(device: CudaDevice) -> None:
    address = device.alloc(NBYTES, "x")
    device.copy_in(address, np.full(NBYTES, 7, np.uint8))
    assert len(device._in_flight) == 1
    assert device.copy_out(address, NBYTES) == bytes([7]) * NBYTES
    assert device._in_flight == []


def test_the_branches_wait_for_each_other_s_events(device: CudaDevice, driver: Driver) -> None:
    slot, out = device.alloc(NBYTES, "slot"), device.alloc(NBYTES, "out")
    device.stage(slot, A)
    device.wait("compute", device.mark("copy"))
    device.copy_within(out, slot, NBYTES)
    device.wait("copy", device.mark("compute"))
    device.stage(slot, B)
    refilled = device.mark("copy")
    device.sync(refilled)
    assert (read(driver, out), read(driver, slot)) == (1, 2), "each after what it waited for, and all of it by now"


def test_events_are_destroyed_when_nobody_has_them(device: CudaDevice, driver: Driver) -> None:
    kept = set(driver.events)
    device.mark("compute")
    gc.collect()
    assert set(driver.events) == kept, "those behind a fetch are the device's own"


def record(device: CudaDevice, slot: int, out: int) -> Any:
    """A capture that stages a key, computes once it is there, and stages another after that."""
    device.begin_capture()
    device.wait("copy", device.mark("compute"))
    device.stage(slot, A)
    device.wait("compute", device.mark("copy"))
    device.launch(a_launch(out))
    device.wait("copy", device.mark("compute"))
    device.stage(slot, B)
    device.wait("compute", device.mark("copy"))
    return device.end_capture()


def test_a_capture_takes_in_all_that_is_asked_for_and_replays_it(device: CudaDevice, driver: Driver) -> None:
    slot, out = device.alloc(NBYTES, "slot"), device.alloc(2 * NBYTES, "out")
    graph = record(device, slot, out)
    counted = device.tally.read()
    assert counted.get("device_htod_bytes", 0) == counted.get("eager_launches", 0) == 0, "nothing ran"
    assert (graph.nodes, graph.kernel_nodes) == (3, 1) and graph.over_link.staged_bytes == 2 * NBYTES
    assert device._busy == set()
    device.replay(graph)
    device.copy_out(slot, 1)
    assert read(driver, slot) == 2 and driver.launched.total() == 1
    assert device.tally.read()["device_htod_bytes"] == 2 * NBYTES
    assert driver.graphs == {} and len(driver.executables) == 1
    del graph
    gc.collect()
    assert driver.executables == {}


VERBS: dict[str, Callable[[CudaDevice, int], object]] = {
    "copy_in": lambda device, at: device.copy_in(at, A),
    "copy_within": lambda device, at: device.copy_within(at, at + 1, 1),
    "copy_out": lambda device, at: device.copy_out(at, 1),
    "fill": lambda device, at: device.fill(at, 1, 0),
}


@pytest.mark.parametrize("verb", [*VERBS, "sync"])
def test_what_a_graph_would_not_repeat_is_refused_in_a_capture(device: CudaDevice, verb: str) -> None:
    address, event = device.alloc(NBYTES, "x"), device.mark("compute")
    device.begin_capture()
    with pytest.raises(DeviceFailure, match=f"{verb} while a capture is open"):
        device.sync(event) if verb == "sync" else VERBS[verb](device, address)


def test_a_capture_opens_once_and_a_replay_needs_a_recording_of_this_device(device: CudaDevice) -> None:
    with pytest.raises(DeviceFailure, match="no capture is open"):
        device.end_capture()
    host = SimDevice()
    host.begin_capture()
    with pytest.raises(DeviceFailure, match="a replay needs"):
        device.replay(host.end_capture())
    graph = record(device, device.alloc(NBYTES, "slot"), device.alloc(2 * NBYTES, "out"))
    device.begin_capture()
    with pytest.raises(DeviceFailure, match="open already"):
        device.begin_capture()
    with pytest.raises(DeviceFailure, match="a replay needs"):
        device.replay(graph)


def test_a_kernel_may_start_early_right_behind_a_kernel_alone(device: CudaDevice, driver: Driver) -> None:
    address = device.alloc(2 * NBYTES, "x")
    for between in (
        lambda: device.copy_in(address, A),
        lambda: device.fill(address, NBYTES, 0),
        lambda: device.copy_within(address, address + NBYTES, NBYTES),
        lambda: device.copy_out(address, 1),
        lambda: device.fetched(device.fetch(address, 1)),
        lambda: device.wait("compute", device.mark("copy")),
        lambda: device.mark("compute"),
        device.begin_capture,
    ):
        device.launch(a_launch(address))
        device.launch(a_launch(address))
        between()
    device.launch(a_launch(address))
    graph = device.end_capture()
    device.replay(graph)
    device.launch(a_launch(address))
    driver.finish()
    assert driver.faults == []
    [bound] = device._bound[next(iter(device._bound))].kernels
    assert not bound.after_all.attrs and bound.after_kernel.attrs


def test_a_fetch_brings_what_stood_there_and_waits_for_nothing_later(device: CudaDevice, driver: Driver) -> None:
    address = device.alloc(NBYTES, "x")
    device.copy_in(address, A)
    first = device.fetch(address, NBYTES)
    device.copy_in(address, B)
    second = device.fetch(address, 2)
    assert device.fetched(first) == A.tobytes()
    assert read(driver, address) == 1, "the later copy has not run"
    assert device.fetched(second) == B.tobytes()[:2]
    large = device.alloc(3 * (4 << 10), "y")
    device.fill(large, 3 * (4 << 10), 7)
    assert device.fetched(device.fetch(large, 3 * (4 << 10))) == bytes([7]) * 3 * (4 << 10)
    device.begin_capture()
    with pytest.raises(DeviceFailure, match="fetch while a capture is open"):
        device.fetch(address, 1)


def breaks(device: CudaDevice, driver: Driver, how: str) -> None:
    """Fail within a capture, in one of the ways there are."""
    outside = device.mark("copy")
    address = device.alloc(2 * NBYTES, "x")
    device.begin_capture()
    match how:
        case "an event of before it":
            device.wait("compute", outside)
        case "a copy that did not enter":
            device.stage(address, A)
        case "a mark that did not enter":
            device.mark("copy")
        case "a launch that the driver refuses":
            device.launch(a_launch(address))
            driver.failing["cuLaunchKernelEx"] = INVALID
            device.launch(a_launch(address))
        case "copies that are not joined":
            device.wait("copy", device.mark("compute"))
            device.stage(address, A)
            device.end_capture()
        case "an end that the driver refuses":
            driver.failing["cuStreamEndCapture"] = INVALID
            device.end_capture()


@pytest.mark.parametrize(
    "how",
    [
        *("an event of before it", "a copy that did not enter", "a mark that did not enter"),
        *("a launch that the driver refuses", "copies that are not joined", "an end that the driver refuses"),
    ],
)
def test_a_capture_that_fails_leaves_none_open(device: CudaDevice, driver: Driver, how: str) -> None:
    with pytest.raises(DeviceFailure):
        breaks(device, driver, how)
    assert driver.capture is None and driver.graphs == {}
    graph = record(device, device.alloc(NBYTES, "slot"), device.alloc(2 * NBYTES, "out"))
    device.replay(graph)
    device.copy_out(device.alloc(1, "y"), 1)
    assert driver.faults == []


@pytest.mark.parametrize("asks_ahead", [False, True])
def test_a_fault_that_a_kernel_reports_ends_the_run_by_name(device: CudaDevice, asks_ahead: bool) -> None:
    """Where its bytes are read, though they were asked for before."""
    address = device.alloc(NBYTES, "x")
    asked = device.fetch(address, 1)
    device._binder.faulty.append("/gather (ai.onnx::Gather)")
    device._fault.view(np.int64)[:] = 1, 9, 4
    with pytest.raises(DeviceFailure, match=r"/gather .*: index 9 is out of bounds for 4 elements"):
        device.fetched(asked) if asks_ahead else device.copy_out(address, 1)


def test_a_key_is_read_in_place_whole_and_counted_in_a_graph_and_outside(device: CudaDevice) -> None:
    out = device.alloc(NBYTES, "y")
    there = device.map_host(A)
    refs = (Ref("key", 0, "uint8", (NBYTES,)), Ref("buffer", 1, "uint8", (NBYTES,)))
    operands = (Operand("a", refs[0]), Operand("y", refs[1], "w"))
    step = replace(a_launch(out).step, operands=operands)
    placed = tuple(Placed(o, at, NBYTES) for o, at in zip(operands, (there, out), strict=True))
    launch = Launch(step, placed)
    device.launch(launch)
    assert device.tally.read()["device_zero_copy_bytes"] == NBYTES
    device.begin_capture()
    device.launch(launch)
    graph = device.end_capture()
    assert graph.over_link.in_place_bytes == NBYTES and graph.over_link.staged_bytes == 0
    device.replay(graph)
    assert device.tally.read()["device_zero_copy_bytes"] == 2 * NBYTES
    device.unmap_host(there)
    assert device._busy == set(), "what read there is done"
    device.launch(launch)
    assert device.tally.read()["device_zero_copy_bytes"] == 2 * NBYTES, "the bytes are a key's no more"


def test_keys_of_no_known_range_are_neither_mapped_nor_staged(device: CudaDevice) -> None:
    with pytest.raises(DeviceFailure, match="only a key's whole host bytes"):
        device.map_host(A[:4])
    with pytest.raises(DeviceFailure, match="no host memory is mapped"):
        device.unmap_host(1)
    address = device.alloc(NBYTES, "x")
    with pytest.raises(DeviceFailure, match="known host range"):
        device.stage(address, np.zeros(4, np.uint8))


def test_a_full_card_is_out_of_memory_and_a_granule_off_its_grid_a_bad_request(
    device: CudaDevice, driver: Driver
) -> None:
    driver.failing["cuMemCreate"] = FULL
    with pytest.raises(OutOfMemory):
        device.create()
    with pytest.raises(BadRequest, match="no multiple"):
        CudaDevice(granule_bytes=G + 1)


def test_steps_without_a_form_are_all_named(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [a_launch(0).step, replace(a_launch(0).step, node="/other")]
    device.prepare(steps)
    formless = replace(kernels.get("copy"), cuda=None)
    monkeypatch.setattr(kernels, "get", lambda name: formless)
    with pytest.raises(UnsupportedModel, match=r"/copy .*; /other .*no CUDA form") as refused:
        device.prepare(steps)
    assert len(refused.value.reasons) == 2


def test_host_memory_is_unpinned_once(device: CudaDevice, driver: Driver, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(NBYTES))
    device.host_range(2, np.memmap(tmp_path / "weights", np.uint8, "r"))
    assert driver.hosts and device._host.registered_bytes == NBYTES
    device._host.release()
    assert driver.hosts == {}
    device._host.release()


def test_a_kernel_that_does_not_compile_says_the_compiler_s_log(monkeypatch: pytest.MonkeyPatch) -> None:
    gone: list[int] = []

    def log(program: int, into: bytearray) -> tuple[Any]:
        into[:] = b"line 1: no"
        return (OK,)

    def destroy(program: int) -> tuple[Any]:
        gone.append(program)
        return (OK,)

    nvrtc = SimpleNamespace(
        nvrtcCreateProgram=lambda *_: (OK, 1),
        nvrtcCompileProgram=lambda *_: (OK,),
        nvrtcGetProgramLogSize=lambda _: (OK, 10),
        nvrtcGetProgramLog=log,
        nvrtcGetCUBINSize=lambda _: (OK, 4),
        nvrtcGetCUBIN=lambda *_: (OK,),
        nvrtcDestroyProgram=destroy,
    )
    monkeypatch.setattr(cuda_compile, "bindings", lambda: (None, nvrtc))
    variant = Variant("f", "text")
    assert cuda_compile.compile_variant(variant, "sm_90") == bytes(4) and gone == [1]
    nvrtc.nvrtcCompileProgram = failing
    with pytest.raises(DeviceFailure, match="f does not compile for sm_90: line 1: no"):
        cuda_compile.compile_variant(variant, "sm_90")
    assert gone == [1, 1]


def failing(*_: Any) -> tuple[Any]:
    return (INVALID,)


def test_cards_that_are_not_there_are_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = SimpleNamespace(bytes=bytes(16))
    count = [0]
    driver = SimpleNamespace(
        cuInit=lambda _: (OK,),
        cuDeviceGetCount=lambda: (OK, count[0]),
        cuDeviceGet=lambda n: (OK, n),
        cuDeviceGetUuid=lambda _: (OK, seen),
    )
    monkeypatch.setattr(cuda_card, "bindings", lambda: (driver, None))
    monkeypatch.setattr(cuda_card, "_start", lambda: None)
    with pytest.raises(BadRequest, match="no card is visible"):
        cuda_card.find_card(None)
    count[0] = 1
    with pytest.raises(BadRequest, match="card GPU-1 is not visible"):
        cuda_card.find_card("GPU-1")


def test_a_driver_that_does_not_start_is_a_bad_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_card, "bindings", lambda: (SimpleNamespace(cuInit=failing), None))
    cuda_card._start.cache_clear()
    with pytest.raises(BadRequest, match="the driver does not start"):
        cuda_card._start()
