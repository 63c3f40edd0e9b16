"""Samples become intervals and spreads; the sampling thread keeps its rate and survives a hanging probe."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from jobs import timeline
from orchestrator.cards import CardProcess, CardSnapshot
from orchestrator.clear import ClearPolicy
from orchestrator.scripted import ScriptedProbe
from orchestrator.watch import CardWatch, WatchBook

IDLE = ScriptedProbe(["SIM-x-0"], lambda: 0.0).snapshot("SIM-x-0")
MINE = frozenset({7})


def test_an_intruder_becomes_an_interval_with_its_pid() -> None:
    book = WatchBook(ClearPolicy())
    intruded = replace(IDLE, processes=(CardProcess(7, 1), CardProcess(99, 5)))
    own = replace(IDLE, processes=(CardProcess(7, 1),))
    for now_s, snapshot in [(0.0, own), (0.2, intruded), (0.4, intruded), (0.6, own)]:
        book.add(now_s, snapshot, MINE, frozenset({7, 99}))
    report = book.report()
    (interval,) = report.intervals
    assert (interval.start_s, interval.end_s, interval.pid) == (0.2, 0.4, 99)
    assert report.verdict is not None
    assert report.verdict.verdict == "contended"
    assert report.samples == 4


def test_an_intruder_that_stays_is_an_interval_to_the_last_sample() -> None:
    book = WatchBook(ClearPolicy())
    for now_s in (0.0, 0.2):
        book.add(now_s, replace(IDLE, processes=(CardProcess(99, 5),)), MINE, frozenset({7, 99}))
    assert [(i.start_s, i.end_s) for i in book.report().intervals] == [(0.0, 0.2)]


def test_spread_is_over_known_values_and_unknown_ones_are_counted() -> None:
    book = WatchBook(ClearPolicy())
    for now_s, power in [(0.0, 100), (0.2, None), (0.4, 300), (0.6, 200)]:
        book.add(now_s, replace(IDLE, power_mw=power), MINE, None)
    during = book.report().during
    assert during["power_mw"] == {"min": 100, "max": 300, "median": 200}
    assert during["unknown_samples"] == {"power_mw": 1}


def test_slowed_clocks_are_an_interval_and_a_verdict() -> None:
    book = WatchBook(ClearPolicy())
    for now_s, bits in [(0.0, 0), (0.2, 0x40), (0.4, 0)]:
        book.add(now_s, replace(IDLE, throttle_bits=bits), MINE, None)
    report = book.report()
    assert report.verdict is not None
    assert report.verdict.verdict == "throttled"
    assert [i.start_s for i in report.intervals] == [0.2]
    assert report.during["throttle_bits"] == 0x40


def test_samples_are_told_along_the_run_with_the_regions_that_the_engine_timed() -> None:
    book = WatchBook(ClearPolicy())
    for now_s, clock, bits in [(0.0, 1980, 0), (0.2, 345, 0x40), (0.4, None, 0)]:
        book.add(now_s, replace(IDLE, sm_clock_mhz=clock, throttle_bits=bits), MINE, None)
    for now_s, warmup in [(0.1, True), (0.25, False), (0.35, False)]:
        book.hear(now_s, {"type": "generation", "warmup": warmup, "prefill_ns": 30_000_000, "step_ns": [20_000_000]})
    book.hear(0.4, {"type": "result"})
    along = timeline.read(book.report().during)
    assert along is not None
    assert (along.at_ms, along.end_ms, along.samples_a_point) == ((0, 200, 400), 400, 1)
    assert along.series["sm_clock_mhz"] == (1980, 345, None)
    assert along.series["throttle_bits"] == (0, 0x40, 0)
    assert (along.warm_up_ms, along.timed_ms) == ((50, 100), (200, 350))


def test_the_one_hidden_pid_that_appears_is_taken_for_the_run_and_a_second_is_not() -> None:
    book = WatchBook(ClearPolicy())
    visible = frozenset({7})
    book.add(0.0, IDLE, MINE, visible)
    book.add(0.2, replace(IDLE, processes=(CardProcess(5000, 1),)), MINE, visible)
    first = book.report()
    assert first.verdict is not None
    assert (first.verdict.verdict, first.verdict.grade) == ("clear", "memory")
    assert first.during["adopted_pid"] == 5000
    book.add(0.4, replace(IDLE, processes=(CardProcess(5000, 1), CardProcess(5001, 1))), MINE, visible)
    second = book.report()
    assert second.verdict is not None
    assert second.verdict.verdict == "contended"
    assert [i.pid for i in second.intervals] == [5001]


def test_the_thread_samples_at_five_hertz_or_better() -> None:
    probe = ScriptedProbe(["SIM-x-0"], time.monotonic)
    watch = CardWatch(
        probe,
        "SIM-x-0",
        WatchBook(ClearPolicy(), simulated=True),
        time.monotonic,
        tell=lambda _pids: (MINE, None),
    )
    watch.start()
    time.sleep(1.05)
    report = watch.stop()
    assert 5 <= report.samples <= 7
    assert report.verdict is not None
    assert report.verdict.clear
    assert report.verdict.grade == "scripted"


def test_a_watch_stopped_at_once_has_one_sample() -> None:
    probe = ScriptedProbe(["SIM-x-0"], time.monotonic)
    watch = CardWatch(probe, "SIM-x-0", WatchBook(ClearPolicy()), time.monotonic, tell=lambda _pids: (MINE, None))
    watch.start()
    assert watch.stop().samples >= 1


def test_a_book_without_samples_has_no_verdict() -> None:
    assert WatchBook(ClearPolicy()).report().verdict is None
    assert CardSnapshot("x").document()["used_bytes"] is None


class FaultyProbe(ScriptedProbe):
    """Breaks on its second look; later looks are fine again."""

    looks = 0

    def snapshot(self, uuid: str) -> CardSnapshot:
        self.looks += 1
        if self.looks == 2:
            raise ValueError("a new reply")
        return super().snapshot(uuid)


def test_an_exception_in_one_sample_makes_the_watch_unknown_and_it_goes_on() -> None:
    probe = FaultyProbe(["SIM-x-0"], time.monotonic)
    watch = CardWatch(
        probe, "SIM-x-0", WatchBook(ClearPolicy()), time.monotonic, tell=lambda _pids: (MINE, None), period_s=0.02
    )
    watch.start()
    time.sleep(0.3)
    report = watch.stop()
    assert report.samples >= 3
    assert report.verdict is not None
    assert report.verdict.verdict == "unknown"
    assert report.verdict.reasons == ("a sample of the card failed: ValueError: a new reply",)


def test_an_exception_from_the_process_table_makes_the_watch_unknown() -> None:
    def tell(_pids: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int] | None]:
        raise PermissionError("/proc/7")

    probe = ScriptedProbe(["SIM-x-0"], time.monotonic)
    watch = CardWatch(probe, "SIM-x-0", WatchBook(ClearPolicy()), time.monotonic, tell=tell)
    watch.start()
    report = watch.stop()
    assert report.samples == 0
    assert report.verdict is not None
    assert report.verdict.verdict == "unknown"


def test_a_watch_that_hangs_is_unknown_and_does_not_hold_up_the_end() -> None:
    free = threading.Event()

    class HangingProbe(ScriptedProbe):
        def snapshot(self, uuid: str) -> CardSnapshot:
            free.wait(20)
            return super().snapshot(uuid)

    probe = HangingProbe(["SIM-x-0"], time.monotonic)
    watch = CardWatch(
        probe, "SIM-x-0", WatchBook(ClearPolicy()), time.monotonic, tell=lambda _pids: (MINE, None), end_wait_s=0.1
    )
    watch.start()
    begin_s = time.monotonic()
    report = watch.stop()
    free.set()
    assert time.monotonic() - begin_s < 2
    assert report.verdict is not None
    assert "hung" in report.verdict.reasons[0]
