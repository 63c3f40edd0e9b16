"""The equations over made-up counters that close: each can be broken, and is broken alone where it stands alone."""

from __future__ import annotations

import dataclasses

import pytest

from engine.attribution import CAUSES
from engine.equations import Equation, Sums, evaluate

COUNTERS: dict[str, int | float] = {
    "hits": 6,
    "page_ins": 4,
    "touches": 10,
    "retained_page_ins": 3,
    "bypassed_page_ins": 1,
    "evictions": 1,
    "resident_keys": 2,
    "forward_steps": 5,
    "hit_bytes": 600,
    "htod_bytes": 400,
    "retained_bytes": 300,
    "bypassed_page_in_bytes": 100,
    "device_htod_bytes": 400,
    "content_resident_bytes": 200,
    "mapped_physical_bytes": 8192,
    "kv_committed_bytes": 4096,
    "peak_kv_committed_bytes": 4096,
    "kv_growths": 2,
    "kv_growth_dtod_bytes": 240,
    "device_dtod_bytes": 240,
    "physical_owned_bytes": 16384,
    "gather_bytes": 28,
    "prefix_hit_tokens": 2,
    "prefix_hit_bytes": 20,
    "decode_steps": 5,
    "warm_steps": 1,
    "captures": 1,
    "replays": 3,
}
FACTS: dict[str, int | float | str] = {
    "touches_per_step": 2,
    "requested_bytes_per_step": 200,
    "capacity_bytes": 8192,
    "capacity_left_bytes": 8192,
    "keys": 4,
    "resident": 0,
    "peak_weight_mapped_bytes": 8192,
    "pool_free_bytes": 4096,
    "kv_needed_bytes": 4000,
    "kv_layout": "head-major",
    "kv_bytes_per_token": 10,
    "gather_bytes_per_token": 7,
    "positions_asked": 6,
    "batch": 1,
    "steps_asked": 5,
    "steps_given": 5,
    "kv_foreseen_bytes": 4096,
    "kv_foreseen_peak_bytes": 4096,
    "kv_foreseen_growths": 2,
    "kv_copied_positions": 24,
    "mapped_after_close_bytes": 0,
    "owned_after_close_bytes": 0,
    "floor_bytes": 100,
    **dict.fromkeys(CAUSES, 0),
    "over_floor_first_fill_bytes": 340,
    "over_floor_early_hit_bytes": -40,
}
SUMS = Sums(hits=6, retained=3, bypassed=1, bypassed_bytes=100, evicted=1, gathered_bytes=28)


def broken(counters: dict[str, int | float], facts: dict[str, int | float | str], sums: Sums = SUMS) -> set[str]:
    """Names of the equations that do not hold."""
    return {e.name for e in evaluate(counters, facts, sums, capture=True) if not e.holds}


def test_a_run_that_closes_breaks_none() -> None:
    assert broken(COUNTERS, FACTS) == set()
    names = [e.name for e in evaluate(COUNTERS, FACTS, SUMS, capture=True)]
    assert len(names) == len(set(names))
    assert {e.name for e in evaluate(COUNTERS, FACTS, SUMS, capture=False)} == set(names) - {"C1", "A14", "A14r"}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"touches": 11}, {"W1", "W1p"}),
        ({"hits": 7}, {"W1", "W2h"}),
        ({"page_ins": 5}, {"W1", "W2"}),
        ({"staged_page_ins": 1}, {"W2", "W2s"}),
        ({"staged_bytes": 1}, {"W6", "W7s"}),
        ({"zero_copy_reads": 1}, {"W1", "W2z"}),
        ({"zero_copy_bytes": 1}, {"W4", "W7z", "W9", "W10z"}),
        ({"device_zero_copy_bytes": 1}, {"W10z"}),
        ({"retained_page_ins": 2, "bypassed_page_ins": 2}, {"W2r", "W2b", "W3"}),
        ({"evictions": 2, "resident_keys": 1}, {"W2e"}),
        ({"resident_keys": 3}, {"W3"}),
        ({"loaded_keys": 1}, {"W3"}),
        ({"hit_bytes": 601}, {"W4"}),
        ({"retained_bytes": 299}, {"W6"}),
        ({"retained_bytes": 299, "bypassed_page_in_bytes": 101}, {"W7"}),
        ({"device_htod_bytes": 399}, {"W10"}),
        ({"loaded_bytes": 1}, {"W10"}),
        ({"ref_underflows": 1}, {"W12"}),
        ({"unaccounted_bytes": 4096}, {"W12"}),
        ({"quarantined_bytes": 4096}, {"W12"}),
        ({"oversubscribed_bytes": 1}, {"W12"}),
        ({"content_resident_bytes": 8193}, {"A8"}),
        ({"physical_owned_bytes": 20480}, {"A8o"}),
        ({"kv_committed_bytes": 3999, "physical_owned_bytes": 16287}, {"A18", "K1"}),
        ({"peak_kv_committed_bytes": 8192}, {"K2"}),
        ({"kv_growths": 1}, {"K3"}),
        ({"kv_growth_dtod_bytes": 230, "device_dtod_bytes": 230}, {"K4"}),
        ({"device_dtod_bytes": 0}, {"K5"}),
        ({"gather_bytes": 35}, {"P1", "P1t"}),
        ({"prefix_hit_tokens": 1, "prefix_hit_bytes": 10}, {"P1"}),
        ({"prefix_hit_bytes": 10}, {"P2"}),
        ({"invalidations": 2, "grant_invalidations": 2}, {"A14"}),
        ({"invalidations": 1}, {"A14r"}),
        ({"kv_move_invalidations": 1}, {"A14r"}),
        ({"granted_bytes": 4096}, {"G1"}),
        ({"replays": 2}, {"C1"}),
        ({"fallbacks": 1}, {"C1"}),
        ({"discarded_steps": 1}, {"D1", "P1"}),
    ],
)
def test_a_counter_that_is_off_breaks_its_equation(changes: dict[str, int], names: set[str]) -> None:
    assert broken({**COUNTERS, **changes}, FACTS) == names


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"peak_weight_mapped_bytes": 12288}, {"W11"}),
        ({"pool_free_bytes": 0}, {"A8o"}),
        ({"kv_foreseen_bytes": 0}, {"K1"}),
        ({"kv_foreseen_peak_bytes": 0}, {"K2"}),
        ({"kv_foreseen_growths": 0}, {"K3"}),
        ({"kv_copied_positions": 0}, {"K4"}),
        ({"kv_layout": "seq-major"}, {"A17"}),
        ({"mapped_after_close_bytes": 4096}, {"L0"}),
        ({"owned_after_close_bytes": 4096}, {"L1"}),
        ({"floor_bytes": 99}, {"W9"}),
        *(({name: 7}, {"W9"}) for name in CAUSES),
        ({"resident": 1}, {"W13", "W13l"}),
        ({"requested_bytes_per_step": 201}, {"W4"}),
        ({"steps_asked": 6}, {"D1"}),
        ({"steps_given": 4}, {"D1"}),
    ],
)
def test_a_fact_that_is_off_breaks_its_equation(changes: dict[str, int | str], names: set[str]) -> None:
    assert broken(COUNTERS, {**FACTS, **changes}) == names


def test_seq_major_keeps_its_graphs() -> None:
    still = {**COUNTERS, "kv_growth_dtod_bytes": 0, "device_dtod_bytes": 0}
    facts = {**FACTS, "kv_layout": "seq-major", "kv_copied_positions": 0}
    assert broken(still, facts) == set()
    assert broken({**still, "invalidations": 1, "kv_move_invalidations": 1}, facts) == {"A17g"}
    assert broken({**still, "invalidations": 1, "grant_invalidations": 1}, facts) == set()


def test_memory_that_is_owned_is_within_the_limit() -> None:
    assert broken(COUNTERS, {**FACTS, "limit_bytes": 16384}) == set()
    assert broken(COUNTERS, {**FACTS, "limit_bytes": 16383}) == {"G2"}


def test_what_is_read_in_place_is_what_was_foreseen_and_nothing_is_copied() -> None:
    facts = {**FACTS, "zero_copy_bytes_foreseen": 0, "replanned_keys": 5}
    assert broken(COUNTERS, facts) == set()
    assert broken(COUNTERS, {**facts, "zero_copy_bytes_foreseen": 1}) == {"Z1"}
    assert broken(COUNTERS, {**facts, "replanned_keys": 4}) == {"Z2"}


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("hits", "W2h"),
        ("retained", "W2r"),
        ("bypassed", "W2b"),
        ("bypassed_bytes", "W7"),
        ("evicted", "W2e"),
        ("staged", "W2s"),
        ("staged_bytes", "W7s"),
        ("gathered_bytes", "P1t"),
    ],
)
def test_a_key_whose_traffic_is_off_breaks_its_equation(field: str, name: str) -> None:
    sums = dataclasses.replace(SUMS, **{field: getattr(SUMS, field) + 1})
    assert broken(COUNTERS, FACTS, sums) == {name}


STREAMS = {**FACTS, "ring_slots": 2, "staged_bytes_foreseen": 0, "ring_waits_foreseen": 0, "replanned_keys": 0}


@pytest.mark.parametrize(
    ("counters", "facts", "names"),
    [
        ({}, {}, set()),
        ({}, {"staged_bytes_foreseen": 1}, {"S1"}),
        ({}, {"ring_waits_foreseen": 1}, {"S2"}),
        ({"ring_waits": 1}, {}, {"S2"}),
        ({"vmm_calls_steady": 3}, {}, {"S3"}),
        ({"alloc_calls_steady": 1}, {}, {"S3"}),
        ({}, {"replanned_keys": 1}, {"S4"}),
    ],
)
def test_a_ring_off_its_schedule_breaks_its_equation(
    counters: dict[str, int], facts: dict[str, int], names: set[str]
) -> None:
    still = {"evictions": 0, "resident_keys": COUNTERS["resident_keys"] + COUNTERS["evictions"]}
    sums = dataclasses.replace(SUMS, evicted=0)
    assert broken({**COUNTERS, **still, **counters}, {**STREAMS, **facts}, sums) == names
    assert "S4" in broken(COUNTERS, STREAMS)


@pytest.mark.parametrize(
    ("relation", "lhs", "holds"),
    [("==", 2, True), ("==", 1, False), ("<=", 2, True), ("<=", 3, False), (">=", 1, False)],
)
def test_relations(relation: str, lhs: int, holds: bool) -> None:
    assert Equation("n", "t", relation, lhs, 2).holds is holds  # type: ignore[arg-type]
