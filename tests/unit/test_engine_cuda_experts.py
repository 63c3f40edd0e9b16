"""Experts read one by one on a real card: the simulator's books at every budget, and the bits of all weights in."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from engine.batch import chunk_rows
from engine.config import POLICIES
from engine.graph import Graph
from engine.onnx_load import load
from engine.paging.arena import minimum_budget
from engine.plan import TARGETS
from tests.unit.engine_audited import TOKENS as AUDITED
from tests.unit.engine_audited import clean
from tests.unit.engine_mixture import built
from tests.unit.engine_rig import Bench, Outcome, Trace, run, traces
from tests.unit.test_engine_cuda_card import new_device, of_plan

GRANULE = 2 << 20
"""A card's own: experts must be large for it."""
LAYERS, EXPERTS, CHOSEN, PROMPT = 4, 32, 2, [1, 17, 42, 99, 7, 8, 9]
PROMPTS = [PROMPT, [3, 5, 8], [11]]
ONE_BY_ONE = ("stable", "lru", "stable_slot", "size_first")
BUDGETS = ("all", "100%", "50%", "35%", "one bank", "below one bank", "too little")
STEPS = 6
ON_DEVICE = ("kernel_runs", "eager_launches", "graph_nodes", "step_kernels", "device_htod_bytes", "vmm_calls")


@dataclass(frozen=True, slots=True)
class Mixture:
    """A model, and budgets of it in bytes by their names."""

    folder: Path
    budgets: dict[str, int | str]


def asked(model: Path, device: str, **changes: Any) -> Outcome:
    """A run of this file's prompt, of the target that a card has."""
    granule = {"granule": GRANULE} if device == "sim" else {}
    config = {"target": "fused", **granule, **changes.pop("config", {})}
    return run(model, **{"prompt_ids": PROMPT, "tokens": 8, "device": device, "config": config, **changes})


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    """A hybrid of four layers, each with a bank of 32 experts, several of which share a granule."""
    sizes: dict[str, Any] = {"hidden": 512, "ffn": 256, "shared_ffn": 64, "experts": EXPERTS, "chosen": CHOSEN}
    folder = built(tmp_path_factory.mktemp("mixture") / "m", layers=LAYERS, **sizes)
    least = int(asked(folder, "sim", config={"weight_budget": 1}).error["remedy"].split()[3])
    bank = EXPERTS * asked(folder, "sim", tokens=1).result["experts"][0]["expert_bytes"]
    assert least < bank, "one token's experts are less than a bank"
    named = {"all": 1 << 30, "one bank": bank, "below one bank": least, "too little": least - 1}
    return Mixture(folder, {**{b: b for b in BUDGETS}, **named})


def test_the_budgets_are_what_their_names_say(mixture: Mixture) -> None:
    """On the simulator, which a card is held against: experts are read one by one, and some share a granule.

    W itself is less than the whole granules that W lies on.
    """
    for budget in BUDGETS[1:-1]:
        outcome = asked(mixture.folder, "sim", config={"weight_budget": mixture.budgets[budget], "policy": "lru"})
        assert outcome.facts["banks_split"] == LAYERS and outcome.counters["page_ins"] > 0
        assert outcome.result["experts"][0]["expert_bytes"] < GRANULE
    assert asked(mixture.folder, "sim", config={"weight_budget": mixture.budgets["all"]}).facts["banks_split"] == 0
    assert asked(mixture.folder, "sim", config={"weight_budget": mixture.budgets["too little"]}).code == 13


@pytest.mark.gpu
@pytest.mark.parametrize(("budget", "policy"), list(product(BUDGETS, POLICIES)))
def test_a_budget_does_on_a_card_what_it_does_on_the_simulator(mixture: Mixture, budget: str, policy: str) -> None:
    """The same ids, counters, seams, touches by expert and refusals; and the resident run's ids and gaps."""
    config = {"weight_budget": mixture.budgets[budget], "policy": policy}
    card, simulated = (asked(mixture.folder, d, generations=2, config=config) for d in ("cuda", "sim"))
    assert card.code == simulated.code
    if card.code:
        assert card.code == 13 and card.error["message"] == simulated.error["message"]
        return
    assert card.broken_equations() == []
    assert [ids for ids, _ in card.streams] == [ids for ids, _ in simulated.streams]
    assert of_plan(card) == of_plan(simulated)
    assert {n: card.counters.get(n) for n in ON_DEVICE} == {n: simulated.counters.get(n) for n in ON_DEVICE}
    for part in ("seams", "experts", "keys"):
        assert card.result[part] == simulated.result[part], part
    assert card.facts["banks_split"] == (LAYERS if policy in ONE_BY_ONE and budget != "all" else 0)
    assert card.counters["alloc_calls_steady"] == 0
    assert (card.facts["mapped_after_close_bytes"], card.facts["owned_after_close_bytes"]) == (0, 0)
    assert card.streams == asked(mixture.folder, "cuda", generations=2, config={"capture": False}).streams


@pytest.mark.gpu
def test_a_limit_on_everything_has_a_card_read_experts_one_by_one(mixture: Mixture) -> None:
    least = int(asked(mixture.folder, "sim", config={"vram_limit": 1}).error["remedy"].split()[3])
    config = {"vram_limit": least + 4 * GRANULE}
    card, simulated = (asked(mixture.folder, d, config=config) for d in ("cuda", "sim"))
    decided = [outcome.lines.of("hello")[0]["decisions"] for outcome in (card, simulated)]
    assert decided[0] == decided[1]
    assert card.facts["banks_split"] == LAYERS and card.broken_equations() == []
    assert of_plan(card) == of_plan(simulated)
    assert card.streams == asked(mixture.folder, "cuda", config={"capture": False}).streams


# -- the same bits


@pytest.fixture(scope="module")
def graph(mixture: Mixture) -> Graph:
    """The model, loaded once."""
    return load(mixture.folder)


@pytest.fixture(scope="module")
def resident(graph: Graph) -> dict[str, list[Trace]]:
    """Of each target, each prompt alone: all weights in, banks whole, launched one by one."""
    rows = sorted({n for prompt in PROMPTS for n in chunk_rows([prompt], 64)})
    made = {}
    for target in TARGETS:
        bench = Bench(graph, device=new_device(), capture=False, rows=rows, target=target)
        made[target] = [traces(bench, [prompt], steps=STEPS)[0] for prompt in PROMPTS]
        assert len({bits for _, _, bits in made[target][0]}) == STEPS + 1
    return made


@pytest.mark.gpu
@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("policy", ONE_BY_ONE)
@pytest.mark.parametrize("target", TARGETS)
def test_no_bit_feels_that_experts_are_read_one_by_one(
    graph: Graph, resident: dict[str, list[Trace]], target: str, policy: str, capture: bool
) -> None:
    """At the least budget and more, prompts in chunks of all, three and one, alone and in a ragged batch."""
    plan = Bench(graph, experts=True, granule=GRANULE, target=target).plan
    least = minimum_budget(plan, GRANULE)
    for turn, budget in enumerate((least, max(least, plan.weight_bytes // 2), least, plan.weight_bytes * 9 // 10)):
        prompts, chunk = (PROMPTS if turn != 1 else PROMPTS[:1]), (64, 3, 1, 64)[turn]
        device = new_device()
        bench = Bench(
            graph,
            device=device,
            experts=True,
            budget=budget,
            policy=policy,
            capture=capture,
            rows=sorted(chunk_rows(prompts, chunk)),
            sequences=len(prompts),
            target=target,
        )
        for _ in range(2):
            assert traces(bench, prompts, chunk, STEPS) == resident[target][: len(prompts)], (budget, chunk)
        counted = bench.tally.read()
        assert counted["expert_touches"] > 0 and counted["page_ins"] > 0
        assert not any(launch.once for launch in device._bound), "what is made for one pass is not kept"
        bench.close()
        assert device.mapped_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ONE_BY_ONE)
def test_experts_of_a_granule_each_are_read_one_by_one(tmp_path: Path, policy: str) -> None:
    sizes: dict[str, Any] = {"hidden": 1024, "ffn": 1024, "shared_ffn": 64, "experts": 6, "chosen": 2}
    folder = built(tmp_path / "m", layers=2, **sizes)
    config = {"weight_budget": "60%", "policy": policy}
    card, simulated = (asked(folder, d, tokens=5, config=config) for d in ("cuda", "sim"))
    assert GRANULE // 2 < card.result["experts"][0]["expert_bytes"] <= GRANULE
    assert of_plan(card) == of_plan(simulated) and card.broken_equations() == []
    assert card.facts["banks_split"] == 2 and card.counters["page_ins"] > 0
    assert card.streams == asked(folder, "cuda", tokens=5).streams


@pytest.mark.gpu
@pytest.mark.parametrize(("policy", "capture"), list(product(ONE_BY_ONE, (True, False))))
def test_an_audit_of_experts_one_by_one_is_clean(mixture: Mixture, policy: str, capture: bool) -> None:
    """Each key's bytes by sum where it is read, and every step against a shadow that has all weights."""
    how = {"policy": policy, "capture": capture, "weight_budget": "50%", "target": "fused", "kv_min_bucket": 4}
    ran = clean(mixture.folder, new_device(), every=3, **how)
    assert ran["ids"] == 3 * AUDITED and ran["page_ins"] > 0
    assert min(ran["keys"], ran["granules"], ran["kv_bytes"], ran["logits"]) > 0
