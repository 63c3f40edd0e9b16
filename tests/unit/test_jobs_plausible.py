"""Claims that cannot be: bytes against links, time against the watch's clock, the pool against the card's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jobs.judge import judge
from jobs.model import Certificate, Generation, RunRecord
from jobs.plausible import LANE_BYTES_PER_S, impossible
from jobs.verdict import Verdict

GB = 10**9


def certificate(**changes: Any) -> Certificate:
    fields: dict[str, Any] = {
        "uuid": "GPU-1",
        "card": "NVIDIA H200",
        "driver": "580",
        "verdict": "clear",
        "grade": "pids",
        "samples": 40,
        "before": {"max_pcie_generation": 5, "max_pcie_width": 16, "pcie_generation": 1},
        "during": {
            "pcie_generation": {"min": 1, "max": 5, "median": 5},
            "pcie_width": {"min": 16, "max": 16, "median": 16},
            "used_bytes": {"min": 0, "max": 20 * GB, "median": 20 * GB},
        },
        "after": {"host": {"wall_s": 60.0}},
    }
    return Certificate(**{**fields, **changes})


def record(
    copied: int, seconds: float, *, owned: int = 10 * GB, generations: int = 2, kind: str = "cuda", **changes: Any
) -> RunRecord:
    """A run of equal generations that take `seconds` in all, its pool owning `owned` bytes at each end."""
    step_ns = int(seconds * 1e9) // generations // 10
    rows = tuple(
        Generation(
            index=index,
            warmup=False,
            ids=(1, 2),
            stop_reason="length",
            prefill_ns=step_ns,
            step_ns=(step_ns,) * 9,
            counters={"prefill": {"physical_owned_bytes": 1}, "decode": {"physical_owned_bytes": owned}},
        )
        for index in range(generations)
    )
    fields: dict[str, Any] = {
        "run_id": "r",
        "attempt_id": "a",
        "attempt_number": 1,
        "exit_code": 0,
        "device": {"kind": kind},
        "generations": rows,
        "counters": {"htod_bytes": copied},
        "certificate": certificate(),
    }
    return RunRecord(**{**fields, **changes})


def during(**changes: int | None) -> Certificate:
    """A certificate in which the watch's highest values are others, or not known."""
    spread = {**certificate().during}
    for name, value in changes.items():
        spread.pop(name)
        spread |= {} if value is None else {name: {"min": value, "max": value, "median": value}}
    return certificate(during=spread)


def test_lanes_carry_what_the_standard_says() -> None:
    per_16 = {generation: round(rate * 16 / 1e9, 1) for generation, rate in LANE_BYTES_PER_S.items()}
    assert per_16 == {1: 4.0, 2: 8.0, 3: 15.8, 4: 31.5, 5: 63.0, 6: 121.0}


def test_bytes_beyond_the_link_are_impossible_with_both_figures() -> None:
    (fault,) = impossible(record(800 * GB, 10.0))
    assert fault == (
        "800,000,000,000 bytes copied to the card in 10.000000 s, which is 80.0 GB/s, "
        "over PCIe 5 x16, which carries 63.0 GB/s at most"
    )
    assert impossible(record(554 * GB, 10.0)) == []  # 55.4 GB/s, the best that was measured on an H200


@pytest.mark.parametrize(
    ("seen", "bound"), [({"pcie_width": 8}, "PCIe 5 x8, which carries 31.5 GB/s"), ({"pcie_generation": 4}, "31.5")]
)
def test_a_link_that_trained_narrower_or_slower_bounds_a_stretch_that_was_watched(
    seen: dict[str, int], bound: str
) -> None:
    (fault,) = impossible(record(400 * GB, 10.0, certificate=during(**seen)))
    assert bound in fault


def test_a_stretch_between_two_samples_is_held_to_the_card_s_own_best() -> None:
    idle = during(pcie_generation=1)  # the watch met the link asleep
    assert impossible(record(25 * GB, 0.5, certificate=idle)) == []
    (fault,) = impossible(record(50 * GB, 0.5, certificate=idle))
    assert "100.0 GB/s, over PCIe 5 x16" in fault


@pytest.mark.parametrize(
    "changes",
    [
        {"certificate": None},
        {"certificate": certificate(during={}, before={})},
        {"certificate": certificate(grade="scripted")},
        {"certificate": certificate(card="NVIDIA GH200 480GB")},
        {"kind": "sim"},
        {"counters": {}},
    ],
)
def test_what_is_not_known_or_not_there_accuses_nobody(changes: dict[str, Any]) -> None:
    assert impossible(record(800 * GB, 10.0, **changes)) == []


def test_more_time_than_the_process_had_is_impossible() -> None:
    short = certificate(after={"host": {"wall_s": 9.5}})
    (fault,) = impossible(record(GB, 10.0, certificate=short))
    assert fault == "its generations took 10.000 s, and the whole process 9.500 s by the worker's clock"
    assert impossible(record(GB, 9.5, certificate=short)) == []


def test_a_pool_that_the_card_does_not_show_is_impossible() -> None:
    (fault,) = impossible(record(GB, 10.0, owned=21 * GB))
    assert fault == (
        "its pool held 21,000,000,000 bytes or more for 5.0 s, and the card showed 20,000,000,000 bytes in use at most"
    )
    assert impossible(record(GB, 10.0, owned=20 * GB)) == []


@pytest.mark.parametrize("over", [{"seconds": 1.0}, {"seconds": 10.0, "generations": 1}])
def test_memory_that_may_have_been_held_between_two_samples_is_not_judged(over: dict[str, Any]) -> None:
    assert impossible(record(GB, owned=21 * GB, **over)) == []
    assert impossible(record(GB, 10.0, owned=21 * GB, certificate=during(used_bytes=None))) == []


def test_bytes_beyond_the_modelled_link_are_impossible_and_rounding_is_not() -> None:
    facts = {"link_bytes_per_s": 50 * GB}
    made = {"htod_bytes": 50_000, "modelled_ns": 1_000, "page_ins": 1}
    within = record(0, 1.0, kind="sim", counters=made, facts=facts)
    assert impossible(within) == []
    rounded = within.model_copy(update={"counters": {**made, "htod_bytes": 50_020}})
    assert impossible(rounded) == []
    (fault,) = impossible(within.model_copy(update={"counters": {**made, "htod_bytes": 100_000}}))
    assert (
        "100,000 bytes over the modelled link in 0.000001 s" in fault and "50.0 GB/s it carries 50,050 bytes" in fault
    )


@pytest.mark.parametrize("arm", ["base", "head"])
def test_an_impossible_record_is_refused_by_the_verdict_with_both_figures(documents: Any, arm: str) -> None:
    """Three prefills of 90 ms and steps of 5 us, in which 4.7 GB (head) or 8.2 GB (base) of weights were streamed."""
    link = {"max_pcie_generation": 3, "max_pcie_width": 16}
    fast = {
        "record": {"certificate": certificate(before=link)},
        "device": {"kind": "cuda"},
        "step_ns": lambda _block, _run: 5_000,
    }
    scripts = {"base": documents.arm(), "head": documents.stable_arm()}
    verdict = judge(documents.sweep(**{**scripts, arm: replace(scripts[arm], **fast)}))
    assert isinstance(verdict, Verdict)
    (finding,) = [f for f in verdict.findings if f.outcome == "BROKEN_INVARIANT" and f.arm == arm]
    assert finding.exit_code == 1 and verdict.exit_code == 1
    assert {"base": "30.1 GB/s", "head": "17.4 GB/s"}[arm] + ", over PCIe 3 x16, which carries 15.8 GB/s" in (
        finding.message
    )


@pytest.mark.parametrize(
    ("counters", "says"),
    [
        ({"page_ins": 4, "htod_bytes": 3}, "htod_bytes is 3 and page_ins is 4: each carries a byte at least"),
        ({"page_ins": 0, "htod_bytes": 3}, "htod_bytes is 3 and page_ins is 0"),
        ({"hits": 0, "hit_bytes": 1}, "hit_bytes is 1 and hits is 0"),
        (
            {"content_resident_bytes": 9, "peak_resident_bytes": 8},
            "peak_resident_bytes is 8 and content_resident_bytes is 9",
        ),
        ({"mapped_physical_bytes": 9, "peak_committed_bytes": 8}, "peak_committed_bytes is 8"),
        ({"captures": 1, "segments": 0}, "the step has no captured segment"),
        ({"replays": 1, "segments": 0}, "the step has no captured segment"),
        ({"captures": 1, "graph_nodes": 0, "invalidations": 0}, "none has a node"),
        ({"captures": 2, "replays": 9, "decode_steps": 10}, "of 10 one-token steps"),
        ({"replays": 1, "kernel_runs": 9, "eager_launches": 9}, "all 9 kernels ran outside a graph"),
    ],
)
def test_events_and_bytes_that_do_not_go_together_cannot_be(counters: dict[str, int], says: str) -> None:
    [fault] = impossible(record(0, 1.0, counters=counters))
    assert says in fault


@pytest.mark.parametrize(
    "counters",
    [
        {"page_ins": 4, "htod_bytes": 4},
        {"page_ins": 4},
        {"content_resident_bytes": 9, "peak_resident_bytes": 9},
        {"kv_growths": 3, "kv_growth_dtod_bytes": 0},
        {"captures": 0, "replays": 0, "segments": 0, "graph_nodes": 0},
        {"captures": 1, "graph_nodes": 0, "invalidations": 1},
        {"captures": 1, "graph_nodes": 0},
        {"captures": 2, "replays": 8, "decode_steps": 10, "segments": 1},
        {"captures": 1, "replays": 0, "kernel_runs": 9, "eager_launches": 9},
    ],
)
def test_events_and_bytes_that_may_be_accuse_nobody(counters: dict[str, int]) -> None:
    assert impossible(record(0, 1.0, counters=counters)) == []


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("peak_committed_bytes", "peak_committed_bytes is 0 and peak_resident_bytes is 41,000,000"),
        ("step_kernels", "step_kernels is 0, and steps of one token gave 31 ids"),
    ],
)
def test_work_that_cost_nothing_is_no_improvement(documents: Any, name: str, says: str) -> None:
    verdict = judge(documents.sweep(head=documents.stable_arm(changes={name: 0})))
    assert isinstance(verdict, Verdict)
    assert (verdict.outcome, verdict.exit_code) == ("BROKEN_INVARIANT", 1)
    assert says in verdict.headline
