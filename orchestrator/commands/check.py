"""`assay check`: a check run opened when a sweep is submitted, with a deadline, and closed whatever becomes of it.

That one is open stands as an event in the store before GitHub hears of it: `--overdue` finds it after any crash.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from typing import Annotated, Final

import typer

from jobs.errors import SpecError
from jobs.store import Store
from orchestrator.commands.comment import ApiOption, HeadOption, MustOption, OptionalId, RepositoryOption
from orchestrator.commands.shown import shown
from orchestrator.commands.terminal import JsonOption, StoreOption, now, open_store, say, say_json, settings_for
from orchestrator.posting import NOT_POSTED, attempt, code, github, head_of, planned_commits, repository, summarise
from orchestrator.settings import Settings
from orchestrator.stop import StopFlag, pause
from reports.publish.check import TITLE_LIMIT, Check, Conclusion, conclusion_of, put
from reports.render import render

DEADLINE_S: Final = 6 * 3600.0
WAIT_S: Final = 2.0
KIND: Final = "check"
OPEN: Final = "open"


@dataclass(frozen=True, slots=True)
class Kept:
    """A check run as the store knows it; `closed` is its conclusion, empty while it is open."""

    head: str
    name: str
    deadline: str
    closed: str = ""

    def is_overdue(self, at: datetime) -> bool:
        """Whether its time is over."""
        return at >= datetime.fromisoformat(self.deadline)


def add_to(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check")(check)


def check(
    sweep: OptionalId = None,
    *,
    repo: RepositoryOption,
    head: HeadOption = None,
    name: Annotated[str, typer.Option("--name", help="of the check, as a branch rule requires it")] = "assay",
    deadline_s: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=1, help="after which an open one is closed")
    ] = DEADLINE_S,
    wait: Annotated[bool, typer.Option("--wait", help="wait for verdict or deadline, and close it")] = False,
    overdue: Annotated[bool, typer.Option("--overdue", help="close all that are judged or late")] = False,
    api_url: ApiOption = None,
    must_post: MustOption = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Open the check run of a sweep's commit, or close it: with the verdict, or when its deadline is over.

    Says how each stands. The token is GITHUB_TOKEN or GH_TOKEN of the environment. The exit code is no verdict.
    """
    place, given = repository(repo), settings_for(store)
    if (sweep is None) != overdue:
        raise SpecError("a check is of one sweep", "give a sweep's ID, or --overdue for those of all that are due")
    opened, stop = open_store(given), StopFlag(polls=True)
    board = Board(opened, given, api_url, place)
    try:
        if sweep is None:
            rows = [board.bring(sweep_id, kept) for sweep_id, kept in board.due()]
        else:
            sweep_id = opened.resolve_id(sweep, "swp")
            kept = board.of(sweep_id, head, name, deadline_s)
            rows = [board.bring(sweep_id, kept)]
            if wait and rows[0].stands == OPEN:
                _wait(opened, sweep_id, kept, stop)
                rows = [board.bring(sweep_id, kept, gone=stop())]
    finally:
        opened.close()
    if as_json:
        say_json([asdict(row) for row in rows])
    else:
        say(
            "\n".join(
                f"check {row.name} of {row.sweep}: {row.stands}, {row.url or 'which was not posted'}" for row in rows
            )
            or "none is due"
        )
    failed = must_post and any(row.why for row in rows)
    raise typer.Exit(128 + stop.number if stop() else NOT_POSTED if failed else 0)


def _wait(store: Store, sweep_id: str, kept: Kept, stop: StopFlag) -> None:
    """Until the sweep is judged, the deadline is over or somebody ends it, whichever comes first."""
    with stop.listening():
        while store.sweep(sweep_id).state == "open" and not kept.is_overdue(now()) and not stop():
            pause(WAIT_S, stop)


@dataclass(frozen=True, slots=True)
class Row:
    """How a check stands: its conclusion or OPEN, and `why` it could not be told to GitHub."""

    sweep: str
    head: str
    name: str
    stands: str
    url: str
    why: str


@dataclass(frozen=True, slots=True)
class Board:
    """The check runs of one repository, as a store knows them."""

    store: Store
    given: Settings
    api_url: str | None
    repository: str

    def of(self, sweep_id: str, head: str | None, name: str, deadline_s: float) -> Kept:
        """The check of a sweep: as it was opened, else a new one with a deadline from now on."""
        head = head_of(planned_commits(self.store.manifest(sweep_id)), head)
        fresh = Kept(head, name, (now() + timedelta(seconds=deadline_s)).isoformat(timespec="seconds"))
        return self._known().get((sweep_id, head, name), fresh)

    def due(self) -> list[tuple[str, Kept]]:
        """Open checks that are to be closed: their sweep is judged, or their time is over."""
        at = now()
        return [
            (sweep_id, kept)
            for (sweep_id, _, _), kept in self._known().items()
            if not kept.closed and (kept.is_overdue(at) or self.store.sweep(sweep_id).state == "judged")
        ]

    def bring(self, sweep_id: str, kept: Kept, *, gone: bool = False) -> Row:
        """Open or close a check run as its sweep now stands. `gone`: nobody waits for it any more."""
        conclusion, title, text = self._standing(sweep_id, kept, gone)
        if conclusion is None:
            self._keep(sweep_id, kept)
        summarise(self.given, lambda _limit: f"assay: check {code(kept.name)}: {conclusion or OPEN}: {code(title)}")
        check = Check(self.repository, kept.head, kept.name, sweep_id, conclusion, title, text)
        url, why = attempt(self.given, lambda: self._put(check))
        if conclusion is not None and url is not None:  # one that is not closed at GitHub's is due again
            self._keep(sweep_id, replace(kept, closed=conclusion))
        return Row(sweep_id, kept.head, kept.name, conclusion or OPEN, url or "", why)

    def _standing(self, sweep_id: str, kept: Kept, gone: bool) -> tuple[Conclusion | None, str, Callable[[int], str]]:
        verdict = self.store.verdict(sweep_id) if self.store.sweep(sweep_id).state == "judged" else None
        if verdict is not None:
            title = shown(f"{verdict.outcome}: {verdict.headline}", TITLE_LIMIT)
            words = self.given.store_words
            return conclusion_of(verdict), title, lambda limit: render(verdict, "comment", limit=limit, store=words)
        left = self.store.pending(sweep_id)
        said = f"{left.pending} of {left.runs} runs pending"
        if kept.is_overdue(now()):
            return _without("timed_out", f"no verdict by {kept.deadline}: {said}")
        if gone:
            return _without("cancelled", f"waiting for the verdict was ended: {said}")
        return _without(None, f"{said}; without a verdict it closes at {kept.deadline}")

    def _known(self) -> dict[tuple[str, str, str], Kept]:
        known = {}
        for event in self.store.events_about(f"{KIND}:{self.repository}", KIND):
            kept = Kept(**json.loads(event.message))
            known[event.sweep_id, kept.head, kept.name] = kept
        return known

    def _keep(self, sweep_id: str, kept: Kept) -> None:
        if self._known().get((sweep_id, kept.head, kept.name)) != kept:
            message = json.dumps(asdict(kept), sort_keys=True)
            self.store.log_event(sweep_id, KIND, message, subject=f"{KIND}:{self.repository}")

    def _put(self, check: Check) -> str:
        with github(self.given, self.api_url) as api:
            return put(api, check)


def _without(conclusion: Conclusion | None, said: str) -> tuple[Conclusion | None, str, Callable[[int], str]]:
    """A check that has no verdict to show."""
    return conclusion, said, lambda _limit: f"{said}."
