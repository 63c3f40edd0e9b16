"""A scheduler: serves all open sweeps of a store on the cards of a Ray cluster, until it is stopped.

The store holds the truth, so schedulers may come, die and come again: leases that ended are broken, outcomes that nodes
kept are stored, sweeps with nothing left to run are judged. Several may serve one store, each on its own cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Protocol

from jobs.errors import StoreError
from jobs.judge import Asked
from jobs.provenance import harness_digest, own_root
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.commands.shown import shown
from orchestrator.conclude import verdict_or_questions
from orchestrator.dispatch import Dispatcher
from orchestrator.lost import HostLost, Stopped
from orchestrator.place import Placer
from orchestrator.ray_cluster import ClusterPlacer
from orchestrator.seat import Happening
from orchestrator.settings import Settings
from orchestrator.stop import StopFlag
from orchestrator.supervise import deaf, supervised
from orchestrator.worker import WorkerCard

KEEP_S = 5.0
"""How often what is not a run is looked after: leases, cards, sweeps to judge, new nodes."""


class ServingPlacer(Placer, Protocol):
    """A placer whose workers may come later."""

    def joined(self) -> tuple[WorkerCard, ...]:
        """Workers that came since."""
        ...


class Scheduler:
    """Serves `store` with the workers of an open `placer`. `name` is this process in the store, `harness` its code."""

    def __init__(
        self,
        store: Store,
        placer: ServingPlacer,
        name: str,
        harness: str,
        *,
        stopped: Callable[[], bool] = lambda: False,
        tell: Callable[[Happening], None] = lambda _happening: None,
        clock: Callable[[], float] = time.monotonic,
        keep_s: float = KEEP_S,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._store = store
        self._placer = placer
        self._name = name
        self._harness = harness
        self._tell = tell
        self._clock = clock
        self._now = now
        self._keep_s = keep_s
        self._keep_at_s = 0.0
        self._unanswerable: set[str] = set()
        self._judging: dict[str, Future[Verdict | tuple[Asked, ...]]] = {}
        self._bench = ThreadPoolExecutor(1, thread_name_prefix="bench")  # a large sweep's cards do not wait for it
        self._dispatcher = Dispatcher(store, placer, name, stopped=stopped, tell=tell, clock=clock)

    def serve(self, hellos: tuple[WorkerCard, ...], *, once: bool = False) -> None:
        """Serve until stopped, or with `once` until no sweep is open that could be served. Raises Stopped, HostLost."""
        self._dispatcher.seat(hellos)
        for hello in hellos:
            self._dispatcher.collect(hello.worker)
        try:
            while True:
                if self._clock() >= self._keep_at_s:
                    self._keep_at_s = self._clock() + self._keep_s
                    if not self._keep() and once:
                        return
                self._dispatcher.turn()
                if not self._dispatcher.seats:
                    raise HostLost("no card is left to serve with")
        except HostLost:
            self._dispatcher.abandon()
            raise
        finally:
            self._bench.shutdown(wait=False, cancel_futures=True)
            with contextlib.suppress(StoreError):
                self._store.leave_cards(self._name, "its scheduler ended")

    def _keep(self) -> bool:
        """Look after what is not a run; whether any sweep is open that is served from here."""
        self._dispatcher.keep_leases()  # first: whoever stood still must not break its own
        self._store.reap_ended()
        with self._dispatcher.waiting():  # a node may take its time to start a worker
            joined = self._placer.joined()
        if joined:
            self._dispatcher.join(joined)
            self._unanswerable.clear()  # the card that was missing may have come
        for hello in joined:
            self._dispatcher.collect(hello.worker)
        now_s, now = self._clock(), self._now()
        self._store.put_cards([seat.as_seen(now_s, now) for seat in self._dispatcher.seats], self._name)
        rows = [row for row in self._store.open_sweeps() if row.id not in self._unanswerable]
        self._dispatcher.passes_over = tuple(row.id for row in rows if row.harness_digest != self._harness)
        served = [row.id for row in rows if row.harness_digest == self._harness]
        for sweep_id in [one for one, answer in self._judging.items() if answer.done()]:
            self._conclude(sweep_id, self._judging.pop(sweep_id))
        for sweep_id in set(self._store.settled()) & set(served) - self._unanswerable - set(self._judging):
            if not self._dispatcher.is_asking(sweep_id):
                self._judging[sweep_id] = self._bench.submit(verdict_or_questions, self._store, sweep_id)
        return bool(served)

    def _conclude(self, sweep_id: str, answer: Future[Verdict | tuple[Asked, ...]]) -> None:
        """Forget a sweep that is judged, or put what its judge asks first to workers.

        One that cannot be judged from here stays open: another scheduler may have its card, or its rows are damaged.
        """
        try:
            found = answer.result()
            if isinstance(found, Verdict):
                self._dispatcher.forget(sweep_id)
                self._tell(Happening("judged", sweep_id, "all", f"{found.outcome}, exit {found.exit_code}"))
                return
            for asked in found:
                self._dispatcher.put(sweep_id, asked)
        except (HostLost, StoreError) as fault:
            self._unanswerable.add(sweep_id)
            reason = f"it cannot be judged from here: {fault}"
            self._store.log_event(sweep_id, "waiting", reason, worker=self._name)
            self._tell(Happening("wait", sweep_id, "all", reason))


def schedule(store: Store, address: str, given: Settings, *, once: bool = False) -> int:
    """Serve on the Ray cluster at `address`; the exit code: 0 at the end of `once`, 128 and the signal when stopped."""
    harness = harness_digest(own_root())
    with StopFlag(polls=True).listening() as stop:

        def drive() -> None:
            name = f"{given.host}/{os.getpid()}@{harness[:12]}"
            placer = ClusterPlacer(address=address, who=f"assay scheduler {name}", stopped=stop)
            try:
                hellos = placer.open()
                deaf()  # Ray has taken SIGTERM for itself
                _say(f"serving {given.store_shown} on {len(hellos)} cards of {address}")
                Scheduler(store, placer, name, harness, stopped=stop, tell=_told).serve(hellos, once=once)
            finally:
                placer.close()

        try:
            supervised(drive, stop)
        except (Stopped, KeyboardInterrupt):
            _say("stopped; every child is ended, and the next scheduler goes on from the store")
            return 128 + (stop.number or signal.SIGINT)
    return 0


def _told(happening: Happening) -> None:
    if happening.kind != "begin" and (happening.text or happening.kind != "end"):
        _say(f"{happening.cell} · {happening.arm}: {happening.kind}: {happening.text}")


def _say(line: str) -> None:
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {shown(line)}\n")
    sys.stderr.flush()
