"""What `assay comment` and `assay check` share: what is posted, about which commit, with which token, how it failed.

A failed post is told and written into the job's summary; the exit code stays 0 unless the caller asks otherwise, since
a job must not end red for that alone.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

from pydantic import ValidationError

from jobs.errors import SpecError
from jobs.model import Manifest
from jobs.verdict import Verdict, tested_arms
from orchestrator.commands.shown import MOST_OF_AN_ERROR, shown
from orchestrator.settings import Settings
from reports.escape import markdown_code
from reports.publish import summary
from reports.publish.api import DEFAULT_URL, GitHub, PublishError

TOKENS: Final = ("GITHUB_TOKEN", "GH_TOKEN")
NOT_POSTED: Final = 4
MOST_OF_A_FILE: Final = 1 << 28
_SHA: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SWEEP: Final = re.compile(r"swp_[0-9a-z]{1,40}")
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}/(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}")
Done = TypeVar("Done")


@contextmanager
def github(given: Settings, api_url: str | None) -> Iterator[GitHub]:
    """A connection with the token of the environment, which is read here and kept nowhere. Raises PublishError."""
    token = next((given.environ[name].strip() for name in TOKENS if given.environ.get(name, "").strip()), "")
    url = api_url or given.environ.get("GITHUB_API_URL", "") or DEFAULT_URL
    api = GitHub(url, token, sleep=time.sleep, clock=time.time)
    try:
        yield api
    finally:
        api.close()


def attempt(given: Settings, action: Callable[[], Done]) -> tuple[Done | None, str]:
    """What an action that posts gives, or why it failed: told on stderr and in the job's summary, and no error."""
    try:
        return action(), ""
    except PublishError as error:
        why = shown(str(error), MOST_OF_AN_ERROR)
    in_actions = given.environ.get("GITHUB_ACTIONS") == "true"
    sys.stderr.write(f"{'::warning title=assay::' if in_actions else 'warning: '}not posted: {why}\n")
    summarise(given, lambda _limit: f"assay: not posted: {code(why)}")
    return None, why


def summarise(given: Settings, render: Callable[[int], str]) -> None:
    """Add to the summary of the job, where there is one: before a post, so that it is there whatever follows."""
    path = given.environ.get("GITHUB_STEP_SUMMARY", "")
    if not path:
        return
    try:
        summary.append(Path(path), render)
    except OSError as error:
        sys.stderr.write(f"warning: no summary of the job: {shown(str(error))}\n")


def code(text: str) -> str:
    """One line of text as Markdown code, in which nothing pings or links."""
    return markdown_code(shown(text, MOST_OF_AN_ERROR), limit=MOST_OF_AN_ERROR)


def repository(name: str) -> str:
    """OWNER/NAME as given. Raises SpecError for anything else: it becomes a part of an address."""
    if not _REPOSITORY.fullmatch(name):
        raise SpecError(f"--repo {name!r} names no repository", "give OWNER/NAME, or set GITHUB_REPOSITORY")
    return name


def verdict_in(path: Path) -> Verdict:
    """A verdict from a file that anybody may have written: bounded, no link, checked against its schema.

    Raises SpecError, without a word of what the file holds.
    """
    if path.is_symlink() or not path.is_file():
        raise SpecError(f"--verdict {path} is no file", "name the verdict.json that assay run wrote")
    if path.stat().st_size > MOST_OF_A_FILE:
        raise SpecError(f"--verdict {path} is larger than {MOST_OF_A_FILE >> 20} MiB", "name a verdict.json")
    try:
        verdict = Verdict.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"][:3])
        raise SpecError(
            f"--verdict {path} is no verdict of this version: {where or 'the file'}: {first['type']}",
            "name the verdict.json that assay run wrote",
        ) from None
    if not _SWEEP.fullmatch(verdict.stamp.sweep_id):
        raise SpecError(f"--verdict {path} names no sweep", "name the verdict.json that assay run wrote")
    return verdict


def planned_commits(manifest: Manifest) -> set[str]:
    """Commits of the arms under test, as a manifest has them."""
    return {arm.commit for arm in tested_arms(manifest.arms) if arm.commit}


def judged_commits(verdict: Verdict) -> set[str]:
    """Commits of the arms under test, as a verdict has them."""
    return {arm.commit for cell in verdict.cells for arm in tested_arms(cell.arms) if arm.commit}


def head_of(commits: set[str], given: str | None, *, exactly: bool = False) -> str:
    """The commit that a post is about: what was measured, which `given` must be.

    `exactly`: a verdict that says no commit, or one with changes on top, is refused too. Raises SpecError.
    """
    if given is None:
        if len(commits) != 1 or not _SHA.fullmatch(one := next(iter(commits))):
            said = f"the sweep names {', '.join(sorted(commits)) or 'no commit'} as head"
            raise SpecError(said, "say which commit the post is about: --head SHA")
        return one
    if not _SHA.fullmatch(given):
        raise SpecError(f"--head {given!r} is no full commit id", "give all its digits, in lower case")
    known = commits if exactly else {commit.removesuffix("-dirty") for commit in commits}
    if (exactly or known) and known != {given}:
        said = f"--head {given} is not what was measured, which is {', '.join(sorted(commits)) or 'no commit'}"
        raise SpecError(said, "measure that commit: check it out itself, and not its merge with the base branch")
    return given
