"""The short battery: small decodes that page, stream, capture, grow and rewind, each held against ids, order, accounts.

Each setting is decoded as a run, with all its equations, and under the checker. It is what mutants meet first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import engine.run
from engine.commands.hazards import decode
from engine.config import RunRequest, parse_request
from engine.device.hazards import Hazards
from engine.device.schedule import Order, Schedule
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.graph import Graph
from engine.journal import Collected
from engine.onnx_load import load
from engine.plan import Plan
from engine.run import execute, plans_for
from tests.unit.engine_rig import Bench, build_tiny, request

G = 4096
PROMPTS = [[1, 17, 42, 99], [5, 3]]
TOKENS, GENERATIONS = 10, 3  # positions 4 to 13: buckets of 4, 8 and 16
HALF = {"weight_budget": "50%"}
MOVING = {"kv_layout": "head-major", "kv_min_bucket": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "resident, moving": MOVING,
    "resident, in place": {"kv_layout": "seq-major", "kv_min_bucket": 4},
    "staging, moving": {**HALF, **MOVING, "policy": "staging"},
    "staging, eager": {**HALF, **MOVING, "policy": "staging", "capture": False},
    "stable_slot, moving": {**HALF, **MOVING, "policy": "stable_slot"},
    "lru, moving": {**HALF, **MOVING, "policy": "lru"},
    "stable, in place": {**HALF, "policy": "stable"},
    "zero_copy, moving": {**HALF, **MOVING, "policy": "zero_copy"},
    "reused, moving": {**MOVING, "prefix_reuse": True},
    "two, staging": {**HALF, **MOVING, "policy": "staging", "batch": 2},
}


@dataclass(frozen=True, slots=True)
class Model:
    """A model and its plans, made once."""

    graph: Graph
    plans: dict[int, Plan]
    ids: list[list[int]]
    """What it emits when all is in and nothing is captured."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The seeded model."""
    graph = load(build_tiny(tmp_path_factory.mktemp("order")))
    plans = plans_for(graph, PROMPTS, 512)
    wanted = asked({"capture": False, "batch": 2})
    plain = decode(wanted, graph, plans, SimDevice(granule_bytes=G), None)
    ids = [list(sequence[0]) for sequence in plain.tokens[0]]
    return Model(graph, plans, ids)


def asked(config: dict[str, Any]) -> RunRequest:
    """A request of three generations."""
    first, *further = PROMPTS[: config.get("batch", 1)]
    own: dict[str, Any] = {"prompt_ids": first, "further_prompts": further, "tokens": TOKENS, "ignore_eos": True}
    own |= {"generations": GENERATIONS, "warmups": int(config.get("prefix_reuse", False))}
    return parse_request(request(Path("in memory"), **own, config={"granule": G, **config}))


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_has_the_right_ids_and_its_equations_hold(
    tiny: Model, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.run, "load", lambda path, hollow: tiny.graph)
    monkeypatch.setattr(engine.run, "plans_for", lambda *_: tiny.plans)
    wanted = asked(SETTINGS[name])
    device, lines, now = SimDevice(granule_bytes=G), Collected(), iter(range(1 << 62))
    monkeypatch.setattr(engine.run, "make_device", lambda request: device)
    assert execute(wanted, lines, lambda: next(now)) == 0, lines.lines[-1]
    result = lines.of("result")[0]
    assert [e for e in result["equations"] if not e["holds"]] == []
    for line in lines.of("generation"):
        assert [line["ids"], *(s["ids"] for s in line.get("further", ()))] == tiny.ids[: len(wanted.prompts)]
    counters = result["counters"]
    if wanted.config.capture and wanted.config.policy != "lru" and not wanted.config.prefix_reuse:
        assert counters["replays"] > 0
        assert counters["captures"] == counters["warm_steps"]
    assert (device.mapped_bytes, len(device._live), len(device._regions)) == (0, 0, 0), "nothing is left on the device"


@pytest.mark.parametrize(
    ("name", "order"),
    [(name, "late") for name in SETTINGS if not name.startswith("reused")] + [("staging, eager", "early")],
)
def test_a_decode_is_ordered_and_says_the_same_in_every_order(tiny: Model, name: str, order: Order) -> None:
    wanted = asked(SETTINGS[name])
    device = ScheduledDevice(SimDevice(granule_bytes=G), Schedule(order), Hazards())
    outcome = decode(wanted, tiny.graph, tiny.plans, device, device.hazards)
    assert (outcome.failure, [str(h) for h in device.hazards.found]) == ("", [])
    for generation in outcome.tokens:
        assert [list(ids) for ids, _ in generation] == tiny.ids[: len(wanted.prompts)]
    assert device.hazards.accesses > 1000
    assert (device.mapped_bytes, len(device.inner._live), len(device.inner._regions)) == (0, 0, 0)


@pytest.mark.parametrize("setting", [{}, {"policy": "stable_slot"}, {"policy": "lru", "capture": False}])
def test_no_key_is_pinned_between_steps(tiny: Model, setting: dict[str, Any]) -> None:
    """Warm, recorded and replayed alike: between steps a budget may change, and every key give way."""
    budget = tiny.plans[1].weight_bytes // 2 if setting else None
    bench = Bench(tiny.graph, rows=(len(PROMPTS[0]),), budget=budget, **setting)
    bench.prefill(PROMPTS[0])
    for _ in range(4):
        assert not bench.pager._pinned and not bench.pager._in_slot
        bench.step()
