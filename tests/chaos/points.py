"""The named points of a run's life at which something goes wrong, and what each costs: the table of the chaos suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fault = Literal["kill", "stop", "hang", "full", "drop", "cut", "restart", "lock"]
WORDS: dict[str, str] = {
    "kill": "SIGKILL",
    "stop": "SIGSTOP for longer than a lease, then SIGCONT",
    "hang": "hangs",
    "full": "disk full",
    "drop": "connection dropped",
    "cut": "connection dropped after the commit, before it was heard of",
    "restart": "killed and started again",
    "lock": "somebody else holds the write lock for longer than a lease",
}


@dataclass(frozen=True)
class Point:
    """`call`: MODULE:FUNCTION of the product, before or after which it happens; empty where a test does it itself.

    `costs`: how the attempt ends that is spent on it; empty where none is. `meanwhile`: another scheduler takes over
    while this one stands still. `only`: the kind of store that it can happen with.
    """

    name: str
    process: str
    fault: Fault
    call: str = ""
    when: Literal["before", "after"] = "before"
    skip: int = 0
    costs: str = ""
    meanwhile: bool = False
    only: str = ""

    def __str__(self) -> str:
        return f"{self.process}-{self.name}-{self.fault}".replace(" ", "-").replace("'", "")


STORE = "jobs.store:Store."
DISPATCHER = (
    Point("before the claim", "dispatcher", "kill", STORE + "claim_block"),
    Point("in the claim's transaction", "dispatcher", "kill", "jobs.store.leases:_claim", "after"),
    Point("in the claim's transaction", "store", "drop", "jobs.store.leases:_claim", "after", only="postgresql"),
    Point("after the claim", "dispatcher", "kill", STORE + "claim_block", "after"),
    Point("after the claim", "dispatcher", "stop", STORE + "claim_block", "after", meanwhile=True),
    Point("in the attempt's transaction", "dispatcher", "kill", "jobs.store.claims:start_attempt", "after"),
    Point("in the attempt's transaction", "store", "drop", "jobs.store.claims:start_attempt", "after",
          only="postgresql"),
    Point("in the attempt's transaction", "store", "full", "jobs.store.claims:start_attempt", "after"),
    Point("before the spawn", "dispatcher", "kill", "orchestrator.worker:GpuWorker.run", costs="lost"),
    Point("after the spawn", "dispatcher", "kill", "jobs.adapters.child:_spawn", "after", costs="lost"),
    Point("after the spawn", "dispatcher", "stop", "jobs.adapters.child:_spawn", "after", costs="lost",
          meanwhile=True),
    Point("after the first tokens", "dispatcher", "kill", "jobs.adapters.child:_LineReader._take",
          "after", 2, "lost"),
    Point("after the result", "dispatcher", "kill", "jobs.adapters.native:record_of", costs="lost"),
    Point("before the spool", "dispatcher", "kill", "orchestrator.outcome:Spool.put", costs="lost"),
    Point("before the spool", "dispatcher", "full", "orchestrator.outcome:Spool.put"),
    Point("while spooling", "dispatcher", "kill", "orchestrator.outcome:RunOutcome.canonical", costs="lost"),
    Point("while spooling", "dispatcher", "full", "orchestrator.outcome:RunOutcome.canonical"),
    Point("after the spool", "dispatcher", "kill", "orchestrator.outcome:Spool.put", "after"),
    Point("after the spool", "dispatcher", "stop", "orchestrator.outcome:Spool.put", "after",
          costs="lost", meanwhile=True),
    Point("before the store write", "dispatcher", "kill", STORE + "write_record"),
    Point("before the store write", "dispatcher", "stop", STORE + "write_record", costs="lost", meanwhile=True),
    Point("in the store write's transaction", "dispatcher", "kill", "jobs.store.records:_write_parts", "after"),
    Point("in the store write's transaction", "dispatcher", "stop", "jobs.store.records:_write_parts", "after"),
    Point("in the store write's transaction", "store", "full", "jobs.store.records:_write_parts",
          "after"),
    Point("in the store write's transaction", "store", "drop", "jobs.store.records:_write_parts",
          "after", only="postgresql"),
    Point("after the store write", "dispatcher", "kill", STORE + "write_record", "after"),
    Point("after the store write", "dispatcher", "stop", STORE + "write_record", "after"),
    Point("before the acknowledgement", "dispatcher", "kill", "orchestrator.outcome:Spool.acknowledge"),
    Point("after the acknowledgement", "dispatcher", "kill", "orchestrator.outcome:Spool.acknowledge", "after"),
    Point("before the judge", "dispatcher", "kill", "orchestrator.conclude:verdict_or_questions"),
    Point("in the verdict's transaction", "dispatcher", "kill", "jobs.store.verdicts:_write_rows", "after", 1),
    Point("in the verdict's transaction", "store", "full", "jobs.store.verdicts:_write_rows", "after", 1),
    Point("in the verdict's transaction", "store", "drop", "jobs.store.verdicts:_write_rows", "after", 1,
          only="postgresql"),
    Point("after the claim", "store", "cut", "jobs.store.leases:_claim", "after", only="postgresql"),
    Point("after the attempt's start", "store", "cut", "jobs.store.claims:start_attempt", "after", only="postgresql"),
    Point("after the store write", "store", "cut", "jobs.store.records:_write_parts", "after", only="postgresql"),
    Point("after the verdict", "store", "cut", "jobs.store.verdicts:_write_rows", "after", 1, only="postgresql"),
    Point("after the judge", "dispatcher", "kill", "orchestrator.conclude:verdict_or_questions", "after"),
)  # fmt: skip
"""In the scheduler's process, in which its workers are threads here, and in its transactions."""

CHILD = (
    Point("spawned", "child", "kill", costs="failed"),
    Point("spawned", "child", "stop"),
    Point("spawned", "child", "hang", costs="failed"),
    Point("first tokens", "child", "kill", costs="failed"),
    Point("first tokens", "child", "stop"),
    Point("first tokens", "child", "hang", costs="failed"),
    Point("result", "child", "kill", costs="failed"),
    Point("result", "child", "hang", costs="failed"),
)
"""In an engine, before it says anything, after it has told its first tokens, after it has told its result."""

SERVER = {
    "still": Point("while a child decodes", "dispatcher", "stop"),
    "lock": Point("while a child decodes", "store", "lock", only="sqlite"),
    "restart": Point("while a child decodes", "store", "restart", only="postgresql"),
    "stop": Point("while a child decodes", "store", "stop", only="postgresql"),
}
"""Done from outside, to the scheduler or to the database itself."""

WORKER = (
    Point("before the spawn", "worker", "kill", "orchestrator.worker:GpuWorker.run", costs="lost"),
    Point("after the spawn", "worker", "stop", "jobs.adapters.child:_spawn", "after"),
    Point("making the run's folder", "worker", "full", "orchestrator.worker:GpuWorker._scratch", costs="lost"),
    Point("starting the engine", "worker", "full", "jobs.adapters.native:NativeAdapter._child_order", costs="failed"),
    Point("before the spool", "worker", "kill", "orchestrator.outcome:Spool.put", costs="lost"),
    Point("while spooling", "worker", "kill", "orchestrator.outcome:RunOutcome.canonical", costs="lost"),
    Point("while spooling", "worker", "full", "orchestrator.outcome:RunOutcome.canonical"),
    Point("after the spool", "worker", "kill", "orchestrator.outcome:Spool.put", "after"),
    Point("after the spool", "worker", "hang", "orchestrator.outcome:Spool.put", "after"),
    Point("acknowledging", "worker", "kill", "orchestrator.outcome:Spool.acknowledge"),
)
"""In a worker's process under `assay run`, where it is an actor of Ray."""

NODE = (
    Point("while a child decodes", "worker", "stop"),
    Point("while a child decodes", "driver", "stop"),
    Point("while a child decodes", "Ray node", "stop"),
    Point("while a child decodes", "Ray control server", "stop"),
)
"""Done from outside, under `assay run`."""

CLUSTER = (
    Point("while a child decodes", "worker", "kill", costs="lost"),
    Point("while a child decodes", "Ray node", "kill", costs="lost"),
    Point("while a child decodes", "scheduler", "kill", costs="lost"),
)
"""Done from outside, on a cluster: the sweep goes on with a new worker, on the other node, with the next scheduler."""


def table() -> list[str]:
    """The points as rows of `docs/results/chaos.md`, in order."""
    served = [(point, point.only or "both") for point in (*DISPATCHER, *CHILD, *SERVER.values())]
    rows = [*served, *((point, "sqlite, `assay run`") for point in (*WORKER, *NODE))]
    rows += [(point, "sqlite, a Ray cluster") for point in CLUSTER]
    return [
        f"| {point.process} | {point.name} | {WORDS[point.fault]} | {where} | {_spent(point)} |"
        for point, where in rows
    ]


def _spent(point: Point) -> str:
    taken = ", another scheduler took the block over" if point.meanwhile else ""
    return f"one attempt, {point.costs}{taken}" if point.costs else f"nothing{taken}"
