"""The distance to the floor by cause: each cause from made-up traffic, the sum on real runs, and per-key bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.attribution import CAUSES, Key, Run, floor_bytes, over_floor
from engine.config import POLICIES
from engine.paging.traffic import Filling, KeyTraffic
from tests.unit.engine_rig import Outcome, build_tiny, run

G = 4096


def causes(
    *keys: Key, passes: int = 10, capacity: int = 100, held: int = 0, ring: int = 0, **more: Any
) -> dict[str, int]:
    """The causes that are not zero, by their short names."""
    left = more.pop("left", capacity)
    read = sum(key.nbytes for key in keys)
    whole = {"tokens": passes, "batch": 1, "fits": False, "least_read_bytes": read, **more}
    found = over_floor(
        keys, Run(passes, capacity_bytes=capacity, left_bytes=left, filling=Filling(held, ring), **whole)
    )
    return {n.removeprefix("over_floor_").removesuffix("_bytes"): b for n, b in found.items() if b}


def test_a_key_that_stays_is_charged_its_first_fill() -> None:
    kept = Key(100, KeyTraffic(hits=9, retained=1), True)
    assert causes(kept, Key(50, KeyTraffic(bypassed=10), False), held=100) == {"first_fill": 100}


def test_a_key_that_came_back_is_charged_each_return() -> None:
    kept = Key(100, KeyTraffic(hits=6, retained=4), True)
    assert causes(kept, held=100) == {"first_fill": 100, "eviction": 300}


@pytest.mark.parametrize("way", ["bypassed", "staged", "in_place"])
def test_a_key_that_passed_through_before_it_stayed_is_charged_that(way: str) -> None:
    kept = Key(100, KeyTraffic(hits=7, retained=1, **{way: 2}), True)
    assert causes(kept, held=100) == {"first_fill": 100, "bypass": 200}


def test_what_never_stays_is_at_the_floor_when_asked_once_a_pass() -> None:
    assert (
        causes(Key(100, KeyTraffic(retained=0, hits=10), True), Key(70, KeyTraffic(bypassed=10), False), held=100) == {}
    )


def test_a_second_reading_in_a_pass_and_hits_before_an_eviction_are_told_apart() -> None:
    kept = Key(100, KeyTraffic(hits=10), True)
    assert causes(kept, Key(7, KeyTraffic(bypassed=20), False), held=100) == {"asked": 70}
    assert causes(kept, Key(7, KeyTraffic(hits=3, retained=1, bypassed=6), False), held=100) == {"early_hit": -21}


def test_capacity_that_holds_nothing_is_charged_once_a_pass() -> None:
    kept, passing = Key(60, KeyTraffic(hits=10), True), Key(200, KeyTraffic(staged=10), False)
    assert causes(kept, passing, held=64, ring=30) == {"ring": 300, "rounding": 40, "unfilled": 60}


def test_capacity_that_went_to_the_cache_is_told_apart_and_hits_from_before_are_credited() -> None:
    kept, gone = Key(60, KeyTraffic(hits=10), True), Key(40, KeyTraffic(hits=4, evicted=1, bypassed=6), False)
    assert causes(kept, gone, Key(9, KeyTraffic(bypassed=10), False), held=60, left=60) == {
        "granted": 400,
        "early_hit": -160,
    }


def test_a_prompt_in_chunks_and_a_batch_are_told_by_the_tokens_that_passes_gave() -> None:
    kept, passing = Key(100, KeyTraffic(hits=10), True), Key(50, KeyTraffic(bypassed=10), False)
    assert causes(kept, passing, held=100, tokens=8) == {"prompt": 100}
    assert causes(kept, passing, held=100, tokens=40, batch=4) == {}
    assert floor_bytes(Run(10, 30, 4, 100, 100, False, Filling(0, 0), 150)) == 375


def test_experts_are_held_to_what_a_token_chooses_and_not_to_a_reading_a_pass() -> None:
    """Four experts of 50 of which each of ten passes needs one: 150 bytes are read at the least, 50 over the link."""
    kept = Key(100, KeyTraffic(hits=10), True)
    chosen = [Key(50, KeyTraffic(bypassed=n), False, routed=True) for n in (7, 3, 0, 0)]
    assert causes(kept, *chosen, held=100, least_read_bytes=150) == {}
    twice = [*chosen[:3], Key(50, KeyTraffic(bypassed=2), False, routed=True)]
    assert causes(kept, *twice, held=100, least_read_bytes=150) == {"routed": 100}
    hit = [*chosen[:3], Key(50, KeyTraffic(hits=2), False, routed=True)]
    assert causes(kept, *hit, held=100, least_read_bytes=150) == {"routed": 100, "early_hit": -100}


def test_where_all_fits_nothing_is_charged_but_what_crossed() -> None:
    assert causes(Key(100, KeyTraffic(hits=10), True), capacity=4096, held=4096, fits=True) == {}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("tiny"))


def distance(outcome: Outcome) -> int:
    """Bytes above the floor, from the device's own counts and the plan's facts."""
    facts, counters = outcome.facts, outcome.counters
    moved = counters["device_htod_bytes"] - counters["loaded_bytes"] + counters["device_zero_copy_bytes"]
    per_token = max(0, facts["weight_bytes"] - facts["capacity_bytes"]) if not facts["resident"] else 0
    return int(moved - per_token * counters["emitted_tokens"] // facts["batch"])


@pytest.mark.parametrize("budget", ["35%", "50%", "90%"])
@pytest.mark.parametrize("policy", POLICIES)
def test_on_every_policy_and_budget_causes_add_up_to_the_distance(tiny: Path, policy: str, budget: str) -> None:
    config = {"policy": policy, "weight_budget": budget, "granule": G, "prefill_chunk": 3}
    outcome = run(tiny, config=config, tokens=5, generations=3)
    assert outcome.broken_equations() == []
    assert sum(outcome.facts[name] for name in CAUSES) == distance(outcome) > 0
    assert outcome.facts["over_floor_prompt_bytes"] > 0, "the prompt goes in by two passes, of which one gives a token"


def test_a_batch_and_a_model_that_fits(tiny: Path) -> None:
    config = {"policy": "stable", "weight_budget": "50%", "granule": G, "batch": 3}
    outcome = run(tiny, config=config, tokens=5)
    assert outcome.broken_equations() == []
    assert sum(outcome.facts[name] for name in CAUSES) == distance(outcome)
    assert not any(run(tiny, tokens=3).facts[name] for name in CAUSES)


def test_policies_differ_by_cause(tiny: Path) -> None:
    found = {}
    for policy in POLICIES:
        outcome = run(tiny, config={"policy": policy, "weight_budget": "50%", "granule": G}, tokens=6, generations=2)
        found[policy] = {name for name in CAUSES if outcome.facts[name]}
    assert "over_floor_eviction_bytes" in found["lru"] - found["stable"]
    assert "over_floor_ring_bytes" in found["staging"] & found["stable_slot"]
    assert "over_floor_first_fill_bytes" not in found["staging"] | found["zero_copy"], "what stays is loaded beforehand"


def test_rows_read_in_place_stand_beside_the_keys(tiny: Path) -> None:
    """The embedding table is no key unless it is a matmul weight as well."""
    outcome = run(tiny, tokens=4, generations=2)
    rows = {row["key"]: row for row in outcome.result["keys"]}
    gathered = {name: row["gathered_bytes"] for name, row in rows.items() if row["gathered_bytes"]}
    assert sum(gathered.values()) == outcome.counters["gather_bytes"] > 0
    assert len(gathered) == 1 and "embed" in next(iter(gathered))


def test_every_cause_is_explained_in_the_docs(checkout: Path) -> None:
    told = re.findall(r"^\| `(over_floor_\w+)` \| (.+) \|$", (checkout / "docs/residency.md").read_text("utf-8"), re.M)
    assert dict(told) == dict(CAUSES)
