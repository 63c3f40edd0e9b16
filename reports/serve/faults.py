"""What a request that cannot be answered gets: one sentence and its remedy, as a page or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from starlette.responses import HTMLResponse, Response

from reports.render.environment import page
from reports.render.pages import Links

API = "/api/"
DEEPEST = 8
WORDS = {
    400: "Not a request", 401: "A token is needed", 404: "Not here", 405: "Only read", 421: "Another host",
    422: "Not understood", 500: "A bug in assay", 503: "The store gives no answer",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """Why there is no answer, and what to do."""

    error: str
    remedy: str = ""


def answer(path: str, status: int, fault: Fault, headers: dict[str, str] | None = None) -> Response:
    """The response for a path: JSON under /api/, else a page."""
    if path.startswith(API):
        return Response(json.dumps(asdict(fault)), status, headers, "application/json")
    up = "../" * min(path.count("/") - 1, DEEPEST)
    told: dict[str, Any] = {"title": WORDS.get(status, "No answer"), "status": status, "fault": fault}
    return HTMLResponse(page("fault.html.j2", None, links=Links(root=up, index=up or "./"), **told), status, headers)
