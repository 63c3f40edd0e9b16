"""One worker for one card: takes it, says whether it is clear, runs an order on it, certifies, spools.

A plain class without a scheduler, so that it can be run and tested by hand; `ray_app` wraps it in an actor. Call it
from a thread that outlives the run (in Ray: the actor's main thread), since the child dies with the thread that
spawned it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from jobs.adapters.base import Adapter, RunOrder, RunPlace, RunResult
from jobs.adapters.native_forced import ForceOrder, adjudicate
from jobs.adapters.registry import adapters
from jobs.errors import PackError, Unstorable
from jobs.model import Certificate, RunRecord
from jobs.near_tie import Adjudication
from jobs.redact import redact
from jobs.store.strict import storable
from orchestrator.arm_cache import ArmCache
from orchestrator.cards import CardName, CardProbe, CardSnapshot, ProbeError
from orchestrator.clear import ClearPolicy, ClearVerdict, Moment, judge, worst
from orchestrator.host import HostMeter, group_members, visible_pids
from orchestrator.lock import CardLock
from orchestrator.outcome import OutcomeEnd, RunOutcome, Spool
from orchestrator.watch import CardWatch, WatchBook, WatchReport

RELEASE_WAIT_S = 5.0
LOOK_AGAIN_S = 0.25


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Where a worker keeps things, what it calls clear, and the name it gives to others who want its card."""

    spool: Path
    scratch: Path
    locks: Path
    policy: ClearPolicy = field(default_factory=ClearPolicy)
    packs: Path | None = None  # where shipped trees of arms are kept; None: none are taken
    who: str = "assay run"


@dataclass(frozen=True, slots=True)
class WorkerCard:
    """What a worker says of itself when it has its card."""

    worker: str
    card: CardName
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """A run order with what the store must hear again when its outcome comes back."""

    sweep_id: str
    fence: int
    order: RunOrder


@dataclass(slots=True)
class GpuWorker:
    """Holds one card from `start` to `close`. Raises ProbeError when the card is not there or held by another."""

    worker: str
    card: CardName
    settings: WorkerSettings
    probe: CardProbe
    environ: Mapping[str, str]
    stopped: Callable[[], bool] = lambda: False
    adapters: Mapping[str, Adapter] = field(default_factory=adapters)
    arms: ArmCache = field(init=False)
    _lock: CardLock | None = None
    _child: int | None = None

    def __post_init__(self) -> None:
        self.arms = ArmCache(self.settings.packs)

    def start(self) -> WorkerCard:
        """Take the card, host-wide."""
        lock = CardLock(self.card.uuid, self.settings.who, self.settings.locks)
        lock.acquire(stopped=self.stopped)
        self._lock = lock
        return WorkerCard(self.worker, self.card, socket.gethostname(), os.getpid())

    def close(self) -> None:
        """Give the card back."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def look(self) -> ClearVerdict:
        """Is the card clear now?"""
        return self._judge(self._snapshot(), "before")

    def run(self, work: WorkOrder) -> RunOutcome:
        """One attempt, from the last look before the spawn to the spooled outcome."""
        assert self._lock is not None, "a worker runs only while it holds its card"
        before = self._snapshot()
        verdict = self._judge(before, "before")
        if verdict.clear:
            result, certificate = self._measure(work.order, before, verdict)
        else:
            result, certificate = RunResult("failed", None), self._certificate([verdict], before, before, None, {})
        end, reason = _end(result, certificate)
        record, fault = _kept(result.record, certificate)
        if fault:
            end, reason = ("failed", f"protocol: {fault}") if end != "cancelled" else (end, reason)
        outcome = RunOutcome(
            sweep_id=work.sweep_id,
            run_id=work.order.run_id,
            attempt_id=work.order.attempt_id,
            fence=work.fence,
            worker=self.worker,
            end=end,
            reason=redact(reason),
            retry=result.retry and not fault,
            fault="protocol" if fault else "" if end == "contaminated" else result.fault,
            record=record,
        )
        if end != "cancelled":  # whoever cancelled does not wait for an answer, so nobody would acknowledge it
            try:
                Spool(self.settings.spool).put(outcome)
            except OSError as exc:  # a full disk: what was measured is handed over all the same
                return outcome.model_copy(update={"unspooled": str(exc)})
        return outcome

    def adjudicate(self, order: ForceOrder) -> Adjudication:
        """Answer a question about tokens on this card."""
        assert self._lock is not None, "a worker runs only while it holds its card"
        try:
            with self._scratch() as scratch, self.arms.placed(order.base) as base, self.arms.placed(order.head) as head:
                place = RunPlace(scratch, self.environ, utc_now, self.stopped, self._spawned)
                answer = adjudicate(replace(order, base=base, head=head), place)
        except PackError as missing:
            answer = Adjudication(asked=order.asked, failure=str(missing))
        return answer.model_copy(update={"failure": redact(answer.failure)})

    def acknowledge(self, sweep_id: str, attempt_id: str) -> None:
        """The outcome is stored; forget it."""
        Spool(self.settings.spool).acknowledge(sweep_id, attempt_id)

    def left_over(self) -> tuple[RunOutcome, ...]:
        """Outcomes on this host that nobody has acknowledged."""
        spool = Spool(self.settings.spool)
        return tuple(one for sweep_id in spool.sweeps() for one in spool.left_over(sweep_id))

    def _measure(self, order: RunOrder, before: CardSnapshot, verdict: ClearVerdict) -> tuple[RunResult, Certificate]:
        """Run the child under watch, then see that the card came back."""
        book = WatchBook(self.settings.policy, simulated=self.card.simulated)
        watch = CardWatch(self.probe, self.card.uuid, book, time.monotonic, tell=self._tell)
        meter = HostMeter()
        watch.start()
        try:
            with self._scratch() as scratch, self.arms.placed(order.arm) as arm:
                adapter = self.adapters[arm.adapter]
                place = RunPlace(scratch, self.environ, utc_now, self.stopped, self._spawned, watch.hear)
                result = adapter.run(replace(order, arm=arm), place)
        except PackError as missing:
            result = RunResult("failed", None, str(missing), retry=True, fault="start")
        finally:
            report = watch.stop()
        host = meter.read()
        after, after_verdict = self._released()
        verdicts = [verdict, *([report.verdict] if report.verdict else []), after_verdict]
        return result, self._certificate(verdicts, before, after, report, host, result.leftovers)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A folder for one order, and no child left to watch after it."""
        self.settings.scratch.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="run-", dir=self.settings.scratch))
        try:
            yield scratch
        finally:
            self._child = None
            shutil.rmtree(scratch, ignore_errors=True)

    def _released(self) -> tuple[CardSnapshot, ClearVerdict]:
        """The card after the run: freed memory shows late, so it gets a while before it counts as held."""
        deadline_s = time.monotonic() + RELEASE_WAIT_S
        while True:
            snapshot = self._snapshot()
            verdict = self._judge(snapshot, "after")
            if verdict.verdict in ("clear", "throttled") or time.monotonic() > deadline_s or self.stopped():
                return snapshot, verdict
            time.sleep(LOOK_AGAIN_S)

    def _certificate(
        self,
        verdicts: list[ClearVerdict],
        before: CardSnapshot,
        after: CardSnapshot,
        report: WatchReport | None,
        host: Mapping[str, object],
        ended: tuple[int, ...] = (),
    ) -> Certificate:
        """`ended`: PIDs that outlived the child and were ended by us."""
        whole = worst(verdicts)
        return Certificate(
            uuid=self.card.uuid,
            card=self.card.name,
            driver=self.card.driver,
            verdict=whole.verdict,
            grade=whole.grade,
            reasons=whole.reasons,
            before=before.document(),
            after={**after.document(), "host": dict(host), **({"ended": list(ended)} if ended else {})},
            samples=report.samples if report else 0,
            during=dict(report.during) if report else {},
            intervals=report.intervals if report else (),
        )

    def _spawned(self, pid: int) -> None:
        self._child = pid

    def _tell(self, pids: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int] | None]:
        ours = frozenset[int]() if self._child is None else group_members(pids, self._child)
        return ours, visible_pids(pids)

    def _snapshot(self) -> CardSnapshot:
        try:
            return self.probe.snapshot(self.card.uuid)
        except ProbeError as exc:
            return CardSnapshot(self.card.uuid, errors=(("card", str(exc)),))

    def _judge(self, snapshot: CardSnapshot, moment: Moment) -> ClearVerdict:
        visible = visible_pids(tuple(p.pid for p in snapshot.processes or ()))
        simulated, own = self.card.simulated, os.getpid()
        return judge(snapshot, self.settings.policy, moment, visible=visible, simulated=simulated, own=own)


def utc_now() -> str:
    """The time now, UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _kept(record: RunRecord | None, certificate: Certificate) -> tuple[RunRecord | None, str]:
    """The record as it can be spooled and stored, or none and why: found here, so that no later hand meets it.

    Secrets that a child printed go out here too: its last words stand in the store, in every report and on terminals.
    """
    if record is None:
        return None, ""
    error = None if record.error is None else redact(record.error)
    kept = {"certificate": certificate, "error": error, "log_tail": redact(record.log_tail)}
    try:
        clean, _ = storable(record.model_copy(update=kept))
    except Unstorable as exc:
        return None, str(exc)
    return clean, ""


def _end(result: RunResult, certificate: Certificate) -> tuple[OutcomeEnd, str]:
    """A run on a card that was not known to be clear says nothing, whatever it measured or however it failed.

    A card that slowed down under a run leaves tokens and byte counts valid, so the record stands and its certificate
    warns of its times; on one that was slowed before, nothing was started.
    """
    nothing_ran = result.record is None and not result.reason
    unclear = ("contended", "unknown", *(["throttled"] if nothing_ran else []))
    if result.end != "cancelled" and certificate.verdict in unclear:
        return "contaminated", f"card {certificate.verdict}: {'; '.join(certificate.reasons)}"
    return result.end, result.reason
