"""What a limit makes of a run: resident, streaming or refused, each decision told with its source and its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import engine
from engine.bind import lower
from engine.onnx_load import load
from engine.paging.arena import minimum_budget, pack
from engine.show import show
from tests.unit.engine_rig import Outcome, build_tiny, run

G = 4096
BASE: dict[str, Any] = {"granule": G, "kv_min_bucket": 8}
ASKED: dict[str, Any] = {"tokens": 30, "ignore_eos": True}
LINES = Draft202012Validator(json.loads((Path(engine.__file__).parent / "schemas" / "lines.json").read_text()))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("choice"))


@pytest.fixture(scope="module")
def sizes(tiny: Path) -> tuple[int, int, int]:
    """The least limit of a run; bytes of its weights packed into granules, and of the widest step."""
    least = int(run(tiny, **ASKED, config={**BASE, "vram_limit": 1}).error["remedy"].split()[3])
    plan = lower(load(tiny), 1)
    return least, (pack(plan.keys, G)[-1].last + 1) * G, minimum_budget(plan, G)


def decisions(outcome: Outcome) -> dict[str, dict[str, Any]]:
    """Of the hello line, by name; each has all its parts."""
    [hello] = outcome.lines.of("hello")
    LINES.validate(hello)
    assert all(d["reason"] and d["source"] for d in hello["decisions"])
    return {d["name"]: d for d in hello["decisions"]}


def test_room_for_all_is_resident_and_no_policy_is_chosen(tiny: Path, sizes: tuple[int, int, int]) -> None:
    least, packed, step = sizes
    outcome = run(tiny, **ASKED, config={**BASE, "vram_limit": least - step + packed})
    told = decisions(outcome)
    assert (told["strategy"]["value"], told["strategy"]["source"]) == ("resident", "derived")
    assert (told["policy"]["value"], told["policy"]["source"]) == ("stable", "default")
    assert told["lent_to_weights"]["value"] == 0 and told["weight_budget_physical"]["value"] == packed
    assert outcome.counters["page_ins"] == outcome.counters["growth_grants"] == 0
    assert outcome.facts["resident"] == 1 and outcome.broken_equations() == []


def test_a_byte_less_streams_by_the_policy_that_copies_least(tiny: Path, sizes: tuple[int, int, int]) -> None:
    """All fit beside the first bucket and not beside the last: lent, and given back."""
    least, packed, step = sizes
    outcome = run(tiny, **ASKED, config={**BASE, "vram_limit": least - step + packed - 1})
    told = decisions(outcome)
    assert (told["strategy"]["value"], told["policy"]["value"]) == ("streaming", "staging")
    assert "not beside the last" in told["strategy"]["reason"] and str(packed) in told["strategy"]["reason"]
    policy = outcome.lines.of("hello")[0]["effective_config"]["policy"]
    assert policy == {"value": "staging", "source": "derived", "reason": told["policy"]["reason"]}
    assert told["lent_to_weights"]["value"] == 1 and outcome.counters["growth_grants"] == 1
    assert outcome.streams == run(tiny, **ASKED).streams and outcome.counters["staged_bytes"] > 0


def test_a_small_limit_streams_from_the_start_and_below_the_least_it_is_refused(
    tiny: Path, sizes: tuple[int, int, int]
) -> None:
    least, packed, _ = sizes
    outcome = run(tiny, **ASKED, config={**BASE, "vram_limit": least})
    told = decisions(outcome)
    assert told["strategy"]["value"] == "streaming" and f"{packed} bytes" in told["strategy"]["reason"]
    nominal, physical = told["weight_budget_nominal"]["value"], told["weight_budget_physical"]["value"]
    assert 0 <= nominal - physical < G and physical % G == 0, "nominal, and whole granules of it"
    assert (nominal, physical) == (outcome.facts["budget_bytes"], outcome.facts["capacity_bytes"])
    assert told["weight_budget_nominal"]["source"] == "derived"
    refused = run(tiny, **ASKED, config={**BASE, "vram_limit": least - 1})
    assert refused.code == 13 and f"{least - 1} bytes" in refused.error["message"]
    assert refused.error["remedy"] == f"give at least {least} bytes"
    assert refused.lines.of("hello")[0]["decisions"] == [], "refused before anything was settled"


@pytest.mark.parametrize(
    ("given", "policy", "source"),
    [
        ({"policy": "lru"}, "lru", "request"),
        ({"policy": "stable"}, "stable", "request"),
        ({"weight_budget": "50%"}, "stable", "default"),
        ({"weight_budget": None}, "staging", "derived"),
    ],
)
def test_what_was_asked_for_is_not_chosen_anew(
    tiny: Path, sizes: tuple[int, int, int], given: dict[str, Any], policy: str, source: str
) -> None:
    outcome = run(tiny, **ASKED, config={**BASE, "vram_limit": sizes[0] + 20_000, **given})
    told = decisions(outcome)
    assert (told["policy"]["value"], told["policy"]["source"]) == (policy, source)
    assert outcome.lines.of("hello")[0]["effective_config"]["policy"]["value"] == policy
    assert outcome.streams == run(tiny, **ASKED).streams


def test_without_a_limit_nothing_is_chosen(tiny: Path) -> None:
    told = decisions(run(tiny, **ASKED, config=BASE))
    assert {n: d["value"] for n, d in told.items()} == {
        "strategy": "resident",
        "policy": "stable",
        "weight_budget_nominal": None,
        "weight_budget_physical": 56 * G,
    }
    half = decisions(run(tiny, **ASKED, config={**BASE, "weight_budget": "50%"}))
    assert half["strategy"]["value"] == "streaming" and half["weight_budget_nominal"]["value"] == 113_920
    assert (half["weight_budget_nominal"]["source"], half["weight_budget_physical"]["value"]) == ("request", 27 * G)


def test_every_decision_is_printed_with_its_source_and_its_reason(tiny: Path, sizes: tuple[int, int, int]) -> None:
    outcome = run(tiny, **ASKED, config={**BASE, "vram_limit": sizes[0]})
    text = show(outcome.lines.lines, lambda _: None)
    for d in decisions(outcome).values():
        assert f"memory_strategy: {d['name']}={d['value']} source={d['source']} reason: {d['reason']}\n" in text
    assert "config: policy=staging source=derived reason: " in text


def test_hello_comes_first_even_where_the_model_cannot_be_read(tmp_path: Path) -> None:
    outcome = run(tmp_path / "none")
    assert outcome.code == 11
    assert [line["type"] for line in outcome.lines.lines] == ["hello", "error"]
