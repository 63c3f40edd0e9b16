"""Workers on a Ray cluster that is there already: one actor a card of each node, for as long as a scheduler runs.

Nothing of the cluster is started or stopped from here. Nodes must have this assay installed: a worker says which one it
is of, and one of another state is refused by name. Ray's own retries are off, as in `orchestrator.ray_app`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.provenance import harness_digest, own_root
from orchestrator.cards import CardName
from orchestrator.choose import simulated_cards
from orchestrator.lost import HostLost, WorkerLost
from orchestrator.ray_app import ANSWER_S, SIMULATED_RESOURCE, CardActor, RayCalls, first_line
from orchestrator.settings import settings
from orchestrator.worker import WorkerCard, WorkerSettings

START = "give HOST:PORT of one that runs, or start one: ray start --head --port=6379"
CONNECT_S = 10.0
AT_ONCE = 2
"""Workers that a node starts at a time: each loads for seconds of a core, and has a deadline for it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs: a node, and there which of its simulated cards (None: a real one, which Ray picks)."""

    node: str
    host: str
    simulated: CardName | None


class NodeActor(CardActor):
    """A `CardActor` whose folders are its own node's."""

    def __init__(self, worker: str, simulated: CardName | None, who: str) -> None:
        given = settings(os.environ, cwd=Path(tempfile.gettempdir()))
        scratch = Path(tempfile.gettempdir()) / f"assay-{os.getpid()}"
        works = WorkerSettings(given.spool, scratch, given.locks, packs=given.packs, who=who)
        super().__init__(worker, simulated, works, ())

    def harness(self) -> str:
        """The state of assay on this node."""
        return harness_digest(own_root())


@dataclass(slots=True, kw_only=True)
class ClusterPlacer(RayCalls):
    """A `Placer` on the Ray cluster at `address`; `who` names it to others who want one of its cards."""

    address: str
    who: str
    _places: dict[str, Place] = field(default_factory=dict)

    def open(self) -> tuple[WorkerCard, ...]:
        """Connect, and start a worker for each card of each node. Raises HostLost, also for another Ray or Python."""
        import ray

        # Ray prints to stdout, and puts the driver's folder on its workers' import path: a checkout would win there.
        self._quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
        logging.getLogger("ray").setLevel(logging.CRITICAL)
        folder = self._quiet.enter_context(tempfile.TemporaryDirectory(prefix="assay-"))
        _require_listener(self.address)
        try:
            with contextlib.chdir(folder):
                ray.init(address=self.address, log_to_driver=False, configure_logging=False)
        except Exception as exc:  # whatever Ray meets on its way to a cluster; its own exceptions have no common root
            raise HostLost(_refusal(self.address, exc)) from exc
        found = self.joined()
        if not found:
            raise HostLost(f"the Ray cluster at {self.address} offers no card: {_offer(ray.nodes())}")  # type: ignore[no-untyped-call]
        return found

    def joined(self) -> tuple[WorkerCard, ...]:
        """Workers for the cards of nodes that came since; none of these may keep the others from working."""
        import ray

        new: dict[str, Place] = {}
        for node in ray.nodes():  # type: ignore[no-untyped-call]
            if node["Alive"] and node["NodeID"] not in {place.node for place in self._places.values()}:
                new.update(_places(node))
        self._places.update(new)
        found: list[WorkerCard] = []
        for turn in _turns(new):
            self._actors.update({worker: self._actor(worker) for worker in turn})
            found += [self._hello(worker) for worker in turn]
        return tuple(found)

    def _hello(self, worker: str) -> WorkerCard:
        import ray

        hello = super(ClusterPlacer, self)._hello(worker)
        try:
            there = ray.get(self._actors[worker].harness.remote(), timeout=ANSWER_S)
        except ray.exceptions.RayError as exc:
            raise HostLost(f"worker {worker} did not start: {first_line(exc)}") from exc
        if there != (here := harness_digest(own_root())):
            states = f"{there[:12]}, here {here[:12]}"
            raise HostLost(f"node {self._places[worker].host} has another state of assay ({states}): install this one")
        return hello

    def _actor(self, worker: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = self._places[worker]
        try:
            nodes = ray.nodes()  # type: ignore[no-untyped-call]
        except (ray.exceptions.RayError, RuntimeError, OSError) as exc:
            raise HostLost(f"the Ray cluster at {self.address} is gone: {first_line(exc)}") from exc
        if not any(node["NodeID"] == place.node and node["Alive"] for node in nodes):
            raise WorkerLost(worker, f"its node {place.host} is gone")
        pinned = NodeAffinitySchedulingStrategy(place.node, soft=False)
        options: dict[str, Any] = {"num_gpus": 1} if place.simulated is None else {"resources": {SIMULATED_RESOURCE: 1}}
        options["scheduling_strategy"] = pinned
        remote = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, **options)
        return remote(NodeActor).remote(worker, place.simulated, self.who)


def _places(node: Mapping[str, Any]) -> dict[str, Place]:
    """A worker a card of a node, by the resources that it was started with."""
    resources, host, identity = node["Resources"], node["NodeManagerHostname"], node["NodeID"]
    short = f"{host}/{identity[:8]}"
    places: dict[str, Place] = {}
    for number in range(int(resources.get("GPU", 0))):
        places[f"{short}.{number}"] = Place(identity, host, None)
    for card in simulated_cards(identity, int(resources.get(SIMULATED_RESOURCE, 0))):
        places[f"{short}.s{card.index}"] = Place(identity, host, card)
    return places


def _turns(places: Mapping[str, Place]) -> list[list[str]]:
    """Workers in the order in which they are started: a few of each node, then the next few."""
    nodes = [place.node for place in places.values()]
    turns = [nodes[:number].count(node) // AT_ONCE for number, node in enumerate(nodes)]
    return [[worker for worker, turn in zip(places, turns, strict=True) if turn == one] for one in sorted(set(turns))]


def _offer(nodes: list[Mapping[str, Any]]) -> str:
    alive = [node for node in nodes if node["Alive"]]
    told = f"{len(alive)} node{'s' * (len(alive) != 1)}, no GPU and no {SIMULATED_RESOURCE} among their resources"
    return f"{told}; start nodes with --num-gpus, or --resources='{{\"{SIMULATED_RESOURCE}\": 1}}' for simulated ones"


def _require_listener(address: str) -> None:
    """Raise HostLost where nobody listens: Ray itself tries for minutes, and says so on nobody's stream."""
    host, mark, port = address.rpartition(":")
    if not mark or not port.isdecimal():
        return  # auto, or a form that Ray knows
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except OSError as exc:
        raise HostLost(f"no Ray cluster answers at {address}: {exc.strerror or exc} ({START})") from exc


def _refusal(address: str, exc: BaseException) -> str:
    """Why a cluster cannot be used, in a line: another Ray or Python is named, with what each side has."""
    words = " ".join(str(exc).split())
    if "ersion mismatch" in words:
        return f"the Ray cluster at {address} is of another Ray or Python than this ({socket.gethostname()}): {words}"
    if "uthentication" in words or "uthoriz" in words:
        return (
            f"the Ray cluster at {address} wants its token: set RAY_AUTH_MODE=token and share the token file: {words}"
        )
    return f"no Ray cluster answers at {address}: {first_line(exc)} ({START})"
