"""Decodes of several models under the checker: policies, budgets, capture, KV layouts, schedules. `make hazards`.

With arithmetic on a cover in which every two settings meet, whose ids are one list a model; without it, by content tags
and order, on all combinations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from engine.choice import choose
from engine.commands.hazards import decode
from engine.config import POLICIES, RunRequest, parse_request
from engine.device.book import BookedDevice
from engine.device.hazards import Hazards
from engine.device.plan_only import PlanDevice
from engine.device.schedule import Order, Schedule
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.errors import Refused
from engine.graph import Graph
from engine.kv_layout import LAYOUTS
from engine.onnx_load import load
from engine.paging.arena import minimum_budget
from engine.plan import Plan
from engine.routing import banks
from engine.run import plans_for
from tests.unit.engine_rig import build_tiny, request, smollm2

MODELS = {
    "tiny": "",
    "dense": "qwen3-int4-cuda",
    "hybrid": "qwen35-int4-cuda",
    "experts": "qwen35moe-int4raw-cuda",
    "smollm2": "",
}
GRANULES = {"smollm2": 256 << 10}
PROMPT = [1, 17, 42]
TOKENS, GENERATIONS, LEAST = 8, 3, 4  # positions 3 to 10: buckets of 4, 8 and 16
BUDGETS = ("full", "75%", "50%", "35%", "least", "limit")
"""Of the weights; `least` is the smallest that any policy runs under: the widest step, for `staging` its own ring.

`limit` is the least vram limit that a case is not refused under: weights give way to each growth of the KV cache.
"""
SCHEDULES: tuple[tuple[Order, int], ...] = (("early", 0), ("late", 0), *(("random", seed) for seed in range(5)))


@dataclass(frozen=True, slots=True)
class Model:
    """A model, its plans, and what it emits with everything resident and nothing captured."""

    name: str
    graph: Graph
    plans: dict[int, Plan]
    ids: list[int]

    @property
    def granule(self) -> int:
        """Bytes; small, so that small weights span many."""
        return GRANULES.get(self.name, 4096)


@dataclass(frozen=True, slots=True)
class Case:
    """One setting."""

    budget: str
    policy: str
    capture: bool
    layout: str
    schedule: tuple[Order, int] = SCHEDULES[0]

    def __str__(self) -> str:
        order, seed = self.schedule
        words = (self.budget, self.policy, "captured" if self.capture else "eager", self.layout, f"{order}:{seed}")
        return "-".join(words)


def cover(factors: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    """Rows in which every two values of different factors meet: each time the row with the most new pairs."""
    places = list(combinations(range(len(factors)), 2))
    open_pairs = {(i, j, a, b) for i, j in places for a, b in product(factors[i], factors[j])}
    rows = list(product(*factors))
    while open_pairs:
        best = max(rows, key=lambda row: sum((i, j, row[i], row[j]) in open_pairs for i, j in places))
        open_pairs -= {(i, j, best[i], best[j]) for i, j in places}
        yield best


COVER = [Case(*row) for row in cover((BUDGETS, POLICIES, (True, False), LAYOUTS, SCHEDULES))]
ALL = [
    Case(budget, policy, capture, layout)
    for budget, policy, capture, layout in product(BUDGETS, POLICIES, (True, False), LAYOUTS)
    if budget != "full" or policy == POLICIES[0]  # a policy that has room for everything decides nothing
]
SAMPLED = {
    *map(str, COVER[:2]),
    str(Case("50%", "lru", True, "head-major")),
    str(Case("limit", "staging", True, "seq-major")),
}


@pytest.fixture(scope="module", params=[*[*MODELS][:-1], pytest.param("smollm2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One of the models, loaded once."""
    name = request.param
    if name == "tiny":
        graph = load(build_tiny(tmp_path_factory.mktemp("matrix")))
    elif name == "smollm2":
        graph = load(smollm2(tmp_path_factory.mktemp("matrix")))
    else:
        folder = checkout.parent / "shared" / "models"
        if not folder.is_dir():
            pytest.skip("skipped: no ../" + "shared/models")
        graph = load(folder / MODELS[name])
    made = Model(name, graph, plans_for(graph, [PROMPT], 512), [])
    plain = decode(
        asked(made, Case("full", POLICIES[0], False, LAYOUTS[0])), graph, made.plans, inner(made, True), None
    )
    return Model(name, graph, made.plans, list(plain.tokens[0][0][0]))


def inner(model: Model, computes: bool) -> BookedDevice[Any]:
    """The device below the checker."""
    return SimDevice(granule_bytes=model.granule) if computes else PlanDevice(granule_bytes=model.granule)


def asked(model: Model, case: Case, *, computes: bool = True) -> RunRequest:
    """A request of three generations whose cache grows twice in each."""
    config: dict[str, Any] = {"granule": model.granule, "policy": case.policy, "capture": case.capture}
    config |= {"kv_layout": case.layout, "kv_min_bucket": LEAST}
    least = minimum_budget(model.plans[1], model.granule)
    if case.budget not in ("full", "limit"):
        share = 0 if case.budget == "least" else int(case.budget[:-1]) * model.plans[1].weight_bytes // 100
        config["weight_budget"] = max(share, least)
    own = {"prompt_ids": PROMPT, "tokens": TOKENS, "generations": GENERATIONS, "ignore_eos": True, "config": config}
    if not computes and banks(model.plans[1]):
        own["routing"] = "seed:1"  # else nobody knows which experts, and banks are read whole
    wanted = parse_request(request(Path("in memory"), arithmetic="full" if computes else "none", **own))
    return wanted if case.budget != "limit" else limited(model, wanted)


def limited(model: Model, wanted: RunRequest) -> RunRequest:
    """Under the least limit, as a refusal says."""
    tiny = replace(wanted, config=replace(wanted.config, vram_limit=1))
    with pytest.raises(Refused) as refused:
        choose(tiny, model.graph, model.plans, model.granule)
    least = int(refused.value.remedy.split()[3])
    return replace(wanted, config=replace(wanted.config, vram_limit=least))


def checked(model: Model, case: Case, schedule: tuple[Order, int], *, computes: bool) -> tuple[list[Any], int]:
    """Ids of each generation and accesses of one decode, which was ordered and gave everything back."""
    device = ScheduledDevice(inner(model, computes), Schedule(*schedule), Hazards())
    wanted = asked(model, case, computes=computes)
    outcome = decode(wanted, model.graph, model.plans, device, device.hazards)
    assert (outcome.failure, [str(h) for h in device.hazards.found]) == ("", [])
    assert len(outcome.tokens) == GENERATIONS and device.mapped_bytes == 0
    assert device.tally.read()["vmm_calls"] > 0 and device.hazards.accesses > 1000
    return [generation[0][0] for generation in outcome.tokens], device.hazards.accesses


def marked(cases: Sequence[Case]) -> list[Any]:
    """All but the sampled ones are slow."""
    return [pytest.param(c, marks=[] if str(c) in SAMPLED else [pytest.mark.slow], id=str(c)) for c in cases]


@pytest.mark.parametrize("case", marked(COVER))
def test_ids_are_one_list_whatever_the_setting_and_the_schedule(model: Model, case: Case, record_property: Any) -> None:
    ids, accesses = checked(model, case, case.schedule, computes=True)
    assert ids == [model.ids] * GENERATIONS
    record_property("accesses", accesses)
    record_property(f"ids of {model.name}", str(model.ids))


@pytest.mark.parametrize("case", marked(ALL))
def test_every_combination_is_ordered_under_every_schedule(model: Model, case: Case, record_property: Any) -> None:
    """Content tags say whose bytes are read; the same accesses are counted in every order."""
    counted = [checked(model, case, schedule, computes=False)[1] for schedule in SCHEDULES]
    assert len(set(counted)) == 1
    record_property("accesses", sum(counted))


def test_the_cover_has_every_two_values_together() -> None:
    factors = (("a", "b", "c"), (1, 2), (True, False))
    rows = list(cover(factors))
    for i, j in combinations(range(3), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(factors[i], factors[j]))
    assert len(rows) < 12 and len(COVER) < len(BUDGETS) * len(POLICIES) * 4 * len(SCHEDULES) / 10
