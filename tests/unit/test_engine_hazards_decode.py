"""A whole decode under the checker: green as it is, and each planted defect found by name, key, step and generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from numpy.typing import NDArray

from engine.capture import cut
from engine.config import POLICIES
from engine.device.base import Branch, Event
from engine.device.hazards import Hazard
from engine.device.schedule import ORDERS, Order
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure, NonFiniteLogits
from engine.plan import Plan, Step
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny
from tests.unit.engine_scheduled import G, Undrained, kinds, scheduled

GENERATIONS, STEPS = 3, 12
HALF = 113_920 // G * G
STAGED = {"budget": HALF, "policy": "staging"}
STREAMED = {"budget": HALF, "policy": "lru", "capture": False}
SLOTTED = {"budget": HALF, "policy": "stable_slot", "capture": False}
GROWING = {"layout": "head-major", "least": 4}
Plant = Callable[[Bench], None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("hazards"))


def decode(bench: Bench, generations: int = GENERATIONS) -> list[tuple[int, float]]:
    """Ids and gaps of all generations."""
    found = []
    for generation in range(generations):
        if isinstance(bench.device, ScheduledDevice):
            bench.device.hazards.at(generation)
        emitted = [bench.prefill(TINY_PROMPT), *(bench.step() for _ in range(STEPS))]
        found += [(e.token, e.gap) for e in emitted]
    return found


def bench_of(tiny: Path, device: ScheduledDevice | SimDevice, setting: dict[str, object]) -> Bench:
    """The tiny model on a device."""
    return Bench(tiny, device=device, rows=(len(TINY_PROMPT),), **setting)  # type: ignore[arg-type]


@contextmanager
def broken_off() -> Iterator[None]:
    """A planted defect may also end the run, which is what it should do on a card."""
    with suppress(DeviceFailure, NonFiniteLogits):
        yield


def found(tiny: Path, setting: dict[str, object], plant: Plant, order: Order = "late") -> list[Hazard]:
    """What a decode with a planted defect gives."""
    bench = bench_of(tiny, scheduled(order), setting)
    plant(bench)
    with broken_off():
        decode(bench)
    device = bench.device
    assert isinstance(device, ScheduledDevice)
    return device.hazards.found


@pytest.mark.parametrize(
    "setting", [{}, GROWING, STREAMED, SLOTTED, {**STREAMED, **GROWING}, STAGED, {**STAGED, **GROWING}]
)
@pytest.mark.parametrize("order", ORDERS)
def test_every_schedule_gives_the_same_tokens_and_no_hazard(
    tiny: Path, order: Order, setting: dict[str, object]
) -> None:
    device = scheduled(order, seed=1)
    bench = bench_of(tiny, device, setting)
    ids = decode(bench)
    bench.close()
    plain = bench_of(tiny, SimDevice(granule_bytes=G), setting)
    assert ids == decode(plain)
    plain.close()
    assert device.hazards.found == [] and device.hazards.total == 0
    assert device.hazards.accesses > 4000
    assert device.mapped_bytes == 0
    now, then = (b.device.tally.read() for b in (bench, plain))
    assert now == {**then, "step_kernels": now["step_kernels"]}, "the same calls, only later"


def in_pieces(bench: Bench, first: int) -> None:
    """Every third step that reads weights may not be recorded: graphs with seams between them."""
    outside = [step.index for step in bench.plan.steps if step.keys][first::3]
    steps = tuple(replace(s, reason="KernelNotWarmed" if s.index in outside else None) for s in bench.plan.steps)
    bench.plans[1] = replace(bench.plan, steps=steps)
    bench.decoder.capture_plan = cut(bench.plans[1], bench.pager.steady)
    assert bench.decoder.capture_plan.captured > 2


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", ORDERS)
def test_graphs_with_seams_between_them_wait_for_what_a_seam_has_under_way(
    tiny: Path, order: Order, policy: str, first: int
) -> None:
    """A copy that a seam asks for may be of a key that the next graph reads: on the pass that replays it too."""
    setting: dict[str, object] = {"budget": HALF, "policy": policy}
    device = scheduled(order, seed=first)
    bench = bench_of(tiny, device, setting)
    in_pieces(bench, first)
    ids = decode(bench, 2)
    assert device.hazards.found == [] and device.hazards.accesses > 1000
    assert bench.tally.read()["replays"] > STEPS
    assert ids == decode(bench_of(tiny, SimDevice(granule_bytes=G), {**setting, "capture": False}), 2)


def test_accesses_and_hazards_do_not_depend_on_the_schedule(tiny: Path) -> None:
    counted = set()
    for order in ORDERS:
        device = scheduled(order)
        decode(bench_of(tiny, device, STREAMED), 1)
        counted.add(device.hazards.accesses)
    assert len(counted) == 1


@pytest.mark.parametrize("setting", [STREAMED, {**GROWING, "capture": True}])
def test_field_60_granules_unmapped_without_waiting_for_readers(tiny: Path, setting: dict[str, object]) -> None:
    """Paging evicts, and a growing cache gives its old ranges back, while the steps that read there are in flight."""
    device = scheduled("late", kind=Undrained)
    bench = bench_of(tiny, device, setting)
    with broken_off():
        decode(bench)
    taken = [h for h in device.hazards.found if h.kind == "memory taken away under use"]
    assert taken and taken[0].second.verb == "unmap" and {h.second.verb for h in taken} <= {"unmap", "map"}
    assert all(h.missing == "a wait of the host" for h in taken)
    if setting is STREAMED:
        read = next(h for h in taken if h.first.verb == "launch" and h.first.key is not None)
        assert read.first.step is not None and read.first.generation == 0
        assert bench.plan.steps[read.first.step].node == read.first.what
        assert read.first.key in bench.plan.steps[read.first.step].keys


def test_the_late_schedule_shows_an_unmap_under_a_reader_without_the_clocks(tiny: Path) -> None:
    device = scheduled("late", kind=Undrained)
    bench = bench_of(tiny, device, STREAMED)
    with pytest.raises((DeviceFailure, NonFiniteLogits)):
        decode(bench)


def keep_graphs(bench: Bench) -> None:
    """A cache that moved voids nothing."""
    bench.decoder._make_room = lambda positions: bench.kv.ensure(  # type: ignore[method-assign, assignment]
        positions, kept=bench.decoder._lengths
    )


def test_a_graph_replayed_after_the_cache_moved(tiny: Path) -> None:
    hazards = found(tiny, {**GROWING, "capture": True}, keep_graphs)
    stale = next(h for h in hazards if h.kind == "replay against moved or freed addresses")
    assert (stale.first.verb, stale.second.verb) == ("unmap", "launch")
    assert stale.second.generation == 0 and stale.second.token > 0 and stale.second.step is not None
    assert stale.mapping > 0


def retain_a_slot(bench: Bench) -> None:
    """From the second generation on, what was read through the slot when the cache first moved counts as being there.

    The seed's corruption: an entry of the residency table outlived a reallocation, and the slot had been used since.
    """
    pager, kv, decoder = bench.pager, bench.kv, bench.decoder
    retained: dict[int, int] = {}
    release, reset = pager.release, decoder.reset
    generations: list[int] = []

    def released() -> None:
        if not retained and kv.capacity > 4 and pager._in_slot:
            retained.update([next(iter(pager._in_slot.items()))])
        release()
        if len(generations) > 1:
            pager._in_slot.update(retained)

    def begun() -> None:
        generations.append(len(generations))
        reset()

    pager.release = released
    decoder.reset = begun  # type: ignore[method-assign]


def test_a_retained_slot_read_in_the_second_generation_after_the_cache_moved(tiny: Path) -> None:
    setting = {**SLOTTED, **GROWING}
    hazards = found(tiny, setting, retain_a_slot)
    assert {h.kind for h in hazards} == {"read of another's bytes"}
    first = hazards[0]
    assert first.second.generation == 1, "the first generation is right"
    assert first.second.key is not None and first.first.key != first.second.key
    assert first.missing == "a fill of this key before it"
    clean = decode(bench_of(tiny, SimDevice(granule_bytes=G), setting))
    planted = bench_of(tiny, SimDevice(granule_bytes=G), setting)
    retain_a_slot(planted)
    ids = decode(planted, 1)
    assert ids == clean[: len(ids)]


def release_early(bench: Bench) -> None:
    """A step lets its keys go before it was launched."""
    touch = bench.pager.touch

    def touched(plan: Plan, step: Step) -> tuple[int, ...]:
        keys: tuple[int, ...] = touch(plan, step)
        bench.pager.release()
        return keys

    bench.pager.touch = touched


def test_keys_let_go_before_their_reader_is_launched(tiny: Path) -> None:
    hazards = found(tiny, {"budget": HALF, "policy": "stable", "capture": False}, release_early)
    assert {h.kind for h in hazards} == {"read of dead bytes"}
    assert hazards[0].first.verb == "poison" and hazards[0].second.key is not None


def drop_waits(bench: Bench, of: Branch) -> None:
    """One branch never waits for the other."""
    wait = bench.device.wait

    def waited(branch: Branch, event: Event) -> None:
        if branch != of:
            wait(branch, event)

    bench.device.wait = waited  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("branch", "kind", "missing"),
    [
        ("copy", "refill under a reader", "copy waits for compute after that read"),
        ("compute", "read before its fill", "compute waits for copy after that fill"),
    ],
)
def test_a_ring_whose_branches_do_not_wait(tiny: Path, branch: Branch, kind: str, missing: str) -> None:
    """The two halves of a ring's order, each left out: who refills waits for readers, who reads waits for the fill."""
    hazards = found(tiny, {**STAGED, "capture": False}, lambda bench: drop_waits(bench, branch))
    of_kind = [h for h in hazards if h.kind == kind]
    assert of_kind and of_kind[0].missing == missing
    read = of_kind[0].first if kind == "refill under a reader" else of_kind[0].second
    assert (read.verb, read.generation) == ("launch", 0) and read.key is not None


def skip_fills(bench: Bench) -> None:
    """Pages are mapped and never filled."""
    device = bench.device
    copy_in = device.copy_in
    known = {k.weight.data.ctypes.data for k in bench.plan.keys}

    def copied(address: int, source: NDArray[Any]) -> None:
        if source.ctypes.data not in known:
            copy_in(address, source)

    device.copy_in = copied  # type: ignore[method-assign]


def test_keys_read_before_they_are_filled(tiny: Path) -> None:
    hazards = found(tiny, STREAMED, skip_fills)
    assert {h.kind for h in hazards} <= {"read before its fill", "read of dead bytes", "read of another's bytes"}
    assert hazards[0].kind == "read before its fill" and hazards[0].first.verb == "map"


@pytest.mark.parametrize("forgotten", [None, "a weight", "a table"])
def test_field_62_all_memory_released_and_mapped_again_under_an_old_graph(tiny: Path, forgotten: str | None) -> None:
    """Weights come back, other buffers do not: every buffer that a graph reads is filled again, or it is found."""
    device = scheduled("late")
    bench = bench_of(tiny, device, {})
    expected = decode(bench_of(tiny, SimDevice(granule_bytes=G), {}), 2)
    ids = decode(bench, 1)
    base = bench.pager._base
    granules = [base + g * G for g in range(bench.pager.capacity)]
    for address in granules:
        device.destroy(device.unmap(address))
    for address in granules:
        device.map(address, device.create())
    weights = [k for k in bench.plan.keys if k.nbytes]
    for key in weights[1:] if forgotten == "a weight" else weights:
        device.copy_in(bench.key_address(key.name), key.weight.data)
    if forgotten == "a table":
        name, address = next(iter(bench.decoder.memory.constants.items()))
        device.poison(address, next(c.nbytes for c in bench.plan.constants if c.name == name))
    with broken_off():
        device.hazards.at(1)
        emitted = [bench.prefill(TINY_PROMPT), *(bench.step() for _ in range(STEPS))]
        ids += [(e.token, e.gap) for e in emitted]
    if forgotten is None:
        assert ids == expected and device.hazards.total == 0
    else:
        named = {"a weight": "read before its fill", "a table": "read of dead bytes"}
        assert kinds(device) == {named[forgotten]}
        assert device.hazards.found[0].second.generation == 1
