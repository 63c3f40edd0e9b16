"""One sweep on this host, from its manifest to settled runs: the store, Ray for as long as it takes, nothing left over.

A sweep has one driver at a time on a host: a file lock, freed by the kernel when the driver dies. Whoever holds it
knows that an earlier driver of that sweep is gone, so a resume takes over at once: first what the spool still holds,
then the leases.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout
from ulid import ULID

from jobs.card_choice import ANY_CARD
from jobs.errors import StoreError
from jobs.judge import Asked, judge_read
from jobs.model import JudgeInput, Manifest
from jobs.store import Pending, Store
from orchestrator.cards import CardHeld, CardName, ProbeError
from orchestrator.choose import choose_cards
from orchestrator.dispatch import Dispatcher
from orchestrator.guard import Guard
from orchestrator.lost import HostLost, Stopped
from orchestrator.nvml import NvmlProbe
from orchestrator.outcome import Spool
from orchestrator.place import Patience
from orchestrator.ray_app import RayPlacer
from orchestrator.seat import Happening
from orchestrator.settings import Settings
from orchestrator.settle import ingest
from orchestrator.supervise import deaf
from orchestrator.worker import WorkerSettings

HELD_PAUSE_S = 1.0


def cards_of_host(
    settings: Settings, asked: int | None, device: str, card_class: str = ANY_CARD, memory_bytes: int = 0
) -> tuple[CardName, ...]:
    """The cards that a sweep on this host uses. Raises ProbeError when real ones are wanted and not to be had."""
    visible, probe, why = settings.environ.get("CUDA_VISIBLE_DEVICES"), None, ""
    try:
        probe = NvmlProbe()
    except ProbeError as exc:
        why = str(exc)
    try:
        return choose_cards(asked, device, probe, why, visible, settings.host, card_class, memory_bytes)
    finally:
        if probe is not None:
            probe.close()


def run_embedded(
    store: Store,
    sweep_id: str,
    manifest: Manifest,
    cards: Sequence[CardName],
    settings: Settings,
    *,
    tell: Callable[[Happening], None],
    stop: Callable[[], bool],
) -> Pending:
    """Run what is pending of a sweep; the counts at the end.

    Raises Stopped, HostLost, ProbeError or StoreError; after each, a resume goes on from what is stored.
    """
    with sole_driver(settings.state, sweep_id):
        take_over(store, sweep_id, settings)
        if stop():
            raise Stopped
        if not store.pending(sweep_id).pending and not open_questions(store, sweep_id):
            return store.pending(sweep_id)
        guard = Guard.start(str(ULID()).lower())
        works = WorkerSettings(
            settings.spool, guard.folder / "scratch", settings.locks, packs=settings.packs, who=f"assay run {sweep_id}"
        )
        patience = waiting_for_cards(manifest, tell, stop)
        placer = RayPlacer(cards=cards, settings=works, guard=guard, patience=patience, stopped=stop)
        try:
            hellos = placer.open()
            deaf()  # Ray has taken SIGTERM for itself
            name = f"{settings.host}/{os.getpid()}"
            dispatcher = Dispatcher(store, placer, name, sweep_id, stopped=stop, tell=tell)
            try:
                dispatcher.seat(hellos, half_done(store.judge_input(sweep_id)).values())
                dispatcher.work()
                while asked := open_questions(store, sweep_id):
                    dispatcher.ask(sweep_id, asked)
                return store.pending(sweep_id)
            except HostLost:
                dispatcher.abandon()
                raise
        finally:
            placer.close()
            guard.finish()


def open_questions(store: Store, sweep_id: str) -> tuple[Asked, ...]:
    """What the judge asks for before it answers; nothing as long as runs are pending."""
    if store.pending(sweep_id).pending:
        return ()
    answer = store.judged(sweep_id, judge_read)
    return answer if isinstance(answer, tuple) else ()


@contextlib.contextmanager
def sole_driver(state: Path, sweep_id: str) -> Iterator[None]:
    """Be the only driver of a sweep on this host. Raises StoreError when another one lives."""
    folder = state / "drivers"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{sweep_id}.lock")
    try:
        lock.acquire(timeout=2.0)
    except Timeout as exc:
        raise StoreError(f"sweep {sweep_id} is being run by another process here", "wait for it, or end it") from exc
    try:
        yield
    finally:
        lock.release()


def take_over(store: Store, sweep_id: str, settings: Settings) -> None:
    """Settle what an earlier driver of this host left: spooled outcomes first, then its leases."""
    spool = Spool(settings.spool)
    ingest(store, spool, sweep_id)
    spool.clear_drafts(sweep_id)
    if settings.store_url.startswith("sqlite"):  # a file on this host: no driver elsewhere can hold a lease
        store.break_leases(sweep_id, "its driver is gone")


def half_done(given: JudgeInput) -> Mapping[str, str]:
    """Blocks with both complete and pending runs, and the card that the complete ones met."""
    homes: dict[str, str] = {}
    waiting: set[str] = set()
    for run in (run for cell in given.cells for run in cell.runs):
        if run.state == "pending":
            waiting.add(run.block_id)
        elif run.record is not None and run.record.certificate is not None:
            homes[run.block_id] = run.record.certificate.uuid
    return {block: uuid for block, uuid in homes.items() if block in waiting}


def waiting_for_cards(manifest: Manifest, tell: Callable[[Happening], None], stop: Callable[[], bool]) -> Patience:
    """Wait for a held card up to the sweep's queue limit, saying once who has it. Raises Stopped on a stop."""
    end_s = time.monotonic() + manifest.limits.queue_timeout_s
    said: set[str] = set()

    def wait(held: CardHeld) -> bool:
        if str(held) not in said:
            said.add(str(held))
            tell(Happening("wait", manifest.name, "all", str(held)))
        time.sleep(HELD_PAUSE_S)
        if stop():
            raise Stopped
        return time.monotonic() < end_s

    return wait
