"""Watching a card while a run is on it: a thread that samples, and what the samples say.

Intrusions and slowed clocks become intervals in seconds since the watch began; numbers become min, max and median, and
few points along the run. The sampler asks NVML only, makes no CUDA context, and costs the watched process nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobs import timeline
from jobs.model import Interval
from orchestrator.cards import CardProbe, CardSnapshot, ProbeError
from orchestrator.clear import ClearPolicy, ClearVerdict, judge, worst

PERIOD_S = 0.2
END_WAIT_S = 5.0
Tell = Callable[[tuple[int, ...]], tuple[frozenset[int], frozenset[int] | None]]
_NUMBERS = (
    "sm_clock_mhz",
    "memory_clock_mhz",
    "temperature_c",
    "power_mw",
    "utilisation_percent",
    "used_bytes",
    "pcie_generation",
    "pcie_width",
    "throttle_bits",
)


@dataclass(frozen=True, slots=True)
class WatchReport:
    """What a watch saw; `during` holds {field: {min, max, median}} of known values, throttle bits, unknown counts.

    `during["timeline"]` is a `jobs.timeline.Timeline`.
    """

    verdict: ClearVerdict | None
    samples: int
    during: Mapping[str, Any]
    intervals: tuple[Interval, ...]


@dataclass(slots=True)
class _Open:
    start_s: float
    end_s: float
    pid: int | None = None


@dataclass(slots=True)
class WatchBook:
    """Keeps the account of samples; no thread and no clock, so that it can be tested by hand.

    The first PID that this process table does not know is taken for the run itself (a container hides its PID), as long
    as it comes alone; the grade then says `memory`. Not so on simulated cards, where no run is ever listed.
    """

    policy: ClearPolicy
    simulated: bool = False
    samples: int = 0
    times_ms: list[int] = field(default_factory=list)
    series: dict[str, list[timeline.Reading]] = field(default_factory=lambda: {name: [] for name in _NUMBERS})
    warm_up_ms: timeline.Span | None = None
    timed_ms: timeline.Span | None = None
    verdicts: list[ClearVerdict] = field(default_factory=list)
    stretches: dict[str, _Open] = field(default_factory=dict)
    closed: list[Interval] = field(default_factory=list)
    adopted: int | None = None

    def add(self, now_s: float, snapshot: CardSnapshot, ours: frozenset[int], visible: frozenset[int] | None) -> None:
        """Take one sample at `now_s` seconds."""
        self.samples += 1
        self.times_ms.append(round(1000 * now_s))
        for name, values in self.series.items():
            value = getattr(snapshot, name)
            values.append(None if value is None else int(value))
        mine = self._with_adopted(snapshot, ours, visible)
        verdict = judge(snapshot, self.policy, "during", ours=mine, visible=visible, simulated=self.simulated)
        self._remember(verdict)
        self._stretch(now_s, snapshot, mine, verdict)

    def hear(self, now_s: float, line: Mapping[str, Any]) -> None:
        """Take a line of the run's own, which tells when it generated: the spans of all generations, as one."""
        found = timeline.generation_span(line, round(1000 * now_s))
        if found is None:
            return
        is_warm_up, (start_ms, end_ms) = found
        if is_warm_up:
            self.warm_up_ms = ((self.warm_up_ms or (start_ms,))[0], end_ms)
        else:
            self.timed_ms = ((self.timed_ms or (start_ms,))[0], end_ms)

    def fail(self, reason: str) -> None:
        """Note that a stretch of the run was not seen: whatever the samples say, the card is not known to be clear."""
        grade = self.verdicts[-1].grade if self.verdicts else "scripted" if self.simulated else "none"
        self._remember(ClearVerdict("unknown", grade, (reason,)))

    def report(self) -> WatchReport:
        """The account so far."""
        series = {name: values for name, values in self.series.items() if name != "throttle_bits"}
        known = {name: [value for value in values if value is not None] for name, values in series.items()}
        during: dict[str, Any] = {name: _spread(values) for name, values in known.items() if values}
        during["throttle_bits"] = timeline.any_bits(bits for bits in self.series["throttle_bits"] if bits)
        if unknown := {name: lost for name, values in series.items() if (lost := values.count(None))}:
            during["unknown_samples"] = unknown
        if along := timeline.build(self.times_ms, self.series, self.warm_up_ms, self.timed_ms):
            during[timeline.FIELD] = along.model_dump(mode="json")
        if self.adopted is not None:
            during["adopted_pid"] = self.adopted
        still = [Interval(start_s=o.start_s, end_s=o.end_s, what=w, pid=o.pid) for w, o in self.stretches.items()]
        intervals = tuple(sorted([*self.closed, *still], key=lambda i: (i.start_s, i.what)))
        return WatchReport(worst(self.verdicts) if self.verdicts else None, self.samples, during, intervals)

    def _with_adopted(
        self, snapshot: CardSnapshot, ours: frozenset[int], visible: frozenset[int] | None
    ) -> frozenset[int]:
        hidden = [p.pid for p in snapshot.processes or () if visible is not None and p.pid not in visible]
        seen = any(p.pid in ours for p in snapshot.processes or ())
        if self.adopted is None and len(hidden) == 1 and not seen and not self.simulated:
            self.adopted = hidden[0]
        return ours if self.adopted is None else ours | {self.adopted}

    def _remember(self, verdict: ClearVerdict) -> None:
        if not self.verdicts or verdict != self.verdicts[-1]:
            self.verdicts.append(verdict)

    def _stretch(self, now_s: float, snapshot: CardSnapshot, mine: frozenset[int], verdict: ClearVerdict) -> None:
        foreign = {f"process {p.pid}": p.pid for p in snapshot.processes or () if p.pid not in mine}
        present: dict[str, int | None] = {**foreign}
        if verdict.verdict in ("throttled", "unknown"):
            present[verdict.reasons[0]] = None
        for what in [w for w in self.stretches if w not in present]:
            gone = self.stretches.pop(what)
            self.closed.append(Interval(start_s=gone.start_s, end_s=gone.end_s, what=what, pid=gone.pid))
        for what, pid in present.items():
            self.stretches.setdefault(what, _Open(now_s, now_s, pid)).end_s = now_s


class CardWatch:
    """Samples one card on a thread from `start` to `stop`.

    `tell` is asked at each sample, of the listed PIDs: which are the run's own, and which this process table knows.
    """

    def __init__(
        self,
        probe: CardProbe,
        uuid: str,
        book: WatchBook,
        clock: Callable[[], float],
        *,
        tell: Tell,
        period_s: float = PERIOD_S,
        end_wait_s: float = END_WAIT_S,
    ) -> None:
        self._probe = probe
        self._uuid = uuid
        self._book = book
        self._clock = clock
        self._tell = tell
        self._period_s = period_s
        self._end_wait_s = end_wait_s
        self._halt = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="card-watch", daemon=True)
        self._start_s = 0.0

    def start(self) -> None:
        """Begin; the first sample is taken at once."""
        self._start_s = self._clock()
        self._thread.start()

    def hear(self, line: Mapping[str, Any]) -> None:
        """Take a line of the run's own, as it comes."""
        self._book.hear(self._clock() - self._start_s, line)

    def stop(self) -> WatchReport:
        """End and give the account. Also safe when a probe hangs: the thread is then left behind as a daemon.

        A watch that hung, or took no sample, did not see the run: its verdict is unknown.
        """
        self._halt.set()
        self._thread.join(timeout=self._period_s + self._end_wait_s)
        if self._thread.is_alive():
            self._book.fail("the watch of the card hung during the run")
        elif not self._book.samples:
            self._book.fail("no sample of the card was taken during the run")
        return self._book.report()

    def _sample(self) -> None:
        while True:
            due_s = self._clock() + self._period_s
            try:
                self._once()
            except Exception as exc:  # noqa: BLE001 - the thread's edge: a watch that ends unseen would read as clear
                self._book.fail(f"a sample of the card failed: {type(exc).__name__}: {exc}")
            if self._halt.wait(max(0.0, due_s - self._clock())):
                return

    def _once(self) -> None:
        try:
            snapshot = self._probe.snapshot(self._uuid)
        except ProbeError as exc:
            snapshot = CardSnapshot(self._uuid, errors=(("card", str(exc)),))
        ours, visible = self._tell(tuple(p.pid for p in snapshot.processes or ()))
        self._book.add(self._clock() - self._start_s, snapshot, ours, visible)


def _spread(values: list[int]) -> dict[str, int]:
    ordered = sorted(values)
    return {"min": ordered[0], "max": ordered[-1], "median": ordered[len(ordered) // 2]}
