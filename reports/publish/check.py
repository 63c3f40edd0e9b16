"""A check run of a commit: opened when a sweep is submitted, with a deadline, and closed whatever becomes of the sweep.

GitHub lets `neutral` and `skipped` pass a required check, so no answer is `action_required` and never one of those;
only what a sweep itself asks to be advice is `neutral`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from jobs.verdict import Verdict
from reports.publish.api import GitHub, field, listed, number
from reports.publish.comment import ever_shorter
from reports.render import COMMENT_FLOOR

Conclusion = Literal["success", "failure", "neutral", "action_required", "timed_out", "cancelled"]
TITLE_LIMIT: Final = 255  # and a summary may have one character less than a comment
_PASSED: Final = {"PASS", "IMPROVED", "DECLARED", "WAIVED"}
_UNPROVEN: Final = {"VACUOUS", "NOT_COMPARABLE"}  # something was measured, and it shows that nothing was proven


@dataclass(frozen=True, slots=True)
class Check:
    """A check run as it should stand; `conclusion` is None while it is open.

    `text` gives its summary in at most so many characters.
    """

    repository: str
    head: str
    name: str
    sweep_id: str
    conclusion: Conclusion | None
    title: str
    text: Callable[[int], str]


def conclusion_of(verdict: Verdict) -> Conclusion:
    """What a verdict is to a required check."""
    if verdict.exit_code == 0:
        return "success" if verdict.outcome in _PASSED else "neutral"
    if verdict.exit_code in (1, 2) or verdict.outcome in _UNPROVEN:
        return "failure"
    return "action_required"


def put(api: GitHub, check: Check) -> str:
    """Bring the check run of this sweep at this commit to how it should stand; its address.

    One that is closed is not opened again, and of several of the same sweep all are closed. Raises PublishError.
    """
    found = _of_sweep(api, check)
    if check.conclusion is None and found:
        return str(found[-1].get("html_url", ""))
    paths = [("PATCH", f"repos/{check.repository}/check-runs/{number(one, 'id')}") for one in found]
    url = ""
    for method, path in paths or [("POST", f"repos/{check.repository}/check-runs")]:
        written = ever_shorter(partial(_send, api, method, path, check))
        url = str(written.get("html_url", ""))
    return url


def _send(api: GitHub, method: str, path: str, check: Check, limit: int) -> Any:
    return api.call(method, path, _document(check, limit))


def _of_sweep(api: GitHub, check: Check) -> list[Any]:
    pages = api.pages(f"repos/{check.repository}/commits/{check.head}/check-runs", check_name=check.name, filter="all")
    return [
        one for page in pages for one in listed(field(page, "check_runs")) if one.get("external_id") == check.sweep_id
    ]


def _document(check: Check, limit: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "name": check.name,
        "head_sha": check.head,  # of use where one is created, and passed over in an update
        "external_id": check.sweep_id,
        "output": {"title": check.title[:TITLE_LIMIT], "summary": check.text(max(limit - 1, COMMENT_FLOOR))},
    }
    if check.conclusion is None:
        return document | {"status": "in_progress"}
    return document | {"status": "completed", "conclusion": check.conclusion}
