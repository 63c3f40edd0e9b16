"""What stands before every route: the Host header, the token, and the headers that bind a browser.

A page of another site may make a browser ask a server on loopback, by a name that it lets resolve to 127.0.0.1: so a
request must name an address, `localhost`, or a name that was allowed. An address cannot be rebound.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reports.serve.faults import Fault, answer

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; form-action 'self'; base-uri 'none';"
    " frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache, private",
}
_AUTHORITY = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]{1,253}))(?::\d{1,5})?")


@dataclass(frozen=True, slots=True)
class Door:
    """Who may come in: by which host names beside addresses and `localhost`, and with which token (None: all)."""

    names: frozenset[str] = frozenset()
    token: bytes | None = None

    def refuses(self, headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, Fault] | None:
        """Status and fault of a request that is refused; None for one that comes in."""
        found: dict[bytes, list[bytes]] = {b"host": [], b"authorization": []}
        for name, value in headers:
            if name in found:
                found[name].append(value)
        hosts = found[b"host"]
        if len(hosts) != 1:
            return 400, Fault("the request names no host, or several", "send one Host header")
        host = hosts[0].decode("latin-1")
        if not self.knows(host):
            remedy = "ask by the server's address, or allow the name: assay serve --allow-host NAME"
            return 421, Fault(f"this server is not {host}", remedy)
        if self.token is not None and not any(map(self._fits, found[b"authorization"])):
            remedy = "send it as Authorization: Bearer TOKEN, or as the password of a browser's login, with any name"
            return 401, Fault("this server wants its token", remedy)
        return None

    def knows(self, host: str) -> bool:
        """Whether a Host header names an address, `localhost` or an allowed name."""
        given = _AUTHORITY.fullmatch(host)
        if given is None:
            return False
        name = (given["six"] or given["name"]).lower().rstrip(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name == "localhost" or name in self.names
        return True

    def _fits(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        if scheme.lower() == b"basic":
            try:
                given = base64.b64decode(given.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(given.strip(), self.token or b"")


class Guard:
    """The application behind a door. HEAD is a GET without its body; every response has the headers."""

    def __init__(self, app: ASGIApp, door: Door) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request; other kinds of traffic go on as they are."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = ((name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own)
                message = {**message, "headers": [*message["headers"], *more]}
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        refused = self._door.refuses(scope["headers"])
        app: ASGIApp = self._app if refused is None else _refusal(scope["path"], *refused)
        await app({**scope, "method": "GET"} if is_head else scope, receive, told)


def _refusal(path: str, status: int, fault: Fault) -> Response:
    wanted = {"www-authenticate": 'Basic realm="assay", charset="UTF-8"'} if status == 401 else {}
    return answer(path, status, fault, wanted)
