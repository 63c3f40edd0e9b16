"""Experts read one by one: the same bits as resident, what was chosen and nothing else, and books that close."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from engine.batch import chunk_rows
from engine.config import EXPERTS as WAYS
from engine.counters import COUNTERS
from engine.device.hazards import Hazards
from engine.device.plan_only import PlanDevice
from engine.device.scheduled import ScheduledDevice
from engine.errors import BadRequest, DeviceFailure
from engine.graph import Graph
from engine.onnx_load import load
from engine.paging.arena import minimum_budget
from engine.paging.pager import Pager
from engine.plan import TARGETS, Plan
from engine.routing import Seeded, banks
from tests.unit import engine_rig
from tests.unit.engine_mixture import BANKS, CHOSEN, EXPERTS, GRANULE, PROMPT, TOKENS, asked, built, planned
from tests.unit.engine_rig import Bench, Outcome, Trace, traces
from tests.unit.engine_scheduled import kinds, scheduled
from tests.unit.test_engine_plan_only import LINES

POLICIES = ("stable", "lru", "stable_slot", "size_first")
PROMPTS = [PROMPT, [3, 5, 8], [11]]
STEPS = 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid of four layers, each with a bank of eight experts, two for a token."""
    return built(tmp_path_factory.mktemp("experts") / "m")


@pytest.fixture(scope="module")
def graph(folder: Path) -> Graph:
    """The same, loaded once."""
    return load(folder)


@pytest.fixture(scope="module")
def resident(graph: Graph) -> dict[str, list[Trace]]:
    """Each prompt alone, all weights in, banks whole, nothing captured: what every other run of its target must be."""
    rows = sorted({n for prompt in PROMPTS for n in chunk_rows([prompt], 64)})
    benches = {target: Bench(graph, capture=False, rows=rows, target=target) for target in TARGETS}
    return {t: [traces(bench, [prompt], steps=STEPS)[0] for prompt in PROMPTS] for t, bench in benches.items()}


@pytest.fixture(scope="module")
def trace(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The routing of a run in full."""
    path = tmp_path_factory.mktemp("trace") / "routing.json"
    assert asked(folder, routing_out=str(path)).code == 0
    return path


def shares(plan: Plan, granule: int) -> list[int]:
    """Budgets from the least one upwards, in bytes."""
    least = minimum_budget(plan, granule)
    return [least, *(max(least, plan.weight_bytes * share // 100) for share in (35, 50, 75, 90))]


@pytest.mark.parametrize(
    ("granule", "each"), [(4096, 3), *(pytest.param(g, 1, marks=pytest.mark.slow) for g in (4096, 16384))]
)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("target", TARGETS)
def test_no_bit_feels_that_experts_are_read_one_by_one(
    graph: Graph, resident: dict[str, list[Trace]], target: str, policy: str, granule: int, each: int
) -> None:
    """Every policy, budgets from the least, captured or not, alone and in a ragged batch, two generations each."""
    plan = Bench(graph, experts=True, granule=granule, target=target).plan
    for turn, (budget, capture) in enumerate(product(shares(plan, granule)[::each], (True, False))):
        prompts = PROMPTS if turn % 3 == 0 else PROMPTS[:1]
        chunk = (64, 3, 1)[turn % 3]
        bench = Bench(
            graph,
            experts=True,
            budget=budget,
            policy=policy,
            granule=granule,
            capture=capture,
            rows=sorted(chunk_rows(prompts, chunk)),
            sequences=len(prompts),
            target=target,
        )
        for _ in range(2):
            assert traces(bench, prompts, chunk, STEPS) == resident[target][: len(prompts)], (budget, capture, chunk)
        counted = bench.tally.read()
        assert counted["expert_touches"] > 0 and counted["page_ins"] > 0
        bench.close()
        assert bench.ledger.mapped_bytes("weights") == bench.ledger.owned_bytes == 0


def by_expert(outcome: Outcome, name: str) -> Any:
    """A count by bank and expert."""
    return np.array([row[name] for row in outcome.result["experts"]])


@pytest.mark.parametrize(("policy", "budget"), list(zip(POLICIES, ("40%", "75%", "40%", "60%"), strict=True)))
def test_a_pass_touches_the_experts_that_were_chosen_and_no_others(folder: Path, policy: str, budget: str) -> None:
    config = {"weight_budget": budget, "policy": policy}
    outcome = asked(folder, config=config, warmups=1, generations=2, prompt_ids=PROMPT[:1], tokens=3)
    LINES.validate(outcome.lines.of("result")[0])
    assert not outcome.broken_equations()
    assert {"E1", "E1b", "E2", "E2b"} <= {e["name"] for e in outcome.result["equations"]}
    rows = outcome.result["experts"]
    assert [row["whole"] for row in rows] == [None] * BANKS == [None] * outcome.facts["banks_split"]
    chosen = by_expert(outcome, "asked")
    touched = sum(by_expert(outcome, name) for name in ("hits", "retained", "bypassed"))
    assert ((touched > 0) == (chosen > 0)).all() and (touched >= chosen).all()
    assert (chosen == 0).any(), "a run that chooses every expert shows nothing"
    passes = sum(line["counters"][p].get("forward_steps", 0) for line in outcome.lines.of("generation")
                 for p in ("warm", "prefill", "decode"))  # fmt: skip
    dense = passes * outcome.facts["touches_per_step"]
    assert touched.sum() + dense == next(e["lhs"] for e in outcome.result["equations"] if e["name"] == "W1p")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_below_one_bank_runs(folder: Path, policy: str) -> None:
    """Whole it is refused; expert by expert it has the resident run's tokens, with room for one token's experts."""
    bank = asked(folder).result["experts"][0]
    budget = asked(folder, config={"weight_budget": 1}).error["remedy"].split()[3]
    assert int(budget) < bank["expert_bytes"] * EXPERTS
    whole = asked(folder, config={"weight_budget": int(budget), "policy": policy, "experts": "whole"})
    assert whole.code == 13
    outcome = asked(folder, config={"weight_budget": int(budget), "policy": policy})
    assert outcome.streams == asked(folder).streams and not outcome.broken_equations()
    assert outcome.counters["expert_rereads"] > 0, "seven tokens' experts do not fit at once"
    assert asked(folder, config={"weight_budget": int(budget) - 1, "policy": policy}).code == 13


def test_both_ways_of_reading_a_bank_do_what_they_say(folder: Path) -> None:
    """The knob changes what is read: whole banks ask for every expert, and for more bytes than the chosen ones."""
    config = {"weight_budget": "50%", "policy": "lru", "capture": False}
    routed, whole = (asked(folder, config={**config, "experts": way}) for way in WAYS)
    assert routed.streams == whole.streams
    assert routed.counters["htod_bytes"] < whole.counters["htod_bytes"]
    assert (routed.facts["banks_split"], whole.facts["banks_split"]) == (BANKS, 0)
    assert {row["whole"] for row in whole.result["experts"]} == {"experts is whole"}
    assert whole.counters["expert_touches"] == 0 and not whole.broken_equations()
    assert (by_expert(whole, "asked") == by_expert(routed, "asked")).all()
    needed = routed.facts["requested_bytes_per_step"] * routed.counters["forward_steps"]
    moved = routed.counters["hit_bytes"] + routed.counters["htod_bytes"]
    assert moved == needed + routed.counters["routed_bytes"] + routed.counters["expert_reread_bytes"]


@pytest.mark.parametrize(("policy", "capture"), list(zip(POLICIES, (True, False, True, False), strict=True)))
def test_the_books_without_arithmetic_are_a_full_runs(folder: Path, trace: Path, policy: str, capture: bool) -> None:
    config = {"weight_budget": "50%", "policy": policy, "capture": capture}
    full = asked(folder, config=config, generations=2)
    bare = planned(folder, trace, config=config, generations=2)
    kept = [{n: v for n, v in o.counters.items() if COUNTERS[n].scope in ("plan", "device")} for o in (full, bare)]
    assert kept[0] == kept[1] and full.facts == bare.facts
    for part in ("experts", "keys", "seams", "equations"):
        assert full.result[part] == bare.result[part], part


# -- seams and graphs


def test_a_bank_that_stands_is_in_the_graph_and_any_other_is_a_seam_with_its_reason(folder: Path) -> None:
    """With a slot the resident set is fixed: banks that are in it whole are captured and nobody waits for them."""
    counts = []
    for budget in ("55%", "97%"):
        outcome = asked(folder, config={"weight_budget": budget, "policy": "stable_slot"}, generations=2)
        assert outcome.streams == asked(folder, generations=2).streams and not outcome.broken_equations()
        seams = [s for s in outcome.result["seams"] if s["reason"] == "HostControlFlowOrSequence"]
        assert {(s["op"], s["path"]) for s in seams} == {("com.microsoft::QMoE", "host-seam")}
        assert all("which experts were chosen" in s["detail"] for s in seams)
        standing = [row for row in outcome.result["experts"] if not any(row["bypassed"] + row["retained"])]
        assert len(seams) >= BANKS - len(standing)
        counts.append(len(seams))
        assert outcome.counters["vmm_calls_steady"] == outcome.counters["evictions"] == 0
        waits = outcome.counters["host_syncs"] / outcome.counters["forward_steps"]
        assert waits == 1 + len(seams), "a wait a bank that is no part of the graph, and one for the token"
    assert counts[0] > counts[1]


def test_experts_that_stay_are_loaded_before_the_first_step(folder: Path) -> None:
    outcome = asked(folder, config={"weight_budget": "60%", "policy": "stable_slot"})
    loaded = outcome.lines.of("generation")[0]["counters"]["load"]
    assert loaded["loaded_keys"] > 0 and not by_expert(outcome, "retained").any()
    stays = by_expert(outcome, "asked") * (by_expert(outcome, "bypassed") == 0)
    assert (by_expert(outcome, "hits")[stays > 0] >= stays[stays > 0]).all()


# -- order


@pytest.mark.parametrize(
    ("policy", "order", "target"),
    list(zip(POLICIES, ("early", "late", "random", "late"), (*TARGETS, *reversed(TARGETS)), strict=True)),
)
def test_every_order_of_work_gives_the_same_tokens_without_a_hazard(
    graph: Graph, resident: dict[str, list[Trace]], policy: str, order: Any, target: str
) -> None:
    budget = Bench(graph, experts=True).plan.weight_bytes // 2
    device = scheduled(order, 3)
    bench = Bench(graph, experts=True, device=device, budget=budget, policy=policy, rows=(7,), target=target)
    for _ in range(2):
        assert traces(bench, PROMPTS[:1], steps=STEPS) == resident[target][:1]
    assert device.hazards.found == [] and device.hazards.accesses > 1000


class Careless(Pager):
    """The planted defect: what was there for another expert serves for this one."""

    def _fill(self, key: int, address: int) -> None:
        before = self._keys[key - 1]
        super()._fill(before.index if before.further and self._keys[key].further else key, address)


@pytest.mark.parametrize("inner", ["scheduled", "plan"])
def test_another_experts_bytes_are_found(graph: Graph, monkeypatch: pytest.MonkeyPatch, inner: str) -> None:
    """By the checker as a read of another's bytes; without arithmetic as a failure that names both."""
    budget = Bench(graph).plan.weight_bytes // 2
    monkeypatch.setattr(engine_rig, "make_pager", Careless)
    device: Any = scheduled() if inner == "scheduled" else PlanDevice(granule_bytes=GRANULE)
    bench = Bench(graph, experts=True, device=device, budget=budget, policy="lru")
    if inner == "scheduled":
        bench.prefill([1])
        assert "read of another's bytes" in kinds(device)
        return
    bench.decoder._given = Seeded(1, banks(bench.plan))
    with pytest.raises(DeviceFailure, match=r"QMoE: key \d+ is read where there is key \d+"):
        bench.prefill([1])


def test_a_read_before_the_choice_is_known_ends_the_run(graph: Graph) -> None:
    """Where no step has written its choice, the host finds poison and no experts."""
    bench = Bench(graph, experts=True, budget=Bench(graph).plan.weight_bytes // 2, policy="lru")
    step = next(s for s in bench.plan.steps if s.experts is not None)
    with pytest.raises(DeviceFailure, match=r"expert -1 of .* is not among its 8"):
        bench.decoder._routed(bench.plan, step, (0,))


def test_passes_are_told_apart_however_often_the_host_reads(graph: Graph) -> None:
    """The checker's reports say in which pass an access was: a wait for the routing is no new pass."""
    hazards = Hazards()
    inner = scheduled("late").inner
    device = ScheduledDevice(inner, scheduled("late").schedule, hazards)
    bench = Bench(graph, experts=True, device=device, budget=Bench(graph).plan.weight_bytes // 2, policy="lru")
    bench.prefill([1])
    for _ in range(3):
        bench.step()
    assert hazards._token == 4


# -- the hot set


def test_the_hot_set_is_what_a_recorded_run_read_most(folder: Path, trace: Path) -> None:
    config = {"weight_budget": "55%", "policy": "stable_slot", "prefill_chunk": 1}
    cold = asked(folder, config=config)
    hot = asked(folder, config={**config, "hot_experts": str(trace)})
    assert hot.streams == cold.streams and not hot.broken_equations()
    assert hot.counters["expert_touch_bytes"] == cold.counters["expert_touch_bytes"]
    assert hot.counters["htod_bytes"] < cold.counters["htod_bytes"]
    passing, times = by_expert(hot, "bypassed") > 0, by_expert(hot, "asked")
    assert times[passing].max() <= times[~passing & (times > 0)].min()


def test_a_hot_set_of_another_model_or_without_effect_is_refused(folder: Path, trace: Path, tmp_path: Path) -> None:
    config = {"weight_budget": "55%", "policy": "stable_slot", "hot_experts": str(trace)}
    other = built(tmp_path / "other", seed=6)
    assert "another model" in asked(other, config=config).error["message"]
    spoilt = tmp_path / "spoilt.json"
    spoilt.write_text(trace.read_text()[:-40])
    refused = asked(folder, config={**config, "hot_experts": str(spoilt)})
    assert refused.code == 10 and "cannot be read" in refused.error["message"]
    assert refused.error["message"].startswith("hot_experts: ") and "seed" not in refused.error["remedy"]
    spoilt.write_text(json.dumps({**json.loads(trace.read_text()), "sequences": []}))
    assert "has no sequence" in asked(folder, config={**config, "hot_experts": str(spoilt)}).error["message"]
    for change in ({"policy": "lru"}, {"experts": "whole"}):
        with pytest.raises(BadRequest, match="hot_experts has no effect"):
            asked(folder, config={**config, **change})


# -- what stays whole


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({}, "all weights fit"),
        ({"config": {"weight_budget": "50%", "experts": "whole"}}, "experts is whole"),
        ({"config": {"weight_budget": "50%", "policy": "staging"}}, "staging is fixed before routing is known"),
        ({"config": {"weight_budget": "50%", "policy": "zero_copy"}}, "read in place what it chose"),
        ({"config": {"weight_budget": "50%"}, "arithmetic": "none"}, "no routing is given"),
    ],
)
def test_a_bank_that_is_read_whole_says_why(folder: Path, words: dict[str, Any], why: str) -> None:
    outcome = asked(folder, **words)
    assert not outcome.broken_equations() and outcome.facts["banks_whole"] == BANKS
    assert all(why in row["whole"] and "hits" not in row for row in outcome.result["experts"])
    assert ("asked" in outcome.result["experts"][0]) is ("arithmetic" not in words)
    LINES.validate(outcome.lines.of("result")[0])
    if "arithmetic" not in words:
        assert outcome.streams == asked(folder).streams


def test_a_bank_of_which_each_token_chooses_all_is_read_whole(tmp_path: Path) -> None:
    model = built(tmp_path / "all", experts=CHOSEN)
    outcome = asked(model, config={"weight_budget": "50%"})
    assert {row["whole"] for row in outcome.result["experts"]} == {"each token chooses every expert"}
    assert outcome.streams == asked(model).streams and len(outcome.streams[0][0]) == TOKENS


def test_the_schema_of_lines_knows_what_a_row_of_experts_is(folder: Path) -> None:
    row = asked(folder).result["experts"][0]
    schema = LINES.schema["$defs"]["result"]["properties"]["experts"]["items"]
    assert Draft202012Validator({**schema, "$defs": LINES.schema["$defs"]}).is_valid(row)
    assert not Draft202012Validator({**schema, "$defs": LINES.schema["$defs"]}).is_valid({**row, "other": 1})


# -- under a limit on everything


@pytest.mark.parametrize(
    "policy", [None, "lru", *(pytest.param(p, marks=pytest.mark.slow) for p in POLICIES if p != "lru")]
)
def test_experts_give_way_to_the_cache_as_it_grows(folder: Path, policy: str | None) -> None:
    """A limit alone chooses the policy that reads experts one by one; growths take room, and no token feels it."""
    config: dict[str, Any] = {"kv_min_bucket": 8} | ({} if policy is None else {"policy": policy})
    words = {"tokens": 70}  # the cache comes to a second granule
    least = int(asked(folder, **words, config={**config, "vram_limit": 1}).error["remedy"].split()[3])
    plain = asked(folder, **words, config=config)
    for more in (0, plain.facts["weight_bytes"] // 3):
        outcome = asked(folder, **words, config={**config, "vram_limit": least + more})
        assert outcome.streams == plain.streams and not outcome.broken_equations()
        assert outcome.facts["banks_split"] == BANKS and outcome.counters["expert_touches"] > 0
        decided = {d["name"]: d for d in outcome.lines.of("hello")[0]["decisions"]}
        assert decided["expert_banks"]["value"] == f"{BANKS} of {BANKS} banks one by one"
        assert decided["policy"]["value"] == (policy or "stable_slot")
        assert decided["policy"]["source"] == ("derived" if policy is None else "request")
        assert outcome.counters["growth_grants"] > 0


def test_weights_that_fit_at_first_and_not_at_last_are_read_one_by_one_from_the_start(folder: Path) -> None:
    """Whole banks could not give way as far: their widest step is the bank. At first all stand, in one graph."""
    words: dict[str, Any] = {"tokens": 70}
    plain = asked(folder, **words, config={"kv_min_bucket": 8})
    least = int(asked(folder, **words, config={"kv_min_bucket": 8, "vram_limit": 1}).error["remedy"].split()[3])
    arena = asked(folder, **words, config={"kv_min_bucket": 8, "weight_budget": "99%"}).facts["capacity_bytes"]
    config = {"kv_min_bucket": 8, "policy": "stable_slot", "vram_limit": least + arena - 3 * GRANULE}
    outcome = asked(folder, **words, config=config)
    assert outcome.streams == plain.streams and not outcome.broken_equations()
    assert outcome.facts["banks_split"] == BANKS and outcome.counters["growth_grants"] > 0
