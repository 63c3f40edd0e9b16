"""The application: pages and API from one reader, behind the door, every fault told in words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import cast

import anyio.to_thread
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from jobs.errors import SpecError, StoreError
from jobs.store.reader import Reader
from reports.render.environment import compile_templates
from reports.serve import api, pages
from reports.serve.faults import Fault, answer
from reports.serve.guard import Door, Guard

AT_ONCE = 4
"""Requests that are answered at once, each by a thread; the others wait. It bounds memory: a page may be megabytes."""

DESCRIPTION = "What `assay serve` shows, as JSON. Everything is read, nothing is written."


def application(reader: Reader, door: Door, *, version: str = "0", store_words: str = "") -> ASGIApp:
    """An ASGI application that serves what `reader` reads to whom `door` lets in; it closes the reader at its end.

    `store_words`: the option that names the store, for the commands on pages. There is no page of API documentation:
    FastAPI's own loads scripts from elsewhere.
    """
    app = FastAPI(
        title="assay",
        version=version,
        description=DESCRIPTION,
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan(reader),
        redirect_slashes=False,
    )
    app.include_router(api.routes(reader))
    app.include_router(pages.routes(reader, store_words))
    app.add_exception_handler(RequestValidationError, _not_understood)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(SpecError, _not_here)
    app.add_exception_handler(StoreError, _no_answer)
    app.add_exception_handler(Exception, _bug)
    return Guard(app, door)


def _lifespan(reader: Reader) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def alive(_app: FastAPI) -> AsyncIterator[None]:
        compile_templates()
        anyio.to_thread.current_default_thread_limiter().total_tokens = AT_ONCE
        yield
        reader.close()

    return alive


def _not_understood(request: Request, error: Exception) -> Response:
    told = "; ".join(
        f"{'.'.join(map(str, one['loc'][1:])) or 'the address'}: {one['msg']}"
        for one in cast("RequestValidationError", error).errors()
    )
    return answer(request.url.path, 422, Fault(told, "mend the address; /api/openapi.json says what each one takes"))


def _refused(request: Request, error: Exception) -> Response:
    refused = cast("HTTPException", error)
    if refused.status_code == 404:
        fault = Fault(f"nothing stands at {request.url.path}", "go back to the list of sweeps, at /")
    elif refused.status_code == 405:
        fault = Fault(f"{request.method} is not served here", "ask with GET: this server only reads")
    else:
        fault = Fault(str(refused.detail), "mend the request")
    return answer(request.url.path, refused.status_code, fault, dict(refused.headers or {}))


def _not_here(request: Request, error: Exception) -> Response:
    found = cast("SpecError", error)
    return answer(request.url.path, 404, Fault(found.message, found.remedy))


def _no_answer(request: Request, error: Exception) -> Response:
    found = cast("StoreError", error)
    return answer(request.url.path, 503, Fault(found.message, found.remedy), {"retry-after": "5"})


def _bug(request: Request, _error: Exception) -> Response:
    return answer(request.url.path, 500, Fault("this is a bug in assay", "see what the server has printed"))
