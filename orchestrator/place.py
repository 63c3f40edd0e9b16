"""Where work is placed: the interface between the dispatcher and whatever runs its workers.

A placer starts one worker a card and carries calls to it. It keeps no state of sweeps: what was asked, tried and
measured stands in the store. A call whose worker is gone gives WorkerLost; nobody repeats it silently.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from jobs.adapters.native_forced import ForceOrder
from jobs.near_tie import Adjudication
from orchestrator.cards import CardHeld, CardName
from orchestrator.clear import ClearVerdict
from orchestrator.lost import WorkerLost
from orchestrator.outcome import RunOutcome
from orchestrator.worker import GpuWorker, WorkerCard, WorkOrder

T = TypeVar("T")
Patience = Callable[[CardHeld], bool]
"""Asked when a card is held by another process: True, after a pause of its own, to try again."""


def no_patience(_held: CardHeld) -> bool:
    """Do not wait for a card."""
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A call under way; compared by identity."""

    worker: str
    ref: Any


class Placer(Protocol):
    """Starts workers and carries calls to them."""

    def open(self) -> tuple[WorkerCard, ...]:
        """Start one worker a card. Raises ProbeError when a card cannot be taken, HostLost when nothing starts."""
        ...

    def look(self, worker: str) -> Ticket:
        """Ask a worker whether its card is clear."""
        ...

    def run(self, worker: str, work: WorkOrder) -> Ticket:
        """Give a worker an order."""
        ...

    def adjudicate(self, worker: str, order: ForceOrder) -> Ticket:
        """Put a question about tokens to a worker."""
        ...

    def ready(self, tickets: Sequence[Ticket], timeout_s: float) -> tuple[Ticket, ...]:
        """Those of `tickets` that have an answer, after waiting up to `timeout_s` for the first."""
        ...

    def verdict(self, ticket: Ticket) -> ClearVerdict:
        """The answer of a look. Raises WorkerLost."""
        ...

    def outcome(self, ticket: Ticket) -> RunOutcome:
        """The answer of a run. Raises WorkerLost."""
        ...

    def adjudication(self, ticket: Ticket) -> Adjudication:
        """The answer to a question. Raises WorkerLost."""
        ...

    def acknowledge(self, worker: str, sweep_id: str, attempt_id: str) -> None:
        """Tell a worker that an outcome is stored; a lost worker need not hear it."""
        ...

    def supply(self, worker: str, pack: str, chunks: Callable[[], Iterable[bytes]]) -> bool:
        """See that the host of an idle worker has an arm's tree; whether it has. Why not, the next order to it says."""
        ...

    def replace(self, worker: str) -> WorkerCard:
        """Start a lost worker again on its card. Raises HostLost when that cannot be."""
        ...

    def left_over(self, worker: str) -> tuple[RunOutcome, ...]:
        """Outcomes where a worker runs that nobody has acknowledged; nothing where the worker is lost."""
        ...

    def cancel(self, worker: str) -> None:
        """Ask what a worker is at to end; its ticket then has an outcome of end cancelled, or is lost."""
        ...

    def stop(self) -> None:
        """Ask all runs to end; their tickets then have outcomes of end cancelled, or are lost."""
        ...

    def close(self) -> None:
        """End all workers and what they run."""
        ...


def patiently(start: Callable[[], WorkerCard], patience: Patience) -> WorkerCard:
    """Start a worker, as long as `patience` waits for whoever holds its card. Raises CardHeld when it does not."""
    while True:
        try:
            return start()
        except CardHeld as held:
            if not patience(held):
                raise


@dataclass(slots=True)
class InProcessPlacer:
    """Workers as threads of this process, one a card; for tests, and for hosts where Ray cannot run."""

    cards: Sequence[CardName]
    make: Callable[[str, CardName, Callable[[], bool]], GpuWorker]
    patience: Patience = no_patience
    _workers: dict[str, GpuWorker] = field(default_factory=dict)
    _threads: dict[str, ThreadPoolExecutor] = field(default_factory=dict)
    _halt: threading.Event = field(default_factory=threading.Event)
    _cancelled: set[str] = field(default_factory=set)

    def open(self) -> tuple[WorkerCard, ...]:
        """One thread a card."""
        return tuple(self._start(f"w{index}", card) for index, card in enumerate(self.cards))

    def look(self, worker: str) -> Ticket:
        """Ask on the worker's thread."""
        return Ticket(worker, self._threads[worker].submit(self._workers[worker].look))

    def run(self, worker: str, work: WorkOrder) -> Ticket:
        """Run on the worker's thread."""
        self._cancelled.discard(worker)
        return Ticket(worker, self._threads[worker].submit(self._workers[worker].run, work))

    def adjudicate(self, worker: str, order: ForceOrder) -> Ticket:
        """Ask on the worker's thread."""
        self._cancelled.discard(worker)
        return Ticket(worker, self._threads[worker].submit(self._workers[worker].adjudicate, order))

    def ready(self, tickets: Sequence[Ticket], timeout_s: float) -> tuple[Ticket, ...]:
        """Tickets whose thread has answered."""
        done, _ = wait([t.ref for t in tickets], timeout_s, FIRST_COMPLETED)
        return tuple(t for t in tickets if t.ref in done)

    def verdict(self, ticket: Ticket) -> ClearVerdict:
        """The look's answer."""
        future: Future[ClearVerdict] = ticket.ref
        return _answer(ticket.worker, future)

    def outcome(self, ticket: Ticket) -> RunOutcome:
        """The run's answer."""
        future: Future[RunOutcome] = ticket.ref
        return _answer(ticket.worker, future)

    def adjudication(self, ticket: Ticket) -> Adjudication:
        """The question's answer."""
        future: Future[Adjudication] = ticket.ref
        return _answer(ticket.worker, future)

    def acknowledge(self, worker: str, sweep_id: str, attempt_id: str) -> None:
        """Forget a stored outcome."""
        self._workers[worker].acknowledge(sweep_id, attempt_id)

    def supply(self, worker: str, pack: str, chunks: Callable[[], Iterable[bytes]]) -> bool:
        """Straight into the cache of the worker."""
        arms = self._workers[worker].arms
        if arms.holds(pack):
            return True
        for position, data in enumerate(chunks()):
            arms.take(pack, position, data)
        return arms.finish(pack)

    def replace(self, worker: str) -> WorkerCard:
        """Threads are not lost; a worker that is asked for again starts afresh."""
        card = self._workers[worker].card
        self._workers[worker].close()
        return self._start(worker, card)

    def left_over(self, worker: str) -> tuple[RunOutcome, ...]:
        """What stands in the spool."""
        return self._workers[worker].left_over()

    def cancel(self, worker: str) -> None:
        """Raise one worker's own stop flag, until its next order."""
        self._cancelled.add(worker)

    def stop(self) -> None:
        """Raise the stop flag that every worker watches."""
        self._halt.set()

    def close(self) -> None:
        """Stop, wait for the threads, give the cards back."""
        self.stop()
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        for worker in self._workers.values():
            worker.close()

    def _start(self, worker: str, card: CardName) -> WorkerCard:
        made = self.make(worker, card, lambda: self._halt.is_set() or worker in self._cancelled)
        hello = patiently(made.start, self.patience)
        self._workers[worker] = made
        self._threads.setdefault(worker, ThreadPoolExecutor(1, thread_name_prefix=worker))
        return hello


def _answer(worker: str, future: Future[T]) -> T:
    try:
        return future.result()
    except OSError as exc:  # as of a worker whose host has no room, or takes its files away
        raise WorkerLost(worker, str(exc)) from exc
