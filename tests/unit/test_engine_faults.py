"""The k-th call of a verb fails, for every k of a run that pages and grows: it says why, and everything comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import engine.run
from engine.config import parse_request
from engine.device.plan_only import PlanDevice
from engine.device.sim import SimDevice
from engine.errors import DeviceFailure, EngineError, OutOfMemory
from engine.graph import Graph
from engine.journal import Collected
from engine.onnx_load import load
from engine.paging.ledger import Pool
from engine.plan import Plan
from engine.run import Setup, close, execute, plans_for
from tests.unit.engine_rig import TINY_PROMPT, build_tiny, request

G = 16384
FAULTS: dict[str, tuple[str, ...]] = {
    "create": ("create",),
    "map": ("map",),
    "set access": ("map",),
    "reserve": ("reserve",),
    "alloc": ("alloc",),
    "copy": ("copy_in", "copy_within", "fetch", "fetched", "stage"),
    "event": ("mark", "wait", "sync"),
    "launch": ("launch", "replay"),
    "map host": ("map_host",),
}
"""What fails, and the verbs in which it does."""
FULL = ("create", "reserve", "alloc")
"""Faults that say that there is no memory left; any other one is the device's."""
GROWING: dict[str, Any] = {"granule": G, "kv_layout": "head-major", "kv_min_bucket": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "lru": {**GROWING, "weight_budget": "50%", "policy": "lru"},
    "stable": {**GROWING, "weight_budget": "50%", "policy": "stable", "kv_layout": "seq-major"},
    "stable_slot": {**GROWING, "weight_budget": "50%", "policy": "stable_slot"},
    "staging": {**GROWING, "weight_budget": "50%", "policy": "staging"},
    "zero_copy": {**GROWING, "weight_budget": "50%", "policy": "zero_copy"},
    "resident": GROWING,
}


class Broken:
    """Over a device of the host: the `at`-th call among a fault's verbs fails before anything is done."""

    def __init__(self, inner: PlanDevice | SimDevice, fault: str, at: int) -> None:
        self.inner, self.fault, self.left = inner, fault, at

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return partial(self._call, name, found) if name in FAULTS[self.fault] else found

    @property
    def reached(self) -> bool:
        """Whether it failed."""
        return self.left <= 0

    def _call(self, name: str, verb: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            if self.fault == "set access":  # the second half of a map: the first is undone, as on a card
                verb(*arguments)
                self.inner.unmap(arguments[0])
            if name in ("stage", "mark", "wait", "launch"):
                self.inner._recording = None
            raise (OutOfMemory if self.fault in FULL else DeviceFailure)(f"{name} failed as planned")
        return verb(*arguments)

    @property
    def left_over(self) -> tuple[int, int, list[str]]:
        """Mapped bytes, granules that were not given back, and memory or addresses that were not."""
        regions = self.inner._regions.values()
        return self.inner.mapped_bytes, len(self.inner._live), [region.what for region in regions]


@dataclass(frozen=True, slots=True)
class Ended:
    """A run over a broken device: exit code, last line, and what it stood on, where it came that far."""

    code: int
    last: dict[str, Any]
    setup: Setup | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and its plans, made once for all runs."""

    graph: Graph
    plans: dict[int, Plan]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """The seeded model."""
    graph = load(build_tiny(tmp_path_factory.mktemp("faults")))
    return Loaded(graph, plans_for(graph, [TINY_PROMPT], 512))


def ended(device: Broken, model: Loaded, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Ended:
    """A run that pages and grows its cache twice."""
    made: list[Setup] = []

    def set_up(*arguments: Any) -> Setup:
        made.append(SET_UP(*arguments))
        return made[-1]

    monkeypatch.setattr(engine.run, "make_device", lambda request: device)
    monkeypatch.setattr(engine.run, "load", lambda path, hollow: model.graph)
    monkeypatch.setattr(engine.run, "plans_for", lambda *_: model.plans)
    monkeypatch.setattr(engine.run, "set_up", set_up)
    lines = Collected()
    own = {"tokens": 6, "ignore_eos": True, "config": config}
    arithmetic = "full" if device.kind == "sim" else "none"
    asked = parse_request(request(Path("in memory"), arithmetic=arithmetic, **own))
    now = iter(range(1 << 62))
    code = execute(asked, lines, lambda: next(now))
    return Ended(code, lines.lines[-1], made[0] if made else None)


SET_UP = engine.run.set_up


def check_small_allocation(device: Broken, pool: Pool) -> None:
    """A granule and a few bytes can still be had, and given back."""
    start, plain = pool.map_range(1, "kv"), device.alloc(8, "small")
    device.fill(start, G, 1)
    device.fill(plain, 8, 1)
    device.free(plain)
    pool.unmap_range(start, 1, "kv")


def check_fault(device: Broken, run: Ended) -> None:
    """The run's reason is the fault's, the accounts hold, and at its end nothing is left of it."""
    wanted: type[EngineError] = OutOfMemory if device.fault in FULL else DeviceFailure
    assert (run.code, run.last["type"], run.last["kind"]) == (wanted.exit_code, "error", wanted.kind)
    assert run.last["message"].endswith("failed as planned")
    if run.setup is not None:
        ledger, pool = run.setup.ledger, run.setup.pool
        accounts = ledger.mapped_bytes("weights") + ledger.mapped_bytes("kv"), pool.free_bytes
        assert accounts == (device.mapped_bytes, ledger.owned_bytes - device.mapped_bytes)
        assert ledger.owned_bytes == len(device.inner._live) * G
        check_small_allocation(device, pool)
        facts: dict[str, Any] = {}
        close(run.setup, facts)
        assert facts == {"mapped_after_close_bytes": 0, "owned_after_close_bytes": 0}
        assert run.setup.pager._tally.read().get("ref_underflows", 0) == 0  # type: ignore[attr-defined]
    assert device.left_over == (0, 0, [])
    device.free(device.alloc(8, "small"))
    device.destroy(device.create())


def check_every(kind: type[PlanDevice | SimDevice], fault: str, tiny: Loaded, name: str, every: int = 1) -> int:
    """Let the first, the second, ... call fail until a run does not come to it; how many did."""
    at = 1
    with pytest.MonkeyPatch.context() as patch:
        while True:
            device = Broken(kind(granule_bytes=G), fault, at)
            run = ended(device, tiny, SETTINGS[name], patch)
            if not device.reached:
                assert run.code == 0
                return at - 1
            check_fault(device, run)
            at += every


ONLY = {"event": "staging", "map host": "zero_copy"}
"""Faults of verbs that one policy alone asks for."""
QUICK = {*product(FAULTS.keys() - {"launch"}, ("lru", "staging")), ("map host", "zero_copy"), ("map", "stable_slot")}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow])
        for case in product(FAULTS, SETTINGS)
        if case[1] == ONLY.get(case[0], case[1])
    ],
)
def test_every_call_may_fail(tiny: Loaded, fault: str, name: str) -> None:
    assert check_every(PlanDevice, fault, tiny, name) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_copies_and_launches_may_fail_with_bytes_behind_them(tiny: Loaded, name: str) -> None:
    """What the run then has is real: poison, tables and caches go the same way back."""
    assert check_every(SimDevice, "copy", tiny, name, 3) > 0
    assert check_every(SimDevice, "launch", tiny, name, 3) > 0
