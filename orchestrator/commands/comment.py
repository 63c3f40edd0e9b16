"""`assay comment`: the comment of a pull request, kept up to date, and the summary of the job."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Annotated

import typer

from jobs.errors import JobsError, SpecError
from jobs.store import Store
from jobs.verdict import Verdict
from orchestrator.commands.sweeps import stored_verdict
from orchestrator.commands.terminal import JsonOption, StoreOption, open_store, say, say_json, settings_for
from orchestrator.posting import (
    NOT_POSTED,
    attempt,
    code,
    github,
    head_of,
    judged_commits,
    repository,
    summarise,
    verdict_in,
)
from orchestrator.settings import Settings
from reports.publish.comment import Letter, Posted, PullRequest, post
from reports.render import COMMENT_FLOOR, marker, render

OptionalId = Annotated[str | None, typer.Argument(metavar="ID", help="a sweep's id or a unique beginning of it")]
RepositoryOption = Annotated[
    str, typer.Option("--repo", metavar="OWNER/NAME", envvar="GITHUB_REPOSITORY", help="where to post")
]
HeadOption = Annotated[
    str | None, typer.Option("--head", metavar="SHA", help="the commit it is about; refused if another was measured")
]
VerdictOption = Annotated[
    Path | None,
    typer.Option("--verdict", metavar="FILE", help="a verdict.json in place of ID, from anybody; needs --head"),
]
ApiOption = Annotated[
    str | None,
    typer.Option("--api-url", metavar="URL", help="of GitHub's API (default: GITHUB_API_URL, or github.com's)"),
]
MustOption = Annotated[bool, typer.Option("--must-post", help="exit 4 when it could not be posted, in place of 0")]
FROM_A_FILE = (
    "> [!NOTE]\n> Read from a file that a job left which ran the change's own code. The gate is that job's exit code, "
    "and this its account.\n\n"
)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("comment")(comment)


def comment(
    sweep: OptionalId = None,
    *,
    repo: RepositoryOption,
    number: Annotated[int, typer.Option("--pr", metavar="N", min=1, help="the pull request")],
    head: HeadOption = None,
    verdict_file: VerdictOption = None,
    report_url: Annotated[str | None, typer.Option("--report-url", metavar="URL", help="of the full report")] = None,
    author: Annotated[
        str, typer.Option("--author", metavar="LOGIN", help="who the token posts as (default: GitHub is asked)")
    ] = "",
    api_url: ApiOption = None,
    must_post: MustOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Post a verdict on a pull request, in the one comment that it has there, and in the job's summary.

    The token is GITHUB_TOKEN or GH_TOKEN of the environment. The exit code is no verdict: 0 also when posting failed.
    """
    where = PullRequest(repository(repo), number)
    given = settings_for(store)
    if (sweep is None) == (verdict_file is None):
        raise SpecError("a comment shows one verdict", "give a sweep's ID, or --verdict FILE")
    opened = open_store(given) if sweep is not None else None
    try:
        letter = _letter(opened, sweep, verdict_file, head, report_url, given)
        summarise(given, letter.render)
        posted, why = attempt(given, lambda: _post(given, api_url, where, letter, author))
        if posted is not None and posted.state != "superseded" and opened is not None:
            opened.write_comment(letter.sweep_id, where.repository, number, str(posted.id), posted.digest)
    except JobsError as error:
        said = f"assay: no comment: {code(str(error))}"
        summarise(given, lambda _limit: said)
        raise
    finally:
        if opened is not None:
            opened.close()
    _say(posted, why, as_json)
    raise typer.Exit(NOT_POSTED if must_post and posted is None else 0)


def _letter(
    store: Store | None, sweep: str | None, file: Path | None, head: str | None, report_url: str | None, given: Settings
) -> Letter:
    if store is not None and sweep is not None:
        verdict = stored_verdict(store, store.resolve_id(sweep, "swp"), given)
        return _written(verdict, head_of(judged_commits(verdict), head), report_url, given.store_words, "")
    assert file is not None
    if head is None:
        raise SpecError("--verdict needs --head", "say which commit was approved: --head SHA")
    verdict = verdict_in(file)
    return _written(verdict, head_of(judged_commits(verdict), head, exactly=True), report_url, "", FROM_A_FILE)


def _written(verdict: Verdict, head: str, report_url: str | None, store_words: str, banner: str) -> Letter:
    @cache  # of a large sweep each length takes part of a second, and the same is asked for again after each write
    def text(limit: int) -> str:
        most = max(limit - len(banner), COMMENT_FLOOR)
        shown = render(verdict, "comment", limit=most, report_url=report_url, store=store_words)
        first, rest = shown.split("\n", 1)
        return f"{first}\n{banner}{rest}"

    return Letter(verdict.stamp.sweep_id, head, marker(verdict), text)


def _post(given: Settings, api_url: str | None, where: PullRequest, letter: Letter, author: str) -> Posted:
    with github(given, api_url) as api:
        return post(api, where, letter, author)


def _say(posted: Posted | None, why: str, as_json: bool) -> None:
    if as_json:
        say_json({"posted": posted is not None, "why": why, **(asdict(posted) if posted else {})})
    elif posted is not None:
        newer = ": one of a newer commit or a later sweep stands there" if posted.state == "superseded" else ""
        say(f"comment {posted.state}{newer}: {posted.url}")
