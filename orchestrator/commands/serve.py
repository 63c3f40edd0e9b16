"""`assay serve`: the pages and a JSON API from a store, read-only, on this host unless told otherwise."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import sys
from typing import Annotated

import typer

from jobs.errors import SpecError
from jobs.store.reader import Reader
from orchestrator.commands.terminal import StoreOption, now, say, settings_for
from orchestrator.lost import HostLost
from orchestrator.stop import StopFlag
from orchestrator.version import harness_version
from orchestrator.web_server import serve_until
from reports.serve.app import application
from reports.serve.guard import Door

PORT = 8642
TOKEN = "ASSAY_SERVE_TOKEN"
SHORTEST_TOKEN = 16
NAME = re.compile(r"[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve")(serve)


def serve(
    store: StoreOption = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="the address to listen at")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="P", min=0, max=65535, help="0: any that is free")] = PORT,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="a name that this server is asked by")
    ] = None,
) -> None:
    """Serve sweeps, cells and histories from a store as pages and JSON, read-only, until it is stopped.

    A token in ASSAY_SERVE_TOKEN is then asked of everybody; without one only addresses of this host are listened at.
    """
    given = settings_for(store)
    token = _token(given.environ.get(TOKEN), host)
    names = frozenset({*(_name(one) for one in allow_host or ()), given.host.lower()})
    reader = Reader(given.store_url, now)
    try:
        listening = _listen(host, port)
        app = application(reader, Door(names, token), version=harness_version(), store_words=given.store_words)
        with listening, StopFlag(polls=True).listening() as stop:
            address, at = listening.getsockname()[:2]
            say(f"serving {given.store_shown} at http://{f'[{address}]' if ':' in address else address}:{at}/")
            sys.stdout.flush()  # whoever started it through a pipe waits for the address
            serve_until(app, listening, stop)
    finally:
        reader.close()
    raise typer.Exit(128 + stop.number if stop.number else 4)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises SpecError for what is no address, HostLost where the system refuses it."""
    address = "127.0.0.1" if host == "localhost" else host
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
        listening = socket.create_server((address, port), family=family)
        # asyncio sets it where a socket names its protocol; without it each answer waits 40 ms for an acknowledgement
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except ValueError:
        raise SpecError(f"--host {host!r} is no address", "give one such as 127.0.0.1 or ::1") from None
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = f"port {port} of {host} is in use" if taken else f"port {port} of {host}: {error.strerror}"
        remedy = "end what listens there, or name another: --port P (0: any that is free)"
        raise HostLost(f"{why} ({remedy})") from error


def _token(given: str | None, host: str) -> bytes | None:
    """The token as it is compared; None where none is asked for. Raises SpecError for one that protects nothing."""
    is_here = host == "localhost" or _is_loopback(host)
    if given is None:
        if not is_here:
            remedy = f"set {TOKEN}, or listen at 127.0.0.1 and come in through a tunnel"
            raise SpecError(f"--host {host} is open to other hosts, and there is no token", remedy)
        return None
    if len(given) < SHORTEST_TOKEN or not given.isascii() or not given.isprintable() or " " in given:
        remedy = f"give at least {SHORTEST_TOKEN} ASCII characters without blanks, such as of: openssl rand -hex 24"
        raise SpecError(f"{TOKEN} is no token", remedy)
    return given.encode()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _name(given: str) -> str:
    name = given.lower().rstrip(".")
    if not NAME.fullmatch(name):
        raise SpecError(
            f"--allow-host {given!r} is no host name", "give one without port and scheme: assay.example.org"
        )
    return name
