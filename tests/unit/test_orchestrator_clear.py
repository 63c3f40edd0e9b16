"""The written clear policy over snapshots: field reports B, and that unknown is never clear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jobs.timeline import clock_events
from orchestrator.cards import CardProcess, CardSnapshot
from orchestrator.clear import GIB, ClearPolicy, ClearVerdict, judge, worst
from orchestrator.scripted import ScriptedProbe

POLICY = ClearPolicy()
IDLE = replace(ScriptedProbe(["GPU-a"], lambda: 0.0).snapshot("GPU-a"), used_bytes=615 << 20)


def judged(moment: Any = "before", **changes: Any) -> ClearVerdict:
    return judge(replace(IDLE, **changes), POLICY, moment, visible=frozenset({1, 2}))


def test_an_idle_card_with_its_driver_reserve_is_clear() -> None:
    verdict = judged()
    assert verdict.clear
    assert verdict.grade == "pids"


def test_field_11_empty_list_with_memory_in_use_is_not_clear() -> None:
    verdict = judged(used_bytes=20 * GIB)
    assert verdict.verdict == "contended"
    assert verdict.grade == "memory"
    assert "no process listed" in verdict.reasons[0]
    assert str(20 * GIB) in verdict.reasons[0]


def test_field_11_a_pid_outside_the_process_table_is_named_as_hidden() -> None:
    verdict = judged(processes=(CardProcess(4711, 5 * GIB),), used_bytes=5 * GIB)
    assert verdict.verdict == "contended"
    assert verdict.grade == "memory"
    assert "4711" in verdict.reasons[0]
    assert "container" in verdict.reasons[0]


def test_field_11_only_an_mps_server_is_not_clear() -> None:
    verdict = judged(processes=(CardProcess(2, 30 << 20, "mps"),))
    assert verdict.verdict == "contended"
    assert "MPS" in verdict.reasons[0]


def test_field_10_a_worker_with_a_context_of_its_own_is_named_as_what_it_is() -> None:
    """Probing goes through NVML alone; should somebody call CUDA in a worker, it says so and measures nothing."""
    listed = replace(IDLE, processes=(CardProcess(2, 500 << 20),))
    verdict = judge(listed, POLICY, "before", visible=frozenset({1, 2}), own=2)
    assert not verdict.clear
    assert verdict.reasons == (
        "process 2 is this worker itself: something in it has made a CUDA context, which no probe may",
    )


@pytest.mark.parametrize(
    "field",
    [
        "used_bytes",
        "processes",
        "utilisation_percent",
        "throttle_bits",
        "ecc_uncorrected",
        "remap_pending",
        "remap_failed",
        "mig_enabled",
    ],
)
def test_field_13_an_unread_value_is_unknown_and_not_clear(field: str) -> None:
    verdict = judged(**{field: None}, errors=((field, "Unknown Error"),))
    assert verdict.verdict == "unknown"
    assert "Unknown Error" in verdict.reasons[0]


def test_field_13_unsupported_card_memory_is_unknown_and_missing_ecc_is_fine() -> None:
    assert judged(used_bytes=None, unsupported=frozenset({"used_bytes"})).verdict == "unknown"
    assert judged(ecc_uncorrected=None, unsupported=frozenset({"ecc_uncorrected"})).clear


def test_field_17_a_card_without_row_remaps_is_fine_and_one_that_does_not_tell_is_not_clear() -> None:
    remaps = {"remap_pending": None, "remap_failed": None}
    assert judged(**remaps, unsupported=frozenset(remaps)).clear
    assert judged(**remaps, errors=(("remap_pending", "No permission"),)).verdict == "unknown"
    assert judged("during", **remaps).verdict == "unknown"


def test_field_14_mig_is_refused_by_name_even_with_nothing_else_readable() -> None:
    bare = CardSnapshot("GPU-a", mig_enabled=True, errors=(("processes", "No permission"),))
    verdict = judge(bare, POLICY, "before")
    assert verdict.verdict == "contended"
    assert "MIG" in verdict.reasons[0]


def test_field_15_a_card_off_the_bus_is_unknown() -> None:
    probe = ScriptedProbe(["GPU-a"], lambda: 0.0, [{"error": "GPU is lost"}])
    verdict = judge(probe.snapshot("GPU-a"), POLICY, "during")
    assert verdict.verdict == "unknown"
    assert "GPU is lost" in verdict.reasons[0]


def test_field_17_ecc_and_remaps_refuse_the_card() -> None:
    assert "ECC" in judged(ecc_uncorrected=1).reasons[0]
    assert "remap" in judged(remap_pending=True).reasons[0]
    assert "remap" in judged(remap_failed=True).reasons[0]


def test_our_own_process_stands_on_the_card_during_the_run_only() -> None:
    mine = (CardProcess(2, 70 * GIB),)
    busy = replace(IDLE, processes=mine, used_bytes=70 * GIB, utilisation_percent=99)
    assert judge(busy, POLICY, "during", ours=frozenset({2})).clear
    assert judge(busy, POLICY, "after", ours=frozenset({2})).verdict == "contended"
    assert judge(busy, POLICY, "during", ours=frozenset({3})).verdict == "contended"


def test_utilisation_without_an_owner_is_contention() -> None:
    assert "busy" in judged(utilisation_percent=55).reasons[0]


@pytest.mark.parametrize(("bits", "verdict"), [(0x1, "clear"), (0x4, "clear"), (0x8, "throttled"), (0x40, "throttled")])
def test_clock_events_that_slow_the_card_are_told_from_those_that_do_not(bits: int, verdict: str) -> None:
    assert judged(throttle_bits=bits).verdict == verdict


def test_throttle_bits_in_words_keep_unknown_bits() -> None:
    assert clock_events(0x8 | 0x4000) == "hardware slowdown, bits 0x4000"


def test_several_moments_are_as_good_as_their_worst() -> None:
    clear = ClearVerdict("clear", "pids")
    dirty = ClearVerdict("contended", "memory", ("a", "b"))
    assert worst([clear, dirty, ClearVerdict("throttled", "pids", ("b", "c"))]) == ClearVerdict(
        "contended", "memory", ("a", "b", "c")
    )
