"""An ASGI application behind one socket, until it is told to end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

AT_ONCE = 64
"""Connections; more get 503 at once."""

GRACE_S = 3
"""How long a response that is under way may take once the end was asked for."""


class _Server(uvicorn.Server):
    """Ends when `stopped` says so, and leaves signals to whoever listens for them."""

    def __init__(self, config: uvicorn.Config, stopped: Callable[[], bool]) -> None:
        super().__init__(config)
        self._stopped = stopped

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None are taken."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Asked ten times a second."""
        return await super().on_tick(counter) or self._stopped()


def serve_until(app: Any, listening: socket.socket, stopped: Callable[[], bool]) -> None:
    """Answer at a socket that listens; what is under way when `stopped` is let end. Nothing is logged but faults."""
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        server_header=False,
        ws="none",
        limit_concurrency=AT_ONCE,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=GRACE_S,
        lifespan="on",
    )
    _Server(config, stopped).run(sockets=[listening])
