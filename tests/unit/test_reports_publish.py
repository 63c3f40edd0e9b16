"""Posting against a GitHub that pages, forgets, refuses, limits and lets two post at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import MappingProxyType

import pytest

from jobs.errors import SpecError
from jobs.verdict import Verdict
from reports.publish import comment as posting
from reports.publish.api import GitHub, Gone, PublishError, Refused, Unavailable, Unprocessable
from reports.publish.check import Check, conclusion_of, put
from reports.publish.comment import Letter, PullRequest, post
from reports.render import COMMENT_FLOOR, COMMENT_LIMIT, comment_length, marker, render
from tests.unit import reports_samples as samples
from tests.unit.fake_github import BOT, JOB_TOKEN, NEW, OLD, REPOSITORY, FakeGitHub, Fault
from tests.unit.reports_parsing import markdown

WHERE = PullRequest(REPOSITORY, 7)
FIRST, SECOND = "swp_01jb2m3n4p5q6r7s8t9v0w1x2y", "swp_01jb9m3n4p5q6r7s8t9v0w1x2y"
VERDICT = samples.verdict()
MARKER = marker(VERDICT)
SECONDARY = "You have exceeded a secondary rate limit. Please wait a few minutes before you try again."


@pytest.fixture
def server() -> Iterator[FakeGitHub]:
    with FakeGitHub() as fake:
        yield fake


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def api(server: FakeGitHub, slept: list[float]) -> Iterator[GitHub]:
    made = connect(server, slept)
    yield made
    made.close()


def connect(server: FakeGitHub, slept: list[float], token: str = JOB_TOKEN) -> GitHub:
    return GitHub(server.url, token, sleep=slept.append, clock=lambda: 1000.0)


def letter(verdict: Verdict = VERDICT, head: str = NEW, sweep: str = SECOND) -> Letter:
    return Letter(sweep, head, marker(verdict), cache(lambda limit: render(verdict, "comment", limit=limit)))


def rows(count: int) -> Verdict:
    emoji = "\U0001f468\u200d\U0001f469\u200d\U0001f467" * 20
    exact = tuple(
        samples.metric(f"counter_{place}_{emoji}", "count", place + 1, 2 * place + 3, "regressed")
        for place in range(count)
    )
    return samples.verdict(outcome="REGRESSED", exit_code=1, cells=(samples.cell(exact=exact, exit_code=1),))


# ---- the one comment ---------------------------------------------------------------------------------------------


def test_a_comment_is_created_then_updated_in_place(server: FakeGitHub, api: GitHub) -> None:
    first = post(api, WHERE, letter(sweep=FIRST))
    again = post(api, WHERE, letter(samples.broken(), sweep=SECOND))
    same = post(api, WHERE, letter(samples.broken(), sweep=SECOND))
    assert [one.state for one in (first, again, same)] == ["created", "updated", "unchanged"]
    assert first.id == again.id == same.id
    (body,) = server.of(BOT)
    assert body.startswith(f"{MARKER}\n<!-- assay:posted sweep={SECOND} head={NEW} digest={again.digest} -->\n")
    assert markdown(body).text.strip().startswith("🔴 VIOLATION")
    assert server.count("PATCH") == 1


@pytest.mark.parametrize(("place", "page_cap"), [(33, 30), (150, 100), (150, 30)])
def test_a_comment_is_found_on_any_page(server: FakeGitHub, api: GitHub, place: int, page_cap: int) -> None:
    server.page_cap = page_cap
    for index in range(1, 160):
        server.say(BOT if index == place else "octocat", f"{MARKER}\nold" if index == place else f"comment {index}")
    assert post(api, WHERE, letter()).state == "updated"
    assert len(server.of(BOT)) == 1
    assert server.comments[place - 1]["body"].startswith(f"{MARKER}\n<!-- assay:posted")


def test_a_marker_that_somebody_else_wrote_or_that_is_quoted_is_left_alone(server: FakeGitHub, api: GitHub) -> None:
    others = [f"{MARKER}\nmine", f"> {MARKER}\n> quoted", f"see:\n{MARKER}\n"]
    for body in others:
        server.say("mallory", body)
    server.say(BOT, f"> {MARKER}\n> what was said before")
    server.say(BOT, f"{MARKER.replace('smollm2', 'other')}\nanother sweep's")
    server.comments.append({"id": 5, "user": None, "body": None, "html_url": ""})
    assert post(api, WHERE, letter()).state == "created"
    assert server.of("mallory") == others
    assert len(server.of(BOT)) == 3


def test_a_comment_that_was_deleted_is_made_anew(server: FakeGitHub, api: GitHub) -> None:
    post(api, WHERE, letter(sweep=FIRST))
    server.comments.clear()
    assert post(api, WHERE, letter()).state == "created"
    assert len(server.of(BOT)) == 1


def test_a_comment_that_is_deleted_while_it_is_updated_is_made_anew(server: FakeGitHub, api: GitHub) -> None:
    post(api, WHERE, letter(sweep=FIRST))

    def delete(method: str, _path: str) -> None:
        if method == "PATCH":
            server.comments.clear()

    server.before = delete
    assert post(api, WHERE, letter()).state == "created"
    assert len(server.of(BOT)) == 1


@pytest.mark.parametrize("kept", ["same sweep", "two sweeps", "old head"])
def test_two_who_post_at_once_end_with_one_comment(server: FakeGitHub, slept: list[float], kept: str) -> None:
    """Both have read that there is none before either creates one."""
    both = threading.Barrier(2, timeout=20)
    met: set[int] = set()

    def hold(method: str, path: str) -> None:
        if method == "POST" and path.endswith("/comments") and threading.get_ident() not in met:
            met.add(threading.get_ident())
            both.wait()

    server.before = hold
    letters = {
        "same sweep": [letter(), letter()],
        "two sweeps": [letter(sweep=FIRST), letter(samples.broken())],
        "old head": [letter(head=OLD, sweep="swp_zz"), letter(samples.broken())],
    }[kept]
    ended: list[posting.Posted] = []

    def run(one: Letter) -> None:
        ended.append(post(connect(server, slept), WHERE, one))

    threads = [threading.Thread(target=run, args=(one,)) for one in letters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 2
    assert server.count("POST", "/comments") >= 2
    (body,) = server.of(BOT)
    assert f"sweep={SECOND} head={NEW}" in body
    assert "now stands at" not in body


def test_an_update_that_another_overwrote_is_made_again(server: FakeGitHub, api: GitHub) -> None:
    """One of a lower rank had read before we wrote, and writes after us."""
    old = letter(sweep=FIRST).text(COMMENT_LIMIT, NEW)[0]
    late = [old]

    def overwrite(method: str, path: str) -> None:
        if method == "GET" and path.endswith("/pulls/7") and server.of(BOT) and late:
            server.comments[0]["body"] = late.pop()

    server.before = overwrite
    assert post(api, WHERE, letter()).state == "created"
    assert late == []
    assert f"sweep={SECOND}" in server.of(BOT)[0]


def test_an_older_run_does_not_overwrite_a_newer_head(server: FakeGitHub, api: GitHub) -> None:
    newest = post(api, WHERE, letter(sweep=FIRST))
    stale = post(api, WHERE, letter(samples.broken(), head=OLD, sweep=SECOND))
    assert (stale.state, stale.id) == ("superseded", newest.id)
    assert f"head={NEW} digest={newest.digest}" in server.of(BOT)[0]
    server.head = "c" * 40  # neither is of the newest commit now: the sweep submitted later speaks, and says so
    assert post(api, WHERE, letter(samples.broken(), head=OLD, sweep=SECOND)).state == "updated"
    assert (
        "Measured at commit aaaaaaaaaaaa; the pull request now stands at cccccccccccc"
        in markdown(server.of(BOT)[0]).text
    )
    assert post(api, WHERE, letter(head=NEW, sweep=FIRST)).state == "superseded"


def test_an_older_sweep_of_the_same_commit_does_not_overwrite_a_later_one(server: FakeGitHub, api: GitHub) -> None:
    post(api, WHERE, letter(samples.broken(), sweep=SECOND))
    assert post(api, WHERE, letter(sweep=FIRST)).state == "superseded"
    assert "VIOLATION" in server.of(BOT)[0]


def test_a_token_of_an_app_that_may_not_ask_its_name_still_ends_with_one_comment(
    server: FakeGitHub, slept: list[float]
) -> None:
    """Taken for the bot of GitHub Actions, it learns from its first post who it is."""
    app = connect(server, slept, "app")
    assert [post(app, WHERE, letter(sweep=sweep)).state for sweep in (FIRST, SECOND)] == ["created", "created"]
    assert len(server.of("assay[bot]")) == 1
    assert f"sweep={SECOND}" in server.of("assay[bot]")[0]
    assert connect(server, slept, "human").login() == "octocat"


# ---- limits ------------------------------------------------------------------------------------------------------

SIZES = MappingProxyType({count: letter(rows(count)).render for count in (5, 500, 20_000)})


@pytest.mark.parametrize(
    ("count", "characters", "size_bytes"),
    [
        (5, 65_536, 10**9),
        (500, 65_536, 10**9),
        (20_000, 65_536, 10**9),
        (20_000, 10**9, 262_144),
        (500, 20_000, 30_000),
        pytest.param(5, 1100, 10**9, marks=pytest.mark.slow),
    ],
)
def test_field_74_a_rejected_post_is_retried_shorter(
    server: FakeGitHub, api: GitHub, count: int, characters: int, size_bytes: int
) -> None:
    server.most_characters, server.most_bytes = characters, size_bytes
    sized = Letter(SECOND, NEW, MARKER, SIZES[count])
    assert post(api, WHERE, sized).state == "created"
    (body,) = server.of(BOT)
    assert comment_length(body) <= characters
    assert len(body.encode()) <= size_bytes
    page = markdown(body)
    assert page.unbalanced == []
    assert "REGRESSED" in page.text[:200]
    url = put(api, replace(check(VERDICT), text=SIZES[count]))
    assert url == server.checks[0]["html_url"]
    assert comment_length(server.checks[0]["output"]["summary"]) < characters


def test_a_body_that_is_refused_at_every_length_says_so(server: FakeGitHub, api: GitHub) -> None:
    server.most_characters = COMMENT_FLOOR // 2
    with pytest.raises(Unprocessable, match="too long"):
        post(api, WHERE, letter())
    lengths = [*posting.SHORTER, COMMENT_FLOOR]
    assert server.count("POST") == len(lengths)
    assert all(longer > shorter for longer, shorter in pairwise(lengths))


@pytest.mark.parametrize("typed", [name for name in samples.HOSTILE if "@" in name])
def test_field_75_nobody_is_notified_by_a_name_that_is_posted(server: FakeGitHub, api: GitHub, typed: str) -> None:
    verdict = samples.verdict(sweep=typed, headline=typed, next_step=typed, cells=(samples.cell(cell=typed),))
    post(api, WHERE, letter(verdict))
    page = markdown(server.of(BOT)[0])
    assert "@" in page.text
    assert "@" not in page.scanned
    assert page.links == []


# ---- when GitHub refuses, is away, or wants us to wait -------------------------------------------------------------


@pytest.mark.parametrize("verdict", [VERDICT, samples.broken()], ids=["pass", "regression"])
def test_field_31_two_502_are_waited_out_and_leave_one_comment(
    server: FakeGitHub, api: GitHub, slept: list[float], verdict: Verdict
) -> None:
    server.faults = [Fault("POST", 502, taken=True), Fault("POST", 502)]
    assert post(api, WHERE, letter(verdict)).state in ("created", "updated", "unchanged")
    assert len(server.of(BOT)) == 1
    assert server.count("POST") == 3
    assert 2 <= len([one for one in slept if 0 < one < 60]) <= 5


@pytest.mark.parametrize(
    ("fault", "waits"),
    [
        (Fault("POST", 403, SECONDARY, {"Retry-After": "7"}), 7.0),
        (Fault("POST", 429, SECONDARY, {"Retry-After": "11"}), 11.0),
        (Fault("POST", 403, SECONDARY), 60.0),
        (
            Fault("GET", 403, "API rate limit exceeded", {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1042"}),
            42.0,
        ),
    ],
    ids=["secondary", "429", "secondary that says no time", "primary"],
)
def test_field_31_a_rate_limit_is_waited_out_as_it_asks(
    server: FakeGitHub, api: GitHub, slept: list[float], fault: Fault, waits: float
) -> None:
    server.faults = [replace(fault)]
    assert post(api, WHERE, letter(), author=BOT).state == "created"
    assert waits in slept


def test_field_31_a_wait_that_is_too_long_is_not_begun(server: FakeGitHub, api: GitHub, slept: list[float]) -> None:
    server.faults = [Fault("POST", 403, SECONDARY, {"Retry-After": "3600"})]
    with pytest.raises(Unavailable, match="it asks to wait 3600 s"):
        post(api, WHERE, letter())
    assert slept == []
    assert server.count("POST") == 1


def test_field_31_a_host_that_stays_away_is_given_up(server: FakeGitHub, api: GitHub, slept: list[float]) -> None:
    server.faults = [Fault("*", 503, "unicorn") for _ in range(50)]
    with pytest.raises(Unavailable, match="503 unicorn"):
        post(api, WHERE, letter())
    assert len(slept) < 6
    server.faults.clear()
    with pytest.raises(Unavailable):
        post(GitHub("http://127.0.0.1:1", JOB_TOKEN, sleep=slept.append, clock=lambda: 0.0), WHERE, letter())


def test_field_31_a_403_names_the_permission_and_is_not_repeated(server: FakeGitHub, api: GitHub) -> None:
    wanted = {"X-Accepted-GitHub-Permissions": "issues=write; pull_requests=write"}
    server.faults = [Fault("POST", 403, "Resource not accessible by integration", wanted)]
    with pytest.raises(Refused, match=r"403 Resource not accessible.*issues=write; pull_requests=write.*fork"):
        post(api, WHERE, letter())
    assert server.count("POST") == 1


def test_a_pull_request_that_is_not_there_is_named(api: GitHub) -> None:
    with pytest.raises(Gone, match=r"pulls/8: 404.*--repo"):
        post(api, PullRequest(REPOSITORY, 8), letter())


@pytest.mark.parametrize("token", ["", "two words", "line\nend", "café"])
def test_a_token_that_is_none_is_refused_unseen(server: FakeGitHub, token: str) -> None:
    with pytest.raises(Refused, match="GITHUB_TOKEN") as refused:
        connect(server, [], token)
    assert not token or token not in str(refused.value)


def test_a_host_that_echoes_the_token_does_not_bring_it_into_an_error(server: FakeGitHub) -> None:
    with pytest.raises(Refused, match="401 Bad credentials") as refused:
        post(connect(server, [], "plain-secret-of-no-known-shape"), WHERE, letter())
    assert "plain-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://github.example", "ftp://x", "github.example", "https://u:p@h", "https://h/?x=1", ""]
)
def test_an_address_over_which_a_token_would_leak_is_refused(url: str) -> None:
    with pytest.raises(SpecError, match="--api-url") as refused:
        GitHub(url, JOB_TOKEN, sleep=lambda _: None, clock=lambda: 0.0)
    assert refused.value.exit_code == 2


def test_a_listing_that_goes_on_at_another_host_is_not_followed(server: FakeGitHub, api: GitHub) -> None:
    link = {"Link": '<http://127.0.0.1:9/next>; rel="next"'}
    server.faults = [Fault("GET", 200, headers=link, path="/comments")]
    with pytest.raises(PublishError):
        post(api, WHERE, letter())
    server.comments.append({"id": 1, "user": None, "body": "x", "html_url": ""})
    pages = api.pages(f"repos/{REPOSITORY}/issues/7/comments")
    next(pages)
    server.faults = [Fault("GET", 200, headers=link, path="/comments")]
    pages = api.pages(f"repos/{REPOSITORY}/issues/7/comments")
    next(pages)
    with pytest.raises(Refused, match="another host"):
        next(pages)


# ---- check runs --------------------------------------------------------------------------------------------------


def check(verdict: Verdict | None) -> Check:
    if verdict is None:
        return Check(REPOSITORY, NEW, "assay", SECOND, None, "pending", lambda _: "pending")
    text = letter(verdict).render
    return Check(REPOSITORY, NEW, "assay", SECOND, conclusion_of(verdict), verdict.outcome, text)


def test_a_check_is_opened_once_and_closed(server: FakeGitHub, api: GitHub) -> None:
    opened = [put(api, check(None)), put(api, check(None))]
    assert opened[0] == opened[1]
    assert [one["status"] for one in server.checks] == ["in_progress"]
    assert put(api, check(samples.broken())) == opened[0]
    (row,) = server.checks
    assert (row["status"], row["conclusion"], row["head_sha"]) == ("completed", "failure", NEW)
    put(api, check(None))
    assert row["status"] == "completed", "a late submitter opens it again"


def test_every_check_that_a_lost_answer_doubled_is_closed(server: FakeGitHub, api: GitHub) -> None:
    server.faults = [Fault("POST", 502, taken=True)]
    put(api, check(None))
    assert len(server.checks) == 2
    put(api, check(VERDICT))
    assert {one["conclusion"] for one in server.checks} == {"success"}


@pytest.mark.parametrize(
    ("outcome", "exit_code", "conclusion"),
    [
        ("PASS", 0, "success"),
        ("WAIVED", 0, "success"),
        ("TIME_WORSE", 0, "neutral"),
        ("MISSING", 0, "neutral"),
        ("VIOLATION", 1, "failure"),
        ("VACUOUS", 3, "failure"),
        ("NOT_COMPARABLE", 3, "failure"),
        ("CONTAMINATED", 3, "action_required"),
        ("MISSING", 3, "action_required"),
        ("INFRASTRUCTURE", 4, "action_required"),
        ("RETRACTED", 3, "action_required"),
    ],
)
def test_only_what_blocks_nothing_lets_a_required_check_pass(outcome: str, exit_code: int, conclusion: str) -> None:
    assert conclusion_of(samples.verdict(outcome=outcome, exit_code=exit_code)) == conclusion
