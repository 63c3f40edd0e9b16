"""What ends a call to a worker, and with it perhaps the run: a worker lost, the host lost, a stop asked for."""

from __future__ import annotations


class WorkerLost(Exception):
    """A worker died or cannot be reached; what it was doing has no outcome."""

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(f"worker {worker}: {reason}")
        self.worker = worker
        self.reason = reason


class HostLost(Exception):
    """The machinery under the workers is gone, and with it every worker."""


class Stopped(Exception):
    """The user asked for an end; the store can be resumed."""
