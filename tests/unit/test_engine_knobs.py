"""Every name of the engine's config: another value changes what it claims to, and a value that is none is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import CONFIG_NAMES, GRANULES_BYTES, MOST_BYTES, MOST_SEQUENCES, MOST_TOKENS, EngineConfig, check
from engine.errors import BadRequest
from engine.zoo import build
from tests.unit.engine_mixture import PROMPT, TOKENS, built
from tests.unit.engine_rig import Outcome, build_tiny, run

G = 4096
MIXTURE: dict[str, Any] = {"prompt_ids": PROMPT, "tokens": TOKENS, "ignore_eos": True}
HALF: dict[str, Any] = {"weight_budget": "50%", "granule": G}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model."""
    return build_tiny(tmp_path_factory.mktemp("knobs"))


def pair(tiny: Path, name: str, values: tuple[Any, Any], base: dict[str, Any], **asked: Any) -> tuple[Outcome, Outcome]:
    """Two runs that differ in one name; both say the value that they served, and give the same ids."""
    one, two = (run(tiny, **asked, config={**base, name: value}) for value in values)
    for outcome, value in ((one, values[0]), (two, values[1])):
        entry = outcome.lines.of("hello")[0]["effective_config"][name]
        assert (entry["value"], entry["source"]) == (value, "request")
        assert outcome.broken_equations() == []
    assert one.streams == two.streams
    return one, two


def weight_budget(tiny: Path, *_: Path) -> None:
    """Bounds what is mapped for weights, in bytes or as a share."""
    small, large = pair(tiny, "weight_budget", ("40%", 160_000), {"granule": G})
    assert small.facts["peak_weight_mapped_bytes"] <= 0.4 * 227_840 < large.facts["peak_weight_mapped_bytes"] <= 160_000
    assert small.counters["htod_bytes"] > large.counters["htod_bytes"] > 0


def vram_limit(tiny: Path, *_: Path) -> None:
    """Bounds weights, cache and workspace together."""
    small, large = pair(tiny, "vram_limit", (200_000, 260_000), {"granule": G})
    for outcome, limit in ((small, 200_000), (large, 260_000)):
        beside = limit - outcome.facts["limit_bytes"]
        assert beside >= outcome.facts["workspace_bytes"] > 0
        assert outcome.counters["peak_committed_bytes"] + beside <= limit
    assert small.counters["htod_bytes"] > large.counters["htod_bytes"]


def policy(tiny: Path, *_: Path) -> None:
    """Decides what stays."""
    lru, staged = pair(tiny, "policy", ("lru", "staging"), HALF)
    assert lru.counters["hits"] == 0 == lru.counters["staged_page_ins"]
    assert staged.counters["hits"] > 0 < staged.counters["staged_page_ins"]


def capture(tiny: Path, *_: Path) -> None:
    """Records the one-token step, and replays it."""
    on, off = pair(tiny, "capture", (True, False), {})
    assert (on.counters["captures"], on.counters["replays"]) == (1, 5) and off.counters["captures"] == 0
    assert on.counters["eager_launches"] < off.counters["eager_launches"]


def capture_rules(_: Path, hybrid: Path, *__: Path) -> None:
    """Cuts the step as it was before some rules."""
    words: dict[str, Any] = {"arithmetic": "none", "tokens": 4, "routing": "seed:1"}
    newest, oldest = pair(hybrid, "capture_rules", ("all", "none"), {}, **words)
    assert newest.counters["segments"] == 1 < oldest.counters["segments"]
    assert newest.result["seams"] == [] != oldest.result["seams"]


def granule(tiny: Path, *_: Path) -> None:
    """Is what memory is mapped in."""
    small, large = pair(tiny, "granule", (4096, 65536), {})
    for outcome, size in ((small, 4096), (large, 65536)):
        assert outcome.lines.of("hello")[0]["device"]["granule_bytes"] == size
        assert outcome.counters["mapped_physical_bytes"] % size == 0
    assert small.counters["mapped_physical_bytes"] < large.counters["mapped_physical_bytes"], "more is rounded up"


def prefill_chunk(tiny: Path, *_: Path) -> None:
    """Is the most of a prompt that goes in at once."""
    one, all_of_it = pair(tiny, "prefill_chunk", (1, 512), {})
    assert (one.counters["forward_steps"], all_of_it.counters["forward_steps"]) == (4 + 7, 1 + 7)


def kv_capacity(tiny: Path, *_: Path) -> None:
    """Is how far the cache may grow: heads lie that far apart."""
    small, large = pair(tiny, "kv_capacity", (12, 200), {"kv_layout": "head-major", "granule": G, "kv_min_bucket": 200})
    assert (small.facts["kv_capacity"], large.facts["kv_capacity"]) == (12, 200)
    with pytest.raises(BadRequest, match="kv_capacity 10 is below"):
        run(tiny, config={"kv_capacity": 10})
    beyond = run(tiny, config={"kv_capacity": 257})
    assert (beyond.code, beyond.error["message"]) == (10, "kv_capacity 257 is above the 256 positions of the model")
    assert run(tiny, config={"kv_capacity": 256}).code == 0


def kv_layout(tiny: Path, *_: Path) -> None:
    """Decides whether a growth copies."""
    head, seq = pair(tiny, "kv_layout", ("head-major", "seq-major"), {"kv_min_bucket": 4})
    assert head.counters["kv_growth_dtod_bytes"] > 0 == seq.counters["kv_growth_dtod_bytes"]


def kv_min_bucket(tiny: Path, *_: Path) -> None:
    """Is where buckets start."""
    small, large = pair(tiny, "kv_min_bucket", (4, 64), {})
    assert (small.counters["kv_growths"], large.counters["kv_growths"]) == (2, 0)


def prefix_reuse(tiny: Path, *_: Path) -> None:
    """Keeps what the next generation's prompt shares."""
    on, off = pair(tiny, "prefix_reuse", (True, False), {}, warmups=1)
    assert on.counters["prefix_hit_tokens"] == 3 and off.counters["prefix_hit_tokens"] == 0
    assert on.counters["gather_bytes"] < off.counters["gather_bytes"]


def batch(tiny: Path, *_: Path) -> None:
    """Runs sequences side by side, which read each weight once."""
    one, three = pair(tiny, "batch", (1, 3), HALF)
    assert [len(o.lines.of("generation")[0].get("further", ())) for o in (one, three)] == [0, 2]
    assert three.counters["emitted_tokens"] == 3 * one.counters["emitted_tokens"]
    assert three.counters["htod_bytes"] == one.counters["htod_bytes"]


def experts(_: Path, __: Path, mixture: Path) -> None:
    """Reads a bank's experts one by one, as they are chosen, or all of them with any."""
    one_by_one, whole = pair(mixture, "experts", ("routed", "whole"), {**HALF, "policy": "lru"}, **MIXTURE)
    assert 0 < one_by_one.counters["htod_bytes"] < whole.counters["htod_bytes"]
    assert one_by_one.counters["expert_touch_bytes"] > 0 == whole.counters["expert_touch_bytes"]


def hot_experts(_: Path, __: Path, mixture: Path) -> None:
    """Keeps the experts that a recorded run read most."""
    trace = mixture.parent / "routing.json"
    assert run(mixture, **MIXTURE, routing_out=str(trace), config={"granule": G}).code == 0
    base = {"granule": G, "weight_budget": "55%", "policy": "stable_slot", "prefill_chunk": 1}
    cold, hot = pair(mixture, "hot_experts", (None, str(trace)), base, **MIXTURE)
    assert 0 < hot.counters["htod_bytes"] < cold.counters["htod_bytes"]


def target(tiny: Path, *_: Path) -> None:
    """Makes a step of an operator, or of what one launch can do."""
    plain, fused = pair(tiny, "target", ("plain", "fused"), {})
    assert 0 < fused.counters["graph_nodes"] < plain.counters["graph_nodes"]


KNOBS: dict[str, Callable[[Path, Path, Path], None]] = {
    made.__name__: made
    for made in (
        *(weight_budget, vram_limit, policy, capture, capture_rules, granule, prefill_chunk),
        *(kv_capacity, kv_layout, kv_min_bucket, prefix_reuse, batch, experts, hot_experts, target),
    )
}

NO_NUMBER = (0, -1, 1.5, "1", True)
NONE: dict[str, tuple[Any, ...]] = {
    "weight_budget": (*NO_NUMBER, "half", "0%", "101%", "", MOST_BYTES + 1),
    "vram_limit": (*NO_NUMBER, "50%", MOST_BYTES + 1),
    "policy": ("LRU", "", None, 1, "zero-copy"),
    "capture": ("on", 1, None),
    "capture_rules": ("some", "", None, True),
    "granule": (*NO_NUMBER, 4095, 2 * GRANULES_BYTES[-1]),
    "prefill_chunk": (*NO_NUMBER, None, MOST_TOKENS + 1),
    "kv_capacity": (*NO_NUMBER, MOST_TOKENS + 1),
    "kv_layout": ("head_major", "", None, 1),
    "kv_min_bucket": (*NO_NUMBER, None, MOST_TOKENS + 1),
    "prefix_reuse": ("off", 0, None),
    "batch": (*NO_NUMBER, MOST_SEQUENCES + 1),
    "experts": ("some", "", None, 1, "Whole"),
    "target": ("some", "", 1, True, "Fused"),
    "hot_experts": ("", 1, True, "a\0b"),
}
"""Values that are none, by name."""


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of 35b-a3b, hollow: operators that older rules did not record."""
    folder = tmp_path_factory.mktemp("hybrid") / "35b-a3b-4"
    build("35b-a3b", folder, layers=4, hollow=True, cache_dir=folder.parent)
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers, each with a bank of eight experts, two for a token."""
    return built(tmp_path_factory.mktemp("mixture") / "m")


def test_every_name_of_the_config_is_tried_and_refused() -> None:
    """A new name without a test of what its value changes, and of what is no value of it, fails here."""
    assert set(KNOBS) == set(NONE) == CONFIG_NAMES


@pytest.mark.parametrize("name", sorted(KNOBS))
def test_another_value_changes_what_it_claims_to(tiny: Path, hybrid: Path, mixture: Path, name: str) -> None:
    KNOBS[name](tiny, hybrid, mixture)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in sorted(NONE) for v in NONE[n]])
def test_a_value_that_is_none_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as refused:
        check({name: value})
    assert name in refused.value.message and refused.value.remedy
    if isinstance(value, int) and value > MOST_TOKENS:
        assert refused.value.remedy.startswith("a granule is" if name == "granule" else "at most ")


@pytest.mark.parametrize("name", sorted(CONFIG_NAMES))
def test_a_name_that_is_none_is_refused_with_the_nearest(name: str) -> None:
    with pytest.raises(BadRequest, match=f"unknown engine config '{name}s'.*did you mean '{name}'"):
        check({f"{name}s": getattr(EngineConfig(), name)})
