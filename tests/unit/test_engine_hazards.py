"""The happens-before checker: each defect that is planted is found by name, and its clean twin is green."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.device.base import Device, Launch, Placed
from engine.device.book import POISON
from engine.device.plan_only import PlanDevice
from engine.device.schedule import ORDERS, Order
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure
from engine.plan import Operand, Ref, Step
from tests.unit.engine_scheduled import G, Undrained, kinds, scheduled

NBYTES = 256
A, B = np.full(NBYTES, 1, np.uint8), np.full(NBYTES, 2, np.uint8)


class Ring:
    """One slot that weights are staged into, and a place that compute work copies it to, for someone to read it."""

    def __init__(self, device: ScheduledDevice) -> None:
        self.device = device
        self.slot, self.out = device.alloc(NBYTES, "slot"), device.alloc(NBYTES, "out")
        device.host_range(0, A)
        device.host_range(1, B)

    def fill(self, weight: NDArray[np.uint8], *, after_readers: bool = True, joined: bool = True) -> None:
        """Stage a weight, after the slot's readers, and have compute work wait for it."""
        if after_readers:
            self.device.wait("copy", self.device.mark("compute"))
        self.device.stage(self.slot, weight)
        if joined:
            self.device.wait("compute", self.device.mark("copy"))

    def read(self, key: int | None = None) -> None:
        """A step reads the slot, as a key's where one is named."""
        ref = Ref("buffer" if key is None else "key", key or 0, "uint8", (NBYTES,))
        operands = (Operand("a", ref), Operand("y", Ref("buffer", 1, "uint8", (NBYTES,)), "w"))
        step = Step(7, "/reader", "ai.onnx::Identity", "copy", operands, {})
        places = (self.slot, self.out)
        self.last = Launch(step, tuple(Placed(o, a, NBYTES) for o, a in zip(operands, places, strict=True)))
        self.device.launch(self.last)

    def seen(self) -> int:
        """What was read last: the host waits."""
        return self.device.copy_out(self.out, 1)[0]


@pytest.fixture(params=ORDERS)
def ring(request: pytest.FixtureRequest) -> Ring:
    """A ring under each schedule."""
    return Ring(scheduled(request.param))


def test_an_ordered_ring_is_green_and_right_under_every_schedule(ring: Ring) -> None:
    for weight in (A, B, A):
        ring.fill(weight)
        ring.read()
        assert ring.seen() == weight[0]
    assert ring.device.hazards.total == 0
    assert ring.device.hazards.accesses == 3 * 4


def test_a_read_that_was_not_joined_to_its_fill(ring: Ring) -> None:
    ring.fill(A, joined=False)
    ring.read()
    [hazard] = ring.device.hazards.found
    assert hazard.kind == "read before its fill"
    assert (hazard.first.verb, hazard.second.verb, hazard.second.what) == ("stage", "launch", "/reader")
    assert (hazard.first.key, hazard.start, hazard.end) == (0, ring.slot, ring.slot + NBYTES)
    assert hazard.missing == "compute waits for copy after that fill"
    assert hazard.second.step == 7


def test_a_refill_under_a_reader(ring: Ring) -> None:
    ring.fill(A)
    ring.read()
    ring.fill(B, after_readers=False)
    assert [h.kind for h in ring.device.hazards.found] == ["refill under a reader"]
    assert ring.device.hazards.found[0].missing == "copy waits for compute after that read"


def test_the_schedules_show_a_refill_under_a_reader_in_the_bytes() -> None:
    seen = {}
    for order in ORDERS:
        ring = Ring(scheduled(order, seed=3))
        ring.fill(A)
        ring.read()
        ring.fill(B, after_readers=False, joined=False)
        ring.device.schedule.reach(ring.device.schedule.ask("copy", lambda: None))  # nobody's wait: time goes by
        seen[order] = ring.seen()
    assert seen["early"] == A[0] and seen["late"] == B[0], seen


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("depends", [True, False])
def test_a_trailing_synchronize_matters_where_a_reader_depends_on_it(waits: bool, depends: bool) -> None:
    """Elided, it is a hazard for a copy beside the reader, and none for one that comes after it anyway."""
    ring = Ring(scheduled())
    ring.fill(A)
    ring.read()
    if waits:
        ring.device.sync(ring.device.mark("compute"))
    if depends:
        ring.device.stage(ring.slot, B)
    else:
        ring.device.copy_in(ring.slot, B)
    assert ring.device.tally.read().get("host_syncs", 0) == int(waits)
    assert kinds(ring.device) == ({"refill under a reader"} if depends and not waits else set())


@pytest.mark.parametrize("kind", [ScheduledDevice, Undrained])
@pytest.mark.parametrize("waits", [True, False])
def test_field_60_memory_freed_under_a_reader(kind: type[ScheduledDevice], waits: bool) -> None:
    """Offloading frees a weight's memory while the compute stream still reads it."""
    ring = Ring(scheduled(kind=kind))
    ring.fill(A)
    ring.read()
    if waits:
        ring.device.sync(ring.device.mark("compute"))
    ring.device.free(ring.slot)
    if kind is ScheduledDevice or waits:
        assert ring.device.hazards.total == 0 and ring.seen() == A[0]
        return
    hazard = ring.device.hazards.found[0]
    assert (hazard.kind, hazard.second.verb) == ("memory taken away under use", "free")
    assert hazard.missing == "a wait of the host"
    with pytest.raises(DeviceFailure, match="belongs to nothing"):
        ring.seen()


@pytest.mark.parametrize("asks_ahead", [False, True])
@pytest.mark.parametrize("waits", ["never", "after the unmap", "before it"])
def test_a_granule_given_back_under_an_in_flight_read(waits: str, asks_ahead: bool) -> None:
    """The host has read what was filled, at once or when it was asked for, so that the fill is no part of it."""
    device = scheduled(kind=Undrained)
    base, out = device.reserve(G), device.alloc(G, "out")
    device.map(base, device.create())
    device.fill(base, G, 1)
    assert (device.fetched(device.fetch(base, 1)) if asks_ahead else device.copy_out(base, 1)) == b"\1"
    device.copy_within(out, base, G)
    done = device.mark("compute")
    if waits == "before it":
        device.sync(done)
    granule = device.unmap(base)
    if waits == "after the unmap":
        device.schedule = scheduled().schedule  # the read is lost: what counts here is the order
        device.hazards.wait(0, device.hazards.mark(1))
    device.destroy(granule)
    found = {"never": ["unmap", "destroy"], "after the unmap": ["unmap"], "before it": []}[waits]
    assert [h.second.verb for h in device.hazards.found] == found
    assert all(h.first.verb == "copy_within" for h in device.hazards.found)


def test_a_granule_mapped_elsewhere_under_an_in_flight_read() -> None:
    device = scheduled(kind=Undrained)
    base, out = device.reserve(2 * G), device.alloc(G, "out")
    device.map(base, device.create())
    device.fill(base, G, 1)
    device.copy_within(out, base, G)
    device.map(base + G, device.unmap(base))
    assert [h.second.verb for h in device.hazards.found] == ["unmap", "unmap", "map", "map"]


def after_nothing(ring: Ring) -> None:
    """Freshly allocated."""


def after_poison(ring: Ring) -> None:
    """Filled and given up."""
    ring.fill(A)
    ring.device.poison(ring.slot, NBYTES)


def after_free(ring: Ring) -> None:
    """Freed in good order."""
    ring.fill(A)
    ring.device.free(ring.slot)


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        (after_nothing, "read before its fill"),
        (after_poison, "read of dead bytes"),
        (after_free, "use of memory that is gone"),
    ],
)
def test_reads_of_what_is_not_there(before: Callable[[Ring], None], kind: str) -> None:
    ring = Ring(scheduled())
    before(ring)
    assert ring.device.hazards.total == 0
    ring.read()
    assert kinds(ring.device) == {kind}


def test_poison_is_written_when_its_turn_comes_and_again_in_each_replay(ring: Ring) -> None:
    device = ring.device
    ring.fill(A)
    device.begin_capture()
    ring.read()
    device.poison(ring.slot, NBYTES)
    graph = device.end_capture()
    device.replay(graph)
    assert (ring.seen(), device.hazards.total) == (A[0], 0)
    ring.read()
    assert ring.seen() == POISON and kinds(device) == {"read of dead bytes"}
    ring.fill(B)
    device.poison(ring.slot, NBYTES)
    ring.read()
    assert ring.seen() == POISON


def test_bytes_of_no_known_range_are_refused_when_they_are_asked_for(ring: Ring) -> None:
    with pytest.raises(DeviceFailure, match="known host range"):
        ring.device.stage(ring.slot, np.zeros(4, np.uint8))


def test_a_fill_of_half_the_bytes_is_no_fill() -> None:
    ring = Ring(scheduled())
    ring.device.copy_in(ring.slot, A[: NBYTES // 2].copy())
    ring.read()
    [hazard] = ring.device.hazards.found
    assert (hazard.kind, hazard.start) == ("read before its fill", ring.slot + NBYTES // 2)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_read_of_the_key_that_is_there_and_of_another(asked: int) -> None:
    ring = Ring(scheduled())
    for piece in (slice(None, 64), slice(64, None)):
        ring.device.wait("copy", ring.device.mark("compute"))
        ring.device.stage(ring.slot + (piece.start or 0), A[piece])
    ring.device.wait("compute", ring.device.mark("copy"))
    ring.read(asked)
    assert kinds(ring.device) == ({"read of another's bytes"} if asked else set())


def test_pieces_of_the_right_key_in_the_wrong_order_are_another_s_bytes() -> None:
    ring = Ring(scheduled())
    for at, piece in ((0, A[128:]), (128, A[:128])):
        ring.device.stage(ring.slot + at, piece)
    ring.device.wait("compute", ring.device.mark("copy"))
    ring.read(0)
    assert kinds(ring.device) == {"read of another's bytes"}


def test_two_fills_without_an_order() -> None:
    ring = Ring(scheduled())
    ring.fill(A, joined=False)
    ring.device.copy_in(ring.slot, B)
    assert kinds(ring.device) == {"two fills without an order"}


@pytest.mark.parametrize("forks_after_the_read", [True, False])
def test_a_graph_that_refills_what_it_reads(ring: Ring, forks_after_the_read: bool) -> None:
    """The graph's own copy branch starts with the graph, and comes after a node only where it waits for it."""
    device = ring.device
    ring.fill(A)
    device.begin_capture()
    fork = device.mark("compute")
    ring.read()
    device.wait("copy", device.mark("compute") if forks_after_the_read else fork)
    device.stage(ring.slot, B)
    device.wait("compute", device.mark("copy"))
    device.replay(device.end_capture())
    found = kinds(device)
    if forks_after_the_read:
        assert (ring.seen(), found) == (A[0], set())
        ring.read()
        assert ring.seen() == B[0], "what follows the graph comes after all of it"
        assert device.hazards.total == 0
    else:
        assert found == {"refill under a reader"}
        assert device.schedule.order != "early" or ring.seen() == B[0], "copied as early as it may be"


def test_a_graph_replayed_against_freed_addresses() -> None:
    ring = Ring(scheduled())
    device = ring.device
    device.begin_capture()
    device.wait("copy", device.mark("compute"))
    device.stage(ring.slot, A)
    device.wait("compute", device.mark("copy"))
    graph = device.end_capture()
    device.replay(graph)
    assert device.hazards.total == 0
    device.free(ring.slot)
    device.replay(graph)
    [hazard] = device.hazards.found
    assert hazard.kind == "replay against moved or freed addresses"
    assert (hazard.first.verb, hazard.second.verb, hazard.second.key) == ("free", "stage", 0)
    ring.read()
    assert device.hazards.found[-1].kind == "use of memory that is gone", "this is no replay any more"


def test_a_wait_for_an_earlier_event_orders_only_what_came_before_it() -> None:
    ring = Ring(scheduled())
    early = ring.device.mark("compute")
    ring.fill(A)
    ring.read()
    ring.device.wait("copy", early)
    ring.device.stage(ring.slot, B)
    assert kinds(ring.device) == {"refill under a reader"}


def test_order_is_passed_on_through_another_branch_and_the_host() -> None:
    ring = Ring(scheduled())
    ring.fill(A)
    ring.read()
    assert ring.seen() == A[0]  # the host waited, so whatever it asks for next comes after the read
    ring.device.stage(ring.slot, B)
    assert ring.device.hazards.total == 0


@pytest.mark.parametrize("kind", [ScheduledDevice, Undrained])
def test_host_memory_is_taken_away_after_its_readers(kind: type[ScheduledDevice]) -> None:
    device = scheduled(kind=kind)
    device.host_range(0, A)
    there, out = device.map_host(A), device.alloc(NBYTES, "out")
    device.copy_within(out, there, NBYTES)
    device.unmap_host(there)
    if kind is Undrained:
        hazard = device.hazards.found[0]
        assert (hazard.kind, hazard.second.verb) == ("memory taken away under use", "unmap_host")
        return
    assert device.hazards.total == 0 and device.copy_out(out, 1)[0] == A[0]
    with suppress(DeviceFailure):
        device.copy_within(out, there, NBYTES)
    assert kinds(device) == {"use of memory that is gone"}


def test_what_was_worked_out_for_memory_that_is_gone_is_not_used_again() -> None:
    ring = Ring(scheduled("early"))
    ring.fill(A)
    ring.read()
    launched = ring.last
    ring.device.free(ring.out)
    with pytest.raises(DeviceFailure, match="belongs to nothing"):
        ring.device.launch(launched)


def test_cells_that_one_read_went_over_are_one_again_and_remember_it() -> None:
    """Without it a cache's history falls into one piece a token, and each read takes longer than the one before."""
    device = scheduled()
    base, out = device.alloc(NBYTES, "cache"), device.alloc(NBYTES, "out")
    for at in range(NBYTES):
        device.fill(base + at, 1, at)
    cells = device.hazards._shadow
    assert len(cells.over(base, base + NBYTES)) == NBYTES
    device.copy_within(out, base, NBYTES)
    [(start, cell)] = cells.over(base, base + NBYTES)
    assert (start, cell.state, [use.verb for use in cell.uses.values()]) == (base, "filled", ["copy_within"])


HOST_ACTS = ("alloc", "free", "map", "unmap", "destroy", "map_host", "unmap_host")
"""Refused where every use is checked; a device alone does them at once, as a card does."""
COPIES = ("copy_out", "fetch", "copy_in", "copy_within", "fill", "sync")


@pytest.mark.parametrize(
    ("make", "verb"), [*product([scheduled], (*COPIES, *HOST_ACTS)), *product([SimDevice, PlanDevice], COPIES)]
)
def test_what_a_graph_would_not_repeat_is_refused_in_a_capture(make: Callable[[], Device], verb: str) -> None:
    device = make()
    slot, base, event = device.alloc(8, "x"), device.reserve(G), device.mark("compute")
    granule = device.create()
    device.host_range(0, A)
    there = device.map_host(A)
    device.begin_capture()
    acts: dict[str, Callable[[], object]] = {
        "copy_out": lambda: device.copy_out(slot, 8),
        "fetch": lambda: device.fetch(slot, 8),
        "copy_in": lambda: device.copy_in(slot, A[:8]),
        "copy_within": lambda: device.copy_within(slot, slot + 4, 4),
        "fill": lambda: device.fill(slot, 8, 0),
        "alloc": lambda: device.alloc(8, "y"),
        "free": lambda: device.free(slot),
        "map": lambda: device.map(base, granule),
        "unmap": lambda: device.unmap(base),
        "destroy": lambda: device.destroy(granule),
        "map_host": lambda: device.map_host(A),
        "unmap_host": lambda: device.unmap_host(there),
        "sync": lambda: device.sync(event),
    }
    with pytest.raises(DeviceFailure, match=f"{verb} while a capture is open"):
        acts[verb]()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("order", ORDERS)
def test_a_schedule_runs_all_of_it_in_an_order_that_events_allow(order: Order, seed: int) -> None:
    schedule = scheduled(order, seed).schedule
    ran: list[str] = []
    first = schedule.ask("compute", lambda: ran.append("a"))
    schedule.ask("copy", lambda: ran.append("b"), first)
    schedule.ask("copy", lambda: ran.append("c"))
    last = schedule.ask("compute", lambda: ran.append("d"))
    schedule.go()
    schedule.reach(last)
    assert first.done and last.done
    schedule.drain()
    assert sorted(ran) == list("abcd") and ran.index("a") < ran.index("b") < ran.index("c")
