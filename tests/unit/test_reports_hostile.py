"""Names made of what hosts act upon, through every form: nothing pings, links, breaks, runs or is lost."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jobs.history import History, Point
from jobs.two_runs import FactRow, TwoRuns
from jobs.verdict import Verdict
from orchestrator.commands.shown import shown
from orchestrator.posting import code
from reports import history, two_runs
from reports.blocks import Inline, Name, Strong, Text, words
from reports.escape import NAME_LIMIT, html_code, html_text, markdown_code, markdown_text, named, visible
from reports.markdown import inline
from reports.publish import summary
from reports.render import render
from tests.unit import reports_samples as samples
from tests.unit.reports_parsing import Page, markdown

ACTIVE: Final = re.compile(
    r"@[\w-]|#\d|\bGH-\d|://|www\.|mailto:|javascript:"
    r"|\b(?=[a-f]*\d)[0-9a-f]{7,64}\b|:[a-z+][a-z0-9_+-]*:",
    re.IGNORECASE,
)
"""What GitHub makes something of in rendered text that stands in no code."""
FRAGMENTS: Final = (
    "|", "||", "\\", "\\|", "`", "``", "```", " ` ", "*", "**", "_", "__", "~~", "#", "# ", "- ", "1. ", "> ", "---",
    "===", "<", ">", "&", "&#35;1", "&lt;", "<!--", "-->", "<img src=x onerror=alert(1)>", "</script>", "<script>",
    "</details>", "]]>", "@", "@octocat", "@org/team", "a@example.com", "#1", "octo/repo#2", "GH-1", "gh-3", "JIRA-4",
    "fixes #1", "closes octo/repo#9", "Resolves: GH-7", "da39a3e", "da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "octo/repo@da39a3e", "www.example.com", "https://example.com/?a=1&b=2", "ftp://x", "mailto:a@b.c",
    "javascript:alert(1)", "[x](https://e.org)", "![x](https://e.org/x.png)", "[^1]", "[x]: https://e.org", "$x$", "$$",
    ":tada:", ":+1:", "12:30:45", "{{ 7 * 7 }}", "{% raw %}", "\n", "\r\n", "\t", "\0", "\x1b[2J",
    "\x1b]8;;https://e.org\x1b\\", "\x9b31m", "\x85", "\u2028", "\u2029", "\u202e", "\u2066", "\u200f", "\u061c",
    "\ufeff", "\ud800", "\ufffe", "\U000e0001", "\u200d", "\ufe0f", "\u0301", "\u05e9\u05dc\u05d5\u05dd",
    "\u540d\u524d", "\U0001f468\u200d\U0001f469", "\u00e9", " ", "  ", "\u00a0", "\u3000", "a", "0.5", "x" * 300,
)  # fmt: skip
WORDS = (
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=4)), min_size=1, max_size=8)
    .map("".join)
    .filter(lambda name: len(visible(name)) < NAME_LIMIT)  # what is longer is cut, and does not read as typed
)
CONTROLS: Final = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
WHOLE: Final = (
    "fixes #1 and GH-1, @octocat: www.example.com | `x\\| da39a3e \x1b[2J\u202e</script><img src=x onerror=f(1)>\n-",
    "`\\`|" * 40 + "@a" * 40,
)
few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def flat(text: str) -> str:
    """Runs of what a browser shows as one blank, as one."""
    return re.sub(r"[ \t\n\r\f\u00a0\u3000]+", " ", text).strip()


def typed(name: str) -> str:
    return flat(visible(name))


def is_inert(page: Page) -> None:
    """Nothing of a Markdown page links, pings or is markup that we did not write."""
    assert page.links == []
    found = ACTIVE.search(page.scanned)
    assert found is None, ascii(page.scanned[max(0, found.start() - 30) : found.end() + 30])
    assert page.unbalanced == []
    assert not {tag for tag, _ in page.tags} & {"script", "img", "a", "input", "h1", "hr", "del", "em"}


@few
@given(WORDS)
@example("    |")  # an indented line would be code
@example("  - @octocat")
def test_prose_reads_as_typed_and_is_inert(name: str) -> None:
    page = markdown(f"{markdown_text(name)}\n")
    is_inert(page)
    assert flat(page.text) == typed(name)
    assert {tag for tag, _ in page.tags} <= {"p", "code", "span"}


@few
@given(WORDS)
def test_prose_and_code_keep_their_places_in_a_table(name: str) -> None:
    text, name_ = markdown_text(name, in_table=True), markdown_code(name, in_table=True)
    page = markdown(f"| a | b | c | d |\n|---|---|---|---|\n| x | {text} | {name_} | y |\n")
    is_inert(page)
    (row,) = page.tables[0].rows
    assert len(row) == 4 and (row[0], row[3]) == ("x", "y")
    assert flat(row[1]) == typed(name)
    assert flat(row[2]) == flat(named(name))


@few
@given(st.lists(WORDS, min_size=2, max_size=3))
def test_pieces_that_stand_together_do_not_make_what_none_of_them_is(names: list[str]) -> None:
    pieces: list[Inline] = [Text(names[0]), Name(names[1]), *map(Strong, names[2:])]
    page = markdown(f"x {inline(words(*pieces))}\n")
    is_inert(page)


@few
@given(WORDS)
def test_summaries_and_names_in_raw_html_are_text(name: str) -> None:
    page = markdown(f"<details><summary>{html_text(name)} {html_code(name)}</summary>\n\nx\n\n</details>\n")
    is_inert(page)
    assert {tag for tag, _ in page.tags} <= {"details", "summary", "code", "p"}
    assert typed(name) in flat(page.text)


@few
@given(WORDS)
def test_a_line_of_a_terminal_or_a_job_s_summary_has_no_controls(name: str) -> None:
    assert not CONTROLS.search(shown(name)) and "\n" not in shown(name)
    page = markdown(f"assay: not posted: {code(name)}\n")
    is_inert(page)
    assert not CONTROLS.search(page.text)


# ---- whole forms -------------------------------------------------------------------------------------------------


def in_comment(name: str, verdict: Verdict) -> None:
    for limit in (65_536, 6_000, 800):
        page = markdown(render(verdict, "comment", limit=limit))
        is_inert(page)
        assert all(len(row) <= len(table.head) for table in page.tables for row in table.rows)
    assert typed(name) in flat(markdown(render(verdict, "comment")).text)


def in_html(name: str, verdict: Verdict) -> None:
    page = Page(render(verdict, "html"))
    assert page.unbalanced == [] and typed(name) in flat(page.text)
    assert not {"script", "img", "iframe", "object", "form", "base"} & {tag for tag, _ in page.tags}
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on") or key in {"src", "style"}]
    assert all(link.startswith("#") for link in page.links)


def in_text(name: str, verdict: Verdict) -> None:
    said = render(verdict, "text")
    assert not CONTROLS.search(said)
    assert re.sub(r"\s", "", typed(name)) in re.sub(r"\s", "", said)


def in_json(name: str, verdict: Verdict) -> None:
    said = render(verdict, "json")
    assert said.isascii() and said.isprintable(), "a terminal shows it too"
    assert json.loads(said)["sweep"] == name


def in_junit(name: str, verdict: Verdict) -> None:
    said = render(verdict, "junit")
    assert not CONTROLS.search(said)
    suite = ElementTree.fromstring(said.encode()).find("testsuite")
    assert suite is not None
    assert suite.get("name") == named(name)


@pytest.mark.parametrize("check", [in_comment, in_html, in_text, in_json, in_junit])
def test_field_77_a_hostile_name_is_inert_in_every_form(check: Callable[[str, Verdict], None]) -> None:
    for name in WHOLE:
        check(name, samples.hostile(name))


@pytest.mark.slow
@pytest.mark.parametrize("check", [in_comment, in_html, in_text, in_json, in_junit])
def test_any_name_is_inert_in_every_form(check: Callable[[str, Verdict], None]) -> None:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(WORDS.map(lambda name: name[:380]))
    def inert(name: str) -> None:
        check(name, samples.hostile(name))

    inert()


@few
@example(WHOLE[0])
@given(WORDS)
def test_two_runs_and_a_series_show_names_as_text(name: str) -> None:
    row = FactRow(name=name, left=name, right=f"{name}x", same=False)
    pair = TwoRuns(
        left=name, right=name, cannot=(name,), facts=(row,), settings=(row.model_copy(update={"same": True}),),
        tokens=(), exact=(), times=(),
    )  # fmt: skip
    point = Point(
        sweep=name, name=name, at=name, arm=name, cell=name, runs=1, value=1, low=1, high=1, engine=name, driver=name,
        harness=name, struck=name,
    )  # fmt: skip
    series = History(
        series=name, family=name, name=name, card=name, model_digest=name, prompt_digest=name,
        config={"effective": {name: name}}, points=(point,), breaks=((0, name),), changes=(), note=name,
    )  # fmt: skip
    for said in (two_runs.render(pair), history.render(series)):
        assert not CONTROLS.search(said)
        assert re.sub(r"\s", "", typed(name))[:40] in re.sub(r"\s", "", said)


def test_the_summary_of_a_job_is_as_inert_as_the_comment(tmp_path: Path) -> None:
    verdict = samples.hostile(WHOLE[0])
    summary.append(tmp_path / "step.md", lambda limit: render(verdict, "comment", limit=limit))
    page = markdown((tmp_path / "step.md").read_text())
    is_inert(page)
    assert html.unescape(typed(WHOLE[0])) in flat(page.text)
