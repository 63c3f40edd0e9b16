"""Decodes of several models under the checker: policies, budgets, capture, KV layouts, schedules. `make hazards`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.choice import choose
from engine.commands.hazards import decode
from engine.config import POLICIES, RunRequest, parse_request
from engine.device.hazards import Hazards
from engine.device.schedule import Schedule
from engine.device.scheduled import ScheduledDevice
from engine.device.sim import SimDevice
from engine.errors import Refused
from engine.graph import Graph
from engine.kv_layout import LAYOUTS
from engine.onnx_load import load
from engine.plan import Plan
from engine.run import plans_for
from tests.unit.engine_rig import build_tiny, request

G = 4096
MODELS = {"tiny": "", "dense": "qwen3-int4-cuda", "hybrid": "qwen35-int4-cuda", "experts": "qwen35moe-int4raw-cuda"}
PROMPT = [1, 17, 42, 99, 7]
TOKENS, GENERATIONS, LEAST = 14, 3, 4  # positions 5 to 18: buckets of 8, 16 and 32
SCHEDULES = [("early", 0), ("late", 0), ("random", 1), ("random", 2)]
RESIDENT = [(None, "stable")]
LIMIT = "limit"
"""The least vram limit that a case is not refused under: weights give way to each growth of the KV cache."""
CASES = [
    (budget, policy, capture, layout)
    for (budget, policy), capture, layout in product(
        [*RESIDENT, *product(("75%", "50%", LIMIT), POLICIES)], (True, False), LAYOUTS
    )
]
SAMPLED = {
    (None, "stable", True, "head-major"),
    ("50%", "lru", True, "head-major"),
    (LIMIT, "staging", True, "seq-major"),
}


@pytest.fixture(scope="module", params=MODELS)
def graph(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    """One of the models, loaded once."""
    if not MODELS[request.param]:
        return load(build_tiny(tmp_path_factory.mktemp("matrix")))
    folder = checkout.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip("skipped: no ../" + "shared/models")
    return load(folder / MODELS[request.param])


def asked(bound: dict[str, Any], policy: str, capture: bool, layout: str) -> RunRequest:
    """A request of three generations whose cache grows twice in each."""
    config: dict[str, Any] = {"granule": G, "policy": policy, "capture": capture, "kv_layout": layout}
    config |= {"kv_min_bucket": LEAST, **bound}
    own = {"prompt_ids": PROMPT, "tokens": TOKENS, "generations": GENERATIONS, "ignore_eos": True, "config": config}
    return parse_request(request(Path("in memory"), **own))


def least_limit(wanted: RunRequest, graph: Graph, plans: dict[int, Plan]) -> int:
    """As a refusal says."""
    tiny = replace(wanted, config=replace(wanted.config, vram_limit=1))
    with pytest.raises(Refused) as refused:
        choose(tiny, graph, plans, "sim", G)
    return int(refused.value.remedy.split()[3])


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in SAMPLED else [pytest.mark.slow], id="-".join(map(str, c))) for c in CASES]
)
def test_every_schedule_of_a_decode_is_ordered(graph: Graph, case: tuple[Any, ...], record_property: Any) -> None:
    """The same ids and gaps in all of them, no hazard, and every access counted, the same ones in every order."""
    budget, *others = case
    wanted = asked({} if budget in (None, LIMIT) else {"weight_budget": budget}, *others)
    plans = plans_for(graph, wanted.prompts, wanted.config.prefill_chunk)
    if budget == LIMIT:
        wanted = asked({"vram_limit": least_limit(wanted, graph, plans)}, *others)
        lent = [d.value for d in choose(wanted, graph, plans, "sim", G).decisions if d.name == "lent_to_weights"]
        assert lent != [0] or "seq-major" in others, "two of these models fill no further granule in so few positions"
    plain = decode(wanted, graph, plans, SimDevice(granule_bytes=G), None)
    counted = set()
    for order, seed in SCHEDULES:
        hazards = Hazards()
        device = ScheduledDevice(SimDevice(granule_bytes=G), Schedule(order, seed), hazards)  # type: ignore[arg-type]
        outcome = decode(wanted, graph, plans, device, hazards)
        assert (outcome.failure, [str(h) for h in hazards.found]) == ("", [])
        assert outcome.tokens == plain.tokens
        assert len(outcome.tokens) == GENERATIONS and len(outcome.tokens[0][0][0]) == TOKENS
        counted.add(hazards.accesses)
    assert len(counted) == 1 and min(counted) > 1000
    record_property("accesses", sum(counted))
