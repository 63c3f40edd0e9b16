"""Ray underneath: one actor a card, started embedded on this host, bound to loopback.

Ray places and watches. It never retries: a measurement that silently ran twice would be worse than one that is lost,
so restarts and task retries are off and the dispatcher decides. `num_cpus=0`, since a GPU actor otherwise takes a CPU
for its whole life, and two of them starve a small host.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobs.adapters.native_forced import ForceOrder
from jobs.near_tie import Adjudication
from orchestrator.cards import CardName, CardProbe, ProbeError
from orchestrator.choose import only_visible
from orchestrator.clear import ClearVerdict
from orchestrator.guard import MARK, Guard
from orchestrator.lost import HostLost, Stopped, WorkerLost
from orchestrator.nvml import NvmlProbe
from orchestrator.outcome import RunOutcome
from orchestrator.place import Patience, Ticket, no_patience, patiently
from orchestrator.scripted import ScriptedProbe, State
from orchestrator.worker import GpuWorker, WorkerCard, WorkerSettings, WorkOrder

OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes; nothing large goes through it
SIMULATED_RESOURCE = "assay_simulated_card"
START_TIMEOUT_S = 60.0
ANSWER_S = 60.0
CHUNKS_AT_ONCE = 64
POLL_S = 0.2
STOP_TIMEOUT_S = 8.0
RAY_ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # binds every server to loopback, on Linux too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",  # 60 by default: how long a dead head is waited for
    "RAY_DEDUP_LOGS": "0",
}


class CardActor:
    """The actor around a `GpuWorker`: finds its card, and passes Ray's cancellation on as the stop flag."""

    def __init__(
        self, worker: str, simulated: CardName | None, settings: WorkerSettings, script: Sequence[State]
    ) -> None:
        import ray

        context = ray.get_runtime_context()
        probe: CardProbe
        if simulated is not None:
            probe, card = ScriptedProbe([simulated.uuid], time.monotonic, script), simulated
        else:
            probe = NvmlProbe()
            card = only_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), probe.cards())
        self._inner = GpuWorker(
            worker, card, settings, probe, child_environ(os.environ, card), lambda: bool(context.is_canceled())
        )

    def start(self) -> WorkerCard:
        """Take the card."""
        return self._inner.start()

    def look(self) -> ClearVerdict:
        """Is the card clear?"""
        return self._inner.look()

    def run(self, work: WorkOrder) -> RunOutcome:
        """One attempt."""
        return self._inner.run(work)

    def adjudicate(self, order: ForceOrder) -> Adjudication:
        """One question."""
        return self._inner.adjudicate(order)

    def acknowledge(self, sweep_id: str, attempt_id: str) -> None:
        """Forget a stored outcome."""
        self._inner.acknowledge(sweep_id, attempt_id)

    def lacks(self, pack: str) -> bool:
        """Whether an arm's tree must be shipped here."""
        return not self._inner.arms.holds(pack)

    def take(self, pack: str, position: int, data: bytes) -> None:
        """One chunk of it."""
        self._inner.arms.take(pack, position, data)

    def unpack(self, pack: str) -> bool:
        """All of it has come; whether it is what it should be."""
        return self._inner.arms.finish(pack)

    def left_over(self) -> tuple[RunOutcome, ...]:
        """Outcomes on this node that no dispatcher has acknowledged."""
        return self._inner.left_over()


def child_environ(environ: Mapping[str, str], card: CardName) -> dict[str, str]:
    """What an engine child may draw on: its card by full UUID, none at all when the card is simulated."""
    return {**environ, "CUDA_VISIBLE_DEVICES": "" if card.simulated else card.uuid}


@dataclass(slots=True, kw_only=True)
class RayCalls(ABC):
    """What any placer on Ray does: calls to actors and their answers. How Ray and its actors begin is the placer's."""

    patience: Patience = no_patience
    stopped: Callable[[], bool] = lambda: False
    script: Sequence[State] = ()
    _actors: dict[str, Any] = field(default_factory=dict)
    _running: dict[str, Any] = field(default_factory=dict)
    _quiet: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def look(self, worker: str) -> Ticket:
        """Ask the actor."""
        return Ticket(worker, self._actors[worker].look.remote())

    def run(self, worker: str, work: WorkOrder) -> Ticket:
        """Give the actor an order."""
        ref = self._actors[worker].run.remote(work)
        self._running[worker] = ref
        return Ticket(worker, ref)

    def adjudicate(self, worker: str, order: ForceOrder) -> Ticket:
        """Put a question to the actor."""
        ref = self._actors[worker].adjudicate.remote(order)
        self._running[worker] = ref
        return Ticket(worker, ref)

    def ready(self, tickets: Sequence[Ticket], timeout_s: float) -> tuple[Ticket, ...]:
        """Tickets with an answer, an error being one."""
        import ray

        done, _ = ray.wait([t.ref for t in tickets], num_returns=1, timeout=timeout_s)
        return tuple(t for t in tickets if t.ref in done)

    def verdict(self, ticket: Ticket) -> ClearVerdict:
        """The look's answer."""
        answer = self._answer(ticket)
        assert isinstance(answer, ClearVerdict), answer
        return answer

    def outcome(self, ticket: Ticket) -> RunOutcome:
        """The run's answer."""
        self._running.pop(ticket.worker, None)
        answer = self._answer(ticket)
        assert isinstance(answer, RunOutcome), answer
        return answer

    def adjudication(self, ticket: Ticket) -> Adjudication:
        """The question's answer."""
        self._running.pop(ticket.worker, None)
        answer = self._answer(ticket)
        assert isinstance(answer, Adjudication), answer
        return answer

    def acknowledge(self, worker: str, sweep_id: str, attempt_id: str) -> None:
        """Tell the actor; should it be lost, the spooled file stays and a resume finds it stored already."""
        self._actors[worker].acknowledge.remote(sweep_id, attempt_id)

    def left_over(self, worker: str) -> tuple[RunOutcome, ...]:
        """What a worker's node kept of earlier runs; nothing where the worker is lost."""
        import ray

        try:
            found = ray.get(self._actors[worker].left_over.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayError:
            return ()
        assert isinstance(found, tuple), found
        return found

    def supply(self, worker: str, pack: str, chunks: Callable[[], Iterable[bytes]]) -> bool:
        """Chunk by chunk, each small enough to go with its call: nothing of it meets Ray's object store."""
        import ray

        actor, sent = self._actors[worker], list[Any]()
        try:
            if not ray.get(actor.lacks.remote(pack), timeout=ANSWER_S):
                return True
            for position, data in enumerate(chunks()):
                sent.append(actor.take.remote(pack, position, data))
                if len(sent) == CHUNKS_AT_ONCE:
                    ray.get(sent, timeout=ANSWER_S)
                    sent.clear()
            return bool(ray.get([*sent, actor.unpack.remote(pack)], timeout=ANSWER_S)[-1])
        except ray.exceptions.RayError:  # a lost worker, or one without room: the next order to it says which
            return False

    def replace(self, worker: str) -> WorkerCard:
        """A new actor on the same card, provided that Ray itself still lives."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actors[worker])
        self._actors[worker] = self._actor(worker)
        return self._hello(worker)

    def cancel(self, worker: str) -> None:
        """Cancel a running order: the worker sees it and ends its child."""
        import ray

        if worker in self._running:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.cancel(self._running[worker])

    def stop(self) -> None:
        """Cancel all running orders."""
        for worker in list(self._running):
            self.cancel(worker)

    def close(self) -> None:
        """Stop runs, give them a moment to end their children, then end Ray and whatever is left of it."""
        import ray

        self.stop()
        with contextlib.suppress(ray.exceptions.RayError):  # an actor answers once its run has ended
            idle = [actor.look.remote() for worker, actor in self._actors.items() if worker in self._running]
            if idle:
                ray.wait(idle, num_returns=len(idle), timeout=STOP_TIMEOUT_S)
        with contextlib.suppress(ray.exceptions.RayError, OSError, RuntimeError):
            ray.shutdown()
        self._quiet.close()

    def _hello(self, worker: str) -> WorkerCard:
        """Have a worker take its card, and hear which one that is."""
        return patiently(lambda: self._start(worker), self.patience)

    @abstractmethod
    def _actor(self, worker: str) -> Any:
        """A new actor for a worker. Raises HostLost when its node is gone."""

    def _start(self, worker: str) -> WorkerCard:
        import ray

        try:
            ref, deadline_s = self._actors[worker].start.remote(), time.monotonic() + START_TIMEOUT_S
            while not ray.wait([ref], timeout=POLL_S)[0]:
                if self.stopped():
                    raise Stopped
                if time.monotonic() > deadline_s:
                    raise HostLost(f"worker {worker} did not start within {START_TIMEOUT_S:g} s")
            hello = ray.get(ref)
        except ray.exceptions.RayTaskError as exc:
            if isinstance(exc.cause, ProbeError):
                raise exc.cause from exc
            raise
        except ray.exceptions.RayError as exc:
            raise HostLost(f"worker {worker} did not start: {first_line(exc)}") from exc
        assert isinstance(hello, WorkerCard), hello
        return hello

    def _answer(self, ticket: Ticket) -> Any:
        import ray

        try:
            return ray.get(ticket.ref)
        except ray.exceptions.RayTaskError as exc:
            if isinstance(exc.cause, OSError):  # its host has no room, or takes its files away
                raise WorkerLost(ticket.worker, str(exc.cause)) from exc
            raise  # our own bug in the worker: the traceback is wanted
        except ray.exceptions.RayError as exc:
            raise WorkerLost(ticket.worker, first_line(exc)) from exc


@dataclass(slots=True, kw_only=True)
class RayPlacer(RayCalls):
    """A `Placer` that starts Ray on this host, for as long as it is open."""

    cards: Sequence[CardName]
    settings: WorkerSettings
    guard: Guard
    _cards: dict[str, CardName] = field(default_factory=dict)

    def open(self) -> tuple[WorkerCard, ...]:
        """Start Ray and its actors."""
        import ray

        simulated = self.cards[0].simulated
        os.environ.update(RAY_ENVIRONMENT)
        os.environ[MARK] = self.guard.mark
        if not simulated:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(card.uuid for card in self.cards)
        # Ray prints a dead node's log to stdout, where our results go; what matters of it we say ourselves.
        self._quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        try:
            # Ray puts the driver's folder on its workers' import path: from a checkout, theirs would win over ours.
            with contextlib.chdir(self.guard.folder):
                ray.init(
                    num_cpus=1,
                    num_gpus=0 if simulated else len(self.cards),
                    resources={SIMULATED_RESOURCE: len(self.cards)} if simulated else None,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _temp_dir=str(self.guard.folder),
                )
        except Exception as exc:  # a node that does not come up is a bare Exception of Ray's
            raise HostLost(f"Ray cannot be started: {first_line(exc)}") from exc
        self._cards = {f"w{index}": card for index, card in enumerate(self.cards)}
        self._actors = {worker: self._actor(worker) for worker in self._cards}
        return tuple(self._hello(worker) for worker in self._actors)

    def _hello(self, worker: str) -> WorkerCard:
        hello = super(RayPlacer, self)._hello(worker)
        self._cards[worker] = hello.card
        return hello

    def _actor(self, worker: str) -> Any:
        import ray

        if not _node_alive():
            raise HostLost("the Ray node died")
        card = self._cards[worker]
        if card.simulated:
            options: dict[str, Any] = {"num_gpus": 0, "resources": {SIMULATED_RESOURCE: 1}}
        else:
            options = {"num_gpus": 1}
        remote = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, **options)(CardActor)
        return remote.remote(worker, card if card.simulated else None, self.settings, list(self.script))


def _node_alive() -> bool:
    import ray

    try:
        return any(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
    except (ray.exceptions.RayError, RuntimeError, OSError):
        return False


def first_line(exc: BaseException) -> str:
    """What an exception says, in a line; Ray's go on with traces of other processes."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[0] if lines else type(exc).__name__
