"""GitHub's REST API as far as publishing needs it: a call, its retries, its pages, and in words why it was refused.

Limits by GitHub's own guide to its REST API: a secondary limit says with Retry-After how long to wait, else a minute; a
primary one says with X-RateLimit-Reset until when.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import httpx
import tenacity

from jobs.errors import JobsError, SpecError
from jobs.redact import HIDDEN, redact
from reports.escape import clip

DEFAULT_URL: Final = "https://api.github.com"
ACTIONS_BOT: Final = "github-actions[bot]"  # who a job's own token posts as; it may not ask for its name
PATIENCE_S: Final = 180.0
ATTEMPTS: Final = 6
SECONDARY_LIMIT_S: Final = 60.0
TIMEOUT_S: Final = 20.0
PAGE: Final = 100
_LOCAL: Final = {"localhost", "127.0.0.1", "::1"}
_BACKOFF: Final = tenacity.wait_exponential_jitter(initial=1, max=30)


class PublishError(JobsError):
    """Nothing was posted, and why. No verdict and no gate depends on it."""


class Unavailable(PublishError):
    """GitHub is away, or wants us to wait: `after_s` says how long where it said so."""

    def __init__(self, message: str, after_s: float | None = None) -> None:
        wait = "" if after_s is None else f"it asks to wait {after_s:.0f} s; "
        super().__init__(message, f"{wait}post again later")
        self.after_s = after_s


class Refused(PublishError):
    """The token may not do this, or the place has moved."""


class Gone(PublishError):
    """There is no such thing, or the token may not see it."""


class Unprocessable(PublishError):
    """GitHub does not take this text: most often it is too long."""


class GitHub:
    """One connection. `sleep` and `clock` (seconds since the epoch) are the caller's; the token is never shown."""

    def __init__(self, url: str, token: str, *, sleep: Callable[[float], None], clock: Callable[[], float]) -> None:
        self._client = httpx.Client(
            base_url=checked_url(url),
            timeout=TIMEOUT_S,
            headers={
                "Authorization": f"Bearer {checked_token(token)}",
                "Accept": "application/vnd.github+json",
                "X-GitHub-Api-Version": "2022-11-28",
                "User-Agent": "assay",
            },
        )
        self._token = token
        self._clock = clock
        self.sleep = sleep

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def call(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> Any:
        """One request, made again while GitHub is away or asks to wait; the document it answers, None without one.

        A POST that seemed to fail may have been taken, so that a second one makes two: who creates looks afterwards.
        Raises PublishError.
        """
        return _document(self._send(method, path, json=document))

    def pages(self, path: str, **asked: str) -> Iterator[Any]:
        """Every page of a listing, to the last one. Raises PublishError."""
        response = self._send("GET", path, params={"per_page": str(PAGE), **asked})
        while True:
            yield _document(response)
            following = response.links.get("next", {}).get("url")
            if following is None:
                return
            if _origin(httpx.URL(following)) != _origin(self._client.base_url):  # it would be sent the token
                raise Refused(f"the next page of {path} is on another host", "look at --api-url")
            response = self._send("GET", following)

    def login(self) -> str:
        """Who the token posts as. A job's own token may not ask, and posts as the bot of GitHub Actions."""
        try:
            return str(field(self.call("GET", "user"), "login"))
        except Refused:
            return ACTIONS_BOT

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unavailable),
            wait=_wait,
            stop=tenacity.stop_after_attempt(ATTEMPTS) | tenacity.stop_before_delay(PATIENCE_S),
            sleep=self.sleep,
            reraise=True,
        )
        response: httpx.Response = retrying(self._once, method, path, **more)
        return response

    def _once(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            response = self._client.request(method, path, **more)
        except httpx.InvalidURL as error:
            raise Refused(f"{method} {path}: {error}", "look at --api-url and --repo") from None
        except httpx.HTTPError as error:
            raise Unavailable(self._safe(f"{method} {path}: {str(error) or type(error).__name__}")) from None
        if response.is_success:
            return response
        raise self._failure(response, f"{method} {path}")

    def _failure(self, response: httpx.Response, what: str) -> PublishError:
        status = response.status_code
        told = self._safe(_told(response))
        said = f"{what}: {status} {told}".rstrip()
        if status >= 500:
            return Unavailable(said)
        if status == 429 or (status == 403 and _is_limit(response, told)):
            return Unavailable(said, self._after_s(response))
        if status in (401, 403):
            needed = self._safe(response.headers.get("x-accepted-github-permissions", ""))
            grant = f"it needs {needed}" if needed else "comments need pull-requests: write, checks need checks: write"
            return Refused(said, f"{grant}; a fork's token is never given either: post from a step that trusts no code")
        if status in (404, 410):
            return Gone(said, "look at --repo and the number, and whether the token may see it")
        if status in (413, 422):
            return Unprocessable(said, "the whole report stands in the store: assay report")
        return Refused(said, "look at --repo: a repository that was renamed has to be given by its new name")

    def _after_s(self, response: httpx.Response) -> float:
        given, until = response.headers.get("retry-after", ""), response.headers.get("x-ratelimit-reset", "")
        if given.isdecimal():
            return float(given)
        if response.headers.get("x-ratelimit-remaining") == "0" and until.isdecimal():
            return max(1.0, float(until) - self._clock())
        return SECONDARY_LIMIT_S

    def _safe(self, text: str) -> str:
        return redact(text.replace(self._token, HIDDEN))


def field(document: Any, *names: str) -> Any:
    """What stands under these names, one within the other. Raises Refused where an answer lacks it."""
    for name in names:
        if not isinstance(document, dict) or name not in document:
            raise Refused(f"an answer lacks {'.'.join(names)}, so this is no API of GitHub's", "look at --api-url")
        document = document[name]
    return document


def number(document: Any, name: str) -> int:
    """The whole number of this name. Raises Refused where there is none."""
    found = field(document, name)
    if not isinstance(found, int):
        raise Refused(f"an answer's {name} is no number, so this is no API of GitHub's", "look at --api-url")
    return found


def listed(document: Any) -> list[dict[str, Any]]:
    """The objects of a listing. Raises Refused where it is none."""
    if not isinstance(document, list) or not all(isinstance(one, dict) for one in document):
        raise Refused("an answer is no list of objects, so this is no API of GitHub's", "look at --api-url")
    return document


def checked_url(url: str) -> str:
    """An API's address with a slash at its end. Raises SpecError for one over which a token would be readable."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.userinfo or parsed.query or parsed.fragment:
        raise SpecError(f"--api-url {redact(url)!r} is no address of an API", f"give one such as {DEFAULT_URL}")
    if parsed.scheme == "http" and parsed.host not in _LOCAL:
        raise SpecError(f"--api-url {url!r}: a token does not go over http", "give an https address")
    return url.rstrip("/") + "/"


def checked_token(token: str) -> str:
    """A token as a header can hold it. Raises Refused, without showing it."""
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        why = "is not one" if token else "is not set"
        raise Refused(f"the token in the environment {why}", "set GITHUB_TOKEN or GH_TOKEN; a fork's job has none")
    return token


def _wait(state: tenacity.RetryCallState) -> float:
    failure = state.outcome.exception() if state.outcome is not None else None
    asked = failure.after_s if isinstance(failure, Unavailable) else None
    return _BACKOFF(state) if asked is None else asked


def _is_limit(response: httpx.Response, told: str) -> bool:
    headers = response.headers
    return "retry-after" in headers or headers.get("x-ratelimit-remaining") == "0" or "rate limit" in told.lower()


def _told(response: httpx.Response) -> str:
    try:
        document = response.json()
    except ValueError:
        return ""
    return clip(str(document.get("message", "")), 300) if isinstance(document, dict) else ""


def _document(response: httpx.Response) -> Any:
    if not response.content:
        return None
    try:
        return response.json()
    except ValueError:
        raise Refused("the answer is no JSON, so this is no API of GitHub's", "look at --api-url") from None


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
