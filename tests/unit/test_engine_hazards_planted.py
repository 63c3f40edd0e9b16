"""Defects planted by hand in a whole decode, each found by the check that is for it, and green without it.

What is a matter of order has a kind of hazard. What leaves the order whole and the values wrong (a state that was not
zeroed, a pass too many, an extent that was baked) has none: there the ids say it, in the generation and token where it
begins. Unmapped granules under readers, retained slots and waits left out are in test_engine_hazards_decode.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure, NonFiniteLogits
from engine.paging.stream import schedule
from engine.plan import Operand, Plan
from tests.unit.engine_rig import TINY_PROMPT, Bench, build_tiny
from tests.unit.engine_scheduled import G, scheduled

STEPS = 6
Plant = Callable[[Bench], None]
Ids = list[list[int]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def hybrid(checkout: Path) -> Path:
    """An exporter's model with recurrent and convolution states."""
    folder = checkout.parent / "shared" / "models" / "qwen35-int4-cuda"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return folder


def nothing(bench: Bench) -> None:
    """The clean twin."""


def decoded(
    model: Path, plant: Plant, *, checked: bool = False, generations: int = 2, **setting: Any
) -> tuple[Ids, ScheduledDevice | None]:
    """Ids of each generation as far as they came, and the device with its checker, where it has one."""
    device = scheduled("late") if checked else None
    bench = Bench(model, device=device or SimDevice(granule_bytes=G), rows=(len(TINY_PROMPT),), **setting)
    plant(bench)
    found: Ids = []
    for generation in range(generations):
        if device is not None:
            device.hazards.at(generation)
        found.append([])
        try:
            found[-1].append(bench.prefill(TINY_PROMPT).token)
            for _ in range(STEPS):
                found[-1].append(bench.step().token)
        except (DeviceFailure, NonFiniteLogits):
            break
    return found, device


def forget_states(bench: Bench) -> None:
    """A reset that leaves recurrent states as the last generation left them."""
    fill, states = bench.device.fill, set(bench.decoder.memory.states)

    def filled(address: int, nbytes: int, byte: int) -> None:
        if address not in states:
            fill(address, nbytes, byte)

    bench.device.fill = filled  # type: ignore[method-assign]


def test_a_reset_that_forgets_recurrent_state_shows_from_the_second_generation_on(hybrid: Path) -> None:
    clean, _ = decoded(hybrid, nothing)
    ids, _ = decoded(hybrid, lambda bench: states_zeroed_once(bench, forget_states))
    assert clean[0] == clean[1] == ids[0] and ids[1] != ids[0]


def states_zeroed_once(bench: Bench, plant: Plant) -> None:
    """The defect comes with the second reset: memory that was never zeroed would show at once."""
    reset, begun = bench.decoder.reset, []

    def again() -> None:
        begun.append(1)
        if len(begun) == 2:
            plant(bench)
        reset()

    bench.decoder.reset = again  # type: ignore[method-assign]


def warm_up_for_real(bench: Bench) -> None:
    """The pass that warms a graph up runs on the sequence's own state, and the token's own pass after it."""
    one_token, decoder = bench.decoder._one_token, bench.decoder

    def twice(plan: Plan) -> None:
        if not decoder._warm:
            decoder._eager(plan, plan.steps, decoder._all)
        one_token(plan)

    decoder._one_token = twice  # type: ignore[method-assign]


@pytest.mark.parametrize("model", ["tiny", "hybrid"])
def test_a_warm_up_that_advances_state_shows_at_the_first_token_after_it(
    model: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    clean, _ = decoded(folder, nothing, generations=1)
    ids, _ = decoded(folder, warm_up_for_real, generations=1)
    assert ids[0][0] == clean[0][0] and ids != clean
    bench = Bench(folder, rows=(len(TINY_PROMPT),))
    warm_up_for_real(bench)
    bench.prefill(TINY_PROMPT)
    bench.step()
    assert bench.length() == bench.decoder._lengths[0] + 1, "the device has counted a position that nobody fed"


def ping_pong(bench: Bench) -> None:
    """States lie in one of two places, in turns; what was bound is bound anew, what was recorded is not."""
    decoder, device = bench.decoder, bench.device
    sizes = [spread.total_bytes for spread in decoder.memory.spreads]
    others = [device.alloc(nbytes, "the other place") for nbytes in sizes]
    step = decoder.step

    def turned(**_: Any) -> Any:
        emitted = step()
        for i, nbytes in enumerate(sizes):
            here = decoder.memory.states[i]
            device.copy_within(others[i], here, nbytes)
            device.poison(here, nbytes)
            decoder.memory.states[i], others[i] = others[i], here
        decoder._launches.clear()
        return emitted

    decoder.step = turned  # type: ignore[method-assign]


@pytest.mark.parametrize("capture", [True, False])
def test_states_in_turns_under_one_graph(hybrid: Path, capture: bool) -> None:
    """Eagerly it is right: what is read is where it was put last. One graph reads one place for ever."""
    clean, _ = decoded(hybrid, nothing, generations=1)
    ids, device = decoded(hybrid, ping_pong, checked=True, generations=1, capture=capture)
    assert device is not None
    if not capture:
        assert (ids, device.hazards.total) == (clean, 0)
        return
    assert ids != clean
    first = device.hazards.found[0]
    assert (first.kind, first.first.verb, first.second.verb) == ("read of dead bytes", "poison", "launch")
    assert first.second.token >= 2, "the warm pass and the recorded one are bound to where the state is"


def one_slot_too_many(bench: Bench) -> None:
    """The schedule is that of a ring with one slot more than there is: its last turn lands in the first slot."""
    pager = bench.pager
    deeper = schedule(bench.plan, replace(pager.ring, slots=pager.ring.slots + 1))

    def folded(copy: Any) -> Any:
        return replace(copy, slot=copy.slot % pager.ring.slots)

    copies = {step: tuple(map(folded, group)) for step, group in deeper.by_step.items()}
    places = {place: folded(copy) for place, copy in deeper.places.items()}
    for rows in bench.plans:
        pager._streams[rows] = replace(deeper, by_step=copies, places=places)


@pytest.mark.parametrize("capture", [True, False])
def test_a_ring_that_is_asked_to_hold_more_than_its_slots(tiny: Path, capture: bool) -> None:
    setting: dict[str, Any] = {"budget": 113_920 // G * G, "policy": "staging", "capture": capture}
    _, clean = decoded(tiny, nothing, checked=True, **setting)
    _, device = decoded(tiny, one_slot_too_many, checked=True, **setting)
    assert clean is not None and clean.hazards.total == 0
    assert device is not None
    dead = next(hazard for hazard in device.hazards.found if hazard.kind == "read of dead bytes")
    assert dead.second.verb == "launch" and dead.second.key is not None and dead.second.generation == 0
    assert "two fills without an order" in {hazard.kind for hazard in device.hazards.found}


def bake_lengths(bench: Bench) -> None:
    """Attention is told its extent by the host when it is bound, as a kernel is whose launch depends on it."""
    decoder, device = bench.decoder, bench.device
    place, bind = decoder.memory.place, decoder._bind
    baked: list[int] = []

    def placed(plan: Plan, operand: Operand, places: Any) -> Any:
        made = place(plan, operand, places)
        if operand.name != "length" or operand.access != "r":
            return made
        baked.append(device.alloc(8, "length as the host knew it"))
        device.copy_in(baked[-1], np.asarray([decoder._lengths[0]], np.int64))
        return replace(made, address=baked[-1])

    def bound(*arguments: Any) -> Any:
        decoder._launches.clear()  # the extent is another one each time
        return bind(*arguments)

    decoder.memory.place, decoder._bind = placed, bound  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("capture", [True, False])
def test_a_growing_extent_that_a_graph_has_baked(tiny: Path, capture: bool) -> None:
    """Bound anew for each step it is right; one graph computes with the extent of the step that it was made in."""
    clean, _ = decoded(tiny, nothing, generations=1)
    ids, _ = decoded(tiny, bake_lengths, generations=1, capture=capture)
    assert ids[0][:3] == clean[0][:3], "the prompt, the warm pass and the recorded one know their own extent"
    assert (ids == clean) is (not capture)
