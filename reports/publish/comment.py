"""The one comment of a sweep on a pull request: found again by marker and author, brought up to date in place.

Which of several stands is decided by rank: one about the commit that the pull request now has, then the sweep submitted
later (ids are ULIDs). Every write is looked at afterwards, and made again if one of lower rank came in between, so that
two who post at once end with one comment, the one of higher rank. GitHub offers no conditional write: one who is held
up between reading and writing for longer than the others look can still leave the older text.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

from reports.publish.api import GitHub, Gone, PublishError, Unprocessable, field, listed, number
from reports.render import COMMENT_FLOOR, COMMENT_LIMIT

STAMP: Final = re.compile(r"<!-- assay:posted sweep=(swp_[0-9a-z]+) head=([0-9a-f]{40,64}) digest=([0-9a-f]{16}) -->")
SHORTER: Final = (COMMENT_LIMIT, 48_000, 24_000, 12_000, 6_000, 2_500)
SETTLE_S: Final = 2.0
ROUNDS: Final = 6


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Where to post: `repository` is OWNER/NAME."""

    repository: str
    number: int


@dataclass(frozen=True, slots=True)
class Letter:
    """What to post: `render` gives the comment in at most so many characters, its first line `marker`."""

    sweep_id: str
    head: str
    marker: str
    render: Callable[[int], str]

    def text(self, limit: int, current: str) -> tuple[str, str]:
        """The comment in at most `limit` characters for a pull request that stands at `current`, and its digest."""
        banner = "" if self.head == current else _stale(self.head, current)
        digest = hashlib.sha256((banner + self.render(COMMENT_LIMIT)).encode()).hexdigest()[:16]
        stamp = f"<!-- assay:posted sweep={self.sweep_id} head={self.head} digest={digest} -->"
        room = limit - len(f"{stamp}\n{banner}")
        marker, rest = self.render(max(room, COMMENT_FLOOR)).split("\n", 1)
        return f"{marker}\n{stamp}\n{banner}{rest}", digest


@dataclass(frozen=True, slots=True)
class Posted:
    """What became of a letter: `superseded` where a comment of higher rank stands and was left alone."""

    state: Literal["created", "updated", "unchanged", "superseded"]
    id: int
    url: str
    digest: str


@dataclass(frozen=True, slots=True)
class _Found:
    id: int
    url: str
    author: str
    sweep_id: str
    head: str
    digest: str

    def rank(self, current: str) -> tuple[bool, str, int]:
        return self.head == current, self.sweep_id, -self.id


def post(api: GitHub, where: PullRequest, letter: Letter, author: str = "") -> Posted:
    """Create or update the comment until it stands alone. `author` is who the token posts as; asked for where empty.

    Raises PublishError.
    """
    author = author or api.login()
    state: Literal["created", "updated", "unchanged"] = "unchanged"
    for _ in range(ROUNDS):
        current = _head_of(api, where)
        found = sorted(_mine(api, where, letter.marker, author), key=lambda one: one.rank(current), reverse=True)
        _, digest = letter.text(COMMENT_LIMIT, current)
        if found:
            best = found[0]
            is_ours = (best.sweep_id, best.head, best.digest) == (letter.sweep_id, letter.head, digest)
            if is_ours or best.rank(current)[:2] > (letter.head == current, letter.sweep_id):
                _delete(api, where, found[1:])
                return Posted(state if is_ours else "superseded", best.id, best.url, digest)
        try:
            written = _write(api, where, letter, current, found[0].id if found else None)
        except Gone:  # deleted since it was read: the next round creates one
            if not found:
                raise
            continue
        author = written.author or author  # a token of another app posts under another name than was thought
        state = "created" if not found or state == "created" else "updated"
        api.sleep(SETTLE_S)
    raise PublishError(f"{where.repository}#{where.number}: others kept writing the same comment", "post again later")


def _head_of(api: GitHub, where: PullRequest) -> str:
    """The commit that the pull request now has."""
    return str(field(api.call("GET", f"repos/{where.repository}/pulls/{where.number}"), "head", "sha"))


def _mine(api: GitHub, where: PullRequest, marker: str, author: str) -> list[_Found]:
    """Comments that begin with our marker and are ours; one that quotes it, or is somebody else's, is not."""
    found = []
    for page in api.pages(f"repos/{where.repository}/issues/{where.number}/comments"):
        for one in listed(page):
            comment = _found(one)
            first = (one.get("body") or "").split("\n", 1)[0].rstrip()
            if first == marker and comment.author.lower() == author.lower():
                found.append(comment)
    return found


def _found(document: Any) -> _Found:
    second = [*(document.get("body") or "").splitlines()[1:2], ""][0]
    stamp = STAMP.fullmatch(second.rstrip())
    author = str((document.get("user") or {}).get("login", ""))  # an account that was removed is null
    parts = stamp.groups() if stamp else ("", "", "")
    return _Found(number(document, "id"), str(document.get("html_url", "")), author, *parts)


def _write(api: GitHub, where: PullRequest, letter: Letter, current: str, existing: int | None) -> _Found:
    """Write the text, ever shorter while it is refused."""
    method, path = "POST", f"repos/{where.repository}/issues/{where.number}/comments"
    if existing is not None:
        method, path = "PATCH", f"repos/{where.repository}/issues/comments/{existing}"
    return _found(ever_shorter(lambda limit: api.call(method, path, {"body": letter.text(limit, current)[0]})))


def ever_shorter(send: Callable[[int], Any]) -> Any:
    """What `send` gives for the longest text, in characters, that is taken. Raises Unprocessable when none is."""
    for limit in SHORTER:
        with suppress(Unprocessable):
            return send(limit)
    return send(COMMENT_FLOOR)


def _delete(api: GitHub, where: PullRequest, extra: list[_Found]) -> None:
    for one in extra:
        with suppress(Gone):
            api.call("DELETE", f"repos/{where.repository}/issues/comments/{one.id}")


def _stale(measured: str, current: str) -> str:
    return (
        f"> [!WARNING]\n> Measured at commit `{measured[:12]}`; the pull request now stands at `{current[:12]}`, about "
        "which this says nothing.\n\n"
    )
